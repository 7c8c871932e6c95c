"""HF101 to HF107: messages that never arrive, or arrive twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.client import DeliveryFailed, Producer, SendTimeout, UndeliveredMessages, UnsafeSetting
from holdfast.client.spool.refused import RefusedMessages
from holdfast.real import RealFileSystem
from holdfast.testing.apache import free_ports
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import wait_until
from holdfast.testing.risks import Report, Scene, Swallowing, numbers

QUIET: dict[str, Any] = {"log_level": 0, "reconnect.backoff.max.ms": 500}
LIMIT = {"max.message.bytes": "1000"}
TOO_LARGE = "x" * 5000

# ---------------------------------------------------------------- HF101: nobody looks at the result


def test_hf101_unwatched_send_plain_client_loses(here: Scene) -> None:
    topic = here.create_topic("hf101-plain", config=LIMIT)
    producer = here.producer()
    producer.produce(topic, TOO_LARGE)
    # Nothing raises, and nothing is left to be sent.
    assert producer.flush(30) == 0
    assert here.read(topic) == {0: []}


def test_hf101_unwatched_send_ours_says_so_when_it_is_left(here: Scene) -> None:
    topic = here.create_topic("hf101-ours", config=LIMIT)
    with (
        pytest.raises(UndeliveredMessages, match="key b'lost'"),
        Producer(here.bootstrap_servers, config=QUIET) as producer,
    ):
        producer.send(topic, TOO_LARGE, key="lost")


def test_hf101_unwatched_send_ours_fails_the_program_that_forgets_it(here: Scene) -> None:
    topic = here.create_topic("hf101-program", config=LIMIT)
    forgetful = """
import sys
from holdfast.client import Producer
Producer(sys.argv[1], config={"log_level": 0}).send(sys.argv[2], "x" * 5000)
"""
    code, complaint = here.program(forgetful, topic).ends()
    assert code != 0
    assert "1 message had not been delivered" in complaint


# ---------------------------------------------------------------- HF102: confirmed before it is stored


def test_hf102_acknowledged_by_nobody_plain_client_loses(here: Scene) -> None:
    topic = here.create_topic("hf102-plain")
    report = Report()
    producer = here.producer({"acks": 0, "message.timeout.ms": 60_000})
    producer.produce(topic, "before", on_delivery=report)
    wait_until(lambda: producer.poll(0) or here.read(topic)[0], "the first message is stored")
    with here.frozen():
        producer.produce(topic, "lost", on_delivery=report)
        producer.flush(30)
        here.crash()
    here.revive()
    assert report.delivered == ["before", "lost"]
    assert here.read(topic) == {0: ["before"]}


def test_hf102_acknowledged_by_nobody_ours_is_not_told_of_a_delivery(here: Scene) -> None:
    topic = here.create_topic("hf102-ours")
    with Producer(here.bootstrap_servers, config=QUIET) as producer:
        producer.send(topic, "before").wait(30)
        with here.frozen():
            delivery = producer.send(topic, "kept")
            assert producer.flush(0.5).under_way == 1
            here.crash()
        assert not delivery.is_settled
        here.revive()
        delivery.wait(60)
    assert here.read(topic) == {0: ["before", "kept"]}


def test_hf102_acks_ours_refuses_to_confirm_early(here: Scene) -> None:
    with pytest.raises(UnsafeSetting, match="HF102"):
        Producer(here.bootstrap_servers, config={"acks": 1})


# ---------------------------------------------------------------- HF103: given up on too early


def test_hf103_short_time_out_plain_client_loses(here: Scene) -> None:
    topic = here.create_topic("hf103-plain")
    report = Report()
    producer = here.producer({"message.timeout.ms": 300})
    here.crash()
    producer.produce(topic, "lost", on_delivery=report)
    wait_until(lambda: producer.poll(0.1) or report.failed, "the message is given up on")
    here.revive()
    assert here.read(topic) == {0: []}


def test_hf103_short_time_out_ours_waits_for_the_broker(here: Scene) -> None:
    topic = here.create_topic("hf103-ours")
    report = Report()
    impatient = here.producer({"message.timeout.ms": 300})
    with Producer(here.bootstrap_servers, config=QUIET) as producer:
        here.crash()
        delivery = producer.send(topic, "kept")
        impatient.produce(topic, "lost", on_delivery=report)
        wait_until(lambda: impatient.poll(0.1) or report.failed, "another producer has given up")
        here.revive()
        delivery.wait(60)
    assert here.read(topic) == {0: ["kept"]}
    with pytest.raises(UnsafeSetting, match="HF103"):
        Producer(here.bootstrap_servers, config={"message.timeout.ms": 300})


# ---------------------------------------------------------------- HF104: what is in memory dies with its process


def test_hf104_memory_of_a_killed_process_plain_client_loses(here: Scene) -> None:
    topic = here.create_topic("hf104-plain")
    program = here.program(
        """
import sys, threading
from confluent_kafka import Producer
producer = Producer({"bootstrap.servers": sys.argv[1], "linger.ms": 60000, "message.timeout.ms": 600000})
for number in range(20):
    producer.produce(sys.argv[2], str(number))
print("sent", flush=True)
threading.Event().wait()
""",
        topic,
    )
    program.says("sent")
    program.kill()
    assert here.read(topic) == {0: []}


def test_hf104_memory_of_a_killed_process_ours_keeps_what_is_stored(here: Scene, tmp_path: Path) -> None:
    topic = here.create_topic("hf104-ours")
    program = here.program(
        """
import sys, threading
from holdfast.client import Producer
producer = Producer(sys.argv[1], spool=sys.argv[3], config={"linger.ms": 60000, "log_level": 0})
for delivery in [producer.send(sys.argv[2], str(number)) for number in range(20)]:
    delivery.wait_stored()
print("stored", flush=True)
threading.Event().wait()
""",
        topic,
        str(tmp_path),
    )
    program.says("stored")
    program.kill()
    with Producer(here.bootstrap_servers, spool=tmp_path, config=QUIET) as producer:
        assert producer.flush(60).is_complete
    assert here.read(topic) == {0: numbers(0, 20)}


def test_hf104_end_without_flush_plain_client_loses(here: Scene) -> None:
    topic = here.create_topic("hf104-end-plain")
    program = here.program(
        """
import sys
from confluent_kafka import Producer
settings = {"bootstrap.servers": sys.argv[1], "linger.ms": 60000, "message.timeout.ms": 600000}
Producer(settings).produce(sys.argv[2], "lost")
""",
        topic,
    )
    assert program.ends()[0] == 0
    assert here.read(topic) == {0: []}


def test_hf104_end_without_flush_ours_delivers(here: Scene) -> None:
    topic = here.create_topic("hf104-end-ours")
    program = here.program(
        """
import sys
from holdfast.client import Producer
Producer(sys.argv[1], config={"linger.ms": 60000}).send(sys.argv[2], "kept")
""",
        topic,
    )
    assert program.ends()[0] == 0
    assert here.read(topic) == {0: ["kept"]}


# ---------------------------------------------------------------- HF105: the buffer is full

FEW: dict[str, Any] = {"queue.buffering.max.messages": 10}


def test_hf105_full_buffer_plain_client_drops(here: Scene) -> None:
    topic = here.create_topic("hf105-plain")
    producer = here.producer(FEW)
    dropped = 0
    with here.frozen():
        for number in numbers(0, 30):
            try:
                producer.produce(topic, number)
            except BufferError:
                # What programs do that may not wait: count it, and go on.
                dropped += 1
    producer.flush(60)
    assert dropped == 20
    assert here.read(topic) == {0: numbers(0, 10)}


def test_hf105_full_buffer_ours_goes_to_the_spool(here: Scene, tmp_path: Path) -> None:
    topic = here.create_topic("hf105-ours")
    with Producer(here.bootstrap_servers, spool=tmp_path, config={**FEW, **QUIET}) as producer:
        with here.frozen():
            for delivery in producer.send_many(topic, numbers(0, 30)):
                delivery.wait_stored(30)
        assert producer.flush(60).is_complete
    assert here.read(topic) == {0: numbers(0, 30)}


def test_hf105_full_buffer_ours_without_a_spool_takes_no_message_it_has_no_room_for(here: Scene) -> None:
    topic = here.create_topic("hf105-raises")
    with Producer(here.bootstrap_servers, config={**FEW, **QUIET}, send_timeout=0.1) as producer:
        with here.frozen(), pytest.raises(SendTimeout):
            producer.send_many(topic, numbers(0, 30))
        assert producer.flush(60).is_complete
    assert here.read(topic) == {0: numbers(0, 10)}


# ---------------------------------------------------------------- HF106: sent again

PRODUCE = 0


@pytest.fixture
def swallowing(tmp_path: Path) -> Iterator[tuple[Scene, Swallowing]]:
    """A broker whose answers may get lost on the way."""
    between = Swallowing()
    (port,) = free_ports(1)
    settings = {"advertised.listeners": f"PLAINTEXT://{between.address}"}
    with BrokerProcess(str(tmp_path / "broker"), settings=settings, listen=f"127.0.0.1:{port}") as broker:
        between.serve(port)
        yield Scene(broker), between
        between.close()


def test_hf106_lost_answer_plain_client_duplicates_and_reorders(
    swallowing: tuple[Scene, Swallowing],
) -> None:
    here, between = swallowing
    topic = here.create_topic("hf106-plain")
    report = Report()
    producer = here.producer({"enable.idempotence": False, "linger.ms": 0, "batch.num.messages": 1})
    between.swallow(PRODUCE, 2)
    for value in ("a", "b"):
        producer.produce(topic, value, on_delivery=report)
    producer.flush(60)
    assert between.is_done
    assert sorted(report.delivered) == ["a", "b"]
    # What was sent once is there twice, and an "a" behind a "b".
    assert sorted(here.read(topic)[0]) == ["a", "a", "b", "b"]
    assert here.read(topic)[0][:3] == ["a", "b", "a"]


def test_hf106_lost_answer_ours_is_stored_once_and_in_order(
    swallowing: tuple[Scene, Swallowing],
) -> None:
    here, between = swallowing
    topic = here.create_topic("hf106-ours")
    config = {"linger.ms": 0, "batch.num.messages": 1, **QUIET}
    between.swallow(PRODUCE, 2)
    with Producer(here.bootstrap_servers, config=config) as producer:
        producer.send_many(topic, ["a", "b"])
        assert producer.flush(60).is_complete
    assert between.is_done
    assert here.read(topic) == {0: ["a", "b"]}


# ---------------------------------------------------------------- HF107: refused for good


def test_hf107_refused_message_plain_client_swallows(here: Scene) -> None:
    topic = here.create_topic("hf107-plain", config=LIMIT)
    report = Report()
    producer = here.producer()
    for value in ("before", TOO_LARGE, "after"):
        producer.produce(topic, value, on_delivery=report)
        producer.flush(30)
    # The program that logs the error and goes on has the message nowhere.
    assert [value for value, _ in report.failed] == [TOO_LARGE]
    assert here.read(topic) == {0: ["before", "after"]}


def test_hf107_refused_message_ours_keeps_aside_and_says_so(here: Scene, tmp_path: Path) -> None:
    topic = here.create_topic("hf107-ours", config=LIMIT)
    with Producer(here.bootstrap_servers, spool=tmp_path, config=QUIET) as producer:
        deliveries = producer.send_many(topic, ["before", TOO_LARGE, "after"])
        with pytest.raises(DeliveryFailed, match="too large"):
            deliveries[1].wait(60)
        producer.flush(60)
    assert here.read(topic) == {0: ["before", "after"]}
    (spool,) = {path.parent.parent for path in tmp_path.rglob("refused/messages")}
    (kept,) = RefusedMessages(RealFileSystem(), str(spool))
    assert kept.message.value == TOO_LARGE.encode()
