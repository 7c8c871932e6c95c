"""A redrive that is stopped or killed goes on where it was, and sends nothing twice."""

from __future__ import annotations

import signal
import subprocess
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from holdfast.client.dead_letter_dialects import Failure, failure_headers

LETTERS = 120


def read_committed(bootstrap: str, topic: str, at_least: int | None = None) -> list[bytes]:
    """What is in the topic, to its end; or as soon as there is so much."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "enable.auto.commit": False,
            "enable.partition.eof": at_least is None,
            "isolation.level": "read_committed",
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes] = []
    while at_least is None or len(found) < at_least:
        message: Any = consumer.poll(30)
        assert message is not None
        if message.error() is not None:
            break
        found.append(message.value())
    consumer.close()
    return found


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.check
def test_an_interrupted_redrive_goes_on(
    run: Callable[..., Any],
    start: Callable[..., subprocess.Popen[bytes]],
    bootstrap_servers: str,
    how: signal.Signals,
) -> None:
    origin = f"orders-{uuid.uuid4().hex[:10]}"
    for topic in (origin, f"{origin}-dlt"):
        assert run("topics", "create", "--topic", topic, "--partitions", "1").returncode == 0
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for number in range(LETTERS):
        headers = failure_headers(Failure(origin, 0, number, 1, "g", "E", "m"))
        producer.produce(f"{origin}-dlt", b"%d" % number, headers=[*headers])
    assert producer.flush(30) == 0
    redrive = ("dlq", "redrive", "--topic", f"{origin}-dlt", "--execute")
    process = start(*redrive, "--rate", "40")
    # The first transaction is committed after about a second; the second is open when the signal comes.
    read_committed(bootstrap_servers, origin, at_least=1)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    assert run(*redrive).returncode == 0
    assert read_committed(bootstrap_servers, origin) == [b"%d" % number for number in range(LETTERS)]
