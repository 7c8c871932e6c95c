"""Results do not know batches: the same log, cut in other ways and killed at other points, leaves the same rows in
every sink; and they are the rows of a model in plain Python that has never heard of batches.

A game is drawn from a number: topics, partitions and records (copies, late ones, equal times, tombstones, broken ones,
wrong clocks), a definition over them, and the ways to cut. Where rows of a key may lie in several partitions, and a
result follows from which of them is read first, `check` has to warn of the definition; and of no other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import NewTopic
from tests.support.batch_model import CITIES, COLUMNS, STEPS_PY, Game, Model, as_rows, drawn_game, expected
from tests.support.tiers import by_tier

from holdfast.pipeline.definition.loading import Loaded, from_document
from holdfast.pipeline.definition.model import KafkaSink
from holdfast.pipeline.definition.rules_rows import last_of_key
from holdfast.pipeline.engine import planning
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.sinks.building import build_sink
from holdfast.pipeline.state.dedupe import DedupeOperator
from holdfast.pipeline.state.operator import OperatorContext, OperatorResult
from holdfast.testing.postgres import NoPostgres, PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .conftest import Bench

DEFINITIONS = by_tier(quick=60, check=200, long=3000)
GAMES = by_tier(quick=1, check=1, long=40)
WAYS_PLAYED = by_tier(quick=1, check=1, long=2)
KILLS = by_tier(quick=1, check=1, long=3)
WAYS = ("whole", "one by one", "partition after partition", "anyhow", "anyhow")
BATCHES_MAX = 3
FIRST_SEED = by_tier(quick=23, check=23, long=7)
"""One window, and PostgreSQL among its sinks; in the longer run the games from 7 on."""
SEEDS_EACH = 10
"""Far more than there are open games in a row."""


# ---------------------------------------------------------------------------- what is said


def told_by_check(document: Mapping[str, Any], directory: Path) -> set[str]:
    """Names of steps and sinks that are warned of since their rows depend on batches; by Kafka sinks at the start."""
    loaded = from_document(document, directory=str(directory))
    told = set()
    for finding in loaded.warnings:
        if "several partitions" in finding.message:
            [each] = document[str(finding.path[0])][finding.path[1]].values()
            told.add(each["name"])
    for sink in loaded.definition.sinks:
        if isinstance(sink, KafkaSink) and sink.name == "topic" and last_of_key(loaded.definition, sink):
            told.add(sink.name)
    return told


# ---------------------------------------------------------------------------- ways to cut, places to die


def cut_by(way: str, random: Random) -> Callable[[Mapping[Any, int], int], dict[Any, int]]:
    """In place of the engine's own share of a batch for each partition; a handful of batches, since each takes long."""
    batches = 0

    def shares(available: Mapping[Any, int], allowed: int) -> dict[Any, int]:
        nonlocal batches
        batches += 1
        places = sorted(available)
        if way == "whole" or batches > BATCHES_MAX:
            return dict(available)
        if way == "one by one":
            return {random.choice(places): 1}
        if way == "partition after partition":
            return {places[0]: available[places[0]]}
        found = {place: random.randint(0, available[place]) // random.choice((1, 2, 3)) for place in places}
        return {place: share for place, share in found.items() if share} or {places[0]: 1}

    return shares


class Killed(BaseException):
    """The driver is gone: nothing of it may catch this."""


class Killer:
    def __init__(self, random: Random, times: int) -> None:
        self.random, self.times = random, times

    def __call__(self, point: str) -> None:
        if self.times and self.random.random() < 0.07:
            self.times -= 1
            raise Killed(point)


@dataclass
class Play:
    """One run of a game to its end, however often it dies; sinks stay."""

    spark: SparkSession
    loaded: Loaded
    memory: dict[str, Any]

    def run(self, random: Random, kills: int) -> None:
        killer = Killer(random, kills)
        while True:
            try:
                run_pipeline(
                    self.loaded.definition, spark=self.spark, signals=False, faults=killer, build=self.build
                )
                return
            except Killed:
                continue

    def build(self, definition: Any) -> dict[str, Any]:
        real = {each.name: each for each in definition.sinks if each.name in ("table", "topic")}
        return {
            name: build_sink(definition, real[name]) if name in real else sink
            for name, sink in self.memory.items()
        }


# ---------------------------------------------------------------------------- what is there in the end


def place_of(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return row["topic"], row["partition"], row["offset"]


def windows_of(content: Iterable[Mapping[str, Any]], words: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The last that was given of each window, without those that were taken back."""
    last: dict[Any, dict[str, Any]] = {}
    names = [*words.get("key", ()), *words["aggregates"]]
    for row in content:
        made = {name: row[name] for name in names} | {"start": row["window_start"], "end": row["window_end"]}
        if "emit" not in words and "late" not in words:
            assert row["_key"] not in last, "a window was given out twice"
        if row["_tombstone"]:
            del last[row["_key"]]
        else:
            last[row["_key"]] = made
    return list(last.values())


def held(play: Play, document: Mapping[str, Any], name: str, bootstrap: str) -> list[str]:
    [words] = [each for sink in document["sinks"] for each in sink.values() if each["name"] == name] or [{}]
    if name == "table":
        with psycopg.connect(words["url"]) as connection:
            found = connection.execute(f'SELECT {", ".join(COLUMNS)} FROM "{words["table"]}"').fetchall()
        return as_rows(dict(zip(COLUMNS, row, strict=True)) for row in found)
    if name == "topic":
        return as_rows(compacted(bootstrap, words["topic"]))
    content = play.memory[name].content
    steps = {each["name"]: (kind, each) for step in document["steps"] for kind, each in step.items()}
    kind, step = steps.get(words.get("rows"), ("", {}))
    if kind == "window":
        return as_rows(windows_of(content, step))
    if kind == "keyed":
        return as_rows({name: row[name] for name in step["schema"]} for row in content)
    if kind == "join":
        pairs = [
            {name: row[name] for name in ("id", "lv", "rv")}
            | {side: row[f"{side}_hf"] and place_of(row[f"{side}_hf"]) for side in ("left", "right")}
            for row in content
        ]
        return as_rows(pairs)
    names: Iterable[str] = () if name == "dead-letter" else COLUMNS
    return as_rows({"place": place_of(row["_hf"])} | {name: row[name] for name in names} for row in content)


def compacted(bootstrap: str, topic: str) -> list[dict[str, Any]]:
    """The last record of each key, as a compacted topic keeps it."""
    settings = {"bootstrap.servers": bootstrap, "group.id": "held", "enable.partition.eof": True}
    consumer = Consumer(settings)
    last: dict[Any, Any] = {}
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        while (message := consumer.poll(30)) is not None and message.error() is None:
            last[message.key()] = message.value()
        assert message is not None, "the end was not reached"
        error = message.error()
        assert error is not None
        assert error.code() == KafkaError._PARTITION_EOF
    finally:
        consumer.close()
    return [{"key": key, "v": json.loads(value).get("v")} for key, value in last.items() if value is not None]


# ---------------------------------------------------------------------------- the property


@pytest.fixture(scope="module")
def database() -> Iterator[str | None]:
    try:
        with PostgresServer(settings=["fsync=off"]) as server:
            yield server.url
    except NoPostgres:
        if os.environ.get("CI"):
            raise
        yield None


def played(game: Game, way: str, bench: Bench, directory: Path) -> dict[str, list[str]]:
    """What the sinks hold in the end."""
    name = f"{directory.name}-{len(list(directory.iterdir()))}"
    document = json.loads(json.dumps(game.document).replace("out/", f"{directory}/{name}/"))
    document |= {"pipeline": name, "home": str(directory / name)}
    for kind in ("steps", "sinks"):
        for each in document[kind]:
            [words] = each.values()
            if words["name"] in game.unproven and "parquet" not in each:
                words["unordered"] = True
            if kind == "sinks":  # each way has a place of its own
                words |= {
                    place: f"{words[place]}_{name[-1]}" for place in ("table", "topic") if place in words
                }
    loaded = from_document(document, directory=str(directory.parent.parent))
    names = ["dead-letter", *(each["name"] for sink in document["sinks"] for each in sink.values())]
    sink_type = type(bench.sinks["main"])
    play = Play(bench.spark, loaded, {each: sink_type(each) for each in names})
    cut = Random(f"{way} {game.random.random()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "share_out", cut_by(way, cut))
        play.run(cut, kills=0 if way == "whole" else KILLS)
    return {each: held(play, document, each, bench.broker.bootstrap_servers) for each in names}


def check_game(seed: int, bench: Bench, database: str | None, directory: Path, ways: int) -> int:
    """Plays it in some ways, a single one cuts the log; returns in how many."""
    game = drawn_game(seed, bench.broker.bootstrap_servers, database, f"g{seed}")
    assert told_by_check(game.document, directory.parent) == game.unproven
    if game.differs:
        return 0
    produce(game, bench)
    model = Model(game.document, game.log)
    model.play([(topic, number) for topic, count in game.topics.items() for number in range(count)])
    home = directory / f"game-{seed}"
    home.mkdir()
    for way in game.random.sample(WAYS if ways > 1 else WAYS[1:], ways):
        for name, rows in played(game, way, bench, home).items():
            assert rows == expected(model, name), (seed, way, name)
    return ways


def produce(game: Game, bench: Bench) -> None:
    for topic, count in game.topics.items():
        new = NewTopic(topic, count, 1, config={"retention.ms": "-1"})
        bench.admin.create_topics([new])[topic].result(30)
    producer = Producer({"bootstrap.servers": bench.broker.bootstrap_servers})
    for row in game.log:
        headers: list[Any] = [] if row.hf_id is None else [("hf-id", row.hf_id)]
        producer.produce(
            row.topic, row.value, row.key, row.partition, timestamp=row.timestamp_ms, headers=headers
        )
    assert producer.flush(30) == 0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    cities = "".join(f"{key},{city}\n" for key, city in CITIES.items())
    (tmp_path / "cities.csv").write_text(f"key,city\n{cities}")
    (tmp_path / "steps.py").write_text(STEPS_PY)
    return tmp_path


def test_check_says_exactly_what_depends_on_batches(directory: Path) -> None:
    for seed in range(DEFINITIONS):
        game = drawn_game(seed, "localhost:9092", "postgresql://h/d", "g")
        assert told_by_check(game.document, directory) == game.unproven, (seed, game.document)


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + GAMES * SEEDS_EACH, SEEDS_EACH))
def test_results_do_not_know_batches(seed: int, bench: Bench, database: str | None, directory: Path) -> None:
    """Games that `check` would call open, over keys that lie in several partitions, have no one result: next."""
    games = directory / "games"
    games.mkdir()
    assert any(
        check_game(each, bench, database, games, ways=WAYS_PLAYED) for each in range(seed, seed + SEEDS_EACH)
    )


@pytest.mark.long
def test_a_memory_that_each_batch_begins_anew_is_caught(
    bench: Bench, database: str | None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DedupeOperator.run

    def forgetful(self: DedupeOperator, rows: Any, context: OperatorContext) -> OperatorResult:
        return run(self, rows, replace(context, state=replace(context.state, segments=())))

    monkeypatch.setattr(DedupeOperator, "run", forgetful)
    games = directory / "games"
    games.mkdir()
    with pytest.raises(AssertionError):
        for seed in range(FIRST_SEED, FIRST_SEED + 30):
            game = drawn_game(seed, bench.broker.bootstrap_servers, database, "g")
            if any("dedupe" in step for step in game.document["steps"]):
                check_game(seed, bench, database, games, ways=len(WAYS))
