"""The committed positions of all groups of one shard.

A position is one record: its key names group, topic and partition, a record without value takes it back. Positions
committed in a transaction are *pending* under the producer's id until the marker of that transaction is in the log:
then they count, or are forgotten. While a position is pending, readers who ask for stable ones are told to wait.

Rules kept:

- Of a plain commit and a transactional one for the same partition the later *commit* wins, whenever the marker came.
  `Position.order` says which was later; replaying the log gives the same order again.
- Forgetting a position forgets what is pending for it too, unless that is for a topic made anew under the name.
- What is here is what replaying the journal gives: `OffsetReplay` keeps the same rules on undecoded records.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import (
    NO_TOPIC_ID,
    CommitReply,
    CommitRequest,
    Group,
    PartitionCheck,
    PartitionCommit,
    Position,
    Records,
    Surroundings,
    TopicCommit,
    TransactionalCommit,
)
from holdfast.broker.groups.names import has_room
from holdfast.broker.groups.offsets_replay import OffsetReplay
from holdfast.seams import Now
from holdfast.wire.coordinator_records import OffsetCommitKey, OffsetCommitValue

DEFAULT_RETENTION: Final = -1
MINUTE_MS: Final = 60_000
END_OF_TIME_MS: Final = 2**63 - 1
"""The latest time a record can name."""
BATCH_BYTES: Final = 512 * 1024
"""Tombstones of one batch: half of what `max.message.bytes` allows by default."""

Partitions = dict[tuple[str, int], Position]
NOTHING: Final[Mapping[tuple[str, int], Position]] = {}


class Tombstone(NamedTuple):
    """The record that takes one position out of the log: a key without a value."""

    topic: str
    partition: int
    key: bytes


class OffsetStore:
    def __init__(self, surroundings: Surroundings) -> None:
        self._around = surroundings
        self._positions: dict[str, Partitions] = {}
        self._pending: dict[int, dict[str, Partitions]] = {}
        """By producer id, then by group: one transaction may commit for several."""
        self._open: dict[str, set[int]] = {}
        """The producers whose transactions hold something of a group."""
        self._order = 0

    # Looking

    def of_group(self, group_id: str) -> Mapping[tuple[str, int], Position]:
        return self._positions.get(group_id, NOTHING)

    def groups(self) -> list[str]:
        """Whose positions are here, pending ones included."""
        return list(self._positions.keys() | self._open.keys())

    def has_open_transactions(self, group_id: str) -> bool:
        return group_id in self._open

    def is_pending(self, group_id: str, topic: str, partition: int) -> bool:
        return any(
            (topic, partition) in self._pending[producer_id][group_id]
            for producer_id in self._open.get(group_id, ())
        )

    def pending_of(self, group_id: str) -> set[tuple[str, int]]:
        found: set[tuple[str, int]] = set()
        for producer_id in self._open.get(group_id, ()):
            found.update(self._pending[producer_id][group_id])
        return found

    # Committing

    def commit(self, request: CommitRequest, check: PartitionCheck | None, now: Now) -> CommitReply:
        expire_ms = -1
        if request.retention_ms != DEFAULT_RETENTION:
            expire_ms = min(now.wall_ms + request.retention_ms, END_OF_TIME_MS)
        reply, accepted = self._judge(request.topics, check, now, expire_ms)
        if accepted:
            self._around.journal.append(_records(request.group_id, accepted), now)
            self._store(self._positions.setdefault(request.group_id, {}), accepted)
        return reply

    def commit_in_transaction(
        self, request: TransactionalCommit, check: PartitionCheck | None, now: Now
    ) -> CommitReply:
        reply, accepted = self._judge(request.topics, check, now, -1)
        if accepted:
            self._around.journal.append(
                _records(request.group_id, accepted),
                now,
                producer=(request.producer_id, request.producer_epoch),
            )
            self._store(self._pending_for(request.producer_id, request.group_id), accepted)
        return reply

    def _judge(
        self, topics: tuple[TopicCommit, ...], check: PartitionCheck | None, now: Now, expire_ms: int
    ) -> tuple[CommitReply, Partitions]:
        metadata_max = self._around.settings().offset_metadata_max_bytes
        reply: CommitReply = {}
        accepted: Partitions = {}
        for topic, topic_id, partitions in topics:
            for partition in partitions:
                key = (topic, partition.partition)
                metadata = partition.metadata
                # Versions of OffsetFetch before 6 have no room for more, whatever the setting allows.
                if metadata is not None and (len(metadata) > metadata_max or not has_room(metadata)):
                    reply[key] = ErrorCode.offset_metadata_too_large
                    continue
                if check is not None:
                    check(topic, topic_id, partition.partition)
                reply[key] = ErrorCode.none
                accepted[key] = _position(partition, topic_id, now, expire_ms)
        return reply, accepted

    def _store(self, place: Partitions, accepted: Partitions) -> None:
        for key, position in accepted.items():
            self._order += 1
            place[key] = position._replace(order=self._order)

    def _pending_for(self, producer_id: int, group_id: str) -> Partitions:
        self._open.setdefault(group_id, set()).add(producer_id)
        return self._pending.setdefault(producer_id, {}).setdefault(group_id, {})

    # Transactions

    def end_transaction(self, producer_id: int, is_commit: bool) -> list[str]:
        """The marker is in the log: what was pending counts or is gone. Returns the groups it was about."""
        pending = dict(self._pending.get(producer_id, {}))
        for group_id, partitions in pending.items():
            self._close(producer_id, group_id)
            if not is_commit:
                continue
            positions = self._positions.setdefault(group_id, {})
            for key, position in partitions.items():
                known = positions.get(key)
                if known is None or known.order < position.order:
                    positions[key] = position
        return list(pending)

    # Forgetting

    def tombstones(
        self, group_id: str, partitions: Iterable[tuple[str, int]] | None = None
    ) -> list[list[Tombstone]]:
        """What takes positions, or all of a group, out of the log, in parts that fit a batch each."""
        wanted = self.of_group(group_id).keys() | self.pending_of(group_id)
        if partitions is not None:
            wanted &= set(partitions)
        parts: list[list[Tombstone]] = []
        size = BATCH_BYTES
        for topic, partition in sorted(wanted):
            key = OffsetCommitKey(group_id, topic, partition).encode()
            if size >= BATCH_BYTES:
                parts.append([])
                size = 0
            size += len(key)
            parts[-1].append(Tombstone(topic, partition, key))
        return parts

    def forget(self, group_id: str, topic: str, partition: int) -> None:
        self._forget_where(group_id, (topic, partition), lambda position: True)

    def _forget_where(
        self, group_id: str, key: tuple[str, int], is_doomed: Callable[[Position], bool]
    ) -> None:
        positions = self._positions.get(group_id, {})
        if key in positions and is_doomed(positions[key]):
            del positions[key]
            if not positions:
                del self._positions[group_id]
        for producer_id in list(self._open.get(group_id, ())):
            pending = self._pending[producer_id][group_id]
            if key in pending and is_doomed(pending[key]):
                del pending[key]
                if not pending:
                    self._close(producer_id, group_id)

    def _close(self, producer_id: int, group_id: str) -> None:
        """Nothing of this group is pending for this producer any more."""
        groups = self._pending[producer_id]
        del groups[group_id]
        if not groups:
            del self._pending[producer_id]
        producers = self._open[group_id]
        producers.discard(producer_id)
        if not producers:
            del self._open[group_id]

    def expired(self, group: Group, now: Now) -> tuple[list[tuple[str, int]], bool]:
        """Positions whose time is up, and whether these are all that the group has."""
        retention_ms = self._around.settings().offsets_retention_minutes * MINUTE_MS
        positions = self.of_group(group.group_id)
        due: list[tuple[str, int]] = []
        pending = self.pending_of(group.group_id)
        for key, position in positions.items():
            base_ms = group.expiry_base_ms(position.commit_ms)
            if base_ms is None or key in pending or group.is_subscribed_to(key[0]):
                continue
            if position.expire_ms >= 0:
                is_due = now.wall_ms >= position.expire_ms
            else:
                is_due = now.wall_ms - base_ms >= retention_ms
            if is_due:
                due.append(key)
        return due, len(due) == len(positions) and not self.has_open_transactions(group.group_id)

    def strangers(self, names: Container[str] | None = None) -> dict[str, list[tuple[str, int]]]:
        """Positions, by group, in topics that are gone, or whose name another topic has by now.

        With `names`, only in topics of these names. Where a group has a good position for the partition as well,
        pending or not, a tombstone would take that, too. There the strange one is forgotten here, and is not among
        what is returned: in the log the good one follows it, and a start judges again what it finds.
        """
        is_strange = self._judge_of_topics()
        found: dict[str, list[tuple[str, int]]] = {}
        for group_id in self.groups():
            strange: set[tuple[str, int]] = set()
            good: set[tuple[str, int]] = set()
            for place in self._places_of(group_id):
                for key, position in place.items():
                    if names is None or key[0] in names:
                        (strange if is_strange(key[0], position) else good).add(key)
            for key in strange & good:
                self._forget_where(group_id, key, partial(is_strange, key[0]))
            if strange - good:
                found[group_id] = list(strange - good)
        return found

    def _places_of(self, group_id: str) -> list[Mapping[tuple[str, int], Position]]:
        """Where a group's positions are: those that count, and those of each transaction."""
        producers = self._open.get(group_id, ())
        return [
            self.of_group(group_id),
            *(self._pending[producer_id][group_id] for producer_id in producers),
        ]

    def _judge_of_topics(self) -> Callable[[str, Position], bool]:
        """Says whether a position is in a topic that is gone; each topic is looked up once."""
        ids: dict[str, UUID | None] = {}

        def is_strange(topic: str, position: Position) -> bool:
            if topic not in ids:
                facts = self._around.topics.by_name(topic)
                ids[topic] = None if facts is None else facts.topic_id
            return ids[topic] is None or position.topic_id not in (NO_TOPIC_ID, ids[topic])

        return is_strange

    # The log

    def restore(self, replay: OffsetReplay) -> None:
        """Take over what was found in the log."""
        for group_id, topic, partition, position, producer_id in replay.finish():
            if producer_id is None:
                place = self._positions.setdefault(group_id, {})
            else:
                place = self._pending_for(producer_id, group_id)
            place[topic, partition] = position
            self._order = max(self._order, position.order)


def _position(partition: PartitionCommit, topic_id: UUID, now: Now, expire_ms: int) -> Position:
    return Position(
        partition.offset,
        partition.leader_epoch,
        partition.metadata or "",
        now.wall_ms,
        expire_ms,
        topic_id,
    )


def _records(group_id: str, accepted: Partitions) -> Records:
    return [
        (
            OffsetCommitKey(group_id, topic, partition).encode(),
            OffsetCommitValue(
                offset=position.offset,
                leader_epoch=position.leader_epoch,
                metadata=position.metadata,
                commit_timestamp=position.commit_ms,
                expire_timestamp=position.expire_ms,
                topic_id=position.topic_id,
            ).encode(),
        )
        for (topic, partition), position in accepted.items()
    ]
