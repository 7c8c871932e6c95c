"""A group of the consumer protocol as the rest of the coordinator sees it.

What members do to it is in `consumer` (the protocol's own heartbeat) and in `migration` (members that speak the
classic protocol, becoming a classic group, and coming from one).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.groups import model
from holdfast.broker.groups.consumer_member import (
    ConsumerDescription,
    ConsumerMemberDescription,
    Held,
    NamedPartitions,
    Profile,
)
from holdfast.broker.groups.consumer_state import (
    Change,
    ConsumerMember,
    ConsumerState,
    encoded,
    group_tombstones,
)
from holdfast.broker.groups.consumer_turn import preferred_assignor
from holdfast.errors import ApiError
from holdfast.seams import Now

if TYPE_CHECKING:
    from holdfast.broker.groups.consumer import ConsumerGroups

COMMIT_VERSION_MIN: Final = 9
"""The first version of OffsetCommit whose clients know what a stale epoch is."""


class Timing(NamedTuple):
    """A group's settings, the operator's for it before the broker's."""

    session_timeout_ms: int
    heartbeat_interval_ms: int
    assignment_interval_ms: int


class ConsumerGroup(ConsumerState):
    type: Final = model.GroupType.CONSUMER

    def __init__(self, group_id: str, home: ConsumerGroups) -> None:
        super().__init__(group_id)
        self._home = home
        self.seen_topics_version = -1
        """The version of all topics when the group last looked at its own."""
        self.resolve_again_ms = 0
        """When expressions are looked up again though no topic has changed (monotonic clock)."""
        self.timing_source: tuple[object, object] = (None, None)
        self.timing = Timing(0, 0, 0)

    # Looking

    @property
    def state(self) -> str:
        if not self.members:
            return "Empty"
        if self.epoch > self.assignment_epoch:
            return "Assigning"
        if all(member.current.is_at(self.assignment_epoch) for member in self.members.values()):
            return "Stable"
        return "Reconciling"

    @property
    def protocol_type(self) -> str | None:
        return model.CONSUMER_PROTOCOL_TYPE

    @property
    def is_empty(self) -> bool:
        return not self.members

    def is_subscribed_to(self, topic: str) -> bool:
        return topic in self.names or any(topic in found.topics for found in self.resolutions.values())

    def find(self, member_id: str) -> ConsumerMember:
        member = self.members.get(member_id)
        if member is None:
            raise ApiError(
                ErrorCode.unknown_member_id, f"{member_id!r} is no member of group {self.group_id!r}"
            )
        return member

    def find_static(self, member_id: str, instance_id: str) -> ConsumerMember:
        """The member of an instance id, if it is the one who asks."""
        member = self.member_of_instance(instance_id)
        if member is None:
            raise ApiError(ErrorCode.unknown_member_id, f"no member of {self.group_id!r} is {instance_id!r}")
        if member.member_id != member_id:
            raise ApiError(
                ErrorCode.fenced_instance_id,
                f"{instance_id!r} is {member.member_id!r} by now, not {member_id!r}",
            )
        return member

    def describe(self, topics: model.Topics, assignors: tuple[str, ...]) -> ConsumerDescription:
        def named(held: Held) -> tuple[NamedPartitions, ...]:
            """Topics that are gone have no name any more, and are left out."""
            found = [(topics.by_id(topic_id), partitions) for topic_id, partitions in held.items()]
            return tuple(
                NamedPartitions(facts.topic_id, facts.name, tuple(sorted(partitions)))
                for facts, partitions in found
                if facts is not None
            )

        def described(member: ConsumerMember, profile: Profile) -> ConsumerMemberDescription:
            target = self.target_of(member.member_id)
            return ConsumerMemberDescription(
                member.member_id,
                profile.instance_id,
                profile.rack_id,
                member.current.epoch,
                profile.client_id,
                profile.client_host,
                profile.topic_names,
                profile.topic_regex,
                named(member.current.everything),
                named({topic_id: dict.fromkeys(partitions, 0) for topic_id, partitions in target.items()}),
                profile.classic is not None,
            )

        return ConsumerDescription(
            self.group_id,
            self.state,
            self.epoch,
            self.assignment_epoch,
            preferred_assignor(self.assignors, assignors),
            tuple(described(member, member.profile) for member in self.members.values()),
        )

    # The classic protocol, for members that speak it

    def join(self, request: model.JoinRequest, reply: model.JoinCallback, now: Now) -> None:
        self._home.classic.join(self, request, reply, now)

    def sync(self, request: model.SyncRequest, reply: model.SyncCallback, now: Now) -> None:
        self._home.classic.sync(self, request, reply, now)

    def heartbeat(self, request: model.HeartbeatRequest, now: Now) -> ErrorCode:
        return self._home.classic.heartbeat(self, request, now)

    def leave(self, request: model.LeaveRequest, now: Now) -> model.LeaveReply:
        return self._home.classic.leave(self, request, now)

    # Committed offsets

    def check_offset_commit(
        self, commit: model.CommitRequest | model.TransactionalCommit, now: Now
    ) -> model.PartitionCheck | None:
        """Outsiders may commit to a group nobody is in; a member may with its epoch, or for what it held before."""
        member_id, generation = commit.member_id, commit.generation
        is_transactional = isinstance(commit, model.TransactionalCommit)
        if generation < 0 and not self.members:
            return None
        if is_transactional and generation == -1 and not member_id and commit.group_instance_id is None:
            return None
        member = self.find(member_id)
        is_classic = member.is_classic
        if not is_transactional and not is_classic and commit.api_version < COMMIT_VERSION_MIN:
            raise ApiError(
                ErrorCode.unsupported_version,
                f"members of the consumer protocol commit with version {COMMIT_VERSION_MIN} or later",
            )
        epoch = member.current.epoch
        if generation == epoch:
            return None
        # Clients of transactions and of the classic protocol know no stale epoch.
        error = (
            ErrorCode.illegal_generation if is_transactional or is_classic else ErrorCode.stale_member_epoch
        )
        if generation > epoch:
            raise ApiError(error, f"epoch {generation} of {member_id!r} is ahead of its {epoch}")
        current = member.current

        def check(topic: str, topic_id: UUID, partition: int) -> None:
            since = current.since(topic_id, partition)
            if since is None or generation < since:
                when = "holds it not" if since is None else f"holds it since epoch {since}"
                raise ApiError(error, f"{member_id!r} of epoch {generation}: {when}: {topic}-{partition}")

        return check

    def check_offset_fetch(self, member_id: str | None, member_epoch: int) -> None:
        if member_id is None and member_epoch < 0:
            return
        member = self.find(member_id or "")
        if member_epoch != member.current.epoch:
            raise ApiError(
                ErrorCode.illegal_generation if member.is_classic else ErrorCode.stale_member_epoch,
                f"the epoch of {member_id!r} is {member.current.epoch}, not {member_epoch}",
            )

    def check_offset_delete(self) -> None:
        """Always allowed: committed offsets of topics that members read are kept by `is_subscribed_to`."""

    def expiry_base_ms(self, commit_ms: int) -> int | None:
        return commit_ms

    # Life

    def check_delete(self) -> None:
        if self.members:
            raise ApiError(ErrorCode.non_empty_group, f"group {self.group_id!r} is {self.state}")

    def farewell(self) -> list[Change]:
        """What takes the group out of the log."""
        return group_tombstones(
            self.group_id,
            list(self.members),
            list(self.resolutions),
            has_legacy_metadata=self.has_legacy_metadata,
        )

    def tombstones(self) -> model.Records:
        return encoded(self.farewell())

    def loaded(self, now: Now) -> None:
        self._home.resume(self, now)

    def unload(self) -> None:
        for member in self.members.values():
            member.cancel_timers()
