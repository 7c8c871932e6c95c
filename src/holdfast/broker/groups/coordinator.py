"""The coordinator of one partition of `__consumer_offsets`: its groups and their committed offsets.

It finds the group a request is about, makes it when it is the first to speak of it, and lets it decide. Groups of
both kinds look alike from here (`model.Group`); the requests of the consumer protocol go to `consumer_groups`.

A group exists while it has members, committed offsets, or a record of its own. A group that only commits committed
offsets, a *simple* one, has no record: it is there because its committed offsets are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from kio.schema.errors import ErrorCode

from holdfast.broker.groups import model
from holdfast.broker.groups.classic import ClassicGroup
from holdfast.broker.groups.classic_state import new_group_record, restore_group
from holdfast.broker.groups.consumer import ConsumerGroups
from holdfast.broker.groups.offsets import OffsetReplay, OffsetStore, Tombstone
from holdfast.errors import ApiError
from holdfast.saying import warn
from holdfast.seams import Now, Scheduled
from holdfast.wire.batch import BatchHeader, Record
from holdfast.wire.control_records import decode_end_marker
from holdfast.wire.coordinator_records import (
    CoordinatorRecord,
    GroupMetadataKey,
    GroupMetadataValue,
    UnknownRecord,
    decode_group_record,
)

GROUP_NOT_FOUND_FROM_VERSION = 9
"""OffsetCommit: clients of this version on understand that a group does not exist."""


class FetchedOffset(NamedTuple):
    error: ErrorCode
    committed: model.CommittedOffset | None


class GroupCoordinator:
    def __init__(self, context: model.CoordinatorContext) -> None:
        self.context = context
        self.groups: dict[str, model.Group] = {}
        self.offsets = OffsetStore(context)
        self.consumer_groups = ConsumerGroups(self)
        self._replay = OffsetReplay()
        self._expiry_timer: Scheduled | None = None
        self._restored: list[tuple[str, str, int]] = []
        """Groups, members and the deadlines of their sessions, as a start has left them."""

    # Groups coming and going

    def names(self) -> Collection[str]:
        return self.groups

    def put(self, group: model.Group) -> None:
        self.groups[group.group_id] = group

    def drop(self, group_id: str) -> None:
        self.groups.pop(group_id, None)

    # The classic protocol

    def join(self, request: model.JoinRequest, reply: model.JoinCallback, now: Now) -> None:
        settings = self.context.settings()
        try:
            if not request.group_id:
                raise ApiError(ErrorCode.invalid_group_id)
            model.refuse_id_too_long(request.group_id)
            model.refuse_long_names(request)
            if not (
                settings.group_min_session_timeout_ms
                <= request.session_timeout_ms
                <= settings.group_max_session_timeout_ms
            ):
                raise ApiError(ErrorCode.invalid_session_timeout)
            group = self._group_to_join(request, now)
        except ApiError as error:
            reply(model.JoinReply(model.append_error(error), request.member_id))
            return
        group.join(request, reply, now)

    def _group_to_join(self, request: model.JoinRequest, now: Now) -> model.Group:
        group = self.groups.get(request.group_id)
        if group is not None and (group.type is model.GroupType.CLASSIC or not group.is_empty):
            return group
        if request.member_id != model.NO_MEMBER_ID:
            raise ApiError(ErrorCode.unknown_member_id)
        records: model.Records = [*group.tombstones()] if group is not None else []
        records.append(new_group_record(request.group_id, now.wall_ms))
        self.context.journal.append(records, now)
        if group is not None:
            group.unload()
        fresh = ClassicGroup(request.group_id, self.context)
        self.put(fresh)
        return fresh

    def sync(self, request: model.SyncRequest, reply: model.SyncCallback, now: Now) -> None:
        group = self.groups.get(request.group_id)
        if not request.group_id:
            reply(model.SyncReply(ErrorCode.invalid_group_id))
        elif group is None:
            reply(model.SyncReply(ErrorCode.unknown_member_id))
        else:
            group.sync(request, reply, now)

    def heartbeat(self, request: model.HeartbeatRequest, now: Now) -> ErrorCode:
        group = self.groups.get(request.group_id)
        if group is None:
            return ErrorCode.unknown_member_id if request.group_id else ErrorCode.invalid_group_id
        return group.heartbeat(request, now)

    def leave(self, request: model.LeaveRequest, now: Now) -> model.LeaveReply:
        if not request.group_id:
            return model.LeaveReply(ErrorCode.invalid_group_id)
        group = self.groups.get(request.group_id)
        if group is None:
            return model.LeaveReply(
                ErrorCode.none, tuple((member, ErrorCode.unknown_member_id) for member in request.members)
            )
        return group.leave(request, now)

    # Committed offsets

    def commit(self, request: model.CommitRequest, now: Now) -> model.CommitReply:
        """Raises the error that all partitions get."""
        model.refuse_id_too_long(request.group_id)
        group = self.groups.get(request.group_id)
        if group is None:
            if request.generation >= 0:
                raise ApiError(
                    ErrorCode.group_id_not_found
                    if request.api_version >= GROUP_NOT_FOUND_FROM_VERSION
                    else ErrorCode.illegal_generation
                )
            check = None
        else:
            check = group.check_offset_commit(request, now)
        reply = self.offsets.commit(request, check, now)
        self._keep_simple_group(request.group_id)
        return reply

    def commit_in_transaction(self, request: model.TransactionalCommit, now: Now) -> model.CommitReply:
        """Raises the error that all partitions get."""
        if not request.group_id:
            raise ApiError(ErrorCode.invalid_group_id)
        model.refuse_id_too_long(request.group_id)
        group = self.groups.get(request.group_id)
        check = None
        if group is not None:
            try:
                check = group.check_offset_commit(request, now)
            except ApiError as error:
                if error.code is ErrorCode.stale_member_epoch:
                    raise ApiError(ErrorCode.illegal_generation, error.message) from error
                raise
        elif request.generation >= 0:
            raise ApiError(ErrorCode.illegal_generation)
        reply = self.offsets.commit_in_transaction(request, check, now)
        self._keep_simple_group(request.group_id)
        return reply

    def end_transaction(self, producer_id: int, is_commit: bool, now: Now) -> None:
        """The marker has been appended to this coordinator partition's log."""
        self.offsets.end_transaction(producer_id, is_commit)

    def _keep_simple_group(self, group_id: str) -> None:
        if group_id not in self.groups and (
            self.offsets.of_group(group_id) or self.offsets.has_open_transactions(group_id)
        ):
            self.put(ClassicGroup(group_id, self.context))

    def check_offset_fetch(self, group_id: str, member_id: str | None, member_epoch: int) -> None:
        """Raises the error that the whole group is answered with; a group that does not exist has no committed
        offsets."""
        group = self.groups.get(group_id)
        if group is not None:
            group.check_offset_fetch(member_id, member_epoch)

    def committed(self, group_id: str, topic: str, partition: int, *, require_stable: bool) -> FetchedOffset:
        if require_stable and self.offsets.is_pending(group_id, topic, partition):
            return FetchedOffset(ErrorCode.unstable_offset_commit, None)
        return FetchedOffset(ErrorCode.none, self.offsets.of_group(group_id).get((topic, partition)))

    def delete_offsets(
        self, group_id: str, partitions: Iterable[tuple[str, int]], now: Now
    ) -> dict[tuple[str, int], ErrorCode]:
        """Raises the error that the whole request is answered with."""
        if not group_id:
            raise ApiError(ErrorCode.invalid_group_id)
        group = self._existing(group_id)
        group.check_offset_delete()
        reply: dict[tuple[str, int], ErrorCode] = {}
        doomed: list[tuple[str, int]] = []
        for topic, partition in partitions:
            if group.is_subscribed_to(topic):
                reply[topic, partition] = ErrorCode.group_subscribed_to_topic
            else:
                reply[topic, partition] = ErrorCode.none
                doomed.append((topic, partition))
        self._forget(group_id, doomed, now)
        return reply

    def _forget(
        self,
        group_id: str,
        partitions: Iterable[tuple[str, int]] | None,
        now: Now,
        *,
        and_then: model.Records | None = None,
    ) -> None:
        """Take committed offsets, or all of a group, out of the log and out of memory, as many at a time as fit a
        batch."""
        *parts, last = self.offsets.tombstones(group_id, partitions) or [[]]
        for part in parts:
            self._append_tombstones(group_id, part, [], now)
        self._append_tombstones(group_id, last, and_then or [], now)

    def _append_tombstones(
        self,
        group_id: str,
        part: list[Tombstone],
        and_then: model.Records,
        now: Now,
    ) -> None:
        records: model.Records = [(tombstone.key, None) for tombstone in part]
        records += and_then
        if records:
            self.context.journal.append(records, now)
        for tombstone in part:
            self.offsets.forget(group_id, tombstone.topic, tombstone.partition)

    # Looking after groups

    def describe(self, group_id: str) -> model.ClassicDescription:
        group = self._existing(group_id)
        if not isinstance(group, ClassicGroup):
            raise ApiError(ErrorCode.group_id_not_found, f"Group {group_id} is not a classic group.")
        return group.describe()

    def list(self, states: Collection[str], types: Collection[model.GroupType]) -> list[model.ListedGroup]:
        """Groups in any of these states (in lower case) and of any of these types; none given means all."""
        return [
            model.ListedGroup(group.group_id, group.protocol_type or "", group.state, group.type)
            for group in self.groups.values()
            if (not states or group.state.lower() in states) and (not types or group.type in types)
        ]

    def delete(self, group_id: str, now: Now) -> None:
        group = self._existing(group_id)
        group.check_delete()
        self._forget(group_id, None, now, and_then=group.tombstones())
        group.unload()
        self.drop(group_id)

    def _existing(self, group_id: str) -> model.Group:
        group = self.groups.get(group_id)
        if group is None:
            raise ApiError(ErrorCode.group_id_not_found, f"Group {group_id} not found.")
        return group

    # Time

    def _schedule_expiry(self, now: Now) -> None:
        interval_ms = self.context.settings().offsets_retention_check_interval_ms
        self._expiry_timer = self.context.schedule.at(now.monotonic_ms + interval_ms, self._expire)

    def _expire(self, now: Now) -> None:
        # Before anything can go wrong: a defect in one round must not end all of them.
        self._schedule_expiry(now)
        try:
            for group_id in list(self.groups):
                self._expire_group(group_id, now)
        except ApiError as error:
            self.context.say(
                warn(
                    f"expired committed offsets could not be taken out of the log: {error}",
                    kind="expired committed offsets",
                )
            )

    def _expire_group(self, group_id: str, now: Now) -> None:
        group = self.groups[group_id]
        due, all_due = self.offsets.expired(group, now)
        self._forget(group_id, due, now)
        somebody_comes = isinstance(group, ClassicGroup) and group.membership.pending
        if all_due and group.is_empty and not somebody_comes:
            self.context.journal.append(group.tombstones(), now)
            group.unload()
            self.drop(group_id)

    # Topics

    def topics_changed(self, names: set[str], now: Now) -> None:
        """Topics were made, grown or deleted."""
        self.consumer_groups.topics_changed(names, now)

    def topics_deleted(self, names: set[str], now: Now) -> None:
        """Topics are gone for good: no crash brings them back, and nobody misses their committed offsets."""
        self._forget_strangers(names, now)

    def _forget_strangers(self, names: set[str] | None, now: Now) -> None:
        try:
            for group_id, partitions in self.offsets.strangers(names).items():
                self._forget(group_id, partitions, now)
        except ApiError as error:
            text = f"committed offsets in deleted topics could not be taken out of the log: {error}"
            self.context.say(warn(text, kind="stray committed offsets"))

    # The log

    def replay(self, header: BatchHeader, records: Sequence[Record]) -> None:
        if header.is_control:
            for record in records:
                marker = decode_end_marker(record.key, record.value)
                if marker is not None:
                    self._replay.end_transaction(header.producer_id, marker.is_commit)
            return
        producer_id = header.producer_id if header.is_transactional else None
        for record in records:
            if record.key is None:
                continue
            if OffsetReplay.is_about(record.key):
                self._replay.record(record.key, record.value, producer_id)
            else:
                self._replay_group(*decode_group_record(record.key, record.value))

    def _replay_group(self, key: CoordinatorRecord, value: CoordinatorRecord | None) -> None:
        if isinstance(key, UnknownRecord) or isinstance(value, UnknownRecord):
            return
        if isinstance(key, GroupMetadataKey):
            assert value is None or isinstance(value, GroupMetadataValue)
            # What a consumer group of this name left behind was taken out, or will be, by records of its own.
            if isinstance(self.groups.get(key.group), ClassicGroup):
                self.drop(key.group)
            if value is not None:
                group = ClassicGroup(key.group, self.context)
                restore_group(group, value)
                self.put(group)
        else:
            self.consumer_groups.replay(key, value)

    def loaded(self, now: Now) -> None:
        self.offsets.restore(self._replay)
        self._replay = OffsetReplay()
        for group_id in self.offsets.groups():
            self._keep_simple_group(group_id)
        for group in list(self.groups.values()):
            group.loaded(now)
        self._restored = [
            (group_id, member_id, member.deadline_ms)
            for group_id, group in self.groups.items()
            for member_id, member in group.members.items()
        ]
        self._forget_strangers(None, now)
        self._schedule_expiry(now)

    def silent_members(self) -> Iterator[tuple[str, str]]:
        """Who was found in the log and has not been heard of since: every sign of life moves a deadline."""
        for group_id, member_id, deadline_ms in self._restored:
            group = self.groups.get(group_id)
            member = None if group is None else group.members.get(member_id)
            if member is not None and member.deadline_ms == deadline_ms and not member.is_waiting:
                yield group_id, member_id

    def unload(self) -> None:
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        for group in list(self.groups.values()):
            group.unload()
        self.groups.clear()
