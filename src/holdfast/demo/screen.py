"""What the demo shows while it runs: the counters, the three processes, and what happened to them.

On a terminal one picture that is drawn again several times a second; without one, a line for every event and, now and
then, a line of counters. Both show the same figures, and the last picture stays.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

REFRESH_PER_SECOND: Final = 5
LINE_SECONDS: Final = 3.0
"""Between two lines of counters, without a terminal."""
COLUMNS: Final = (
    "sent",
    "stored",
    "output",
    "dead letter",
    "duplicate",
    "late",
    "windows",
    "kills",
)
MISSING: Final = "–"
STYLES: Final = {"running": "green", "done": "dim", "killed": "bold red"}


@dataclass
class Process:
    """One of those that are killed."""

    name: str
    state: str = "not started"
    pid: int | None = None
    kills: int = 0


@dataclass
class Screen:
    """The picture; set its figures and it is shown."""

    console: Console
    title: str
    figures: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(COLUMNS, None))
    processes: dict[str, Process] = field(default_factory=dict)
    events: list[tuple[float, str, str]] = field(default_factory=list)
    """Seconds since the start, what happened, and its style."""

    def __post_init__(self) -> None:
        self._began_s = time.monotonic()
        self._live: Live | None = None
        self._line_due_s = 0.0

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=self.picture, console=self.console, refresh_per_second=REFRESH_PER_SECOND
            )
            self._live.start()
        else:
            self.console.print(self.title, highlight=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif error is None:
            self._print_counters()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def say(self, what: str, style: str = "") -> None:
        """Something happened."""
        self.events.append((self.elapsed_s, what, style))
        if self._live is None:
            self.console.print(
                f"{self.elapsed_s:6.1f} s  {what}", style=style, highlight=False, soft_wrap=True
            )

    def set(self, name: str, value: int | None) -> None:
        self.figures[name] = value

    def tick(self) -> None:
        """Called often: the counters as a line, when one is due."""
        if self._live is None and self.elapsed_s >= self._line_due_s:
            self._line_due_s = self.elapsed_s + LINE_SECONDS
            self._print_counters()

    def _print_counters(self) -> None:
        shown = ", ".join(f"{name} {number(self.figures[name])}" for name in COLUMNS)
        self.console.print(f"{self.elapsed_s:6.1f} s  {shown}", highlight=False, soft_wrap=True)

    def picture(self) -> RenderableType:
        return Group(
            Text(self.title, "italic"), self._counters(), self._processes(), Text(""), *self._events()
        )

    def _counters(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=0)
        for name in COLUMNS:
            table.add_column(name, justify="right", min_width=6, no_wrap=True)
        table.add_row(*(number(self.figures[name]) for name in COLUMNS), style="bold")
        return table

    def _processes(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for process in self.processes.values():
            style = STYLES.get(process.state, "yellow")
            table.add_row(
                Text("●", style),
                process.name,
                Text(process.state, style),
                f"pid {process.pid}" if process.pid is not None else "",
                "killed once"
                if process.kills == 1
                else f"killed {process.kills} times"
                if process.kills
                else "",
            )
        return table

    def _events(self) -> list[Text]:
        return [Text(f"{at_s:6.1f} s  {what}", style) for at_s, what, style in self.events]


def number(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"
