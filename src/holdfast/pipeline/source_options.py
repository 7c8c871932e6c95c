"""The options of the Spark source, under the names Spark's own Kafka connector gave them.

Where a name means a way to lose records, it is refused with the reason instead of being obeyed: `failOnDataLoss=false`
turns a lost range into an empty one (HF401).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.errors import UsageError
from holdfast.reader import TopicPartition

MAX_OFFSETS = 2_000_000
IGNORED = frozenset(
    {"path", "includeheaders", "fetchoffset.numretries", "fetchoffset.retryintervalms", "groupidprefix"}
)
"""Options of Spark's connector that have nothing to do here, or are always on."""
REFUSED = {
    "kafka.group.id": "this source joins no group and commits nothing: Spark's checkpoint holds its positions",
    "kafka.auto.offset.reset": "use startingOffsets",
    "kafka.enable.auto.commit": "this source commits nothing: Spark's checkpoint holds its positions",
    "kafka.key.deserializer": "keys are bytes; decode them with Spark's functions",
    "kafka.value.deserializer": "values are bytes; decode them with Spark's functions",
}

Edge = Literal["earliest", "latest"] | int | dict[TopicPartition, int]
"""Where a range begins or ends: an end of the log, a time in milliseconds, or an offset for each partition (where -2
stands for the earliest and -1 for the latest)."""


class SourceOptionError(UsageError):
    """An option of the source has a name or a value that cannot be right."""


@dataclass(frozen=True)
class SourceOptions:
    """What to read, from where, and how much at a time."""

    settings: Mapping[str, str]
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    starting: Edge = "earliest"
    ending: Edge = "latest"
    max_offsets: int = MAX_OFFSETS
    min_partitions: int = 1
    max_records: int = 0
    """Of a partition of Spark's; 0: as many as go on the cores where those are known."""
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
    assigned: frozenset[TopicPartition] = field(default_factory=frozenset)
    """The only partitions to read; empty: all of them."""


def parse_options(options: Mapping[str, str]) -> SourceOptions:
    """The options as Spark gives them: names in any case."""
    known = {name.lower(): value for name, value in options.items()}
    settings = {
        name.removeprefix("kafka."): value for name, value in known.items() if name.startswith("kafka.")
    }
    for name, reason in REFUSED.items():
        if name in known:
            raise SourceOptionError(f"the option {name} is not for this source: {reason}")
    if known.get("failondataloss", "true").lower() != "true":
        raise SourceOptionError(
            "failOnDataLoss=false makes a lost range look like an empty one (HF401); this source always stops and "
            "names what is gone. To go on after a loss, start a new query at the offsets you accept"
        )
    if "bootstrap.servers" not in settings:
        raise SourceOptionError("the option kafka.bootstrap.servers is missing: host:port of a broker")
    isolation = settings.pop("isolation.level", "read_committed")
    if isolation not in ("read_committed", "read_uncommitted"):
        raise SourceOptionError(
            f"kafka.isolation.level is read_committed or read_uncommitted, not {isolation!r}"
        )
    topics, pattern, assigned = _subscription(known)
    _refuse_unknown(known)
    return SourceOptions(
        settings=settings,
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        starting=_edge(known, "startingOffsets", "startingTimestamp", "earliest"),
        ending=_edge(known, "endingOffsets", "endingTimestamp", "latest"),
        max_offsets=_count(known, "maxOffsetsPerTrigger", MAX_OFFSETS),
        min_partitions=_count(known, "minPartitions", 1),
        max_records=_count(known, "maxRecordsPerPartition", 0),
        isolation="read_uncommitted" if isolation == "read_uncommitted" else "read_committed",
    )


NAMES = (
    "subscribe", "subscribePattern", "assign", "startingOffsets", "startingTimestamp", "endingOffsets",
    "endingTimestamp", "maxOffsetsPerTrigger", "minPartitions", "maxRecordsPerPartition", "failOnDataLoss",
)  # fmt: skip


def _refuse_unknown(known: Mapping[str, str]) -> None:
    names = {name.lower() for name in NAMES} | IGNORED
    for name in known:
        if name not in names and not name.startswith("kafka."):
            raise SourceOptionError(
                f"this source has no option {name!r}; it has {', '.join(NAMES)} and kafka.*"
            )


def _subscription(known: Mapping[str, str]) -> tuple[tuple[str, ...], str | None, frozenset[TopicPartition]]:
    given = [name for name in ("subscribe", "subscribepattern", "assign") if known.get(name)]
    if len(given) != 1:
        raise SourceOptionError("give exactly one of subscribe, subscribePattern and assign")
    if given[0] == "subscribe":
        topics = tuple(dict.fromkeys(name.strip() for name in known["subscribe"].split(",") if name.strip()))
        if not topics:
            raise SourceOptionError("subscribe names no topic")
        return topics, None, frozenset()
    if given[0] == "subscribepattern":
        try:
            re.compile(known["subscribepattern"])
        except re.error as error:
            raise SourceOptionError(f"subscribePattern is no regular expression: {error}") from None
        return (), known["subscribepattern"], frozenset()
    assigned = frozenset(
        TopicPartition(topic, int(partition))
        for topic, partitions in _json("assign", known["assign"]).items()
        for partition in partitions
    )
    return tuple(sorted({place.topic for place in assigned})), None, assigned


def _edge(
    known: Mapping[str, str], offsets_name: str, time_name: str, default: Literal["earliest", "latest"]
) -> Edge:
    offsets, time = known.get(offsets_name.lower()), known.get(time_name.lower())
    if offsets is not None and time is not None:
        raise SourceOptionError(f"give {offsets_name} or {time_name}, not both")
    if time is not None:
        if not time.isdigit():
            raise SourceOptionError(f"{time_name} is a time in milliseconds since 1970, not {time!r}")
        return int(time)
    if offsets is None:
        return default
    if offsets in ("earliest", "latest"):
        return "earliest" if offsets == "earliest" else "latest"
    return {
        TopicPartition(topic, int(partition)): int(offset)
        for topic, partitions in _json(offsets_name, offsets).items()
        for partition, offset in partitions.items()
    }


def _json(name: str, text: str) -> dict[str, dict[str, int]]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise SourceOptionError(f"{name} is no JSON: {error}") from None
    if not isinstance(document, dict) or not all(
        isinstance(part, (dict, list)) for part in document.values()
    ):
        raise SourceOptionError(f'{name} is JSON like {{"topic": {{"0": 23, "1": -2}}}}, not {text[:80]!r}')
    return document


def _count(known: Mapping[str, str], name: str, default: int) -> int:
    text = known.get(name.lower())
    if text is None:
        return default
    if not text.isdigit() or int(text) < 1:
        raise SourceOptionError(f"{name} is a number of at least 1, not {text!r}")
    return int(text)
