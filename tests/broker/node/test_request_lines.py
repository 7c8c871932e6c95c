"""Lines about requests: who was refused what, and where the time of a slow one went."""

from __future__ import annotations

from holdfast.broker.node.loggers import REQUESTS
from holdfast.saying import Level, Line
from holdfast.testing.bare_node import BareNode
from holdfast.testing.fakes import START_WALL_MS
from holdfast.wire.api_keys import HEARTBEAT, INCREMENTAL_ALTER_CONFIGS, METADATA
from holdfast.wire.batch import Record, build_batch

BATCH = build_batch([Record(0, 0, None, b"a")], base_timestamp=START_WALL_MS)


def lines(bare: BareNode, beginning: str) -> list[Line]:
    return [line for line in map(Line.of, bare.said) if line.startswith(beginning)]


def test_a_refusal_says_who_what_and_where() -> None:
    bare = BareNode()
    client = bare.connect()
    client.create_topic("orders")
    client.produce("orders", b"\x00" * 61 + b"nothing")
    client.ask(METADATA, 12, topics=[{"name": "nowhere"}], allow_auto_topic_creation=False)
    client.ask(HEARTBEAT, 4, group_id="billing", generation_id=1, member_id="m", group_instance_id=None)
    produce, metadata, heartbeat = lines(bare, "refused ")
    assert produce.startswith("refused Produce of ")
    assert " on PLAINTEXT) for orders-0: CORRUPT_MESSAGE: " in produce
    assert " for nowhere: UNKNOWN_TOPIC_OR_PARTITION" in metadata
    assert "refused Heartbeat of " in heartbeat
    assert [line.level for line in (produce, metadata)] == [Level.WARN, Level.DEBUG]
    assert {line.logger for line in (produce, metadata, heartbeat)} == {REQUESTS}
    assert produce.kind == "refused Produce CORRUPT_MESSAGE"


def test_a_refusal_keeps_a_secret() -> None:
    bare = BareNode()
    change = {"name": "ssl.keystore.password", "config_operation": 0, "value": "hunter2"}
    wanted = {"resource_type": 2, "resource_name": "orders", "configs": [change]}
    client = bare.connect()
    client.create_topic("orders")
    client.ask(INCREMENTAL_ALTER_CONFIGS, 1, resources=[wanted], validate_only=False)
    (line,) = lines(bare, "refused IncrementalAlterConfigs")
    assert "ssl.keystore.password" in line
    assert not any("hunter2" in each for each in bare.said)


def test_a_slow_request_says_where_the_time_went() -> None:
    bare = BareNode()
    client = bare.connect()
    client.create_topic("orders")
    bare.advance(1000)
    client.begin_produce("orders", BATCH)
    bare.turn()
    bare.advance(2500)
    bare.settle()
    (line,) = lines(bare, "slow request: ")
    assert " took 2,500 ms: queue 0, append 0, flush 2,500, wait 0" in line
    assert line.level is Level.WARN
    bare.said.clear()
    client.begin_produce("orders", BATCH)
    bare.settle()
    assert not lines(bare, "slow request: ")


def test_waiting_for_data_is_not_slow() -> None:
    bare = BareNode()
    client = bare.connect()
    client.create_topic("orders")
    bare.advance(1000)
    client.begin_fetch("orders", 0, max_wait_ms=5000)
    bare.advance(3000)
    client.produce("orders", BATCH)
    bare.settle()
    assert not lines(bare, "slow request: ")


def test_slow_requests_can_be_left_out() -> None:
    bare = BareNode({"holdfast.slow.request.ms": "0"})
    client = bare.connect()
    client.create_topic("orders")
    bare.advance(1000)
    client.begin_produce("orders", BATCH)
    bare.turn()
    bare.advance(9000)
    bare.settle()
    assert not lines(bare, "slow request: ")
