"""HF101 to HF105: what else our producer does where a plain one loses, beside what the lab shows."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.client import Producer, SendTimeout, UndeliveredMessages, UnsafeSetting
from holdfast.testing.risks import Scene, numbers

QUIET: dict[str, Any] = {"log_level": 0, "reconnect.backoff.max.ms": 500}
LIMIT = {"max.message.bytes": "1000"}
TOO_LARGE = "x" * 5000

# ---------------------------------------------------------------- HF101: nobody looks at the result


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


def test_hf102_acks_ours_refuses_to_confirm_early(here: Scene) -> None:
    with pytest.raises(UnsafeSetting, match="HF102"):
        Producer(here.bootstrap_servers, config={"acks": 1})


# ---------------------------------------------------------------- HF103: given up on too early


def test_hf103_ours_refuses_to_give_up_early(here: Scene) -> None:
    with pytest.raises(UnsafeSetting, match="HF103"):
        Producer(here.bootstrap_servers, config={"message.timeout.ms": 300})


# ---------------------------------------------------------------- HF104: what is in memory dies with its process


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


def test_hf105_full_buffer_ours_without_a_spool_takes_no_message_it_has_no_room_for(here: Scene) -> None:
    topic = here.create_topic("hf105-raises")
    with Producer(here.bootstrap_servers, config={**FEW, **QUIET}, send_timeout=0.1) as producer:
        with here.frozen(), pytest.raises(SendTimeout):
            producer.send_many(topic, numbers(0, 30))
        assert producer.flush(60).is_complete
    assert here.read(topic) == {0: numbers(0, 10)}
