"""A report as JUnit XML, for the servers that show tests.

One case for each partition, each sink and each step with windows, and one for what stays unproven. A finding fails the
cases of its partition and its sink. What keeps the verdict open is an error, not a skipped test: servers show skipped
tests as good, and an audit that could not look must not look like one that did.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple
from xml.etree import ElementTree

from holdfast.audit import words
from holdfast.audit.model import Finding, Report

SUITE: Final = "holdfast audit"
FORBIDDEN: Final = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold, whatever a key has in it: they are shown by their numbers."""


class Case(NamedTuple):
    classname: str
    name: str
    findings: Sequence[Finding] = ()
    gaps: Sequence[str] = ()
    output: Sequence[str] = ()


def cases(report: Report) -> Iterator[Case]:
    base = f"holdfast.audit.{report.mode}.{report.subject}"
    for account in report.partitions:
        here = [each for each in report.findings if each.place == account.place]
        name = f"{words.place_text(account.place)} offsets {words.span_text(account.start, account.end)}"
        fates = words.used([account.fates])
        counts = ", ".join(f"{words.name(fate)} {account.fates.get(fate, 0):,}" for fate in fates)
        yield Case(f"{base}.partitions", name, here, output=[counts])
    known = {account.place for account in report.partitions}
    named = {sink.name for sink in report.sinks}
    for sink in report.sinks:
        here = [each for each in report.findings if each.sink == sink.name]
        lines = [f"{sink.rows:,} rows, {sink.entries:,} entries of the ledger"]
        lines += [
            f"{each.name}: {each.recomputed:,} recomputed, {each.unaltered:,} unaltered, {each.trusted:,} trusted"
            for each in report.coverage
            if each.sink == sink.name
        ]
        yield Case(f"{base}.sinks", f"{sink.name} ({sink.kind})", here, output=lines)
    for window in report.windows:
        said = f"{window.recomputed:,} of {window.windows:,} windows made again from the source"
        yield Case(f"{base}.windows", f"{window.step} in {window.sink}", output=[said])
    elsewhere = [each for each in report.findings if each.place not in known and each.sink not in named]
    if elsewhere:
        yield Case(base, "anything else", elsewhere)
    yield Case(
        base,
        "everything that had to be looked at was",
        gaps=() if report.findings else report.reasons,
        output=[f"not proven: {each.what}: {each.why}" for each in report.unproven if not each.is_gap],
    )


def junit(report: Report) -> str:
    """The XML."""
    found = list(cases(report))
    counts = {
        "tests": str(len(found)),
        "failures": str(sum(bool(each.findings) for each in found)),
        "errors": str(sum(bool(each.gaps) for each in found)),
        "skipped": "0",
        "time": f"{report.took_ms / 1000:.3f}",
    }
    root = ElementTree.Element("testsuites", {"name": SUITE, **counts})
    started = datetime.fromtimestamp(report.started_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    attributes = {"name": f"{SUITE} {report.subject}", "timestamp": started, **counts}
    suite = ElementTree.SubElement(root, "testsuite", attributes)
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("verdict", report.verdict), ("line", words.verdict_line(report))):
        ElementTree.SubElement(properties, "property", {"name": name, "value": value})
    for each in found:
        _add(suite, each)
    ElementTree.indent(root)
    xml = ElementTree.tostring(root, encoding="unicode")
    shown = FORBIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), xml)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{shown}\n'


def _add(suite: ElementTree.Element, case: Case) -> None:
    attributes = {"classname": case.classname, "name": case.name, "time": "0"}
    element = ElementTree.SubElement(suite, "testcase", attributes)
    if case.findings:
        first = case.findings[0]
        more = f" (and {len(case.findings) - 1} more)" if len(case.findings) > 1 else ""
        attributes = {"type": first.fate, "message": first.what() + more}
        failure = ElementTree.SubElement(element, "failure", attributes)
        failure.text = "\n".join(each.what() for each in case.findings)
    if case.gaps:
        attributes = {"type": "inconclusive", "message": case.gaps[0]}
        ElementTree.SubElement(element, "error", attributes).text = "\n".join(case.gaps)
    if case.output:
        ElementTree.SubElement(element, "system-out").text = "\n".join(case.output)
