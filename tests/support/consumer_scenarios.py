"""The language of scenarios about groups of the consumer protocol: that of `group_scenarios`, and

    cjoin ann topics=a,b [regex=EXPR] [instance=i] [assignor=range] [rebalance=5m]     join, or join again
    cbeat ann [owns=orders-0,orders-1 | owns=-] [epoch=3] [full]                        stay
    cbeat ann topics=a,b                                                                 subscribe to something else
    cleave ann | caway ann                               leave for good, or as a static member that will be back
    cdescribe                                            epochs, and each member with what it has and shall have
    join bob topics=a owns=a-0                           classic; what it has not given up when it joins
    csync ann ann=a-0,a-1 bob=a-2                        a leader's sync, with assignments as real ones are
    group-settings consumer.session.timeout.ms=50000     an operator's settings of the group

A consumer uses what it is told to use, as soon as it is told, and says so with `owns`; nothing is said for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from tests.support.group_scenarios import INDENT, GroupInterpreter, duration_ms

from holdfast.broker.groups.assignors import Assignment
from holdfast.broker.groups.consumer_member import ConsumerReply, MemberState, NamedPartitions
from holdfast.broker.groups.model import SyncRequest
from holdfast.errors import ApiError
from holdfast.wire.consumer_protocol import (
    ConsumerAssignment,
    ConsumerSubscription,
    OwnedPartitions,
    decode_assignment,
)
from holdfast.wire.coordinator_records import (
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMetadataKey,
    ConsumerGroupRegularExpressionKey,
    ConsumerGroupTargetAssignmentMemberKey,
    ConsumerGroupTargetAssignmentMetadataKey,
    GroupMetadataKey,
    GroupMetadataValue,
)

Places = dict[str, list[int]]


def read_places(text: str) -> Places:
    """`orders-0,orders-1`, or `-` for none."""
    places: Places = {}
    for place in text.split(",") if text != "-" else ():
        topic, _, index = place.rpartition("-")
        places.setdefault(topic, []).append(int(index))
    return places


def written(places: Iterable[tuple[str, Iterable[int]]]) -> str:
    return (
        ",".join(f"{topic}-{index}" for topic, indexes in sorted(places) for index in sorted(indexes))
        or "nothing"
    )


def embedded(assignment: bytes) -> str:
    """What a classic member was assigned by the coordinator, or by a leader of a scenario, who writes plain text."""
    try:
        _, decoded = decode_assignment(assignment)
    except ValueError:
        return assignment.decode() or "nothing"
    return written((each.topic, each.partitions) for each in decoded.assigned_partitions)


class ConsumerInterpreter(GroupInterpreter):
    # The consumer protocol

    def do_cjoin(self, words: list[str], options: dict[str, str]) -> None:
        options.setdefault("topics", "")
        options.setdefault("rebalance", "5m")
        self._cbeat(words[0], {"epoch": "0", "owns": "-", **options})

    def do_cbeat(self, words: list[str], options: dict[str, str]) -> None:
        for name in words:
            self._cbeat(name, options)

    def do_cleave(self, words: list[str], options: dict[str, str]) -> None:
        for name in words:
            self._cbeat(name, {"epoch": "-1", **options})

    def do_caway(self, words: list[str], options: dict[str, str]) -> None:
        self._cbeat(words[0], {"epoch": "-2", **options})

    def _cbeat(self, name: str, options: Mapping[str, str]) -> None:
        group = options.get("group", "group")
        person = self.person(name, group)
        person.member_id = person.member_id or name
        person.instance_id = options.get("instance", person.instance_id)
        fields: dict[str, Any] = {
            "instance_id": person.instance_id,
            "server_assignor": options.get("assignor"),
        }
        if "rebalance" in options:
            fields["rebalance_timeout_ms"] = duration_ms(options["rebalance"])
        topics = options.get("topics")
        try:
            reply = self.world.beat(
                person.member_id,
                int(options.get("epoch", person.generation)),
                group=group,
                topics=None if topics is None else [topic for topic in topics.split(",") if topic],
                regex=options.get("regex"),
                owned=self._ids(read_places(options["owns"])) if "owns" in options else None,
                **fields,
            )
        except ApiError as error:
            self.say(f"{name}: {error.code.name.upper()}")
            return
        person.generation = reply.member_epoch
        self._told(name, reply)

    def _told(self, name: str, reply: ConsumerReply) -> None:
        if reply.member_epoch < 0:
            self.say(f"{name}: {'gone' if reply.member_epoch == -1 else 'away'}")
            return
        uses = "" if reply.assignment is None else f", uses {self._names_of(reply.assignment)}"
        self.say(f"{name}: epoch {reply.member_epoch}{uses}")

    def _ids(self, places: Places) -> Assignment:
        found = {self.world.topics.by_name(topic): indexes for topic, indexes in places.items()}
        return {facts.topic_id: frozenset(indexes) for facts, indexes in found.items() if facts is not None}

    def _names_of(self, assignment: Mapping[UUID, Iterable[int]]) -> str:
        return written((self._topic_name(topic_id), indexes) for topic_id, indexes in assignment.items())

    def _topic_name(self, topic_id: UUID) -> str:
        facts = self.world.topics.by_id(topic_id)
        return "(deleted)" if facts is None else facts.name

    def do_group_settings(self, words: list[str], options: dict[str, str]) -> None:
        group = options.pop("group", "group")
        self.world.overrides[group] = {**self.world.overrides.get(group, {}), **options}

    # Looking

    def do_cdescribe(self, words: list[str], options: dict[str, str]) -> None:
        try:
            group = self.world.coordinator.consumer_groups.describe(options.get("group", "group"))
        except ApiError as error:
            self.say(error.code.name.upper())
            return
        self.say(
            f"{group.state}, epoch {group.epoch}, assigned for {group.assignment_epoch} by {group.assignor}"
        )
        for member in sorted(group.members):
            kind = "classic " if member.is_classic else ""
            text = f"{INDENT}{kind}{member.member_id}: epoch {member.member_epoch}, has {_named(member.assignment)}"
            self.say(
                text + ("" if member.target == member.assignment else f", shall have {_named(member.target)}")
            )

    def _record(self, key: Any, value: Any) -> str:
        if isinstance(key, GroupMetadataKey) and isinstance(value, GroupMetadataValue):
            members = "".join(f", {each.member_id} has {embedded(each.assignment)}" for each in value.members)
            return f"classic {key.group}: generation {value.generation}{members}"
        if isinstance(key, GroupMetadataKey):
            return f"classic {key.group}: gone"
        described = self._consumer_record(key, value)
        return super()._record(key, value) if described is None else described

    def _consumer_record(self, key: Any, value: Any) -> str | None:
        gone = value is None
        match key:
            case ConsumerGroupMetadataKey():
                return "group: gone" if gone else f"group: epoch {value.epoch}"
            case ConsumerGroupTargetAssignmentMetadataKey():
                return "target: gone" if gone else f"target: epoch {value.assignment_epoch}"
            case ConsumerGroupRegularExpressionKey():
                topics = "gone" if gone else " ".join(value.topics) or "nothing"
                return f"expression {key.regular_expression}: {topics}"
            case ConsumerGroupMemberMetadataKey():
                return f"{key.member_id}: {'gone' if gone else _profile(value)}"
            case ConsumerGroupTargetAssignmentMemberKey():
                shall = "nothing, gone" if gone else self._listed(value.topic_partitions)
                return f"{key.member_id} shall have: {shall}"
            case ConsumerGroupCurrentMemberAssignmentKey():
                return f"{key.member_id} has: {'nothing, gone' if gone else self._held(value)}"
            case _:
                return None

    def _held(self, value: Any) -> str:
        text = f"{self._listed(value.assigned_partitions)}, epoch {value.member_epoch}"
        text += f", {MemberState(value.state).name.lower()}"
        if value.partitions_pending_revocation:
            text += f", gives up {self._listed(value.partitions_pending_revocation)}"
        return text

    def _listed(self, topics: Iterable[Any]) -> str:
        return self._names_of({topic.topic_id: topic.partitions for topic in topics})

    # Classic members

    def join_metadata(self, options: Mapping[str, str]) -> bytes:
        topics = tuple(filter(None, options.get("topics", "").split(",")))
        owned = _owned(options.get("owns", "-"))
        return ConsumerSubscription(topics=topics, owned_partitions=owned).encode()

    def do_csync(self, words: list[str], options: dict[str, str]) -> None:
        (name,) = words
        group = options.pop("group", "group")
        person = self.person(name, group)
        assignments = tuple(
            (
                self.id_of(who, group),
                ConsumerAssignment(assigned_partitions=_owned(places)).encode(),
            )
            for who, places in options.items()
        )
        request = SyncRequest(
            group,
            person.generation,
            person.member_id,
            person.instance_id,
            person.protocol_type,
            person.protocol,
            assignments,
        )
        self.world.coordinator.sync(request, lambda reply: self._synced(person, reply), self.world.now)

    def assigned(self, assignment: bytes) -> str:
        return embedded(assignment)

    def _show(self, member_id: str, name: str) -> None:
        """Members of the consumer protocol choose their ids; those are shown as they are."""
        if member_id != name:
            super()._show(member_id, name)


def _owned(places: str) -> tuple[OwnedPartitions, ...]:
    return tuple(OwnedPartitions(topic, tuple(indexes)) for topic, indexes in read_places(places).items())


def _named(partitions: tuple[NamedPartitions, ...]) -> str:
    return written((each.topic_name, each.partitions) for each in partitions)


def _profile(value: Any) -> str:
    text = "classic, " if value.classic_member_metadata is not None else ""
    text += f"subscribed to {' '.join(value.subscribed_topic_names) or 'nothing'}"
    if value.subscribed_topic_regex:
        text += f" and {value.subscribed_topic_regex}"
    return text + (f", instance {value.instance_id}" if value.instance_id else "")
