"""HF306, HF309: a message that always fails, and a last commit that cannot be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.client import Consumer, Message, OffsetsNotCommitted
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


class Working:
    """A consumer of ours that has handled everything and committed nothing."""

    def __init__(self, here: Scene, topic: str, session: Mapping[str, Any], **options: Any) -> None:
        self.handled: list[str] = []
        self.consumer = Consumer(
            here.bootstrap_servers,
            group=topic,
            topics=[topic],
            commit_seconds=3600,
            config={**session, "log_level": 0},
            **options,
        )
        self.running = Background(lambda: self.consumer.run(self._handle))
        wait_until(lambda: self.consumer.handled == COUNT, "everything is handled")

    def _handle(self, message: Message) -> None:
        self.handled.append(value_of(message))


def test_hf309_last_commit_ours_says_so_when_it_cannot_be_stored(here: Scene) -> None:
    topic = filled(here, "hf309-away")
    working = Working(here, topic, SHORT_SESSION, last_commit_seconds=0.1)
    here.crash()
    working.consumer.stop()
    with pytest.raises(OffsetsNotCommitted, match=f"{topic}-0 to {COUNT}"):
        working.running.finish()
