"""`holdfast pipeline`: define, check, explain and run a pipeline from topics to exactly-once sinks.

A definition that is wrong ends with exit code 2 and one line for each error, in the form editors and CI understand:
`orders.yaml:12:5: steps[1].expect.else: …`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from typer.exceptions import Exit

from holdfast.cli import pipeline_change, pipeline_state, pipeline_try
from holdfast.cli.exits import complain
from holdfast.cli.options import DEFAULT_BOOTSTRAP_SERVER, CommandGroup, OutputOption, examples, flag, option
from holdfast.cli.output import Output, json_line, print_json, print_table
from holdfast.cli.pipeline_shared import (
    RUN,
    BootstrapOption,
    FileArgument,
    LacksSomething,
    RunFlags,
    ask,
    load,
    located,
    require_extra,
    tell,
)
from holdfast.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from holdfast.pipeline.definition.errors import Finding
    from holdfast.pipeline.definition.loading import Loaded

app = CommandGroup(
    no_args_is_help=True,
    help="From topics to exactly-once sinks on Spark: define, check, explain and run a pipeline.",
)

SinkOption: TypeAlias = Annotated[list[str] | None, option("NAME", "Only this sink; may be repeated.")]


@app.command(
    epilog=examples(
        "holdfast pipeline init",
        "holdfast pipeline init my-pipeline",
        "holdfast pipeline init my-pipeline --from-topic payments --bootstrap-server kafka:9092",
    )
)
def init(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where; made when it is missing.")] = ".",
    from_topic: Annotated[
        str | None, option("TOPIC", "Infer fields and types from the newest records of this topic.")
    ] = None,
    bootstrap_server: Annotated[
        str,
        option("HOST:PORT,…", "The brokers that have the topic.", envvar="HOLDFAST_BOOTSTRAP_SERVER"),
    ] = DEFAULT_BOOTSTRAP_SERVER,
) -> None:
    """Write a small pipeline that works: a definition, a Python step, its tests and how to try it.

    With --from-topic: a definition for that topic, with the fields that its newest records have.
    """
    from holdfast.pipeline.definition.example import FILES, write_files

    files = FILES
    if from_topic is not None:
        require_extra()
        from holdfast.pipeline.operations.inferring import definition_text, newest_values

        name = f"{from_topic}.yaml"
        values = newest_values({"bootstrap.servers": bootstrap_server}, from_topic)
        if not values:
            raise UsageError(f"topic {from_topic!r} has no records yet, so there is nothing to infer from")
        shown = os.path.join(directory, name)
        files = {name: definition_text(from_topic, values, file=shown, bootstrap=bootstrap_server)}
    for path in write_files(directory, files):
        print(path)


@app.command(
    epilog=examples(
        "holdfast pipeline check orders.yaml",
        "holdfast pipeline check orders.yaml --no-spark --output json",
        "holdfast pipeline check orders.yaml --against-running",
    )
)
def check(
    file: FileArgument,
    no_spark: Annotated[bool, flag("Leave out what needs Spark: quick, and no Java needed.")] = False,
    against_running: Annotated[
        bool,
        flag(
            "Also compare with the definition that ran last; exit code 1 when a run would not simply go on."
        ),
    ] = False,
    bootstrap_server: BootstrapOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Find what is wrong with a pipeline without reading data: keys, names, types, SQL, Python, sinks.

    With Java at hand, Spark follows the schema from step to step. The command asks no broker, unless
    --against-running is given: then it reads the ledgers and says what changed since the last run, what is
    safe, what needs a rebuild and what a run refuses.
    """
    require_extra()
    from holdfast.pipeline.definition.errors import DefinitionError
    from holdfast.pipeline.definition.fingerprint import fingerprint
    from holdfast.pipeline.definition.loading import load_pipeline

    streams: dict[str, dict[str, str]] = {}
    mark = ""
    try:
        loaded = load_pipeline(file)
        mark = fingerprint(loaded.definition)
        found = list(loaded.warnings)
        if not no_spark:
            with_spark, streams = _check_with_spark(loaded)
            found += [loaded.findings.located(finding) for finding in with_spark]
    except DefinitionError as error:
        found = list(error.findings)
    wrong = any(finding.level == "error" for finding in found)
    columns, running = streams.get(""), None
    if against_running and not wrong:
        running = pipeline_change.judged(loaded, bootstrap_server, streams)
    if output is Output.JSON:
        document = {
            "file": file,
            "valid": not wrong,
            "fingerprint": mark or None,
            "columns": columns,
            "findings": [finding.as_json() for finding in found],
        }
        print_json(document if running is None else {**document, "against_running": running.as_json()})
    else:
        tell(found)
        if not wrong:
            _tell_schema(file, columns)
        if running is not None:
            pipeline_change.print_judgement(running)
    if wrong:
        raise Exit(ExitCode.USAGE)
    if running is not None and running.is_unsafe:
        raise Exit(ExitCode.FINDINGS)


def _check_with_spark(loaded: Loaded) -> tuple[list[Finding], dict[str, dict[str, str]]]:
    """What is wrong, and the columns that sinks get, by what they take."""
    from holdfast.pipeline.checking import check_definition, checking_session
    from holdfast.pipeline.java import JavaMissing

    try:
        with checking_session(loaded.definition) as session:
            found, schemas = check_definition(loaded.definition, session)
    except JavaMissing as missing:
        raise LacksSomething(f"{missing} --no-spark checks what needs none.") from missing
    return found, {
        rows: {
            each.name: each.dataType.simpleString() for each in schema.fields if not each.name.startswith("_")
        }
        for rows, schema in schemas.items()
    }


def _tell_schema(file: str, columns: dict[str, str] | None) -> None:
    if columns is None:
        print(f"{file}: no error found (SQL was not resolved: that needs Spark)")
        return
    print(f"{file}: no error found; rows reach the sinks with these columns")
    print_table(("COLUMN", "TYPE"), list(columns.items()))


@app.command(
    epilog=examples(
        "holdfast pipeline explain orders.yaml", "holdfast pipeline explain orders.yaml --ask-broker"
    )
)
def explain(
    file: FileArgument,
    ask_broker: Annotated[bool, flag("Also ask how durable the source's topics are themselves.")] = False,
    bootstrap_server: BootstrapOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what each hop guarantees, from the topics to each sink, and which is the weakest.

    The command names the setting that would make the weakest hop stronger. It neither shows nor needs secrets.
    """
    loaded = load(file)
    from holdfast.cli.pipeline_output import print_explanation
    from holdfast.cli.pipeline_topics import ask_topics
    from holdfast.pipeline.definition import explaining

    with located(loaded):
        facts = ask_topics(loaded.definition, bootstrap_server) if ask_broker else ()
    explanation = explaining.explain(loaded.definition, facts)
    if output is Output.JSON:
        print_json(explanation.as_json())
    else:
        print_explanation(explanation)


@app.command(epilog=examples("holdfast pipeline graph orders.yaml > orders.svg"))
def graph(file: FileArgument) -> None:
    """Draw source, steps, side outputs and sinks as SVG, on standard output.

    The picture needs no broker, no Spark and no secrets, and shows none.
    """
    loaded = load(file)
    from holdfast.pipeline.definition.drawing import draw

    sys.stdout.write(draw(loaded.definition))


@app.command(
    epilog=examples(
        "holdfast pipeline run orders.yaml",
        "holdfast pipeline run orders.yaml --bootstrap-server kafka:9092 --master 'local[4]'",
        "holdfast pipeline run orders.yaml --master spark://host:7077 --shared-filesystem",
        "holdfast pipeline run orders.yaml --once --output json",
        "holdfast pipeline run orders.yaml --accept-loss=parquet",
    )
)
def run(
    file: FileArgument,
    where: RunFlags = RUN,
    once: Annotated[bool, flag("End when what is there now is done, whatever the trigger says.")] = False,
    accept_loss: Annotated[
        list[str] | None,
        option(
            "SINK",
            "If this sink has lost what it had, let it go on where the other sinks stand; may be repeated. "
            "digest-key: go on with a new key of the digests.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        option(
            "[HOST:]PORT",
            "Serve Prometheus metrics at /metrics, to this machine alone unless a host is given.",
        ),
    ] = None,
    lineage: Annotated[
        str | None,
        option(
            "FILE|URL",
            "Tell of the run, its inputs, outputs and batches as OpenLineage does: a line of JSON each, or by POST.",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run a pipeline from where the ledgers of its sinks stand.

    SIGTERM and Ctrl-C stop it after the current micro-batch. Progress goes to standard error, the summary to
    standard output.
    """
    from holdfast.pipeline.definition.naming import DIGEST_KEY_NAME

    loaded = load(file)
    _require_sinks(loaded, [name for name in accept_loss or () if name != DIGEST_KEY_NAME])
    from holdfast.cli.pipeline_output import progress_for, summary_rows, supervised
    from holdfast.pipeline.engine.lineage_events import Lineage
    from holdfast.pipeline.engine.metrics import PipelineMetrics
    from holdfast.pipeline.engine.progress import told_to
    from holdfast.pipeline.engine.running import run_pipeline
    from holdfast.supervisor import Supervisor

    name = loaded.definition.name
    with (
        located(loaded),
        PipelineMetrics(listen=metrics) as shown,
        progress_for(name, as_json=output is Output.JSON) as progress,
    ):
        if shown.port is not None:
            complain(f"metrics on port {shown.port}, at /metrics")
        summary = run_pipeline(
            loaded.definition,
            bootstrap=where.bootstrap_server,
            **where.spark,
            once=True if once else None,
            progress=told_to(progress, supervised(Supervisor())),
            metrics=shown,
            lineage=None if lineage is None else Lineage(lineage),
            accept_loss=accept_loss or (),
        )
    if output is Output.JSON:
        sys.stdout.write(json_line(summary.as_json()))
    else:
        ended = "done" if summary.reason == "done" else "stopped"
        print_table((f"pipeline {name}", ended), summary_rows(summary))


@app.command(
    epilog=examples(
        "holdfast pipeline status orders.yaml", "holdfast pipeline status orders.yaml --output json"
    )
)
def status(
    file: FileArgument, bootstrap_server: BootstrapOption = None, output: OutputOption = Output.TABLE
) -> None:
    """Show where each sink stands, by its own ledger, and how far that is from the end. Needs no Spark."""
    loaded = load(file)
    from holdfast.cli.pipeline_output import print_status
    from holdfast.pipeline.engine.status import read_status

    with located(loaded):
        found = read_status(loaded.definition, bootstrap=bootstrap_server)
    if output is Output.JSON:
        print_json(found.as_json())
    else:
        print_status(found)
    if found.source_problem or any(sink.problem for sink in found.sinks):
        raise Exit(ExitCode.FINDINGS)


@app.command(
    epilog=examples(
        "holdfast pipeline reset orders.yaml", "holdfast pipeline reset orders.yaml --sink parquet --yes"
    )
)
def reset(
    file: FileArgument,
    sink: SinkOption = None,
    yes: Annotated[bool, flag("Do it without asking.")] = False,
    bootstrap_server: BootstrapOption = None,
) -> None:
    """Forget the ledgers of sinks, so that the next run starts them again.

    All sinks start where the definition says, a single one where the others stand. The command shows what a run
    would replay or leave out, and asks. A sink keeps its rows: it has what is replayed twice, unless you remove
    the rows first or the sink is an upsert.
    """
    loaded = load(file)
    _require_sinks(loaded, sink)
    from holdfast.pipeline.engine.resetting import perform_reset, plan_reset

    with located(loaded):
        plan = plan_reset(loaded.definition, sinks=sink, bootstrap=bootstrap_server)
        print(plan)
        if not yes:
            ask("Forget these ledgers?", otherwise="nothing was reset")
        perform_reset(plan)
    print("done; the next run begins as shown")


@app.command(
    epilog=examples(
        "holdfast pipeline compact orders.yaml", "holdfast pipeline compact o.yaml --sink parquet"
    )
)
def compact(file: FileArgument, sink: SinkOption = None, output: OutputOption = Output.TABLE) -> None:
    """Merge the small files of old batches in Parquet and Delta sinks.

    The pipeline must not be running. Readers see the same rows before and after.
    """
    loaded = load(file)
    _require_sinks(loaded, sink)
    from holdfast.cli.pipeline_output import print_compacted
    from holdfast.pipeline.definition.secrets import expand_definition
    from holdfast.pipeline.sinks.compacting import compact as compact_sinks

    with located(loaded):
        definition, _ = expand_definition(loaded.definition)
        chosen: list[str] | list[None] = sink or [None]
        done = [each for name in chosen for each in compact_sinks(definition, sink=name)]
    print_compacted(done, as_json=output is Output.JSON)


@app.command(epilog=examples("holdfast pipeline schema > pipeline.schema.json"))
def schema() -> None:
    """Print the JSON Schema of definitions, for editors that complete and check YAML."""
    from holdfast.pipeline.definition.editor_schema import json_schema_text

    sys.stdout.write(json_schema_text())


@app.command(
    epilog=examples(
        "holdfast pipeline package", "holdfast pipeline package --to parts.tar.gz --with scikit-learn"
    )
)
def package(
    to: Annotated[str | None, option("FILE", "Where to put it, a .tar.gz (default: only the cache).")] = None,
    more: Annotated[
        list[str] | None,
        option(
            "NAME",
            "An installed distribution that Python steps use, with what it requires; may be repeated.",
            "--with",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Pack the Python parts that workers of a cluster need into one archive.

    The archive has holdfast, its libraries with their native code, and the compiled decoders, for this Python's
    minor version and this kind of system. `run --master` makes it by itself. It is cached, and rebuilt only
    when something changed.
    """
    from holdfast.pipeline.cluster.packaging import cache_directory, make_package, place_package
    from holdfast.pipeline.session import require_spark

    require_extra()
    require_spark()
    made = make_package(cache_directory(), more=more or (), progress=_show if sys.stderr.isatty() else None)
    path = made.path if to is None else place_package(made, to)
    if output is Output.JSON:
        print_json(
            {"path": path, "bytes": made.bytes, "unpacked_bytes": made.unpacked_bytes, **made.manifest}
        )
        return
    made_for = made.manifest["made_for"]
    print(
        f"{path}: {made.bytes / 1e6:,.0f} MB ({made.unpacked_bytes / 1e6:,.0f} MB unpacked, {made.files:,} files), "
        f"for {made_for['implementation']} {made_for['python']} on {made_for['system']}-{made_for['machine']}"
        f"{'' if made.is_new else ', from the cache'}"
    )


def _show(done: int, total: int) -> None:
    end = "\r" if done < total else "\n"
    print(f"packing {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", end=end, file=sys.stderr, flush=True)


app.registered_commands += pipeline_try.app.registered_commands
app.registered_commands += pipeline_change.app.registered_commands
app.add_typer(pipeline_state.app, name="state")


def _require_sinks(loaded: Loaded, names: list[str] | None) -> None:
    from holdfast.pipeline.definition.errors import nearest
    from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME

    known = [sink.name for sink in loaded.definition.sinks] + [DEAD_LETTER_NAME]
    for name in names or ():
        if name not in known:
            hint = nearest(name, known) or f"; there are {', '.join(known)}"
            raise UsageError(f"the pipeline has no sink {name!r}{hint}")
