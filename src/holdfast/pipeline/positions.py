"""Where a pipeline stands in its source, and the range of a batch.

A position names the incarnation of a topic (its id) and the leader epoch under which the last record before it was
read, because an offset alone does not say which record it means: a topic deleted and created again starts counting
anew, and a log cut by a leader change counts on with other records. Both are compared before anything is read; neither
is guessed.

Everything here is plain values with one JSON form, the one in which ledgers and plans keep them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Place(NamedTuple):
    """One partition of one incarnation of a topic."""

    topic: str
    topic_id: uuid.UUID
    partition: int


class Position(NamedTuple):
    """The next offset to read, and the leader epoch of what was read before it (-1: not known)."""

    offset: int
    leader_epoch: int = -1


class Span(NamedTuple):
    """What one batch takes of one partition: from `start`, up to and not including `end`."""

    start: int
    end: int
    leader_epoch: int = -1

    @property
    def offsets(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Positions:
    """Where something stands in every partition it knows."""

    at: Mapping[Place, Position]

    def __iter__(self) -> Iterator[Place]:
        return iter(self.at)

    def of(self, topic: str, partition: int) -> tuple[Place, Position] | None:
        """The position in this partition, whatever the topic's incarnation."""
        for place, position in self.at.items():
            if place.topic == topic and place.partition == partition:
                return place, position
        return None

    def moved(self, batch: BatchRange) -> Positions:
        """The positions after this batch."""
        after = {place: Position(span.end, span.leader_epoch) for place, span in batch.spans.items()}
        return Positions({**self.at, **after})

    def as_json(self) -> dict[str, Any]:
        return _by_topic({place: [at.offset, at.leader_epoch] for place, at in self.at.items()})

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Positions:
        return cls({place: Position(*numbers) for place, numbers in _places(document)})


@dataclass(frozen=True)
class BatchRange:
    """What one batch takes of every partition. A partition of which it takes nothing may be left out."""

    spans: Mapping[Place, Span]

    @property
    def offsets(self) -> int:
        """How many offsets the batch covers; not a number of records, since markers and gaps count."""
        return sum(span.offsets for span in self.spans.values())

    def __bool__(self) -> bool:
        return self.offsets > 0

    def __str__(self) -> str:
        parts = (
            f"{place.topic}-{place.partition} [{span.start}, {span.end})"
            for place, span in sorted(self.spans.items())
        )
        return ", ".join(parts) or "nothing"

    def as_json(self) -> dict[str, Any]:
        return _by_topic({place: list(span) for place, span in self.spans.items()})

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> BatchRange:
        return cls({place: Span(*numbers) for place, numbers in _places(document)})


def _by_topic(numbers: Mapping[Place, list[int]]) -> dict[str, Any]:
    topics: dict[str, Any] = {}
    for place, values in sorted(numbers.items()):
        topic = topics.setdefault(place.topic, {"id": str(place.topic_id), "partitions": {}})
        topic["partitions"][str(place.partition)] = values
    return topics


def _places(document: Mapping[str, Any]) -> Iterator[tuple[Place, list[int]]]:
    for topic, content in document.items():
        topic_id = uuid.UUID(content["id"])
        for partition, numbers in content["partitions"].items():
            yield Place(topic, topic_id, int(partition)), numbers


def to_text(document: Mapping[str, Any]) -> str:
    """JSON that is the same for the same content, so that it can be compared and hashed."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
