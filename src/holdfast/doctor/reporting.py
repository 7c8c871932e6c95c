"""What an examination looks like: for people, as JSON, as JUnit, as SARIF.

JSON is versioned: within a version, keys are added and never changed. A page or a lab command is named only when
`what_there_is` says that there is one.

SARIF 2.1.0 is the format in which code hosts and editors show what a checker found. There, a place in a file is a
physical location with a relative path and a line; anything else a logical one. What was suppressed is there too, marked
with its reason; what could not be examined is a notification, and the run then says that it was not successful.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from enum import StrEnum
from typing import Any, Final
from urllib.parse import quote

from holdfast import __version__
from holdfast.doctor.findings import Examination, Finding, Location, Severity, Suppressed
from holdfast.doctor.risks import EXPERIMENTS, PAGES, RISKS

JSON_VERSION: Final = 1


def what_there_is(risk_id: str) -> tuple[str, ...]:
    """The experiment and the page, as far as there are any."""
    shown = (f"holdfast lab run {risk_id}",) if risk_id in EXPERIMENTS else ()
    return (*shown, RISKS[risk_id].page) if risk_id in PAGES else shown


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    SARIF = "sarif"
    JUNIT = "junit"


def summary(examination: Examination) -> str:
    """One line: how many of what, and whether all of it could be examined."""
    counts = [
        f"{count} {severity.value}{'s' * (count != 1)}"
        for severity in (Severity.ERROR, Severity.WARNING, Severity.NOTE)
        if (count := examination.count(severity))
    ]
    nothing = "nothing found" if examination.complete else "nothing found in what could be examined"
    said = ", ".join(counts) if counts else nothing if examination.examined else "nothing was examined"
    if examination.suppressed:
        said += f", {len(examination.suppressed)} suppressed"
    if looked := len(examination.examined):
        said += f"; {looked} thing{'s' * (looked != 1)} examined"
    if not examination.complete:
        said += f"; INCOMPLETE: {len(examination.gaps)} could not be examined"
    return said


def as_text(examination: Examination) -> Iterator[str]:
    """Each finding as a paragraph: what, where, what can be lost, what to do."""
    for found in examination.in_order():
        yield f"{found.id} {found.severity.value}  {found.where}"
        yield f"  {found.found}"
        yield f"  can be lost: {found.loses}"
        if found.fix is not None:
            first, *rest = found.fix.text.splitlines() or [""]
            yield f"  fix: {first}"
            yield from (f"       {line}" for line in rest)
        if found.related:
            yield f"  related: {', '.join(found.related)}"
        yield from (f"  see: {what}" for what in what_there_is(found.id))
        yield ""
    for gap in examination.gaps:
        yield f"not examined: {gap.what}: {gap.why}"
    yield summary(examination)


def fixes(examination: Examination) -> Iterator[str]:
    """The fixes alone, each under the place it belongs to; the same fix once."""
    told: set[tuple[str, str]] = set()
    for found in examination.in_order():
        if found.fix is None or (found.where, found.fix.text) in told:
            continue
        told.add((found.where, found.fix.text))
        yield f"# {found.id} {found.where}: {found.found}"
        pasted = found.fix.kind in ("command", "settings")
        for line in found.fix.text.splitlines():
            yield line if pasted or line.startswith("#") else f"# {line}"


def as_json(examination: Examination) -> dict[str, Any]:
    return {
        "version": JSON_VERSION,
        "complete": examination.complete,
        "counts": {severity.value: examination.count(severity) for severity in Severity},
        "findings": [
            {**found.as_json(), "see": list(what_there_is(found.id))} for found in examination.in_order()
        ],
        "suppressed": [each.as_json() for each in examination.suppressed],
        "notExamined": [asdict(gap) for gap in examination.gaps],
        "examined": list(examination.examined),
    }


_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _xml(text: str) -> str:
    """XML has no way to write some characters; they come from files that are not ours."""
    return _NOT_XML.sub("\ufffd", text)


def as_junit(examination: Examination, fail_on: Severity = Severity.WARNING) -> str:
    """A test case for each finding; one below `fail_on` passes with its text as output; a gap is an error."""
    findings = examination.in_order()
    failing = sum(found.severity.rank >= fail_on.rank for found in findings)
    cases = len(findings) + len(examination.suppressed) + len(examination.gaps)
    suite = ElementTree.Element(
        "testsuite",
        name="holdfast doctor",
        tests=str(max(1, cases)),
        failures=str(failing),
        errors=str(len(examination.gaps)),
        skipped=str(len(examination.suppressed)),
    )
    for found in findings:
        case = ElementTree.SubElement(suite, "testcase", classname=found.id, name=_xml(found.where))
        text = _xml(_paragraph(found))
        if found.severity.rank >= fail_on.rank:
            failure = ElementTree.SubElement(
                case, "failure", message=_xml(found.found), type=found.severity.value
            )
            failure.text = text
        else:
            ElementTree.SubElement(case, "system-out").text = text
    for each in examination.suppressed:
        found = each.finding
        case = ElementTree.SubElement(suite, "testcase", classname=found.id, name=_xml(found.where))
        ElementTree.SubElement(case, "skipped", message=_xml(f"{each.reason} (until {each.expires})"))
    for gap in examination.gaps:
        case = ElementTree.SubElement(suite, "testcase", classname="not examined", name=_xml(gap.what))
        ElementTree.SubElement(case, "error", message=_xml(gap.why), type=gap.kind)
    if cases == 0:
        ElementTree.SubElement(suite, "testcase", classname="holdfast doctor", name="nothing found")
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _paragraph(found: Finding) -> str:
    lines = [found.found, f"can be lost: {found.loses}"]
    if found.fix is not None:
        lines.append(f"fix: {found.fix.text}")
    return "\n".join(lines)


def rendered(examination: Examination, output: Format, *, fail_on: Severity) -> str:
    """Everything but the table, whose look depends on the terminal."""
    match output:
        case Format.JSON:
            return json.dumps(as_json(examination), indent=2, ensure_ascii=False) + "\n"
        case Format.SARIF:
            return json.dumps(as_sarif(examination), indent=2, ensure_ascii=False) + "\n"
        case Format.JUNIT:
            return as_junit(examination, fail_on)
        case Format.TABLE:
            return "\n".join(as_text(examination)) + "\n"


SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def as_sarif(examination: Examination) -> dict[str, Any]:
    findings = examination.in_order()
    used = sorted({found.id for found in (*findings, *(each.finding for each in examination.suppressed))})
    index = {risk_id: number for number, risk_id in enumerate(used)}
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "holdfast doctor",
                        "version": __version__,
                        "rules": [_rule(risk_id) for risk_id in used],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "invocations": [
                    {
                        "executionSuccessful": examination.complete,
                        "toolExecutionNotifications": [
                            {
                                "level": "error",
                                "message": {"text": f"not examined: {gap.what}: {gap.why}"},
                            }
                            for gap in examination.gaps
                        ],
                    }
                ],
                "results": [
                    *(_result(found, index) for found in findings),
                    *(_suppressed(each, index) for each in examination.suppressed),
                ],
            }
        ],
    }


def _rule(risk_id: str) -> dict[str, Any]:
    risk = RISKS[risk_id]
    help_text = "\n".join(
        [f"Prevented by: {risk.remedy}.", *(f"See {what}" for what in what_there_is(risk_id))]
    )
    return {
        "id": risk.id,
        "shortDescription": {"text": _sentence(risk.title)},
        "fullDescription": {"text": _sentence(f"can be lost: {risk.loses}")},
        "help": {"text": help_text},
        "defaultConfiguration": {"level": risk.severity},
    }


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _result(found: Finding, index: dict[str, int]) -> dict[str, Any]:
    text = f"{found.found}\nCan be lost: {found.loses}."
    if found.fix is not None:
        text += f"\nFix: {found.fix.text}"
    return {
        "ruleId": found.id,
        "ruleIndex": index[found.id],
        "level": found.severity.value,
        "message": {"text": text},
        "locations": [_location(found.place)],
        "partialFingerprints": {"holdfast/v1": _fingerprint((found.id, found.place.file, found.found))},
        **({"properties": {"related": list(found.related)}} if found.related else {}),
    }


def _suppressed(each: Suppressed, index: dict[str, int]) -> dict[str, Any]:
    justification = f"{each.reason} (until {each.expires})"
    return {
        **_result(each.finding, index),
        "suppressions": [{"kind": "external", "status": "accepted", "justification": justification}],
    }


def _location(place: Location) -> dict[str, Any]:
    location: dict[str, Any] = {}
    if place.file:
        relative = not os.path.isabs(place.file)
        uri = (
            quote(place.file.replace(os.sep, "/"), errors="surrogateescape")
            if relative
            else "file://" + quote(place.file, errors="surrogateescape")
        )
        physical: dict[str, Any] = {"artifactLocation": {"uri": uri}}
        if place.line:
            physical["region"] = {"startLine": place.line}
        location["physicalLocation"] = physical
    if place.resource:
        location["logicalLocations"] = [{"fullyQualifiedName": place.resource, "kind": "resource"}]
    return location


def _fingerprint(parts: Iterable[str]) -> str:
    """The same finding of the same file, wherever its line has moved to."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:32]
