"""`holdfast pipeline state`: what the steps of a pipeline remember, in numbers and as rows. Needs no Spark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

from holdfast.cli.options import CommandGroup, OutputOption, examples, option
from holdfast.cli.output import Output, print_json, print_table
from holdfast.cli.pipeline_shared import FileArgument, load, located
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.pipeline.definition.loading import Loaded
    from holdfast.pipeline.state.inspecting import Growth, StepSize
    from holdfast.pipeline.state.store import StateStore

app = CommandGroup(
    no_args_is_help=True,
    help="The state that the steps of a pipeline keep between micro-batches: its size and its rows.",
)


@app.command(
    epilog=examples(
        "holdfast pipeline state show orders.yaml", "holdfast pipeline state show orders.yaml --output json"
    )
)
def show(file: FileArgument, output: OutputOption = Output.TABLE) -> None:
    """Show the size of each step's state, how it grows, and the watermark.

    The pipeline may be running.
    """
    loaded = load(file)
    from holdfast.pipeline.state.inspecting import step_sizes

    with located(loaded):
        store = _open(loaded)
        newest = store.newest()
        steps = step_sizes(store, newest) if newest else []
    watermark_ms = newest.watermark.get("watermark_ms") if newest else None
    if output is Output.JSON:
        print_json(
            {
                "pipeline": loaded.definition.name,
                "path": store.path,
                "version": newest.number if newest else None,
                "batch_time_ms": newest.batch_time_ms if newest else None,
                "versions": [version.number for version in store.versions()],
                "watermark_ms": watermark_ms,
                "positions": newest.positions.as_json() if newest else {},
                "bytes": sum(step.state.bytes for step in steps),
                "steps": [step.as_json() for step in steps],
            }
        )
        return
    if newest is None:
        print(f"pipeline {loaded.definition.name} has no state in {store.path}")
        return
    kept = ", ".join(str(version.number) for version in store.versions())
    print(f"pipeline {loaded.definition.name}: version {newest.number} of its state, in {store.path}")
    print(
        f"made by the batch of {_time(newest.batch_time_ms)}; watermark {_time(watermark_ms)}; kept: {kept}"
    )
    print()
    columns = ("STEP", "ROWS", "BYTES", "SEGMENTS", "FIRST ENDS", "LAST ENDS", "GROWTH")
    print_table(columns, [_row(step) for step in steps])


@app.command(
    epilog=examples(
        "holdfast pipeline state export orders.yaml --step totals --to totals.parquet",
        "holdfast pipeline state export orders.yaml --step totals --to totals.csv --version 41",
    )
)
def export(
    file: FileArgument,
    step: Annotated[str, option("NAME", "The step.")],
    to: Annotated[str, option("FILE", "A new file, .parquet or .csv; none is overwritten.")],
    version: Annotated[
        int | None, option("N", "The version of the state (default: the newest; `show` lists those kept).")
    ] = None,
) -> None:
    """Write the state of a step to a new file: Parquet or CSV.

    CSV has bytes as base64 and nested values as JSON. The rows are as stored: a key may have several, which the
    step adds up when it reads them, and rows that have expired (_until, in milliseconds) may still be there.
    """
    loaded = load(file)
    from holdfast.pipeline.definition.errors import nearest
    from holdfast.pipeline.state.inspecting import chosen_version, export_rows

    with located(loaded):
        store = _open(loaded)
        chosen = chosen_version(store, version)
        if step not in chosen.steps:
            known = sorted(chosen.steps)
            hint = nearest(step, known) or f"; steps with one are {', '.join(known) or 'none'}"
            raise UsageError(f"version {chosen.number} has no state of a step {step!r}{hint}")
        count = export_rows(store, chosen.steps[step].segments, to)
    print(f"{to}: {count:,} rows of {step!r}, version {chosen.number}")


def _open(loaded: Loaded) -> StateStore:
    from holdfast.pipeline.definition.naming import home_of
    from holdfast.pipeline.definition.secrets import expand_definition
    from holdfast.pipeline.state.store import StateStore, state_path

    definition, _ = expand_definition(loaded.definition)
    return StateStore(state_path(home_of(definition)), is_writer=False)


def _row(step: StepSize) -> tuple[str, ...]:
    return (
        step.name,
        f"{step.state.rows:,}",
        f"{step.state.bytes:,}",
        str(len(step.state.segments)),
        _time(step.oldest_until_ms, "-"),
        _time(step.newest_until_ms, "-"),
        _grown(step.growth),
    )


def _grown(growth: Growth | None) -> str:
    if growth is None:
        return "-"
    over = timedelta(seconds=growth.over_ms // 1000)
    return f"{growth.rows:+,} rows, {growth.bytes:+,} bytes in {growth.versions} versions ({over})"


def _time(time_ms: int | None, otherwise: str = "none yet") -> str:
    """In UTC; one that no calendar has is shown as the number it is."""
    if time_ms is None:
        return otherwise
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)).strftime(
            "%Y-%m-%d %H:%M:%S"
        )
    except OverflowError:
        return str(time_ms)
