"""The end of the demo: the audit's verdict with its certificate, and what the two sides of `--unsafe` came to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.atomic import write_atomically
from holdfast.demo.count import Tally
from holdfast.demo.orders import SOURCE
from holdfast.demo.screen import number
from holdfast.errors import ExitCode
from holdfast.real import RealFileSystem

if TYPE_CHECKING:
    from holdfast.audit.model import Report

GOOD: Final = "bold green"
BAD: Final = "bold red"
UNDECIDED: Final = "bold yellow"
TITLE: Final = "italic"
PAGE: Final = "certificate.html"
DOCUMENT: Final = "certificate.json"


class Proof(NamedTuple):
    """What three counts say of the same run, none of them knowing the others."""

    pipeline: Report
    """From the topic to the outputs."""
    spool: Report
    """From the sender's disk to the topic."""
    tally: Tally
    """From the seed to the outputs."""

    @property
    def exit_code(self) -> ExitCode:
        codes = {each.verdict.exit_code for each in (self.pipeline, self.spool)}
        if ExitCode.FINDINGS in codes or not self.tally.is_whole:
            return ExitCode.FINDINGS
        return ExitCode(max(codes))


def audit(file: Path, bootstrap: str) -> Report:
    """What the auditor finds: it reads the topic and the outputs, and takes nobody's word for them."""
    from holdfast.audit.pipeline_audit import audit_pipeline
    from holdfast.pipeline.definition.loading import load_pipeline

    return audit_pipeline(load_pipeline(str(file)).definition, bootstrap=bootstrap)


def audit_spool(directory: Path, bootstrap: str) -> Report:
    """Whether everything that the sender's spool has numbered is in the topic."""
    from holdfast.audit.spool import audit_spools

    return audit_spools({"bootstrap.servers": bootstrap}, topics=[SOURCE], spools=[str(directory)])


def figures(report: Report) -> dict[str, int]:
    """The screen's figures as the audit found them, in place of those that were read on the way."""
    from holdfast.audit.model import Fate

    return {
        "stored": sum(account.log_end - account.log_start for account in report.partitions),
        "output": report.total(Fate.OUTPUT) + report.total(Fate.AGGREGATED),
        "dead letter": report.total(Fate.DEAD_LETTER),
        "duplicate": report.total(Fate.DUPLICATE),
        "late": report.total(Fate.LATE),
        "windows": sum(account.windows for account in report.windows),
    }


def certify(report: Report, directory: Path) -> Path:
    """The certificate as a page, whose path is returned, and as a document; those of an earlier demo make room."""
    from holdfast.audit import certificate
    from holdfast.audit.html import page

    directory.mkdir(parents=True, exist_ok=True)
    file, document = directory / PAGE, directory / DOCUMENT
    document.unlink(missing_ok=True)
    made = certificate.write(report, str(document))
    write_atomically(RealFileSystem(), str(file), page(report, made).encode())
    return file


def verdict(report: Report) -> Text:
    """`lost 0, duplicated 0, proven`, or `unaltered`, as the audit says."""
    from holdfast.audit.model import Fate, Verdict

    style = {Verdict.FAILED: BAD, Verdict.INCONCLUSIVE: UNDECIDED}.get(report.verdict, GOOD)
    lost, twice = report.total(Fate.LOST), report.total(Fate.DUPLICATED)
    return Text(f"lost {lost:,}, duplicated {twice:,}, {report.verdict}", style)


def audited(report: Report) -> RenderableType:
    """What became of every record of the topic, by the audit."""
    from holdfast.audit import words

    fates = words.used(account.fates for account in report.partitions)
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("records", justify="right")
    cells = [Text(number(words.records(report)))]
    for fate in fates:
        table.add_column(words.name(fate), justify="right", no_wrap=True)
        cells.append(_cell(report.total(fate), should_be_none=fate.is_fault))
    table.add_row(*cells)
    return Group(Text(f"The audit: {words.looked_at(report)}", TITLE), table, *_remarks(report))


def _remarks(report: Report) -> Iterable[Text]:
    for account in report.windows:
        yield Text(
            f"{account.windows:,} windows of {account.step!r}: "
            f"{account.recomputed:,} recomputed from the topic, and found the same"
        )
    for reason in report.reasons:
        yield Text(f"! {reason}", BAD if report.findings else UNDECIDED)


def numbered(spool: Report) -> Text:
    """The audit of the spool in one line."""
    from holdfast.audit.model import Fate, Verdict

    arrived, again = spool.total(Fate.OUTPUT), spool.total(Fate.DUPLICATE)
    if spool.verdict is Verdict.PROVEN:
        twice = f"; {again:,} were sent once more after the kills" if again else ""
        return Text(f"the spool: all {arrived:,} messages on the sender's disk are in the topic{twice}")
    return Text(f"the spool: {'; '.join(spool.reasons)}", BAD)


def counted(tally: Tally) -> Text:
    """The count of its own in one line."""
    if tally.is_whole:
        return Text(
            f"counted again, order by order: each of {tally.orders:,} orders is there once, "
            f"each of {tally.malformed:,} malformed ones is a dead letter"
        )
    return Text(
        f"counted again, order by order: {tally.lost:,} lost, {tally.surplus_rows:,} rows too many, "
        f"{len(tally.untraced):,} malformed messages without a trace, "
        f"{len(tally.taken_for_good):,} taken for good ones",
        BAD,
    )


def beside(ours: Tally, plain: Tally) -> RenderableType:
    """Both sides, counted in the same way."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("")
    table.add_column("holdfast", justify="right")
    table.add_column("plain clients and Spark", justify="right")
    sides = (ours, plain)
    table.add_row("orders that customers were told are taken", *(number(each.orders) for each in sides))
    for what, counts in (
        ("lost before the broker", [len(each.lost_before_broker) for each in sides]),
        ("lost behind it", [len(each.lost_behind_broker) for each in sides]),
        ("there twice", [len(each.twice) for each in sides]),
        ("malformed, and gone without a trace", [len(each.untraced) for each in sides]),
        ("malformed, and taken for good", [len(each.taken_for_good) for each in sides]),
    ):
        table.add_row(what, *(_cell(each, should_be_none=True) for each in counts))
    return Group(Text("The same storm, counted by the same count", TITLE), table)


def _cell(value: int, *, should_be_none: bool) -> Text:
    style = "" if not should_be_none else GOOD if value == 0 else BAD
    return Text(number(value), style)
