"""`holdfast check`: what a history of messages says was lost, twice, out of order or seen too early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import Exit

from holdfast.cli.options import CommandGroup, OutputOption, examples
from holdfast.cli.output import Output, print_json, print_table
from holdfast.errors import ExitCode

if TYPE_CHECKING:
    from holdfast.lab.checking import Judgement

app = CommandGroup()
REASONS_MAX = 20
"""So many violations of a kind are told in a table; JSON has them all."""


@app.command(
    epilog=examples("holdfast check run/unsafe.jsonl", "holdfast check run/safe.jsonl --output json")
)
def check(
    history: Annotated[str, typer.Argument(metavar="HISTORY", help="The file.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Judge a history of messages: what was lost, duplicated, reordered, skipped, or read though aborted.

    The history is a file of JSON lines as the lab writes it. Exit codes: 0 clean, 1 violations, 2 no history, 4
    void (a fault that did not fire, too few successes) or clean as far as it could be read.
    """
    from holdfast.lab.checking import judge
    from holdfast.lab.history import read_history

    judgement = judge(read_history(history))
    if output is Output.JSON:
        print_json(judgement.as_json())
    else:
        print_judgement(judgement)
    raise Exit(code_of(judgement))


def code_of(judgement: Judgement) -> ExitCode:
    return {"clean": ExitCode.FINE, "violated": ExitCode.FINDINGS}.get(
        judgement.verdict, ExitCode.INCONCLUSIVE
    )


def print_judgement(judgement: Judgement) -> None:
    from holdfast.lab.checking import RULES

    print_table(("messages", "number"), judgement.counts.items())
    print()
    print_table(("violation", "number"), [(kind, judgement.count(kind)) for kind in RULES])
    for kind in RULES:
        found = [each for each in judgement.violations if each.kind == kind]
        for each in found[:REASONS_MAX]:
            print(f"{kind}: {each.id}: {each.why}")
        if len(found) > REASONS_MAX:
            print(f"{kind}: and {len(found) - REASONS_MAX} more (--output json tells all)")
    for problem in judgement.partial:
        print(f"not read: {problem}")
    for reason in judgement.void:
        print(f"void: {reason}")
    print(f"verdict: {judgement.verdict}{' (in part)' if judgement.partial else ''}")
