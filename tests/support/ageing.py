"""Topics that grow old: any settings, any headers that clients may send, clocks that jump; what must still be there.

The rule: what was acknowledged goes only by what its topic says. By time it goes when it has been there for
`retention.ms`, or says itself that it is that old; never because a clock jumped for a while or a header was odd. In a
compacted topic it goes when a later record has its key. Nothing of this ends in a defect or in compaction given up.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kio.schema.errors import ErrorCode

from holdfast.config.catalog import TOPIC
from holdfast.config.definitions import INT_MAX, LONG_MAX, Type
from holdfast.testing.bare_node import BareNode
from holdfast.testing.committed_reader import Shown, whole_batches
from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.fakes import ManualClock
from holdfast.wire.batch import (
    DELETE_HORIZON,
    HEADER_SIZE,
    NO_TIMESTAMP,
    Record,
    build_batch,
    iterate_records,
    read_header,
    seal,
)

ALTER, LIST_OFFSETS = 44, 2
DAY_MS = 86_400_000
HOUR_MS = 3_600_000
LIMITED = {
    "cleanup.policy": ("delete", "compact", "compact,delete", ""),
    "compression.type": ("producer", "uncompressed", "zstd", "lz4", "snappy", "gzip"),
    "message.timestamp.type": ("CreateTime", "LogAppendTime"),
    "holdfast.flush": ("group", "os"),
    "min.cleanable.dirty.ratio": ("0", "0.01", "1"),
    "retention.ms": ("-1", "1", str(HOUR_MS), str(DAY_MS), str(LONG_MAX)),
    "retention.bytes": ("-1", "-1", str(LONG_MAX), "1000"),
    "internal.segment.bytes": ("200", "1000", "100000"),
    "max.message.bytes": ("1048588", str(INT_MAX)),
    "message.timestamp.before.max.ms": (str(LONG_MAX), str(DAY_MS)),
    "message.timestamp.after.max.ms": (str(HOUR_MS), str(LONG_MAX)),
    "compression.gzip.level": ("-1", "1", "9"),
    "compression.lz4.level": ("1", "17"),
    "compression.zstd.level": ("-131072", "22"),
    "min.insync.replicas": ("1",),
    "segment.index.bytes": ("4", "16", str(INT_MAX)),
    "index.interval.bytes": ("0", "1", str(INT_MAX)),
    "segment.bytes": ("1048576", str(INT_MAX)),
    "holdfast.write.ahead.bytes": ("0", "1", "16777216"),
}
"""Values to try of settings that have no plain lower bound, or where the bound alone is dull."""
REFUSED_BATCH = frozenset(
    {
        ErrorCode.invalid_timestamp,
        ErrorCode.invalid_record,
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
    }
)
GIVEN_UP = ("defect", "is not compacted", "could not", "failed", "offline")
"""What the broker says when something did not work; here everything must."""


def values_of(name: str) -> tuple[str, ...]:
    """The values of a topic's setting that are tried: its limits, and some between."""
    if name in LIMITED:
        return LIMITED[name]
    setting = TOPIC[name]
    assert setting.rule is not None
    lowest = next(value for value in (0, 1) if setting.rule.accepts(value))
    highest = LONG_MAX if setting.type is Type.LONG else INT_MAX
    return str(lowest), str(lowest + 1), "60000", str(highest)


NAMES = tuple(name for name, setting in TOPIC.items() if setting.acted_on)


FLIPS = (
    ("holdfast.flush", "os", "group"),
    ("cleanup.policy", "delete", "compact"),
    ("cleanup.policy", "compact", "delete"),
    ("message.timestamp.type", "LogAppendTime", "CreateTime"),
    ("internal.segment.bytes", "100000", "200"),
)


class Kept(NamedTuple):
    """A record as it was acknowledged."""

    offset: int
    key: bytes | None
    value: bytes | None
    appended_ms: int
    timestamp: int


@dataclass
class Ageing:
    rng: random.Random
    has_times: bool = True
    """Whether clients put times into their records."""
    records: list[Kept] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    in_force: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """All settings there were, and since when (in real time)."""
    real_ms: int = 0
    """How much time has passed really, whatever the wall clock says."""
    trace: list[str] = field(default_factory=list)
    made: int = 0
    sequence: int = 0
    junk: set[int] = field(default_factory=set)
    last_sent: tuple[bytes, Kept] | None = None

    def __post_init__(self) -> None:
        clock = ManualClock()
        self.node = BareNode(disk=SimulatedDisk(self.rng.randrange(1 << 30), clock), clock=clock)
        self.client = self.node.connect()

    # What may happen

    def create(self, **settings: str) -> None:
        if int(settings.get("min.compaction.lag.ms", 0)) > int(
            settings.get("max.compaction.lag.ms", LONG_MAX)
        ):
            del settings["max.compaction.lag.ms"]
        self.settings = settings
        self.trace.append(f"create {settings}")
        self.in_force.append((0, dict(settings)))
        self.client.create_topic(
            "t", 1, **{name.replace(".", "_"): value for name, value in settings.items()}
        )

    def alter(self, name: str, value: str) -> None:
        resource = {
            "resource_type": 2,
            "resource_name": "t",
            "configs": [{"name": name, "config_operation": 0, "value": value}],
        }
        (answer,) = self.client.ask(ALTER, 1, resources=[resource], validate_only=False).responses
        self.trace.append(f"{name}={value}: {answer.error_code}")
        if not answer.error_code:
            self.settings[name] = value
            self.in_force.append((self.real_ms, dict(self.settings)))

    def produce(self, batch: bytes, records: list[Record], times: list[int]) -> None:
        done = self.client.produce("t", batch)
        header = read_header(batch)
        what = [(record.key, record.value) for record in records]
        outcome = f"{done.error_code.name} {done.base_offset}"
        self.trace.append(f"produce {what} at {times} ({header.max_timestamp}): {outcome}")
        if done.error_code is not ErrorCode.none:
            if done.error_code not in REFUSED_BATCH:
                raise AssertionError(f"a batch was answered {done.error_code.name}")
            return
        is_ours = self.settings.get("message.timestamp.type") == "LogAppendTime"
        wall_ms = self.node.clock.now().wall_ms
        for index, record in enumerate(records):
            self.records.append(
                Kept(
                    done.base_offset + index,
                    record.key,
                    record.value,
                    self.real_ms,
                    wall_ms if is_ours else times[index],
                )
            )

    def produce_something(self) -> None:
        rng = self.rng
        wall_ms = self.node.clock.now().wall_ms
        base = rng.choice(
            (
                wall_ms,
                wall_ms,
                -1,
                -1,
                0,
                1,
                wall_ms - 30 * DAY_MS,
                wall_ms + HOUR_MS // 2,
                wall_ms + 400 * DAY_MS,
            )
        )
        if not self.has_times:
            base = NO_TIMESTAMP
        records = []
        for index in range(rng.choice((1, 1, 2, 5))):
            self.made += 1
            value = b"value %d" % self.made
            key = rng.choice((b"a", b"b", b"c", b"c", None))
            records.append(
                Record(
                    index,
                    rng.choice((0, index)) if base >= 0 else 0,
                    key or rng.choice((b"", None)),
                    rng.choice((value, value + b"x" * 90, None)),
                )
            )
        batch = build_batch(records, base_timestamp=base)
        header = read_header(batch)
        draw = rng.random()
        if draw < 0.5 and base < 0:
            header = header._replace(max_timestamp=0)  # as librdkafka writes it
        elif draw < 0.5:
            header = header._replace(max_timestamp=rng.choice((0, -1, wall_ms)))
        elif draw < 0.6:
            header = header._replace(attributes=header.attributes | DELETE_HORIZON)
        times = [base + record.timestamp_delta for record in records]
        self.produce(seal(header, batch[HEADER_SIZE:]), records, times)

    def produce_junk(self) -> None:
        """A batch whose records make no sense, although their lengths do."""
        body = bytes([2 * 7]) + self.rng.choice(
            (b"\xff" * 7, b"\x00\x00\x00\x02k\x7f\x00", b"\x00\x00\x00\x01\x01\x09\x00")
        )
        header = read_header(
            build_batch([Record(0, 0, b"k", b"")], base_timestamp=self.node.clock.now().wall_ms)
        )
        done = self.client.produce("t", seal(header, body))
        self.trace.append(f"produce junk: {done.error_code.name} {done.base_offset}")
        if done.error_code is ErrorCode.none:
            self.junk.add(done.base_offset)

    def produce_in_sequence(self) -> None:
        """A batch of an idempotent producer, which is sent again later."""
        self.made += 1
        wall_ms = self.node.clock.now().wall_ms
        record = Record(0, 0, b"p", b"value %d" % self.made)
        batch = build_batch(
            [record], base_timestamp=wall_ms, producer_id=7, producer_epoch=0, base_sequence=self.sequence
        )
        before = len(self.records)
        self.produce(batch, [record], [wall_ms])
        if len(self.records) > before:
            self.sequence += 1
            self.last_sent = batch, self.records[-1]

    def send_again(self) -> None:
        """The answer was lost, the producer thinks: within a day of its last batch the broker still knows it."""
        if self.last_sent is None:
            return
        batch, record = self.last_sent
        if self.real_ms - record.appended_ms >= DAY_MS:
            return
        done = self.client.produce("t", batch)
        self.trace.append(f"sent again {record.offset}: {done.error_code.name} {done.base_offset}")
        if done.error_code is ErrorCode.none:
            assert done.base_offset == record.offset, (
                f"{record} was stored a second time at {done.base_offset}"
            )
        else:
            assert done.error_code in REFUSED_BATCH, (
                f"{record} sent again was answered {done.error_code.name}"
            )

    def wait(self, ms: int) -> None:
        """Let time pass, in steps so that every timer has its turn."""
        self.trace.append(f"{ms} ms pass")
        for _ in range(4):
            self.real_ms += ms // 4
            self.node.advance(ms // 4)
            self._work()

    def _work(self) -> None:
        while True:
            self.node.settle()
            if not self.node.worker.run_all():
                break

    def step_wall(self, ms: int) -> None:
        self.trace.append(f"the wall clock steps {ms} ms")
        self.node.clock.step_wall(ms)

    def jump(self) -> None:
        """The clock is wrong for some seconds."""
        ms = self.rng.choice((-30 * DAY_MS, -HOUR_MS, 30 * DAY_MS, 400 * DAY_MS))
        self.step_wall(ms)
        self.wait(self.rng.choice((4_000, 600_000)))
        self.step_wall(-ms)

    def restart(self, how: str = "") -> None:
        how = how or self.rng.choice(("stop", "kill", "lose_power"))
        if how == "lose_power" and any(used.get("holdfast.flush") == "os" for _, used in self.in_force[-1:]):
            how = "kill"
        self.trace.append(how)
        self._check_said()
        again: Callable[[], BareNode] = getattr(self.node, how)
        self.node = again()
        self.client = self.node.connect()

    # What must hold

    def check(self) -> None:
        self._check_said()
        shown = self._shown()
        for record in self.records:
            found = shown.pop(record.offset, None)
            if found is not None:
                assert (found.key, found.value) == (record.key, record.value), f"{record} is {found}"
            else:
                assert self._may_be_gone(record), f"{record} is gone"
        assert not shown, f"{shown} was never acknowledged"
        self.look_up()

    def _shown(self) -> dict[int, Shown]:
        """Everything that is there, by offset; but for records that nobody can read."""
        offset = self._ask_offset(-2).offset
        shown: dict[int, Shown] = {}
        while batches := list(whole_batches(bytes(self.client.fetch("t", offset).records or b""))):
            for header, batch in batches:
                offset = header.next_offset
                if header.base_offset not in self.junk:
                    for record in iterate_records(batch):
                        at = header.base_offset + record.offset_delta
                        shown[at] = Shown(at, record.key, record.value)
        return shown

    def _ask_offset(self, timestamp: int) -> Any:
        partition = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
        topics = [{"name": "t", "partitions": [partition]}]
        answer = self.client.ask(LIST_OFFSETS, 7, replica_id=-1, isolation_level=0, topics=topics)
        return answer.topics[0].partitions[0]

    def look_up(self) -> None:
        for timestamp in (-1, -2, -3, 0, 1, self.node.clock.now().wall_ms, LONG_MAX):
            found = self._ask_offset(timestamp)
            assert found.error_code is ErrorCode.none, f"time {timestamp}: {found}"
            if timestamp >= 0 and found.offset >= 0:
                assert found.timestamp >= timestamp, f"time {timestamp}: {found}"

    def _used_since(self, ms: int) -> list[dict[str, str]]:
        older = [used for since, used in self.in_force if since <= ms]
        return older[-1:] + [used for since, used in self.in_force if since > ms]

    def _may_be_gone(self, record: Kept) -> bool:
        used = self._used_since(record.appended_ms)
        policies = [one.get("cleanup.policy", "delete") for one in used]
        if any("compact" in policy for policy in policies):
            later = any(other.key == record.key and other.offset > record.offset for other in self.records)
            if later or record.value is None or record.key is None:
                return True
        if not any("delete" in policy for policy in policies):
            return False
        if any(int(one.get("retention.bytes", -1)) >= 0 for one in used):
            return True
        keep_ms = min(self._retention_ms(one) for one in used)
        age_ms = self.real_ms - record.appended_ms
        if record.timestamp >= 0:
            age_ms = max(age_ms, self.node.clock.now().wall_ms - record.timestamp)
        return age_ms >= keep_ms

    @staticmethod
    def _retention_ms(used: dict[str, str]) -> int:
        ms = int(used.get("retention.ms", 7 * DAY_MS))
        return ms if ms >= 0 else 1 << 70

    def _check_said(self) -> None:
        for line in self.node.said:
            if any(word in line for word in GIVEN_UP):
                raise AssertionError(line)


def settings_by_chance(rng: random.Random) -> dict[str, str]:
    names = rng.sample(NAMES, rng.randint(0, 5))
    if rng.random() < 0.5:
        names += ["cleanup.policy", "delete.retention.ms", "min.cleanable.dirty.ratio"]
    else:
        names += ["retention.ms"]
    chosen = {name: rng.choice(values_of(name)) for name in names}
    chosen.setdefault("internal.segment.bytes", rng.choice(LIMITED["internal.segment.bytes"]))
    return chosen


def _flip(game: Ageing, settings: dict[str, str]) -> None:
    """One setting is another one now, over records that were taken under the first; and the broker is started anew."""
    name, before, after = game.rng.choice(FLIPS)
    game.create(**{**settings, name: before})
    for _ in range(game.rng.randint(1, 6)):
        game.rng.choice((game.produce_something, game.produce_junk))()
    game.alter(name, after)
    game.node.settle()


def _live(game: Ageing) -> None:
    rng = game.rng
    for _ in range(rng.randint(2, 4)):
        for _ in range(rng.randint(0, 8)):
            produce = game.produce_something
            if rng.random() < 0.3:
                produce = rng.choice((game.produce_in_sequence, game.produce_in_sequence, game.produce_junk))
            produce()
        draw = rng.random()
        if draw < 0.4:
            game.wait(rng.choice((4_000, 600_000, HOUR_MS, 2 * DAY_MS)))
        elif draw < 0.6:
            game.jump()
        elif draw < 0.75:
            name = rng.choice(NAMES)
            game.alter(name, rng.choice(values_of(name)))
        else:
            game.restart()
        game.send_again()
        game.check()


def play(seed: int) -> None:
    """A topic's life; raises what breaks the rule, with the trace."""
    rng = random.Random(seed)
    game = Ageing(rng, has_times=rng.random() < 0.7)
    try:
        settings = settings_by_chance(rng)
        if rng.random() < 0.3:
            _flip(game, settings)
            game.restart("lose_power")
        else:
            game.create(**settings)
        _live(game)
        game.wait(4_000_000)
        game.check()
    except BaseException as error:
        error.add_note("\n".join([*game.trace[-40:], *game.node.said[-5:], f"seed {seed}"]))
        raise
