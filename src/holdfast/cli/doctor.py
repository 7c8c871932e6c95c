"""`holdfast doctor`: what in files, code and clusters can lose a message, and what to do about it.

It reads and never runs anything, and changes nothing but what --apply asks about. Exit codes: 0 clean, 1 findings at
or above --fail-on (whatever else could not be examined), 2 usage, 3 cannot connect, 4 something was not examined and
in the rest nothing was found. A file that is not recognised was not examined.

Looking at a live cluster changes nothing. `--apply` makes the changes of settings that findings propose, after showing
them as commands and asking; what is accepted by a suppression is left alone.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer
from typer.exceptions import Exit

from holdfast.cli.exits import complain
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
    from holdfast.doctor.client_settings import ClientSettings
    from holdfast.doctor.examined import FilesExamined
    from holdfast.doctor.files import Asked
    from holdfast.doctor.findings import ConfigChange, Examination
    from holdfast.doctor.live_snapshot import Look

app = CommandGroup()

LOOKS_KEPT = 100
"""How far back a watch compares: bounds its memory."""


@dataclass(frozen=True)
class FileFlags:
    """What is read: files of which the doctor finds out what they are, and files that the user says that of."""

    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help="Files and directories; what each file is shows in it: compose files, Kubernetes and Strimzi "
            "resources, Connect workers and connectors, Spring, Spark, Python code, properties of clients and brokers.",
            show_default=False,
        ),
    ] = None
    producer: Annotated[
        list[str] | None,
        option(
            "FILE",
            "Settings of a producer: properties, a dictionary in YAML or JSON, Spring's application.yml; may be "
            "repeated.",
        ),
    ] = None
    consumer: Annotated[
        list[str] | None, option("FILE", "Settings of a consumer, in the same formats; may be repeated.")
    ] = None
    pipeline: Annotated[
        list[str] | None,
        option("FILE", "A pipeline's definition, or a file with Spark's options; may be repeated."),
    ] = None
    code: Annotated[
        list[str] | None,
        option("PATH", "A Python file, or a directory of them; read and never run; may be repeated."),
    ] = None
    broker: Annotated[
        list[str] | None,
        option(
            "FILE",
            "A broker's server.properties, or a topic's settings with replication.factor; clients are held against "
            "it; may be repeated.",
        ),
    ] = None
    client: Annotated[
        str | None,
        option(
            "CLIENT",
            "Whose defaults count in files of settings: java, librdkafka, kafka-python or aiokafka. Without it: java "
            "for properties and Spring, librdkafka for dotted names in YAML and JSON, kafka-python for underscores.",
        ),
    ] = None

    def asked(self) -> Asked:
        from holdfast.doctor.files import Asked
        from holdfast.doctor.properties_files import client_named

        return Asked(
            self.producer or (),
            self.consumer or (),
            self.pipeline or (),
            self.code or (),
            self.broker or (),
            None if self.client is None else client_named(self.client),
            self.paths or (),
        )


@dataclass
class LiveFlags:
    """What was asked of a live cluster."""

    bootstrap_server: Annotated[str | None, option("HOST:PORT,…", "Look at this cluster as well.")] = None
    command_config: CommandConfigOption = None
    connect_timeout_ms: ConnectTimeoutOption = DEFAULT_CONNECT_TIMEOUT_MS
    group: Annotated[
        list[str] | None, option("NAME", "Look at this group only; may be repeated. All by default.")
    ] = None
    watch: Annotated[
        float | None,
        option(
            "SECONDS",
            "Look again after so many seconds, until Ctrl-C, and judge groups by their rates.",
            min=0.1,
        ),
    ] = None
    history: Annotated[
        str | None,
        option(
            "FILE",
            "Earlier looks, one JSON document a line: groups are judged by their rates since. This look is added.",
        ),
    ] = None
    apply: Annotated[bool, flag("Make the changes of settings that findings propose, after asking.")] = False
    yes: Annotated[bool, flag("Do it without asking.")] = False

    def __post_init__(self) -> None:
        self.looks: list[Look] = []
        """Of this watch."""
        if self.yes and not self.apply:
            raise DoctorError("--yes answers what --apply asks: pass both")
        if self.apply and self.watch is not None:
            raise DoctorError("--apply changes settings once: leave out --watch")
        if self.bootstrap_server is not None:
            return
        needing = {
            "--command-config": self.command_config,
            "--group": self.group,
            "--watch": self.watch,
            "--history": self.history,
            "--apply": self.apply,
        }
        if given := [flag for flag, value in needing.items() if value]:
            raise DoctorError(f"{given[0]} is about a live cluster: pass --bootstrap-server as well")

    def settings(self) -> dict[str, str]:
        from holdfast.cli.client import read_properties

        given = {} if self.command_config is None else read_properties(self.command_config)
        timeout = {"socket.connection.setup.timeout.ms": str(self.connect_timeout_ms)}
        return {**timeout, **given, "bootstrap.servers": self.bootstrap_server or ""}

    def command_flags(self) -> str:
        """What a command needs to reach the same cluster."""
        config = "" if self.command_config is None else f" --command-config {self.command_config}"
        return f"--bootstrap-server {self.bootstrap_server}{config}"

    def examine(self, clients: Sequence[ClientSettings]) -> Examination:
        from holdfast.admin.errors import Unreachable
        from holdfast.doctor.findings import Examination
        from holdfast.doctor.live import examine_cluster

        del self.looks[:-LOOKS_KEPT]
        try:
            return examine_cluster(
                self.settings(),
                groups=self.group or (),
                history=self.history,
                looks=self.looks,
                clients=clients,
                command_flags=self.command_flags(),
            )
        except Unreachable as error:
            if not self.looks:
                raise
            # A watch outlasts the restart of a cluster that it has seen.
            examination = Examination()
            examination.missed("the cluster", str(error), "connection")
            return examination

    def again(self) -> bool:
        """Whether there is another look, after its time."""
        if self.watch is None:
            return False
        sys.stdout.flush()
        time.sleep(self.watch)
        return True


FILES: Final = FileFlags()
LIVE: Final = LiveFlags()


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
    files: FileFlags = FILES,
    output: Annotated[
        Format, choice("For people (table), programs (json), code hosts (sarif), CI (junit).")
    ] = Format.TABLE,
    fail_on: Annotated[Severity, choice("The least severity that makes the exit code 1.")] = Severity.WARNING,
    suppressions: Annotated[
        str | None,
        option("FILE", "Findings that are accepted: a YAML list of id, where, reason and expires."),
    ] = None,
    fix: Annotated[bool, flag("Print the fixes alone; nothing is changed.")] = False,
    live: LiveFlags = LIVE,
) -> None:
    """Find what can lose a message, before it does.

    The doctor examines client settings (with the defaults of the client named), Python code, pipelines, broker
    settings and deployments, a live cluster and its groups, and their combinations. It reads only, unless
    --apply is given.

    Exit codes: 1 findings at or above --fail-on; else 4 if anything was not examined, such as a file that is
    not recognised (each is named); else 0. 2 usage, 3 cannot connect.
    """
    from holdfast.doctor.files import examine_files

    asked = files.asked()
    if not asked.anything and live.bootstrap_server is None:
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
    if live.apply and not apply_after_asking(live, accepted(examined.examination, suppressions)):
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


def apply_after_asking(flags: LiveFlags, examination: Examination) -> bool:
    """Make the changes that findings propose; False when the cluster refused one."""
    from holdfast.doctor.live import apply_fixes, changes_of

    changes = changes_of(examination.in_order())
    if not changes:
        complain("nothing to apply: no finding proposes a change of settings")
        return True
    print("These settings would be changed:", file=sys.stderr)
    for change in changes:
        print(f"  {_words(change)}", file=sys.stderr)
    if not flags.yes and not _agreed(f"Change {len(changes)} on {flags.bootstrap_server}?"):
        complain("nothing was changed")
        return True
    fine = True
    for change, refused in apply_fixes(flags.settings(), changes):
        if refused is None:
            print(f"changed {_words(change)}", file=sys.stderr)
        else:
            complain(f"not changed: {_words(change)}: {refused}")
            fine = False
    return fine


def _agreed(question: str) -> bool:
    """Nobody to ask is a no."""
    try:
        return typer.confirm(question, default=False, err=True)
    except typer.Abort:
        return False


def _words(change: ConfigChange) -> str:
    what = (
        f"{change.resource_type} {change.resource_name}"
        if change.resource_name
        else "the default of all brokers"
    )
    return f"{change.setting}={change.value} of {what}"
