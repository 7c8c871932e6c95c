"""What `holdfast pipeline` prints: explanations and standings, for people.

What `pipeline run` shows while it runs, and what it ends with.

On a terminal: one live table of rows, speed, lag, routes and the last batch's time. Without one: a plain line per
batch, so that a log stays readable. Both are fed by the engine's events and know nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final

from holdfast.cli.exits import complain
from holdfast.cli.output import json_line, print_json, print_table
from holdfast.pipeline.definition.explaining import Explanation, Hop, Strength
from holdfast.pipeline.engine.progress import (
    BatchDone,
    Ended,
    Event,
    Failed,
    Preparing,
    Retrying,
    Started,
    Stopping,
    Summary,
    Waiting,
    Warned,
    add_counts,
    add_routes,
)
from holdfast.pipeline.ledger import Routes
from holdfast.supervisor import Supervisor

if TYPE_CHECKING:
    from holdfast.pipeline.engine.status import SinkStatus, StateStatus, Status

COLOURS: Final = {
    Strength.MAY_LOSE: "red",
    Strength.SOME_LEFT_OUT: "yellow",
    Strength.CONDITIONAL: "yellow",
    Strength.FIELDS_LEFT_OUT: "yellow",
    Strength.EXACTLY_ONCE: "green",
}


def print_explanation(explanation: Explanation) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(Text.assemble((f"pipeline {explanation.pipeline}", "bold")))
    console.print(Text(f"fingerprint {explanation.fingerprint[:16]}", "dim"))
    console.print()
    for hop in explanation.before:
        _print_hop(console, hop, "  ", "  │ ")
        console.print("  │")
    for place, hop in enumerate(explanation.sinks, 1):
        is_last = place == len(explanation.sinks)
        _print_hop(console, hop, "  └ " if is_last else "  ├ ", "    " if is_last else "  │ ")
    console.print()
    if not any(hop.kind == "topic" for hop in explanation.before):
        console.print("How durable the topics are is not known here: --ask-broker asks.", style="dim")
    weakest = explanation.weakest
    if weakest.strength is Strength.EXACTLY_ONCE:
        console.print("Every hop is exactly once.", style="green")
        return
    console.print(
        Text.assemble("weakest: ", (weakest.name, "bold"), f", {weakest.strength.words}: {weakest.why}")
    )
    console.print(f"raise it by: {weakest.remedy}")


def _print_hop(console: Any, hop: Hop, first: str, rest: str) -> None:
    from rich.text import Text

    kind = "" if hop.name == hop.kind or hop.name.startswith(hop.kind) else f" ({hop.kind})"
    console.print(Text.assemble(first, (hop.name, "bold"), (kind, "dim"), f": {hop.what}"))
    console.print(Text.assemble(rest, (hop.strength.words, COLOURS[hop.strength]), f": {hop.why}"))
    if hop.remedy and hop.strength is not Strength.EXACTLY_ONCE:
        console.print(Text.assemble(rest, ("raise by: ", "dim"), hop.remedy))


def print_status(status: Status) -> None:
    print(f"pipeline {status.pipeline}")
    state = f"running as process {status.running_pid}" if status.running_pid else "not running"
    print(f"{state}; home {status.home}; lag tools see the group {status.group}")
    print()
    rows = [_sink_row(sink) for sink in status.sinks]
    print_table(("SINK", "KIND", "ENTRY", "LAG", "ROWS", "OF A BATCH WITH"), rows)
    places = [
        (sink.name, f"{place.topic}-{place.partition}", f"{at.offset:,}")
        for sink in status.sinks
        if sink.entry is not None
        for place, at in sorted(sink.entry.positions.at.items())
    ]
    if places:
        print()
        print_table(("SINK", "PARTITION", "STANDS AT"), places)
    if status.state is not None:
        _print_state(status.state)
    for sink in status.sinks:
        if sink.problem:
            named = sink.problem.startswith("sink ")
            complain(sink.problem if named else f"sink {sink.name!r}: {sink.problem}")
        elif not sink.is_of_this_definition:
            complain(f"sink {sink.name!r}: its last batch was made by another version of the definition")
    if status.source_problem:
        complain(f"source: {status.source_problem}")


def _print_state(state: StateStatus) -> None:
    print()
    if state.problem:
        complain(f"state: {state.problem}")
        return
    if state.now is None:
        print("state: none yet")
        return
    held = f", held back by {state.waits_for}" if state.waits_for else ""
    print(f"state: version {state.now.number:,}, watermark {watermark_text(state.now.watermark_ms)}{held}")
    rows = [(name, f"{rows:,}", f"{size:,}") for name, (rows, size) in sorted(state.now.steps.items())]
    print_table(("STEP", "ROWS", "BYTES"), rows)


def _sink_row(sink: SinkStatus) -> tuple[str, ...]:
    lag = "?" if sink.lag is None else f"{sink.lag:,}"
    if sink.problem:
        return sink.name, sink.kind, "?", "?", "?", "cannot be read"
    if sink.entry is None:
        return sink.name, sink.kind, "-", lag if sink.lag is not None else "-", "-", "nothing yet"
    routes = ", ".join(f"{name} {count:,}" for name, count in route_texts(sink.entry.routes))
    return sink.name, sink.kind, f"{sink.entry.number:,}", lag, f"{sink.entry.rows:,}", routes


def print_compacted(done: Iterable[Any], *, as_json: bool) -> None:
    rows = list(done)
    if as_json:
        print_json([each.as_json() for each in rows])
    elif not rows:
        print("nothing to merge")
    else:
        for each in rows:
            print(each)


SPEED_BATCHES: Final = 10
"""The speed shown is that of the last few batches."""


class Figures:
    """What was seen so far."""

    def __init__(self) -> None:
        self.pipeline = ""
        self.state = "starting Spark"
        self.batches = 0
        self.records = 0
        self.routes = Routes()
        self.warned: dict[str, int] = {}
        self.rows_by_sink: dict[str, int] = {}
        self.lag = 0
        self.last: BatchDone | None = None
        self._recent: list[tuple[int, int]] = []

    def take(self, event: Event) -> None:
        match event:
            case Preparing():
                self.state = event.what
            case Started():
                self.pipeline, self.lag, self.state = event.pipeline, event.lag, "running"
                self.rows_by_sink = dict.fromkeys(event.sinks, 0)
            case BatchDone():
                self.state = "running"
                self.batches += 1
                self.records += event.intake.records
                self.routes = add_routes(self.routes, event.routes)
                self.warned = add_counts(self.warned, event.warned)
                self.rows_by_sink = add_counts(self.rows_by_sink, event.rows_by_sink)
                self.lag = event.lag
                self.last = event
                self._recent = [*self._recent, (event.intake.records, event.duration_ms)][-SPEED_BATCHES:]
            case Waiting():
                self.state, self.lag = "waiting for records", event.lag
            case Retrying():
                self.state = f"trying again in {event.in_ms / 1000:.0f} s: {event.reason}"
            case Stopping():
                self.state = event.why

    @property
    def rows_per_s(self) -> float:
        rows = sum(records for records, _ in self._recent)
        duration_ms = sum(duration for _, duration in self._recent)
        return 1000 * rows / duration_ms if duration_ms else 0.0


def route_texts(routes: Routes) -> list[tuple[str, int]]:
    """Every route that has records, by the name people know it by; `main` always."""
    return [
        ("main", routes.main),
        *((f"dead letter: {reason}", count) for reason, count in routes.dead_letter.items() if count),
        *((f"filtered: {step}", count) for step, count in routes.filtered.items() if count),
        *((name, count) for name, count in (("duplicate", routes.duplicate), ("late", routes.late)) if count),
    ]


def batch_line(event: BatchDone) -> str:
    """One batch as a line of a log."""
    routes = ", ".join(f"{name} {count:,}" for name, count in route_texts(event.routes))
    phases = " ".join(f"{phase} {took}" for phase, took in event.times_ms.items())
    of_state = "".join(f"; {text}" for text in state_texts(event))
    speed = 1000 * event.intake.records / event.duration_ms if event.duration_ms else 0
    return (
        f"batch {event.number}: {event.intake.records:,} records in {event.duration_ms:,} ms "
        f"({speed:,.0f}/s), {routes}{of_state}; lag {event.lag:,} [{phases}]"
    )


def state_texts(event: BatchDone) -> list[str]:
    """What stateful steps did, and how far event time has come."""
    if event.state is None:
        return []
    counted = [
        f"{step}: " + ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
        for step, counts in event.step_counts.items()
        if any(counts.values())
    ]
    return [*counted, f"watermark {watermark_text(event.state.watermark_ms)}, state {event.state.bytes:,} B"]


def watermark_text(watermark_ms: int | None) -> str:
    """In UTC, to the second."""
    if watermark_ms is None:
        return "none yet"
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(watermark_ms // 1000))
    except (OverflowError, ValueError, OSError):
        return f"{watermark_ms:,} ms"


class PlainProgress:
    """A line per batch, and one when the state changes."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._waiting = False

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def __call__(self, event: Event) -> None:
        line = self._line(event)
        self._waiting = isinstance(event, Waiting)
        if line:
            print(line, file=self._stream, flush=True)

    def _line(self, event: Event) -> str:
        match event:
            case Preparing():
                return event.what
            case Started():
                sinks = ", ".join(event.sinks)
                return f"pipeline {event.pipeline}: {event.lag:,} offsets to read, to {sinks}"
            case BatchDone():
                return batch_line(event)
            case Waiting():
                return "" if self._waiting else "waiting for records"
            case Retrying():
                return f"trying again in {event.in_ms / 1000:.1f} s: {event.reason}"
            case Stopping():
                return event.why
            case Warned():
                return f"warning: {event.message}"
            case Failed() | Ended():
                return ""  # the command says it


class JsonProgress(PlainProgress):
    """Each batch as one JSON document per line on standard output."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, BatchDone):
            sys.stdout.write(json_line(event.as_json()))
            sys.stdout.flush()
        else:
            super().__call__(event)


class LiveProgress:
    """A table that is drawn again and again in place."""

    def __init__(self, name: str, console: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live

        self.figures = Figures()
        self.figures.pipeline = name
        self._clock = clock
        self._began = clock()
        self._console = console or Console(stderr=True)
        self._live = Live(
            get_renderable=self.table, console=self._console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> LiveProgress:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def __call__(self, event: Event) -> None:
        self.figures.take(event)
        if isinstance(event, Warned):
            self._console.print(f"warning: {event.message}", style="yellow", markup=False, highlight=False)

    def table(self) -> Any:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        seen = self.figures
        elapsed_s = self._clock() - self._began
        table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_column(style="dim")
        table.add_row(seen.pipeline, f"{elapsed_s:,.0f} s", Text(seen.state))
        table.add_row("records", f"{seen.records:,}", f"{seen.rows_per_s:,.0f}/s, {_batches(seen.batches)}")
        table.add_row("lag", f"{seen.lag:,}", "")
        for name, count in route_texts(seen.routes):
            table.add_row(Text(name), f"{count:,}", _share(count, seen.routes.total))
        for rule, count in seen.warned.items():
            table.add_row(Text(f"warned: {rule}"), f"{count:,}", "")
        if seen.last is not None:
            phases = " ".join(f"{phase} {took}" for phase, took in seen.last.times_ms.items())
            table.add_row("last batch", f"{seen.last.duration_ms:,} ms", phases)
            for text in state_texts(seen.last):
                table.add_row("", "", Text(text))
        return table


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count:,} batches"


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.1f} %" if total else ""


def progress_for(name: str, *, as_json: bool) -> PlainProgress | LiveProgress:
    if as_json:
        return JsonProgress()
    return LiveProgress(name) if sys.stderr.isatty() else PlainProgress()


def supervised(supervisor: Supervisor) -> Callable[[Event], None]:
    """Tell whoever supervises this process that the pipeline runs, and that it gets on, with each event.

    How long a batch may take is said by the unit's watchdog, not here.
    """

    def tell(event: Event) -> None:
        if isinstance(event, Started):
            supervisor.ready(f"running, {event.lag:,} behind")
        elif isinstance(event, BatchDone):
            supervisor.alive(f"batch of {event.intake.records:,} records done, {event.lag:,} behind")
        elif isinstance(event, Retrying):
            supervisor.alive(f"trying again: {event.reason}")
        elif isinstance(event, Stopping):
            supervisor.stopping()
        else:
            supervisor.alive()

    return tell


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """What a run did, as lines of two cells."""
    intake = summary.intake
    seconds = summary.duration_ms / 1000
    speed = f", {intake.records / seconds:,.0f}/s" if seconds else ""
    rows = [
        ("batches", f"{summary.batches:,}"),
        ("records", f"{intake.records:,}"),
        ("time", f"{seconds:,.1f} s{speed}"),
    ]
    not_records = {"markers": intake.control, "aborted": intake.aborted, "compacted away": intake.missing}
    rows += [(name, f"{count:,}") for name, count in not_records.items() if count]
    rows += [(f"→ {name}", f"{count:,}") for name, count in route_texts(summary.routes)]
    rows += [(f"warned: {rule}", f"{count:,}") for rule, count in summary.warned.items() if count]
    rows += [(f"written to {sink}", f"{count:,}") for sink, count in _sorted(summary.rows_by_sink)]
    rows.append(("lag", f"{summary.lag:,}"))
    return rows


def _sorted(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items())
