"""What the parts of an experiment hand to its command: tables, figures with bars."""

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


@dataclass(slots=True)
class Findings:
    """Everything that one part found out."""

    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def show(self) -> None:
        """Print the tables."""
        for table in self.tables:
            print(f"\n{table.title}")
            print_table(table.header, table.rows)
            if table.note:
                print(f"({table.note})")
