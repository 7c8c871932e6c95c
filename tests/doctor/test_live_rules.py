"""The rules over a snapshot: no broker is asked here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.doctor.exporting import FAMILIES, put_transactions
from holdfast.doctor.files import Asked, examine_files
from holdfast.doctor.findings import ConfigChange, Gap, Severity
from holdfast.doctor.live import changes_of, judge
from holdfast.doctor.live_cluster_rules import cluster_findings, spell
from holdfast.doctor.live_group_rules import group_findings, transaction_findings
from holdfast.doctor.live_snapshot import (
    Bounds,
    BrokerFacts,
    GroupFacts,
    LiveTopic,
    Look,
    OpenProducer,
    PartitionFacts,
    Setting,
    Settings,
    Snapshot,
    TransactionFacts,
)
from holdfast.exposition import Sheet

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
NOW_MS = 1_000 * DAY_MS
SAFE_BROKER = {
    "auto.create.topics.enable": "false",
    "min.insync.replicas": "2",
    "default.replication.factor": "3",
}
SAFE_TOPIC = {"min.insync.replicas": "2", "cleanup.policy": "delete", "retention.ms": str(8 * DAY_MS)}
PLACE = ("orders", 0)
WHOLE = Bounds(0, 100, 100)


def settings(values: Mapping[str, str], source: int = 1) -> Settings:
    return Settings({name: Setting(value, source) for name, value in values.items()})


def topic(
    name: str = "orders",
    replicas: tuple[int, ...] = (1, 2, 3),
    in_sync: tuple[int, ...] | None = None,
    *,
    leader: int = 1,
    internal: bool = False,
    **values: str,
) -> LiveTopic:
    given = {**SAFE_TOPIC, **{key.replace("_", "."): value for key, value in values.items()}}
    partition = PartitionFacts(leader, replicas, replicas if in_sync is None else in_sync)
    return LiveTopic(name, "id-1", internal, {0: partition}, settings(given))


def snapshot(*topics: LiveTopic, brokers: int = 3, time_ms: int = NOW_MS, **values: str) -> Snapshot:
    """A cluster in order, one rack each, with these topics; `values` are settings of all its brokers."""
    given = {**SAFE_BROKER, **{key.replace("_", "."): value for key, value in values.items()}}
    return Snapshot(
        time_ms,
        {
            number: BrokerFacts(number, f"broker-{number}:9092", f"rack-{number}", settings(given, 4))
            for number in range(1, brokers + 1)
        },
        {each.name: each for each in topics},
    )


def told(findings: Any) -> list[tuple[str, str]]:
    return [(found.id, found.where) for found in findings]


# ---------------------------------------------------------------------- the cluster


def test_a_cluster_in_order_is_clean() -> None:
    offsets = topic("__consumer_offsets", internal=True, cleanup_policy="compact", delete_retention_ms="1")
    examination = judge(snapshot(topic(), offsets))
    assert examination.findings == []
    assert examination.complete
    assert examination.examined == ["a cluster of 3 brokers: 2 topics, 2 partitions, 0 groups"]


@pytest.mark.parametrize(
    ("changed", "expected", "severity", "change"),
    [
        (topic(replicas=(1,)), "HF201", Severity.ERROR, None),
        (topic(replicas=(1, 2), min_insync_replicas="1"), "HF201", Severity.WARNING, None),
        (topic(min_insync_replicas="1"), "HF202", Severity.ERROR, ("min.insync.replicas", "2")),
        (topic(min_insync_replicas="3"), "HF203", Severity.WARNING, ("min.insync.replicas", "2")),
        (
            topic(unclean_leader_election_enable="true"),
            "HF204",
            Severity.ERROR,
            ("unclean.leader.election.enable", "false"),
        ),
        (topic(holdfast_flush="os"), "HF205", Severity.WARNING, ("holdfast.flush", "group")),
        (
            topic(cleanup_policy="compact", delete_retention_ms="60000"),
            "HF210",
            Severity.WARNING,
            ("delete.retention.ms", str(DAY_MS)),
        ),
        (topic(cleanup_policy="compact,delete"), "HF210", Severity.NOTE, None),
        (
            topic("__consumer_offsets", (1, 2), internal=True, min_insync_replicas="2"),
            "HF211",
            Severity.WARNING,
            None,
        ),
        (topic("__transaction_state", (1, 2), internal=True), "HF201", Severity.WARNING, None),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_a_topic_at_risk(
    changed: LiveTopic, expected: str, severity: Severity, change: tuple[str, str] | None
) -> None:
    found = next(each for each in cluster_findings(snapshot(changed)) if each.id == expected)
    assert found.where == f"topic {changed.name}"
    assert found.severity is severity
    made = None if found.fix is None else found.fix.change
    assert made == (None if change is None else ConfigChange("topic", changed.name, *change))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"auto_create_topics_enable": "true"}, "HF207"),
        ({"unclean_leader_election_enable": "true"}, "HF204"),
        ({"offsets_retention_minutes": "60"}, "HF211"),
        ({"default_replication_factor": "1"}, "HF201"),
        ({"min_insync_replicas": "1"}, "HF202"),
        ({"holdfast_flush": "os"}, "HF205"),
    ],
)
def test_a_setting_of_all_brokers_is_told_once(setting: dict[str, Any], expected: str) -> None:
    assert told(cluster_findings(snapshot(topic(), **setting))) == [(expected, "brokers")]


def test_a_setting_of_one_broker_names_it() -> None:
    cluster = snapshot(topic())
    cluster.brokers[2] = BrokerFacts(2, "b:1", "rack-2", settings({"auto.create.topics.enable": "true"}, 4))
    assert told(cluster_findings(cluster)) == [("HF207", "broker 2")]


def test_a_topic_that_inherits_an_unclean_election_is_told_with_the_brokers() -> None:
    # HF204
    inheriting = topic()
    assert inheriting.settings is not None
    inheriting.settings["unclean.leader.election.enable"] = Setting("true", 5)
    cluster = snapshot(inheriting, unclean_leader_election_enable="true")
    assert told(cluster_findings(cluster)) == [("HF204", "brokers")]


@pytest.mark.parametrize(
    ("in_sync", "leader", "minimum", "expected", "words"),
    [
        ((1,), 1, "2", "HF203", "refuses writes with acks=all now"),
        ((), -1, "2", "HF203", "no leader"),
        ((1,), 1, "1", "HF202", "acknowledges alone now"),
        ((1, 2), 1, "2", "HF201", "out of sync now"),
    ],
    ids=["below the minimum", "offline", "the leader alone", "one away"],
)
def test_replicas_that_are_away_are_told_as_they_are_now(
    in_sync: tuple[int, ...], leader: int, minimum: str, expected: str, words: str
) -> None:
    cluster = snapshot(topic(in_sync=in_sync, leader=leader, min_insync_replicas=minimum))
    (found,) = [each for each in cluster_findings(cluster) if "now" in each.found]
    assert (found.id, words in found.found) == (expected, True)
    assert found.fix is not None
    assert "3" in found.fix.text


def test_one_broker_is_one_note_however_many_topics() -> None:
    topics = [topic(f"topic-{number}", (1,), min_insync_replicas="1") for number in range(100)]
    (found,) = cluster_findings(snapshot(*topics, brokers=1, holdfast_flush="group"))
    assert (found.id, found.severity) == ("HF201", Severity.NOTE)


def test_replicas_that_share_a_rack_are_told() -> None:
    cluster = snapshot(topic(replicas=(1, 2, 3)), brokers=4)
    for number in (1, 2, 3):
        cluster.brokers[number] = BrokerFacts(number, "b:1", "a", cluster.brokers[number].settings)
    (found,) = cluster_findings(cluster)
    assert "all replicas in one rack" in found.found


def test_brokers_without_racks_are_one_note_about_power() -> None:
    # HF205
    cluster = snapshot(topic())
    for number, broker in list(cluster.brokers.items()):
        cluster.brokers[number] = BrokerFacts(number, broker.address, None, broker.settings)
    (found,) = cluster_findings(cluster)
    assert (found.id, found.severity) == ("HF205", Severity.NOTE)


def test_what_could_not_be_read_is_a_gap_and_no_finding() -> None:
    unread = LiveTopic("orders", "id-1", False, {0: PartitionFacts(1, (1, 2, 3), (1, 2, 3))})
    cluster = snapshot(unread)
    cluster.gaps.append(Gap("settings of topics: orders", "not permitted", "permission"))
    examination = judge(cluster)
    assert examination.findings == []
    assert not examination.complete
    assert examination.examined[0].endswith("in part")


def test_the_longest_retention_proposed_is_the_one_applied_and_notes_propose_nothing() -> None:
    cluster = with_group(5, retention_ms=str(HOUR_MS), written_ms=NOW_MS - HOUR_MS // 2)
    cluster.topics["tables"] = topic("tables", cleanup_policy="compact,delete")
    assert changes_of(judge(cluster).in_order()) == [
        ConfigChange("topic", "orders", "retention.ms", str(7 * DAY_MS))
    ]


@pytest.mark.parametrize(
    ("kind", "accepted_ms", "notes"),
    [("CreateTime", 9 * DAY_MS, 1), ("CreateTime", 8 * DAY_MS, 0), ("LogAppendTime", 9 * DAY_MS, 0)],
)
def test_messages_that_are_past_retention_on_arrival_are_one_note(
    kind: str, accepted_ms: int, notes: int
) -> None:
    # HF206
    cluster = with_group(100, message_timestamp_type=kind, message_timestamp_before_max_ms=str(accepted_ms))
    found = [(each.id, each.severity) for each in cluster_findings(cluster)]
    assert found == [("HF206", Severity.NOTE)] * notes


def test_clients_are_held_against_the_topics_of_the_cluster(tmp_path: Path) -> None:
    # HF102
    file = tmp_path / "producer.properties"
    file.write_text("acks=1\n")
    clients = examine_files(Asked([str(file)])).clients
    found = [
        each for each in judge(snapshot(topic(), topic("other")), (), clients).findings if each.id == "HF102"
    ]
    assert len(found) == 1
    assert "min.insync.replicas=2 of orders" in found[0].found


# ---------------------------------------------------------------------- groups


def with_group(
    position: int,
    bounds: Bounds = WHOLE,
    *,
    written_ms: int | None = None,
    time_ms: int = NOW_MS,
    state: str = "Empty",
    **values: Any,
) -> Snapshot:
    cluster = snapshot(topic(**values), time_ms=time_ms)
    cluster.bounds[PLACE] = bounds
    cluster.groups["billing"] = GroupFacts("billing", state, "Classic", 1, {PLACE: position})
    if written_ms is not None:
        cluster.written_ms[PLACE, position] = written_ms
    return cluster


def look(time_ms: int, position: int, start: int, end: int, topic_id: str = "id-1") -> Look:
    return Look(time_ms, {"billing": {PLACE: position}}, {PLACE: (start, end)}, {"orders": topic_id})


def test_a_group_at_the_end_or_in_the_younger_half_is_clean() -> None:
    assert told(group_findings(with_group(100))) == []
    assert told(group_findings(with_group(5))) == []


def test_a_position_below_the_log_has_lost_messages() -> None:
    # HF206
    (found,) = group_findings(with_group(5, Bounds(30, 100, 100)))
    assert (found.id, found.severity) == ("HF206", Severity.ERROR)
    assert "25 removed unread" in found.found
    assert found.where == "group billing on topic orders"


def test_a_position_beyond_the_log_points_into_another_topic() -> None:
    # HF408
    (found,) = group_findings(with_group(500))
    assert (found.id, found.severity) == ("HF408", Severity.ERROR)


@pytest.mark.parametrize(
    ("age_ms", "severity", "words"),
    [
        (5 * DAY_MS, Severity.WARNING, "retention passes it in 3 d at the earliest"),
        (8 * DAY_MS - 3 * HOUR_MS - 12 * 60_000, Severity.ERROR, "retention passes it in 3 h 12 min"),
        (9 * DAY_MS, Severity.ERROR, "retention has passed the committed offset"),
    ],
)
def test_the_time_left_from_one_look(age_ms: int, severity: Severity, words: str) -> None:
    # HF206
    (found,) = group_findings(with_group(40, written_ms=NOW_MS - age_ms))
    assert (found.id, found.severity) == ("HF206", severity)
    assert words in found.found
    assert "60 behind" in found.found


def test_at_a_rate_the_time_left_grows_by_what_the_group_reads() -> None:
    # Half as fast as the log: what would be one hour if it stayed is two.
    cluster = with_group(40, written_ms=NOW_MS - 8 * DAY_MS + HOUR_MS)
    (found,) = group_findings(cluster, [look(NOW_MS - HOUR_MS, 30, 0, 80)])
    assert found.found == "at this rate retention passes group billing on orders-0 in 2 h (60 behind)"


def test_a_group_that_catches_up_is_clean() -> None:
    cluster = with_group(60, written_ms=NOW_MS - 8 * DAY_MS + HOUR_MS)
    assert told(group_findings(cluster, [look(NOW_MS - HOUR_MS, 10, 0, 90)])) == []


def test_where_size_removes_messages_the_start_of_the_log_is_the_edge() -> None:
    # 30 ahead of a start that gains 20 an hour on it.
    cluster = with_group(140, Bounds(110, 300, 300), retention_bytes="1000000", state="Stable")
    (found,) = group_findings(cluster, [look(NOW_MS - HOUR_MS, 130, 80, 200)])
    assert "the start of the log passes group billing on orders-0 in 1 h 30 min" in found.found


def test_a_position_that_stays_while_the_log_grows_is_stalled() -> None:
    looks = [look(NOW_MS - 2 * HOUR_MS, 40, 0, 80), look(NOW_MS - HOUR_MS, 40, 0, 90)]
    (found,) = group_findings(with_group(40), looks)
    assert found.id == "HF206"
    assert "has been 40 for 2 h while the log grew" in found.found


@pytest.mark.parametrize(
    "looks",
    [
        [look(NOW_MS - HOUR_MS, 40, 0, 100)],
        [look(NOW_MS - HOUR_MS, 40, 0, 40)],
        [look(NOW_MS - 5_000, 40, 0, 90)],
        [look(NOW_MS - HOUR_MS, 39, 0, 90)],
    ],
    ids=["the log stood still", "it had read everything", "too soon to say", "it moved"],
)
def test_what_is_not_stalled(looks: list[Look]) -> None:
    assert told(group_findings(with_group(40), looks)) == []


def test_one_stuck_partition_of_a_group_that_moves_looks_like_a_poison_message() -> None:
    # HF306
    cluster = with_group(40, state="Stable")
    other = ("orders", 1)
    cluster.groups["billing"] = GroupFacts("billing", "Stable", "Classic", 1, {PLACE: 40, other: 70})
    cluster.bounds[other] = Bounds(0, 70, 70)
    past = Look(NOW_MS - HOUR_MS, {"billing": {PLACE: 40, other: 50}}, {PLACE: (0, 90), other: (0, 50)}, {})
    assert told(group_findings(cluster, [past])) == [("HF306", "group billing on topic orders")]


def test_a_position_that_went_back_is_told_and_a_new_topic_is_not_taken_for_it() -> None:
    # HF307, HF408
    (back,) = group_findings(with_group(90), [look(NOW_MS - HOUR_MS, 95, 0, 100)])
    assert back.id == "HF307"
    assert "went back from 95 to 90" in back.found
    (anew,) = group_findings(with_group(90), [look(NOW_MS - HOUR_MS, 95, 0, 100, topic_id="id-0")])
    assert (anew.id, anew.where) == ("HF408", "topic orders")


def test_a_group_with_a_strange_name_gives_a_command_that_is_safe_to_paste() -> None:
    cluster = with_group(500)
    cluster.groups = {"x": GroupFacts("a b;\nrm -r c", "Empty", "Classic", 1, {PLACE: 500})}
    (found,) = group_findings(cluster)
    assert found.fix is not None
    assert "--group 'a b;\\nrm -r c' --topic orders" in found.fix.text
    assert "\n" not in found.where + found.found + found.fix.text


def test_many_partitions_of_a_group_and_topic_are_one_finding_about_the_worst() -> None:
    cluster = snapshot(topic())
    positions = {("orders", number): number for number in range(20)}
    cluster.groups["billing"] = GroupFacts("billing", "Empty", "Classic", 1, positions)
    cluster.bounds.update({place: Bounds(50, 100, 100) for place in positions})
    (found,) = group_findings(cluster)
    assert found.found.startswith("orders-0: ")
    assert found.found.endswith("likewise partitions 1, 2, 3, 4, 5 and 14 more")


# ---------------------------------------------------------------------- transactions


def holding(
    start_ms: int | None, *, known: bool = True, silent_ms: int = HOUR_MS, timeout_ms: int = 60_000
) -> Snapshot:
    cluster = snapshot(topic())
    transaction = TransactionFacts("billing-1", 7, "Ongoing", timeout_ms, start_ms, (PLACE,))
    cluster.transactions = [transaction] if known else []
    cluster.open_producers = [OpenProducer(PLACE, 7, 12, NOW_MS - silent_ms)]
    return cluster


def test_a_transaction_within_its_time_is_at_work() -> None:
    assert told(transaction_findings(holding(NOW_MS - 30_000))) == []


def test_a_transaction_past_its_time_names_its_producer() -> None:
    # HF411
    (found,) = transaction_findings(holding(NOW_MS - 2 * HOUR_MS))
    assert (found.id, found.where) == ("HF411", "transactional id billing-1")
    assert "producer 7 has had its transaction open for 2 h" in found.found


def test_a_transaction_that_no_coordinator_knows_hangs() -> None:
    # HF411
    (found,) = transaction_findings(holding(None, known=False))
    assert "no coordinator will end it; retention passes it in 7 d 23 h at most" in found.found
    assert found.fix is not None
    assert found.fix.text == "holdfast transactions abort --topic orders --partition 0 --start-offset 12"
    sheet = Sheet(FAMILIES)
    put_transactions(sheet, holding(None, known=False))
    assert sheet.lines("holdfast_hanging_transactions") == [
        'holdfast_hanging_transactions{topic="orders",partition="0"} 1'
    ]


def test_nothing_hangs_while_it_may_be_at_work_or_when_coordinators_could_not_be_asked() -> None:
    assert told(transaction_findings(holding(None, known=False, silent_ms=60_000))) == []
    cluster = holding(None, known=False)
    cluster.transactions = None
    assert told(transaction_findings(cluster)) == []
    cluster = holding(None, known=False)
    cluster.gaps.append(Gap("transactions: broker 2", "gone", "connection"))
    assert told(transaction_findings(cluster)) == []


def test_a_transaction_may_not_outlast_what_it_writes() -> None:
    (found,) = transaction_findings(holding(NOW_MS - 1000, timeout_ms=9 * DAY_MS))
    assert "longer than a topic it writes to keeps messages (8 d)" in found.found


@pytest.mark.parametrize(
    ("duration_ms", "words"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (61_000, "1 min 1 s"),
        (3 * HOUR_MS + 12 * 60_000, "3 h 12 min"),
        (DAY_MS, "1 d"),
    ],
)
def test_durations_are_told_in_two_units(duration_ms: int, words: str) -> None:
    assert spell(duration_ms) == words


# ---------------------------------------------------------------------- partitions that were added


def grown(state: str, *, known: int = 2, written: int = 5) -> Snapshot:
    """`orders` with three partitions, of which the group `billing` has positions in the first."""
    whole = topic()
    look = snapshot(replace(whole, partitions=dict.fromkeys(range(3), whole.partitions[0])))
    look.bounds.update({("orders", number): Bounds(0, 5, 5) for number in range(2)})
    look.bounds["orders", 2] = Bounds(0, written, written)
    positions = {("orders", number): 5 for number in range(known)}
    look.groups["billing"] = GroupFacts("billing", state, "classic", 1, positions)
    return look


@pytest.mark.parametrize(
    ("state", "severity"), [("Stable", Severity.WARNING), ("Empty", Severity.NOTE)], ids=["members", "none"]
)
def test_a_partition_behind_all_that_a_group_knows_is_new_to_it(state: str, severity: Severity) -> None:
    # HF304
    (found,) = judge(grown(state)).findings
    assert (found.id, found.where, found.severity) == ("HF304", "group billing on topic orders", severity)
    assert "orders-2: 5 written" in found.found


def test_a_group_that_knows_every_partition_or_an_empty_new_one_is_in_order() -> None:
    assert judge(grown("Stable", known=3)).findings == []
    assert judge(grown("Stable", written=0)).findings == []


def test_a_group_without_any_position_in_a_topic_is_not_told_of_new_partitions() -> None:
    assert judge(grown("Stable", known=0)).findings == []


@pytest.mark.parametrize(("reset", "count"), [("earliest", 0), ("latest", 1)])
def test_consumers_that_begin_at_the_earliest_find_everything_in_new_partitions(
    tmp_path: Path, reset: str, count: int
) -> None:
    # HF304
    file = tmp_path / "consumer.properties"
    file.write_text(f"group.id=billing\nauto.offset.reset={reset}\n")
    examination = judge(grown("Stable"), clients=examine_files(Asked((), [str(file)])).clients)
    assert len([found for found in examination.findings if found.id == "HF304"]) == count
