"""Transactions: every API at every version, good input and bad, both transaction protocols, what readers see."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.differential import Script, Side

from holdfast.wire.api_keys import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS,
    END_TXN,
    FETCH,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    LIST_TRANSACTIONS,
    OFFSET_FETCH,
    TXN_OFFSET_COMMIT,
    WRITE_TXN_MARKERS,
)
from holdfast.wire.batch import make_batch

Compare = Callable[[Script], None]
NOW = int(time.time() * 1000)
CONCURRENT = 51
PREPARED = ("PrepareCommit", "PrepareAbort", "PrepareEpochFence")


class Txn:
    """A transactional id and its producer, as raw requests; it remembers its id and epoch from the answers."""

    def __init__(self, side: Side, name: str, topic: str = "") -> None:
        self.side = side
        self.name = name
        self.topic = topic
        self.producer_id = -1
        self.epoch = -1
        self.sequence: dict[int, int] = {}

    def _patiently(self, label: str, api_key: int, version: int, fields: dict[str, Any], error: Any) -> Any:
        """Apache Kafka ends transactions behind its answers: what comes too soon is asked again."""
        deadline = time.monotonic() + 8
        while True:
            answer = self.side.client.ask(api_key, version, fields)
            if isinstance(answer, str) or error(answer) != CONCURRENT or time.monotonic() > deadline:
                self.side.note(label, answer)
                return answer
            time.sleep(0.01)

    def init(self, label: str = "init", version: int = 4, **fields: Any) -> Any:
        wanted = {
            "transactional_id": self.name,
            "transaction_timeout": 60_000,
            "producer_id": -1,
            "producer_epoch": -1,
            **fields,
        }
        answer = self._patiently(label, INIT_PRODUCER_ID, version, wanted, lambda found: found.error_code)
        if answer.error_code == 0:
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
            self.sequence.clear()
        return answer

    def who(self, **fields: Any) -> dict[str, Any]:
        return {
            "transactional_id": self.name,
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
            **fields,
        }

    def add(self, label: str, *partitions: int, version: int = 3, **fields: Any) -> Any:
        topics = [{"name": fields.pop("topic", self.topic), "partitions": list(partitions or (0,))}]
        who = self.who(**fields)
        old = {f"v3_and_below_{name}": value for name, value in who.items()}
        wanted = {**who, **old, "topics": topics, "v3_and_below_topics": topics}
        wanted["transactions"] = [{**who, "verify_only": False, "topics": topics}]

        def first(found: Any) -> Any:
            results = getattr(found, "results_by_topic_v3_and_below", None)
            if not results:
                return 0
            return results[0].results_by_partition[0].partition_error_code

        return self._patiently(label, ADD_PARTITIONS_TO_TXN, version, wanted, first)

    def add_offsets(self, label: str, group: str, version: int = 3, **fields: Any) -> Any:
        wanted = {**self.who(**fields), "group_id": group}
        return self._patiently(label, ADD_OFFSETS_TO_TXN, version, wanted, lambda found: found.error_code)

    def commit_offsets(self, label: str, group: str, offset: int, version: int = 3, **fields: Any) -> Any:
        part = {"partition_index": fields.pop("partition", 0), "committed_offset": offset}
        part["committed_metadata"] = fields.pop("metadata", "m")
        wanted = {
            "group_id": group,
            "generation_id": -1,
            "member_id": "",
            "topics": [{"name": fields.pop("topic", self.topic), "partitions": [part]}],
            **self.who(),
            **fields,
        }
        return self._patiently(
            label,
            TXN_OFFSET_COMMIT,
            version,
            wanted,
            lambda found: found.topics[0].partitions[0].error_code,
        )

    def end(self, label: str, *, commit: bool = True, version: int = 3, **fields: Any) -> Any:
        wanted = {**self.who(**fields), "committed": commit}
        answer = self._patiently(label, END_TXN, version, wanted, lambda found: found.error_code)
        if answer.error_code == 0 and version >= 5 and not fields:
            if answer.producer_epoch != self.epoch or answer.producer_id != self.producer_id:
                self.sequence.clear()
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
        self.settle()
        return answer

    def produce(
        self, label: str, value: str = "v", partition: int = 0, version: int = 11, **fields: Any
    ) -> Any:
        sequence = fields.pop("sequence", self.sequence.get(partition, 0))
        batch = make_batch(
            [value.encode()],
            timestamp=NOW,
            producer_id=fields.pop("producer_id", self.producer_id),
            producer_epoch=fields.pop("producer_epoch", self.epoch),
            base_sequence=sequence,
            is_transactional=fields.pop("is_transactional", True),
        )
        topic = {"name": self.topic, "partition_data": [{"index": partition, "records": batch}]}
        wanted = {
            "transactional_id": self.name,
            "acks": -1,
            "timeout": 9000,
            "topic_data": [topic],
            **fields,
        }
        answer = self._patiently(
            label,
            0,
            version,
            wanted,
            lambda found: found.responses[0].partition_responses[0].error_code,
        )
        if answer.responses[0].partition_responses[0].error_code == 0:
            self.sequence[partition] = max(sequence + 1, self.sequence.get(partition, 0))
        return answer

    def settle(self) -> None:
        """Return when nothing is about to be written any more."""

        def is_settled() -> bool:
            answer = self.side.client.ask(DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [self.name]})
            return answer.transaction_states[0].transaction_state not in PREPARED

        self.side.wait_until(is_settled)

    def describe(self, label: str) -> None:
        answer = self.side.client.ask(DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [self.name]})
        state = answer.transaction_states[0]
        self.side.note(
            label,
            {
                "error_code": state.error_code,
                "state": state.transaction_state,
                "producer_id": state.producer_id,
                "epoch": state.producer_epoch,
                "timeout": state.transaction_timeout,
                "topics": state.topics,
            },
        )


def read(
    side: Side, label: str, topic: str, partition: int = 0, *, version: int = 11, level: int = 1
) -> None:
    """Everything of a partition as a reader of this isolation level gets it."""
    part = {"partition": partition, "fetch_offset": 0, "partition_max_bytes": 10 << 20}
    part |= {"current_leader_epoch": -1}
    fields = {
        "replica_id": -1,
        "max_wait": 0,
        "max_bytes": 50 << 20,
        "isolation_level": level,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": topic, "partitions": [part]}],
    }
    answer = side.client.ask(FETCH, version, fields)
    found = answer.responses[0].partitions[0]
    side.note(
        label,
        {
            "error_code": found.error_code,
            "high_watermark": found.high_watermark,
            "last_stable_offset": found.last_stable_offset,
            "aborted": [
                {"producer_id": each.producer_id, "first_offset": each.first_offset}
                for each in found.aborted_transactions or ()
            ],
            "records": found.records or b"",
        },
    )


def initialisations(side: Side) -> None:
    for version in range(6):
        producer = Txn(side, f"init-{version}")
        said = f"version {version}"
        producer.init(f"first, {said}", version)
        producer.init(f"again, {said}", version)
        producer.describe(f"described, {said}")
        producer.init(f"no time at all, {said}", version, transaction_timeout=0)
        producer.init(f"less than none, {said}", version, transaction_timeout=-5)
        producer.init(f"too long, {said}", version, transaction_timeout=900_001)
        producer.init(f"as long as may be, {said}", version, transaction_timeout=900_000)
        producer.init(f"no name, {said}", version, transactional_id="")
        producer.describe(f"in the end, {said}")
    for version in (3, 4, 5):
        producer = Txn(side, f"init-own-{version}")
        producer.init(f"own {version}", version)
        mine = {"producer_id": producer.producer_id, "producer_epoch": producer.epoch}
        producer.init(f"by its own id, {version}", version, **mine)
        producer.init(f"by the epoch before, {version}", version, **mine)
        producer.init(f"by the epoch before that, {version}", version, **mine)
        producer.describe(f"after it, {version}")
        producer.init(f"by a later epoch, {version}", version, **{**mine, "producer_epoch": 50})
        producer.init(f"by another id, {version}", version, **{**mine, "producer_id": 987_654})
        producer.init(f"by an id alone, {version}", version, producer_id=producer.producer_id)
        producer.init(f"by an epoch alone, {version}", version, producer_epoch=0)
        producer.describe(f"in the end, {version}")


def additions(side: Side) -> None:
    side.create_topic("added", 3)
    stranger = Txn(side, "added-stranger", "added")
    for version in range(4):
        said = f"version {version}"
        stranger.add(f"a stranger, {said}", version=version)
        producer = Txn(side, f"added-{version}", "added")
        producer.init(f"init, {said}")
        producer.add(f"two, {said}", 0, 1, version=version)
        producer.add(f"again and one more, {said}", 1, 2, version=version)
        producer.describe(f"described, {said}")
        producer.add(f"no such partition, {said}", 0, 9, version=version)
        producer.add(f"no such topic, {said}", version=version, topic="nowhere")
        producer.add(f"another id, {said}", version=version, producer_id=producer.producer_id + 100_000)
        producer.add(f"a later epoch, {said}", version=version, producer_epoch=producer.epoch + 1)
        producer.init(f"init again, {said}")
        producer.add(f"an earlier epoch, {said}", version=version, producer_epoch=producer.epoch - 1)
        producer.add(f"no name, {said}", version=version, transactional_id="")
        producer.describe(f"in the end, {said}")


def offsets_added(side: Side) -> None:
    side.create_topic("txn-positions", 2)
    stranger = Txn(side, "positions-stranger", "txn-positions")

    def fetch(label: str, group: str, stable: bool) -> None:
        topics = [{"name": "txn-positions", "partition_indexes": [0, 1]}]
        fields = {"groups": [{"group_id": group, "topics": topics}], "require_stable": stable}
        side.ask(label, OFFSET_FETCH, 8, fields)

    for version in range(5):
        said = f"version {version}"
        group = f"txn-positions-{version}"
        stranger.add_offsets(f"a stranger, {said}", group, version)
        producer = Txn(side, f"positions-{version}", "txn-positions")
        producer.init(f"init, {said}")
        producer.add_offsets(f"no group, {said}", "", version)
        producer.add_offsets(f"another epoch, {said}", group, version, producer_epoch=producer.epoch + 1)
        producer.add_offsets(f"added, {said}", group, version)
        producer.describe(f"described, {said}")
        # Version 5 belongs to the other protocol and needs nothing added before.
        producer.commit_offsets(f"committed, {said}", group, 5, version)
        fetch(f"pending, {said}", group, False)
        fetch(f"pending, stable, {said}", group, True)
        producer.commit_offsets(f"no such topic, {said}", group, 5, version, topic="nowhere")
        producer.commit_offsets(f"no such partition, {said}", group, 5, version, partition=9)
        producer.commit_offsets(f"too much metadata, {said}", group, 5, version, metadata="x" * 5000)
        producer.commit_offsets(f"committed for no group, {said}", "", 5, version)
        if version >= 3:
            member = {"member_id": "nobody", "generation_id": 3}
            producer.commit_offsets(f"as a member nobody knows, {said}", group, 5, version, **member)
            producer.commit_offsets(f"a generation nobody has, {said}", group, 5, version, generation_id=3)
        producer.end(f"aborted, {said}", commit=False)
        fetch(f"after the abort, stable, {said}", group, True)
        producer.add_offsets(f"added again, {said}", group, version)
        producer.commit_offsets(f"committed again, {said}", group, 8, version)
        producer.end(f"ended, {said}")
        fetch(f"after the commit, stable, {said}", group, True)
    late = Txn(side, "positions-late", "txn-positions")
    late.init()
    late.commit_offsets("without having added", "txn-positions-late", 5)
    late.commit_offsets("with another epoch", "txn-positions-late", 5, producer_epoch=late.epoch + 3)
    late.describe("what came of it")


def endings(side: Side) -> None:
    side.create_topic("ended", 1)
    stranger = Txn(side, "ended-stranger", "ended")
    for version in range(5):
        said = f"version {version}"
        stranger.end(f"a stranger, {said}", version=version)
        producer = Txn(side, f"ended-{version}", "ended")
        producer.init(f"init, {said}")
        producer.end(f"nothing to commit, {said}", version=version)
        producer.end(f"nothing to abort, {said}", version=version, commit=False)
        for commit in (True, False):
            does = f"{'commit' if commit else 'abort'}, {said}"
            producer.add(f"added for {does}")
            producer.end(f"another epoch for {does}", version=version, producer_epoch=producer.epoch + 1)
            producer.end(f"another id for {does}", version=version, producer_id=producer.producer_id + 99_999)
            producer.end(does, version=version, commit=commit)
            producer.end(f"again {does}", version=version, commit=commit)
            producer.end(f"otherwise after {does}", version=version, commit=not commit)
            producer.describe(f"described after {does}")


def endings_with_new_epochs(side: Side) -> None:
    """EndTxn 5: every end is a new epoch, and a repeated one is answered the same."""
    side.create_topic("bumped", 1)
    producer = Txn(side, "bumped", "bumped")
    producer.init(version=5)
    producer.end("nothing to commit", version=5)
    producer.end("nothing to abort", version=5, commit=False)
    producer.describe("after nothing")
    for commit in (True, False):
        does = "commit" if commit else "abort"
        producer.produce(f"produced for {does}", does, version=12)
        producer.describe(f"enrolled for {does}")
        before = producer.epoch
        producer.end(does, version=5, commit=commit)
        producer.end(f"{does} repeated", version=5, commit=commit, producer_epoch=before)
        producer.end(f"{does} otherwise", version=5, commit=not commit, producer_epoch=before)
        producer.end(f"{does} long ago", version=5, commit=commit, producer_epoch=before - 1)
        producer.produce(f"produced by the epoch before {does}", "late", version=12, producer_epoch=before)
        producer.describe(f"after {does}")
    read(side, "read", "bumped")
    producer.add("added by the older API", version=3)
    producer.describe("after the older API")


def produced(side: Side) -> None:
    """Transactional batches at every version: verified before version 12, enrolled from there on."""
    side.create_topic("txn-produced", 2)
    for version in range(3, 13):
        producer = Txn(side, f"produced-{version}", "txn-produced")
        said = f"version {version}"
        producer.init(f"init, {said}")
        producer.produce(f"not added, {said}", version=version)
        producer.add(f"added, {said}")
        producer.produce(f"added and sent, {said}", f"by {version}", version=version)
        producer.produce(f"sent again, {said}", f"by {version}", version=version, sequence=0)
        producer.produce(f"to another partition, {said}", partition=1, version=version)
        later: dict[str, Any] = {"producer_epoch": producer.epoch + 1}
        producer.produce(f"a later epoch, {said}", version=version, **later)
        producer.produce(f"no name, {said}", version=version, transactional_id=None)
        producer.produce(f"another name, {said}", version=version, transactional_id="produced-by-another")
        plain: dict[str, Any] = {"is_transactional": False}
        producer.produce(f"outside, {said}", version=version, **plain)
        producer.end(f"ended, {said}", commit=version % 2 == 0)
        producer.produce(f"after the end, {said}", version=version)
    for level in (0, 1):
        for partition in (0, 1):
            read(side, f"partition {partition}, level {level}", "txn-produced", partition, level=level)


def interleaved(side: Side) -> None:
    """What readers of either level get while transactions overlap, at every version of Fetch with both."""
    side.create_topic("overlap", 1)
    one, two, three = (Txn(side, f"overlap-{n}", "overlap") for n in range(3))
    for each in (one, two, three):
        each.init(f"init {each.name}")
        each.add(f"add {each.name}")
    one.produce("one", "one a")
    two.produce("two", "two a")
    side.produce("plain", "overlap", make_batch([b"plain"], timestamp=NOW))
    read(side, "two open", "overlap")
    two.end("two aborts", commit=False)
    read(side, "two aborted, one open", "overlap")
    three.produce("three", "three a")
    one.produce("one more", "one b")
    one.end("one commits")
    read(side, "one committed", "overlap")
    for level in (0, 1):
        for place in (-1, -2):
            wanted = {"partition_index": 0, "timestamp": place, "current_leader_epoch": -1}
            fields: dict[str, Any] = {"replica_id": -1, "isolation_level": level}
            fields |= {"topics": [{"name": "overlap", "partitions": [wanted]}]}
            side.ask(f"place {place}, level {level}", LIST_OFFSETS, 7, fields)
    three.end("three aborts", commit=False)
    for version in range(4, 13):
        for level in (0, 1):
            read(
                side, f"in the end, version {version}, level {level}", "overlap", version=version, level=level
            )


def producers_described(side: Side) -> None:
    side.create_topic("txn-producers", 2)
    producer = Txn(side, "txn-producers", "txn-producers")
    producer.init()
    producer.add("added", 0, 1)
    producer.produce("sent")

    def ask(label: str) -> None:
        fields = {"topics": [{"name": "txn-producers", "partition_indexes": [0, 1, 7]}]}
        side.ask(label, DESCRIBE_PRODUCERS, 0, fields)

    ask("open")
    producer.end("ends")
    ask("ended")
    producer.add("added again", 1)
    producer.produce("sent again", partition=1)
    producer.init("again")
    producer.settle()
    ask("fenced")


def time_outs(side: Side) -> None:
    side.create_topic("txn-time-out", 1)
    for version in (3, 5):
        producer = Txn(side, f"txn-time-out-{version}", "txn-time-out")
        said = f"version {version}"
        producer.init(f"init, {said}", transaction_timeout=400)
        producer.add(f"added, {said}")
        producer.produce(f"sent, {said}", f"too late, {said}")

        def is_over(name: str = producer.name) -> bool:
            answer = side.client.ask(DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [name]})
            return bool(answer.transaction_states[0].transaction_state == "CompleteAbort")

        side.wait_until(is_over)
        producer.describe(f"over, {said}")
        producer.end(f"too late, {said}", version=version)
        producer.add(f"added too late, {said}")
        producer.produce(f"sent too late, {said}")
        producer.add_offsets(f"offsets too late, {said}", "group")
        own = {"producer_id": producer.producer_id, "producer_epoch": producer.epoch}
        producer.init(f"goes on by its own id, {said}", **own)
        producer.describe(f"went on, {said}")
    read(side, "read", "txn-time-out")


def fencing(side: Side) -> None:
    """Two that think they are the same producer."""
    side.create_topic("fencing", 1)
    old, new = Txn(side, "fencing", "fencing"), Txn(side, "fencing", "fencing")
    old.init("old")
    old.add("old adds")
    old.produce("old sends", "of the old one")
    new.init("new")
    new.describe("the old one's was aborted")
    old.produce("old sends on", "of the zombie")
    old.add("old adds on")
    old.add_offsets("old adds a group", "group")
    old.commit_offsets("old commits positions", "group", 3)
    for version in (3, 5):
        old.end(f"old commits, version {version}", version=version)
    new.describe("the new one is untouched")
    new.add("new adds")
    new.produce("new sends", "of the new one")
    new.end("new commits")
    read(side, "read", "fencing")


def late_initialisation(side: Side) -> None:
    """A zombie that asks to go on by its own id is refused; whether it harms its successor is another matter."""
    side.create_topic("late-init", 1)
    old, new = Txn(side, "late-init", "late-init"), Txn(side, "late-init", "late-init")
    old.init("old")
    new.init("new")
    new.add("new adds")
    new.produce("new sends", "of the new one")
    own = {"producer_id": old.producer_id, "producer_epoch": old.epoch}
    old.init("old again by its own id", **own)
    new.settle()
    new.describe("the new one")
    new.end("the new one commits")
    read(side, "read", "late-init")


def lists(side: Side) -> None:
    side.create_topic("listed", 1)
    opened, ended, empty = (Txn(side, f"listed-{name}", "listed") for name in ("open", "ended", "empty"))
    for each in (opened, ended, empty):
        each.init(f"init {each.name}")
    opened.add("added")
    ended.add("added too")
    ended.end("ended")

    def ask(label: str, version: int = 2, **fields: Any) -> None:
        wanted = {"state_filters": [], "producer_id_filters": [], "duration_filter": -1, **fields}
        answer = side.client.ask(LIST_TRANSACTIONS, version, wanted)
        mine = [each for each in answer.transaction_states if each.transactional_id.startswith("listed-")]
        side.note(
            label,
            {
                "error_code": answer.error_code,
                "unknown": sorted(answer.unknown_state_filters),
                "states": mine,
            },
        )

    for version in range(3):
        ask(f"version {version}", version)
        for states in (
            ["Ongoing"],
            ["Ongoing", "Empty"],
            ["CompleteCommit"],
            ["nonsense", "Ongoing"],
            ["ongoing"],
        ):
            ask(f"{states}, version {version}", version, state_filters=states)
        ask(f"one producer, version {version}", version, producer_id_filters=[opened.producer_id])
        ask(f"no producer, version {version}", version, producer_id_filters=[1 << 40])
    for duration in (0, 10**9):
        for version in (1, 2):
            ask(f"for {duration} ms, version {version}", version, duration_filter=duration)
    for pattern in ("listed-o.*", "listed-(open|empty)", "", "nothing", "("):
        ask(f"pattern {pattern}", transactional_id_pattern=pattern)
    names = ["listed-open", "listed-nobody", "", "listed-open"]
    answer = side.client.ask(DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": names})
    side.note(
        "described",
        [
            (each.transactional_id, each.error_code, each.transaction_state)
            for each in answer.transaction_states
        ],
    )
    side.ask("none described", DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": []})


def markers(side: Side) -> None:
    """Markers written from outside, as an administrator ends a hanging transaction."""
    side.create_topic("marked", 2)
    producer = Txn(side, "marked", "marked")
    producer.init()
    producer.add("added", 0, 1)
    producer.produce("sent", "hangs")
    producer.produce("sent to the other", "hangs", partition=1)

    def write(label: str, version: int, partition: int, **fields: Any) -> None:
        marker = {
            "producer_id": producer.producer_id,
            "producer_epoch": producer.epoch,
            "transaction_result": False,
            "coordinator_epoch": 0,
            "topics": [{"name": "marked", "partition_indexes": [partition]}],
            **fields,
        }
        side.ask(label, WRITE_TXN_MARKERS, version, {"markers": [marker]})

    write("an earlier epoch", 1, 0, producer_epoch=producer.epoch - 1)
    write("no such partition", 1, 7)
    write("no such topic", 1, 0, topics=[{"name": "nowhere", "partition_indexes": [0]}])
    read(side, "untouched", "marked")
    side.ask("no markers", WRITE_TXN_MARKERS, 1, {"markers": []})


SCRIPTS = (
    initialisations,
    additions,
    offsets_added,
    endings,
    endings_with_new_epochs,
    produced,
    interleaved,
    producers_described,
    time_outs,
    fencing,
    late_initialisation,
    lists,
    markers,
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_transactions_are_answered_as_apache_kafka_answers(script: Script, compare: Compare) -> None:
    compare(script)
