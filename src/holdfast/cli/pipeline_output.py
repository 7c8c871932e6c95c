"""What `holdfast pipeline` prints: explanations and standings, for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from holdfast.cli.exits import complain
from holdfast.cli.output import print_json, print_table
from holdfast.cli.pipeline_progress import route_texts, watermark_text
from holdfast.pipeline.definition.explaining import Explanation, Hop, Strength

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
