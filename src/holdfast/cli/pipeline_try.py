"""`holdfast pipeline preview` and `test`: what a definition makes of records, written nowhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import Exit

from holdfast.cli.options import CommandGroup, OutputOption, examples, option
from holdfast.cli.output import Output, json_line, print_table
from holdfast.cli.pipeline_shared import BootstrapOption, FileArgument, load, located, require_extra
from holdfast.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.pipeline.operations.trying import Trial

app = CommandGroup()
CELL_MAX = 60


@app.command(
    epilog=examples(
        "holdfast pipeline preview orders.yaml",
        "holdfast pipeline preview orders.yaml --records 100 --output json",
    )
)
def preview(
    file: FileArgument,
    records: Annotated[int, option("N", "How many of the newest records, from all partitions.", min=1)] = 20,
    bootstrap_server: BootstrapOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what a pipeline makes of the newest records of its topics.

    Rows by sink and dead letters go to standard output. The command writes to no sink and no topic and commits no
    offset, so it may look at the source of a pipeline that runs. Steps with a state begin with none.
    """
    loaded = load(file)
    from holdfast.pipeline.operations.trying import newest, run_trial

    with located(loaded):
        bounds = newest(loaded.definition, records, bootstrap_server)
        if not any(end > bounds.start[place] for place, end in bounds.end.items()):
            raise UsageError("there is no record in the pipeline's topics yet: nothing to show")
        print("starting Spark", file=sys.stderr)
        trial = run_trial(loaded.definition, bounds=bounds, bootstrap=bootstrap_server)
    if output is Output.JSON:
        shown = {
            "routes": trial.summary.as_json()["routes"],
            "rows": trial.rows,
            "dead_letters": trial.dead_letters,
        }
        sys.stdout.write(json_line(_plain(shown)))
        return
    _print_trial(trial)


def _print_trial(trial: Trial) -> None:
    from holdfast.cli.pipeline_output import route_texts

    routes = ", ".join(f"{name} {count:,}" for name, count in route_texts(trial.summary.routes))
    print(f"{trial.summary.intake.records:,} records: {routes}")
    for name, rows in {**trial.rows, "dead letters": trial.dead_letters}.items():
        if rows:
            print()
            columns = list(rows[0])
            print_table(columns, [[_cell(row[column]) for column in columns] for row in rows], title=name)


def _cell(value: Any) -> str:
    text = "null" if value is None else str(_plain(value))
    return text if len(text) <= CELL_MAX else f"{text[: CELL_MAX - 1]}…"


def _plain(value: Any) -> Any:
    """As JSON and people can read it."""
    from holdfast.testing.pipelines import comparable

    found = comparable(value)
    if isinstance(found, dict):
        return {str(name): _plain(each) for name, each in found.items()}
    if isinstance(found, list):
        return [_plain(each) for each in found]
    return found if isinstance(found, str | int | float | bool | None) else str(found)


@app.command(
    "test",
    epilog=examples(
        "holdfast pipeline test orders.test.yaml",
        "holdfast pipeline test tests/*.test.yaml --case 'a good order'",
    ),
)
def run_cases(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="Files of cases, in YAML.")],
    case: Annotated[str | None, option("TEXT", "Only cases whose name has this text.")] = None,
) -> None:
    """Run the cases of a pipeline: records in; rows by sink and dead letters out.

    A file names the pipeline and its cases, each with `records` and what to `expect`. The cases need neither Kafka nor
    sinks, and share one Spark. Exit code 1 if a case differs.
    """
    require_extra()
    from holdfast.testing.pipelines import PipelineTester, load_cases

    loaded = [(file, load_cases(file)) for file in files]
    chosen = [
        (file, cases.definition, each)
        for file, cases in loaded
        for each in cases.cases
        if case is None or case in each.name
    ]
    if not chosen:
        raise UsageError(f"no case has {case!r} in its name" if case else "there is no case in the files")
    from holdfast.testing.pipelines import differences

    print("starting Spark", file=sys.stderr)
    failed = 0
    with PipelineTester() as tester:
        for file, definition, each in chosen:
            began = time.monotonic()
            found = list(differences(each, tester.run(definition, each.records)))
            failed += bool(found)
            took_ms = round((time.monotonic() - began) * 1000)
            print(f"{'FAILED' if found else 'passed'}  {each.name}  ({file}, {took_ms:,} ms)", flush=True)
            _print_lines(found)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    if failed:
        raise Exit(ExitCode.FINDINGS)


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"        {line}")
