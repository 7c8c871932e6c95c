"""What every sink of a pipeline holds in the end, by what the guides say: plain Python that has never heard of batches.

Nothing of the product is used here but the words of its definitions.

Games of `test_batches`: a log and a definition over it, drawn from a number.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from typing import Any
from zlib import crc32

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
T0 = 1_767_225_600_000
DELAY_MS, AHEAD_MS, WITHIN_MS, GAP_MS, HOLD_MS, TTL_MS = 8, 40, 12, 5, 15, 30
SIZE_MS, EVERY_MS = 10, 4
COLUMNS = ("id", "k", "v", "x", "at")
CITIES = {"a": "Auckland", "b": "Bern"}
AGGREGATES = {
    "n": "count(*)",
    "total": "sum(v)",
    "low": "min(v) FILTER (WHERE x <> 'p')",
    "mean": "avg(v)",
    "kinds": "count(DISTINCT x)",
    "about": "approx_count_distinct(v)",
    "opening": "first(x, true)",
    "final": "last(x)",
    "best": "max_by(x, v)",
    "all": "collect_list(v)",
    "middle": "percentile(v, 0.5)",
}
STEPS_PY = '''
from datetime import timedelta
from holdfast.pipeline.keyed import each_row

@each_row
def follow(key, row, state):
    """Counts; a timer may go off, set another one, or end the count."""
    n = (state.value or {"n": 0})["n"]
    if row is None:
        if n % 3 == 0:
            state.clear()
        elif n % 3 == 1:
            state.put({"n": n + 1})
            state.set_timer(state.fired + timedelta(milliseconds=9))
        return {"n": -n, "v": None, "mark": state.watermark, "fired": state.fired}
    v = row["v"] or 0
    state.put({"n": n + 1})
    if v % 3 == 0:
        state.set_timer(row["_event_time"] + timedelta(milliseconds=v))
    elif v % 3 == 1:
        state.clear_timer()
    return [{"n": n + 1, "v": row["v"], "mark": state.watermark, "fired": None}]
'''


# ---------------------------------------------------------------------------- the log


@dataclass
class Row:
    """A record at its place, as the model sees it."""

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes | None
    timestamp_ms: int
    hf_id: bytes | None
    columns: dict[str, Any] = field(default_factory=dict)
    is_broken: bool = False
    event_ms: int | None = None
    mark_ms: int | None = None
    """Its own watermark."""

    @property
    def place(self) -> tuple[str, int, int]:
        return self.topic, self.partition, self.offset

    def is_late_for(self, end_ms: int) -> bool:
        return self.mark_ms is not None and end_ms <= self.mark_ms


def time_of(ms: int | None) -> datetime | None:
    return None if ms is None else EPOCH + timedelta(milliseconds=ms)


def with_times(log: Iterable[Row], field: str) -> dict[tuple[str, int], int]:
    """Event times and own watermarks; returns the greatest event of each partition."""
    greatest: dict[tuple[str, int], int] = {}
    for row in log:
        partition = (row.topic, row.partition)
        row.event_ms = (
            None if row.is_broken else row.timestamp_ms if field == "_timestamp" else row.columns["at"]
        )
        row.mark_ms = greatest[partition] - DELAY_MS if partition in greatest else None
        if row.event_ms is not None and row.event_ms <= row.timestamp_ms + AHEAD_MS:
            greatest[partition] = max(greatest.get(partition, row.event_ms), row.event_ms)
    return greatest


# ---------------------------------------------------------------------------- the model


@dataclass
class Model:
    """What every stream of a definition holds in the end, by what the guides say and nothing else."""

    document: Mapping[str, Any]
    log: list[Row]
    streams: dict[str, Any] = field(default_factory=dict)
    dead: list[tuple[str, int, int]] = field(default_factory=list)

    def play(self, partitions: Iterable[tuple[str, int]]) -> None:
        greatest = with_times(self.log, self.document["source"]["event_time"]["field"])
        partitions = list(partitions)
        silent = any(partition not in greatest for partition in partitions)
        self.mark_ms = None if silent else min(greatest.values()) - DELAY_MS
        self.dead = [row.place for row in self.log if row.is_broken]
        rows = sorted((row for row in self.log if not row.is_broken), key=lambda row: row.place)
        for step in self.document["steps"]:
            [(kind, words)] = step.items()
            rows = getattr(self, f"_{kind}")(words, rows) or rows
        self.streams[""] = rows

    def is_over(self, end_ms: int) -> bool:
        return self.mark_ms is not None and end_ms <= self.mark_ms

    def _lookup(self, step: Mapping[str, Any], rows: list[Row]) -> list[Row]:
        kept = []
        for row in rows:
            row.columns["city"] = CITIES.get(row.columns["k"] or "")
            if row.columns["city"] is not None or step["missing"] == "null":
                kept.append(row)
            elif step["missing"] == "quarantine":
                self.dead.append(row.place)
        return kept

    def _dedupe(self, step: Mapping[str, Any], rows: list[Row]) -> list[Row]:
        went_on: dict[Any, list[int]] = defaultdict(list)
        kept, late, copies = [], [], []
        for row in rows:
            if step.get("by") == "hf-id":
                key: Any = row.hf_id
            else:
                parts = [row.key if name == "_key" else row.columns[name] for name in step["key"]]
                key = None if all(part is None for part in parts) else tuple(parts)
            if key is None:
                kept.append(row)
            elif row.event_ms is None or row.is_late_for(row.event_ms + WITHIN_MS):
                late.append(row)
            elif any(abs(row.event_ms - other) < WITHIN_MS for other in went_on[key]):
                copies.append(row)
            else:
                went_on[key].append(row.event_ms)
                kept.append(row)
        self.streams |= {f"{step['name']}.late": late, f"{step['name']}.duplicates": copies}
        return kept

    def _window(self, step: Mapping[str, Any], rows: list[Row]) -> None:
        hold_ms = HOLD_MS if step.get("late") == "correct" else 0
        found: dict[tuple[Any, ...], list[list[Any]]] = defaultdict(list)
        late = []
        for row in rows:
            spans = [] if row.event_ms is None else list(_spans(step, row.event_ms))
            spans = [span for span in spans if not row.is_late_for(span[1] + hold_ms)]
            if not spans:
                late.append(row)
            key = tuple(row.columns[name] for name in step.get("key", ()))
            for start, end in spans:
                found[key].append([start, end, [row]])
        made = []
        for key, pieces in found.items():
            for start, end, members in _merged(pieces, is_session="gap" in step):
                if step.get("emit") == "changes" or self.is_over(end + (GAP_MS if "gap" in step else 0)):
                    named = dict(zip(step.get("key", ()), key, strict=True))
                    made.append(
                        named | {"start": start, "end": end} | _aggregated(step["aggregates"], members)
                    )
        self.streams |= {step["name"]: made, f"{step['name']}.late": late}

    def _keyed(self, step: Mapping[str, Any], rows: list[Row]) -> None:
        code: dict[str, Any] = {}
        exec(STEPS_PY, code)
        states: dict[Any, ModelState] = {}
        made: list[dict[str, Any]] = []
        late = []

        def call(key: Any, row: dict[str, Any] | None, state: ModelState) -> None:
            given = code["follow"]((key,), row, state)
            made.extend({"k": key, **each} for each in (given if isinstance(given, list) else [given]))

        for row in rows:
            key = row.columns["k"]
            if row.event_ms is None or row.is_late_for(row.event_ms + TTL_MS):
                late.append(row)
                continue
            state = states.setdefault(key, ModelState())
            state.passes(row.mark_ms, partial(call, key, None, state))
            state.watermark = time_of(row.mark_ms)
            call(key, {**row.columns, "_event_time": time_of(row.event_ms)}, state)
            known_ms = min(row.event_ms, row.timestamp_ms + AHEAD_MS)
            state.last_ms = known_ms if state.last_ms is None else max(state.last_ms, known_ms)
        for key, state in states.items():
            state.passes(self.mark_ms, partial(call, key, None, state))
        self.streams |= {step["name"]: made, f"{step['name']}.late": late}

    def _join(self, step: Mapping[str, Any], rows: list[Row]) -> None:
        late, sides = [], dict[str, list[Row]]({step["left"]: [], step["right"]: []})
        for row in rows:
            if row.topic not in sides:
                continue
            if row.event_ms is None or row.is_late_for(row.event_ms + WITHIN_MS):
                late.append(row)
            else:
                sides[row.topic].append(row)
        made = []
        for left in sides[step["left"]]:
            met = [
                right
                for right in sides[step["right"]]
                if left.columns["id"] is not None
                and left.columns["id"] == right.columns["id"]
                and abs(left.event_ms - right.event_ms) <= WITHIN_MS
                and left is not right
            ]
            if not met and step["kind"] == "left" and self.is_over(left.event_ms + 2 * WITHIN_MS):
                met = [None]
            made += [
                {
                    "id": left.columns["id"],
                    "lv": left.columns["v"],
                    "rv": right and right.columns["v"],
                    "left": left.place,
                    "right": right and right.place,
                }
                for right in met
            ]
        self.streams |= {step["name"]: made, f"{step['name']}.late": late}


class ModelState:
    """The state of a key, as the guide tells of it."""

    def __init__(self) -> None:
        self.value: dict[str, Any] | None = None
        self.timer: datetime | None = None
        self.fired: datetime | None = None
        self.watermark: datetime | None = None
        self.last_ms: int | None = None

    def put(self, value: dict[str, Any]) -> None:
        self.value = value

    def clear(self) -> None:
        self.value = self.timer = None

    def set_timer(self, at: datetime) -> None:
        self.timer = at

    def clear_timer(self) -> None:
        self.timer = None

    def passes(self, mark_ms: int | None, call: Callable[[], None]) -> None:
        """The watermark comes to this: the timer goes off, or the key is forgotten."""
        if mark_ms is None:
            return
        while self.timer is not None and self.timer <= EPOCH + timedelta(milliseconds=mark_ms):
            self.fired, self.timer = self.timer, None
            self.watermark = self.fired
            call()
            self.fired = None
        if self.timer is None and self.last_ms is not None and self.last_ms + TTL_MS <= mark_ms:
            self.value = self.last_ms = None


def _spans(step: Mapping[str, Any], time_ms: int) -> Iterator[tuple[int, int]]:
    if "gap" in step:
        yield time_ms, time_ms + GAP_MS
        return
    every_ms = EVERY_MS if "every" in step else SIZE_MS
    start = time_ms - time_ms % every_ms
    while start + SIZE_MS > time_ms:
        yield start, start + SIZE_MS
        start -= every_ms


def _merged(pieces: list[list[Any]], is_session: bool) -> list[list[Any]]:
    merged: list[list[Any]] = []
    for start, end, rows in sorted(pieces, key=lambda piece: piece[:2]):
        if merged and (start <= merged[-1][1] if is_session else start == merged[-1][0]):
            merged[-1][1] = max(end, merged[-1][1])
            merged[-1][2] = merged[-1][2] + rows
        else:
            merged.append([start, end, rows])
    return merged


def _aggregated(names: Iterable[str], members: list[Row]) -> dict[str, Any]:
    rows = [row.columns for row in sorted(members, key=lambda row: (row.event_ms, row.place))]
    numbers = [row["v"] for row in rows if row["v"] is not None]
    texts = [row["x"] for row in rows if row["x"] is not None]
    low = [row["v"] for row in rows if row["v"] is not None and (row["x"] or "p") != "p"]
    ordered = sorted(numbers)
    half = len(ordered) // 2
    best = [row for row in rows if row["v"] is not None]
    every = {
        "n": len(rows),
        "total": sum(numbers) if numbers else None,
        "low": min(low, default=None),
        "mean": sum(numbers) / len(numbers) if numbers else None,
        "kinds": len(set(texts)),
        "about": len(set(numbers)),
        "opening": texts[0] if texts else None,
        "final": rows[-1]["x"],
        "best": max(reversed(best), key=lambda row: row["v"])["x"] if best else None,
        "all": numbers,
        "middle": None if not ordered else (ordered[half] + ordered[(len(ordered) - 1) // 2]) / 2,
    }
    return {name: every[name] for name in names}


# ---------------------------------------------------------------------------- what sinks hold


def plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return round((value.replace(tzinfo=value.tzinfo or UTC) - EPOCH) / timedelta(milliseconds=1))
    return value


def as_rows(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted(repr(sorted((name, plain(value)) for name, value in row.items())) for row in rows)


def expected(model: Model, name: str) -> list[str]:
    [words] = [
        each for sink in model.document["sinks"] for each in sink.values() if each["name"] == name
    ] or [{}]
    if name == "dead-letter":
        return as_rows({"place": place} for place in model.dead)
    rows = model.streams[words.get("rows", "")]
    if name == "table":
        return as_rows(upserted(rows, words).values())
    if name == "topic":
        last = {_record_key(row, words, model.document): row for row in rows}
        return as_rows(
            {"key": key, "v": row.columns["v"]} for key, row in last.items() if row.value is not None
        )
    if rows and isinstance(rows[0], Row):
        return as_rows({"place": row.place} | {each: row.columns[each] for each in COLUMNS} for row in rows)
    return as_rows(rows)


def upserted(rows: list[Row], words: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    def rank(row: Row) -> tuple[Any, ...]:
        value = row.columns[words["order_by"]]
        return (value is not None, value or 0, row.place)

    last: dict[Any, Row] = {}
    for row in sorted(rows, key=rank) if "order_by" in words else rows:
        if row.value is None:
            last.pop((json.loads(row.key)["k"],), None)
        elif "v = 0" in words.get("delete_when", "") and row.columns["v"] == 0:
            last.pop((row.columns["k"],), None)
        else:
            last[tuple(row.columns[name] for name in words["key"])] = row
    return {key: {name: row.columns[name] for name in COLUMNS} for key, row in last.items()}


def _record_key(row: Row, words: Mapping[str, Any], document: Mapping[str, Any]) -> bytes:
    if "key" not in words or (row.value is None and "key" not in document["source"]):
        return row.key
    return str(json.loads(row.key)["k"] if row.value is None else row.columns["k"]).encode()


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
                words["order_by"] = random.choice(("v", "at"))
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
