"""The coordinator against a simple model: what producers were told, and what their records became.

Producers of several transactional ids, those that were fenced among them, write, end, retry and begin anew, while the
journal refuses, answers are lost, partitions go offline, time passes, and the coordinator dies at any point with any
part of what was not durable. Whatever happens:

- a transaction is committed everywhere or nowhere;
- what a producer was told about its end is so, for good;
- a partition never holds records of a transaction that the coordinator does not know of;
- a producer id with its epoch is given to one producer alone, and one that was fenced changes nothing;
- a retried end gets the same answer, with an epoch that no transaction had;
- in the end everything is decided.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kio.schema.errors import ErrorCode
from tests.support.compacting import compacted
from tests.support.coordinator_worlds import Answers, TransactionWorld
from tests.support.tiers import by_tier, examples

from holdfast.broker.transactions.model import (
    EPOCH_USABLE_MAX,
    NEWER_PROTOCOL,
    OLDER_PROTOCOL,
    Ended,
    Initialised,
    ProducerIdentity,
    TransactionMetadata,
    TransactionState,
    read_record,
    record_of,
)
from holdfast.wire.batch import Record

IDS = ("copy", "nearly used up")
PARTITIONS = (("orders", 0), ("positions", 7))
TIMEOUT_MS = 20_000
WHO = st.integers(0, 15)
THEN = st.sampled_from(("everything", "everything", "journal", "partitions", "nothing"))
"""What becomes durable before the next thing happens."""


@dataclass
class Attempt:
    """One transaction as its producer sees it."""

    identity: ProducerIdentity
    values: dict[str, tuple[str, int]] = field(default_factory=dict)
    """What was acknowledged to it, and where that is."""
    wish: bool | None = None
    """How it asked for the end, once it has."""
    told: bool | None = None
    """What it was told about the end."""
    successor: ProducerIdentity | None = None
    """Who writes the next transaction, as it was told by the newer protocol."""


@dataclass
class Client:
    transactional_id: str
    version: int
    identity: ProducerIdentity | None = None
    attempt: Attempt | None = None
    awaited: list[tuple[str, Answers]] = field(default_factory=list)
    """Kind and answers of the requests under way."""
    values_awaited: list[tuple[str, tuple[str, int], Answers]] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        return not self.awaited and not self.values_awaited


class CoordinatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = TransactionWorld()
        self.clients: list[Client] = []
        self.attempts: list[Attempt] = []
        self.given: set[tuple[str, ProducerIdentity]] = set()
        self.values = 0

    @initialize(versions=st.tuples(*[st.sampled_from((OLDER_PROTOCOL, NEWER_PROTOCOL))] * 4))
    def clients_begin(self, versions: tuple[int, ...]) -> None:
        """Two transactional ids, of one of which the epochs are nearly used up, with two producers each."""
        world = self.world
        world.started(IDS[1])
        changed = world.metadata(IDS[1])._replace(producer_epoch=EPOCH_USABLE_MAX - 3)
        world.journal.append([record_of(IDS[1], changed)], world.now)
        world.settle()
        world.crash()
        for name, version in zip(IDS * 2, versions, strict=True):
            identity = world.started(name, timeout_ms=TIMEOUT_MS)
            self.clients.append(Client(name, version, identity))
            self.given.add((name, identity))

    # Producers

    def _take(self, who: int, *, of_owners: bool) -> Client:
        """A producer that waits for nothing; now and then one that was fenced."""
        client = self.clients[who % len(self.clients)]
        if of_owners and who < len(self.clients) * 3:
            owner = next(
                (other for other in self.clients if self._owns(other, client.transactional_id)), client
            )
            client = owner
        if not client.is_idle:
            self._flush("everything")
        client.awaited.clear()
        client.values_awaited.clear()
        return client

    def _owns(self, client: Client, name: str) -> bool:
        metadata = self._metadata(client)
        return (
            client.transactional_id == name
            and metadata is not None
            and client.identity == (metadata.producer_id, metadata.producer_epoch)
        )

    @rule(who=WHO, says_who_it_was=st.booleans(), then=THEN)
    def init(self, who: int, says_who_it_was: bool, then: str) -> None:
        client = self._take(who, of_owners=False)
        expected = client.identity if says_who_it_was else None
        before = self._metadata(client)
        answers = self.world.init(client.transactional_id, timeout_ms=TIMEOUT_MS, expected=expected)
        if expected is not None and before is not None and before.state is TransactionState.ONGOING:
            self._check_stale(client, expected, before)
        client.awaited.append(("renewal" if expected else "init", answers))
        self._flush(then)

    @rule(who=WHO, partitions=st.sets(st.sampled_from(PARTITIONS), min_size=1), then=THEN)
    def produce(self, who: int, partitions: set[tuple[str, int]], then: str) -> None:
        client = self._take(who, of_owners=True)
        identity, attempt = client.identity, client.attempt
        assert identity is not None
        if attempt is None or attempt.wish is not None:
            attempt = client.attempt = Attempt(identity)
            self.attempts.append(attempt)
        for partition in sorted(partitions):
            before = self._metadata(client)
            if client.version == OLDER_PROTOCOL and not self._added(client, identity, partition):
                self._check_stale(client, identity, before)
                continue
            self.values += 1
            value = f"v{self.values}"
            answers = self.world.produce(
                client.transactional_id, identity, partition, value, client_version=client.version
            )
            client.values_awaited.append((value, partition, answers))
            self._check_stale(client, identity, before)
        self._flush(then)

    def _added(self, client: Client, identity: ProducerIdentity, partition: tuple[str, int]) -> bool:
        """Clients of the older protocol wait for this before they write."""
        added = self.world.add(client.transactional_id, identity, partition)
        if not added.given:
            self._flush("journal")
        return bool(added.only is ErrorCode.none)

    @rule(who=WHO, is_commit=st.booleans(), then=THEN)
    def end(self, who: int, is_commit: bool, then: str) -> None:
        """For the first time, or once more, since the answer was lost or asks to come again."""
        client = self._take(who, of_owners=True)
        attempt = client.attempt
        if attempt is None:
            return
        if attempt.wish is None:
            attempt.wish = is_commit
        self._send_end(client, attempt.identity)
        self._flush(then)

    def _send_end(self, client: Client, identity: ProducerIdentity) -> None:
        attempt = client.attempt
        assert attempt is not None
        assert attempt.wish is not None
        answers = self.world.end(
            client.transactional_id, identity, is_commit=attempt.wish, client_version=client.version
        )
        client.awaited.append(("end", answers))

    # Answers

    def _collect(self) -> None:
        for client in self.clients:
            for value in list(client.values_awaited):
                name, partition, answers = value
                if answers.given:
                    client.values_awaited.remove(value)
                    if answers.only is ErrorCode.none and client.attempt is not None:
                        client.attempt.values[name] = partition
            for request in list(client.awaited):
                kind, answers = request
                if answers.given:
                    client.awaited.remove(request)
                    self._answered(client, kind, answers.only)

    def _answered(self, client: Client, kind: str, answer: object) -> None:
        if isinstance(answer, Initialised) and answer.error is ErrorCode.none:
            identity = ProducerIdentity(answer.producer_id, answer.producer_epoch)
            if kind == "init":
                claim = (client.transactional_id, identity)
                assert claim not in self.given, f"{claim} was given twice"
                self.given.add(claim)
            client.identity = identity
            client.attempt = None
        elif isinstance(answer, Ended) and answer.error is ErrorCode.none and client.attempt is not None:
            attempt = client.attempt
            assert attempt.wish is not None
            attempt.told = attempt.wish
            if client.version == NEWER_PROTOCOL:
                successor = ProducerIdentity(answer.producer_id, answer.producer_epoch)
                assert attempt.successor in (None, successor), "a retry got another answer"
                assert successor != attempt.identity, "two transactions have one epoch"
                client.identity = attempt.successor = successor

    def _metadata(self, client: Client) -> TransactionMetadata | None:
        return self.world.coordinator.describe(client.transactional_id)

    def _check_stale(
        self, client: Client, identity: ProducerIdentity, before: TransactionMetadata | None
    ) -> None:
        if before is None or (before.producer_id, before.producer_epoch) != identity:
            assert self._metadata(client) == before, "a fenced producer changed something"

    # The world

    @rule(what=THEN)
    def flushes_return(self, what: str) -> None:
        self._flush(what)

    def _flush(self, what: str) -> None:
        if what == "journal":
            self.world.journal.flush()
        elif what == "partitions":
            self.world.flush_partitions()
        elif what == "everything":
            self.world.settle()
        self._collect()

    @rule(ms=st.sampled_from((1_000, 10_000, 31_000)))
    def time_passes(self, ms: int) -> None:
        self.world.advance(ms)
        self._collect()

    @rule(
        refuses=st.booleans(),
        ids_wait=st.booleans(),
        offline=st.sets(st.sampled_from(PARTITIONS), max_size=1),
    )
    def trouble_comes_or_goes(self, refuses: bool, ids_wait: bool, offline: set[tuple[str, int]]) -> None:
        self.world.journal.refuses = ErrorCode.coordinator_not_available if refuses else None
        self.world.producer_ids_wait = ids_wait
        if not ids_wait:
            self.world.hand_out()
        for name, partition in self.world.partitions.items():
            partition.is_offline = name in offline
        self._collect()

    @rule(
        keep=st.sampled_from((0, 0, 1, 3)),
        keep_in_partitions=st.sampled_from((0, 1, 3)),
        compacts=st.sampled_from((*(False,) * 9, True)),
    )
    def the_coordinator_dies(self, keep: int, keep_in_partitions: int, compacts: bool) -> None:
        if compacts:
            journal = self.world.journal
            cleaned = compacted(journal.batches[: journal.durable])
            journal.batches[: journal.durable] = cleaned
            journal.durable = len(cleaned)
        for client in self.clients:
            client.awaited.clear()
            client.values_awaited.clear()
        self.world.crash(keep, keep_in_partitions)

    @rule(who=WHO)
    def answers_are_lost(self, who: int) -> None:
        client = self.clients[who % len(self.clients)]
        client.awaited.clear()
        client.values_awaited.clear()

    # What must be so

    def _fates(self, attempt: Attempt) -> set[bool | None]:
        fates: set[bool | None] = set()
        for value, partition in attempt.values.items():
            fates.add(self.world.partitions[partition].outcomes().get(value))
        return fates

    @invariant()
    def a_transaction_is_whole(self) -> None:
        for attempt in self.attempts:
            fates = self._fates(attempt)
            assert not {True, False} <= fates, attempt
            if attempt.told is not None:
                assert (not attempt.told) not in fates, attempt
                if not any(partition.is_offline for partition in self.world.partitions.values()):
                    assert None not in fates or self._is_held_up(), attempt

    @invariant()
    def nothing_is_decided_while_the_transaction_goes_on(self) -> None:
        for client in self.clients:
            metadata = self._metadata(client)
            if (
                client.version == NEWER_PROTOCOL
                and client.attempt is not None
                and metadata is not None
                and metadata.state is TransactionState.ONGOING
                and client.attempt.identity == (metadata.producer_id, metadata.producer_epoch)
            ):
                assert self._fates(client.attempt) <= {None}, client.attempt

    def _is_held_up(self) -> bool:
        """A partition that was offline is told of the end a little after it has come back."""
        return any(metadata.state.is_prepared for _, metadata in self.world.coordinator)

    @invariant()
    def no_partition_holds_what_the_coordinator_does_not_know(self) -> None:
        for name, partition in self.world.partitions.items():
            for producer_id in partition.open_transactions():
                assert any(
                    metadata.producer_id == producer_id
                    and name in metadata.partitions
                    and (metadata.state is TransactionState.ONGOING or metadata.state.is_prepared)
                    for _, metadata in self.world.coordinator
                ), f"{name} holds a transaction of {producer_id} that nobody will end"

    @invariant()
    def a_start_would_know_all_that_is_known(self) -> None:
        for name, metadata in self.world.coordinator:
            assert read_record(Record(0, 0, *record_of(name, metadata))) == (name, metadata)

    def teardown(self) -> None:
        world = self.world
        world.journal.refuses = None
        world.producer_ids_wait = False
        for partition in world.partitions.values():
            partition.is_offline = False
        world.settle()
        for _ in range(3):
            world.advance(TIMEOUT_MS)
            world.settle()
        self._collect()
        for partition in world.partitions.values():
            assert not partition.open_transactions()
        for _, metadata in world.coordinator:
            assert metadata.state.may_expire, metadata
        for attempt in self.attempts:
            fates = self._fates(attempt)
            assert len(fates) <= 1, attempt
            if attempt.told is not None:
                assert fates <= {attempt.told}, attempt


TestCoordinatorModel = CoordinatorMachine.TestCase
TestCoordinatorModel.settings = settings(max_examples=examples(150), stateful_step_count=50, deadline=None)


WALKS = by_tier(quick=2, check=10, long=100)
WALK_STEPS = 400


def walk(machine: CoordinatorMachine, chance: random.Random) -> None:
    """One step of a long way: more work and less trouble than hypothesis would choose."""
    who, then = chance.randrange(16), chance.choice(("everything", "everything", "journal", "partitions", ""))
    step = chance.choices(range(8), (30, 30, 6, 15, 3, 3, 6, 4))[0]
    if step == 0:
        machine.produce(who=who, partitions=set(chance.sample(PARTITIONS, chance.randint(1, 2))), then=then)
    elif step == 1:
        machine.end(who=who, is_commit=chance.random() < 0.7, then=then)
    elif step == 2:
        machine.init(who=who, says_who_it_was=chance.random() < 0.5, then=then)
    elif step == 3:
        machine.flushes_return(what=then)
    elif step == 4:
        machine.time_passes(ms=chance.choice((1_000, 10_000, 31_000)))
    elif step == 5:
        machine.trouble_comes_or_goes(
            refuses=chance.random() < 0.2,
            ids_wait=chance.random() < 0.2,
            offline=set(chance.sample(PARTITIONS, chance.choice((0, 0, 0, 1)))),
        )
    elif step == 6:
        machine.the_coordinator_dies(
            keep=chance.choice((0, 0, 1, 3)),
            keep_in_partitions=chance.choice((0, 1, 3)),
            compacts=chance.random() < 0.05,
        )
    else:
        machine.answers_are_lost(who=who)


@pytest.mark.parametrize("seed", range(WALKS))
def test_long_walks(seed: int) -> None:
    chance = random.Random(seed)
    machine = CoordinatorMachine()
    machine.clients_begin(versions=tuple(chance.choice((OLDER_PROTOCOL, NEWER_PROTOCOL)) for _ in range(4)))
    for _ in range(WALK_STEPS):
        walk(machine, chance)
        machine.a_transaction_is_whole()
        machine.nothing_is_decided_while_the_transaction_goes_on()
        machine.no_partition_holds_what_the_coordinator_does_not_know()
        machine.a_start_would_know_all_that_is_known()
    machine.teardown()
