"""The short way of Produce requests against the general one: same answers, same files, whatever is sent."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from tests.support.tiers import examples

from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.wire_client import frame
from holdfast.wire.batch import HEADER_SIZE, Record, build_batch, read_header, seal
from holdfast.wire.codecs import Codec
from holdfast.wire.messages import encode_request

PRODUCE = 0
VERSION_MAX = 13
TOPICS = {
    "plain": {},
    "cached": {"holdfast_flush": "os"},
    "compacted": {"cleanup_policy": "compact"},
    "packed": {"compression_type": "lz4"},
    "stamped": {"message_timestamp_type": "LogAppendTime"},
    "recent": {"message_timestamp_before_max_ms": "1000"},
    "small": {"max_message_bytes": "150"},
    "rolling": {"segment_bytes": "1048576", "segment_ms": "1"},
}


class World:
    """A node with topics of every kind, and three clients."""

    def __init__(self, *, is_short: bool = True) -> None:
        self.node = BareNode()
        self.taken = 0
        client = self.node.connect()
        for name, configs in TOPICS.items():
            client.create_topic(name, 2, **configs)
        self.clients = [self.node.connect() for _ in range(3)]
        lane = self.node.node.usual_produce
        begin = lane.begin

        def counted(*arguments: Any) -> bool:
            took = is_short and begin(*arguments)
            self.taken += took
            return took

        lane.begin = counted  # type: ignore[assignment]

    @property
    def told(self) -> list[tuple[list[bytes], list[str]]]:
        return [(client.frames, client.closed) for client in self.clients]

    @property
    def stored(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for hosted in self.node.node.partitions:
            log = hosted.log
            content = b"".join(each.file.pread(each.size, 0) for each in log.segments)
            found[hosted.name] = (
                content,
                [each.base_offset for each in log.segments],
                log.end_offset,
                log.producers.to_snapshot(),
                hosted.offsets.high_watermark,
            )
        return found


class Send(NamedTuple):
    client: int
    version: int
    topic: str
    partition: int
    acks: int
    batch: bytes
    damage: tuple[int, int] | None
    """Where in the frame a byte is changed, and by what."""
    cut: int
    """Bytes that are missing at the end, or, below zero, that follow it."""
    transactional_id: str | None

    def to(self, world: World) -> None:
        client = world.clients[self.client]
        if client.closed:
            return
        version = min(self.version, VERSION_MAX)
        topic = {"name": self.topic, "topic_id": topic_id(world, self.topic)}
        data = {"index": self.partition, "records": self.batch}
        body = encode_request(
            PRODUCE,
            version,
            {
                "transactional_id": self.transactional_id,
                "acks": self.acks,
                "timeout": 1000,
                "topic_data": [{**topic, "partition_data": [data]}],
            },
        )
        raw = bytearray(frame(PRODUCE, self.version, body, correlation_id=9)[4:])
        if self.damage is not None:
            raw[self.damage[0] % len(raw)] ^= self.damage[1]
        raw = raw[: len(raw) - self.cut] if self.cut >= 0 else raw + bytes(-self.cut)
        client.send(bytes(raw))


class Pass(NamedTuple):
    ms: int

    def to(self, world: World) -> None:
        world.node.advance(self.ms)


class Settle(NamedTuple):
    def to(self, world: World) -> None:
        world.node.settle()


def topic_id(world: World, name: str) -> Any:
    topic = world.node.node.metadata.image.topic(name)
    return topic.topic_id if topic is not None else None


def batch_of(
    count: int = 1,
    *,
    producer: tuple[int, int, int] = (-1, -1, -1),
    age_ms: int = 0,
    codec: Codec = Codec.NONE,
    key: bytes | None = b"k",
    size: int = 20,
) -> bytes:
    producer_id, epoch, sequence = producer
    records = [Record(at, 0, key, b"v" * size) for at in range(count)]
    return build_batch(
        records,
        base_timestamp=BareNode().clock.now().wall_ms - age_ms,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        codec=codec,
    )


def miscounted(records: int, *, count: int, delta: int | None = None) -> bytes:
    """A batch whose checksum holds, whatever its header counts."""
    batch = batch_of(records)
    header = read_header(batch)._replace(
        records_count=count, last_offset_delta=count - 1 if delta is None else delta
    )
    return bytes(seal(header, batch[HEADER_SIZE:]))


def marked(attributes: int) -> bytes:
    batch = batch_of()
    return bytes(seal(read_header(batch)._replace(attributes=attributes), batch[HEADER_SIZE:]))


def timed(base_timestamp: int) -> bytes:
    """A batch whose header tells a time of its first record that does not fit its greatest one."""
    batch = batch_of()
    return bytes(seal(read_header(batch)._replace(base_timestamp=base_timestamp), batch[HEADER_SIZE:]))


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    producer = draw(
        st.sampled_from([(-1, -1, -1)]) | st.tuples(st.integers(1, 2), st.integers(-1, 1), st.integers(-1, 4))
    )
    return batch_of(
        draw(st.integers(1, 7)),
        producer=producer,
        age_ms=draw(st.sampled_from([0, 0, 0, 5000, 120_000, -7_200_000])),
        codec=draw(st.sampled_from([Codec.NONE, Codec.NONE, Codec.NONE, Codec.LZ4])),
        key=draw(st.sampled_from([b"k", b"k", None])),
        size=draw(st.sampled_from([0, 20, 20, 70, 200])),
    )


sends = st.builds(
    Send,
    client=st.integers(0, 2),
    version=st.sampled_from([8, 9, 10, 12, 13]),
    topic=st.sampled_from([*TOPICS, "plain", "cached", "missing"]),
    partition=st.sampled_from([0, 0, 1, 7]),
    acks=st.sampled_from([-1, -1, -1, 1, 0, 5]),
    batch=batches(),
    damage=st.none() | st.none() | st.tuples(st.integers(0, 400), st.integers(1, 255)),
    cut=st.sampled_from([0, 0, 0, 0, 1, 3, 20, -2]),
    transactional_id=st.sampled_from([None, None, None, None, "t"]),
)
steps = st.lists(
    st.one_of(sends, sends, sends, st.builds(Settle), st.builds(Pass, st.sampled_from([1, 2, 5000]))),
    max_size=25,
)


@settings(max_examples=examples(100), deadline=None)
@given(steps)
def test_both_ways_answer_and_store_the_same(script: list[Send | Settle | Pass]) -> None:
    short, general = World(), World(is_short=False)
    for step in [*script, Settle()]:
        for world in (short, general):
            step.to(world)
        assert short.told == general.told
    assert short.stored == general.stored


def damaged(batch: bytes) -> bytes:
    return batch[:-1] + bytes((batch[-1] ^ 1,))


USUAL = Send(0, 12, "plain", 0, -1, batch_of(), None, 0, None)
UNUSUAL = {
    "an old version": USUAL._replace(version=8),
    "a version to come": USUAL._replace(version=14),
    "no answer wanted": USUAL._replace(acks=0),
    "acks that do not exist": USUAL._replace(acks=2),
    "a transactional id": USUAL._replace(transactional_id="t"),
    "no such topic": USUAL._replace(topic="missing"),
    "no such topic id": USUAL._replace(topic="missing", version=13),
    "no such partition": USUAL._replace(partition=2),
    "an internal topic": USUAL._replace(topic="__consumer_offsets"),
    "a compacted topic": USUAL._replace(topic="compacted", batch=batch_of(key=None)),
    "a topic with its own compression": USUAL._replace(topic="packed"),
    "a topic with the broker's time": USUAL._replace(topic="stamped"),
    "a topic that bounds the past": USUAL._replace(topic="recent", batch=batch_of(age_ms=5000)),
    "a time to come": USUAL._replace(batch=batch_of(age_ms=-7_200_000)),
    "a first record's time to come": USUAL._replace(batch=timed(2**63 - 1)),
    "a first record's time before all times": USUAL._replace(batch=timed(-(2**63))),
    "an old time": USUAL._replace(batch=batch_of(age_ms=120_000)),
    "a batch too large": USUAL._replace(topic="small", batch=batch_of(size=200)),
    "a compressed batch": USUAL._replace(batch=batch_of(codec=Codec.LZ4)),
    "a wrong checksum": USUAL._replace(batch=damaged(batch_of())),
    "a wrong base offset": USUAL._replace(batch=b"\0" * 7 + b"\x01" + batch_of()[8:]),
    "an old format": USUAL._replace(batch=batch_of()[:16] + b"\x01" + batch_of()[17:]),
    "a batch cut short": USUAL._replace(batch=batch_of()[:-1]),
    "two batches": USUAL._replace(batch=batch_of() * 2),
    "no batch": USUAL._replace(batch=b""),
    "records that are not counted": USUAL._replace(batch=miscounted(2, count=1)),
    "records that are missing": USUAL._replace(batch=miscounted(1, count=2)),
    "no records": USUAL._replace(batch=miscounted(1, count=0)),
    "a delta that does not fit": USUAL._replace(batch=miscounted(2, count=2, delta=4)),
    "a control batch": USUAL._replace(batch=marked(0x20)),
    "a claim to the broker's time": USUAL._replace(batch=marked(0x08)),
    "a transactional batch": USUAL._replace(batch=marked(0x10)),
    "a producer without an epoch": USUAL._replace(batch=batch_of(producer=(5, -1, 0))),
    "a producer without a sequence": USUAL._replace(batch=batch_of(producer=(5, 0, -1))),
    "a frame cut short": USUAL._replace(cut=1),
    "bytes behind the frame": USUAL._replace(cut=-2),
}


LIMITS = {
    "base_offset": (-1, -(2**63), 2**63 - 1),
    "leader_epoch": (-2, -(2**31), 2**31 - 1),
    "attributes": (0x40, 0x80, 0x7F00, -32768, -1),
    "last_offset_delta": (-(2**31), 2**31 - 1),
    "records_count": (-(2**31), 2**31 - 1),
    "base_timestamp": (-(2**63), -2, -1, 0, 2**63 - 1),
    "max_timestamp": (-(2**63), -2, -1, 0, 2**63 - 1),
    "producer_id": (-(2**63), -2, 0, 2**63 - 1),
    "producer_epoch": (-(2**15), -2, 0, 2**15 - 1),
    "base_sequence": (-(2**31), -2, 0, 2**31 - 1),
}
"""Values of a header's fields that a client can write, with a checksum that holds."""


def test_any_header_is_judged_the_same_by_both_ways_and_what_is_stored_is_found_again() -> None:
    short, general = World(), World(is_short=False)
    for field, values in LIMITS.items():
        for value in values:
            for producer in ((-1, -1, -1), (hash((field, value)) & 0xFFFF, 3, 0)):
                batch = batch_of(2, producer=producer)
                odd = bytes(seal(read_header(batch)._replace(**{field: value}), batch[HEADER_SIZE:]))
                for world in (short, general):
                    USUAL._replace(batch=odd).to(world)
                    world.node.settle()
                assert short.told == general.told, (field, value)
    assert short.stored == general.stored
    end_offset = short.node.hosted("plain").log.end_offset
    assert end_offset > 2 * len(LIMITS)
    again = short.node.lose_power()
    assert again.hosted("plain").log.end_offset == end_offset
    assert len(again.connect().fetch("plain", 0).records) == short.node.hosted("plain").log.size


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_not_usual_is_left_to_the_general_way(name: str) -> None:
    short, general = World(), World(is_short=False)
    for world in (short, general):
        UNUSUAL[name].to(world)
        world.node.settle()
    assert (short.taken, short.told, short.stored) == (0, general.told, general.stored)


@pytest.mark.parametrize("sequence", [0, 1, 2, 3, 9])
def test_sequences_are_followed_the_same_way(sequence: int) -> None:
    short, general = World(), World(is_short=False)
    for world in (short, general):
        for number in (0, 1, 2, sequence):
            USUAL._replace(batch=batch_of(producer=(5, 0, number))).to(world)
            world.node.settle()
    assert short.taken == (4 if sequence == 3 else 3)
    assert (short.told, short.stored) == (general.told, general.stored)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> BareClient:
    return world.clients[0]


@pytest.mark.parametrize("version", [9, 12, 13])
@pytest.mark.parametrize("topic", ["plain", "cached", "rolling"])
@pytest.mark.parametrize("count", [1, 5, 600])
def test_a_usual_request_goes_the_short_way(version: int, topic: str, count: int, world: World) -> None:
    Send(0, version, topic, 1, -1, batch_of(count), None, 0, None).to(world)
    world.node.settle()
    assert world.taken == 1
    assert world.node.hosted(topic, 1).log.end_offset == count
    assert len(world.clients[0].frames) == 1


@pytest.mark.parametrize("topics", [{"plain": [0, 1]}, {"plain": [0], "cached": [0]}, {}, {"plain": []}])
def test_several_batches_go_the_general_way(topics: dict[str, list[int]], world: World) -> None:
    client = world.clients[0]
    data = [
        {"name": name, "partition_data": [{"index": index, "records": batch_of()} for index in indexes]}
        for name, indexes in topics.items()
    ]
    answer = client.ask(0, 9, transactional_id=None, acks=-1, timeout=1000, topic_data=data)
    found = [(each.name, part.base_offset) for each in answer.responses for part in each.partition_responses]
    assert found == [(name, 0) for name, indexes in topics.items() for _ in indexes]
    assert world.taken == 0


def test_answers_keep_the_order_of_the_requests(world: World, client: BareClient) -> None:
    waiting = client.begin_produce("plain", batch_of())
    at_once = client.begin_produce("cached", batch_of())
    assert not client.frames
    world.node.settle()
    assert (client.correlation_ids, world.taken) == ([waiting, at_once], 2)


def test_nothing_is_answered_before_its_flush(world: World, client: BareClient) -> None:
    client.begin_produce("plain", batch_of())
    world.node.turn()
    assert (world.taken, client.frames) == (1, [])
    world.node.flusher.run_all()
    assert len(client.frames) == 1


def test_the_time_out_answers_what_is_not_flushed(world: World, client: BareClient) -> None:
    asked = client.begin_produce("plain", batch_of())
    world.node.advance(31_000)
    outcome = client.answer(asked).responses[0].partition_responses[0]
    assert (world.taken, outcome.error_code) == (1, ErrorCode.request_timed_out)
    world.node.settle()
    assert not client.frames


def test_a_changed_setting_counts_at_once(world: World, client: BareClient) -> None:
    client.begin_produce("plain", batch_of())
    world.node.settle()
    change = {"name": "max.message.bytes", "config_operation": 0, "value": "70"}
    resource = {"resource_type": 2, "resource_name": "plain", "configs": [change]}
    client.ask(44, 1, resources=[resource], validate_only=False)
    assert client.produce("plain", batch_of()).error_code == ErrorCode.message_too_large
    assert world.taken == 1


def test_a_deleted_topic_gets_nothing_more(world: World, client: BareClient) -> None:
    client.produce("plain", batch_of())
    client.ask(20, 5, topic_names=["plain"], timeout=1000)
    assert client.produce("plain", batch_of()).error_code == ErrorCode.unknown_topic_or_partition
    client.create_topic("plain", 2)
    assert client.produce("plain", batch_of()).base_offset == 0
    assert world.taken == 2


def test_every_request_is_counted_once_with_the_time_it_was_parked() -> None:
    bare = BareNode()
    batch = build_batch([Record(0, 0, None, b"a")], base_timestamp=bare.clock.now().wall_ms)
    alone, pipelining = bare.connect(), bare.connect()
    alone.create_topic("plain")
    bare.advance(1000)
    alone.begin_produce("plain", batch)
    for acks in (-1, 1, -1):
        pipelining.begin_produce("plain", batch, acks=acks)
    bare.turn()
    bare.clock.advance(20)
    bare.settle()
    alone.begin_produce("plain", batch, acks=1)
    bare.settle()
    meter = bare.node.meter
    meter.add_up()
    stats = meter.stats_of(PRODUCE, 9)
    assert meter.topics["plain"].produces == stats.answered == 5
    assert (stats.flush_ns, stats.wait_ns) == (3 * 20_000_000, 20_000_000)
    assert stats.total_ns == 4 * 20_000_000
