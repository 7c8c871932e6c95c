"""The scheduler: one thread, one seed, one step at a time.

A step lets a client act, carries out or reports a flush, runs background work, or lets time pass; then the
broker's turn ends and answers reach their clients. Nothing else moves. When a seed's operations are done its
faults end, clients retry until everything is settled, and readers that know nothing read every partition,
after a kill and again after a power loss. A `Report` says what a run of seeds did: operations by kind and outcome, and
how often each fault hit.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from kio.schema.errors import ErrorCode
from tests.support import history
from tests.support.absences import Absence, Environment
from tests.support.checkers import Checkers, Violation
from tests.support.history import Event, Partition
from tests.support.simulator.broker import DATA_DIRECTORIES, Broker, MakeSeams, SimulatedFlusher
from tests.support.simulator.contents import BatchReader
from tests.support.simulator.faults import Faults
from tests.support.simulator.link import Link
from tests.support.simulator.mutants import HEALTHY, Mutant
from tests.support.simulator.operators import PARTITIONS_MAX, Trait
from tests.support.simulator.workloads import Workload

from holdfast.broker.node.services import NodeSeams
from holdfast.errors import CorruptLog, DataDirectoryError
from holdfast.testing.disk import PowerLost, SimulatedDisk
from holdfast.testing.fakes import InlineWorker, ManualClock, SeededRandomness

OPERATIONS_MIN = 200
TAKEN_LIKELIHOOD = 0.1
"""Of a start that finds something away."""
DIRECTORIES_TAKEN = ("away", "empty", "swapped", "unreadable", "read-only")
FILES_TAKEN = ("partition", "file missing", "file empty", "file flipped")
"""What can be missed only while the checkpoints tell of all that is flushed."""
SETTLE_STEPS_MAX = 4_000
"""Steps without faults after which every request must have been answered."""


_TOLD: dict[Trait, Callable[[Partition], Event]] = {
    "expires": history.ExpiryAllowed,
    "compacted": history.CompactionAllowed,
    "unflushed": history.LossAllowed,
}


@dataclass(slots=True, eq=False)
class KnownTopic:
    name: str
    topic_id: str
    uuid: UUID
    partitions: int
    trait: Trait | None = None

    @property
    def is_compacted(self) -> bool:
        return self.trait == "compacted"


@dataclass(frozen=True, slots=True)
class KnownPartition:
    topic: KnownTopic
    index: int

    @property
    def partition(self) -> Partition:
        return (self.topic.topic_id, self.index)

    def __str__(self) -> str:
        return f"{self.topic.name}-{self.index}"


class World:
    def __init__(self, seed: int, mutant: Mutant = HEALTHY) -> None:
        self.seed = seed
        self.mutant = mutant
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.disk = SimulatedDisk(random.Random(seed + 1), self.clock)
        for directory in DATA_DIRECTORIES:
            self.disk.prepare(directory)
        self.checkers = Checkers()
        self.report = Report()
        self.report.seeds = 1
        self.trace: list[str] = []
        self.batch_reader = BatchReader()
        self.inbox: deque[tuple[Link, int, bytes | None]] = deque()
        self.topics: dict[str, KnownTopic] = {}
        self.broker: Broker | None = None
        self.flusher = SimulatedFlusher(self.disk)
        self.worker = InlineWorker(self.disk)
        self.traits: dict[str, Trait | None] = {}
        """What topics of a name promise less than others."""
        self.dies_by_kill = False
        """The power loss that is planned takes the process only."""
        self.storage_trouble = False
        """The disk was made to fail in this life of the broker."""
        self.disk_was_full = False
        self.absence: Absence | None = None
        """What the environment has taken: of what it concerns errors are excused, wrong answers never."""
        self._environment = Environment(self.disk, random.Random(seed + 3), DATA_DIRECTORIES)
        self._was_stopped = True
        """The last stop was clean."""
        self._defect: str | None = None
        self._randomness = SeededRandomness(random.Random(seed + 2))
        self._boot = 1
        self.steps = 0
        self._later: list[tuple[int, Callable[[], None]]] = []
        self._restart_at = 0
        self._operations = 0
        self.links: list[Link] = []
        self.workload = Workload(self)
        self.faults = Faults(self, OPERATIONS_MIN)

    # What clients use.

    def say(self, line: str) -> None:
        self.trace.append(f"{self.steps:>5} {line}")

    def observe(self, event: Event) -> None:
        self.checkers.observe(event)

    def count(self, kind: str, outcome: str, times: int = 1) -> None:
        if times:
            self.report.operations[kind, outcome] += times

    def unexpected(self, message: str) -> None:
        raise Violation("unexpected-answer", message)

    def refused(self, what: str, error: ErrorCode, known: KnownPartition | None = None) -> None:
        """A client was told something that only a failing disk excuses."""
        if error != ErrorCode.kafka_storage_error:
            self.unexpected(f"{what} was answered {error.name}")
        self.storage_error(what, known)

    def storage_error(self, where: str, known: KnownPartition | None = None) -> None:
        """A client was told that the disk failed, of one partition if `known`."""
        absence = self.absence
        is_excused = absence is not None and (known is None or absence.concerns(str(known)))
        if not self.storage_trouble and not is_excused:
            raise Violation("offline", f"{where}: the broker says that the disk failed, and it is fine")

    def acknowledged(
        self,
        partition: Partition,
        producer: str,
        number: int,
        values: tuple[bytes, ...],
        base: int,
        durable: bool,
    ) -> None:
        self.report.records_acknowledged += len(values)
        self.observe(history.BatchAcknowledged(partition, producer, number, base, durable))

    def produce_version(self) -> int:
        return self.rng.choice((9, 12, 13, 13))

    def some_partitions(self, count: int) -> list[KnownPartition]:
        every = self.all_partitions()
        return every if count >= len(every) else self.rng.sample(every, count)

    def all_partitions(self) -> list[KnownPartition]:
        return [
            KnownPartition(topic, index)
            for topic in self.topics.values()
            for index in range(topic.partitions)
        ]

    def is_live(self, partition: Partition) -> bool:
        return any(topic.topic_id == partition[0] for topic in self.topics.values())

    def known(self, partition: Partition) -> KnownPartition:
        topic = next(topic for topic in self.topics.values() if topic.topic_id == partition[0])
        return KnownPartition(topic, partition[1])

    def show(self, partition: Partition) -> str:
        return str(self.known(partition)) if self.is_live(partition) else f"{partition[0][:8]}-{partition[1]}"

    def add_topic(self, name: str, topic_id: str, partitions: int) -> None:
        trait = self.traits.get(name)
        self.topics[name] = KnownTopic(name, topic_id, UUID(hex=topic_id), partitions, trait)
        if trait is not None:
            for index in range(PARTITIONS_MAX):
                self.observe(_TOLD[trait]((topic_id, index)))

    def remove_topic(self, name: str) -> None:
        """Nobody sends to it any more; what was sent by name arrives before another topic of that name."""
        for link in list(self.links):
            link.deliver()
        del self.topics[name]

    def set_topics(self, seen: dict[str, tuple[str, int]]) -> None:
        for name in [name for name in self.topics if name not in seen]:
            del self.topics[name]
        for name, (topic_id, partitions) in seen.items():
            topic = self.topics.get(name)
            if topic is not None and topic.topic_id == topic_id:
                topic.partitions = partitions
            else:
                self.add_topic(name, topic_id, partitions)

    # The broker's lives.

    def _seams(self, flusher: SimulatedFlusher, worker: InlineWorker) -> MakeSeams:
        return partial(
            NodeSeams,
            fs=self.disk,
            clock=self.clock,
            randomness=self._randomness,
            flusher=flusher,
            worker=worker,
            boot_id=f"boot-{self._boot}",
            say=self._broker_says,
        )

    def _broker_says(self, line: str) -> None:
        self.say(f"broker: {line}")
        if line.startswith("defect"):
            self._defect = line
        if self.seed % 2:
            raise BrokenPipeError("nobody reads this broker's log")

    def start_broker(self) -> None:
        self.disk.clear_faults()
        self.storage_trouble = False
        self.disk_was_full = False
        self.dies_by_kill = False
        self.flusher = self.mutant.flusher(self.disk)
        self.worker = InlineWorker(self.disk)
        dies_after: int | None = None
        if self._operations < OPERATIONS_MIN and self.rng.random() < 0.15:
            self.dies_by_kill = self.rng.random() < 0.3
            dies_after = self.rng.randrange(60)
        if (
            self.report.restarts
            and self._operations < OPERATIONS_MIN
            and self.rng.random() < TAKEN_LIKELIHOOD
        ):
            self.take_away(DIRECTORIES_TAKEN + (FILES_TAKEN if self._was_stopped else ()))
        if dies_after is not None:  # the broker's own steps: what takes something away is done with it
            self.disk.lose_power_after(dies_after)
        self.say("the broker starts")
        try:
            self.broker = self.mutant.start(self._seams(self.flusher, self.worker))
        except (DataDirectoryError, CorruptLog) as refusal:
            self._start_refused(refusal)
            return
        self.report.restarts += 1
        self.observe(history.BrokerStarted())
        self.say("the broker serves")

    def take_away(self, kinds: Sequence[str]) -> None:
        """Let something of these kinds be away, until some death of the broker."""
        if self.absence is None:
            self.absence = self._environment.take(kinds)
            if self.absence is not None:
                self.say(f"*** {self.absence.what}")
                self.report.faults["something is away"] += 1

    def _give_back(self) -> None:
        if self.absence is not None:
            self.say(f"*** no longer: {self.absence.what}")
            self.absence.give_back()
            self.absence = None

    def _start_refused(self, refusal: Exception) -> None:
        """The broker will not start without what is away, and says so; the operator brings it back."""
        absence = self.absence
        if absence is None or not absence.concern.may_refuse:
            raise refusal
        self.say(f"the broker refuses to start: {refusal}")
        self.report.faults["start refused"] += 1
        self.disk.kill_handles()
        self._give_back()
        self._after_death()

    def start_another(self) -> None:
        """Start a second broker beside the first; raises what it raises."""
        Broker(self._seams(SimulatedFlusher(self.disk), InlineWorker(self.disk)))

    def lose_power(self) -> None:
        self.say("*** power loss")
        self.disk.crash()
        self._boot += 1
        self._was_stopped = False
        self.observe(history.PageCacheLost())
        self._after_death()

    def kill(self) -> None:
        """The process dies; unless nobody could tell any more that a flush has failed, then the machine does.

        On a disk that turned read-only the broker cannot write down that it has.
        """
        if self.flusher.has_unreported_failure or (self.flusher.has_failed and self.disk.read_only):
            self.lose_power()
            return
        self.say("*** process killed")
        if self.storage_trouble:
            self.observe(history.PageCacheLost())  # a flush that failed may have taken pages with it
        self._was_stopped = False
        self.mutant.kill(self.disk)
        self.disk.clear_faults()
        self._after_death()

    def stop_cleanly(self) -> None:
        if self.broker is None:
            return
        self.say("*** clean stop")
        self.broker.end_turn()
        self.flusher.report_all()
        self.broker.stop_cleanly(self.clock.now())
        self.pump()
        self.report.faults["clean restart"] += 1
        self._was_stopped = not self.broker.is_failed
        if self.storage_trouble:
            self.observe(history.PageCacheLost())
        self.disk.kill_handles()
        self.disk.clear_faults()
        self._after_death()

    def _after_death(self) -> None:
        self.broker = None
        if self.disk_was_full:
            self.observe(history.ExpiryForgotten())
        self.inbox.clear()
        for link in list(self.links):
            link.forget()
        self._later.clear()
        if self.absence is not None and self.rng.random() < 0.6:
            self._give_back()
        self._restart_at = self.steps + self.rng.randint(1, 8)

    def _died(self) -> None:
        """The disk stopped in the middle of an operation."""
        if self.dies_by_kill:
            self.dies_by_kill = False
            self.kill()
        else:
            self.lose_power()

    # Steps.

    def later(self, steps_max: int) -> int:
        """A step soon: when a client tries again."""
        return self.steps + self.rng.randint(1, steps_max)

    def after_steps(self, steps: int, action: Callable[[], None]) -> None:
        self._later.append((self.steps + steps, action))

    def pump(self) -> None:
        """Hand arrived answers to their clients."""
        inbox = self.inbox
        while inbox:
            link, life, frame = inbox.popleft()
            link.receive(life, frame)

    def step(self, act: Callable[[], None]) -> None:
        """One step; `act` is what a client does when it is a client's turn."""
        self.steps += 1
        try:
            if self.broker is None:
                if self.steps >= self._restart_at:
                    self.start_broker()
                self.clock.advance(self.rng.randrange(50))
            else:
                self._step(act)
        except PowerLost:
            self._died()
        if self._defect is not None:
            raise Violation("defect", self._defect.strip().splitlines()[-1])

    def _step(self, act: Callable[[], None]) -> None:
        broker, rng = self.broker, self.rng
        assert broker is not None
        draw = rng.random()
        elapsed_ms = rng.randrange(4)
        if draw < 0.5:
            act()
        elif draw < 0.9:
            for _ in range(rng.randint(1, self.workload.flushes_max)):
                self.flusher.step(rng)
        elif draw < 0.94:
            rng.choice(self.links).deliver()
        elif draw < 0.97:
            if self.worker.jobs:
                self.count("background", self.worker.jobs[0].task)
                self.worker.run_one()
        else:
            elapsed_ms = rng.choice((30, 300, 1_500))
        if self.broker is not broker:
            return
        now = self.clock.advance(elapsed_ms)
        deadline_ms = broker.next_deadline_ms()
        if deadline_ms is not None and deadline_ms <= now.monotonic_ms:
            broker.tick(now)
        if rng.random() < 0.8:
            broker.end_turn()
        self.pump()
        due = [action for step, action in self._later if step <= self.steps]
        self._later = [entry for entry in self._later if entry[0] > self.steps]
        for action in due:
            if self.broker is broker:
                action()
        if broker.is_failed and self.broker is broker:
            self._watch_failed()

    def _watch_failed(self) -> None:
        """The disk failed the broker: after a while somebody restarts it."""
        if not self.storage_trouble and self.absence is None:
            raise Violation(
                "offline", "the broker took its log directory out of service, and the disk is fine"
            )
        if self.rng.random() < 0.05:
            self.say("the operator restarts the broker")
            if self.rng.random() < 0.3:
                self.disk.clear_faults()
                self.stop_cleanly()
            else:
                self.kill()

    def _operate(self) -> None:
        """One client acts."""
        if self.workload.act():
            self._operations += 1
            self.report.operations_sent += 1

    def run(self) -> None:
        while self._operations < OPERATIONS_MIN:
            self.step(self._operate)
            try:
                self.faults.strike(self._operations)
            except PowerLost:
                self._died()
        self.faults.end()
        self._heal()
        self._settle()
        self.workload.leave_unflushed()
        self.kill()
        self._verify("after a kill")
        self.lose_power()
        self._verify("after a power loss")
        self.report.faults.update(self.disk.faults)

    # The end of a seed.

    def _heal(self) -> None:
        """No more faults; a broker whose disk failed it is restarted."""
        self.disk.clear_faults()
        self._later.clear()
        if self.broker is not None and (self.broker.is_failed or self.storage_trouble or self.absence):
            self.kill()
        self._give_back()

    def _settle(self) -> None:
        """Retry until every batch is acknowledged and every request answered."""

        def act() -> None:
            self.workload.settle()
            for link in list(self.links):
                link.deliver()

        self._until(lambda: self.broker is not None and self._is_settled(), act, "settle")

    def _is_settled(self) -> bool:
        return (
            self.workload.is_settled and not any(link.waiting for link in self.links) and self.flusher.is_idle
        )

    def _until(self, done: Callable[[], bool], act: Callable[[], None], what: str) -> None:
        for _ in range(SETTLE_STEPS_MAX):
            if done():
                return
            self.step(act)
        waiting = [link.name for link in self.links if link.waiting]
        raise Violation("stuck", f"{what}: no end in sight; still without an answer: {waiting}")

    def _verify(self, when: str) -> None:
        """Readers that know nothing read everything to its end."""
        self.say(f"reading everything {when}")
        for link in list(self.links):
            link.forget()
        self._until(lambda: self.broker is not None, lambda: None, "start")
        for reading in self.workload.readings(when):
            self._until(reading.is_done, reading.act, str(reading))


def run_seed(seed: int, mutant: Mutant = HEALTHY) -> Report:
    """Run one seed; raises `SeedFailed` when a rule is broken or the broker breaks down."""
    world = World(seed, mutant)
    name = None if mutant is HEALTHY else mutant.name
    try:
        with mutant.planted():
            world.run()
    except Violation as violation:
        raise SeedFailed(seed, name, violation.rule, str(violation), world.trace) from violation
    except Exception as error:
        where = "".join(traceback.format_exception(error)).splitlines()
        world.trace += where
        raise SeedFailed(seed, name, "broke-down", f"{type(error).__name__}: {error}", world.trace) from error
    return world.report


EFFECTS = ("page lost", "page torn", "directory change lost")
"""What power loss did to the disk: counted beside the faults, and no faults of their own."""


class SeedFailed(Exception):
    """A seed broke a rule; carries what is needed to see why, and to run it again."""

    def __init__(self, seed: int, mutant: str | None, rule: str, message: str, trace: Iterable[str]) -> None:
        self.seed = seed
        self.mutant = mutant
        self.rule = rule
        self.trace = list(trace)
        super().__init__(f"seed {seed}{f' with mutant {mutant}' if mutant else ''}: {message}")

    def explain(self, lines_max: int = 60) -> str:
        """The end of the trace, the rule that broke, and how to run it again."""
        tail = self.trace[-lines_max:]
        left_out = len(self.trace) - len(tail)
        head = [f"... {left_out} earlier lines ..."] if left_out else []
        again = f"python -m tests.support.simulator --first {self.seed} --seeds 1"
        if self.mutant:
            again += f" --mutant {self.mutant}"
        return "\n".join([*head, *tail, str(self), f"run it again: {again}"])


class Report:
    """Counts over one or many seeds."""

    def __init__(self) -> None:
        self.seeds = 0
        self.operations: Counter[tuple[str, str]] = Counter()
        """By kind and outcome; a produce to several partitions has one outcome for each."""
        self.operations_sent = 0
        """Requests that clients sent on their own account, retries and readings at the end not counted."""
        self.faults: Counter[str] = Counter()
        self.records_acknowledged = 0
        self.records_read = 0
        self.restarts = 0

    def add(self, other: Report) -> None:
        self.seeds += other.seeds
        self.operations.update(other.operations)
        self.operations_sent += other.operations_sent
        self.faults.update(other.faults)
        self.records_acknowledged += other.records_acknowledged
        self.records_read += other.records_read
        self.restarts += other.restarts

    @property
    def faults_struck(self) -> int:
        return sum(count for name, count in self.faults.items() if name not in EFFECTS)

    def table(self) -> str:
        lines = [
            f"{self.seeds:,} seeds, {self.operations_sent:,} client operations, "
            f"{self.records_acknowledged:,} records acknowledged, {self.records_read:,} read, "
            f"{self.restarts:,} starts",
            "",
            f"{'fault':<34}{'hits':>10}{'per seed':>10}",
        ]
        for name, count in sorted(self.faults.items()):
            lines.append(f"{name:<34}{count:>10,}{count / max(1, self.seeds):>10.2f}")
        lines += ["", f"{'operation':<34}{'outcome':<22}{'count':>10}"]
        for (kind, outcome), count in sorted(self.operations.items()):
            lines.append(f"{kind:<34}{outcome:<22}{count:>10,}")
        return "\n".join(lines)
