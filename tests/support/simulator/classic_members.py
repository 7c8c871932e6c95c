"""Members of the classic protocol: the leader assigns, eagerly like `range` or handing over cooperatively.

The assignment carries a name of its own as user data, so that a checker can tell whether all members of a generation
were given parts of the same one.

In a mixed group members of the KIP-848 protocol come and go: while there is one, the broker assigns to all, and what
counts is not the generation but whether a partition is given before its last owner has let it go.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from tests.support.simulator.members import Member
from tests.support.simulator.positions import Committer, PositionBook
from tests.support.simulator.retriable import NOT_NOW, REFUSED_MEMBER

from holdfast.testing import history
from holdfast.testing.history import Partition
from holdfast.wire.consumer_protocol import (
    ConsumerAssignment,
    ConsumerSubscription,
    OwnedPartitions,
    decode_assignment,
    decode_subscription,
)

if TYPE_CHECKING:
    from tests.support.simulator.world import World

JOIN_GROUP = 11
HEARTBEAT = 12
LEAVE_GROUP = 13
SYNC_GROUP = 14
EAGER = "range"
COOPERATIVE = "cooperative-sticky"


class ClassicMember(Member):
    commit_versions = (7, 8, 9, 10)

    def __init__(
        self,
        world: World,
        name: str,
        book: PositionBook,
        instance: str | None,
        protocol: str = EAGER,
        is_mixed: bool = False,
    ) -> None:
        super().__init__(world, name, book, instance)
        self._protocol = protocol
        self._is_mixed = is_mixed
        self._session_ms = world.rng.choice((3_000, 5_000, 8_000))
        self._rebalance_ms = world.rng.choice((4_000, 8_000))
        self._generation = -1
        self._joined: Any | None = None
        """The answer to JoinGroup, until the assignment has come."""
        self._is_stable = False
        self._assigned: list[Partition] | None = None
        """The partitions there were when it assigned them, as the leader."""
        self._heartbeat_at_ms = 0

    @property
    def committer(self) -> Committer:
        return Committer(self.member_id, self._generation, self.instance)

    @property
    def session_ms(self) -> int:
        return self._session_ms

    @property
    def is_stable(self) -> bool:
        return self._is_stable and (self._assigned is None or self._assigned == self.book.partitions())

    @property
    def heartbeat_is_due(self) -> bool:
        return self.now_ms() - self._heartbeat_at_ms >= self._session_ms // 8

    def go_on(self) -> bool:
        return self._sync() if self._joined is not None else self._join()

    def notice_new_partitions(self) -> None:
        # The leader does so. A static one that came back may not know that it leads: older versions do not tell it.
        self._is_stable = False

    # Joining

    def _join(self) -> bool:
        version = self.world.rng.choice((5, 7, 9) if self.instance else (2, 4, 5, 7, 9))
        self._is_stable = False
        self._assigned = None
        if self._protocol == EAGER:
            self.owned = frozenset()
        if self._is_mixed:
            self._release()
        subscription = ConsumerSubscription(
            topics=self.book.topic_names,
            owned_partitions=self._named(self.owned),
            generation_id=self._generation,
        )
        fields = {
            "group_id": self.group,
            "session_timeout": self._session_ms,
            "rebalance_timeout": self._rebalance_ms,
            "member_id": self.member_id,
            "group_instance_id": self.instance,
            "protocol_type": "consumer",
            "protocols": [{"name": self._protocol, "metadata": subscription.encode()}],
        }
        return self.ask("join group", JOIN_GROUP, version, fields, partial(self._join_answered, version))

    def _release(self) -> None:
        """It joins with what it owns; a static one that comes back replaces what it was before."""
        if self.member_id:
            self.world.observe(history.PartitionsHeld(self.group, self.member_id, self.owned))
        else:
            self._replace_predecessor()

    def _replace_predecessor(self) -> None:
        """When the broker does so is not seen: after the request has left, and before its answer is there."""
        before = self.book.instances.get(self.instance or "")
        if before is not None and before != self.member_id:
            self.world.observe(history.MemberLeaving(self.group, before))

    def _join_answered(self, version: int, response: Any) -> ErrorCode:
        error: ErrorCode = response.error_code
        if error == ErrorCode.none:
            self.member_id = response.member_id
            if self.instance is not None:
                if self._is_mixed:
                    self._replace_predecessor()
                self.book.instances[self.instance] = self.member_id
            self._generation = response.generation_id
            self._joined = response
            self.world.say(f"{self.name}: joined as {self.member_id} in generation {self._generation}")
        elif error == ErrorCode.member_id_required:
            self.member_id = response.member_id
        elif error in REFUSED_MEMBER:
            self._dismissed(error)
        elif error not in NOT_NOW and error != ErrorCode.rebalance_in_progress:
            self.world.refused(f"{self.name}: join of {self.group}", error)
        return error

    def _sync(self) -> bool:
        joined, self._joined = self._joined, None
        assert joined is not None
        assignments = []
        is_leader = joined.leader == self.member_id and bool(joined.members)
        if is_leader and not getattr(joined, "skip_assignment", False):
            assignments = self._assign(joined)
        if is_leader:
            self._assigned = self.book.partitions()
        version = self.world.rng.choice((3, 4, 5) if self.instance else (0, 2, 3, 5))
        fields = {
            "group_id": self.group,
            "generation_id": self._generation,
            "member_id": self.member_id,
            "group_instance_id": self.instance,
            "protocol_type": "consumer",
            "protocol_name": self._protocol,
            "assignments": assignments,
        }
        return self.ask("sync group", SYNC_GROUP, version, fields, self._sync_answered)

    def _assign(self, joined: Any) -> list[dict[str, Any]]:
        members = {member.member_id: decode_subscription(member.metadata)[1] for member in joined.members}
        owned = {
            name: self._identified(subscription.owned_partitions) for name, subscription in members.items()
        }
        shares = assign(self.book.partitions(), owned, cooperative=self._protocol == COOPERATIVE)
        # A group that may be migrated keeps its assignments free of user data: the broker could not carry it over.
        name = None if self._is_mixed else self.book.name(self.name).encode()
        return [
            {
                "member_id": member,
                "assignment": ConsumerAssignment(
                    assigned_partitions=self._named(share), user_data=name
                ).encode(),
            }
            for member, share in shares.items()
        ]

    def _sync_answered(self, response: Any) -> ErrorCode:
        error: ErrorCode = response.error_code
        if error == ErrorCode.none:
            self._take(decode_assignment(response.assignment)[1])
        elif error in REFUSED_MEMBER:
            self._dismissed(error)
        elif error not in NOT_NOW and error != ErrorCode.rebalance_in_progress:
            self.world.refused(f"{self.name}: sync of {self.group}", error)
        return error

    def _take(self, assignment: ConsumerAssignment) -> None:
        given = self._identified(assignment.assigned_partitions)
        name = (assignment.user_data or b"").decode()
        if self._is_mixed:
            self.world.observe(
                history.PartitionsGiven(self.group, self.member_id, 0, self._generation, given, self.now_ms())
            )
        else:
            self.world.observe(
                history.GenerationAssigned(
                    self.group, self._generation, self.member_id, self.instance, name, given
                )
            )
        self.world.say(f"{self.name}: generation {self._generation} gives {self.show(given)}")
        self._heartbeat_at_ms = self.now_ms()
        revoked = self.owned - given
        self.owned = given
        # A member that had to let go joins again at once, so that the next generation can hand it over.
        self._is_stable = not (self._protocol == COOPERATIVE and revoked)

    def _named(self, partitions: frozenset[Partition]) -> tuple[OwnedPartitions, ...]:
        by_topic: dict[str, list[int]] = {}
        for topic_id, index in sorted(partitions):
            by_topic.setdefault(self.world.known((topic_id, index)).topic.name, []).append(index)
        return tuple(OwnedPartitions(topic, tuple(indexes)) for topic, indexes in by_topic.items())

    def _identified(self, named: tuple[OwnedPartitions, ...]) -> frozenset[Partition]:
        topics = self.world.topics
        return frozenset(
            (topics[each.topic].topic_id, index)
            for each in named
            if each.topic in topics
            for index in each.partitions
        )

    # Staying and leaving

    def heartbeat(self) -> bool:
        sent_at_ms = self.now_ms()
        version = self.world.rng.choice((3, 4) if self.instance else (0, 3, 4))
        fields = {
            "group_id": self.group,
            "generation_id": self._generation,
            "member_id": self.member_id,
            "group_instance_id": self.instance,
        }

        def then(response: Any) -> ErrorCode:
            error: ErrorCode = response.error_code
            if error == ErrorCode.none:
                self._heartbeat_at_ms = self.now_ms()
                patience_ms = min(self._session_ms, self._rebalance_ms)
                self.world.observe(history.MemberAlive(self.group, self.member_id, sent_at_ms, patience_ms))
            elif error == ErrorCode.rebalance_in_progress:
                self._is_stable = False
            elif error in REFUSED_MEMBER:
                self._dismissed(error)
            elif error not in NOT_NOW:
                self.world.refused(f"{self.name}: heartbeat", error)
            return error

        return self.ask("heartbeat", HEARTBEAT, version, fields, then)

    def leave(self) -> bool:
        version = self.world.rng.choice((3, 5) if self.instance else (1, 3, 5))
        identity = {"member_id": self.member_id, "group_instance_id": self.instance}
        self.world.observe(history.MemberLeaving(self.group, self.member_id))
        self.world.say(f"{self.name}: leaves")
        fields = {"group_id": self.group, **({"members": [identity]} if version >= 3 else identity)}
        self._begin_anew()

        def then(response: Any) -> ErrorCode:
            return ErrorCode(response.error_code)

        return self.ask("leave group", LEAVE_GROUP, version, fields, then)

    def _begin_anew(self) -> None:
        self.member_id = ""
        self._generation = -1
        self._is_stable = False
        self._assigned = None
        self._joined = None
        self.owned = frozenset()

    def _dismissed(self, error: ErrorCode) -> None:
        if error == ErrorCode.fenced_instance_id:
            self.die("another has its instance id")
            return
        if error == ErrorCode.unknown_member_id:
            self.world.observe(history.MemberDropped(self.group, self.member_id, self.now_ms(), error.name))
            self._begin_anew()
        else:
            # A generation it has not heard of: it is a member still, and joins with its id.
            self._is_stable = False
            self._joined = None
            self.owned = frozenset()
            self._generation = -1


def assign(
    partitions: list[Partition], owned: dict[str, frozenset[Partition]], *, cooperative: bool
) -> dict[str, frozenset[Partition]]:
    """Each partition to one member, in turn; cooperatively, nobody is given what another still owns."""
    members = sorted(owned)
    target: dict[str, set[Partition]] = {member: set() for member in members}
    for place, partition in enumerate(sorted(partitions)):
        target[members[place % len(members)]].add(partition)
    if cooperative:
        for member, share in target.items():
            for other in members:
                if other != member:
                    share -= owned[other]
    return {member: frozenset(share) for member, share in target.items()}
