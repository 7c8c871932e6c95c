"""What `holdfast pipeline` prints: explanations and standings, for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from holdfast.cli.output import print_json, print_table
from holdfast.pipeline.definition.explaining import Explanation, Hop, Strength

if TYPE_CHECKING:
    from holdfast.pipeline.engine.status import Status

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
    print(f"{state}; home {status.home}")
    print()
    rows = []
    for sink in status.sinks:
        entry = sink.entry
        if sink.problem:
            rows.append((sink.name, sink.kind, "-", "-", sink.problem))
        elif entry is None:
            rows.append((sink.name, sink.kind, "-", "-", "nothing written yet"))
        else:
            routes = entry.routes
            dead, filtered = sum(routes.dead_letter.values()), sum(routes.filtered.values())
            last = f"main {routes.main:,}, dead letter {dead:,}, filtered {filtered:,}"
            rows.append((sink.name, sink.kind, f"{entry.number:,}", f"{entry.rows:,}", last))
    print_table(("SINK", "KIND", "ENTRY", "ROWS OF IT", "LAST BATCH"), rows)
    print()
    if status.lag is None:
        print(f"lag: not known ({status.lag_problem})", file=sys.stderr)
        return
    print_table(("PARTITION", "LAG"), [(place, f"{lag:,}") for place, lag in sorted(status.lag.items())])


def print_compacted(done: Iterable[Any], *, as_json: bool) -> None:
    rows = list(done)
    if as_json:
        print_json([each.as_json() for each in rows])
    elif not rows:
        print("nothing to merge")
    else:
        for each in rows:
            print(each)
