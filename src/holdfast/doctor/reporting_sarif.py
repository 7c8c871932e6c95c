"""Findings as SARIF 2.1.0, the format in which code hosts and editors show what a checker found.

A place in a file is a physical location with a relative path and a line; anything else a logical one. What was
suppressed is there too, marked with its reason; what could not be examined is a notification, and the run then says
that it was not successful.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import quote

from holdfast import __version__
from holdfast.doctor.findings import Examination, Finding, Place, Suppressed
from holdfast.doctor.reporting import See, what_there_is
from holdfast.doctor.risks import RISKS

SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def as_sarif(examination: Examination, see: See = what_there_is) -> dict[str, Any]:
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
                        "rules": [_rule(risk_id, see) for risk_id in used],
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


def _rule(risk_id: str, see: See) -> dict[str, Any]:
    risk = RISKS[risk_id]
    help_text = "\n".join([f"Prevented by: {risk.remedy}.", *(f"See {what}" for what in see(risk_id))])
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


def _location(place: Place) -> dict[str, Any]:
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
