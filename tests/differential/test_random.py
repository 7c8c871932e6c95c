"""Random producers, reads and lookups, the same on both brokers: what no list of cases thought of.

A seed that fails is repeated by its name, `-k "sequences_of_seed_3"`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.differential import Script, Side
from tests.support.tiers import by_tier

from holdfast.wire.api_keys import FETCH, LIST_OFFSETS
from holdfast.wire.batch import Record, build_batch, make_batch
from holdfast.wire.codecs import Codec

NOW = int(time.time() * 1000)
SEEDS = range(by_tier(quick=1, check=2, long=4))
STEPS = 150
SEQUENCE_MAX = 2**31 - 1
Compare = Callable[[Script], None]


def named(name: str, script: Script) -> Script:
    script.__name__ = name
    return script


def sequences_of(seed: int) -> Script:
    """Three producers that repeat, skip, rewind, wrap and change epochs."""

    def script(side: Side) -> None:
        chance = random.Random(seed)
        topic = f"random-sequences-{seed}"
        side.create_topic(topic, 2)
        # Ids far above those a broker has given out by now.
        following = {10_000_000 + number: [0, chance.choice((0, 0, SEQUENCE_MAX - 3))] for number in range(3)}
        for step in range(STEPS):
            producer_id = chance.choice(list(following))
            epoch, sequence = following[producer_id]
            count = chance.randint(1, 3)
            epoch += chance.choice((0,) * 12 + (1, 1, -1, 2))
            drift = chance.choice((0,) * 10 + (-1, -2, -4, -8, 1, 3))
            sequence = 0 if chance.random() < 0.1 else (sequence + drift) % (SEQUENCE_MAX + 1)
            data = make_batch(
                [b"%d" % step] * count,
                timestamp=NOW,
                producer_id=producer_id,
                producer_epoch=max(epoch, 0),
                base_sequence=sequence,
            )
            partition = chance.choice((0, 0, 0, 1))
            answer = side.produce(f"{step}: {epoch} {sequence}+{count}", topic, data, partition=partition)
            outcome = answer.responses[0].partition_responses[0]
            if outcome.error_code == 0:
                following[producer_id] = [max(epoch, 0), (sequence + count) % (SEQUENCE_MAX + 1)]
        side.read_back("partition 0", topic, 0)
        side.read_back("partition 1", topic, 1)

    return named(f"sequences_of_seed_{seed}", script)


def reads_of(seed: int) -> Script:
    """Fetches and lookups at random places of a log of several segments."""

    def script(side: Side) -> None:
        chance = random.Random(seed)
        topic = f"random-reads-{seed}"
        side.create_topic(topic, 1, {"segment.bytes": "1048576", "index.interval.bytes": "2000"})
        moment = NOW - 1_000_000
        for number in range(60):
            records = []
            for index in range(chance.randint(1, 20)):
                moment += chance.randint(-50, 200)
                records.append(
                    Record(index, moment - NOW, None, chance.randbytes(chance.choice((10, 300, 9000))))
                )
            codec = chance.choice(list(Codec))
            side.produce(f"batch {number}", topic, build_batch(records, base_timestamp=NOW, codec=codec))
        end = 1000
        for step in range(STEPS):
            if chance.random() < 0.6:
                fetch_somewhere(side, f"{step}: fetch", topic, chance, end)
            else:
                wanted: dict[str, int] = {"partition_index": 0, "current_leader_epoch": -1}
                wanted["timestamp"] = chance.choice((-1, -2, -3, NOW - chance.randint(0, 1_100_000)))
                side.ask(
                    f"{step}: lookup", LIST_OFFSETS, 7, {"topics": [{"name": topic, "partitions": [wanted]}]}
                )

    return named(f"reads_of_seed_{seed}", script)


def sessions_of(seed: int) -> Script:
    """A fetch session whose partitions come, go and fail while data arrives."""

    def script(side: Side) -> None:
        chance = random.Random(seed)
        topic = f"random-sessions-{seed}"
        side.create_topic(topic, 4)
        session_id = epoch = 0
        for step in range(STEPS // 2):
            if chance.random() < 0.4:
                data = make_batch([chance.randbytes(chance.choice((10, 2000)))], timestamp=NOW)
                side.produce(f"{step}: produce", topic, data, partition=chance.randrange(4))
            wanted = [
                {
                    "partition": partition,
                    "fetch_offset": chance.choice((0, 1, 2, 3, 50)),
                    "partition_max_bytes": 100_000,
                    "current_leader_epoch": chance.choice((-1, -1, -1, 0, 3)),
                }
                for partition in chance.sample(range(5), chance.choice((0, 0, 1, 2)))
            ]
            forgotten = chance.sample(range(5), chance.choice((0, 0, 0, 1, 2)))
            fields = {
                "replica_id": -1,
                "max_wait": 0,
                "min_bytes": 1,
                "max_bytes": chance.choice((1_000, 100_000)),
                "session_id": session_id,
                "session_epoch": chance.choice((epoch,) * 8 + (epoch + 1, 0)) if epoch else 0,
                "topics": [{"topic": topic, "partitions": wanted}] if wanted else [],
                "forgotten_topics_data": [{"topic": topic, "partitions": forgotten}] if forgotten else [],
            }
            answer = side.ask(f"{step}: fetch", FETCH, 12, fields)
            if answer.error_code and chance.random() < 0.5:
                session_id = epoch = 0
            elif answer.error_code == 0 and answer.session_id:
                epoch = epoch + 1 if answer.session_id == session_id else 1
                session_id = answer.session_id

    return named(f"sessions_of_seed_{seed}", script)


def fetch_somewhere(side: Side, label: str, topic: str, chance: random.Random, end: int) -> None:
    part: dict[str, Any] = {
        "partition": 0,
        "fetch_offset": chance.randint(0, end),
        "partition_max_bytes": chance.choice((0, 100, 5_000, 60_000, 500_000, 3_000_000)),
        "current_leader_epoch": -1,
    }
    fields = {
        "replica_id": -1,
        "max_wait": 0,
        "min_bytes": 1,
        "max_bytes": chance.choice((0, 1_000, 40_000, 10_000_000)),
        "isolation_level": chance.choice((0, 1)),
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": topic, "partitions": [part]}],
    }
    side.ask(label, FETCH, chance.choice((4, 7, 11, 12)), fields)


SCRIPTS = tuple(make(seed) for make in (sequences_of, reads_of, sessions_of) for seed in SEEDS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_random_requests_are_answered_as_apache_kafka_answers(script: Script, compare: Compare) -> None:
    compare(script)
