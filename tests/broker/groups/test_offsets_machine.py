"""Committed offsets against a model that knows nothing but the list of what was asked of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kio.schema.errors import ErrorCode
from tests.support.compacting import compacted
from tests.support.coordinator_worlds import GroupWorld
from tests.support.tiers import examples

from holdfast.broker.groups.model import CommitRequest, PartitionCommit, TopicCommit, TransactionalCommit
from holdfast.errors import ApiError
from holdfast.wire.batch import Record, build_batch
from holdfast.wire.control_records import EndTransactionMarker

TOPICS = {"orders": 2, "payments": 1}
PLACES = [(topic, index) for topic, count in TOPICS.items() for index in range(count)]
groups = st.sampled_from(["one", "two"])
places = st.sampled_from(PLACES)
producers = st.sampled_from([7, 8])
offsets = st.integers(0, 100)


class Event(NamedTuple):
    what: str
    group: str = ""
    place: tuple[str, int] = ("", 0)
    offset: int = 0
    producer: int = -1


class Model:
    """Goes through all events each time it is asked."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def look(self) -> tuple[dict[tuple[str, str, int], int], set[tuple[str, str, int]]]:
        """Where each group is, and what is pending."""
        committed: dict[tuple[str, str, int], tuple[int, int]] = {}
        pending: dict[int, dict[tuple[str, str, int], tuple[int, int]]] = {}
        for number, event in enumerate(self.events):
            key = (event.group, *event.place)
            if event.what == "commit":
                committed[key] = (number, event.offset)
            elif event.what == "pend":
                pending.setdefault(event.producer, {})[key] = (number, event.offset)
            elif event.what == "forget":
                committed.pop(key, None)
                for open_ones in pending.values():
                    open_ones.pop(key, None)
            else:
                for place, position in pending.pop(event.producer, {}).items():
                    if event.what == "end" and committed.get(place, (-1, 0)) < position:
                        committed[place] = position
        positions = {place: offset for place, (_, offset) in committed.items()}
        return positions, {place for open_ones in pending.values() for place in open_ones}


class Positions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = GroupWorld()
        self.model = Model()
        for topic, partitions in TOPICS.items():
            self.world.topics.create(topic, partitions)

    def _topics(self, place: tuple[str, int], offset: int) -> tuple[TopicCommit, ...]:
        facts = self.world.topics.by_name(place[0])
        assert facts is not None
        return (TopicCommit(place[0], facts.topic_id, (PartitionCommit(place[1], offset, 3, "note"),)),)

    @rule(group=groups, place=places, offset=offsets)
    def commit(self, group: str, place: tuple[str, int], offset: int) -> None:
        request = CommitRequest(group, "", None, -1, self._topics(place, offset))
        try:
            outcome = self.world.coordinator.commit(request, self.world.now)
        except ApiError:
            assert self.world.journal.refuses is not None
        else:
            assert outcome == {place: ErrorCode.none}
            self.model.events.append(Event("commit", group, place, offset))

    @rule(group=groups, place=places, offset=offsets, producer=producers)
    def commit_in_transaction(self, group: str, place: tuple[str, int], offset: int, producer: int) -> None:
        request = TransactionalCommit(group, "", None, -1, self._topics(place, offset), producer, 0)
        try:
            self.world.coordinator.commit_in_transaction(request, self.world.now)
        except ApiError:
            assert self.world.journal.refuses is not None
        else:
            self.model.events.append(Event("pend", group, place, offset, producer))

    @rule(producer=producers, is_commit=st.booleans())
    def end_transaction(self, producer: int, is_commit: bool) -> None:
        marker = EndTransactionMarker(is_commit, 0)
        self.world.journal.batches.append(
            build_batch(
                [Record(0, 0, marker.encode_key(), marker.encode_value())],
                producer_id=producer,
                producer_epoch=0,
                is_transactional=True,
                is_control=True,
            )
        )
        self.world.coordinator.end_transaction(producer, is_commit, self.world.now)
        self.model.events.append(Event("end" if is_commit else "abort", producer=producer))

    @rule(group=groups, chosen=st.lists(places, min_size=1, max_size=3))
    def delete_offsets(self, group: str, chosen: list[tuple[str, int]]) -> None:
        coordinator, now = self.world.coordinator, self.world.now
        if self._is_refused(group, lambda: coordinator.delete_offsets(group, chosen, now)):
            return
        self.model.events += [Event("forget", group, place) for place in chosen]

    @rule(group=groups)
    def delete_group(self, group: str) -> None:
        if self._is_refused(group, lambda: self.world.coordinator.delete(group, self.world.now)):
            return
        self.model.events += [Event("forget", group, place) for place in PLACES]
        assert group not in self.world.coordinator.groups

    def _is_refused(self, group: str, ask: Callable[[], object]) -> bool:
        """For a good reason: there is no such group, or the log refuses."""
        try:
            ask()
        except ApiError as error:
            code = error.code
        else:
            return False
        if code is ErrorCode.group_id_not_found:
            assert group not in self.world.coordinator.groups
        else:
            assert code is self.world.journal.refuses
        return True

    @rule(topic=st.sampled_from(sorted(TOPICS)))
    @precondition(lambda self: self.world.journal.refuses is None)
    def delete_topic(self, topic: str) -> None:
        self.world.topics.delete(topic)
        self.world.topics.create(topic, TOPICS[topic])
        for group in ("one", "two"):
            self.model.events += [Event("forget", group, place) for place in PLACES if place[0] == topic]

    @rule()
    @precondition(lambda self: self.world.journal.refuses is None)
    def reload(self) -> None:
        self.world.reload()

    @rule()
    @precondition(lambda self: self.world.journal.refuses is None)
    def compact(self) -> None:
        """Records go whose keys have later ones, aborted ones, and markers that end nothing any more."""
        self.world.reload(compacted(self.world.journal.batches))

    @rule()
    def log_refuses_or_accepts(self) -> None:
        journal = self.world.journal
        journal.refuses = None if journal.refuses else ErrorCode.coordinator_not_available

    @invariant()
    def positions_are_those_of_the_model(self) -> None:
        positions, pending = self.model.look()
        coordinator = self.world.coordinator
        for group in ("one", "two"):
            for topic, index in PLACES:
                key = (group, topic, index)
                error, position = coordinator.committed(group, topic, index, require_stable=True)
                assert (error is ErrorCode.unstable_offset_commit) == (key in pending)
                _, position = coordinator.committed(group, topic, index, require_stable=False)
                assert (None if position is None else position.offset) == positions.get(key)
                if position is not None:
                    assert (position.leader_epoch, position.metadata) == (3, "note")

    @invariant()
    def whoever_has_a_position_is_a_group(self) -> None:
        positions, pending = self.model.look()
        with_positions = {group for group, _, _ in positions.keys() | pending}
        assert with_positions <= self.world.coordinator.groups.keys()


TestPositions = Positions.TestCase
TestPositions.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
