"""Asks a cluster everything the live rules want to know, in as few requests as will do.

The rules kept here:

- One question about many things: every topic's metadata at once, settings of hundreds of topics, offsets of thousands
  of partitions, committed offsets of a hundred groups. The number of requests grows with the brokers, hardly with the
  partitions. A group's and a transaction's coordinator is the broker that lists it, so nobody is asked who that is.
- A refusal or a broker that is gone is a gap, told once for each kind of thing with its names; the rest goes on.
- How old a committed offset is, is found out by asking for the offset of a time: once for every partition with a group
  behind. Only committed offsets in the older half of what retention keeps are dated closer, by halving.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.admin.errors import ClusterError, UnsupportedBroker
from holdfast.doctor.findings import Gap, GapKind
from holdfast.doctor.live_ask import (
    DENIED,
    RESOURCE_TYPES,
    UNSEEN,
    WITHOUT_DESCRIBE,
    Asker,
    chunks,
    described,
    hidden_topics,
    may_describe,
)
from holdfast.doctor.live_snapshot import (
    Bounds,
    BrokerFacts,
    GroupFacts,
    LiveTopic,
    OpenProducer,
    PartitionFacts,
    Place,
    Setting,
    Settings,
    Snapshot,
    TransactionFacts,
    named,
    plain,
)
from holdfast.wire import api_keys, error_table

EARLIEST: Final = -2
LATEST: Final = -1
NOWHERE: Final = -1
"""What a broker answers when no message is so late."""

PARTITIONS_PER_REQUEST: Final = 2_000
TOPICS_PER_REQUEST: Final = 500
GROUPS_PER_REQUEST: Final = 100
"""Answers of some hundred kilobytes: a broker is not held up for long by any of them."""
PRODUCERS_PER_REQUEST: Final = 500
HALVINGS: Final = 7
"""A committed offset in danger is dated to within a 256th of its retention."""
LAYERS_MAX: Final = 8
"""How many committed offsets of one partition are dated by themselves; the rest count as old as the next one below."""
NAMES_MAX: Final = 5
"""How many things a gap names."""
WITHOUT_COMMITTED_OFFSETS: Final = frozenset({"share"})
"""Groups that keep no committed offset of their own to be passed by anything."""
COORDINATED: Final[Mapping[str, str]] = {
    "__consumer_offsets": "groups",
    "__transaction_state": "transactions",
}
OPEN_STATES: Final = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")

TOPIC_SETTINGS: Final = (
    "cleanup.policy",
    "delete.retention.ms",
    "holdfast.flush",
    "max.message.bytes",
    "message.timestamp.before.max.ms",
    "message.timestamp.type",
    "min.compaction.lag.ms",
    "min.insync.replicas",
    "retention.bytes",
    "retention.ms",
    "unclean.leader.election.enable",
)
BROKER_SETTINGS: Final = (
    "auto.create.topics.enable",
    "default.replication.factor",
    "holdfast.flush",
    "min.insync.replicas",
    "offsets.retention.minutes",
    "replica.fetch.max.bytes",
    "transaction.max.timeout.ms",
    "unclean.leader.election.enable",
)


def collect(asker: Asker, groups: Collection[str], now_ms: Callable[[], int]) -> Snapshot:
    """One look; raises only when nobody answers at all."""
    collector = _Collector(asker, Snapshot(now_ms()))
    collector.metadata()
    for part in (
        collector.who_may_lead,
        collector.authority,
        collector.broker_settings,
        collector.topic_settings,
        lambda: collector.groups(groups),
        collector.bounds,
        collector.ages,
        collector.transactions,
        collector.open_producers,
    ):
        part()
    return collector.finish()


def _gap_kind(error: ClusterError) -> GapKind:
    return "unsupported" if isinstance(error, UnsupportedBroker) else "connection"


class _Collector:
    def __init__(self, asker: Asker, snapshot: Snapshot) -> None:
        self._asker = asker
        self.snapshot = snapshot
        self._refused: defaultdict[tuple[str, GapKind, str], list[str]] = defaultdict(list)
        """What could not be learnt: by the kind of thing and the reason, the names."""

    # -------------------------------------------------------------------- what could not be learnt

    def _miss(self, what: str, name: str, why: str, kind: GapKind) -> None:
        names = self._refused[what, kind, why]
        if name not in names[-1:]:
            names.append(name)

    def _refuse(self, what: str, name: str, code: ErrorCode, said: str | None = None) -> None:
        denied = code in DENIED
        why = described(code) if denied or not said else said
        passing: GapKind = "connection" if error_table.is_retriable(code) else "unreadable"
        self._miss(what, name, why, "permission" if denied else passing)

    def _from(
        self, what: str, broker_id: int, api_key: int, fields: Mapping[str, Any], **versions: int
    ) -> Any:
        """A broker's answer, or None and a gap."""
        try:
            return self._asker.ask_broker(broker_id, api_key, fields, **versions)
        except ClusterError as error:
            self._miss(what, f"broker {broker_id}", str(error), _gap_kind(error))
        return None

    def finish(self) -> Snapshot:
        for (what, kind, why), names in self._refused.items():
            names = list(dict.fromkeys(names))
            shown = ", ".join(map(plain, names[:NAMES_MAX]))
            more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
            self.snapshot.gaps.append(Gap(f"{what}: {shown}{more}", why, kind))
        return self.snapshot

    # -------------------------------------------------------------------- brokers and topics

    def metadata(self) -> None:
        answer = self._asker.metadata(None)
        for each in answer.brokers:
            address = f"{each.host}:{each.port}"
            self.snapshot.brokers[each.node_id] = BrokerFacts(each.node_id, address, each.rack)
        for topic in answer.topics:
            if topic.error_code is not ErrorCode.none and not topic.partitions:
                self._refuse("topics", str(topic.name), topic.error_code)
                continue
            topic_id = getattr(topic, "topic_id", None)
            self.snapshot.topics[topic.name] = LiveTopic(
                topic.name,
                "" if topic_id is None else str(topic_id),
                topic.is_internal,
                {each.partition_index: _partition(each) for each in topic.partitions},
            )
        self._coordinators_away()

    def who_may_lead(self) -> None:
        """Metadata names nobody in sync for a partition without a leader; newer brokers know who was."""
        lost = [
            topic.name
            for topic in self.snapshot.topics.values()
            if any(each.leader < 0 for each in topic.partitions.values())
        ]
        if not lost:
            return
        fields = {
            "topics": [{"name": name} for name in sorted(lost)[:TOPICS_PER_REQUEST]],
            "response_partition_limit": PARTITIONS_PER_REQUEST,
            "cursor": None,
        }
        try:
            answer = self._asker.ask_any(api_keys.DESCRIBE_TOPIC_PARTITIONS, fields)
        except ClusterError:
            return  # only the names of those to bring back become longer
        for found in answer.topics:
            topic = self.snapshot.topics.get(found.name or "")
            if topic is None:
                continue
            partitions = dict(topic.partitions)
            for each in found.partitions:
                known = partitions.get(each.partition_index)
                if known is not None and known.leader < 0:
                    able = tuple(each.eligible_leader_replicas or each.last_known_elr or ())
                    partitions[each.partition_index] = replace(known, may_lead=able)
            self.snapshot.topics[topic.name] = replace(topic, partitions=partitions)

    def _coordinators_away(self) -> None:
        """Brokers list what they coordinate: what nobody coordinates now is in no list."""
        for name, what in COORDINATED.items():
            topic = self.snapshot.topics.get(name)
            for number, partition in topic.partitions.items() if topic is not None else ():
                if partition.leader not in self.snapshot.brokers:
                    why = "the partition has no leader, and nobody can be asked about what it keeps"
                    self._miss(what, f"those of {name}-{number}", why, "connection")

    def authority(self) -> None:
        """Lists leave out in silence what may not be seen: see `live_ask`."""
        fields = {
            "include_cluster_authorized_operations": True,
            "endpoint_type": 1,
            "include_fenced_brokers": False,
        }
        try:
            answer = self._asker.ask_any(api_keys.DESCRIBE_CLUSTER, fields)
        except ClusterError:
            return  # an old broker cannot say; one that is gone is missed by the next question
        allowed = answer.cluster_authorized_operations
        if answer.error_code is not ErrorCode.none or allowed < 0:
            return
        if not may_describe(allowed):
            for what in ("topics", "groups", "transactions"):
                self._miss(what, UNSEEN, WITHOUT_DESCRIBE, "permission")
        for name, code in hidden_topics(self._asker, allowed, self.snapshot.brokers, self.snapshot.topics):
            self._refuse("topics", name, code)

    def broker_settings(self) -> None:
        for broker_id, broker in list(self.snapshot.brokers.items()):
            fields = _configs("broker", [str(broker_id)], BROKER_SETTINGS)
            answer = self._from("settings of brokers", broker_id, api_keys.DESCRIBE_CONFIGS, fields)
            for result in () if answer is None else answer.results:
                if result.error_code is not ErrorCode.none:
                    name = f"broker {broker_id}"
                    self._refuse("settings of brokers", name, result.error_code, result.error_message)
                else:
                    self.snapshot.brokers[broker_id] = replace(broker, settings=_settings(result))

    def topic_settings(self) -> None:
        for names in chunks(list(self.snapshot.topics), TOPICS_PER_REQUEST):
            try:
                answer = self._asker.ask_any(
                    api_keys.DESCRIBE_CONFIGS, _configs("topic", names, TOPIC_SETTINGS)
                )
            except ClusterError as error:
                for name in names:
                    self._miss("settings of topics", name, str(error), _gap_kind(error))
                continue
            for result in answer.results:
                name = result.resource_name
                if result.error_code is not ErrorCode.none:
                    self._refuse("settings of topics", name, result.error_code, result.error_message)
                    continue
                self.snapshot.topics[name] = replace(self.snapshot.topics[name], settings=_settings(result))

    # -------------------------------------------------------------------- groups

    def groups(self, wanted: Collection[str]) -> None:
        for broker_id in self.snapshot.brokers:
            listed = self._from(
                "groups", broker_id, api_keys.LIST_GROUPS, {"states_filter": [], "types_filter": []}
            )
            if listed is None:
                continue
            if listed.error_code is not ErrorCode.none:
                self._refuse("groups", f"broker {broker_id}", listed.error_code)
            own = [
                each
                for each in listed.groups
                if (not wanted or each.group_id in wanted)
                and getattr(each, "group_type", "").lower() not in WITHOUT_COMMITTED_OFFSETS
            ]
            for some in chunks(own, GROUPS_PER_REQUEST):
                self._committed_offsets(broker_id, some)
        for name in wanted:
            if name not in self.snapshot.groups:
                self._absent(name)

    def _committed_offsets(self, broker_id: int, listed: Sequence[Any]) -> None:
        fields = {
            "groups": [
                {"group_id": each.group_id, "member_id": None, "member_epoch": -1, "topics": None}
                for each in listed
            ],
            "require_stable": False,
        }
        # Version 10 names topics by their ids; 8 is the first that takes more than one group.
        answer = self._from(
            "committed offsets of groups", broker_id, api_keys.OFFSET_FETCH, fields, lowest=8, highest=9
        )
        if answer is None:
            return
        found = {each.group_id: each for each in answer.groups}
        for each in listed:
            group = found.get(each.group_id)
            if group is None or group.error_code is ErrorCode.group_id_not_found:
                continue  # deleted since it was listed
            if group.error_code is not ErrorCode.none:
                self._refuse("committed offsets of groups", each.group_id, group.error_code)
                continue
            positions: dict[Place, int] = {}
            for topic in group.topics:
                for partition in topic.partitions:
                    if partition.error_code is not ErrorCode.none:
                        what = f"{each.group_id} on {topic.name}"
                        self._refuse("committed offsets of groups", what, partition.error_code)
                    elif partition.committed_offset >= 0:
                        positions[topic.name, partition.partition_index] = partition.committed_offset
            state, kind = getattr(each, "group_state", ""), getattr(each, "group_type", "")
            self.snapshot.groups[each.group_id] = GroupFacts(each.group_id, state, kind, broker_id, positions)

    def _absent(self, name: str) -> None:
        """A group that was asked for and that nobody lists: not there, or not to be seen."""
        if any(name in names for (what, _, _), names in self._refused.items() if "groups" in what):
            return
        if any(what == "groups" and kind == "connection" for what, kind, _ in self._refused):
            self._miss("groups", name, "a broker that may have it did not answer", "connection")
            return
        code = ErrorCode.group_id_not_found
        try:
            answer = self._asker.ask_any(
                api_keys.FIND_COORDINATOR, {"key_type": 0, "coordinator_keys": [name]}, lowest=4
            )
            (found,) = answer.coordinators
            code = found.error_code if found.error_code in DENIED else code
        except ClusterError as error:
            self._miss("groups", name, str(error), "connection")
            return
        self._refuse("groups", name, code, "no broker knows it: 'holdfast groups list' shows those there are")

    # -------------------------------------------------------------------- logs

    def bounds(self) -> None:
        places = [
            (topic.name, number)
            for topic in self.snapshot.topics.values()
            for number, partition in topic.partitions.items()
            if partition.leader in self.snapshot.brokers
        ]
        starts = self._offsets(dict.fromkeys(places, EARLIEST))
        ends = self._offsets(dict.fromkeys(places, LATEST))
        stable = self._offsets(dict.fromkeys(places, LATEST), read_committed=True)
        for place in places:
            if place in starts and place in ends:
                start, end = starts[place][0], ends[place][0]
                decided = stable[place][0] if place in stable else end
                self.snapshot.bounds[place] = Bounds(start, end, min(decided, end))

    def _offsets(
        self, times: Mapping[Place, int], *, read_committed: bool = False
    ) -> dict[Place, tuple[int, int]]:
        """The offset and time of the first message at or after a time, for each partition; -1 where there is none."""
        found: dict[Place, tuple[int, int]] = {}
        for leader, some in self._by_leader(times, PARTITIONS_PER_REQUEST):
            fields = {
                "replica_id": -1,
                "isolation_level": int(read_committed),
                "topics": _by_topic(some, times),
                "timeout": 30_000,
            }
            answer = self._from("offsets of partitions", leader, api_keys.LIST_OFFSETS, fields)
            for topic in () if answer is None else answer.topics:
                for each in topic.partitions:
                    place = (topic.name, each.partition_index)
                    if each.error_code is ErrorCode.none:
                        found[place] = (each.offset, each.timestamp)
                    else:
                        self._refuse("offsets of partitions", named(place), each.error_code)
        return found

    def _by_leader(self, places: Iterable[Place], size: int) -> Iterator[tuple[int, list[Place]]]:
        """Partitions with who leads them, so many at a time."""
        by_leader: defaultdict[int, list[Place]] = defaultdict(list)
        for place in places:
            by_leader[self.snapshot.topics[place[0]].partitions[place[1]].leader].append(place)
        for leader, led in by_leader.items():
            yield from ((leader, some) for some in chunks(led, size))

    # -------------------------------------------------------------------- how old committed offsets are

    def ages(self) -> None:
        """Date the committed offsets that lie in the older half of what retention keeps."""
        now_ms = self.snapshot.time_ms
        behind: defaultdict[Place, set[int]] = defaultdict(set)
        for group in self.snapshot.groups.values():
            for place, position in group.committed_offsets.items():
                bounds, topic = self.snapshot.bounds.get(place), self.snapshot.topic_of(place)
                if bounds is None or topic is None or topic.retention_ms is None:
                    continue
                if bounds.start <= position < bounds.end:
                    behind[place].add(position)
        retention = {place: self.snapshot.topics[place[0]].retention_ms or 0 for place in behind}
        middles = self._offsets({place: max(0, now_ms - retention[place] // 2) for place in behind})
        endangered = {
            place: sorted(
                each for each in positions if middles[place][0] == NOWHERE or each < middles[place][0]
            )
            for place, positions in behind.items()
            if place in middles
        }
        for layer in range(LAYERS_MAX):
            wanted = {place: some[layer] for place, some in endangered.items() if layer < len(some)}
            if not wanted:
                break
            self._date(wanted, retention)
        for place, positions in endangered.items():
            dated = [self.snapshot.written_ms.get((place, each)) for each in positions[:LAYERS_MAX]]
            last = next((each for each in reversed(dated) if each is not None), None)
            for position in positions[LAYERS_MAX:]:
                if last is not None:
                    self.snapshot.written_ms[place, position] = last

    def _date(self, wanted: Mapping[Place, int], retention_ms: Mapping[Place, int]) -> None:
        """By halving: since when, at the earliest, the message at an offset can be there."""
        now_ms = self.snapshot.time_ms
        # Below zero, times mean something else: the log's ends.
        low = {place: max(0, now_ms - retention_ms[place]) for place in wanted}
        high = {place: max(0, now_ms - retention_ms[place] // 2) for place in wanted}
        exact: set[Place] = set()
        probe = dict(low)
        for _ in range(1 + HALVINGS):
            for place, (offset, time_ms) in self._offsets(probe).items():
                if offset == NOWHERE or offset > wanted[place]:
                    high[place] = probe[place]
                else:
                    low[place] = max(probe[place], time_ms)
                    if offset == wanted[place]:
                        exact.add(place)
            probe = {
                place: (low[place] + high[place]) // 2
                for place in wanted
                if place not in exact and high[place] - low[place] > 1
            }
            if not probe:
                break
        for place, position in wanted.items():
            self.snapshot.written_ms[place, position] = min(low[place], high[place])

    # -------------------------------------------------------------------- transactions

    def transactions(self) -> None:
        for broker_id in self.snapshot.brokers:
            fields = {
                "state_filters": [],
                "producer_id_filters": [],
                "duration_filter": -1,
                "transactional_id_pattern": None,
            }
            listed = self._from("transactions", broker_id, api_keys.LIST_TRANSACTIONS, fields)
            if listed is None:
                continue
            if listed.error_code is not ErrorCode.none:
                self._refuse("transactions", f"broker {broker_id}", listed.error_code)
                continue
            if self.snapshot.transactions is None:
                self.snapshot.transactions = []
            ids = [
                each.transactional_id
                for each in listed.transaction_states
                if each.transaction_state in OPEN_STATES
            ]
            for some in chunks(ids, GROUPS_PER_REQUEST):
                self._describe(broker_id, some)

    def _describe(self, broker_id: int, ids: Sequence[str]) -> None:
        answer = self._from(
            "transactions", broker_id, api_keys.DESCRIBE_TRANSACTIONS, {"transactional_ids": ids}
        )
        for state in () if answer is None else answer.transaction_states:
            if state.error_code is ErrorCode.transactional_id_not_found:
                continue  # it has ended and expired since it was listed
            if state.error_code is not ErrorCode.none:
                self._refuse("transactions", state.transactional_id, state.error_code)
            elif self.snapshot.transactions is not None:
                self.snapshot.transactions.append(_transaction(state))

    def open_producers(self) -> None:
        """Who holds the partitions whose readers cannot go to the end."""
        held = [place for place, bounds in self.snapshot.bounds.items() if bounds.stable < bounds.end]
        for leader, some in self._by_leader(held, PRODUCERS_PER_REQUEST):
            topics: defaultdict[str, list[int]] = defaultdict(list)
            for topic, partition in some:
                topics[topic].append(partition)
            fields = {
                "topics": [{"name": name, "partition_indexes": numbers} for name, numbers in topics.items()]
            }
            self._producers(
                self._from("producers of partitions", leader, api_keys.DESCRIBE_PRODUCERS, fields)
            )

    def _producers(self, answer: Any) -> None:
        for topic in () if answer is None else answer.topics:
            for each in topic.partitions:
                place = (topic.name, each.partition_index)
                if each.error_code is not ErrorCode.none:
                    self._refuse("producers of partitions", named(place), each.error_code, each.error_message)
                    continue
                for producer in each.active_producers:
                    if producer.current_txn_start_offset >= 0:
                        self.snapshot.open_producers.append(
                            OpenProducer(
                                place,
                                producer.producer_id,
                                producer.current_txn_start_offset,
                                producer.last_timestamp,
                            )
                        )


def _partition(each: Any) -> PartitionFacts:
    return PartitionFacts(
        each.leader_id, tuple(each.replica_nodes), tuple(each.isr_nodes), getattr(each, "leader_epoch", -1)
    )


def _configs(kind: str, names: Iterable[str], settings: Sequence[str]) -> dict[str, Any]:
    return {
        "resources": [
            {
                "resource_type": RESOURCE_TYPES[kind],
                "resource_name": name,
                "configuration_keys": list(settings),
            }
            for name in names
        ],
        "include_synonyms": False,
        "include_documentation": False,
    }


def _settings(result: Any) -> Settings:
    return Settings(
        {
            entry.name: Setting(entry.value, entry.config_source)
            for entry in result.configs
            if entry.value is not None
        }
    )


def _by_topic(places: Iterable[Place], times: Mapping[Place, int]) -> list[dict[str, Any]]:
    topics: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for topic, partition in places:
        topics[topic].append(
            {
                "partition_index": partition,
                "current_leader_epoch": -1,
                "timestamp": times[topic, partition],
            }
        )
    return [{"name": name, "partitions": partitions} for name, partitions in topics.items()]


def _transaction(state: Any) -> TransactionFacts:
    start = state.transaction_start_time
    return TransactionFacts(
        state.transactional_id,
        state.producer_id,
        state.transaction_state,
        state.transaction_timeout // timedelta(milliseconds=1),
        None if start is None else round(start.timestamp() * 1000),
        tuple(sorted((topic.topic, each) for topic in state.topics for each in topic.partitions)),
    )
