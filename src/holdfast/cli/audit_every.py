"""How an audit is given out: once, on top of what was proven before (`--state`), or again and again (`--every`)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

from typer.exceptions import Exit

from holdfast.cli.exits import complain, stop_when_unread
from holdfast.cli.options import OutputOption, flag, option
from holdfast.cli.output import Output, json_line, print_json
from holdfast.cli.pipeline_shared import located
from holdfast.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from holdfast.audit.certificate import Certificate
    from holdfast.audit.continuous import Auditor, Incremental
    from holdfast.audit.model import Report
    from holdfast.audit.pipeline_audit import AuditOptions
    from holdfast.audit.proven import Seen, Topics
    from holdfast.audit.stateful.carried import Memory
    from holdfast.pipeline.definition.loading import Loaded
    from holdfast.pipeline.positions import Place


@dataclass(frozen=True)
class Wishes:
    """What is to become of a report, and how often there is one."""

    certificate: Annotated[
        str | None,
        option(
            "PATH",
            "Write the report as a certificate, chained to the one before it: into a directory, or to a file that ends "
            "in .json.",
        ),
    ] = None
    sign_key: Annotated[
        str | None,
        option("FILE", "Sign the certificate with this ed25519 key in PEM. Needs holdfast\\[sign]."),
    ] = None
    html: Annotated[str | None, option("FILE", "Write the report as one page with its plots.")] = None
    junit: Annotated[str | None, option("FILE", "Write the report as JUnit's XML, for CI.")] = None
    every: Annotated[
        str | None,
        option(
            "DURATION",
            "Audit again and again, such as every 5m, until one fails; the others are counted and told.",
        ),
    ] = None
    metrics_port: Annotated[
        str | None,
        option(
            "[HOST:]PORT",
            "With --every: serve Prometheus metrics at /metrics, to this machine alone unless a host is given.",
        ),
    ] = None
    output: OutputOption = Output.TABLE

    def keep(self, report: Report) -> Certificate | None:
        """Write the files that were asked for."""
        from holdfast.audit import certificate, html, junit, signatures

        key = None if self.sign_key is None else signatures.load_private_key(self.sign_key)
        made = None if self.certificate is None else certificate.write(report, self.certificate, key)
        if self.html is not None:
            _write(self.html, html.page(report, made))
        if self.junit is not None:
            _write(self.junit, junit.junit(report))
        return made


@dataclass(frozen=True)
class Further:
    """What an audit of a pipeline keeps, and what it leaves out because it was proven before."""

    state: Annotated[
        str | None,
        option("FILE", "Keep here what is proven, so that the next audit looks at what is new alone."),
    ] = None
    full: Annotated[bool, flag("With --state: look at everything this time.")] = False
    full_every: Annotated[
        int | None,
        option(
            "N",
            "With --state or --every: look at everything each Nth time (default: 12; 0: only when something asks for "
            "it).",
            min=0,
        ),
    ] = None
    accept: Annotated[
        list[str] | None,
        option(
            "SINK.COLUMN",
            "Accept this column though nothing vouches for its cells; `steps.NAME`: what a step let go. May be "
            "repeated.",
        ),
    ] = None
    strict: Annotated[
        bool,
        flag(
            "Not enough that cells are unaltered since they were written: end with 4 unless all are recomputed."
        ),
    ] = False


ONCE: Final = Wishes()
FURTHER: Final = Further()


def _write(path: str, content: str) -> None:
    """Whole or not at all: somebody may look while audits go on."""
    from holdfast.atomic import write_atomically
    from holdfast.real import RealFileSystem

    whole = os.path.abspath(path)
    os.makedirs(os.path.dirname(whole), exist_ok=True)
    write_atomically(RealFileSystem(), whole, content.encode("utf-8", "backslashreplace"))


@dataclass
class PipelineAuditor:
    """A pipeline, audited as its definition stands."""

    loaded: Loaded
    bootstrap: str | None
    options: AuditOptions
    audit_once: Callable[..., Report]
    by_spark: bool = False
    """Then everything is looked at each time: Spark's jobs have no part for what is new."""
    subject: str = field(init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        from holdfast.pipeline.definition.fingerprint import fingerprint

        self.subject = self.loaded.definition.name
        self.fingerprint = fingerprint(self.loaded.definition)

    def audit(self, since: Mapping[Place, int] | None, topics: Topics, memory: Memory | None) -> Report:
        from holdfast.pipeline.definition.secrets import expand_definition

        is_whole = self.by_spark or self.options.start is not None
        options = replace(self.options, since=since, topic_starts=topics, memory=None if is_whole else memory)
        with located(self.loaded):
            report = self.audit_once(self.loaded.definition, bootstrap=self.bootstrap, options=options)
            return redacted(report, expand_definition(self.loaded.definition)[1].redact)

    def marks(self, proven: Mapping[Place, int]) -> Mapping[str, Seen]:
        from holdfast.audit.proven import take_all
        from holdfast.pipeline.definition.naming import client_settings
        from holdfast.pipeline.definition.secrets import expand_definition

        with located(self.loaded):
            definition, redactor = expand_definition(self.loaded.definition)
            settings = {**client_settings(definition, self.bootstrap), **self.options.settings}
            found = take_all(definition, settings, proven)
        return {name: replace(seen, unseen=redactor.redact(seen.unseen)) for name, seen in found.items()}

    def remembers(self) -> str:
        from holdfast.audit.left import remembering

        if self.options.start is not None:
            return "--from says where it begins"
        if self.by_spark:
            return "Spark looks at everything"
        return remembering(self.loaded.definition)


@dataclass
class WholeAuditor:
    """Something that is compared as a whole each time."""

    audit_once: Callable[[], Report]
    subject: str = ""
    fingerprint: str = ""

    def audit(self, since: Mapping[Place, int] | None, topics: Topics, memory: Memory | None) -> Report:
        return self.audit_once()

    def marks(self, proven: Mapping[Place, int]) -> Mapping[str, Seen]:
        return {}

    def remembers(self) -> str:
        return "it is compared as a whole"


def redacted(report: Report, redact: Callable[[str], str]) -> Report:
    """Without secrets in what readers said: a report is printed, and kept."""
    return replace(
        report,
        findings=tuple(replace(each, detail=redact(each.detail)) for each in report.findings),
        unproven=tuple(
            replace(each, what=redact(each.what), why=redact(each.why)) for each in report.unproven
        ),
        notes=tuple(redact(note) for note in report.notes),
        coverage=tuple(replace(each, why=redact(each.why)) for each in report.coverage),
    )


def give_out(auditor: Auditor, wishes: Wishes, further: Further = FURTHER) -> None:
    """Audit as wished, show what was found, and end with the exit code of the verdict."""
    _check(wishes, further)
    if wishes.every is None and further.state is None:
        report = auditor.audit(None, {}, None)
        wishes.keep(report)
    else:
        from holdfast.audit.continuous import FULL_EVERY_DEFAULT, Incremental

        full_every = FULL_EVERY_DEFAULT if further.full_every is None else further.full_every
        audits = Incremental(auditor, further.state, full_every, wishes.keep)
        if wishes.every is not None:
            _again_and_again(audits, wishes.every, wishes, full_first=further.full)
        report = audits.run(full=further.full)
    _show(report, wishes.output)
    raise Exit(report.exit_code(is_strict=further.strict))


def _check(wishes: Wishes, further: Further) -> None:
    if wishes.metrics_port is not None and wishes.every is None:
        raise UsageError("--metrics-port goes with --every: an audit that ends has nobody to ask it")
    if wishes.sign_key is not None:
        if wishes.certificate is None:
            raise UsageError("--sign-key goes with --certificate")
        from holdfast.audit.signatures import load_private_key

        load_private_key(wishes.sign_key)  # before hours of reading, not after them
    if further.full and further.state is None:
        raise UsageError("--full goes with --state: without it, everything is looked at anyway")
    if further.full_every is not None and further.state is None and wishes.every is None:
        raise UsageError("--full-every goes with --state or --every")


def _show(report: Report, output: Output) -> None:
    from holdfast.audit import text

    if output is Output.JSON:
        print_json(report.as_json())
    else:
        text.print_report(report)


def _again_and_again(audits: Incremental, every: str, wishes: Wishes, *, full_first: bool) -> NoReturn:
    from holdfast import exposition
    from holdfast.audit import continuous, metrics
    from holdfast.pipeline.definition.units import parse_duration_ms

    try:
        every_s = parse_duration_ms(every) / 1000
    except ValueError as error:
        raise UsageError(f"--every: {error}") from error
    stop_when_unread()

    def tell(report: Report) -> None:
        if wishes.output is Output.JSON:
            sys.stdout.write(json_line(report.as_json()))
        elif report.verdict.exit_code == 0:
            print(continuous.summary(report, was_full=audits.was_full))
        else:
            _show(report, wishes.output)
        sys.stdout.flush()

    with ExitStack() as stack:
        numbers = metrics.AuditMetrics(audits.auditor.subject)
        if wishes.metrics_port is not None:
            host, port = exposition.parse_address(wishes.metrics_port)
            taken = stack.enter_context(exposition.served(numbers.text, host, port))
            complain(f"metrics at http://{host}:{taken}/metrics")
        watch = continuous.Watch(audits, every_s, numbers, _wait, tell, complain)
        newest = watch.run(full_first=full_first)
    raise Exit(ExitCode.FINE if newest is None else newest.exit_code)


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False
