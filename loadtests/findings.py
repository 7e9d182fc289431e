"""What the parts of an experiment hand to its command: tables, figures with bars, plots."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtests.report import Figure, print_table


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a title; ``note`` explains what cannot be seen from the header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture: lines, or, with ``labels``, parts of a stacked bar for each label."""

    name: str  # of the file, without its ending
    title: str
    x_label: str
    y_label: str
    series: dict[str, tuple[tuple[float, ...], tuple[float, ...]]]
    labels: tuple[str, ...] = ()
    log_x: bool = False
    y_max: float | None = None


@dataclass(slots=True)
class Findings:
    """Everything that one part found out."""

    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)

    def show(self) -> None:
        """Print the tables."""
        for table in self.tables:
            print(f"\n{table.title}")
            print_table(table.header, table.rows)
            if table.note:
                print(f"({table.note})")
