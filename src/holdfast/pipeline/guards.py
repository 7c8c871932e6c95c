"""Checks before anything is read: a position still means the record it meant when it was taken.

An offset is a promise about one log. Four things break it, and each would lose or repeat records without a word: the
topic was deleted and created again (HF408), retention or DeleteRecords moved the log's start past the position (HF401),
the log's end fell below it, or a leader change cut what was read and wrote other records in its place. All are looked
for by name, from positions that carry topic id and leader epoch; none is mended by guessing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from holdfast.errors import HoldfastError
from holdfast.pipeline.positions import Place, Position, Positions
from holdfast.reader import OffsetAnswer, OffsetSpec, TopicInfo, TopicPartition


class GuardTripped(HoldfastError):
    """Going on would lose or repeat records; the message says which, and what can be done."""

    exit_code = 3


class Offsets(Protocol):
    """What is asked of a cluster."""

    def offsets(
        self, partitions: list[TopicPartition], spec: OffsetSpec
    ) -> Mapping[TopicPartition, OffsetAnswer]: ...

    def epoch_ends(
        self, epochs: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, tuple[int, int]]: ...


def check_positions(
    cluster: Offsets, standing: Positions, topics: Mapping[str, TopicInfo], pattern: str | None = None
) -> None:
    """`GuardTripped` unless every position still stands in the log it was taken from; `pattern` found the topics."""
    for place in standing:
        _check_identity(place, standing.at[place], topics.get(place.topic), pattern)
    keys = [TopicPartition(place.topic, place.partition) for place in standing]
    if not keys:
        return
    starts, ends = cluster.offsets(keys, "earliest"), cluster.offsets(keys, "latest")
    epochs = {
        TopicPartition(place.topic, place.partition): position.leader_epoch
        for place, position in standing.at.items()
        if position.leader_epoch >= 0 and position.offset > 0
    }
    epoch_ends = cluster.epoch_ends(epochs) if epochs else {}
    for place, position in standing.at.items():
        key = TopicPartition(place.topic, place.partition)
        _check_bounds(key, position, starts[key].offset, ends[key].offset)
        if key in epoch_ends:
            _check_epoch(key, position, *epoch_ends[key])


def without(topic: str, pattern: str) -> str:
    """The pattern that finds what this one finds, but for this topic."""
    return f"(?!{re.escape(topic)}$)(?:{pattern})"


def _check_identity(
    place: Place, position: Position, topic: TopicInfo | None, pattern: str | None = None
) -> None:
    name = f"{place.topic}-{place.partition}"
    if topic is None:
        out = "take the topic out of the definition"
        if pattern is not None:
            out = f"leave it out of the source's pattern, which is then {without(place.topic, pattern)!r}"
        raise GuardTripped(
            f"topic {place.topic!r} is gone; this stands at offset {position.offset} of {name}. If that was meant, "
            f"{out}; what the topic held beyond the position cannot be read any more"
        )
    if topic.topic_id != place.topic_id:
        raise GuardTripped(
            f"topic {place.topic!r} was deleted and created again (id {place.topic_id}, now {topic.topic_id}): offset "
            f"{position.offset} of {name} would now point at other records, and those before it would be skipped "
            "(HF408). Reset the pipeline to read the new topic from its beginning"
        )
    if place.partition not in topic.partitions:
        raise GuardTripped(
            f"partition {name} is gone: the topic has {len(topic.partitions)} partitions now. Partitions never go from "
            "a living topic; this is another cluster, or its metadata was restored from an older state"
        )


def _check_bounds(key: TopicPartition, position: Position, start: int, end: int) -> None:
    name = f"{key.topic}-{key.partition}"
    if position.offset < start:
        raise GuardTripped(
            f"{start - position.offset} offsets of {name} are gone: this stands at {position.offset}, and the log "
            f"now starts at {start} (retention or DeleteRecords passed the position, HF401). To go on without them, "
            "reset the pipeline to the log's start"
        )
    if position.offset > end:
        raise GuardTripped(
            f"the log of {name} ends at {end}, before {position.offset} where this stands: {position.offset - end} "
            "offsets that were read are not there any more (a leader without the newest records took over, or the "
            "cluster was restored). New records would be taken for old ones and skipped"
        )


def _check_epoch(key: TopicPartition, position: Position, epoch: int, end: int) -> None:
    """The log's answer for an epoch it holds no record of is the epoch below it, with the end of that: only an end
    below the position, or no answer at all, means that what was read is gone."""
    if epoch >= 0 and end >= position.offset:
        return
    known = f"ends at {end} there" if epoch >= 0 else "is not known there, nor any before it"
    raise GuardTripped(
        f"the log of {key.topic}-{key.partition} was cut below offset {position.offset} and written anew: what was "
        f"read last had leader epoch {position.leader_epoch}, which {known}. Records that were read are not in the "
        "log, and others stand in their place"
    )
