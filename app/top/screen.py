"""The terminal program: the fleet of one model, and one replica opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from app.top import lines
from app.top.server import FleetView, History, Server, Trouble

MAX_POINTS = 600
_OTHER_COLUMNS = 64  # of the table, beside the bar, with their padding

SortOrder = tuple[str, Callable[[Mapping[str, Any]], Any]]


def _figure(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda replica: -replica.get(name, -1)


COLUMNS: tuple[tuple[str, int], ...] = (
    ("Replica", 10),
    ("KV blocks", 0),
    ("Demand", 7),
    ("Run", 4),
    ("Wait", 4),
    ("Tok/s", 6),
    ("Hits", 4),
    ("Step", 7),
    ("Preem", 5),
)
"""Headings and widths; the bar takes what is left."""

ORDERS: tuple[SortOrder, ...] = (
    ("Replica", lambda replica: lines.short_name(replica["name"])),
    ("Demand", lambda replica: -replica.get("demand", -1) / max(replica.get("pool", 1), 1)),
    ("Run", _figure("running")),
    ("Wait", lambda replica: -sum(replica.get(name, 0) for name in ("waiting", "preempted", "swapped"))),
    ("Tok/s", _figure("tokens_s")),
    ("Hits", lambda replica: -(replica.get("hit_share") or 0.0)),
    ("Step", _figure("step_s")),
    ("Preem", _figure("preemptions")),
)
"""By name, or the largest first; replicas that are equal by name."""


class Top(App[None]):
    """Shows what ``server`` says; one model at a time."""

    TITLE = "Quire"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static { height: auto; }
    #status { text-style: bold; }
    .trouble { text-style: reverse bold; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort"),
        Binding("enter", "open", "Open replica", priority=True),
        Binding("p", "prefixes", "Shared prefixes"),
        Binding("m", "model", "Next model"),
    ]

    def __init__(self, server: Server) -> None:
        super().__init__(ansi_color=True)  # the terminal's own colors, on its own background
        self.server = server
        self.models: dict[str, Any] = {}
        self.model = ""
        self.order = 0
        self.trouble = f"asking {server.url}"
        self._tokens: dict[str, list[float | None]] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="status", markup=False)
        yield Static(id="summary", markup=False)
        yield DataTable(id="replicas", cursor_type="row", cell_padding=1)
        yield Static(id="below", markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.redraw()
        self.run_worker(self._follow(), name="events")

    def on_resize(self) -> None:
        self.redraw()

    async def _follow(self) -> None:
        async for event in self.server.events():
            match event:
                case Trouble(text):
                    self.trouble = text
                case History(models):
                    for name, points in models.items():
                        if len(points) > len(self._tokens.get(name, ())):
                            self._tokens[name] = [point["tokens_s"] for point in points]
                case FleetView(_, models):
                    self._take(models)
            self.redraw()

    def _take(self, models: dict[str, Any]) -> None:
        self.models = models
        self.trouble = "" if models else "this key may not see any of the models here"
        if self.model not in models:
            self.model = next(iter(models), "")
        for name, shown in models.items():
            tokens = self._tokens.setdefault(name, [])
            tokens.append(shown["fleet"]["tokens_s"])
            del tokens[:-MAX_POINTS]

    # ---- what is seen

    @property
    def shown(self) -> dict[str, Any] | None:
        """The model that is looked at, as it was last."""
        return self.models.get(self.model)

    def redraw(self) -> None:
        """Redraw everything."""
        if not self.screen_stack:  # it ends
            return
        base = self.screen_stack[0]
        widgets = base.query(Static)
        if len(widgets) < 3 or not base.query(DataTable):  # not yet, or not any more
            return
        shown = self.shown
        status, summary, below = widgets[0], widgets[1], widgets[2]
        status.set_class(bool(self.trouble), "trouble")
        status.update(self._status(shown))
        summary.update("" if shown is None else "\n".join(self._summary(shown)))
        below.update("" if shown is None else Text("\n").join([*map(Text, lines.below(shown)), lines.legend()]))
        self._draw_table(base.query_one(DataTable), [] if shown is None else shown["replicas"])
        if isinstance(self.screen, DetailScreen):
            self.screen.redraw()

    def _status(self, shown: Mapping[str, Any] | None) -> str:
        if self.trouble:
            old = "" if shown is None else " (the figures below are old)"
            return f"{self.trouble}{old}"
        assert shown is not None, "or there is trouble"
        ingresses = shown["fleet"]["ingresses"]
        return f"Quire {self.server.url}: live, {ingresses} ingress{'' if ingresses == 1 else 'es'}"

    def _summary(self, shown: Mapping[str, Any]) -> list[str]:
        found = lines.summary(shown)
        found[0] += f"   {lines.spark(self._tokens[self.model], max(self.size.width - len(found[0]) - 4, 0))}"
        names = list(self.models)
        if len(names) > 1:
            others = "; ".join(_of_model(name, self.models[name]) for name in names if name != self.model)
            found.insert(
                0, f"Model        {self.model} ({names.index(self.model) + 1} of {len(names)})   {others}"
            )
        return found

    def _draw_table(self, table: DataTable[Any], replicas: list[dict[str, Any]]) -> None:
        name, key = ORDERS[self.order]
        replicas = sorted(replicas, key=lambda replica: (key(replica), replica["name"]))
        bar = max(self.size.width - _OTHER_COLUMNS, 8)
        here = self._selected(table)
        top = table.scroll_offset.y
        table.clear(columns=True)
        for heading, width in COLUMNS:
            marked = Text(f"{heading}▾" if heading == name else heading)
            marked.justify = "left" if heading in ("Replica", "KV blocks") else "right"
            table.add_column(marked, width=width or bar, key=heading)
        for replica in replicas:
            table.add_row(*lines.replica_cells(replica, bar), key=replica["name"])
        names = [replica["name"] for replica in replicas]
        if here in names:
            table.move_cursor(row=names.index(here), scroll=False)
            table.scroll_to(y=top, animate=False)

    def _selected(self, table: DataTable[Any]) -> str | None:
        if not table.row_count:
            return None
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    # ---- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """What is about the table is not there while something is open over it."""
        opened = isinstance(self.screen, DetailScreen)
        return action not in ("sort", "model", "open", "prefixes") or not opened

    def action_sort(self) -> None:
        """Order the replicas by the next figure."""
        self.order = (self.order + 1) % len(ORDERS)
        self.redraw()

    def action_model(self) -> None:
        """Look at the next model."""
        names = list(self.models)
        if names:
            self.model = names[(names.index(self.model) + 1) % len(names)]
            self.redraw()

    def action_open(self) -> None:
        """Look at the replica under the cursor."""
        replica = self._selected(self.screen_stack[0].query_one(DataTable))
        if replica is not None:
            self.push_screen(ReplicaScreen(self.model, replica))

    def action_prefixes(self) -> None:
        """Look at the shared prefixes of the model."""
        if self.model:
            self.push_screen(PrefixScreen(self.model))


def _of_model(name: str, shown: Mapping[str, Any]) -> str:
    scaling = shown["scaling"]
    target = "" if scaling is None else f" of {scaling['target']}"
    tokens = lines.number(shown["fleet"]["tokens_s"])
    return f"{name}: {len(shown['replicas'])}{target} replicas, {tokens} tokens/s"


class DetailScreen(Screen[None]):
    """What the last report says of one thing, and below it what the server says when asked."""

    app: Top
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "app.pop_screen", "Back"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model
        self._asking = False

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="reported", markup=False)
            yield Static(id="answer", markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.redraw()

    def redraw(self) -> None:
        """Redraw what is reported, and ask; without an answer, what the server said last stays, called old."""
        if not self.query("#reported"):
            return
        text, exists = self._reported()
        if self.app.trouble:
            text.insert(1, f"{self.app.trouble} (the figures below are old)")
        self.query_one("#reported", Static).update("\n".join(text))
        if exists and not self._asking and not self.app.trouble:
            self._asking = True
            self.run_worker(self._show_answer(), name="answer")

    def _reported(self) -> tuple[list[str], bool]:
        """The lines of the last report, and whether there is anything to ask about."""
        raise NotImplementedError

    async def _ask(self) -> str | Text:
        """The server's answer."""
        raise NotImplementedError

    async def _show_answer(self) -> None:
        try:
            text = await self._ask()
        finally:
            self._asking = False
        for each in self.query("#answer").results(Static):  # it may have been closed meanwhile
            each.update(text)


class ReplicaScreen(DetailScreen):
    """One replica: its figures, and what each of its blocks holds."""

    def __init__(self, model: str, replica: str) -> None:
        super().__init__(model)
        self.replica = replica

    def _reported(self) -> tuple[list[str], bool]:
        shown = self.app.models.get(self.model)
        replicas = [] if shown is None else shown["replicas"]
        found = next((each for each in replicas if each["name"] == self.replica), None)
        text = [f"Replica {lines.short_name(self.replica)} of {self.model}", ""]
        text += ["It is gone."] if found is None else lines.replica_lines(found)
        return text, found is not None

    async def _ask(self) -> str | Text:
        found = await self.app.server.blocks(self.model, self.replica)
        if isinstance(found, str):
            return f"\nWhat each block holds: {found}"
        return Text("\n") + lines.block_map_text(found)


class PrefixScreen(DetailScreen):
    """Which prompts of a model begin alike, where they went, and why."""

    def _reported(self) -> tuple[list[str], bool]:
        return [f"Shared prefixes of {self.model}, in the last minute", ""], True

    async def _ask(self) -> str | Text:
        found = await self.app.server.prefixes(self.model)
        return (
            f"They cannot be seen: {found}" if isinstance(found, str) else "\n".join(lines.prefix_lines(found))
        )
