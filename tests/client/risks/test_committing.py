"""HF306, HF309: a message that always fails, and a last commit that cannot be stored."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.client import Consumer, OffsetsNotCommitted
from holdfast.testing.engines import wait_until
from holdfast.testing.risks import SHORT_SESSION, Background, Scene, numbers, take, value_of

COUNT = 10


def filled(here: Scene, topic: str, partitions: int = 1) -> str:
    here.create_topic(topic, partitions)
    here.write(topic, {partition: numbers(0, COUNT) for partition in range(partitions)})
    return topic


# ---------------------------------------------------------------- HF306: a message that always fails


def poisoned(message: Any) -> None:
    if value_of(message) == "3":
        raise ValueError("cannot be parsed")


def test_hf306_poison_plain_client_that_insists_never_gets_past_it(here: Scene) -> None:
    topic = filled(here, "hf306-plain")
    raised = 0
    for _ in range(3):
        # A program that ends at the error, and is started again.
        insisting = here.consumer(f"{topic}-insists")
        insisting.subscribe([topic])
        try:
            while here.committed_offset(f"{topic}-insists", topic) < COUNT:
                (message,) = take(insisting, 1)
                poisoned(message)
                insisting.commit(message=message, asynchronous=False)
        except ValueError:
            raised += 1
        insisting.close()
    assert raised == 3
    assert here.next_of(f"{topic}-insists", topic) == "3"


# ---------------------------------------------------------------- HF309: the last commit


def test_hf309_last_commit_ours_says_so_when_it_cannot_be_stored(here: Scene) -> None:
    topic = filled(here, "hf309-away")
    handled: list[str] = []
    consumer = Consumer(
        here.bootstrap_servers,
        group=topic,
        topics=[topic],
        commit_seconds=3600,
        last_commit_seconds=0.1,
        config={**SHORT_SESSION, "log_level": 0},
    )
    running = Background(lambda: consumer.run(lambda message: handled.append(value_of(message))))
    # A member that the machine kept from its heartbeats is given everything again.
    wait_until(
        lambda: consumer.handled >= COUNT and handled[-1] == numbers(0, COUNT)[-1], "everything is handled"
    )
    here.crash()
    consumer.stop()
    with pytest.raises(OffsetsNotCommitted, match=f"{topic}-0 to {COUNT}"):
        running.finish()
