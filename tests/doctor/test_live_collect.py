"""Asking a cluster: few requests, refusals and deaths as gaps, a broken history line as one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace as Answer
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.admin.errors import Unreachable, UnsupportedBroker
from holdfast.doctor.findings import DoctorError
from holdfast.doctor.live import judge
from holdfast.doctor.live_collect import collect
from holdfast.doctor.live_snapshot import Look, append_looks, read_looks
from holdfast.wire.api_keys import (
    DESCRIBE_CLUSTER,
    DESCRIBE_CONFIGS,
    DESCRIBE_LOG_DIRS,
    DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS,
    FIND_COORDINATOR,
    LIST_GROUPS,
    LIST_OFFSETS,
    LIST_TRANSACTIONS,
    METADATA,
    OFFSET_FETCH,
)

NONE = ErrorCode.none
DAY_MS = 86_400_000
NOW_MS = 1_000 * DAY_MS
RETENTION_MS = 8 * DAY_MS
TOPIC, BROKER = 2, 4


class FakeBrokers:
    """Brokers whose logs hold a message an hour, each offset as old as it is far from the end.

    `deny` names what may not be seen; `dies_at` is the number of the request at which the brokers are gone.
    """

    def __init__(
        self, brokers: int = 3, topics: int = 2, partitions: int = 3, groups: Mapping[str, int] | None = None
    ) -> None:
        self.brokers, self.partitions = brokers, partitions
        self.topics = [f"topic-{number}" for number in range(topics)]
        self.groups = dict(groups or {})
        """By name, the position in every partition of the first topic."""
        self.end = 1_000
        self.deny: set[str] = set()
        self.unsupported: set[int] = set()
        self.dies_at: int | None = None
        self.gone: set[int] = set()
        self.may_describe_cluster = True
        self.hidden: set[str] = set()
        """Topics that are there, and in no list."""
        self.asked: Counter[int] = Counter()

    def metadata(self, topics: Iterable[str] | None, *, lowest: int = 1) -> Any:
        return self.ask_any(METADATA, {"topics": topics})

    def ask_any(self, api_key: int, fields: Mapping[str, Any], *, lowest: int = 0) -> Any:
        return self.ask_broker(1, api_key, fields)

    def ask_broker(
        self, broker_id: int, api_key: int, fields: Mapping[str, Any], *, lowest: int = 0, highest: int = 99
    ) -> Any:
        self.asked[api_key] += 1
        if broker_id in self.gone or (self.dies_at is not None and self.asked.total() > self.dies_at):
            raise Unreachable(f"broker {broker_id} cannot be spoken to")
        if api_key in self.unsupported:
            raise UnsupportedBroker("too old")
        return ANSWERS[api_key](self, broker_id, fields)

    def code(self, name: str, refusal: ErrorCode) -> ErrorCode:
        return refusal if name in self.deny else NONE

    def log_dirs(self, _: int, __: Any) -> Any:
        topics = [Answer(name=name) for name in (*self.topics, *self.hidden, "deleted-since")]
        return Answer(results=[Answer(topics=topics)])

    def metadata_answer(self, _: int, fields: Any) -> Any:
        if fields["topics"] is not None:
            refused, unknown = ErrorCode.topic_authorization_failed, ErrorCode.unknown_topic_or_partition
            names = fields["topics"]
            return Answer(
                topics=[
                    Answer(name=name, error_code=refused if name in self.hidden else unknown)
                    for name in names
                ]
            )
        brokers = [
            Answer(node_id=number, host="b", port=number, rack=None) for number in range(1, self.brokers + 1)
        ]
        everyone = tuple(range(1, self.brokers + 1))
        topics = [
            Answer(
                error_code=NONE,
                name=name,
                topic_id=None,
                is_internal=False,
                partitions=[
                    Answer(
                        partition_index=index,
                        leader_id=1 + index % self.brokers,
                        leader_epoch=0,
                        replica_nodes=everyone,
                        isr_nodes=everyone,
                    )
                    for index in range(self.partitions)
                ],
            )
            for name in self.topics
        ]
        return Answer(brokers=brokers, topics=topics)

    def cluster(self, _: int, __: Any) -> Any:
        return Answer(
            error_code=NONE, cluster_authorized_operations=(1 << 8) if self.may_describe_cluster else 1 << 3
        )

    def configs(self, _: int, fields: Any) -> Any:
        values = {"cleanup.policy": "delete", "retention.ms": str(RETENTION_MS), "min.insync.replicas": "2"}
        return Answer(
            results=[
                Answer(
                    error_code=self.code(
                        each["resource_name"],
                        ErrorCode.topic_authorization_failed
                        if each["resource_type"] == TOPIC
                        else ErrorCode.cluster_authorization_failed,
                    ),
                    error_message=None,
                    resource_name=each["resource_name"],
                    configs=[
                        Answer(name=name, value=value, config_source=5) for name, value in values.items()
                    ],
                )
                for each in fields["resources"]
            ]
        )

    def list_groups(self, broker_id: int, _: Any) -> Any:
        own = [name for index, name in enumerate(self.groups) if 1 + index % self.brokers == broker_id]
        return Answer(
            error_code=NONE,
            groups=[Answer(group_id=name, group_state="Empty", group_type="classic") for name in own],
        )

    def positions(self, _: int, fields: Any) -> Any:
        return Answer(
            groups=[
                Answer(
                    group_id=each["group_id"],
                    error_code=self.code(each["group_id"], ErrorCode.group_authorization_failed),
                    topics=[
                        Answer(
                            name=self.topics[0],
                            partitions=[
                                Answer(
                                    partition_index=index,
                                    error_code=NONE,
                                    committed_offset=self.groups[each["group_id"]],
                                )
                                for index in range(self.partitions)
                            ],
                        )
                    ],
                )
                for each in fields["groups"]
            ]
        )

    def coordinators(self, _: int, fields: Any) -> Any:
        (name,) = fields["coordinator_keys"]
        return Answer(coordinators=[Answer(error_code=self.code(name, ErrorCode.group_authorization_failed))])

    def offsets(self, _: int, fields: Any) -> Any:
        return Answer(
            topics=[
                Answer(
                    name=topic["name"],
                    partitions=[self._offset(topic["name"], each) for each in topic["partitions"]],
                )
                for topic in fields["topics"]
            ]
        )

    def _offset(self, topic: str, asked: Mapping[str, Any]) -> Any:
        special = {-2: 0, -1: self.end}
        time_ms = asked["timestamp"]
        offset, found_ms = special.get(time_ms, -1), -1
        if time_ms >= 0:
            hours = (NOW_MS - time_ms) // 3_600_000
            offset = max(0, self.end - hours) if hours > 0 else -1
            found_ms = self.written_ms(offset)
        return Answer(
            partition_index=asked["partition_index"],
            error_code=self.code(f"{topic} offsets", ErrorCode.topic_authorization_failed),
            offset=offset,
            timestamp=found_ms,
        )

    def written_ms(self, offset: int) -> int:
        return NOW_MS - (self.end - offset) * 3_600_000

    def transactions(self, _: int, __: Any) -> Any:
        return Answer(error_code=NONE, transaction_states=[])


ANSWERS: Mapping[int, Any] = {
    METADATA: FakeBrokers.metadata_answer,
    DESCRIBE_CLUSTER: FakeBrokers.cluster,
    DESCRIBE_CONFIGS: FakeBrokers.configs,
    LIST_GROUPS: FakeBrokers.list_groups,
    OFFSET_FETCH: FakeBrokers.positions,
    FIND_COORDINATOR: FakeBrokers.coordinators,
    LIST_OFFSETS: FakeBrokers.offsets,
    LIST_TRANSACTIONS: FakeBrokers.transactions,
    DESCRIBE_LOG_DIRS: FakeBrokers.log_dirs,
}


def look(brokers: FakeBrokers, *groups: str) -> Any:
    return collect(brokers, groups, lambda: NOW_MS)


def test_ten_thousand_partitions_and_a_thousand_groups_are_few_requests() -> None:
    brokers = FakeBrokers(
        brokers=3, topics=1_000, partitions=10, groups={f"group-{number}": 999 for number in range(1_000)}
    )
    snapshot = look(brokers)
    assert len(snapshot.bounds) == 10_000
    assert sum(len(group.committed_offsets) for group in snapshot.groups.values()) == 10_000
    assert snapshot.gaps == []
    assert brokers.asked.total() < 60
    assert brokers.asked[DESCRIBE_PRODUCERS] == brokers.asked[DESCRIBE_TRANSACTIONS] == 0


def test_a_position_in_the_older_half_is_dated_and_one_in_the_younger_is_not() -> None:
    old, young = 1_000 - 150, 1_000 - 50
    brokers = FakeBrokers(groups={"late": old, "fine": young})
    snapshot = look(brokers)
    assert {offset for (_, offset) in snapshot.written_ms} == {old}
    exactly = brokers.written_ms(old)
    for dated in snapshot.written_ms.values():
        assert exactly - RETENTION_MS // 256 <= dated <= exactly


def test_groups_that_are_fine_cost_one_question_by_time() -> None:
    # Start, end, decided end and one time, of each of three leaders.
    brokers = FakeBrokers(groups={"fine": 990})
    look(brokers)
    assert brokers.asked[LIST_OFFSETS] == 3 * 4


def test_many_late_groups_on_one_partition_are_bounded_and_none_is_taken_for_younger() -> None:
    groups = {f"late-{number}": 840 + number for number in range(30)}
    brokers = FakeBrokers(groups=groups, partitions=1)
    snapshot = look(brokers)
    assert len(snapshot.written_ms) == 30
    assert all(dated <= brokers.written_ms(offset) for (_, offset), dated in snapshot.written_ms.items())
    assert brokers.asked[LIST_OFFSETS] < 80


@pytest.mark.parametrize(
    ("denied", "what"),
    [
        ("topic-0", "settings of topics: topic-0"),
        ("2", "settings of brokers: broker 2"),
        ("billing", "committed offsets of groups: billing"),
        ("topic-1 offsets", "offsets of partitions: topic-1-0, topic-1-1, topic-1-2"),
    ],
)
def test_a_missing_permission_is_named_and_the_rest_is_examined(denied: str, what: str) -> None:
    brokers = FakeBrokers(groups={"billing": 990, "other": 990})
    brokers.deny.add(denied)
    examination = judge(look(brokers))
    (gap,) = examination.gaps
    assert gap.kind == "permission"
    kind, names = gap.what.split(": ")
    assert (kind, sorted(names.split(", "))) == (what.split(": ")[0], sorted(what.split(": ")[1].split(", ")))
    assert "3 brokers: 2 topics, 6 partitions" in examination.examined[0]


def test_lists_that_may_leave_something_out_say_so() -> None:
    brokers = FakeBrokers()
    brokers.may_describe_cluster = False
    brokers.hidden = {"payroll"}
    gaps = look(brokers).gaps
    assert [gap.what for gap in gaps] == [
        f"{what}: those that may not be seen" for what in ("topics", "groups", "transactions")
    ]
    assert {gap.kind for gap in gaps} == {"permission"}
    assert all("DESCRIBE" in gap.why for gap in gaps)
    assert brokers.asked[DESCRIBE_LOG_DIRS] == 0


def test_topics_that_a_list_leaves_out_are_named_by_what_directories_hold() -> None:
    brokers = FakeBrokers()
    brokers.hidden = {"payroll", "audit"}
    (gap,) = look(brokers).gaps
    assert (gap.what, gap.kind) == ("topics: audit, payroll", "permission")


def test_a_group_that_may_not_be_seen_is_told_from_one_that_is_not_there() -> None:
    brokers = FakeBrokers()
    brokers.deny.add("secret")
    kinds = {gap.what: gap.kind for gap in look(brokers, "secret", "nowhere").gaps}
    assert kinds == {"groups: secret": "permission", "groups: nowhere": "unreadable"}


def test_a_group_is_not_said_to_be_absent_while_a_broker_that_may_have_it_is_gone() -> None:
    brokers = FakeBrokers()
    brokers.gone.add(2)
    (gap,) = [gap for gap in look(brokers, "nowhere").gaps if "nowhere" in gap.what]
    assert gap.kind == "connection"


@pytest.mark.parametrize("requests", range(1, 30, 4))
def test_a_cluster_that_dies_half_way_leaves_what_was_learnt(requests: int) -> None:
    brokers = FakeBrokers(groups={"late": 850})
    brokers.dies_at = requests
    examination = judge(look(brokers))
    assert {gap.kind for gap in examination.gaps} == {"connection"}
    assert examination.examined[0].endswith("in part")


def test_one_broker_that_is_gone_leaves_the_partitions_of_the_others() -> None:
    brokers = FakeBrokers()
    brokers.gone.add(2)
    snapshot = look(brokers)
    assert {partition for _, partition in snapshot.bounds} == {0, 2}
    assert all("broker 2" in gap.what and gap.kind == "connection" for gap in snapshot.gaps)


def test_a_broker_too_old_for_a_question_is_said_to_be() -> None:
    brokers = FakeBrokers()
    brokers.unsupported.add(LIST_TRANSACTIONS)
    (gap,) = look(brokers).gaps
    assert gap.kind == "unsupported"


# ---------------------------------------------------------------------- history


def test_a_look_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "looks.jsonl")
    looks = [Look(number, {"g": {("t", 0): number}}, {("t", 0): (0, 9)}, {"t": "id"}) for number in (1, 2)]
    append_looks(path, looks)
    assert read_looks(path) == (looks, [])


def test_no_history_yet_is_no_look(tmp_path: Path) -> None:
    assert read_looks(str(tmp_path / "none")) == ([], [])


@pytest.mark.parametrize(
    "line",
    ['{"time_ms": 5', "[]", '{"time_ms": "x", "groups": {}, "logs": {}}', '{"time_ms": 1}', "null", "\x00"],
)
def test_a_broken_line_is_a_gap_with_its_number_and_the_others_count(tmp_path: Path, line: str) -> None:
    path = tmp_path / "looks.jsonl"
    good = json.dumps(Look(7).as_json())
    path.write_text(f"{good}\n{line}\n{good}\n")
    looks, (gap,) = read_looks(str(path))
    assert len(looks) == 2
    assert gap.what == f"line 2 of the history {path}"


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "looks.jsonl"
    path.write_text('{"time_ms": 5')
    append_looks(str(path), [Look(7)])
    looks, gaps = read_looks(str(path))
    assert ([each.time_ms for each in looks], len(gaps)) == ([7], 1)


def test_a_history_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DoctorError, match="cannot read the history"):
        read_looks(str(tmp_path))
