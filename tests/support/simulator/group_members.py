"""Members of the classic protocol, and of KIP-848's.

In the classic protocol the leader assigns, eagerly like `range` or handing over cooperatively. The assignment carries a
name of its own as user data, so that a checker can tell whether all members of a generation were given parts of the
same one.

With KIP-848 the broker assigns, and a member gives up first and takes over when told. It tells what it holds whenever
that has changed, and everything it knows after an answer was lost, so that the broker can tell it its assignment again.

In a mixed group members of the KIP-848 protocol come and go: while there is one, the broker assigns to all, and what
counts is not the generation but whether a partition is given before its last owner has let it go.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from tests.support import history
from tests.support.history import Partition
from tests.support.simulator.link import NOT_NOW, REFUSED_MEMBER
from tests.support.simulator.members import Committer, GroupOffsets, Member

from holdfast.wire.api_keys import CONSUMER_GROUP_HEARTBEAT, HEARTBEAT, JOIN_GROUP, LEAVE_GROUP, SYNC_GROUP
from holdfast.wire.consumer_protocol import (
    ConsumerAssignment,
    ConsumerSubscription,
    OwnedPartitions,
    decode_assignment,
    decode_subscription,
)

if TYPE_CHECKING:
    from tests.support.simulator.world import World


EAGER = "range"
COOPERATIVE = "cooperative-sticky"


def error_of(response: Any) -> ErrorCode:
    return ErrorCode(response.error_code)


class ClassicMember(Member):
    commit_versions = (7, 8, 9, 10)

    def __init__(
        self,
        world: World,
        name: str,
        book: GroupOffsets,
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
        return self.tell("join group", JOIN_GROUP, version, fields, partial(self._join_answered, version))

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
        return self.tell("sync group", SYNC_GROUP, version, fields, self._sync_answered)

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

        return self.tell("heartbeat", HEARTBEAT, version, fields, then)

    def leave(self) -> bool:
        version = self.world.rng.choice((3, 5) if self.instance else (1, 3, 5))
        identity = {"member_id": self.member_id, "group_instance_id": self.instance}
        self.world.observe(history.MemberLeaving(self.group, self.member_id))
        self.world.say(f"{self.name}: leaves")
        fields = {"group_id": self.group, **({"members": [identity]} if version >= 3 else identity)}
        self._begin_anew()
        return self.tell("leave group", LEAVE_GROUP, version, fields, error_of)

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


LEAVE = -1
LEAVE_FOR_NOW = -2
SESSION_MS = 3_000
"""The broker's `group.consumer.session.timeout.ms`."""
REBALANCE_MS = 8_000


class ConsumerMember(Member):
    commit_versions = (9, 10)

    def __init__(self, world: World, name: str, book: GroupOffsets, instance: str | None) -> None:
        super().__init__(world, name, book, instance)
        rng = world.rng
        self._version = rng.choice((0, 1))
        self._lives = 0
        self._by_regex = self._version >= 1 and rng.random() < 0.25
        self._assignor = rng.choice((None, "uniform", "range"))
        self._epoch = 0
        self._is_member = False
        self._target: frozenset[Partition] = frozenset()
        self._told: frozenset[Partition] | None = None
        """What the broker was last told, and answered, that it holds."""
        self._says_all = True
        """The next heartbeat says everything: the first, and any after a lost answer."""
        self._lost_answer = False
        self._revoke_by_ms = 0
        self._heartbeat_at_ms = 0
        self._begin_anew()

    @property
    def committer(self) -> Committer:
        return Committer(self.member_id, self._epoch, None)

    @property
    def session_ms(self) -> int:
        return SESSION_MS

    @property
    def is_stable(self) -> bool:
        return self._is_member and not self._says_all and self._told == self.owned == self._target

    @property
    def heartbeat_is_due(self) -> bool:
        return self.now_ms() - self._heartbeat_at_ms >= SESSION_MS // 8

    def _begin_anew(self) -> None:
        self._lives += 1
        if self._version >= 1:
            self.member_id = self.member_id or f"{self.name}-member"
        else:
            self.member_id = ""
        self._epoch = 0
        self._is_member = False
        self.owned = self._target = frozenset()
        self._told = None
        self._says_all = True
        self._lost_answer = False

    def notice_new_partitions(self) -> None:
        """The broker does."""

    # Heartbeats

    def go_on(self) -> bool:
        """Let go of what must be let go of, take over what was given, and say so."""
        if self._is_member and self.owned - self._target and self.world.rng.random() < 0.3:
            return self._commit()
        if self.owned - self._target:
            self.owned &= self._target
        else:
            self.owned = self._target
        return self.heartbeat()

    def heartbeat(self) -> bool:
        says_held = self._says_all or self._told != self.owned
        fields: dict[str, Any] = {
            "group_id": self.group,
            "member_id": self.member_id,
            "member_epoch": self._epoch,
            "instance_id": self.instance,
        }
        if self._says_all:
            fields |= self._everything()
        if says_held:
            fields["topic_partitions"] = self._by_topic(self.owned)
            self.world.observe(history.PartitionsHeld(self.group, self.member_id, self.owned))
        self._says_all = False
        sent_at_ms, sent_epoch, held = self.now_ms(), self._epoch, self.owned

        def then(response: Any) -> ErrorCode:
            return self._answered(response, sent_at_ms, sent_epoch, held if says_held else None)

        kind = "consumer heartbeat" if sent_epoch else "consumer join"
        return self.tell(kind, CONSUMER_GROUP_HEARTBEAT, self._version, fields, then, self._lost)

    def _everything(self) -> dict[str, Any]:
        names = self.book.topic_names
        subscription: dict[str, Any] = {"subscribed_topic_names": list(names)}
        if self._by_regex:
            subscription = {"subscribed_topic_names": None, "subscribed_topic_regex": "|".join(names)}
        return {"rebalance_timeout": REBALANCE_MS, "server_assignor": self._assignor, **subscription}

    def _by_topic(self, partitions: frozenset[Partition]) -> list[dict[str, Any]]:
        topics: dict[str, list[int]] = {}
        for topic_id, index in sorted(partitions):
            topics.setdefault(topic_id, []).append(index)
        return [
            {"topic_id": bytes.fromhex(topic_id), "partitions": indexes}
            for topic_id, indexes in topics.items()
        ]

    def _lost(self) -> None:
        self._says_all = True
        self._lost_answer = True

    def _answered(
        self, response: Any, sent_at_ms: int, sent_epoch: int, held: frozenset[Partition] | None
    ) -> ErrorCode:
        error: ErrorCode = response.error_code
        if error == ErrorCode.none:
            self._accept(response, sent_at_ms, sent_epoch, held)
        elif error in REFUSED_MEMBER:
            self._dismissed(error)
        elif error == ErrorCode.unreleased_instance_id:
            self._says_all = True
        else:
            self._says_all = True
            if error not in NOT_NOW:
                self.world.refused(f"{self.name}: heartbeat of {self.group}", error)
        return error

    def _accept(
        self, response: Any, sent_at_ms: int, sent_epoch: int, held: frozenset[Partition] | None
    ) -> None:
        self.member_id = response.member_id or self.member_id
        self._epoch = response.member_epoch
        self._is_member = True
        self._lost_answer = False
        self._heartbeat_at_ms = self.now_ms()
        if held is not None:
            self._told = held
        given: frozenset[Partition] | None = None
        if response.assignment is not None:
            given = frozenset(
                (topic.topic_id.hex, index)
                for topic in response.assignment.topic_partitions
                for index in topic.partitions
            )
            if self.owned - given and not self.owned - self._target:
                self._revoke_by_ms = sent_at_ms + REBALANCE_MS
            self._target = given
            for topic_id in {topic_id for topic_id, _ in given}:
                self.world.observe(history.TopicMentioned(topic_id))
            self.world.say(f"{self.name}: epoch {self._epoch} gives {self.show(given)}")
        patience_ms = SESSION_MS
        if self.owned - self._target:
            patience_ms = max(0, min(patience_ms, self._revoke_by_ms - sent_at_ms))
        self.world.observe(
            history.PartitionsGiven(self.group, self.member_id, sent_epoch, self._epoch, given, self.now_ms())
        )
        self.world.observe(history.MemberAlive(self.group, self.member_id, sent_at_ms, patience_ms))

    def leave(self) -> bool:
        for_now = self.instance is not None and self.world.rng.random() < 0.7
        self.world.observe(history.MemberLeaving(self.group, self.member_id))
        self.world.say(f"{self.name}: leaves{' for now' if for_now else ''}")
        fields = {
            "group_id": self.group,
            "member_id": self.member_id,
            "member_epoch": LEAVE_FOR_NOW if for_now else LEAVE,
            "instance_id": self.instance,
        }
        self._begin_anew()
        return self.tell("consumer leave", CONSUMER_GROUP_HEARTBEAT, self._version, fields, error_of)

    def _dismissed(self, error: ErrorCode) -> None:
        if error == ErrorCode.fenced_instance_id:
            self.die("another has its instance id")
            return
        if error == ErrorCode.stale_member_epoch:
            # The answer with its new epoch was lost, or is on its way.
            self._says_all = True
            return
        if self._lost_answer or not self._is_member:
            self.world.observe(history.MemberLeaving(self.group, self.member_id))
        else:
            self.world.observe(history.MemberDropped(self.group, self.member_id, self.now_ms(), error.name))
        self._begin_anew()
