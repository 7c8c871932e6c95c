"""`holdfast doctor`: what in files, code and clusters can lose a message, and what to do about it.

It reads and never runs anything, and changes nothing but what --apply asks about. Exit codes: 0 clean, 1 findings at
or above --fail-on (whatever else could not be examined), 2 usage, 3 cannot connect, 4 something was not examined and
in the rest nothing was found. A file that is not recognised was not examined.
"""

from __future__ import annotations

import datetime
import sys
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from typer.exceptions import Exit

from holdfast.cli.doctor_live import (
    ApplyOption,
    GroupOption,
    HistoryOption,
    LiveFlags,
    LiveServerOption,
    WatchOption,
    YesOption,
    apply_after_asking,
)
from holdfast.cli.options import (
    DEFAULT_CONNECT_TIMEOUT_MS,
    CommandConfigOption,
    CommandGroup,
    ConnectTimeoutOption,
    choice,
    examples,
    flag,
    option,
)
from holdfast.doctor.findings import DoctorError, Severity
from holdfast.doctor.reporting import Format
from holdfast.errors import ExitCode

if TYPE_CHECKING:
    from holdfast.doctor.examined import FilesExamined
    from holdfast.doctor.findings import Examination

app = CommandGroup()

PathsArgument: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PATH",
        help="Files and directories; what each file is shows in it: compose files, Kubernetes and Strimzi resources, "
        "Connect workers and connectors, Spring, Spark, Python code, properties of clients and brokers.",
        show_default=False,
    ),
]
ProducerOption: TypeAlias = Annotated[
    list[str] | None,
    option(
        "FILE",
        "Settings of a producer: properties, a dictionary in YAML or JSON, Spring's application.yml; may be "
        "repeated.",
    ),
]
ConsumerOption: TypeAlias = Annotated[
    list[str] | None, option("FILE", "Settings of a consumer, likewise; may be repeated.")
]
PipelineOption: TypeAlias = Annotated[
    list[str] | None,
    option("FILE", "A pipeline's definition, or a file with Spark's options; may be repeated."),
]
CodeOption: TypeAlias = Annotated[
    list[str] | None,
    option("PATH", "A Python file, or a directory of them; read and never run; may be repeated."),
]
BrokerOption: TypeAlias = Annotated[
    list[str] | None,
    option(
        "FILE",
        "A broker's server.properties, or a topic's settings with replication.factor; clients are held against "
        "it; may be repeated.",
    ),
]
ClientOption: TypeAlias = Annotated[
    str | None,
    option(
        "CLIENT",
        "Whose defaults count in files of settings: java, librdkafka, kafka-python or aiokafka. Without it: java "
        "for properties and Spring, librdkafka for dotted names in YAML and JSON, kafka-python for underscores.",
    ),
]
FormatOption: TypeAlias = Annotated[
    Format, choice("For people (table), programs (json), code hosts (sarif), CI (junit).")
]
FailOnOption: TypeAlias = Annotated[Severity, choice("The least severity that makes the exit code 1.")]
SuppressionsOption: TypeAlias = Annotated[
    str | None, option("FILE", "Findings that are accepted: a YAML list of id, where, reason and expires.")
]
FixOption: TypeAlias = Annotated[bool, flag("Print the fixes alone; nothing is changed.")]


@app.command(
    epilog=examples(
        "holdfast doctor docker-compose.yml k8s src",
        "holdfast doctor --producer producer.properties --consumer consumer.properties",
        "holdfast doctor --code src --fail-on error --output sarif > doctor.sarif",
        "holdfast doctor --producer settings.yaml --client aiokafka --fix",
        "holdfast doctor --bootstrap-server 127.0.0.1:9092 --group billing --history looks.jsonl",
    )
)
def doctor(
    paths: PathsArgument = None,
    producer: ProducerOption = None,
    consumer: ConsumerOption = None,
    pipeline: PipelineOption = None,
    code: CodeOption = None,
    broker: BrokerOption = None,
    client: ClientOption = None,
    output: FormatOption = Format.TABLE,
    fail_on: FailOnOption = Severity.WARNING,
    suppressions: SuppressionsOption = None,
    fix: FixOption = False,
    bootstrap_server: LiveServerOption = None,
    command_config: CommandConfigOption = None,
    connect_timeout_ms: ConnectTimeoutOption = DEFAULT_CONNECT_TIMEOUT_MS,
    group: GroupOption = None,
    watch: WatchOption = None,
    history: HistoryOption = None,
    apply: ApplyOption = False,
    yes: YesOption = False,
) -> None:
    """Find what can lose a message, before it does: in client settings (with the defaults of the client named),
    Python code, pipelines, broker settings and deployments, in a live cluster and its groups, and in their
    combinations. Reads only, unless --apply is given.

    Exit codes: 1 findings at or above --fail-on; else 4 if anything was not examined, such as a file that is
    not recognised (each is named); else 0. 2 usage, 3 cannot connect.
    """
    from holdfast.doctor.files import Asked, examine_files
    from holdfast.doctor.properties_files import client_named

    asked = Asked(
        producer or (),
        consumer or (),
        pipeline or (),
        code or (),
        broker or (),
        None if client is None else client_named(client),
        paths or (),
    )
    live = LiveFlags(
        bootstrap_server, command_config, connect_timeout_ms, group or (), watch, history, apply, yes
    )
    if not asked.anything and bootstrap_server is None:
        raise DoctorError(
            "nothing to examine: name files or directories, --producer, --consumer, --pipeline, --code, --broker, or "
            "--bootstrap-server"
        )
    while True:
        examined = examine_files(asked)
        _live(examined, live)
        code_to_exit = conclude(examined.examination, output, fail_on, suppressions, only_fixes=fix)
        if not live.again():
            break
    if apply and not apply_after_asking(live, accepted(examined.examination, suppressions)):
        code_to_exit = ExitCode.FINDINGS
    raise Exit(code_to_exit)


def _live(examined: FilesExamined, live: LiveFlags) -> None:
    """The cluster's part of an examination."""
    if live.bootstrap_server is None:
        return
    known = {(found.id, found.place) for found in examined.examination.findings}
    seen = live.examine(examined.clients)
    seen.findings = [found for found in seen.findings if (found.id, found.place) not in known]
    examined.examination.merge(seen)


def accepted(examination: Examination, suppressions: str | None) -> Examination:
    """The examination with what is accepted set aside."""
    from holdfast.doctor.suppressions import read_suppressions, suppress

    if suppressions is None:
        return examination
    return suppress(examination, read_suppressions(suppressions), datetime.date.today())


def conclude(
    examination: Examination,
    output: Format,
    fail_on: Severity,
    suppressions: str | None,
    *,
    only_fixes: bool = False,
) -> ExitCode:
    """Set aside what is accepted, print, and give the exit code."""
    from holdfast.doctor.reporting import fixes, rendered

    examination = accepted(examination, suppressions)
    if only_fixes:
        for line in fixes(examination):
            print(_printable(line))
        for gap in examination.gaps:
            print(f"holdfast: not examined: {gap.what}: {gap.why}", file=sys.stderr)
    elif output is Format.TABLE and sys.stdout.isatty():
        _print_rich(examination)
    else:
        print(_printable(rendered(examination, output, fail_on=fail_on)), end="")
    if next(examination.at_least(fail_on), None) is not None:
        return ExitCode.FINDINGS
    return ExitCode.FINE if examination.complete else ExitCode.INCONCLUSIVE


def _printable(text: str) -> str:
    """A file's name may be no text at all; it is shown as well as can be."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _print_rich(examination: Examination) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from holdfast.doctor.reporting import summary, what_there_is

    colours = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
    table = Table(
        "risk", "where", "found, what can be lost, and the fix", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for found in examination.in_order():
        words = Text(found.found)
        words.append(f"\ncan be lost: {found.loses}", style="dim")
        if found.fix is not None:
            words.append(f"\nfix: {found.fix.text}", style="green")
        for what in what_there_is(found.id):
            words.append(f"\nsee: {what}", style="blue")
        table.add_row(
            Text(f"{found.id}\n{found.severity.value}", style=colours[found.severity]),
            Text(found.where),
            words,
        )
    console = Console(highlight=False, markup=False)
    if examination.findings:
        console.print(table)
    for gap in examination.gaps:
        console.print(Text(f"not examined: {gap.what}: {gap.why}", style="magenta"))
    console.print(summary(examination))
