"""HF205, HF206, HF210, HF211, HF212, HF411: what power and time take, on a disk and a clock of our own.

The whole broker runs in this process, on a disk that forgets what was not flushed and a clock that is moved: hours
pass in milliseconds, and one seed decides what the power failure leaves. What the requests say is what real clients
would be told.

HF205 once more: a real broker process, and a file system under it that forgets what was not flushed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from holdfast.lab.checking import LOST, MOVED_BACK
from holdfast.lab.engines import NotOnThisMachine
from holdfast.lab.experiment import Claim, Experiment, Lab
from holdfast.lab.experiments.hf2xx_timed import (
    LONG_MS,
    SHORT_MS,
    hf206_timed,
    hf210_timed,
    hf211_timed,
    hf411_timed,
)
from holdfast.testing.bare_clients import BareMember, TransactionalProducer
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.committed_reader import read_answer
from holdfast.testing.disk import Fault, SimulatedDisk
from holdfast.testing.engines import Engine, NotComeAbout
from holdfast.testing.fakes import ManualClock
from holdfast.testing.forgetful_mount import ForgetfulMount, why_not
from holdfast.wire.batch import Record, build_batch

FETCH: Final = 1
HOUR_MS: Final = 3_600_000
WEEK_MS: Final = 168 * HOUR_MS
WEEK_MINUTES: Final = 168 * 60
TICK_MS: Final = 60_000
"""Time is passed in steps of this, so that everything that is due comes in its turn."""
TOPIC: Final = "orders"
GROUP: Final = "readers"
SMALL_SEGMENTS: Final = {"segment_ms": "60000", "internal_segment_bytes": "200", "file_delete_delay_ms": "0"}
"""What is written in a minute is a segment of its own: whole segments are removed and compacted."""


class Simulated:
    """A broker in this process, and what its clients see, as events."""

    def __init__(self, lab: Lab, settings: Mapping[str, str] | None = None) -> None:
        self.lab = lab
        clock = ManualClock()
        disk = SimulatedDisk(lab.seed, clock)
        disk.prepare("/data")
        self.node = BareNode(settings, disk=disk, clock=clock)
        self.client: BareClient = self.node.connect()

    def create(self, partitions: int = 1, configs: Mapping[str, str] | None = None) -> None:
        self.client.create_topic(TOPIC, partitions, **dict(configs or {}))

    def pass_time(self, ms: int) -> None:
        end_ms = self.node.clock.now().monotonic_ms + ms
        while (now_ms := self.node.clock.now().monotonic_ms) < end_ms:
            self.node.advance(min(TICK_MS, end_ms - now_ms))
            self._settle()

    def _settle(self) -> None:
        self.node.settle()
        while self.node.worker.run_one():
            self.node.settle()

    def lose_power(self, meanwhile: Callable[[SimulatedDisk], None] | None = None) -> None:
        self.node = self.node.lose_power(meanwhile)
        self.client = self.node.connect()

    # Clients

    def send(self, message: str, partition: int = 0, key: str | None = None) -> None:
        self.lab.sends("program", TOPIC, [message])
        record = Record(0, 0, None if key is None else key.encode(), message.encode())
        batch = build_batch([record], base_timestamp=self.node.clock.now().wall_ms)
        answer = self.client.produce(TOPIC, batch, partition)
        if answer.error_code:
            self.lab.note("fail", "program", id=message, error=answer.error_code.name)
            return
        place = {"topic": TOPIC, "partition": partition, "offset": answer.base_offset}
        self.lab.note("ack", "program", id=message, **place)

    def fetch(self, offset: int, partition: int = 0) -> tuple[int, list[tuple[int, str]]]:
        """What a reader of committed messages is given from an offset on, and where it is then.

        −1 and nothing when the offset is out of range.
        """
        found: list[tuple[int, str]] = []
        while True:
            wanted = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
            answer = self.client.ask(
                FETCH,
                12,
                isolation_level=1,
                max_wait=0,
                min_bytes=0,
                max_bytes=1 << 20,
                session_epoch=-1,
                topics=[{"topic": TOPIC, "partitions": [wanted]}],
            )
            (part,) = answer.responses[0].partitions
            if part.error_code:
                return -1, []
            aborted = [(each.producer_id, each.first_offset) for each in part.aborted_transactions or ()]
            read = read_answer(bytes(part.records or b""), offset, aborted)
            found += [(each.offset, (each.value or b"").decode()) for each in read.records]
            if read.next_offset <= offset:
                return offset, found
            offset = read.next_offset

    def scan(self, partitions: int = 1, *, compacted: bool = False) -> None:
        for partition in range(partitions):
            start = self.start_of(partition)
            for offset, message in self.fetch(start, partition)[1]:
                place = {"topic": TOPIC, "partition": partition, "offset": offset}
                self.lab.note("stored", "log", id=message, **place)
            self.lab.note(
                "log-end", "log", topic=TOPIC, partition=partition, start=start, compacted=compacted or None
            )

    def start_of(self, partition: int = 0) -> int:
        earliest = {"partition_index": partition, "timestamp": -2}
        answer = self.client.ask(2, 3, replica_id=-1, topics=[{"name": TOPIC, "partitions": [earliest]}])
        return int(answer.topics[0].partitions[0].offset)

    def handle(self, found: list[tuple[int, str]]) -> None:
        for offset, message in found:
            place = {"topic": TOPIC, "partition": 0, "offset": offset}
            self.lab.note("deliver", "member", id=message, group=GROUP, **place)
            self.lab.note("handle", "member", id=message, group=GROUP, **place)

    # A group's committed offset

    def commit(self, offset: int) -> None:
        BareMember(self.node, GROUP).commit({(TOPIC, 0): offset})
        self.committed_offset()

    def committed_offset(self) -> int:
        found = BareMember(self.node, GROUP).committed_offsets().get((TOPIC, 0), -1)
        self.lab.note("position", "lab", group=GROUP, topic=TOPIC, partition=0, offset=found)
        return found

    def finish(self, rest: list[tuple[int, str]], *, compacted: bool = False) -> None:
        """The group handles what is left and commits it; then the log is read."""
        self.handle(rest)
        self.commit(rest[-1][0] + 1)
        self.scan(compacted=compacted)


# ---------------------------------------------------------------- HF205: power fails

POWER: Final = "the power fails, of every broker that has it"
PARTITIONS: Final = 8
TROUBLES: Final = ("", "a flush fails", "the disk is full")
"""What some seeds put before the power failure: what is refused then must not be acknowledged."""


def hf205(lab: Lab, flush: str) -> None:
    lab.plan(POWER, successes=PARTITIONS)
    broker = Simulated(lab, {"holdfast.flush": flush})
    broker.create(PARTITIONS)
    rounds = lab.random.randint(2, 6)
    trouble = lab.random.choice(TROUBLES)
    for number in range(rounds):
        if number == rounds - 1 and trouble:
            _make_trouble(broker, trouble)
        for partition in range(PARTITIONS):
            broker.send(f"{partition}.{number}", partition)
    broker.lose_power()
    lab.fault(POWER)
    broker.scan(PARTITIONS)


def _make_trouble(broker: Simulated, trouble: str) -> None:
    disk = broker.node.disk
    if trouble == "a flush fails":
        disk.plan(Fault("flush", path_contains=f"{TOPIC}-{broker.lab.random.randrange(PARTITIONS)}/"))
    else:
        disk.capacity_bytes = disk.used_bytes
    broker.lab.fault(trouble)


MOUNTED_PARTITIONS: Final = 4


def hf205_mounted(lab: Lab, flush: str) -> None:
    reason = why_not()
    if reason is not None:
        raise NotOnThisMachine(f"no file system can be mounted: {reason}")
    lab.plan(POWER, successes=MOUNTED_PARTITIONS)
    directory = lab.directory / "disk"
    settings = {"holdfast.flush": flush}
    topic = lab.name("orders")
    with ForgetfulMount(directory, lab.seed) as mount:
        before = mount.as_after_a_boot()
        with BrokerProcess(str(directory), settings=settings, prefix=before) as broker:
            address = broker.bootstrap_servers
            engine = Engine("holdfast", address)
            engine.create_topic(topic, MOUNTED_PARTITIONS)
            for number in range(lab.random.randint(2, 5)):
                for partition in range(MOUNTED_PARTITIONS):
                    lab.write(engine, topic, [f"{partition}.{number}"], partition)
        mount.lose_power()
        lab.fault(POWER)
        after = mount.as_after_a_boot()
        with BrokerProcess(str(directory), settings=settings, prefix=after, listen=address):
            lab.scan(engine, topic, MOUNTED_PARTITIONS)


# ---------------------------------------------------------------- HF212: the disk does not stay

RESTARTED: Final = "the machine restarts, and what is temporary begins empty"


def hf212(lab: Lab, *, temporary: bool) -> None:
    lab.plan(RESTARTED, successes=3)
    broker = Simulated(lab)
    broker.create()
    for number in range(lab.random.randint(3, 9)):
        broker.send(str(number))
    broker.lose_power(_empty if temporary else None)
    lab.fault(RESTARTED)
    if temporary:
        broker.create()  # whoever sends or reads next makes the topic again
    broker.scan()


def _empty(disk: SimulatedDisk) -> None:
    disk.remove_tree("/data")
    disk.prepare("/data")


# ---------------------------------------------------------------- HF206: retention

AWAY: Final = "the group is away for longer than anything is kept"


def hf206(lab: Lab, retention_ms: int) -> None:
    lab.plan(AWAY, successes=4)
    broker = Simulated(lab)
    broker.create(configs={"retention_ms": str(retention_ms), **SMALL_SEGMENTS})
    done, count = lab.random.randint(1, 3), lab.random.randint(6, 12)
    for number in range(count):
        broker.send(str(number))
        broker.pass_time(TICK_MS)
    broker.handle(broker.fetch(0)[1][:done])
    broker.commit(done)
    broker.pass_time(2 * HOUR_MS)
    lab.fault(AWAY)
    broker.send("later")
    end, rest = broker.fetch(broker.committed_offset())
    if end < 0:
        lab.say("OFFSET_OUT_OF_RANGE: the reader goes on where the log begins now")
        rest = broker.fetch(broker.start_of())[1]
    broker.finish(rest)


# ---------------------------------------------------------------- HF210: compaction

COMPACTED: Final = "the reader is away while the topic is compacted"


def hf210(lab: Lab, lag_ms: int) -> None:
    lab.plan(COMPACTED, successes=4)
    broker = Simulated(lab, {"log.cleaner.backoff.ms": "1000"})
    settings = {"cleanup_policy": "compact", "min_cleanable_dirty_ratio": "0.01", **SMALL_SEGMENTS}
    broker.create(configs={"min_compaction_lag_ms": str(lag_ms), **settings})
    done, count = lab.random.randint(1, 3), lab.random.randint(6, 12)
    for number in range(count):
        broker.send(f"balance-{number}", key="account")
        if number < done:
            broker.handle(broker.fetch(number)[1])
            broker.commit(number + 1)
        broker.pass_time(TICK_MS)
    broker.pass_time(2 * HOUR_MS)
    broker.send("balance-last", key="account")
    lab.fault(COMPACTED)
    rest = broker.fetch(broker.committed_offset())[1]
    broker.finish(rest, compacted=True)


# ---------------------------------------------------------------- HF211: committed offsets expire


def hf211(lab: Lab, retention_minutes: int) -> None:
    lab.plan(AWAY, successes=4)
    broker = Simulated(lab, {"offsets.retention.minutes": str(retention_minutes)})
    broker.create()
    done, count = lab.random.randint(1, 3), lab.random.randint(6, 12)
    for number in range(count):
        broker.send(str(number))
    broker.handle(broker.fetch(0)[1][:done])
    broker.commit(done)
    broker.pass_time(2 * HOUR_MS)
    lab.fault(AWAY)
    position = broker.committed_offset()
    if position < 0:
        lab.say("no committed offset: auto.offset.reset=latest begins at the end")
        position = count
    broker.send("later")
    rest = broker.fetch(position)[1]
    broker.finish(rest)


# ---------------------------------------------------------------- HF411: an open transaction

HANGING: Final = "a producer begins a transaction, and is never heard of again"
HELD_MINUTES: Final = 120


def hf411(lab: Lab, timeout_ms: int) -> None:
    lab.plan(HANGING, successes=4)
    broker = Simulated(lab, {"transaction.max.timeout.ms": str(WEEK_MS)})
    broker.create(configs={"retention_ms": str(HOUR_MS), **SMALL_SEGMENTS})
    hanging = TransactionalProducer(broker.node.connect(), "hanging")
    hanging.init(transaction_timeout=timeout_ms)
    now_ms = broker.node.clock.now().wall_ms
    lab.note("begin", "hanging", txn="open", ids=["held"])
    lab.sends("hanging", TOPIC, ["held"], txn="open")
    batch = build_batch(
        [Record(0, 0, None, b"held")],
        base_timestamp=now_ms,
        is_transactional=True,
        producer_id=hanging.producer_id,
        producer_epoch=hanging.epoch,
        base_sequence=0,
    )
    asked = hanging.begin_produce({(TOPIC, 0): batch})
    broker.node.settle()
    if any(hanging.produced(asked)):
        raise NotComeAbout("the transaction could not be begun")
    lab.fault(HANGING)
    for number in range(lab.random.randint(6, 12)):
        broker.send(str(number))
    position = 0
    for _ in range(HELD_MINUTES // 10):
        # A reader that is always there, and reads what it may.
        broker.pass_time(10 * TICK_MS)
        end, rest = broker.fetch(position)
        if end < 0:
            position = broker.start_of()
            lab.say("OFFSET_OUT_OF_RANGE: the reader goes on where the log begins now")
            continue
        broker.handle(rest)
        position = end
    broker.commit(max(position, broker.start_of()))
    broker.scan()


def either(lab: Lab, simulated: Callable[[], None], timed: Callable[[], None]) -> None:
    """With a moved clock on our broker, with short settings on Apache Kafka."""
    if lab.engine == "holdfast":
        simulated()
    else:
        timed()


EXPERIMENTS: Final = (
    Experiment(
        "HF205",
        "acknowledged from the page cache",
        lambda lab: (hf205 if lab.engine == "holdfast" else hf205_mounted)(lab, "os"),
        lambda lab: (hf205 if lab.engine == "holdfast" else hf205_mounted)(lab, "group"),
        "acks=all, answered from the page cache (holdfast.flush=os; Apache Kafka's default)",
        "flushed before it is acknowledged (holdfast.flush=group)",
        engines=("holdfast", "holdfast-fuse"),
        in_process=True,
    ),
    Experiment(
        "HF206",
        "retention removes what was not read",
        lambda lab: either(lab, lambda: hf206(lab, HOUR_MS), lambda: hf206_timed(lab, SHORT_MS, AWAY)),
        lambda lab: either(lab, lambda: hf206(lab, WEEK_MS), lambda: hf206_timed(lab, LONG_MS, AWAY)),
        "retention.ms of an hour, and a reader that is away for two",
        "retention.ms of a week",
        engines=("holdfast", "kafka"),
        in_process=True,
    ),
    Experiment(
        "HF210",
        "compaction overtakes a reader",
        lambda lab: either(lab, lambda: hf210(lab, 0), lambda: hf210_timed(lab, "0", COMPACTED)),
        lambda lab: either(lab, lambda: hf210(lab, WEEK_MS), lambda: hf210_timed(lab, LONG_MS, COMPACTED)),
        "min.compaction.lag.ms=0",
        "min.compaction.lag.ms of a week",
        engines=("holdfast", "kafka"),
        in_process=True,
    ),
    Experiment(
        "HF211",
        "committed offsets vanish",
        lambda lab: either(lab, lambda: hf211(lab, 60), lambda: hf211_timed(lab, 1, AWAY)),
        lambda lab: either(
            lab, lambda: hf211(lab, WEEK_MINUTES), lambda: hf211_timed(lab, WEEK_MINUTES, AWAY)
        ),
        "offsets.retention.minutes of an hour, and a group that is away for two",
        "offsets.retention.minutes of a week",
        claim=Claim({MOVED_BACK: 1, LOST: 1}),
        engines=("holdfast", "kafka"),
        in_process=True,
    ),
    Experiment(
        "HF212",
        "the broker's disk is temporary",
        lambda lab: hf212(lab, temporary=True),
        lambda lab: hf212(lab, temporary=False),
        "log.dirs=/tmp/kafka-logs, a container without a volume, ephemeral storage",
        "a data directory that stays",
        engines=("holdfast",),
        in_process=True,
    ),
    Experiment(
        "HF411",
        "an open transaction holds readers back",
        lambda lab: either(lab, lambda: hf411(lab, 24 * HOUR_MS), lambda: hf411_timed(lab, 600_000, HANGING)),
        lambda lab: either(lab, lambda: hf411(lab, TICK_MS), lambda: hf411_timed(lab, 1000, HANGING)),
        "transaction.timeout.ms of a day, retention of an hour",
        "transaction.timeout.ms of a minute",
        engines=("holdfast", "kafka"),
        in_process=True,
    ),
)
