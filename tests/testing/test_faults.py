"""Faults of a broker under test: it is killed, frozen, out of disk, slow or in another time, and then is not."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer

from holdfast.errors import UsageError
from holdfast.testing import BrokerProcess, BrokerThread, NotProduced, Topics, faults
from holdfast.testing.broker import BrokerDied

WAIT_SECONDS_MAX = 60.0


@pytest.fixture(params=["process", pytest.param("thread", marks=pytest.mark.check)])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerProcess | BrokerThread]:
    kinds = {"process": lambda: BrokerProcess(tmp_path / "data", faults=True, warm=True)}
    with kinds.get(request.param, lambda: BrokerThread(tmp_path / "data"))() as broker:
        broker.create_topic("orders")
        yield broker


def texts(broker: Topics, topic: str = "orders") -> list[str]:
    return [record.text for record in broker.consume_all(topic)]


def test_a_full_disk_refuses_and_then_takes_again(broker: BrokerProcess | BrokerThread) -> None:
    broker.produce("orders", "before")
    with broker.disk.full():
        with pytest.raises(NotProduced, match="KAFKA_STORAGE_ERROR"):
            broker.produce("orders", "refused", timeout=0.1)
        assert texts(broker) == ["before"]
    broker.produce("orders", "after")
    assert texts(broker) == ["before", "after"]


def test_a_disk_stays_full_over_a_crash(holdfast_broker: BrokerProcess) -> None:
    holdfast_broker.create_topic("orders")
    holdfast_broker.produce("orders", "kept")
    with holdfast_broker.disk.full():
        holdfast_broker.crash()
        with pytest.raises(BrokerDied, match="No space left on device"):
            holdfast_broker.start()
    holdfast_broker.start()
    assert texts(holdfast_broker) == ["kept"]


def test_a_disk_with_some_room_takes_that_much(broker: BrokerProcess | BrokerThread) -> None:
    with broker.disk.full(free_bytes=10_000):
        broker.produce("orders", bytes(5_000))
        with pytest.raises(NotProduced, match="KAFKA_STORAGE_ERROR"):
            broker.produce("orders", bytes(5_000), timeout=0.1)
    assert len(broker.consume_all("orders")) == 1


@pytest.mark.holdfast(mode="thread")
def test_a_slow_disk_takes_its_time_with_every_flush(
    holdfast_broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults, "time", type("", (), {"sleep": slept.append}))
    holdfast_broker.create_topic("orders")
    with holdfast_broker.disk.slow(7.0):
        holdfast_broker.produce("orders", "late")
        assert set(slept) == {7.0}
    slept.clear()
    holdfast_broker.produce("orders", "at once")
    assert slept == []


@pytest.mark.holdfast(settings={"transaction.abort.timed.out.transaction.cleanup.interval.ms": "600000"})
def test_a_transaction_runs_out_when_time_passes(holdfast_broker: BrokerProcess) -> None:
    holdfast_broker.create_topic("orders")
    settings = {"bootstrap.servers": holdfast_broker.bootstrap_servers, "transactional.id": "till"}
    producer = Producer({**settings, "transaction.timeout.ms": 300_000})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce("orders", "never decided")
    producer.flush(60)
    holdfast_broker.produce("orders", "behind it")
    assert holdfast_broker.consume_all("orders", isolation="read_committed") == []
    holdfast_broker.clock.advance(1200)
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not (seen := holdfast_broker.consume_all("orders", isolation="read_committed")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [record.text for record in seen] == ["behind it"]
    with pytest.raises(KafkaException):
        producer.commit_transaction(60)


@pytest.mark.check
def test_what_is_too_old_is_deleted_when_time_passes(broker: BrokerProcess | BrokerThread) -> None:
    broker.create_topic("short", settings={"retention.ms": "3600000"})
    broker.produce("short", "gone in an hour")
    broker.clock.advance(1800)
    assert texts(broker, "short") == ["gone in an hour"]
    broker.clock.advance(3600)
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while texts(broker, "short"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_wall_clock_steps_and_stays_there_over_a_restart(broker: BrokerProcess | BrokerThread) -> None:
    broker.create_topic("stamped", settings={"message.timestamp.type": "LogAppendTime"})
    (first,) = broker.produce("stamped", "now")
    broker.clock.step(-7200)
    broker.restart()
    broker.clock.step(3600)
    (second,) = broker.produce("stamped", "an hour ago")
    assert -3_600_000 <= second.timestamp_ms - first.timestamp_ms < -3_000_000


def test_a_frozen_broker_answers_when_it_is_thawed(holdfast_broker: BrokerProcess) -> None:
    holdfast_broker.create_topic("orders")
    with holdfast_broker.frozen():
        with pytest.raises(NotProduced, match="did not answer in time"):
            holdfast_broker.produce("orders", "unheard", timeout=0.1)
        with pytest.raises(UsageError, match="thaw"):
            holdfast_broker.clock.advance(1)
    holdfast_broker.produce("orders", "heard")
    assert texts(holdfast_broker)[-1] == "heard"
    holdfast_broker.freeze()
    assert holdfast_broker.stop() == 0  # thawed, and ended as asked


def test_what_was_acknowledged_survives_a_crash(holdfast_broker: BrokerProcess) -> None:
    holdfast_broker.create_topic("orders")
    holdfast_broker.produce("orders", "kept")
    with holdfast_broker.frozen():
        holdfast_broker.crash()
    holdfast_broker.restart()
    assert texts(holdfast_broker) == ["kept"]


def test_mistakes_are_named(tmp_path: Path, holdfast_broker: BrokerProcess) -> None:
    plain = BrokerProcess(tmp_path / "plain")
    with pytest.raises(UsageError, match="faults=True"):
        plain.clock.advance(1)
    with pytest.raises(UsageError, match="--metrics"):
        BrokerProcess(tmp_path / "plain", faults=True, arguments=("--metrics", "0"))
    with pytest.raises(UsageError, match=r"step\(-1\)"):
        holdfast_broker.clock.advance(-1)
    for wrong in (holdfast_broker.disk.full(free_bytes=-1), holdfast_broker.disk.slow(-1)):
        with pytest.raises(UsageError, match="-1"), wrong:
            pass
    with pytest.raises(BrokerDied, match=r"no\.such\.setting"):
        BrokerProcess(tmp_path / "wrong", settings={"no.such.setting": "1"}, faults=True, warm=True).start()


def test_it_ends_with_its_test_wherever_it_was_started(tmp_path: Path) -> None:
    """The kernel watches over a broker that the main thread started; one of another thread hears its socket close."""
    broker = BrokerProcess(tmp_path / "data", faults=True, warm=True)
    thread = threading.Thread(target=broker.start)
    thread.start()
    thread.join()
    assert broker._control is not None
    broker._control.close()
    broker._control = None
    assert broker.wait() == -9


@pytest.mark.check
def test_it_runs_cold_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems where nothing is forked."""
    monkeypatch.setattr(BrokerProcess, "open_process", subprocess.Popen)
    with BrokerProcess(tmp_path / "data", faults=True) as broker:
        broker.clock.advance(1)
        broker.create_topic("orders")
        broker.produce("orders", "cold")
        assert texts(broker) == ["cold"]
