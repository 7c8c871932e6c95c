"""Every durable thing of a pipeline, taken away in every way, at a start and while the pipeline runs.

Records for two batches wait. At a start the thing is taken before the run; while running, between the two batches. The
outcome is one of four words:

- `stops`: the run ends and names the thing. Given back, the next run goes on, and all is as if nothing had happened.
- `next start`: the run goes on, and the next one stops and names the thing.
- `goes on`: every sink holds what it should when both batches are done.
- `not noticed`: a sink lacks rows, or has others, and nobody said so.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from tests.pipeline.absent.world import EARLIER, NOW, OTHER, Worlds

from holdfast.errors import HoldfastError

WAYS: Final = ("missing", "empty", "older", "another's", "unreadable")
MOMENTS: Final = ("a pipeline at a start", "a pipeline while running")
WRITTEN: Final = ("lock", "log.jsonl", "history.jsonl")
STOPS, NEXT, GOES_ON, NOT_NOTICED = "stops", "next start", "goes on", "not noticed"

Take = Callable[[Worlds], None]


@dataclass(frozen=True)
class Thing:
    name: str
    named: tuple[str, ...]
    """Words one of which stands in what is said of it."""
    pattern: str = ""
    """Of a file or directory: below the worlds' files, the newest one that matches."""
    ways: Mapping[str, Take] = field(default_factory=dict)
    """Of anything else: how it is taken."""
    give_back: Take | None = None

    def find(self, root: Path) -> Path | None:
        found = root.glob(self.pattern)
        return max(found, key=lambda path: (path.lstat().st_mtime_ns, path), default=None)


@dataclass(frozen=True)
class Outcome:
    word: str
    detail: str = ""


# ---------------------------------------------------------------------------- trials


def try_out(worlds: Worlds, thing: Thing, way: str, moment: str) -> Outcome | None:
    """None where the trial makes no sense: nothing of the kind is there, or there is no other to put in its place."""
    if not thing.pattern and way not in thing.ways:
        return None
    worlds.restore()
    if moment == MOMENTS[0]:
        give_back = _take(worlds, thing, way)
        if give_back is None:
            return None
        return _at_start(worlds, thing, give_back)
    return _while_running(worlds, thing, way)


def _at_start(worlds: Worlds, thing: Thing, give_back: Take) -> Outcome:
    said = _run(worlds)
    if said is not None:
        return _stopped(worlds, thing, said, give_back)
    found = _differences(worlds)
    return Outcome(NOT_NOTICED, found) if found else Outcome(GOES_ON)


def _while_running(worlds: Worlds, thing: Thing, way: str) -> Outcome | None:
    taken: list[Take | None] = []

    def between(point: str) -> None:
        if point == "done" and not taken:
            taken.append(_take(worlds, thing, way))

    said = _run(worlds, between)
    [give_back] = taken
    if give_back is None:
        return None
    if said is not None:
        return _stopped(worlds, thing, said, give_back if thing.pattern else None)
    found = _differences(worlds)
    said = _run(worlds)
    if said is not None:
        return Outcome(NEXT, said) if _names(thing, said) else Outcome("LOSS", f"the next start says: {said}")
    return Outcome(NOT_NOTICED, found) if found else Outcome(GOES_ON)


def _stopped(worlds: Worlds, thing: Thing, said: str, give_back: Take | None) -> Outcome:
    if not _names(thing, said):
        return Outcome("LOSS", f"it is not named: {said}")
    if give_back is not None:
        give_back(worlds)
        again = _run(worlds) or _differences(worlds)
        if again:
            return Outcome("LOSS", f"stopped by: {said}; given back: {again}")
    return Outcome(STOPS, said)


def _run(worlds: Worlds, faults: Callable[[str], None] = lambda point: None) -> str | None:
    """What the run said when it ended before its time."""
    try:
        worlds.run(faults)
    except HoldfastError as error:
        return str(error)
    return None


def _names(thing: Thing, said: str) -> bool:
    return any(words in said for words in thing.named)


def _differences(worlds: Worlds) -> str:
    found = worlds.contents()
    return "; ".join(
        f"{name}: {each if isinstance(each, str) else f'{(known - each)} are lacking, {(each - known)} are there'}"
        for name, known in worlds.expected.items()
        if (each := found[name]) != known
    )


# ---------------------------------------------------------------------------- files


def _take(worlds: Worlds, thing: Thing, way: str) -> Take | None:
    """How to give back what was taken; None when there was nothing to take, or to put in its place."""
    if not thing.pattern:
        thing.ways[way](worlds)
        return thing.give_back
    path = thing.find(worlds.files)
    if path is None:
        return None
    other: Path | None = None
    if way == "older":
        other = worlds.kept(EARLIER) / path.relative_to(worlds.files)
        if not other.exists() or _is_same(other, path):
            return None
    elif way == "another's":
        other = thing.find(worlds.kept(OTHER))
        if other is None or _is_same(other, path):
            return None
    had = worlds.files.parent / "taken"
    _remove(had)
    _copy(path, had)
    is_directory = path.is_dir()
    _remove(path)
    if other is not None:
        _copy(other, path)
    elif way == "unreadable":
        # To read the one is an I/O error; to open the other is an error, and so it is where a file is only written.
        path.symlink_to(path.name if is_directory or path.name in WRITTEN else "/proc/self/mem")
    elif way == "empty":
        path.mkdir() if is_directory else path.touch()

    def give_back(worlds: Worlds) -> None:
        _remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _copy(had, path)

    return give_back


def _is_same(one: Path, other: Path) -> bool:
    if one.is_file():
        return filecmp.cmp(one, other, shallow=False)
    names = sorted(path.name for path in one.iterdir())
    return names == sorted(path.name for path in other.iterdir()) and all(
        _is_same(one / name, other / name) for name in names
    )


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


# ---------------------------------------------------------------------------- tables


def _database(name: str | None) -> Take:
    return lambda worlds: worlds.drop_database() if name is None else worlds.new_database("live", name)


def _statements(*statements: str) -> Take:
    return lambda worlds: worlds.sql(*statements)


def _rows_of(name: str, table: str) -> Take:
    def take(worlds: Worlds) -> None:
        worlds.replace_rows(name, table)

    return take


def _table(table: str) -> dict[str, Take]:
    return {
        "missing": _statements(f"DROP TABLE {table}"),
        "empty": _statements(f"TRUNCATE {table}"),
        "older": _rows_of(EARLIER, table),
        "another's": _rows_of(OTHER, table),
        "unreadable": _statements(
            f"ALTER TABLE {table} OWNER TO stranger", f"REVOKE ALL ON {table} FROM pipeline"
        ),
    }


# ---------------------------------------------------------------------------- topics


def _delete(topic: str) -> Take:
    def take(worlds: Worlds) -> None:
        admin = worlds.admin()
        admin.delete_topics([topic])[topic].result(30)

    return take


def _delete_records(topic: str) -> Take:
    def take(worlds: Worlds) -> None:
        admin = worlds.admin()
        [done] = admin.delete_records([TopicPartition(topic, 0, -1)]).values()
        done.result(30)

    return take


def _recreate(topic: str) -> Take:
    def take(worlds: Worlds) -> None:
        _delete(topic)(worlds)
        worlds.create_topic(topic)
        producer = Producer({"bootstrap.servers": worlds.broker.bootstrap_servers})
        for number in range(100):
            producer.produce(
                topic, b'{"id": %d, "user": "eve", "amount": 1.0, "at": "2026-03-01T00:00:00Z"}' % number
            )
        assert producer.flush(30) == 0

    return take


def _topic(topic: str) -> dict[str, Take]:
    ways = {"missing": _delete(topic), "empty": _delete_records(topic), "another's": _recreate(topic)}
    if topic.startswith("hf-ledger"):
        del ways["empty"]  # brokers delete no records of topics that are compacted only
    return ways


def _group(offset: int | None) -> Take:
    def take(worlds: Worlds) -> None:
        admin = worlds.admin()
        futures: Mapping[Any, Any]
        if offset is None:
            futures = admin.delete_consumer_groups(["hf-orders"])
        else:
            place = TopicPartition("orders", 0, offset)
            futures = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions("hf-orders", [place])])
        for future in futures.values():
            future.result(30)

    return take


def _cluster(name: str | None) -> Take:
    return lambda worlds: worlds.restore_broker(name)


CLUSTER = _cluster(NOW)

# ---------------------------------------------------------------------------- all of them

THINGS: Final = (
    Thing("the definition", ("orders.yaml",), "orders.yaml"),
    Thing("the home", ("files/home",), "home"),
    Thing("`sinks.json`", ("sinks.json",), "home/sinks.json"),
    Thing("`digest.key`", ("digest.key",), "home/digest.key"),
    Thing("`plan.json`", ("plan.json",), "home/plan.json"),
    Thing("`definition.json`", ("definition.json",), "home/definition.json"),
    Thing("`log.jsonl`", ("log.jsonl",), "home/log.jsonl"),
    Thing("`lock`", ("home/lock",), "home/lock"),
    Thing("`aside/`", ("home/aside",), "home/aside"),
    Thing("a file of it", ("home/aside",), "home/aside/*"),
    Thing("`state/`", ("home/state",), "home/state"),
    Thing("`state/versions/`", ("home/state",), "home/state/versions"),
    Thing("a manifest", ("home/state",), "home/state/versions/*"),
    Thing("`state/data/`", ("home/state",), "home/state/data"),
    Thing("a segment", ("home/state",), "home/state/data/*/*/*"),
    Thing("`state/history.jsonl`", ("history.jsonl",), "home/state/history.jsonl"),
    Thing("a reference table", ("people.csv",), "people.csv"),
    Thing("`lookups/`", ("home/lookups",), "home/lookups"),
    Thing("`pinned.json`", ("pinned.json",), "home/lookups/people/pinned.json"),
    Thing("the pinned version", ("home/lookups",), "home/lookups/people/*.parquet"),
    Thing(
        "the cluster",
        ("127.0.0.1", "'orders'", "'dead-letter'"),
        ways={
            "missing": lambda worlds: worlds.broker.stop(),
            "empty": _cluster(None),
            "older": _cluster(EARLIER),
            "another's": _cluster(OTHER),
        },
        give_back=CLUSTER,
    ),
    Thing("the source topic", ("orders",), ways=_topic("orders"), give_back=CLUSTER),
    Thing(
        "committed offsets of its group",
        ("hf-orders",),
        ways={"missing": _group(None), "older": _group(2)},
        give_back=CLUSTER,
    ),
    Thing("Parquet: the directory", ("'files'", "files/rows"), "rows"),
    Thing("Parquet: the newest batch", ("'files'", "files/rows"), "rows/batch=*2"),
    Thing("Parquet: a batch before it", ("'files'", "files/rows"), "rows/batch=*1"),
    Thing("Parquet: a file of rows", ("'files'", "files/rows"), "rows/batch=*1/part-*"),
    Thing(
        "Parquet: `_ledger.json` of the newest batch", ("'files'", "files/rows"), "rows/batch=*2/_ledger.json"
    ),
    Thing("Parquet: `_ledger.json` of one before", ("'files'", "files/rows"), "rows/batch=*1/_ledger.json"),
    Thing("Parquet: `_schema.json`", ("'files'", "_schema.json"), "rows/batch=*2/_schema.json"),
    Thing("Parquet: `_hf/`", ("'files'", "rows/_hf"), "rows/_hf"),
    Thing("Delta: the directory", ("'table'",), "table"),
    Thing("Delta: `_delta_log/`", ("'table'",), "table/_delta_log"),
    Thing("Delta: the newest commit", ("'table'",), "table/_delta_log/*3.json"),
    Thing("Delta: a commit before it", ("'table'",), "table/_delta_log/*2.json"),
    Thing("Delta: a file of rows", ("'table'",), "table/part-*"),
    Thing("Delta: `_hf/`", ("'table'", "table/_hf"), "table/_hf"),
    Thing(
        "PostgreSQL: the database",
        ("'database'",),
        ways={
            "missing": _database(None),
            "empty": _database("template0"),
            "older": _database(EARLIER),
            "another's": _database(OTHER),
            "unreadable": lambda worlds: worlds.close_database(),
        },
        give_back=_database(NOW),
    ),
    Thing("PostgreSQL: the table", ("'database'",), ways=_table("orders"), give_back=_database(NOW)),
    Thing(
        "PostgreSQL: `holdfast_ledger`",
        ("'database'",),
        ways=_table("holdfast_ledger"),
        give_back=_database(NOW),
    ),
    Thing("Kafka: the topic", ("'topic'",), ways=_topic("known"), give_back=CLUSTER),
    Thing("Kafka: its ledger", ("'topic'",), ways=_topic("hf-ledger-orders--topic"), give_back=CLUSTER),
    Thing("the dead letter topic", ("'dead-letter'",), ways=_topic("orders-dlt"), give_back=CLUSTER),
    Thing("its ledger", ("'dead-letter'",), ways=_topic("hf-ledger-orders--dead-letter"), give_back=CLUSTER),
)
