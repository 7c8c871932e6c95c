"""The walk over the source's log: what every offset is, while the log moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pytest
from tests.support.audit_topics import Sent, append_transaction
from tests.support.fake_cluster import FETCH, FakeCluster, FakePartition

from holdfast.audit.decoding import Decode, SourceDecoder
from holdfast.audit.model import AuditError
from holdfast.audit.source import (
    ABORTED,
    COMPACTED,
    CONTROL,
    EXPIRED,
    NO_TICK,
    RECORD,
    LogEnds,
    SourceWalk,
    key_text,
    keys_at,
    look,
    walk,
)
from holdfast.pipeline.definition.model import Decoding, Source
from holdfast.pipeline.digest import place_hash
from holdfast.pipeline.positions import Place
from holdfast.reader.cluster import Cluster
from holdfast.reader.errors import TopicRecreated
from holdfast.wire.batch import Record, build_batch

TIME_MS = 1_700_000_000_000


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(fake: FakeCluster) -> Iterator[Cluster]:
    settings = {
        "bootstrap.servers": fake.bootstrap_servers,
        "default.api.timeout.ms": "5000",
        "retry.backoff.ms": "1",
    }
    with Cluster(settings) as found:
        yield found


def append(partition: FakePartition, keys: Sequence[bytes | None], *, time_ms: int = TIME_MS) -> None:
    records = [Record(at, at, key, b"value", ()) for at, key in enumerate(keys)]
    partition.append(build_batch(records, base_timestamp=time_ms))


def walked(cluster: Cluster, spans: dict[Place, tuple[int, int]] | None = None, **more: object) -> SourceWalk:
    logs = look(cluster, ["orders"])
    return walk(cluster, spans or {place: (0, log.end) for place, log in logs.items()}, logs, **more)  # type: ignore[arg-type]


def codes(found: SourceWalk, partition: int = 0) -> list[int]:
    part = next(each for place, each in found.partitions.items() if place.partition == partition)
    return [int(code) for code in part.codes]


def test_every_offset_is_what_it_is(fake: FakeCluster, cluster: Cluster) -> None:
    log = fake.add_topic("orders").partitions[0]
    append(log, [b"a", b"b"])
    append_transaction(log, [Sent(b"c", b"", ()), Sent(b"d", b"", ())], producer_id=7, is_commit=False)
    append_transaction(log, [Sent(b"e", b"", ())], producer_id=7)
    log.append(build_batch([Record(0, 0, b"f", b"", ()), Record(3, 0, b"g", b"", ())], last_offset_delta=4))
    found = walked(cluster)
    assert codes(found) == [
        RECORD,
        RECORD,
        ABORTED,
        ABORTED,
        CONTROL,
        RECORD,
        CONTROL,
        RECORD,
        COMPACTED,
        COMPACTED,
        RECORD,
        COMPACTED,
    ]
    (part,) = found.partitions.values()
    assert part.kinds() == {"record": 5, "control": 2, "aborted": 2, "compacted": 3}
    expected = sum(place_hash("orders", 0, offset) for offset in (0, 1, 5, 7, 10)) % 2**64
    assert part.digest(0, 12) == expected
    assert part.digest(1, 2) == place_hash("orders", 0, 1)


def test_only_the_scope_is_read_and_batches_across_its_edges_are_cut(
    fake: FakeCluster, cluster: Cluster
) -> None:
    log = fake.add_topic("orders").partitions[0]
    append(log, [b"a"] * 5)
    append_transaction(log, [Sent(b"x", b"", ())] * 4, producer_id=7, is_commit=False)
    (place,) = look(cluster, ["orders"])
    assert codes(walked(cluster, {place: (2, 7)})) == [RECORD, RECORD, RECORD, ABORTED, ABORTED]
    assert codes(walked(cluster, {place: (3, 3)})) == []


def test_what_is_below_the_log_start_has_expired(fake: FakeCluster, cluster: Cluster) -> None:
    log = fake.add_topic("orders").partitions[0]
    append(log, [b"a"] * 3)
    append(log, [b"b"] * 3)
    log.log_start = 3
    assert codes(walked(cluster)) == [EXPIRED] * 3 + [RECORD] * 3


def test_retention_that_overtakes_the_walk_leaves_expired_offsets_and_the_walk_goes_on(
    fake: FakeCluster, cluster: Cluster
) -> None:
    topic = fake.add_topic("orders", partitions=2)
    for partition in topic.partitions:
        for _ in range(4):
            append(partition, [b"k"] * 10)
    logs = look(cluster, ["orders"])

    def expire(fields: object) -> None:
        topic.partitions[0].log_start = 20

    fake.script(FETCH, expire, expire)
    topic.partitions[0].log_start = 20  # between the look and the first fetch
    found = walk(cluster, dict.fromkeys(logs, (0, 40)), logs)
    assert codes(found, 0) == [EXPIRED] * 20 + [RECORD] * 20
    assert codes(found, 1) == [RECORD] * 40
    assert {place.partition: count for place, count in found.expired_on_the_way.items()} == {0: 20}


def test_a_topic_recreated_since_the_look_is_an_error_and_never_data(
    fake: FakeCluster, cluster: Cluster
) -> None:
    append(fake.add_topic("orders").partitions[0], [b"a"] * 3)
    logs = look(cluster, ["orders"])
    append(fake.add_topic("orders").partitions[0], [b"b"] * 3)
    with pytest.raises(TopicRecreated):
        walk(cluster, dict.fromkeys(logs, (0, 3)), logs)


def test_records_written_meanwhile_are_beyond_the_scope(fake: FakeCluster, cluster: Cluster) -> None:
    log = fake.add_topic("orders").partitions[0]
    append(log, [b"a"] * 3)
    logs = look(cluster, ["orders"])
    append(log, [b"b"] * 9)
    assert codes(walk(cluster, {place: (0, each.end) for place, each in logs.items()}, logs)) == [RECORD] * 3


def test_times_are_kept_to_a_tenth_of_a_second(fake: FakeCluster, cluster: Cluster) -> None:
    log = fake.add_topic("orders").partitions[0]
    append(log, [b"a"], time_ms=TIME_MS)
    append(log, [b"a"], time_ms=TIME_MS + 61_234)
    append(log, [b"a"], time_ms=TIME_MS - 1_000)
    append(log, [b"a"], time_ms=0)
    found = walked(cluster)
    (part,) = found.partitions.values()
    assert found.base_ms == TIME_MS
    assert part.ticks.tolist() == [0, 612, -10, NO_TICK]


class Onlooker:
    def __init__(self) -> None:
        self.seen: dict[Place, list[int]] = {}
        self.values: list[object] = []

    def take(self, place: Place, batch: pa.RecordBatch, decoded: Decode) -> None:
        self.seen.setdefault(place, []).extend(batch.column("offset").to_pylist())
        (name,) = [name for name in decoded().columns if not name.startswith("_")]
        self.values += decoded().columns[name].to_pylist()


def test_onlookers_see_every_committed_record_once_and_in_order(fake: FakeCluster, cluster: Cluster) -> None:
    topic = fake.add_topic("orders", partitions=2)
    for number, log in enumerate(topic.partitions):
        for _ in range(5):
            append(log, [b"a"] * (number + 3))
            append_transaction(log, [Sent(b"x", b"", ())], producer_id=7, is_commit=False)
    onlooker = Onlooker()
    decoder = SourceDecoder(Source(topics=("orders",), value=Decoding("text")))
    found = walked(cluster, decoder=decoder, observers=[onlooker])
    for place, part in found.partitions.items():
        assert onlooker.seen[place] == np.flatnonzero(part.records).tolist()
    assert onlooker.values == ["value"] * found.records


def test_topics_that_are_not_there_are_left_out_of_the_look(fake: FakeCluster, cluster: Cluster) -> None:
    append(fake.add_topic("orders", partitions=2).partitions[1], [b"a"] * 4)
    assert {place.partition: ends for place, ends in look(cluster, ["orders", "others"]).items()} == {
        0: LogEnds(0, 0),
        1: LogEnds(0, 4),
    }
    assert look(cluster, ["others"]) == {}


def test_keys_are_read_back_for_the_offsets_named(fake: FakeCluster, cluster: Cluster) -> None:
    log = fake.add_topic("orders").partitions[0]
    append(log, [f"key-{at}".encode() for at in range(40)])
    append(log, [None, b"\xff\x00", b"x" * 200])
    (place,) = look(cluster, ["orders"])
    assert keys_at(cluster, place, [7, 3, 39, 3]) == ["key-3", "key-7", "key-39"]
    assert keys_at(cluster, place, [40, 41]) == ["0xff00"]
    assert keys_at(cluster, place, range(20)) == [f"key-{at}" for at in range(5)]
    assert keys_at(cluster, place, []) == []
    assert key_text(b"x" * 200).endswith("…")
    assert len(key_text(b"x" * 200)) == 80


def test_two_batches_that_claim_one_offset_are_no_proof_of_anything(
    fake: FakeCluster, cluster: Cluster
) -> None:
    log = fake.add_topic("orders").partitions[0]
    append(log, [b"a"] * 3)
    log.log_end = 1
    append(log, [b"b"] * 3)
    with pytest.raises(Exception, match=r"orders-0|order") as caught:
        walked(cluster)
    assert isinstance(caught.value, AuditError) or "offsets do not follow" in str(caught.value)
