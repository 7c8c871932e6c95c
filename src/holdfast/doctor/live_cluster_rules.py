"""What brokers and topics can lose by themselves: replicas, elections, retention, limits, defaults.

Rules over a snapshot; nothing is asked here. A cluster of one broker cannot be replicated whatever its topics say, so
that is one note about the cluster and no word about each topic. Partitions of a topic with the same trouble are one
finding that counts them. Brokers list those of them that are up: one that only replicas name is away, and counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from holdfast.doctor.findings import ConfigChange, Finding, Fix, Location, Severity, finding
from holdfast.doctor.live_snapshot import (
    BrokerFacts,
    GroupFacts,
    LiveTopic,
    PartitionFacts,
    Settings,
    Snapshot,
    plain,
    quoted,
)

CLUSTER: Final = Location(resource="cluster")
OFFSETS_TOPIC: Final = "__consumer_offsets"
REPLICAS_WANTED: Final = 3
DAY_MS: Final = 86_400_000
WEEK_MINUTES: Final = 7 * 24 * 60
SHOWN_MAX: Final = 5
"""How many partitions, topics or brokers a finding names."""


def cluster_findings(snapshot: Snapshot) -> Iterator[Finding]:
    yield from _single_broker(snapshot)
    yield from _broker_defaults(snapshot)
    yield from _page_cache(snapshot)
    size = cluster_size(snapshot)
    readers = readers_of(snapshot.groups)
    yield from _old_on_arrival(snapshot, readers)
    for topic in sorted(snapshot.topics.values(), key=lambda each: each.name):
        yield from _health(topic)
        if size > 1:
            yield from _replicas(topic, snapshot, size)
            yield from _minimum(topic)
        yield from _election(topic, snapshot, size)
        if not topic.is_internal:
            yield from _short_retention(topic, readers.get(topic.name, []))
            yield from _compaction(topic)
            yield from _sizes(topic, snapshot)


# ---------------------------------------------------------------------- words


def shown(names: Sequence[object]) -> str:
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return ", ".join(plain(str(each)) for each in names[:SHOWN_MAX]) + more


def alter_topic(topic: str, setting: str, value: str) -> Fix:
    given = f"[{value}]" if "," in value else value
    return Fix(
        f"holdfast configs alter --topic {quoted(topic)} --add-config {setting}={given}",
        "command",
        ConfigChange("topic", topic, setting, value),
    )


def alter_brokers(setting: str, value: str) -> Fix:
    return Fix(
        f"holdfast configs alter --broker-defaults --add-config {setting}={value}",
        "command",
        ConfigChange("broker", "", setting, value),
    )


def _brokers_where(snapshot: Snapshot, test: Callable[[BrokerFacts], bool]) -> list[BrokerFacts]:
    return [each for _, each in sorted(snapshot.brokers.items()) if each.settings is not None and test(each)]


def _place_of(brokers: Sequence[BrokerFacts], snapshot: Snapshot) -> Location:
    if len(brokers) == len(snapshot.brokers):
        return Location(resource="brokers")
    return Location(resource=f"broker {shown([each.broker_id for each in brokers])}")


# ---------------------------------------------------------------------- the cluster and its brokers


def cluster_size(snapshot: Snapshot) -> int:
    """How many brokers there are, with those that are away."""
    with_replicas = {
        broker
        for topic in snapshot.topics.values()
        for partition in topic.partitions.values()
        for broker in partition.replicas
    }
    return len(with_replicas | set(snapshot.brokers))


def _single_broker(snapshot: Snapshot) -> Iterator[Finding]:
    if cluster_size(snapshot) == 1:
        yield finding(
            "HF201",
            CLUSTER,
            "the cluster has one broker: no topic can have a second replica",
            severity=Severity.NOTE,
            loses="every message with the broker's disk",
            fix=Fix("three brokers and a replication factor of 3, or backups of the broker's disk"),
        )


def _broker_defaults(snapshot: Snapshot) -> Iterator[Finding]:
    creating = _brokers_where(snapshot, lambda each: _flag(each, "auto.create.topics.enable") is True)
    if creating:
        yield finding(
            "HF207",
            _place_of(creating, snapshot),
            "auto.create.topics.enable=true: a mistyped name becomes a topic with the defaults of the brokers",
            fix=Fix("auto.create.topics.enable=false", "settings"),
        )
    unclean = _brokers_where(snapshot, lambda each: _flag(each, "unclean.leader.election.enable") is True)
    if unclean:
        yield finding(
            "HF204",
            _place_of(unclean, snapshot),
            "unclean.leader.election.enable=true for every topic that does not say otherwise",
            fix=alter_brokers("unclean.leader.election.enable", "false"),
        )
    expiring = _brokers_where(
        snapshot,
        lambda each: 0 <= (_number(each, "offsets.retention.minutes") or WEEK_MINUTES) < WEEK_MINUTES,
    )
    if expiring:
        minutes = _number(expiring[0], "offsets.retention.minutes")
        yield finding(
            "HF211",
            _place_of(expiring, snapshot),
            f"offsets.retention.minutes={minutes}: committed offsets of a group that pauses longer are removed",
            fix=Fix(f"offsets.retention.minutes={WEEK_MINUTES}", "settings"),
            related=("HF305",),
        )
    if cluster_size(snapshot) >= REPLICAS_WANTED:
        yield from _new_topics(snapshot)


def _new_topics(snapshot: Snapshot) -> Iterator[Finding]:
    """What a topic gets that is created without saying."""
    few = _brokers_where(
        snapshot,
        lambda each: (_number(each, "default.replication.factor") or REPLICAS_WANTED) < REPLICAS_WANTED,
    )
    if few:
        factor = _number(few[0], "default.replication.factor")
        yield finding(
            "HF201",
            _place_of(few, snapshot),
            f"default.replication.factor={factor}: topics created without a factor have too few replicas",
            fix=Fix(f"default.replication.factor={REPLICAS_WANTED}", "settings"),
            related=("HF207",),
        )
    alone = _brokers_where(snapshot, lambda each: _number(each, "min.insync.replicas") == 1)
    if alone:
        yield finding(
            "HF202",
            _place_of(alone, snapshot),
            "min.insync.replicas=1 is what a new topic gets",
            severity=Severity.WARNING,
            fix=alter_brokers("min.insync.replicas", "2"),
        )


def _page_cache(snapshot: Snapshot) -> Iterator[Finding]:
    """Our brokers flush before they answer unless told otherwise; Apache Kafka's rely on replicas elsewhere."""
    ours = _brokers_where(snapshot, lambda each: "holdfast.flush" in (each.settings or {}))
    lazy = [each for each in ours if each.settings and each.settings.text("holdfast.flush") == "os"]
    if lazy:
        yield finding(
            "HF205",
            _place_of(lazy, snapshot),
            "holdfast.flush=os: messages are acknowledged before they are on the disk",
            severity=Severity.WARNING,
            fix=Fix("holdfast.flush=group", "settings"),
        )
    for topic in snapshot.topics.values():
        own = (topic.settings or Settings()).get("holdfast.flush")
        if own is not None and own.is_own and own.value == "os":
            yield finding(
                "HF205",
                topic.spot,
                "holdfast.flush=os: messages are acknowledged before they are on the disk",
                severity=Severity.WARNING,
                fix=alter_topic(topic.name, "holdfast.flush", "group"),
            )
    known = _brokers_where(snapshot, lambda each: True)
    racks = {each.rack for each in snapshot.brokers.values()}
    if not known or ours or (len(racks) > 1 and None not in racks):
        return
    where = (
        "no rack is named" if racks == {None} else "not every broker names a rack" if None in racks else ""
    )
    yield finding(
        "HF205",
        CLUSTER,
        "brokers acknowledge from the page cache, and "
        + (where or f"all are in rack {next(iter(racks))}")
        + ": whether they share their power cannot be seen",
        fix=Fix("broker.rack on every broker, one for each supply of power", "settings"),
    )


# ---------------------------------------------------------------------- replicas


def _health(topic: LiveTopic) -> Iterator[Finding]:
    """What is wrong now, whatever the settings say."""
    minimum = (topic.settings.number("min.insync.replicas") if topic.settings else None) or 1
    offline, below, alone, lagging = [], [], [], []
    for number, each in sorted(topic.partitions.items()):
        if each.leader < 0:
            offline.append(number)
        elif len(each.in_sync) < min(minimum, len(each.replicas)):
            below.append(number)
        elif len(each.in_sync) == 1 < len(each.replicas):
            alone.append(number)
        elif len(each.in_sync) < len(each.replicas):
            lagging.append(number)
    if offline:
        yield finding(
            "HF203",
            topic.spot,
            f"no leader: {_numbered(offline)} can be neither written nor read now",
            severity=Severity.ERROR,
            loses="what producers drop until a replica returns; an unclean election now would lose what it lacks",
            fix=Fix(
                f"bring back a broker with an in-sync replica, the last leader say: {_away(topic, offline)}"
            ),
            related=("HF204",),
        )
    if below:
        yield finding(
            "HF203",
            topic.spot,
            f"fewer in sync than min.insync.replicas={minimum}: {_numbered(below)} refuses writes with acks=all now",
            severity=Severity.ERROR,
            fix=Fix(f"bring back {_away(topic, below)}"),
        )
    if alone:
        yield finding(
            "HF202",
            topic.spot,
            f"the leader is alone in sync and acknowledges alone now: {_numbered(alone)}",
            fix=Fix(f"bring back {_away(topic, alone)}"),
            related=("HF209",),
        )
    if lagging:
        yield finding(
            "HF201",
            topic.spot,
            f"replicas out of sync now: {_numbered(lagging)}",
            fix=Fix(f"bring back {_away(topic, lagging)}"),
        )


def _numbered(numbers: Sequence[int]) -> str:
    return f"partition{'s' if len(numbers) > 1 else ''} {shown(numbers)}"


def _away(topic: LiveTopic, numbers: Sequence[int]) -> str:
    """Who is missing; of a partition without a leader, who may lead it."""
    away: set[int] = set()
    for number in numbers:
        partition: PartitionFacts = topic.partitions[number]
        if partition.leader >= 0:
            away |= set(partition.replicas) - set(partition.in_sync)
        else:
            away |= set(partition.in_sync or partition.may_lead or partition.replicas)
    return f"broker{'s' if len(away) > 1 else ''} {shown(sorted(away))}"


def _replicas(topic: LiveTopic, snapshot: Snapshot, size: int) -> Iterator[Finding]:
    factor = topic.replication_factor
    is_offsets = topic.name == OFFSETS_TOPIC
    wanted = min(REPLICAS_WANTED, size)
    if 0 < factor < wanted:
        yield finding(
            "HF211" if is_offsets else "HF201",
            topic.spot,
            f"replication factor {factor}"
            + (": every group's committed offsets are stored so" if is_offsets else ""),
            severity=Severity.ERROR if factor == 1 else Severity.WARNING,
            fix=Fix(
                f"reassign the partitions of {topic.name} to {wanted} replicas each (kafka-reassign-partitions)"
            ),
            related=("HF201",) if is_offsets else (),
        )
    racks = {each.broker_id: each.rack for each in snapshot.brokers.values()}
    if len(set(racks.values())) < 2 or None in racks.values() or factor < 2:
        return
    together = [
        number
        for number, each in sorted(topic.partitions.items())
        if len({racks.get(broker, str(broker)) for broker in each.replicas}) == 1
    ]
    if together:
        yield finding(
            "HF201",
            topic.spot,
            f"all replicas in one rack, though the cluster has {len(set(racks.values()))}: {_numbered(together)}",
            loses="the partition with its rack",
            fix=Fix(f"reassign the partitions of {topic.name} across racks (kafka-reassign-partitions)"),
            related=("HF205",),
        )


def _minimum(topic: LiveTopic) -> Iterator[Finding]:
    minimum = topic.settings.number("min.insync.replicas") if topic.settings else None
    factor = topic.replication_factor
    if minimum is None or factor < 2:
        return
    if minimum == 1:
        # With two replicas a minimum of two stops all writes when one is down: the factor must grow first.
        grow = Fix(f"a third replica for {topic.name} first, then min.insync.replicas=2")
        yield finding(
            "HF202",
            topic.spot,
            f"min.insync.replicas=1 with {factor} replicas: acks=all may mean the leader alone",
            severity=Severity.WARNING if topic.is_internal else None,
            fix=alter_topic(topic.name, "min.insync.replicas", "2") if factor > 2 else grow,
            related=("HF102", "HF209"),
        )
    elif minimum >= factor:
        lower = alter_topic(topic.name, "min.insync.replicas", str(factor - 1))
        grow = Fix(f"a third replica for {topic.name}: with two, either choice is a risk")
        yield finding(
            "HF203",
            topic.spot,
            f"min.insync.replicas={minimum} with {factor} replicas: one broker down stops its writes",
            fix=lower if factor > 2 else grow,
        )


def _election(topic: LiveTopic, snapshot: Snapshot, size: int) -> Iterator[Finding]:
    setting = (topic.settings or Settings()).get("unclean.leader.election.enable")
    if setting is None or setting.value.lower() != "true":
        return
    if not setting.is_own and any(
        _flag(each, "unclean.leader.election.enable") for each in snapshot.brokers.values()
    ):
        return  # said once, of the brokers
    yield finding(
        "HF204",
        topic.spot,
        "unclean.leader.election.enable=true",
        severity=Severity.NOTE if size == 1 else None,
        fix=alter_topic(topic.name, "unclean.leader.election.enable", "false"),
    )


# ---------------------------------------------------------------------- what removes messages


def _short_retention(topic: LiveTopic, readers: Sequence[str]) -> Iterator[Finding]:
    retention = topic.retention_ms
    if retention is None or retention >= DAY_MS:
        return
    if readers:
        yield finding(
            "HF206",
            topic.spot,
            f"retention.ms={retention} ({spell(retention)}): an outage of {shown(readers)} for a night loses messages",
            severity=Severity.WARNING,
            fix=alter_topic(topic.name, "retention.ms", str(7 * DAY_MS)),
        )


def _old_on_arrival(snapshot: Snapshot, readers: Mapping[str, object]) -> Iterator[Finding]:
    """Retention goes by the producers' clocks, unless told otherwise: a backfill may be past it when it arrives."""
    topics = []
    for topic in snapshot.topics.values():
        settings, retention = topic.settings, topic.retention_ms
        if settings is None or retention is None or topic.is_internal or topic.name not in readers:
            continue
        accepted = settings.number("message.timestamp.before.max.ms")
        if settings.text("message.timestamp.type") == "CreateTime" and (accepted or 0) > retention:
            topics.append(topic.name)
    if topics:
        yield finding(
            "HF206",
            CLUSTER,
            f"{len(topics)} topic{'s' if len(topics) > 1 else ''} with readers may get messages that are past "
            f"retention by their producer's clock: {shown(sorted(topics))}",
            severity=Severity.NOTE,
            loses="messages sent with an old time, such as a backfill: retention may remove them at once",
            fix=Fix(
                "message.timestamp.before.max.ms not above retention.ms, or message.timestamp.type=LogAppendTime"
            ),
        )


def _compaction(topic: LiveTopic) -> Iterator[Finding]:
    settings = topic.settings
    if settings is None or "compact" not in (settings.text("cleanup.policy") or ""):
        return
    kept = settings.number("delete.retention.ms")
    if kept is not None and kept < DAY_MS:
        yield finding(
            "HF210",
            topic.spot,
            f"delete.retention.ms={kept} ({spell(kept)}): a reader that is later never sees that a key was deleted",
            fix=alter_topic(topic.name, "delete.retention.ms", str(DAY_MS)),
        )
    if topic.deletes and topic.retention_ms is not None:
        yield finding(
            "HF210",
            topic.spot,
            f"compacted and deleted: even the last value of a key goes after {spell(topic.retention_ms)}",
            severity=Severity.NOTE,
            loses="the last value of every key that is not written again within retention.ms",
            fix=Fix(f"cleanup.policy=compact on {topic.name}, if the last value of a key must stay"),
            related=("HF206",),
        )


def _sizes(topic: LiveTopic, snapshot: Snapshot) -> Iterator[Finding]:
    limit = topic.settings.number("max.message.bytes") if topic.settings else None
    fetched = [_number(each, "replica.fetch.max.bytes") for each in snapshot.brokers.values()]
    smallest = min((each for each in fetched if each is not None), default=None)
    if limit is None or smallest is None or len(snapshot.brokers) < 2:
        return
    # The defaults differ by the twelve bytes in front of a batch; that is nobody's mistake.
    if limit > smallest + 12:
        yield finding(
            "HF208",
            topic.spot,
            f"max.message.bytes={limit} is more than replica.fetch.max.bytes={smallest} of the brokers",
            severity=Severity.NOTE,
            loses="nothing with today's brokers: large batches are copied one at a time",
            fix=Fix(f"replica.fetch.max.bytes={limit}", "settings"),
        )


def readers_of(groups: Mapping[str, GroupFacts]) -> dict[str, list[str]]:
    """The groups with committed offsets in a topic, by topic."""
    readers: defaultdict[str, list[str]] = defaultdict(list)
    for name, group in sorted(groups.items()):
        for topic in dict.fromkeys(topic for topic, _ in group.committed_offsets):
            readers[topic].append(name)
    return readers


def _flag(broker: BrokerFacts, name: str) -> bool | None:
    return None if broker.settings is None else broker.settings.flag(name)


def _number(broker: BrokerFacts, name: str) -> int | None:
    return None if broker.settings is None else broker.settings.number(name)


UNITS: Final = (("d", DAY_MS), ("h", 3_600_000), ("min", 60_000), ("s", 1_000))


def spell(duration_ms: float) -> str:
    """A duration in its two largest units: 3 h 12 min."""
    left = max(0, int(duration_ms))
    for index, (unit, size) in enumerate(UNITS):
        if left >= size:
            words = f"{left // size} {unit}"
            if index + 1 < len(UNITS):
                smaller, smaller_size = UNITS[index + 1]
                if rest := left % size // smaller_size:
                    words += f" {rest} {smaller}"
            return words
    return f"{left} ms"
