"""Committed positions: OffsetCommit, OffsetFetch and OffsetDelete at every version, of groups and of nobody."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.differential import Script, Side
from tests.support.raw_groups import RawMember, settle, subscription

from holdfast.wire.api_keys import DELETE_TOPICS, DESCRIBE_GROUPS, OFFSET_COMMIT, OFFSET_DELETE, OFFSET_FETCH

Compare = Callable[[Script], None]
COMMIT_VERSIONS = range(2, 11)
FETCH_VERSIONS = range(1, 11)


class Positions:
    """The positions of one group on one topic, committed and asked for by raw requests."""

    def __init__(self, side: Side, group: str, topic: str, partitions: int = 3) -> None:
        self.side = side
        self.group = group
        self.topic = topic
        self.topic_id = side.create_topic(topic, partitions)

    def commit(self, label: str, *parts: dict[str, Any], version: int = 9, **fields: Any) -> Any:
        topic = fields.pop("topic", {"name": self.topic, "topic_id": self.topic_id})
        partitions = [
            {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1, **part}
            for part in parts
        ]
        wanted = {
            "group_id": self.group,
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "group_instance_id": None,
            "topics": [{**topic, "partitions": partitions}] if parts else [],
            "retention_time": -1,
            **fields,
        }
        return self.side.ask(label, OFFSET_COMMIT, version, wanted)

    def fetch(self, label: str, *indexes: int, version: int = 9, **fields: Any) -> Any:
        """By name, or by id from version 10 on; without indexes everything the group has."""
        topic = fields.pop("topic", {"name": self.topic, "topic_id": self.topic_id})
        topics = [{**topic, "partition_indexes": list(indexes)}] if indexes else None
        group = {"group_id": self.group, "topics": topics, **fields}
        wanted = {**group, "groups": [group], "require_stable": fields.get("require_stable", False)}
        return self.side.ask(label, OFFSET_FETCH, version, wanted)

    def delete(self, label: str, *indexes: int, **fields: Any) -> Any:
        topic = fields.pop("topic", self.topic)
        parts = [{"partition_index": index} for index in indexes]
        wanted = {"group_id": self.group, "topics": [{"name": topic, "partitions": parts}], **fields}
        return self.side.ask(label, OFFSET_DELETE, 0, wanted)


def commits_of_nobody(side: Side) -> None:
    """Positions of a group that never had members, at every version."""
    place = Positions(side, "of-nobody", "of-nobody")
    for version in FETCH_VERSIONS:
        if version > 1:
            place.fetch(f"nothing yet, version {version}", version=version)
        place.fetch(f"nothing of these yet, version {version}", 0, 7, version=version)
    for version in COMMIT_VERSIONS:
        parts: list[dict[str, Any]] = [
            {"partition_index": 0, "committed_offset": version, "committed_metadata": f"by {version}"},
            {"partition_index": 1, "committed_offset": version * 10, "committed_metadata": None},
            {"partition_index": 9, "committed_offset": 1},
        ]
        if version >= 6:
            parts[0]["committed_leader_epoch"] = 3
        place.commit(f"version {version}", *parts, version=version)
        for fetch_version in FETCH_VERSIONS:
            if fetch_version > 1:
                place.fetch(f"after {version}, version {fetch_version}, all", version=fetch_version)
            place.fetch(f"after {version}, version {fetch_version}", 0, 1, 2, 9, version=fetch_version)
    place.commit("none")
    side.ask("described", DESCRIBE_GROUPS, 6, {"groups": ["of-nobody"]})


def commits_refused(side: Side) -> None:
    place = Positions(side, "refused-commits", "refused-commits")
    for version in (2, 5, 8, 9, 10):
        one: dict[str, Any] = {"committed_offset": 5}
        said = f"version {version}"
        place.commit(
            f"a generation nobody has, {said}", one, version=version, generation_id_or_member_epoch=4
        )
        place.commit(f"a member nobody knows, {said}", one, version=version, member_id="nobody")
        both: dict[str, Any] = {"member_id": "nobody", "generation_id_or_member_epoch": 4}
        place.commit(f"both, {said}", one, version=version, **both)
        place.commit(f"no group, {said}", one, version=version, group_id="")
        nowhere = {"name": "nowhere", "topic_id": uuid.UUID(int=77)}
        place.commit(f"no such topic, {said}", one, version=version, topic=nowhere)
        place.commit(f"no topic, {said}", one, version=version, topic={"name": "", "topic_id": None})
    place.commit("an instance nobody knows", {}, group_instance_id="nobody", member_id="nobody")
    place.commit("too much metadata", {"committed_metadata": "x" * 4097}, {"partition_index": 1})
    place.commit("as much as is allowed", {"committed_metadata": "x" * 4096})
    place.commit("much in two bytes each", {"committed_metadata": "ü" * 4096, "partition_index": 2})
    place.commit("a negative offset", {"committed_offset": -5})
    place.commit("no offset", {"committed_offset": -1})
    place.commit("the largest", {"committed_offset": 2**63 - 1})
    place.commit("a negative partition", {"partition_index": -1})
    place.commit("the same twice", {"committed_offset": 3}, {"committed_offset": 4})
    topics = [
        {"name": name, "partitions": [{"partition_index": 0, "committed_offset": 8}]}
        for name in ("refused-commits", "nowhere", "refused-commits", "a/b")
    ]
    place.commit("several topics", {}, topics=topics)
    place.fetch("what there is")
    for version in (2, 3, 4):
        place.commit(f"kept for good, version {version}", {}, version=version, retention_time=10**12)


def commits_of_members(side: Side) -> None:
    group = "members-commit"
    place = Positions(side, group, "members-commit")
    member = RawMember(side, group, "member")
    member.come_in()
    member.answer()
    mine: dict[str, Any] = {"member_id": member.member_id, "generation_id_or_member_epoch": 1}
    place.commit("before it synced", {"committed_offset": 1}, **mine)
    member.sync()
    for version in COMMIT_VERSIONS:
        place.commit(f"version {version}", {"committed_offset": version}, version=version, **mine)
        place.commit(f"nobody, version {version}", {"committed_offset": 99}, version=version)
        later: dict[str, Any] = {**mine, "generation_id_or_member_epoch": 2}
        place.commit(
            f"a later generation, version {version}", {"committed_offset": 99}, version=version, **later
        )
        stranger: dict[str, Any] = {**mine, "member_id": "stranger"}
        place.commit(f"a stranger, version {version}", {"committed_offset": 99}, version=version, **stranger)
    place.commit("with an instance", {}, **mine, group_instance_id="unknown")
    place.commit("no generation", {}, **{**mine, "generation_id_or_member_epoch": -1})
    other = RawMember(side, group, "other")
    other.come_in()
    other.await_members(2)
    place.commit("while it rebalances", {"committed_offset": 50}, **mine)
    member.come_in("comes in again")
    other.answer()
    member.answer()
    place.commit("by the generation before", {"committed_offset": 51}, **mine)
    now: dict[str, Any] = {**mine, "generation_id_or_member_epoch": 2}
    place.commit("before anybody synced", {"committed_offset": 52}, **now)
    place.fetch("while it completes", 0)
    for version in (8, 9):
        as_member = {"member_id": member.member_id, "member_epoch": 1}
        place.fetch(f"as a member, version {version}", 0, version=version, **as_member)


def fetches(side: Side) -> None:
    place = Positions(side, "positions-fetched", "positions-fetched")
    place.commit("committed", {"committed_offset": 4, "committed_metadata": "m"})
    for version in FETCH_VERSIONS:
        for stable in (False, True):
            said = f"version {version}{', stable' if stable else ''}"
            place.fetch(f"one, {said}", 0, version=version, require_stable=stable)
        nowhere = {"name": "nowhere", "topic_id": uuid.UUID(int=77)}
        place.fetch(f"nowhere, version {version}", 0, version=version, topic=nowhere)
        place.fetch(f"no group, version {version}", 0, version=version, group_id="")
        place.fetch(f"an unknown group, version {version}", 0, version=version, group_id="unknown")
        if version > 1:
            place.fetch(f"all of an unknown group, version {version}", version=version, group_id="unknown")
        fields = {
            "group_id": "positions-fetched",
            "topics": [],
            "groups": [{"group_id": "positions-fetched", "topics": []}],
        }
        side.ask(f"no topics, version {version}", OFFSET_FETCH, version, fields)
    by_name = {"name": "positions-fetched", "topic_id": place.topic_id, "partition_indexes": [0, 5, -1, 0]}
    groups = [
        {"group_id": group, "topics": topics}
        for group, topics in (
            ("positions-fetched", [by_name]),
            ("unknown", [by_name]),
            ("", None),
            ("positions-fetched", None),
        )
    ]
    for version in (8, 9, 10):
        side.ask(f"several groups, version {version}", OFFSET_FETCH, version, {"groups": groups})
        side.ask(f"no groups, version {version}", OFFSET_FETCH, version, {"groups": []})
    place.fetch("as a member of a group without members", 0, member_id="m", member_epoch=3)
    no_id = {"topic_id": None}
    place.fetch("no topic id", 0, version=10, topic=no_id)


def deletions(side: Side) -> None:
    group = "positions-deleted"
    place = Positions(side, group, "positions-deleted")
    place.delete("of no group", 0)
    place.delete("no group", 0, group_id="")
    place.commit("committed", *({"partition_index": index, "committed_offset": index} for index in range(3)))
    place.delete("one", 0)
    place.delete("it again", 0)
    place.delete("no such partition", 9)
    place.delete("no such topic", 0, topic="nowhere")
    place.delete("the same twice", 1, 1)
    place.delete("no partitions")
    place.fetch("what is left")
    member = RawMember(
        side,
        group,
        "member",
        protocols=[{"name": "range", "metadata": subscription("m", "positions-deleted")}],
    )
    settle([], [member], "one")
    place.delete("while somebody reads it", 2)
    other = Positions(side, group, "positions-deleted-too")
    mine: dict[str, Any] = {"member_id": member.member_id, "generation_id_or_member_epoch": member.generation}
    other.commit("by the member", {"committed_offset": 5}, **mine)
    other.delete("of a topic nobody subscribed to", 0)
    connect = RawMember(side, f"{group}-connect", "connect", protocol_type="connect")
    settle([], [connect], "one")
    other.delete("of a group that is not of consumers", 0, group_id=f"{group}-connect")
    member.leave()
    place.delete("when nobody reads it", 2)
    place.fetch("nothing is left")


def expiry(side: Side) -> None:
    """A position that was committed for a while is gone after it, and with the last one the group."""
    place = Positions(side, "expiring", "expiring")
    place.commit("for a moment", {"committed_offset": 3}, version=4, retention_time=1)
    place.commit("for longer", {"partition_index": 1, "committed_offset": 4}, version=4, retention_time=10**9)

    def is_gone() -> bool:
        group = {"group_id": "expiring", "topics": None}
        answer = side.client.ask(OFFSET_FETCH, 8, {"groups": [group]})
        return len(answer.groups[0].topics[0].partitions) == 1

    side.wait_until(is_gone)
    place.fetch("after it")
    place.commit("at work or not", {"partition_index": 1, "committed_offset": 4}, version=4, retention_time=1)

    def is_dead() -> bool:
        answer = side.client.ask(DESCRIBE_GROUPS, 5, {"groups": ["expiring"]})
        return bool(answer.groups[0].group_state == "Dead")

    side.wait_until(is_dead)
    place.fetch("in the end")


def deleted_topics(side: Side) -> None:
    """What a group knew of a topic goes with it, and does not come back with another of its name."""
    place = Positions(side, "topic-deleted", "topic-deleted")
    stays = Positions(side, "topic-deleted", "topic-stays")
    stays.commit("stays", {"committed_offset": 2})
    place.commit("goes", {"committed_offset": 2})
    old = {"topic_id": place.topic_id}
    side.client.ask(DELETE_TOPICS, 6, {"topics": [{"name": "topic-deleted"}], "timeout": 9000})

    def is_gone() -> bool:
        group = {"group_id": "topic-deleted", "topics": None}
        answer = side.client.ask(OFFSET_FETCH, 8, {"groups": [group]})
        return len(answer.groups[0].topics) == 1

    side.wait_until(is_gone)
    place.fetch("by name", 0)
    place.fetch("by id", 0, version=10)
    place.commit("to what is gone", {"committed_offset": 2})
    place.commit("to the id that is gone", {"committed_offset": 2}, version=10)
    again = Positions(side, "topic-deleted", "topic-deleted")
    again.fetch("of its successor", 0)
    again.commit("by the old id", {"committed_offset": 2}, version=10, topic=old)
    again.commit("to its successor", {"committed_offset": 7}, version=10)
    again.fetch("of its successor by the old id", 0, version=10, topic=old)
    again.fetch("of its successor by id", 0, version=10)


SCRIPTS = (
    commits_of_nobody,
    commits_refused,
    commits_of_members,
    fetches,
    deletions,
    expiry,
    deleted_topics,
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_committed_offsets_are_answered_as_apache_kafka_answers(script: Script, compare: Compare) -> None:
    compare(script)
