"""HF301, HF302, HF303, HF306, HF309: positions that say more than was done."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import pytest

from holdfast.client import (
    Consumer,
    HandlerFailed,
    Message,
    PositionsNotCommitted,
    RetryPolicy,
    UnsafeSetting,
)
from holdfast.testing.apache import die_with_parent
from holdfast.testing.engines import wait_until
from holdfast.testing.risks import SHORT_SESSION, Background, Scene, numbers, take, value_of

COUNT = 10


def filled(here: Scene, topic: str, partitions: int = 1) -> str:
    here.create_topic(topic, partitions)
    here.write(topic, {partition: numbers(0, COUNT) for partition in range(partitions)})
    return topic


# ---------------------------------------------------------------- HF301: committed by time

PLAIN_BY_TIME = """
import sys, threading
from confluent_kafka import Consumer
bootstrap, topic, group = sys.argv[1:]
consumer = Consumer({
    "bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest",
    "enable.auto.commit": True, "auto.commit.interval.ms": 50,
})
consumer.subscribe([topic])
messages = []
while len(messages) < 10:
    messages += consumer.consume(10 - len(messages), 1)
print("handled", messages[0].value().decode(), flush=True)
threading.Event().wait()
"""
OURS_AT_WORK = """
import sys, threading
from holdfast.client import Consumer
bootstrap, topic, group, workers, order, stuck = sys.argv[1:]
def handle(message):
    if message.value == stuck.encode() and message.partition == 0:
        threading.Event().wait()
    # In one piece: others print too.
    print(f"handled {message.value.decode()}\\n", end="", flush=True)
Consumer(
    bootstrap, group=group, topics=[topic], workers=int(workers), order=order, commit_seconds=0.05
).run(handle)
"""


def test_hf301_commit_by_time_plain_client_loses(here: Scene) -> None:
    topic = filled(here, "hf301-plain")
    program = here.program(PLAIN_BY_TIME, topic, topic)
    program.says("handled 0")
    wait_until(lambda: here.position(topic, topic) == COUNT, "the position is behind what was not handled")
    program.kill()
    here.write(topic, {0: ["later"]})
    # 1 to 9 were never handled, and never will be.
    assert here.next_of(topic, topic) == "later"


def test_hf301_commit_by_time_ours_hands_out_again_what_was_not_finished(here: Scene) -> None:
    topic = filled(here, "hf301-ours")
    program = here.program(OURS_AT_WORK, topic, topic, "1", "partition", "1")
    program.says("handled 0")
    wait_until(lambda: here.position(topic, topic) == 1, "what was handled is committed")
    program.kill()
    assert here.next_of(topic, topic) == "1"
    with pytest.raises(UnsafeSetting, match="HF301"):
        Consumer(here.bootstrap_servers, group=topic, topics=[topic], config={"enable.auto.commit": True})


# ---------------------------------------------------------------- HF302: committed while threads work

PLAIN_THREADS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from confluent_kafka import Consumer
bootstrap, topic, group = sys.argv[1:]
consumer = Consumer({
    "bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False,
})
consumer.subscribe([topic])
def handle(message):
    if message.value() == b"0":
        threading.Event().wait()
    print(f"handled {message.value().decode()}\\n", end="", flush=True)
with ThreadPoolExecutor(4) as pool:
    while True:
        message = consumer.poll(1)
        if message is not None:
            pool.submit(handle, message)
            consumer.commit(message=message, asynchronous=False)
"""


def test_hf302_threads_plain_client_loses(here: Scene) -> None:
    topic = filled(here, "hf302-plain")
    program = here.program(PLAIN_THREADS, topic, topic)
    program.says("handled 9")
    wait_until(lambda: here.position(topic, topic) == COUNT, "everything is committed")
    program.kill()
    here.write(topic, {0: ["later"]})
    # A thread was still at 0.
    assert here.next_of(topic, topic) == "later"


def test_hf302_threads_ours_hold_the_position_back(here: Scene) -> None:
    topic = filled(here, "hf302-ours", partitions=2)
    program = here.program(OURS_AT_WORK, topic, topic, "4", "none", "0")
    program.says("handled 9")
    program.says("handled 9")
    # What is committed now was committed after all of them, but the first of partition 0, were handled.
    here.write(topic, {1: ["last"]})
    wait_until(lambda: here.position(topic, topic, 1) == COUNT + 1, "the other partition is committed")
    assert here.position(topic, topic) <= 0
    program.kill()
    assert here.next_of(topic, topic) == "0"


# ---------------------------------------------------------------- HF303: a later commit overtakes a failure


def test_hf303_failed_message_plain_client_loses(here: Scene) -> None:
    topic = filled(here, "hf303-plain")
    handled: list[str] = []
    consumer = here.consumer(topic)
    consumer.subscribe([topic])
    for message in take(consumer, COUNT):
        try:
            fail_at_3(message, handled)
        except ConnectionError:
            # It is not committed, so it will come again: so the thinking goes.
            continue
        consumer.commit(message=message, asynchronous=False)
    consumer.close()
    here.write(topic, {0: ["later"]})
    assert "3" not in handled
    assert here.next_of(topic, topic) == "later"


def test_hf303_failed_message_ours_comes_again(here: Scene) -> None:
    topic = filled(here, "hf303-ours")
    handled: list[str] = []
    options: dict[str, Any] = {"group": topic, "topics": [topic], "workers": 4, "order": "none"}
    first = Consumer(
        here.bootstrap_servers, retry=RetryPolicy(attempts=1, give_up="stop"), in_flight_max=COUNT, **options
    )
    with pytest.raises(HandlerFailed, match=f"{topic}-0@3"):
        first.run(lambda message: fail_at_3(message, handled))
    assert here.position(topic, topic) <= 3
    second = Consumer(here.bootstrap_servers, **options)

    def handle(message: Message) -> None:
        handled.append(value_of(message))
        if set(handled) == set(numbers(0, COUNT)):
            second.stop()

    second.run(handle)
    assert here.position(topic, topic) == COUNT


def fail_at_3(message: Any, handled: list[str]) -> None:
    """The first time; a second time nothing would be wrong with it."""
    if value_of(message) == "3":
        raise ConnectionError("nobody answers")
    handled.append(value_of(message))


# ---------------------------------------------------------------- HF306: a message that always fails


def poisoned(message: Any) -> None:
    if value_of(message) == "3":
        raise ValueError("cannot be parsed")


def test_hf306_poison_plain_client_skips_it_or_never_gets_past_it(here: Scene) -> None:
    topic = filled(here, "hf306-plain")
    skipping = here.consumer(f"{topic}-skips")
    skipping.subscribe([topic])
    for message in take(skipping, COUNT):
        with suppress(ValueError):
            poisoned(message)
        skipping.commit(message=message, asynchronous=False)
    skipping.close()
    here.write(topic, {0: ["later"]})
    assert here.next_of(f"{topic}-skips", topic) == "later"

    raised = 0
    for _ in range(3):
        # A program that ends at the error, and is started again.
        insisting = here.consumer(f"{topic}-insists")
        insisting.subscribe([topic])
        try:
            while here.position(f"{topic}-insists", topic) < COUNT:
                (message,) = take(insisting, 1)
                poisoned(message)
                insisting.commit(message=message, asynchronous=False)
        except ValueError:
            raised += 1
        insisting.close()
    assert raised == 3
    assert here.next_of(f"{topic}-insists", topic) == "3"


def test_hf306_poison_ours_goes_to_the_dead_letters_and_the_rest_is_handled(here: Scene) -> None:
    topic = filled(here, "hf306-ours")
    here.create_topic(f"{topic}-dlt")
    attempts: list[str] = []
    consumer = Consumer(
        here.bootstrap_servers,
        group=topic,
        topics=[topic],
        retry=RetryPolicy(attempts=3, first_seconds=0.01),
    )

    def handle(message: Message) -> None:
        attempts.append(value_of(message))
        if value_of(message) == "9":
            consumer.stop()
        poisoned(message)

    consumer.run(handle)
    assert attempts == ["0", "1", "2", "3", "3", "3", *numbers(4, COUNT)]
    assert here.read(f"{topic}-dlt") == {0: ["3"]}
    assert here.position(topic, topic) == COUNT


# ---------------------------------------------------------------- HF309: the last commit


LAST_COMMIT: Final = """
import json, os, sys
from confluent_kafka import Consumer
settings, topic, count = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
consumer = Consumer(settings)
consumer.subscribe([topic])
messages = []
while len(messages) < count:
    messages += [each for each in consumer.consume(count, 1) if each.error() is None]
print("handled", flush=True)
sys.stdin.readline()
consumer.commit(message=messages[-1], asynchronous=True)
os._exit(0)
"""
"""A program that ends as soon as it has asked for its last commit."""
EARLIEST: Final = {"auto.offset.reset": "earliest", "enable.auto.commit": False, "log_level": 0}


def test_hf309_last_commit_plain_client_handles_again(here: Scene) -> None:
    topic = filled(here, "hf309-plain")
    settings = {"bootstrap.servers": here.bootstrap_servers, "group.id": topic, **EARLIEST, **SHORT_SESSION}
    program = subprocess.Popen(
        [sys.executable, "-c", LAST_COMMIT, json.dumps(settings), topic, str(COUNT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "handled\n"
    here.crash()
    program.communicate("\n", timeout=60)
    assert program.returncode == 0, "it had no word of it"
    here.revive()
    assert here.next_of(topic, topic) == "0"


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


def test_hf309_last_commit_ours_is_repeated_until_it_is_stored(here: Scene) -> None:
    topic = filled(here, "hf309-ours")
    working = Working(here, topic, {"session.timeout.ms": 20_000})
    here.crash()
    working.consumer.stop()
    here.revive()
    working.running.finish()
    assert here.position(topic, topic) == COUNT


def test_hf309_last_commit_ours_says_so_when_it_cannot_be_stored(here: Scene) -> None:
    topic = filled(here, "hf309-away")
    working = Working(here, topic, SHORT_SESSION, last_commit_seconds=0.1)
    here.crash()
    working.consumer.stop()
    with pytest.raises(PositionsNotCommitted, match=f"{topic}-0 to {COUNT}"):
        working.running.finish()
