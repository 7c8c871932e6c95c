"""A broker, what it has acknowledged, and what must hold of that while its environment takes things away.

The rule: what was acknowledged is read unchanged at its offset, or an error is answered for its partition and the log
names it, or the start is refused; never anything else. When what was away is back, everything is there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kio.schema.errors import ErrorCode
from tests.support.absences import Absence, Environment

from holdfast.errors import CorruptLog, DataDirectoryError, HoldfastError, InvalidRecords
from holdfast.testing.bare_clients import BareMember, TransactionalProducer, read_topic
from holdfast.testing.bare_node import BareNode
from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.fakes import ManualClock
from holdfast.wire.batch import make_batch

LIST_OFFSETS, METADATA, OFFSET_FETCH, DELETE_TOPICS = 2, 3, 9, 20
NOT_NOW = frozenset(
    {ErrorCode.coordinator_not_available, ErrorCode.not_coordinator, ErrorCode.coordinator_load_in_progress}
)
NAMES = ("a", "b", "topic-1", "m" * 213, "n" * 214, "o" * 247, "p" * 248, "q" * 249)
"""Of topics that come and go, up to the longest that are legal: their directories have longer ones for a while."""
GROUPS = ("readers", "writers", "others")
Key = tuple[str, int]


class Refused(Exception):
    """The broker will not start, or not go on, as it need not while something is away."""


class Broken(AssertionError):
    """The rule was broken."""


class Estate:
    def __init__(self, seed: int, directories: Sequence[str] = ("/a", "/b", "/c")) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.disk = SimulatedDisk(seed, self.clock)
        self.directories = list(directories)
        for directory in directories:
            self.disk.prepare(directory)
        self.environment = Environment(self.disk, self.rng, self.directories)
        self.absence: Absence | None = None
        self.values: dict[Key, dict[int, bytes]] = {}
        """What readers of committed records must be shown, by partition and offset."""
        self.doubtful: set[bytes | tuple[str, Key, int]] = set()
        """Values and positions that were refused when the disk failed: nobody knows what became of them."""
        self.ends: dict[Key, int] = {}
        self.topic_ids: dict[str, str] = {}
        self.positions: dict[tuple[str, Key], int] = {}
        self.trace: list[str] = []
        self._made = 0
        self._boot = 0
        self.start()

    # Lives

    def start(self) -> None:
        """Begin a life; `Refused` when the broker says that it cannot."""
        self.trace.append(f"start on {self.directories}")
        settings = {
            "log.dirs": ",".join(self.directories),
            "offsets.topic.num.partitions": "3",
            "transaction.state.log.num.partitions": "2",
            "group.initial.rebalance.delay.ms": "0",
        }
        try:
            self.node = BareNode(settings, disk=self.disk, clock=self.clock, boot_id=f"boot {self._boot}")
        except HoldfastError as error:
            self.disk.kill()
            if self.absence is None or not self.absence.concern.may_refuse:
                raise Broken(f"refused, and {self._why}: {error}") from error
            if not isinstance(error, DataDirectoryError | CorruptLog):
                raise Broken(f"refused by {error!r}, which is no DataDirectoryError") from error
            raise Refused(str(error)) from error
        self.client = self.node.connect()

    def end(self, how: str) -> None:
        """End a life, once the checkpoints tell how far everything is flushed: above that nobody can miss anything."""
        self.wait(31_000)
        self.trace.append(how)
        if how == "stop":
            self.node.node.stop(self.clock.now())
            self.disk.kill_handles()
        elif how == "kill":
            self.disk.kill()
        else:
            self.disk.crash()
            self._boot += 1
        self.clock.advance(self.rng.choice((10, 5_000)))

    def rearrange(self) -> None:
        """Name the directories in another order, and perhaps a new one among them: nothing depends on it."""
        self.rng.shuffle(self.directories)
        if len(self.directories) < 5 and self.rng.random() < 0.3:
            path = f"/new{len(self.directories)}"
            if self.rng.random() < 0.5:
                self.disk.prepare(path)
            self.directories.insert(self.rng.randint(0, len(self.directories)), path)

    def take(self, kinds: Sequence[str] = ()) -> None:
        self.absence = self.environment.take(kinds)
        self.trace.append(f"take: {self._why}")

    def give_back(self) -> None:
        self.trace.append("give back")
        if self.absence is not None:
            self.absence.give_back()
            self.absence = None

    @property
    def has_topics_fixed(self) -> bool:
        """What is away is needed to make or delete topics."""
        return self.absence is not None and self.absence.concerns("__cluster_metadata-0")

    @property
    def _why(self) -> str:
        return self.absence.what if self.absence is not None else "nothing is away"

    def _excuse(self, partition: str, what: str, *, is_told: bool = True) -> None:
        """An error was answered about a partition: something of it must be away, and the log must say so."""
        if self.absence is None or not self.absence.concerns(partition):
            raise Broken(f"{what}: an error about {partition}, and {self._why}")
        place = self.absence.what.split()[0]
        if is_told and not any(partition in line or place in line for line in self.node.said):
            raise Broken(f"{what}: the log does not tell about {partition}")

    def _check_alive(self) -> None:
        if self.node.node.failures.fatal is not None:
            raise Refused(self.node.node.failures.fatal)

    # What clients do

    def act(self, times: int) -> None:
        for _ in range(times):
            self._check_alive()
            self.rng.choice(
                (
                    *[self.produce] * 5,
                    self.commit,
                    self.commit,
                    self.transact,
                    self.create,
                    self.delete,
                    self.wait,
                )
            )()

    def create(self, name: str = "", **configs: str) -> None:
        if len(self.topic_ids) >= 4:
            return
        name = name or self.rng.choice([each for each in NAMES if each not in self.topic_ids])
        partitions = self.rng.randint(1, 3)
        configs = configs or {"internal_segment_bytes": self.rng.choice(("400", "1500", "1073741824"))}
        self.trace.append(f"create {name} of {partitions} {configs}")
        if self.has_topics_fixed:
            return
        self.client.create_topic(name, partitions, **configs)
        topic = self.node.node.metadata.image.topic(name)
        assert topic is not None
        self.topic_ids[name] = topic.topic_id.hex
        for index in range(partitions):
            self.values[name, index] = {}
            self.ends[name, index] = 0

    def delete(self) -> None:
        """Positions go with their topic; and so may what is away."""
        if len(self.topic_ids) < 2 or self.has_topics_fixed:
            return
        name = self.rng.choice(list(self.topic_ids))
        (answer,) = self.client.ask(DELETE_TOPICS, 5, topic_names=[name], timeout=5000).responses
        self.trace.append(f"delete {name}: {answer.error_code.name}")
        if answer.error_code is not ErrorCode.none:
            raise Broken(f"the deletion of {name} was answered {answer}")
        del self.topic_ids[name]
        for key in [key for key in self.ends if key[0] == name]:
            del self.ends[key], self.values[key]
        self.positions = {place: offset for place, offset in self.positions.items() if place[1][0] != name}

    def _some(self) -> Key | None:
        return self.rng.choice(list(self.ends)) if self.ends else None

    def produce(self) -> None:
        key = self._some()
        if key is None:
            return
        self._made += 1
        batch = make_batch([b"value %d " % self._made + b"x" * 50], timestamp=self.clock.now().wall_ms)
        done = self.client.produce(key[0], batch, key[1])
        self.trace.append(f"produce {self._made} to {key}: {done.error_code.name} {done.base_offset}")
        if done.error_code is ErrorCode.none:
            self._stored(key, done.base_offset, b"value %d " % self._made + b"x" * 50)
        else:
            self._refused(key, done.error_code, "produce")
            self.doubtful.add(b"value %d " % self._made + b"x" * 50)

    def _stored(self, key: Key, offset: int, value: bytes) -> None:
        if offset < self.ends[key]:
            raise Broken(f"offset {offset} of {key} was given out, and the end is {self.ends[key]}")
        self.values[key][offset] = value
        self.ends[key] = offset + 1

    def _refused(self, key: Key, code: ErrorCode, what: str) -> None:
        if code is not ErrorCode.kafka_storage_error:
            raise Broken(f"{what} of {key} was answered {code.name}")
        self._excuse(f"{key[0]}-{key[1]}", what)

    def commit(self) -> None:
        if (key := self._some()) is None:
            return
        group = self.rng.choice(GROUPS)
        offset = self.rng.randrange(1_000)
        (code,) = BareMember(self.node, group).commit({key: offset}, version=7)
        self.trace.append(f"{group} commits {key} {offset}: {code.name}")
        if code is ErrorCode.none:
            self.positions[group, key] = offset
            self.doubtful = {each for each in self.doubtful if each[:2] != (group, key)}
        else:
            self.doubtful.add((group, key, offset))
            self._coordinator_refused("__consumer_offsets", 3, code, "commit")

    def _coordinator_refused(self, topic: str, count: int, code: ErrorCode, what: str) -> None:
        if code not in NOT_NOW | {ErrorCode.kafka_storage_error}:
            raise Broken(f"{what} was answered {code.name}")
        names = [f"{topic}-{index}" for index in range(count)]
        for name in [name for name in names if self.absence is not None and self.absence.concerns(name)]:
            if any(name in line for line in self.node.said):
                return
        self._excuse(topic, what)

    def transact(self) -> None:
        """A transaction over some partitions, all of which are there."""
        keys = [key for key in self.ends if self._is_there(key)]
        producer = TransactionalProducer(self.client, self.rng.choice(("one", "two")))
        is_there = all(map(self._is_there, [("__transaction_state", 0), ("__transaction_state", 1)]))
        if not keys or not is_there:
            return
        code = producer.init()
        if code is not ErrorCode.none:
            # Its last transaction is decided, and a partition of it may not be there to be told.
            if self.absence is None or code is not ErrorCode.concurrent_transactions:
                self._coordinator_refused("__transaction_state", 2, code, "init")
            return
        is_commit = self.rng.random() < 0.5
        stored = []
        for key in self.rng.sample(keys, min(len(keys), 2)):
            self._made += 1
            value = b"value %d" % self._made
            done = producer.produce(*key, value)
            assert done is ErrorCode.none, done
            stored.append((key, value))
        assert producer.end(is_commit=is_commit) is ErrorCode.none
        self.trace.append(f"transaction on {stored}: {'commit' if is_commit else 'abort'}")
        for key, value in stored:
            end = self._ask_offset(key, -1).offset
            if is_commit:
                self.values[key][end - 2] = value
            self.ends[key] = end

    def _is_there(self, key: Key) -> bool:
        return self.absence is None or not self.absence.concerns(f"{key[0]}-{key[1]}")

    def wait(self, ms: int = 1_000) -> None:
        self.clock.advance(ms)
        self.node.node.tick(self.clock.now())
        self.node.settle()

    # What readers see

    def look(self) -> None:
        self._check_alive()
        self._look_at_topics()
        for key in self.ends:
            self._look_at_offsets(key)
            self._look_at_records(key)
        for (group, key), offset in self.positions.items():
            self._look_at_position(group, key, offset)

    def _look_at_topics(self) -> None:
        answer = self.client.ask(METADATA, 12, topics=None)
        seen = {t.name: t.topic_id.hex for t in answer.topics if not t.name.startswith("__")}
        if seen != self.topic_ids:
            raise Broken(f"the topics are {seen}, and were {self.topic_ids}")

    def _ask_offset(self, key: Key, timestamp: int) -> Any:
        partition = {"partition_index": key[1], "current_leader_epoch": -1, "timestamp": timestamp}
        topics = [{"name": key[0], "partitions": [partition]}]
        answer = self.client.ask(LIST_OFFSETS, 7, replica_id=-1, isolation_level=0, topics=topics)
        return answer.topics[0].partitions[0]

    def _look_at_offsets(self, key: Key) -> None:
        for timestamp, expected in ((-2, 0), (-1, self.ends[key])):
            answer = self._ask_offset(key, timestamp)
            if answer.error_code is not ErrorCode.none:
                self._refused(key, answer.error_code, "offsets")
            elif timestamp == -1 and answer.offset > expected:
                # A start writes the marker of a transaction again whose completion is not durable.
                self.ends[key] = answer.offset
            elif answer.offset != expected:
                raise Broken(f"offset {timestamp} of {key} is {answer.offset}, and was {expected}")

    def _look_at_records(self, key: Key) -> None:
        answer = self.client.fetch(key[0], 0, key[1])
        if answer.error_code is not ErrorCode.none:
            self._refused(key, answer.error_code, "fetch")
            return
        try:
            shown = {record.offset: record.value for record in read_topic(self.client, *key)}
        except InvalidRecords:
            # The reader finds out: a broker does not read what it sends, but for the scrub.
            self._excuse(f"{key[0]}-{key[1]}", "records", is_told=False)
            return
        self.values[key] |= {offset: value for offset, value in shown.items() if value in self.doubtful}
        if shown != self.values[key]:
            lost = {
                offset: value[:12] for offset, value in self.values[key].items() if shown.get(offset) != value
            }
            more = {offset: value for offset, value in shown.items() if offset not in self.values[key]}
            raise Broken(f"of {key}, which ends at {self.ends[key]}, {lost} is not shown; but {more} is")

    def _look_at_position(self, group: str, key: Key, offset: int) -> None:
        asked = {"group_id": group, "topics": [{"name": key[0], "partition_indexes": [key[1]]}]}
        (answer,) = self.client.ask(OFFSET_FETCH, 9, groups=[asked], require_stable=False).groups
        code = answer.error_code
        if code is ErrorCode.none:
            found = answer.topics[0].partitions[0]
            code = found.error_code
            told = (group, key, found.committed_offset)
            if code is ErrorCode.none and told[2] != offset and told not in self.doubtful:
                raise Broken(f"{group} is told {found.committed_offset} of {key}, and committed {offset}")
        if code is not ErrorCode.none:
            self._coordinator_refused("__consumer_offsets", 3, code, f"position of {group}")


def play(seed: int, kinds: Sequence[str] = (), rounds: int = 2, only: str = "") -> Estate:
    """A game of some lives, in each of which something else is away; raises what breaks the rule, with the trace."""
    estate = Estate(seed)
    estate.environment.only = only
    try:
        _play(estate, kinds, rounds)
    except Exception as error:
        error.add_note("\n".join([*estate.trace[-60:], *estate.node.said[-8:], f"seed {seed}"]))
        raise
    return estate


def _play(estate: Estate, kinds: Sequence[str], rounds: int) -> None:
    rng = estate.rng
    estate.create()
    estate.act(10)
    estate.environment.remember()
    estate.act(rng.randint(1, 10))
    for _ in range(rounds):
        estate.end(rng.choice(("stop", "kill", "power loss")))
        estate.take(kinds)
        try:
            estate.rearrange()
            estate.start()
            estate.look()
            estate.act(rng.randint(0, 6))
            estate.look()
            estate.end(rng.choice(("stop", "kill")))
            if rng.random() < 0.5:
                estate.start()
                estate.look()
                estate.act(rng.randint(0, 3))
                estate.end(rng.choice(("stop", "kill")))
        except Refused as refusal:
            estate.trace.append(f"refused: {refusal}")
            estate.disk.kill_handles()
        estate.give_back()
        estate.start()
        estate.look()
        estate.act(rng.randint(0, 6))
        estate.look()
