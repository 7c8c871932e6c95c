"""The poll loop against a scripted client: what it makes of rebalances in the middle of a read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from holdfast.client.consuming.assignment import LostOffsets
from holdfast.client.consuming.loop import Loop, Options
from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.consuming.workers import Reports, Run
from holdfast.client.messages import Fields, Message
from holdfast.client.retries import HeldBack, History

OPTIONS = Options(
    in_flight_max=4, in_flight_bytes_max=1000, commit_seconds=3600, drain_seconds=0, last_commit_seconds=0
)


class RawMessage:
    def __init__(self, topic: str, offset: int, code: int | None = None, headers: Any = None) -> None:
        self._topic, self._offset, self._headers = topic, offset, headers
        self._error = None if code is None else KafkaError(code)

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        return (1, 0)

    def key(self) -> bytes | None:
        return None

    def value(self) -> bytes | None:
        return b"v"

    def headers(self) -> Any:
        return self._headers

    def error(self) -> KafkaError | None:
        return self._error

    def __len__(self) -> int:
        return 1


class ScriptedClient:
    """Plays steps: each is what one read returns, and what happens inside it."""

    def __init__(self) -> None:
        self.committed_at: dict[str, int] = {}
        self.steps: list[Callable[[], list[RawMessage]]] = []
        self.rest: list[RawMessage] = []
        self.assigned: list[list[tuple[str, int]]] = []
        self.commits: dict[str, int] = {}
        self.paused: set[str] = set()
        self.when_done: Callable[[], None] = lambda: None

    def subscribe(self, topics: list[str], on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        self.on_assign, self.on_revoke, self.on_lost = on_assign, on_revoke, on_lost

    def poll(self, seconds: float) -> RawMessage | None:
        if not self.steps:
            self.when_done()
            return None
        got = self.steps.pop(0)()
        self.rest = got[1:]
        return got[0] if got else None

    def consume(self, count: int, seconds: float) -> list[RawMessage]:
        rest, self.rest = self.rest, []
        # A rebalance in the middle of a batch.
        for at, each in enumerate(rest):
            if callable(each):
                each()
                return rest[:at] + rest[at + 1 :]
        return rest

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [
            TopicPartition(each.topic, 0, self.committed_at.get(each.topic, -1001)) for each in partitions
        ]

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]:
        return 0, 1000

    def assign(self, partitions: list[TopicPartition]) -> None:
        self.assigned.append([(each.topic, each.offset) for each in partitions])

    def unassign(self) -> None:
        self.assigned.append([])

    def pause(self, partitions: list[TopicPartition]) -> None:
        self.paused.update(each.topic for each in partitions)

    def resume(self, partitions: list[TopicPartition]) -> None:
        self.paused.difference_update(each.topic for each in partitions)

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition]:
        self.commits.update((each.topic, each.offset) for each in offsets)
        return offsets

    def close(self) -> None:
        """The group is left."""


class Hands:
    """A pool whose work is finished when the test says so."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self.runs: list[Run] = []

    def give(self, messages: Sequence[Fields], tracker: PartitionTracker, size_bytes: int) -> None:
        self.runs.append(Run(messages, tracker, size_bytes))

    def at_work(self) -> Iterable[Run]:
        return []

    def close(self, seconds: float) -> bool:
        return True

    @property
    def offsets(self) -> list[int]:
        return [message.offset for run in self.runs for message in run.messages]

    def finish(self) -> None:
        for run in self.runs:
            if run.finished == 0:
                run.finished = len(run.fields)
                self._reports.add(run)


class World:
    def __init__(self, held: dict[str, HeldBack] | None = None, lost_offsets: LostOffsets = "stop") -> None:
        self.client = ScriptedClient()
        self.stopping = threading.Event()
        self.client.when_done = self.stopping.set
        reports = Reports()
        self.hands = Hands(reports)
        self.loop = Loop(
            lambda answered: self.client,
            ["t"],
            lambda topic: self.hands,
            [self.hands],
            reports,
            replace(OPTIONS, lost_offsets=lost_offsets),
            is_stopping=self.stopping.is_set,
            held=held or {},
        )

    def assign(self, topic: str = "t") -> None:
        self.client.on_assign(self.client, [TopicPartition(topic, 0)])

    def revoke(self, topic: str = "t") -> None:
        self.client.on_revoke(self.client, [TopicPartition(topic, 0)])

    def lose(self, topic: str = "t") -> None:
        self.client.on_lost(self.client, [TopicPartition(topic, 0)])

    def play(self, *steps: Callable[[], Any]) -> None:
        """Each step does something; a list it returns is what the client reads then."""

        def reading(step: Callable[[], Any]) -> Callable[[], list[RawMessage]]:
            def read() -> list[RawMessage]:
                got = step()
                return got if isinstance(got, list) else []

            return read

        self.client.steps += map(reading, steps)
        self.loop.run()


def raws(*offsets: int, topic: str = "t") -> list[Any]:
    return [RawMessage(topic, offset) for offset in offsets]


def test_what_was_read_before_a_take_over_is_dropped_and_read_again() -> None:
    world = World()
    world.client.committed_at["t"] = 5

    def move() -> None:
        # It went and came back, at the position committed meanwhile by somebody else.
        world.revoke()
        world.client.committed_at["t"] = 7
        world.assign()

    world.play(world.assign, lambda: [*raws(5, 6), *raws(9), move, *raws(10)])
    # 9 and 10 may be from before: handing them out would skip 7 and 8.
    assert world.hands.offsets == []
    assert world.client.assigned == [[("t", 5)], [], [("t", 7)], [("t", 7)]]


def test_work_finished_after_its_partition_was_lost_moves_nothing() -> None:
    world = World()
    world.client.committed_at["t"] = 5
    world.play(world.assign, lambda: raws(5, 6), world.lose, world.hands.finish)
    assert world.hands.offsets == [5, 6]
    assert (world.client.commits, world.loop.handled) == ({}, 0)


def test_the_end_of_a_partition_carries_the_position_over_markers() -> None:
    world = World()
    end = RawMessage("t", 9, KafkaError._PARTITION_EOF)
    world.play(world.assign, lambda: [*raws(5, 6), end], world.hands.finish, lambda: None)
    assert world.client.commits == {"t": 9}


def test_where_to_go_on_instead_of_a_lost_position_is_committed() -> None:
    world = World(lost_offsets="latest")
    world.client.committed_at["t"] = 5
    lost = RawMessage("t", 5, KafkaError._AUTO_OFFSET_RESET)
    commits: list[dict[str, int]] = []
    world.play(world.assign, lambda: [lost], lambda: commits.append(dict(world.client.commits)))
    assert world.client.assigned == [[("t", 5)], [("t", 1000)]]
    # Without waiting for its time, which here is an hour away.
    assert commits == [{"t": 1000}]


def test_a_position_decided_on_at_the_beginning_is_committed() -> None:
    world = World(lost_offsets="latest")
    world.client.committed_at["t"] = 5000
    commits: list[dict[str, int]] = []
    world.play(world.assign, lambda: commits.append(dict(world.client.commits)))
    assert commits == [{"t": 1000}]


def test_a_partition_that_goes_while_it_is_paused_is_not_paused_when_it_comes_back() -> None:
    world = World()
    seen: list[set[str]] = []
    world.play(
        world.assign,
        lambda: raws(0, 1, 2, 3),
        lambda: seen.append(set(world.client.paused)),
        world.revoke,
        lambda: seen.append(set(world.client.paused)),
        world.assign,
    )
    assert seen == [{"t"}, set()]


def test_what_is_not_due_is_passed_by_no_position() -> None:
    world = World({"t": HeldBack({"t": 3_600_000}, "group")})
    history = History.read(Message("s", 0, 0, 0, None, b""))
    headers = list(_waiting(history).headers())
    end = RawMessage("t", 9, KafkaError._PARTITION_EOF)
    world.play(world.assign, lambda: [RawMessage("t", 3, headers=headers), end], lambda: None)
    assert (world.hands.offsets, world.client.commits, world.client.paused) == ([], {}, {"t"})


def _waiting(history: History) -> History:
    import dataclasses

    return dataclasses.replace(history, group="group", step=0, due_ms=2**53, first_ms=1, attempts=1)


def test_a_message_that_cannot_be_read_stops_the_consumer() -> None:
    # HF205
    from holdfast.client.consuming.assignment import UnreadableMessages

    world = World()
    broken = RawMessage("t", 2, KafkaError._BAD_MSG)
    with pytest.raises(UnreadableMessages, match="t-0 at 2"):
        world.play(world.assign, lambda: [*raws(0, 1), broken], world.hands.finish)
