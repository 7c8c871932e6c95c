"""`holdfast exporter`: any cluster's topics, groups and transactions for Prometheus, with kafka_exporter's names.

Every so often the exporter looks at the cluster as the doctor does, and what it found is what a scrape shows until the
next look. When nobody answers, nothing is shown but that: `holdfast_exporter_up` 0. What could not be asked, for want
of a permission say, is counted in `holdfast_exporter_gaps` and logged.

What kafka_exporter does not tell: how long until a group loses a message that it has not read, judged by retention and
by the rates of earlier looks; for how long a group has had no member; committed offsets outside the log; transactions
that are open, late, or that nobody will end.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

from holdfast.admin.errors import ClusterError, Unreachable
from holdfast.doctor.live_ask import Asker, Cluster, chunks
from holdfast.doctor.live_collect import GROUPS_PER_REQUEST, collect
from holdfast.doctor.live_group_rules import hanging_producers, time_to_loss_ms
from holdfast.doctor.live_snapshot import Look, Snapshot
from holdfast.exposition import KAFKA_EXPORTER, Families, Family, Sheet, label_text, table
from holdfast.wire.api_keys import CONSUMER_GROUP_DESCRIBE, DESCRIBE_GROUPS

_LOG: Final = logging.getLogger(__name__)
LOOKS_KEPT: Final = 10
"""For the rates of groups."""
PARTITIONS_MAX: Final = 20_000
COMMITTED_MAX: Final = 50_000
"""What is shown at most; `holdfast_metrics_left_out` counts the rest."""

_GROUP: Final = ("consumergroup",)
_GROUP_TOPIC: Final = ("consumergroup", "topic")
FAMILIES: Final[Families] = table(
    *KAFKA_EXPORTER.values(),
    Family(
        "holdfast_consumergroup_seconds_to_loss",
        "gauge",
        "Until the group's first unread message is removed, at the earliest; half of retention while more is left.",
        _GROUP_TOPIC,
    ),
    Family(
        "holdfast_consumergroup_without_member_seconds",
        "gauge",
        "For how long the exporter has seen the group without a member; 0 while it has one.",
        _GROUP,
    ),
    Family(
        "holdfast_consumergroup_outside_log_offsets",
        "gauge",
        "Offsets between a committed one and the log; where: before its start, or behind its end.",
        (*_GROUP_TOPIC, "partition", "where"),
    ),
    Family("holdfast_open_transactions", "gauge", "Transactions that are open."),
    Family(
        "holdfast_open_transaction_oldest_seconds",
        "gauge",
        "How long the oldest of them has been open.",
    ),
    Family("holdfast_late_transactions", "gauge", "Transactions that are open past their time-out."),
    Family(
        "holdfast_hanging_transactions",
        "gauge",
        "Transactions that a partition has open and no coordinator will end.",
        ("topic", "partition"),
    ),
    Family(
        "holdfast_partition_last_stable_offset",
        "gauge",
        "Where read_committed ends: at the first open transaction.",
        ("topic", "partition"),
    ),
    Family("holdfast_exporter_up", "gauge", "1: the cluster answered the last look."),
    Family("holdfast_exporter_gaps", "gauge", "Kinds of things that the last look could not ask."),
    Family("holdfast_exporter_look_seconds", "gauge", "How long the last look took."),
    Family("holdfast_exporter_last_look_timestamp_seconds", "gauge", "When the last look began."),
    Family("holdfast_metrics_left_out", "gauge", "What was not shown for want of room.", ("what",)),
)


class Exporter:
    """Looks at one cluster; `text` is what a scrape gets, from any thread."""

    def __init__(self, settings: Mapping[str, str], wall_s: Callable[[], float] = time.time) -> None:
        """`settings` are a client's, with bootstrap.servers."""
        self._settings = {"client.id": "holdfast-exporter", **settings}
        self._wall_s = wall_s
        self._looks: list[Look] = []
        self._empty_since_s: dict[str, float] = {}
        """Groups without a member, and when that was first seen."""
        self._text = ""
        self._gaps: set[str] = set()

    def text(self) -> str:
        return self._text

    def look(self) -> None:
        began_s = self._wall_s()
        sheet = Sheet(FAMILIES)
        try:
            with Cluster(self._settings) as cluster:
                snapshot = collect(cluster, (), lambda: round(began_s * 1000))
                members = _members(cluster, snapshot)
        except Unreachable as error:
            _LOG.warning("nobody answers: %s", error)
            sheet.put("holdfast_exporter_up", 0)
        else:
            self._tell_gaps(snapshot)
            _put_topics(sheet, snapshot)
            self._put_groups(sheet, snapshot, members, began_s)
            put_transactions(sheet, snapshot)
            sheet.put("holdfast_exporter_up", 1)
            sheet.put("holdfast_exporter_gaps", len(snapshot.gaps))
            self._looks = [*self._looks[1 - LOOKS_KEPT :], snapshot.look()]
        sheet.put("holdfast_exporter_look_seconds", self._wall_s() - began_s)
        sheet.put("holdfast_exporter_last_look_timestamp_seconds", round(began_s, 3))
        self._text = "".join(sheet.pieces())

    def _tell_gaps(self, snapshot: Snapshot) -> None:
        gaps = {f"{gap.what}: {gap.why}" for gap in snapshot.gaps}
        for gap in sorted(gaps - self._gaps):
            _LOG.warning("not seen: %s", gap)
        self._gaps = gaps

    def _put_groups(self, sheet: Sheet, snapshot: Snapshot, members: Mapping[str, int], now_s: float) -> None:
        self._empty_since_s = {
            name: self._empty_since_s.get(name, now_s)
            for name, group in snapshot.groups.items()
            if not members.get(name, group.has_members)
        }
        shown = left_out = 0
        for name, group in sorted(snapshot.groups.items()):
            if name in members:
                sheet.put("kafka_consumergroup_members", members[name], consumergroup=name)
            empty_s = now_s - self._empty_since_s.get(name, now_s)
            sheet.put("holdfast_consumergroup_without_member_seconds", empty_s, consumergroup=name)
            sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
            for (topic, partition), position in group.committed_offsets.items():
                bounds = snapshot.bounds.get((topic, partition))
                if bounds is None:
                    continue
                lag = max(0, bounds.end - position)
                sums[topic][0] += position
                sums[topic][1] += lag
                if shown >= COMMITTED_MAX:
                    left_out += 1
                    continue
                shown += 1
                labels = {"consumergroup": name, "topic": topic, "partition": str(partition)}
                sheet.put("kafka_consumergroup_current_offset", position, **labels)
                sheet.put("kafka_consumergroup_lag", lag, **labels)
                outside = max(bounds.start - position, position - bounds.end)
                if outside > 0:
                    where = "before" if position < bounds.start else "behind"
                    sheet.put("holdfast_consumergroup_outside_log_offsets", outside, **labels, where=where)
            for topic, (offsets, lag) in sums.items():
                of_topic = {"consumergroup": name, "topic": topic}
                sheet.put("kafka_consumergroup_current_offset_sum", offsets, **of_topic)
                sheet.put("kafka_consumergroup_lag_sum", lag, **of_topic)
            self._put_time_to_loss(sheet, snapshot, name)
        sheet.put("holdfast_metrics_left_out", left_out, what="committed offsets")

    def _put_time_to_loss(self, sheet: Sheet, snapshot: Snapshot, name: str) -> None:
        group = snapshot.groups[name]
        left_ms: dict[str, float] = {}
        for (topic, partition), position in group.committed_offsets.items():
            bounds, live = snapshot.bounds.get((topic, partition)), snapshot.topics.get(topic)
            retention_ms = None if live is None else live.retention_ms
            if bounds is None or retention_ms is None or not bounds.start <= position < bounds.end:
                continue
            if ((topic, partition), position) not in snapshot.written_ms:
                left_ms[topic] = min(left_ms.get(topic, retention_ms), retention_ms / 2)
        for (topic, _), ms in time_to_loss_ms(group, snapshot, self._looks):
            left_ms[topic] = min(left_ms.get(topic, ms), ms)
        for topic, ms in left_ms.items():
            of_topic = {"consumergroup": name, "topic": topic}
            sheet.put("holdfast_consumergroup_seconds_to_loss", ms / 1000, **of_topic)


def _put_topics(sheet: Sheet, snapshot: Snapshot) -> None:
    sheet.put("kafka_brokers", len(snapshot.brokers))
    for broker in snapshot.brokers.values():
        sheet.put("kafka_broker_info", 1, id=str(broker.broker_id), address=broker.address)
    places = [(topic, number) for topic in snapshot.topics.values() for number in sorted(topic.partitions)]
    for topic in snapshot.topics.values():
        sheet.put("kafka_topic_partitions", len(topic.partitions), topic=topic.name)
    for topic, number in islice(places, PARTITIONS_MAX):
        facts, bounds = topic.partitions[number], snapshot.bounds.get((topic.name, number))
        labels = label_text((("topic", topic.name), ("partition", str(number))))
        values = {
            "kafka_topic_partition_leader": facts.leader,
            "kafka_topic_partition_leader_is_preferred": int(facts.replicas[:1] == (facts.leader,)),
            "kafka_topic_partition_replicas": len(facts.replicas),
            "kafka_topic_partition_in_sync_replica": len(facts.in_sync),
            "kafka_topic_partition_under_replicated_partition": int(len(facts.in_sync) < len(facts.replicas)),
        }
        if bounds is not None:
            values |= {
                "kafka_topic_partition_current_offset": bounds.end,
                "kafka_topic_partition_oldest_offset": bounds.start,
                "holdfast_partition_last_stable_offset": bounds.stable,
            }
        for name, value in values.items():
            sheet.lines(name).append(f"{name}{labels} {value}")
    sheet.put("holdfast_metrics_left_out", max(0, len(places) - PARTITIONS_MAX), what="partitions")


def put_transactions(sheet: Sheet, snapshot: Snapshot) -> None:
    if snapshot.transactions is None:
        return  # nobody could be asked
    open_ms = [
        (snapshot.time_ms - each.start_ms, each.timeout_ms)
        for each in snapshot.transactions
        if each.start_ms is not None
    ]
    sheet.put("holdfast_open_transactions", len(snapshot.transactions))
    oldest_ms = max((ms for ms, _ in open_ms), default=0)
    sheet.put("holdfast_open_transaction_oldest_seconds", max(0, oldest_ms) / 1000)
    sheet.put("holdfast_late_transactions", sum(ms > timeout_ms for ms, timeout_ms in open_ms))
    hanging: defaultdict[tuple[str, int], int] = defaultdict(int)
    for producer in hanging_producers(snapshot):
        hanging[producer.place] += 1
    for (topic, partition), count in hanging.items():
        sheet.put("holdfast_hanging_transactions", count, topic=topic, partition=str(partition))


def _members(asker: Asker, snapshot: Snapshot) -> dict[str, int]:
    """How many members each group has; a group whose coordinator does not say is left out."""
    found: dict[str, int] = {}
    by_coordinator: defaultdict[tuple[int, bool], list[str]] = defaultdict(list)
    for name, group in snapshot.groups.items():
        by_coordinator[group.coordinator, group.type.lower() == "consumer"].append(name)
    for (broker_id, is_consumer), names in by_coordinator.items():
        for some in chunks(names, GROUPS_PER_REQUEST):
            fields = {"include_authorized_operations": False, "groups": some, "group_ids": some}
            api_key = CONSUMER_GROUP_DESCRIBE if is_consumer else DESCRIBE_GROUPS
            try:
                answer = asker.ask_broker(broker_id, api_key, fields)
            except ClusterError as error:
                _LOG.warning("the members of %d groups are not known: %s", len(some), error)
                continue
            found |= {each.group_id: len(each.members) for each in answer.groups if not each.error_code}
    return found
