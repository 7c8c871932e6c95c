"""The committed offsets of all groups of one coordinator partition.

A committed offset is one record: its key names group, topic and partition, a record without value takes it back.
Offsets committed in a transaction are *pending* under the producer's id until the marker of that transaction
is in the log: then they count, or are forgotten. While a committed offset is pending, readers who ask for stable ones
are told to wait.

Rules kept:

- Of a plain commit and a transactional one for the same partition the later *commit* wins, whenever the marker
came. `CommittedOffset.order` says which was later; replaying the log gives the same order again. - Forgetting a
committed offset forgets what is pending for it too, unless that is for a topic recreated under the name. - What is
here is what replaying the journal gives: `OffsetReplay` keeps the same rules on undecoded records.

A log of committed offsets is mostly the same few keys over and over. While it is replayed, keys and values stay
bytes in dictionaries, and follow the rules of `OffsetStore`; `finish` decodes the last value of each key: nothing
is decoded but what is left of the log in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.groups import model
from holdfast.seams import Buffer, Now
from holdfast.wire.coordinator_records import OffsetCommitKey, OffsetCommitValue, decode_group_record

_KINDS: Final = (b"\0\0", b"\0\1")
"""How keys of committed offsets begin: as they are written, and as they were long ago."""
_WRITTEN: Final = _KINDS[1]

LatestValues = dict[bytes, tuple[int, bytes]]
"""Key without its kind, to how many committed offsets came before and the value."""


class StoredOffset(NamedTuple):
    group_id: str
    topic: str
    partition: int
    committed: model.CommittedOffset
    producer_id: int | None
    """Whose transaction it is pending in, if it is."""


class OffsetReplay:
    def __init__(self) -> None:
        self._committed: LatestValues = {}
        self._pending: dict[int, LatestValues] = {}
        self._order = 0

    @staticmethod
    def is_about(key: Buffer) -> bool:
        return key[:2] in _KINDS

    def record(self, key: Buffer, value: Buffer | None, producer_id: int | None) -> None:
        what = bytes(key[2:])
        if value is None:
            self._committed.pop(what, None)
            for pending in self._pending.values():
                pending.pop(what, None)
            return
        self._order += 1
        place = self._committed if producer_id is None else self._pending.setdefault(producer_id, {})
        place[what] = (self._order, bytes(value))

    def end_transaction(self, producer_id: int, is_commit: bool) -> None:
        for what, found in self._pending.pop(producer_id, {}).items():
            if is_commit and self._committed.get(what, (0,))[0] < found[0]:
                self._committed[what] = found

    def finish(self) -> Iterator[StoredOffset]:
        """Everything that is left; a value of a version that is not known here says nothing."""
        yield from self._decoded(self._committed, None)
        for producer_id, pending in self._pending.items():
            yield from self._decoded(pending, producer_id)

    def _decoded(self, found: LatestValues, producer_id: int | None) -> Iterator[StoredOffset]:
        for what, (order, data) in found.items():
            key, value = decode_group_record(_WRITTEN + what, data)
            if isinstance(key, OffsetCommitKey) and isinstance(value, OffsetCommitValue):
                committed = model.CommittedOffset(
                    value.offset,
                    value.leader_epoch,
                    value.metadata,
                    value.commit_timestamp,
                    value.expire_timestamp,
                    value.topic_id,
                    order,
                )
                yield StoredOffset(key.group, key.topic, key.partition, committed, producer_id)


DEFAULT_RETENTION: Final = -1
MINUTE_MS: Final = 60_000
END_OF_TIME_MS: Final = 2**63 - 1
"""The latest time a record can name."""
BATCH_BYTES: Final = 512 * 1024
"""Tombstones of one batch: half of what `max.message.bytes` allows by default."""

GroupOffsets = dict[tuple[str, int], model.CommittedOffset]
NOTHING: Final[Mapping[tuple[str, int], model.CommittedOffset]] = {}


class Tombstone(NamedTuple):
    """The record that takes one committed offset out of the log: a key without a value."""

    topic: str
    partition: int
    key: bytes


class OffsetStore:
    def __init__(self, context: model.CoordinatorContext) -> None:
        self._context = context
        self._committed: dict[str, GroupOffsets] = {}
        self._pending: dict[int, dict[str, GroupOffsets]] = {}
        """By producer id, then by group: one transaction may commit for several."""
        self._open: dict[str, set[int]] = {}
        """The producers whose transactions hold something of a group."""
        self._order = 0

    # Looking

    def of_group(self, group_id: str) -> Mapping[tuple[str, int], model.CommittedOffset]:
        return self._committed.get(group_id, NOTHING)

    def groups(self) -> list[str]:
        """Whose committed offsets are here, pending ones included."""
        return list(self._committed.keys() | self._open.keys())

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

    def commit(
        self, request: model.CommitRequest, check: model.PartitionCheck | None, now: Now
    ) -> model.CommitReply:
        expire_ms = -1
        if request.retention_ms != DEFAULT_RETENTION:
            expire_ms = min(now.wall_ms + request.retention_ms, END_OF_TIME_MS)
        reply, accepted = self._judge(request.topics, check, now, expire_ms)
        if accepted:
            self._context.journal.append(_records(request.group_id, accepted), now)
            self._store(self._committed.setdefault(request.group_id, {}), accepted)
        return reply

    def commit_in_transaction(
        self, request: model.TransactionalCommit, check: model.PartitionCheck | None, now: Now
    ) -> model.CommitReply:
        reply, accepted = self._judge(request.topics, check, now, -1)
        if accepted:
            self._context.journal.append(
                _records(request.group_id, accepted),
                now,
                producer=(request.producer_id, request.producer_epoch),
            )
            self._store(self._pending_for(request.producer_id, request.group_id), accepted)
        return reply

    def _judge(
        self,
        topics: tuple[model.TopicCommit, ...],
        check: model.PartitionCheck | None,
        now: Now,
        expire_ms: int,
    ) -> tuple[model.CommitReply, GroupOffsets]:
        metadata_max = self._context.settings().offset_metadata_max_bytes
        reply: model.CommitReply = {}
        accepted: GroupOffsets = {}
        for topic, topic_id, partitions in topics:
            for partition in partitions:
                key = (topic, partition.partition)
                metadata = partition.metadata
                # Versions of OffsetFetch before 6 have no room for more, whatever the setting allows.
                if metadata is not None and (len(metadata) > metadata_max or not model.has_room(metadata)):
                    reply[key] = ErrorCode.offset_metadata_too_large
                    continue
                if check is not None:
                    check(topic, topic_id, partition.partition)
                reply[key] = ErrorCode.none
                accepted[key] = _committed_offset(partition, topic_id, now, expire_ms)
        return reply, accepted

    def _store(self, place: GroupOffsets, accepted: GroupOffsets) -> None:
        for key, committed in accepted.items():
            self._order += 1
            place[key] = committed._replace(order=self._order)

    def _pending_for(self, producer_id: int, group_id: str) -> GroupOffsets:
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
            committed_offsets = self._committed.setdefault(group_id, {})
            for key, committed in partitions.items():
                known = committed_offsets.get(key)
                if known is None or known.order < committed.order:
                    committed_offsets[key] = committed
        return list(pending)

    # Forgetting

    def tombstones(
        self, group_id: str, partitions: Iterable[tuple[str, int]] | None = None
    ) -> list[list[Tombstone]]:
        """What takes committed offsets, or all of a group, out of the log, in parts that fit a batch each."""
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
        self._forget_where(group_id, (topic, partition), lambda committed: True)

    def _forget_where(
        self, group_id: str, key: tuple[str, int], is_doomed: Callable[[model.CommittedOffset], bool]
    ) -> None:
        committed_offsets = self._committed.get(group_id, {})
        if key in committed_offsets and is_doomed(committed_offsets[key]):
            del committed_offsets[key]
            if not committed_offsets:
                del self._committed[group_id]
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

    def expired(self, group: model.Group, now: Now) -> tuple[list[tuple[str, int]], bool]:
        """Committed offsets whose time is up, and whether these are all that the group has."""
        retention_ms = self._context.settings().offsets_retention_minutes * MINUTE_MS
        committed_offsets = self.of_group(group.group_id)
        due: list[tuple[str, int]] = []
        pending = self.pending_of(group.group_id)
        for key, committed in committed_offsets.items():
            base_ms = group.expiry_base_ms(committed.commit_ms)
            if base_ms is None or key in pending or group.is_subscribed_to(key[0]):
                continue
            if committed.expire_ms >= 0:
                is_due = now.wall_ms >= committed.expire_ms
            else:
                is_due = now.wall_ms - base_ms >= retention_ms
            if is_due:
                due.append(key)
        return due, len(due) == len(committed_offsets) and not self.has_open_transactions(group.group_id)

    def strangers(self, names: Container[str] | None = None) -> dict[str, list[tuple[str, int]]]:
        """Committed offsets, by group, in topics that are gone, or whose name another topic has by now.

        With `names`, only in topics of these names. Where a group has a good committed offset for the partition as
        well, pending or not, a tombstone would take that, too. There the strange one is forgotten here, and is not
        among what is returned: in the log the good one follows it, and a start judges again what it finds.
        """
        is_strange = self._judge_of_topics()
        found: dict[str, list[tuple[str, int]]] = {}
        for group_id in self.groups():
            strange: set[tuple[str, int]] = set()
            good: set[tuple[str, int]] = set()
            for place in self._places_of(group_id):
                for key, committed in place.items():
                    if names is None or key[0] in names:
                        (strange if is_strange(key[0], committed) else good).add(key)
            for key in strange & good:
                self._forget_where(group_id, key, partial(is_strange, key[0]))
            if strange - good:
                found[group_id] = list(strange - good)
        return found

    def _places_of(self, group_id: str) -> list[Mapping[tuple[str, int], model.CommittedOffset]]:
        """Where a group's committed offsets are: those that count, and those of each transaction."""
        producers = self._open.get(group_id, ())
        return [
            self.of_group(group_id),
            *(self._pending[producer_id][group_id] for producer_id in producers),
        ]

    def _judge_of_topics(self) -> Callable[[str, model.CommittedOffset], bool]:
        """Says whether a committed offset is in a topic that is gone; each topic is looked up once."""
        ids: dict[str, UUID | None] = {}

        def is_strange(topic: str, committed: model.CommittedOffset) -> bool:
            if topic not in ids:
                facts = self._context.topics.by_name(topic)
                ids[topic] = None if facts is None else facts.topic_id
            return ids[topic] is None or committed.topic_id not in (model.NO_TOPIC_ID, ids[topic])

        return is_strange

    # The log

    def restore(self, replay: OffsetReplay) -> None:
        """Take over what was found in the log."""
        for group_id, topic, partition, committed, producer_id in replay.finish():
            if producer_id is None:
                place = self._committed.setdefault(group_id, {})
            else:
                place = self._pending_for(producer_id, group_id)
            place[topic, partition] = committed
            self._order = max(self._order, committed.order)


def _committed_offset(
    partition: model.PartitionCommit, topic_id: UUID, now: Now, expire_ms: int
) -> model.CommittedOffset:
    return model.CommittedOffset(
        partition.offset,
        partition.leader_epoch,
        partition.metadata or "",
        now.wall_ms,
        expire_ms,
        topic_id,
    )


def _records(group_id: str, accepted: GroupOffsets) -> model.Records:
    return [
        (
            OffsetCommitKey(group_id, topic, partition).encode(),
            OffsetCommitValue(
                offset=committed.offset,
                leader_epoch=committed.leader_epoch,
                metadata=committed.metadata,
                commit_timestamp=committed.commit_ms,
                expire_timestamp=committed.expire_ms,
                topic_id=committed.topic_id,
            ).encode(),
        )
        for (topic, partition), committed in accepted.items()
    ]
