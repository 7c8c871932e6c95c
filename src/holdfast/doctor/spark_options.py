"""Spark's options for Kafka, wherever they are written: in code, or in a file of options.

A stream starts at the end unless told otherwise, a batch at the beginning. Spark hands every `kafka.` option on to
its consumer, which reads uncommitted messages unless told otherwise. Option names are not case-sensitive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.doctor.client_settings import shown
from holdfast.doctor.findings import Finding, Fix, Location, Severity, finding

TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm", "/run")
REFUSED = {
    "kafka.group.id": None,
    "kafka.auto.offset.reset": "startingOffsets",
    "kafka.enable.auto.commit": None,
}
"""Options the source refuses, or that do nothing, and what was meant."""


@dataclass(frozen=True)
class Option:
    name: str
    value: Any
    place: Location


Options = dict[str, Option]
"""By name in lower case."""


def is_temporary(path: str) -> bool:
    plain = path.removeprefix("file://").removeprefix("file:")
    return any(plain == root or plain.startswith(f"{root}/") for root in TEMPORARY)


def _set(name: str, value: str) -> Fix:
    return Fix(f'.option("{name}", "{value}")', "code")


def check_source(
    options: Options, place: Location, *, streaming: bool, open_ended: bool = False
) -> Iterator[Finding]:
    """The options of a Kafka source. With `open_ended` there may be more than are seen."""
    fails = options.get("failondataloss")
    if fails is not None and shown(fails.value).lower() == "false":
        yield finding(
            "HF401",
            fails.place,
            "failOnDataLoss=false: a range that is gone is passed over",
            fix=_set("failOnDataLoss", "true"),
            related=("HF206", "HF408"),
        )
    yield from _start(options, place, streaming, open_ended)
    level = options.get("kafka.isolation.level")
    if level is not None and shown(level.value).lower() == "read_uncommitted":
        yield finding(
            "HF409",
            level.place,
            "kafka.isolation.level=read_uncommitted: messages of aborted transactions are read",
            fix=_set("kafka.isolation.level", "read_committed"),
        )
    elif level is None and not open_ended:
        yield finding(
            "HF409",
            place,
            "kafka.isolation.level is not set, and the default is read_uncommitted",
            severity=Severity.NOTE,
            fix=_set("kafka.isolation.level", "read_committed"),
        )
    for name, meant in REFUSED.items():
        if name in options and meant is not None:
            yield finding(
                "HF000",
                options[name].place,
                f"{options[name].name} is refused by Spark's source; {meant} says where it begins",
                severity=Severity.ERROR,
                fix=_set(meant, "earliest"),
                related=("HF402",),
            )


def _start(options: Options, place: Location, streaming: bool, open_ended: bool) -> Iterator[Finding]:
    starting = options.get("startingoffsets")
    if starting is not None:
        if shown(starting.value).lower() == "latest":
            yield finding(
                "HF402",
                starting.place,
                "startingOffsets=latest: what is in the topic at the first start is skipped",
                fix=_set("startingOffsets", "earliest"),
            )
        return
    by_time = {"startingtimestamp", "startingoffsetsbytimestamp"} & options.keys()
    if streaming and not open_ended and not by_time:
        yield finding(
            "HF402",
            place,
            "startingOffsets is not set, and a stream begins at latest",
            fix=_set("startingOffsets", "earliest"),
        )
