"""The consumer protocol (KIP-848): heartbeats of members that behave and of members that do not, and its describes."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.support.differential import Script, Side
from tests.support.raw_groups import RawMember, settle, subscription

from holdfast.broker.node.coordination import partition_for
from holdfast.testing.kafka_fixtures import COORDINATORS
from holdfast.wire.api_keys import (
    CONSUMER_GROUP_DESCRIBE,
    CONSUMER_GROUP_HEARTBEAT,
    CREATE_PARTITIONS,
    DELETE_GROUPS,
    DELETE_TOPICS,
    DESCRIBE_GROUPS,
    INCREMENTAL_ALTER_CONFIGS,
    LIST_GROUPS,
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
)

Compare = Callable[[Script], None]
LEAVES, LEAVES_FOR_A_WHILE = -1, -2
PARTITIONS = int(COORDINATORS["offsets.topic.num.partitions"])


class Member:
    """A member of the consumer protocol that says what it is told; ids are its own, so that they sort alike."""

    def __init__(self, side: Side, group: str, name: str, topics: Sequence[str] = (), **fields: Any) -> None:
        self._side = side
        self.group = group
        self.name = name
        self.epoch = 0
        self.owned: list[dict[str, Any]] = []
        self.member_id = fields.pop("member_id", str(uuid.uuid5(uuid.NAMESPACE_OID, f"{group}/{name}")))
        self._first = {"subscribed_topic_names": list(topics), "rebalance_timeout": 30_000, **fields}
        self._said: Counter[str] = Counter()

    def say(self, label: str = "beat", *, version: int = 1, **fields: Any) -> Any:
        """One heartbeat; the first tells everything, the others only what changed and what is given here."""
        self._said[label] += 1
        wanted: dict[str, Any] = {
            "group_id": self.group,
            "member_id": self.member_id,
            "member_epoch": self.epoch,
            "instance_id": self._first.get("instance_id"),
            "rebalance_timeout": -1,
            "subscribed_topic_names": None,
            "topic_partitions": None,
        }
        if self.epoch == 0:
            wanted |= {"topic_partitions": [], **self._first}
        said = f"{self.name}: {label} {self._said[label]}"
        answer = self._side.ask(said, CONSUMER_GROUP_HEARTBEAT, version, {**wanted, **fields})
        if not isinstance(answer, str) and answer.error_code == 0:
            self.epoch = max(answer.member_epoch, 0)
            if answer.assignment is not None:
                self.owned = [
                    {"topic_id": each.topic_id, "partitions": list(each.partitions)}
                    for each in answer.assignment.topic_partitions
                ]
        return answer

    def own(self, label: str = "owns what it was given") -> Any:
        """Tell that it holds what it was given last and nothing else."""
        return self.say(label, topic_partitions=self.owned)

    def held(self) -> int:
        return sum(len(each["partitions"]) for each in self.owned)

    def leave(self, epoch: int = LEAVES) -> Any:
        answer = self.say("leaves", member_epoch=epoch)
        self.epoch = 0
        return answer


def make_topic(side: Side, group: str, topic: str, partitions: int) -> uuid.UUID:
    """A topic, and return when the coordinator of the group knows it, which in Apache Kafka takes a moment longer.

    Another group of the same coordinator is made to find out: one whose name leads to the same partition.
    """
    topic_id = side.create_topic(topic, partitions)
    partition = partition_for(group, PARTITIONS)
    probe = next(
        name for n in range(1000) if partition_for(name := f"probe-{topic}-{n}", PARTITIONS) == partition
    )

    def beat(epoch: int) -> Any:
        fields = {
            "group_id": probe,
            "member_id": "probe",
            "member_epoch": epoch,
            "rebalance_timeout": 30_000,
            "subscribed_topic_names": [topic],
            "topic_partitions": [],
        }
        return side.client.ask(CONSUMER_GROUP_HEARTBEAT, 1, fields)

    def is_known() -> bool:
        given = beat(0).assignment
        beat(LEAVES)
        return bool(given.topic_partitions)

    side.wait_until(is_known)
    return topic_id


def turns(members: Sequence[Member], rounds: int) -> None:
    """Everybody takes what it is given and says so, in turn, so often."""
    for _ in range(rounds):
        for member in members:
            member.own()


def describe(side: Side, label: str, *groups: str, version: int = 1, **fields: Any) -> Any:
    return side.ask(label, CONSUMER_GROUP_DESCRIBE, version, {"group_ids": list(groups), **fields})


def one_member(side: Side) -> None:
    make_topic(side, "alone", "alone-a", 3)
    make_topic(side, "alone", "alone-b", 2)
    member = Member(side, "alone", "only", ["alone-a", "alone-b"])
    for version in (0, 1):
        describe(side, f"before, version {version}", "alone", version=version)
    member.say("joins")
    member.own()
    member.say("nothing new")
    for version in (0, 1):
        describe(side, f"version {version}", "alone", "unknown", "", version=version)
        with_rights = {"include_authorized_operations": True}
        describe(side, f"with rights, version {version}", "alone", version=version, **with_rights)
    describe(side, "nobody")
    side.ask("as a classic group", DESCRIBE_GROUPS, 6, {"groups": ["alone"]})
    side.ask("as a classic group, older", DESCRIBE_GROUPS, 5, {"groups": ["alone"]})
    side.ask("deleted while at work", DELETE_GROUPS, 2, {"groups_names": ["alone"]})
    member.say("only one topic", subscribed_topic_names=["alone-b"])
    member.own()
    member.say("a topic that is not there", subscribed_topic_names=["alone-b", "alone-later"])
    side.create_topic("alone-later", 1)

    def has_it() -> bool:
        member.own()
        return member.held() == 3

    side.wait_until(has_it)
    describe(side, "subscribed to one that came later", "alone")
    # A group without members and positions may be gone at any moment.
    part = {"partition_index": 0, "committed_offset": 3, "committed_leader_epoch": -1}
    kept = {
        "group_id": "alone",
        "generation_id_or_member_epoch": member.epoch,
        "member_id": member.member_id,
        "topics": [{"name": "alone-b", "partitions": [part]}],
    }
    side.ask("commits", OFFSET_COMMIT, 9, kept)
    member.leave()
    describe(side, "empty", "alone")
    member.say("joins again")


def heartbeats_refused(side: Side) -> None:
    make_topic(side, "beats", "beats", 2)
    topics = ["beats"]

    def ask(label: str, version: int = 1, **fields: Any) -> Any:
        wanted = {
            "group_id": "beats",
            "member_id": "somebody",
            "member_epoch": 0,
            "rebalance_timeout": 30_000,
            "subscribed_topic_names": topics,
            "topic_partitions": [],
            **fields,
        }
        return side.ask(label, CONSUMER_GROUP_HEARTBEAT, version, wanted)

    for version in (0, 1):
        said = f"version {version}"
        ask(f"no group, {said}", version, group_id="")
        ask(f"a blank group, {said}", version, group_id="  ")
        ask(f"no time-out, {said}", version, rebalance_timeout=-1)
        ask(f"no time at all, {said}", version, rebalance_timeout=0)
        ask(f"no topics, {said}", version, subscribed_topic_names=None)
        ask(
            f"owns something already, {said}",
            version,
            topic_partitions=[{"topic_id": uuid.uuid4(), "partitions": [0]}],
        )
        ask(f"owns nothing it knows of, {said}", version, topic_partitions=None)
        ask(f"an unknown assignor, {said}", version, server_assignor="nonsense")
        ask(f"an empty assignor, {said}", version, server_assignor="")
        ask(f"an empty instance, {said}", version, instance_id="")
        ask(f"an empty rack, {said}", version, rack_id="")
        ask(f"an epoch of an unknown group, {said}", version, group_id="unknown", member_epoch=4)
        ask(f"leaves an unknown group, {said}", version, group_id="unknown", member_epoch=-1)
        ask(f"goes for a while without an instance, {said}", version, member_epoch=-2)
        ask(f"an epoch there is not, {said}", version, member_epoch=-3)
    ask("no member id, version 1", 1, member_id="")
    ask("a blank member id", 1, member_id=" ")
    ask("an empty list of topics", 1, group_id="beats-none", subscribed_topic_names=[])
    ask("a bad expression", 1, subscribed_topic_regex="a(", subscribed_topic_names=None)
    ask(
        "an empty expression",
        1,
        group_id="beats-empty",
        subscribed_topic_regex="",
        subscribed_topic_names=None,
    )
    describe(side, "nothing came of it", "beats")
    member = Member(side, "beats", "member", topics)
    member.say("joins")
    member.own()
    mine = {"member_id": member.member_id, "rebalance_timeout": -1, "subscribed_topic_names": None}
    now = {**mine, "topic_partitions": None}
    ask("a later epoch", **now, member_epoch=member.epoch + 1)
    ask("an earlier epoch", **now, member_epoch=member.epoch - 1)
    ask(
        "an earlier epoch, with what it owns",
        **mine,
        member_epoch=member.epoch - 1,
        topic_partitions=member.owned,
    )
    ask("a stranger", member_id="stranger", member_epoch=1)
    ask("a stranger leaves", member_id="stranger", member_epoch=-1)
    ask("with an instance it is not", **now, member_epoch=member.epoch, instance_id="other")
    more = [{"topic_id": uuid.UUID(int=5), "partitions": [9]}]
    ask("owns what it was not given", **mine, member_epoch=member.epoch, topic_partitions=more)
    member.say("is not disturbed")
    ask("an unknown assignor", **now, member_epoch=member.epoch, server_assignor="nonsense")
    member.say(
        "joins a second time",
        member_epoch=0,
        subscribed_topic_names=topics,
        rebalance_timeout=9000,
        topic_partitions=[],
    )
    describe(side, "in the end", "beats")


def shared(side: Side, assignor: str | None, kind: str, partitions: Sequence[int]) -> None:
    topics = [f"shared-{kind}-{number}" for number in range(len(partitions))]
    for topic, count in zip(topics, partitions, strict=True):
        make_topic(side, f"shared-{kind}", topic, count)
    group = f"shared-{kind}"
    first, second, third = (
        Member(side, group, name, topics, server_assignor=assignor) for name in ("1", "2", "3")
    )
    first.say("joins")
    first.own()
    second.say("joins")
    turns([first, second], 3)
    describe(side, "two", group)
    third.say("joins")
    turns([first, second, third], 4)
    describe(side, "three", group)
    second.leave()
    turns([first, third], 3)
    describe(side, "two again", group)
    first.leave()
    turns([third], 3)
    describe(side, "one again", group)


def shared_by_default(side: Side) -> None:
    shared(side, None, "default", [6])


def shared_uniformly(side: Side) -> None:
    # Of one topic: several are taken in the order of their ids, which are made up.
    shared(side, "uniform", "uniform", [6])


def shared_by_range(side: Side) -> None:
    shared(side, "range", "range", [3, 4])


def holding_on(side: Side) -> None:
    """A member gets nothing that another still holds, and gets it once that has let go."""
    make_topic(side, "holding", "holding", 4)
    group = "holding"
    first, second = (Member(side, group, name, ["holding"]) for name in ("1", "2"))
    first.say("joins")
    first.own()
    everything = list(first.owned)
    second.say("joins")
    second.own("has to wait")
    first.say("still holds everything", topic_partitions=everything)
    describe(side, "in between", group)
    second.own("waits on")
    first.own("lets go")
    second.own("gets its share")
    second.own()
    describe(side, "in the end", group)


def static_members(side: Side) -> None:
    make_topic(side, "static-consumers", "static-consumers", 4)
    group = "static-consumers"
    one, two = (
        Member(side, group, name, ["static-consumers"], instance_id=f"i{name}") for name in ("1", "2")
    )
    one.say("joins")
    one.own()
    two.say("joins")
    turns([one, two], 3)
    describe(side, "both", group)
    thief = Member(side, group, "thief", ["static-consumers"], instance_id="i2")
    thief.say("joins while the other is there")
    two.leave(LEAVES_FOR_A_WHILE)
    describe(side, "one is away", group)
    two.say("the one that is away", member_epoch=3)
    back = Member(side, group, "back", ["static-consumers"], instance_id="i2")
    back.say("comes back")
    back.own()
    one.say("does not notice")
    describe(side, "it is back", group)
    two.epoch = 3
    two.say("the old one")
    two.leave()
    back.leave()
    turns([one], 2)
    describe(side, "one is left", group)
    stranger = Member(side, group, "stranger", ["static-consumers"])
    stranger.say("goes for a while without an instance", member_epoch=LEAVES_FOR_A_WHILE)


def expressions(side: Side) -> None:
    for name in ("x1", "x2", "y1"):
        make_topic(side, "expressions", f"express-{name}", 1)
    group = "expressions"
    member = Member(side, group, "member", [], subscribed_topic_regex="express-x.*")
    member.say("joins", subscribed_topic_names=None)

    def has(count: int) -> bool:
        member.own()
        return member.held() == count

    for _ in range(200):
        if has(2):
            break
    side.note("held", member.held())
    describe(side, "by expression", group)
    member.say("and by name", subscribed_topic_names=["express-y1"])
    for _ in range(200):
        if has(3):
            break
    side.note("held with the name", member.held())
    member.say("a bad one", subscribed_topic_regex="express-(")
    member.say("Java's, not RE2's", subscribed_topic_regex="(?=express)express-.*")
    describe(side, "still by the good one", group)
    member.say("none any more", subscribed_topic_regex="")
    for _ in range(200):
        if has(1):
            break
    side.note("held by name alone", member.held())


def without_counting(script: Script) -> Script:
    """Drop the answers of heartbeats that were repeated until something came about: how many is not the point."""

    def run(side: Side) -> None:
        script(side)
        side.seen = {
            label: what for label, what in side.seen.items() if "owns what it was given" not in label
        }

    run.__name__ = script.__name__
    return run


def positions(side: Side) -> None:
    """Commits and fetches with member epochs."""
    topic_id = make_topic(side, "epoch-positions", "epoch-positions", 2)
    group = "epoch-positions"
    member = Member(side, group, "member", ["epoch-positions"])
    member.say("joins")
    member.own()

    def commit(label: str, epoch: int, version: int = 9, **fields: Any) -> None:
        part = {"partition_index": 0, "committed_offset": 3, "committed_leader_epoch": -1}
        topics = [{"name": "epoch-positions", "topic_id": topic_id, "partitions": [part]}]
        wanted = {
            "group_id": group,
            "generation_id_or_member_epoch": epoch,
            "member_id": member.member_id,
            "topics": topics,
            **fields,
        }
        side.ask(label, OFFSET_COMMIT, version, wanted)

    def fetch(label: str, epoch: int, member_id: str | None, version: int = 9) -> None:
        topics = [{"name": "epoch-positions", "topic_id": topic_id, "partition_indexes": [0]}]
        wanted = {"group_id": group, "member_id": member_id, "member_epoch": epoch, "topics": topics}
        side.ask(label, OFFSET_FETCH, version, {**wanted, "groups": [wanted]})

    for version in range(2, 11):
        for shift in (-1, 0, 1):
            commit(f"epoch {shift:+d}, version {version}", member.epoch + shift, version)
        commit(f"nobody, version {version}", -1, version, member_id="")
        commit(f"a stranger, version {version}", member.epoch, version, member_id="stranger")
    for version in (8, 9, 10):
        for shift in (-1, 0, 1):
            fetch(
                f"fetched at epoch {shift:+d}, version {version}",
                member.epoch + shift,
                member.member_id,
                version,
            )
        fetch(f"fetched by a stranger, version {version}", member.epoch, "stranger", version)
        fetch(f"fetched by nobody, version {version}", -1, None, version)
    parts = [{"partition_index": 0}]
    wanted = {"group_id": group, "topics": [{"name": "epoch-positions", "partitions": parts}]}
    side.ask("deleted while subscribed", OFFSET_DELETE, 0, wanted)
    before = member.epoch
    member.say("another subscription", subscribed_topic_names=["epoch-positions", "nowhere"])
    commit("at the epoch before", before)
    member.leave()
    commit("after it left", before)
    commit("by nobody", -1, member_id="")
    # A group without members and positions is taken away by whichever broker looks first.
    other = [{"partition_index": 1, "committed_offset": 1, "committed_leader_epoch": -1}]
    kept = [{"name": "epoch-positions", "topic_id": topic_id, "partitions": other}]
    commit("what stays, by nobody", -1, member_id="", topics=kept)
    fetch("in the end", -1, None)
    side.ask("deleted", OFFSET_DELETE, 0, wanted)
    side.ask("the group deleted", DELETE_GROUPS, 2, {"groups_names": [group]})
    describe(side, "is gone", group)


def sessions(side: Side) -> None:
    """A member that says nothing is out after its session; what it held goes to the others."""
    make_topic(side, "sessions", "sessions", 2)
    group = "sessions"
    # Long enough for the one that does speak, on a machine that stands still for a second.
    setting = {"name": "consumer.session.timeout.ms", "config_operation": 0, "value": "3000"}
    resource = {"resource_type": 32, "resource_name": group, "configs": [setting]}
    side.ask("a short session", INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]})
    silent, other = (Member(side, group, name, ["sessions"]) for name in ("silent", "other"))
    silent.say("joins")
    silent.own()
    other.say("joins")

    def has_everything() -> bool:
        other.own()
        return other.held() == 2

    side.wait_until(has_everything)
    describe(side, "the silent one is out", group)
    silent.say("comes too late")
    other.leave()


def letting_go_too_slowly(side: Side) -> None:
    """A member that does not let go within its rebalance time-out is put out."""
    make_topic(side, "too-slow", "too-slow", 2)
    group = "too-slow"
    slow = Member(side, group, "slow", ["too-slow"])
    slow._first["rebalance_timeout"] = 600
    other = Member(side, group, "other", ["too-slow"])
    slow.say("joins")
    slow.own()
    everything = list(slow.owned)
    other.say("joins")
    slow.say("is told", topic_partitions=everything)

    def is_out() -> bool:
        other.own()
        return other.held() == 2

    side.wait_until(is_out)
    slow.say("comes too late")
    describe(side, "in the end", group)


def topics_change(side: Side) -> None:
    make_topic(side, "changes", "changes", 2)
    make_topic(side, "changes", "changes-too", 1)
    group = "changes"
    member = Member(side, group, "member", ["changes", "changes-too"])
    member.say("joins")
    member.own()
    new = {"topics": [{"name": "changes", "count": 4, "assignments": None}], "timeout": 9000}
    side.client.ask(CREATE_PARTITIONS, 3, new)

    def has(count: int) -> bool:
        member.own()
        return member.held() == count

    side.wait_until(lambda: has(5))
    side.client.ask(DELETE_TOPICS, 6, {"topics": [{"name": "changes-too"}], "timeout": 9000})
    side.wait_until(lambda: has(4))
    describe(side, "in the end", group)


def both_protocols(side: Side) -> None:
    """Members of the classic protocol in a group of the other, from the first to the last of either."""
    make_topic(side, "both-protocols", "both-protocols", 4)
    group = "both-protocols"
    metadata = subscription("", "both-protocols")
    classic = RawMember(side, group, "classic", protocols=[{"name": "range", "metadata": metadata}])
    settle([], [classic], "alone", noted=False)
    member = Member(side, group, "member", ["both-protocols"], server_assignor="range")
    member.say("joins")
    describe(side, "both", group)
    side.ask("as a classic group", DESCRIBE_GROUPS, 6, {"groups": [group]})
    classic.heartbeat("is told")
    classic.join("joins again")
    classic.sync("asks what it has")
    classic.heartbeat("is content")
    member.own()
    member.own()
    describe(side, "both settled", group)
    listed = side.client.ask(LIST_GROUPS, 5, {"types_filter": ["consumer"]}).groups
    side.note("listed", [each for each in listed if each.group_id == group])
    classic.heartbeat("by a wrong generation", generation_id=77)
    classic.sync("by a wrong protocol", protocol_name="other")
    member.leave()
    classic.heartbeat("is told that it is alone")
    side.ask("classic again", DESCRIBE_GROUPS, 6, {"groups": [group]})
    describe(side, "no longer of the new protocol", group)
    classic.join("joins once more")
    classic.leave()


def not_upgraded(side: Side) -> None:
    """What keeps a classic group from being taken over, and a consumer group from classic members."""
    make_topic(side, "not-upgraded-new", "not-upgraded", 1)
    foreign = RawMember(side, "not-upgraded-connect", "connect", protocol_type="connect")
    settle([], [foreign], "connect")
    member = Member(side, "not-upgraded-connect", "for connect", ["not-upgraded"])
    member.say("joins a group of connect")
    new = Member(side, "not-upgraded-new", "new", ["not-upgraded"])
    new.say("joins")
    other = RawMember(side, "not-upgraded-new", "other", protocol_type="connect")
    other.join("of another type")
    plain = [{"name": "range", "metadata": subscription("", "not-upgraded")}]
    odd = RawMember(side, "not-upgraded-odd", "odd", protocols=plain)
    odd.come_in()
    odd.answer()
    odd.sync("something unreadable", {odd.member_id: b"not an assignment"})
    Member(side, "not-upgraded-odd", "for odd", ["not-upgraded"]).say("joins a group that was given nonsense")
    given = RawMember(side, "not-upgraded-given", "given", protocols=plain)
    settle([], [given], "given data")
    describe(side, "undisturbed", "not-upgraded-new")
    # From here on the two brokers go different ways, each for its own reason.
    Member(side, "not-upgraded-given", "for given", ["not-upgraded"]).say("joins a group that was given data")
    side.ask("still classic", DESCRIBE_GROUPS, 6, {"groups": ["not-upgraded-given"]})
    garbage = RawMember(side, "not-upgraded-new", "garbage", protocols=[{"name": "range", "metadata": b"g"}])
    garbage.join("what it wants makes no sense")


def taken_over(side: Side) -> None:
    """A group of positions alone is taken over by the one protocol and then by the other; the positions stay."""
    make_topic(side, "taken-over", "taken-over", 1)
    simple = {
        "group_id": "taken-over",
        "generation_id_or_member_epoch": -1,
        "topics": [{"name": "taken-over", "partitions": [{"partition_index": 0, "committed_offset": 5}]}],
    }
    positions = {"groups": [{"group_id": "taken-over", "topics": None}]}
    side.ask("a group of positions alone", OFFSET_COMMIT, 8, simple)
    taking = Member(side, "taken-over", "taking", ["taken-over"])
    taking.say("takes it over")
    side.ask("its positions", OFFSET_FETCH, 8, positions)
    taking.leave()
    classic = RawMember(side, "taken-over", "classic")
    settle([], [classic], "takes it back")
    side.ask("its positions again", OFFSET_FETCH, 8, positions)


SCRIPTS = (
    without_counting(one_member),
    heartbeats_refused,
    shared_by_default,
    shared_uniformly,
    shared_by_range,
    holding_on,
    static_members,
    without_counting(expressions),
    positions,
    without_counting(sessions),
    without_counting(letting_go_too_slowly),
    without_counting(topics_change),
    both_protocols,
    not_upgraded,
    taken_over,
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_consumer_protocol_is_answered_as_apache_kafka_answers(script: Script, compare: Compare) -> None:
    compare(script)
