"""Certificates of a world's audits, and one value of one of them changed: the chain must not verify any more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.audit.soundness.damages import Chance

from holdfast.audit import certificate
from holdfast.errors import HoldfastError


@dataclass(frozen=True)
class Certified:
    report: Mapping[str, Any]

    @property
    def subject(self) -> str:
        return str(self.report["subject"])

    def as_json(self) -> dict[str, Any]:
        return dict(self.report)


def forged(reports: Sequence[Mapping[str, Any]], directory: Path, chance: Chance) -> list[str]:
    """What is wrong with verifying them, before and after one was changed."""
    for report in reports:
        certificate.write(Certified(report), str(directory))
    if not _verifies(directory):
        return ["certificates do not verify as they were written"]
    path = chance.choice(sorted(directory.glob("*.json")))
    document = json.loads(path.read_text())
    holder, at = chance.choice(list(_leaves(document)))
    holder[at] = _other(holder[at])
    path.write_text(json.dumps(document))
    return [f"a certificate with another {at!r} verifies"] if _verifies(directory) else []


def _verifies(directory: Path) -> bool:
    try:
        return all(each.is_whole for each in certificate.verify([str(directory)]))
    except HoldfastError:
        return False


def _leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value that is no list or object, as what holds it and its name there."""
    names = value if isinstance(value, dict) else range(len(value))
    for name in names:
        if isinstance(value[name], dict | list):
            yield from _leaves(value[name])
        else:
            yield value, name


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
    return 1
