"""`holdfast pipeline rebuild`, `refill`, `erase`, `backfill`, `compare`, and `check --against-running`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer
from typer.exceptions import Exit

from holdfast.cli.exits import complain
from holdfast.cli.options import CommandGroup, OutputOption, examples, flag, option
from holdfast.cli.output import Output, json_line, print_json, print_table
from holdfast.cli.pipeline_shared import RUN, BootstrapOption, FileArgument, RunFlags, ask, load, located
from holdfast.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from holdfast.pipeline.definition.loading import Loaded
    from holdfast.pipeline.operations.against_running import Judgement
    from holdfast.pipeline.operations.comparing import SinkComparison
    from holdfast.pipeline.operations.multisets import Row

app = CommandGroup()

SHOWN_WIDTH: Final = 160
"""Of an example row on one line."""


# ---------------------------------------------------------------------------- check --against-running


def judged(loaded: Loaded, bootstrap: str | None, columns: dict[str, dict[str, str]]) -> Judgement:
    from holdfast.pipeline.operations.against_running import judge

    with located(loaded):
        return judge(loaded.definition, bootstrap=bootstrap, columns=columns)


def print_judgement(found: Judgement) -> None:
    """Every change with its level, then what a run would do."""
    if found.changes:
        print_table(
            ("LEVEL", "WHERE", "WHAT", "WHY AND WHAT TO DO"),
            [
                (change.level.value, change.where, change.what, f"{change.why} {change.todo}".rstrip())
                for change in found.changes
            ],
        )
    for note in found.notes:
        complain(note)
    count = len(found.changes)
    changes = "1 change" if count == 1 else f"{count or 'no'} changes"
    verdicts = {
        "safe": "a run goes on with it",
        "rebuild": "run `holdfast pipeline rebuild` first",
        "refused": "a run refuses it",
    }
    print(f"pipeline {found.pipeline}: {changes} since the last run; {verdicts[found.level.value]}")


# ---------------------------------------------------------------------------- rebuild


@app.command(
    epilog=examples(
        "holdfast pipeline rebuild orders.yaml",
        "holdfast pipeline rebuild orders.yaml --yes --from-available",
    )
)
def rebuild(
    file: FileArgument,
    yes: Annotated[bool, flag("Do it without asking.")] = False,
    from_available: Annotated[
        bool,
        flag(
            "Begin with what the source still has where its oldest records are gone: the state then lacks them."
        ),
    ] = False,
    run: RunFlags = RUN,
    output: OutputOption = Output.TABLE,
) -> None:
    """Recompute the state of a pipeline for its current definition.

    The command reads the source again from where the pipeline began to where its sinks stand, in the same
    micro-batches as far as they are recorded. It does not touch the sinks. The pipeline must not be running.
    """
    loaded = load(file)
    from holdfast.cli.pipeline_output import progress_for
    from holdfast.pipeline.operations.rebuilding import perform_rebuild, plan_rebuild

    with located(loaded):
        plan = plan_rebuild(loaded.definition, bootstrap=run.bootstrap_server, from_available=from_available)
        print(plan, file=sys.stderr)
        if not yes:
            ask("Rebuild the state?", otherwise="nothing was rebuilt")
        with progress_for(loaded.definition.name, as_json=output is Output.JSON) as progress:
            rebuilt = perform_rebuild(plan, **run.spark, progress=progress)
    if output is Output.JSON:
        sys.stdout.write(json_line(rebuilt.as_json()))
    else:
        print_table((f"pipeline {loaded.definition.name}", "state rebuilt"), rebuilt.rows())


# ---------------------------------------------------------------------------- refill


@app.command(
    epilog=examples(
        "holdfast pipeline refill orders.yaml parquet",
        "holdfast pipeline refill orders.yaml parquet --yes --from-available",
    )
)
def refill(
    file: FileArgument,
    sink: Annotated[str, typer.Argument(metavar="SINK", help="The name of the sink.")],
    yes: Annotated[bool, flag("Do it without asking.")] = False,
    from_available: Annotated[
        bool,
        flag(
            "Begin with what the source still has where its oldest records are gone: the sink then lacks them."
        ),
    ] = False,
    run: RunFlags = RUN,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write one sink again from the log, up to where the other sinks stand.

    This is for a sink that was lost, that was restored from an older copy, or that is new and should have the
    past too. The command does not touch the other sinks. The pipeline must not be running. An interrupted
    refill resumes where it stopped.
    """
    loaded = load(file)
    from holdfast.cli.pipeline_output import progress_for, summary_rows
    from holdfast.pipeline.operations.refilling import perform_refill, plan_refill

    name = loaded.definition.name
    with located(loaded):
        plan = plan_refill(
            loaded.definition, sink, bootstrap=run.bootstrap_server, from_available=from_available
        )
        print(plan, file=sys.stderr)
        if not yes:
            ask(f"Write {sink} again?", otherwise="nothing was written")
        with progress_for(name, as_json=output is Output.JSON) as progress:
            summary = perform_refill(plan, **run.spark, progress=progress)
    if output is Output.JSON:
        sys.stdout.write(json_line(summary.as_json()))
    else:
        ended = f"{sink} refilled" if summary.reason == "done" else "stopped; run it again to go on"
        print_table((f"pipeline {name}", ended), summary_rows(summary))


# ---------------------------------------------------------------------------- erase


@app.command(
    epilog=examples(
        "holdfast pipeline erase orders.yaml --where \"user = 'ann'\" --reason 'request 4711'",
        "holdfast pipeline erase orders.yaml --sink lake --where \"day < '2026-01-01'\" --reason retention --yes",
    )
)
def erase(
    file: FileArgument,
    where: Annotated[
        str,
        option("CONDITION", "Which rows: a condition in SQL on the columns of the sinks."),
    ],
    reason: Annotated[
        str, option("TEXT", "Why, for the ledger and for audits. Name a request, not a person: it is kept.")
    ],
    sink: Annotated[
        list[str] | None,
        option("NAME", "Only from this sink; may be repeated (default: every sink that is no topic)."),
    ] = None,
    dry_run: Annotated[bool, flag("Count the rows of each sink, and erase nothing.")] = False,
    yes: Annotated[bool, flag("Do it without asking.")] = False,
    bootstrap_server: BootstrapOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Erase rows from the sinks for good, with an entry in each ledger that audits follow.

    This is for deletions that the law demands, and for a sink that keeps only what is young. PostgreSQL
    evaluates the condition for its tables, DuckDB for Parquet and Delta. Records of topics stay: they go by
    retention, compaction or delete-records. The pipeline must not be running. An interrupted command has erased
    all of a sink or nothing of it; the same command finishes the rest.
    """
    loaded = load(file)
    from holdfast.pipeline.operations.erasing import perform_erase, plan_erase

    name = loaded.definition.name
    with located(loaded):
        plan = plan_erase(loaded.definition, where, reason, sinks=sink, bootstrap=bootstrap_server)
        print(plan, file=sys.stderr)
        if dry_run:
            erased = plan.as_erased()
        else:
            if not yes:
                ask("Erase them for good?", otherwise="nothing was erased")
            erased = perform_erase(plan, warn=complain)
    if output is Output.JSON:
        sys.stdout.write(json_line({**erased.as_json(), "dry_run": dry_run}))
        return
    rows = [(each, f"{count:,} rows") for each, count in erased.sinks.items()]
    print_table((f"pipeline {name}", "would be erased" if dry_run else "erased"), rows)


# ---------------------------------------------------------------------------- backfill


@app.command(
    epilog=examples(
        "holdfast pipeline backfill orders.yaml --from 2026-01-01 --to 2026-02-01 --into january",
        "holdfast pipeline backfill orders.yaml --from earliest --to orders:0=1000,orders:1=990 --into first",
    )
)
def backfill(
    file: FileArgument,
    begin: Annotated[
        str,
        option(
            "TIME|OFFSETS",
            "Where it begins: earliest, a time (2026-01-31T12:00:00Z), or offsets (orders:0=100,orders:1=120).",
            "--from",
        ),
    ],
    end: Annotated[
        str,
        option(
            "TIME|OFFSETS",
            "Where it ends, and not included: latest, a time, or offsets. It is fixed when the backfill begins.",
            "--to",
        ),
    ],
    into: Annotated[str, option("NAME", "What the backfill and all its places are called by.")],
    run: RunFlags = RUN,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run a range of the source through the definition once more, into sinks of their own.

    The backfill has a ledger of its own, and its paths, tables and topics carry NAME. The live pipeline may
    run; the command touches nothing of it. An interrupted backfill resumes where it stopped.
    """
    loaded = load(file)
    from holdfast.cli.pipeline_output import progress_for, summary_rows
    from holdfast.pipeline.operations.backfilling import plan_backfill, run_backfill

    with located(loaded):
        plan = plan_backfill(
            loaded.definition, begin=begin, end=end, into=into, bootstrap=run.bootstrap_server
        )
        print(f"{'going on with' if plan.is_resumed else 'backfill'} {plan}", file=sys.stderr)
        with progress_for(plan.definition.name, as_json=output is Output.JSON) as progress:
            summary = run_backfill(
                plan,
                bootstrap=run.bootstrap_server,
                **run.spark,
                progress=progress,
            )
    if output is Output.JSON:
        sys.stdout.write(json_line({**summary.as_json(), "backfill": plan.as_json()}))
        return
    where = [(f"{sink} went to", place) for sink, place in plan.destinations.items()]
    print_table((f"backfill {plan.definition.name}", summary.reason), [*summary_rows(summary), *where])


# ---------------------------------------------------------------------------- compare


@app.command(
    epilog=examples(
        "holdfast pipeline compare orders.yaml orders-v2.yaml",
        "holdfast pipeline compare orders.yaml orders-v2.yaml --sink lake=lake2 --ignore loaded_at",
    )
)
def compare(
    file_a: Annotated[str, typer.Argument(metavar="A", help="The one pipeline.")],
    file_b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    sink: Annotated[
        list[str] | None,
        option(
            "NAME=NAME",
            "A sink of A and the one of B to compare it with; may be repeated (default: those of the same name).",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None, option("COLUMN", "A column that may differ; may be repeated.")
    ] = None,
    bootstrap_server: BootstrapOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Compare what two pipelines made of the same source, row by row and without Spark.

    Run version two beside version one under another name, compare, then switch. Exit codes: 0 equal, 1
    different, 4 inconclusive, because they do not stand at the same offsets.
    """
    loaded_a, loaded_b = load(file_a), load(file_b)
    from holdfast.pipeline.operations.comparing import Verdict, compare_pipelines, overall

    with located(loaded_a), located(loaded_b):
        found = compare_pipelines(
            loaded_a.definition,
            loaded_b.definition,
            sinks=_pairs(sink),
            ignore=ignore or (),
            bootstrap=bootstrap_server,
        )
    verdict = overall(found)
    if output is Output.JSON:
        print_json({"verdict": verdict.value, "sinks": [each.as_json() for each in found]})
    else:
        for each in found:
            _print_comparison(each)
    if verdict is Verdict.DIFFERENT:
        raise Exit(ExitCode.FINDINGS)
    if verdict is Verdict.INCONCLUSIVE:
        raise Exit(ExitCode.INCONCLUSIVE)


def _pairs(given: list[str] | None) -> dict[str, str] | None:
    pairs: dict[str, str] = {}
    for text in given or ():
        one, _, other = text.partition("=")
        if not one or not other:
            raise UsageError(f"--sink {text!r}: write NAME=NAME, the sink of A first")
        pairs[one] = other
    return pairs or None


def _print_comparison(found: SinkComparison) -> None:
    differences = found.differences
    name = found.sink_a if found.sink_a == found.sink_b else f"{found.sink_a} and {found.sink_b}"
    print(
        f"{name}: {found.verdict.value}; {differences.rows_a:,} rows of A and {differences.rows_b:,} of B compared"
    )
    for note in found.notes:
        print(f"  {note}")
    for label, columns in (("A", found.columns_a), ("B", found.columns_b)):
        if columns:
            print(f"  columns only in {label}: {', '.join(columns)}")
    if differences.differing:
        columns_text = ", ".join(
            f"{column} ({count:,})" for column, count in differences.columns.most_common()
        )
        print(f"  {differences.differing:,} rows differ, in {columns_text}")
        for one, other in differences.examples:
            print(f"    A: {_shown(one)}")
            print(f"    B: {_shown(other)}")
    for label, count, rows in (
        ("A", differences.only_a, differences.examples_a),
        ("B", differences.only_b, differences.examples_b),
    ):
        if count:
            print(f"  {count:,} rows only in {label}")
            for row in rows:
                print(f"    {_shown(row)}")


def _shown(row: Row) -> str:
    text = ", ".join(f"{name}={'null' if value is None else value}" for name, value in row.items())
    return text if len(text) <= SHOWN_WIDTH else text[: SHOWN_WIDTH - 1] + "…"
