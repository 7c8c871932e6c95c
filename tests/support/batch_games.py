"""Games of `test_batches`: a log and a definition over it, drawn from a number."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any
from zlib import crc32

from tests.support.batch_model import (
    AGGREGATES,
    AHEAD_MS,
    DELAY_MS,
    EVERY_MS,
    GAP_MS,
    HOLD_MS,
    SIZE_MS,
    T0,
    TTL_MS,
    WITHIN_MS,
    Row,
    time_of,
)


@dataclass
class Game:
    """A log and a definition over it."""

    random: Random
    topics: dict[str, int]
    document: dict[str, Any]
    log: list[Row]
    unproven: set[str]
    """Steps and sinks whose rows follow from batches for all that the definition says: `check` has to refuse them."""
    differs: set[str]
    """Those of them for which this log has keys that lie in several partitions."""


def drawn_game(seed: int, bootstrap: str, database: str | None, tag: str) -> Game:
    draw = Drawing(Random(seed), bootstrap, database, tag)
    draw.steps()
    draw.sinks()
    return draw.game()


class Drawing:
    def __init__(self, random: Random, bootstrap: str, database: str | None, tag: str) -> None:
        self.random, self.bootstrap, self.database, self.tag = random, bootstrap, database, tag
        self.topics = {"t": random.choice((1, 2, 3))} | (
            {"u": random.choice((1, 2))} if self.chance(0.4) else {}
        )
        self.by_key = self.chance(0.75)
        self.is_decoded = self.by_key and self.chance(0.6)
        self.made: list[dict[str, Any]] = []
        self.sunk: list[dict[str, Any]] = []
        self.unproven: set[str] = set()
        self.differs: set[str] = set()

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def keyed_by(self, name: str, key: Iterable[str]) -> None:
        """What this makes depends on the order of rows that are equal in these columns."""
        is_alone = len(self.topics) == 1
        if not is_alone or not ("_key" in key or (self.is_decoded and "k" in key)):
            self.unproven.add(name)
        if not (self.by_key and {"k", "_key"} & set(key)) and not (is_alone and "_key" in key):
            self.differs.add(name)

    def add(self, kind: str, words: dict[str, Any], *streams: str, sink: str = "parquet") -> None:
        self.made.append({kind: words})
        for stream in streams:
            rows = f"{words['name']}{stream}"
            self.sink("parquet" if stream else sink, rows, {"rows": rows})

    def sink(self, kind: str, name: str, words: Mapping[str, Any]) -> None:
        places: Mapping[str, Mapping[str, Any]] = {
            "parquet": {"path": f"out/{name}"},
            "kafka": {"topic": f"{self.tag}-{name}"},
            "postgres": {"url": self.database, "table": f"{self.tag}_{name}"},
        }
        self.sunk.append({kind: {"name": name, **places[kind], **words}})

    # ------------------------------------------------------------------------ steps

    def steps(self) -> None:
        """One or two that remember; more of them cost more and say no more."""
        random, chance = self.random, self.chance
        if chance(0.2):
            words = {"name": "cities", "table": "cities.csv", "on": {"k": "key"}, "columns": "city"}
            self.add("lookup", {**words, "missing": random.choice(("null", "filter", "quarantine"))})
        if chance(0.35):
            self.dedupe()
        match random.choice(
            ("window", "window", "keyed", "join", "join" if "u" in self.topics else "window", "")
        ):
            case "window":
                self.window("totals")
            case "keyed":
                self.keyed()
            case "join":
                self.join()

    def dedupe(self) -> None:
        words: dict[str, Any] = {"name": "once", "within": f"{WITHIN_MS}ms"}
        if self.chance(0.2):
            words["by"] = "hf-id"
        else:
            words["key"] = self.random.choice((["k"], ["k"], ["k", "id"], ["_key"], ["_key", "v"], ["id"]))
            self.keyed_by("once", words["key"])
        self.add("dedupe", words, ".late", ".duplicates")

    def keyed(self) -> None:
        words = {
            "name": "follow", "file": "steps.py", "function": "follow", "key": ["k"], "ttl": f"{TTL_MS}ms",
            "state": {"n": "long"},
            "schema": {"k": "string", "n": "long", "v": "long", "mark": "timestamp", "fired": "timestamp"},
        }  # fmt: skip
        self.add("keyed", words, "", ".late")
        self.keyed_by("follow", ["k"])

    def join(self) -> None:
        words = {
            "name": "pairs", "left": "t", "right": "u" if "u" in self.topics else "t", "on": "id",
            "kind": self.random.choice(("inner", "left")), "within": f"{WITHIN_MS}ms",
            "select": ["l.id", "l.v AS lv", "r.v AS rv"],
        }  # fmt: skip
        self.add("join", words, "", ".late")

    def window(self, name: str) -> None:
        random = self.random
        size, hold = f"{SIZE_MS}ms", f"{HOLD_MS}ms"
        shape = random.choice(
            ({"size": size}, {"size": size, "every": f"{EVERY_MS}ms"}, {"gap": f"{GAP_MS}ms"})
        )
        mode = random.choice(({}, {}, {"emit": "changes"}, {"late": "correct", "correct_within": hold}))
        names = random.sample(list(AGGREGATES), random.randint(1, 6))
        if not self.chance(0.2):
            names = [each for each in names if each != "middle"] or ["n"]  # with it, rows are kept
        words = {"name": name, **shape, **mode, "aggregates": {each: AGGREGATES[each] for each in names}}
        if self.chance(0.8):
            words["key"] = ["k"] if self.chance(0.7) else ["k", "x"]
        self.add("window", words, "", ".late", sink="kafka" if mode else "parquet")

    # ------------------------------------------------------------------------ sinks

    def sinks(self) -> None:
        random = self.random
        self.sink("parquet", "main", {})
        self.tombstones = 0.08
        if self.database is not None and self.chance(0.5):
            words: dict[str, Any] = {"mode": "upsert", "key": random.choice((["k"], ["id", "k"]))}
            if self.is_decoded and words["key"] == ["k"] and self.chance(0.5):
                words["delete_when"] = random.choice(("_tombstone", "_tombstone OR v = 0"))
            else:
                self.tombstones = 0  # they have no key
            if "delete_when" not in words and self.chance(0.5):
                words["order"] = random.choice(("v", "at"))
            else:
                self.keyed_by("table", words["key"])
            self.sink("postgres", "table", words)
        if self.chance(0.25):
            words = random.choice(({}, {"key": "k"}))
            self.sink("kafka", "topic", words)
            self.keyed_by(
                "topic", ["k" if words else "_key"]
            )  # said at the start, where the topic is compacted

    def game(self) -> Game:
        columns = {"id": "long", "k": "string", "v": "long?", "x": "string?", "at": "timestamp?"}
        time = {
            "field": self.random.choice(("at", "at", "_timestamp")),
            "delay": f"{DELAY_MS}ms",
            "ahead": f"{AHEAD_MS}ms",
        }
        source = {
            "topics": [f"{self.tag}-{topic}" for topic in self.topics],
            "bootstrap": self.bootstrap,
            "value": {"format": "json", "fields": columns},
            "event_time": time,
        }
        if self.is_decoded:
            source["key"] = {"format": "json", "fields": {"k": "string"}}
        for step in self.made:
            if "join" in step:
                step["join"] |= {side: f"{self.tag}-{step['join'][side]}" for side in ("left", "right")}
        document = {"pipeline": "p", "source": source, "steps": self.made, "sinks": self.sunk}
        topics = {f"{self.tag}-{topic}": count for topic, count in self.topics.items()}
        log = drawn_log(self.random, topics, self.by_key, self.tombstones)
        return Game(self.random, topics, document, log, self.unproven, self.differs & self.unproven)


def drawn_log(random: Random, topics: Mapping[str, int], by_key: bool, tombstones: float) -> list[Row]:
    """`by_key`: the record's key is `k`, and `k` is at home in one topic; else `k` is anywhere."""
    log: list[Row] = []
    offsets: Counter[tuple[str, int]] = Counter()
    now_ms = T0
    for number in range(random.randint(150, 400)):
        now_ms += random.choice((0, 0, 1, 1, 2, 6))
        topic = random.choice(list(topics))
        k = random.choice("aabbcdefghij")
        if by_key and topic.endswith("u"):
            k = k.upper()
        copied = random.choice(log) if log and random.random() < 0.15 else None
        key = json.dumps({"k": k} if by_key else {"p": random.randrange(9)}).encode()
        event_ms = now_ms + random.choice((0, 0, 0, 1, 3, 8, -1, -4, -9, -14, -25, -60))
        if random.random() < 0.02:
            event_ms += 100  # its clock is wrong
        columns: dict[str, Any] = {
            "id": random.randrange(12),
            "k": k,
            "v": random.choice((None, -3, 0, 1, 2, 7, 40)),
            "x": random.choice((None, "p", "q", "r")),
            "at": None if random.random() < 0.05 else event_ms,
        }
        text = {**columns, "at": columns["at"] and f"{time_of(columns['at']):%FT%T.%fZ}"}
        value: bytes | None = json.dumps(text).encode()
        is_broken = random.random() < 0.03
        if is_broken:
            value, columns = b'{"id": "one"', dict.fromkeys(columns)
        elif random.random() < tombstones:
            value, columns = None, dict.fromkeys(columns)
        hf_id = None if random.random() < 0.1 else str(number).encode()
        timestamp_ms = now_ms
        if copied is not None and copied.topic == topic:  # the same message, sent again
            key, value, columns, hf_id = copied.key, copied.value, dict(copied.columns), copied.hf_id
            timestamp_ms, is_broken = copied.timestamp_ms, copied.is_broken
        partition = crc32(key) % topics[topic]
        row = Row(
            topic, partition, offsets[topic, partition], key, value, timestamp_ms, hf_id, columns, is_broken
        )
        offsets[topic, partition] += 1
        log.append(row)
    return log
