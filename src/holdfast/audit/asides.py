"""Dead letters of plain consumers and foreign jobs, as the offsets they came from.

Every dialect that `holdfast.client.dead_letter_dialects` reads is understood; a letter that does not say where it came
from accounts for nothing, nor does one of another group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from holdfast.audit.heaps import Numbers
from holdfast.audit.record_walk import await_decided
from holdfast.client.dead_letter_dialects import read_failure
from holdfast.reader import Cluster, TopicPartition, ranges_of


@dataclass(frozen=True)
class DeadLetters:
    """What was set aside."""

    offsets: Mapping[TopicPartition, Numbers] = field(default_factory=dict)
    """Of the records, by partition."""
    undecided: int = 0
    """How many letters there may be that nobody can read yet: behind a transaction that is still open."""


def read_dead_letters(
    topic: str | None, settings: Mapping[str, str], group: str | None = None
) -> DeadLetters:
    """The origins of a topic's letters, by partition; nothing without a topic.

    With a group, those that it gave up on: of dialects that do not name one, all.
    """
    if topic is None:
        return DeadLetters()
    found: dict[TopicPartition, list[int]] = {}
    with Cluster(settings) as cluster:
        # A `Processor` sets aside in the transaction that moves its position on.
        undecided = sum(await_decided(cluster, [topic]).values())
        for batch in cluster.read(ranges_of(cluster, topic)):
            for headers in batch.column("headers").to_pylist():
                failure = read_failure([(each["key"], each["value"]) for each in headers or ()])
                if failure is None or (group is not None and failure.group not in (None, group)):
                    continue
                origin, partition, offset = failure.topic, failure.partition, failure.offset
                if origin is not None and partition is not None and offset is not None:
                    found.setdefault(TopicPartition(origin, partition), []).append(offset)
    by_place = {place: np.unique(np.array(offsets, np.int64)) for place, offsets in found.items()}
    return DeadLetters(by_place, undecided)
