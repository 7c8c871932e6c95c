"""Members of the KIP-848 protocol: the broker assigns, a member gives up first and takes over when told.

A member tells what it holds whenever that has changed, and everything it knows after an answer was lost, so that the
broker can tell it its assignment again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from tests.support.simulator.members import Member
from tests.support.simulator.positions import Committer, PositionBook
from tests.support.simulator.retriable import NOT_NOW, REFUSED_MEMBER

from holdfast.testing import history
from holdfast.testing.history import Partition

if TYPE_CHECKING:
    from tests.support.simulator.world import World

CONSUMER_GROUP_HEARTBEAT = 68
LEAVE = -1
LEAVE_FOR_NOW = -2
SESSION_MS = 3_000
"""The broker's `group.consumer.session.timeout.ms`."""
REBALANCE_MS = 8_000


class ConsumerMember(Member):
    commit_versions = (9, 10)

    def __init__(self, world: World, name: str, book: PositionBook, instance: str | None) -> None:
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
        return self.ask(kind, CONSUMER_GROUP_HEARTBEAT, self._version, fields, then, self._lost)

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

        def then(response: Any) -> ErrorCode:
            return ErrorCode(response.error_code)

        return self.ask("consumer leave", CONSUMER_GROUP_HEARTBEAT, self._version, fields, then)

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
