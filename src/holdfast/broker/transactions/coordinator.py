"""The coordinator of transactions: one machine for each partition of `__transaction_state`.

The order of effects, which is what makes a transaction whole:

1. A partition is added to the transaction (Ongoing, with the partition in the record) before anything is written to it:
   `add_before_write` calls back when the record is durable. A partition that may hold records of a transaction is
   therefore always known here.
2. The end is decided by one record (PrepareCommit, PrepareAbort). Once that is durable nothing can change it.
3. Then the markers are written to every partition of the record, and are durable.
4. Then whoever asked is answered, and the completion (CompleteCommit, CompleteAbort) is appended. Nobody waits for
   it: a start that finds a decision without it goes on at step 3, and a marker written twice ends nothing twice.

Before step 2 the transaction goes on over a restart, until its producer ends it, its time-out passes, or another
producer takes the transactional id over. Whoever loses it that way has the epoch raised above its own.

A request is decided, then appended, then applied, then answered; a refused append changes nothing. `reply` is called
once for each request, perhaps at once, and its caller holds the answer back until the journal is durable. Only what
must not *happen* earlier, the append of data and of markers, waits for the journal here.

A transactional id for which a producer id is being fetched is busy: until it has come, all who ask are told
CONCURRENT_TRANSACTIONS. A transactional id that is prepared answers the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from kio.schema.errors import ErrorCode

from holdfast.broker.transactions import rules
from holdfast.broker.transactions.model import (
    NEWER_PROTOCOL,
    NO_PRODUCER_ID,
    TRANSACTIONAL_ID_BYTES_MAX,
    AddPartitions,
    Decision,
    Ended,
    EndTransactionRequest,
    Initialised,
    InitProducer,
    ProducerIdentity,
    TopicPartition,
    TransactionMetadata,
    TransactionState,
    read_record,
    record_of,
    tombstone_of,
)
from holdfast.config.broker import BrokerConfig
from holdfast.errors import ApiError
from holdfast.saying import info, warn
from holdfast.seams import Journal, Now, Schedule, Scheduled
from holdfast.wire.batch import BatchHeader, Record

RETRY_MS: Final = 1000
"""How long after a marker or a completion could not be written it is tried again: a full disk may have room again."""
TOMBSTONES_PER_BATCH: Final = 500
TOMBSTONE_BYTES_PER_BATCH: Final = 512 * 1024
"""And one tombstone more: half of what `max.message.bytes` allows by default."""

Refusals: TypeAlias = Mapping[TopicPartition, ErrorCode]
"""Why partitions may not be written to; those that may are not in it."""


class TransactionJournal(Journal, Protocol):
    def append_unhurried(self, records: Sequence[tuple[bytes, bytes | None]], now: Now) -> None:
        """Append what nobody waits for: it becomes durable with what is appended next, or when an answer needs it."""
        ...


class ProducerIds(Protocol):
    def take(self, now: Now, done: Callable[[int | ApiError], None]) -> None:
        """Give an id nobody has had, once no crash can lead to its being given again."""
        ...


class Participants(Protocol):
    """The partitions that take part in transactions."""

    def when_recorded(
        self, partitions: Iterable[TopicPartition], done: Callable[[Exception | None], None]
    ) -> None:
        """Call `done` once no crash can take from the journal what it holds now and leave it to these partitions.

        That is when the journal is durable, in the order of the calls. Where partitions are flushed and the journal
        by its settings is not, it means more.
        """
        ...

    def write_markers(
        self,
        decision: Decision,
        partitions: Sequence[TopicPartition],
        now: Now,
        done: Callable[[Sequence[TopicPartition]], None],
    ) -> None:
        """Tell partitions how a transaction ended, and `done`, when they know durably, which could not be told.

        A partition that is no more need not be told.
        """
        ...


@dataclass(slots=True, eq=False, repr=False)
class Transaction:
    """One transactional id."""

    transactional_id: str
    metadata: TransactionMetadata
    deadline_ms: int = 0
    """While ongoing: when the monotonic clock gets here, the transaction has timed out."""
    is_busy: bool = False
    """A producer id is on its way."""
    is_held_up: bool = False
    """Decided, and some partition cannot be told; the operator knows."""
    reply: Callable[[Ended], None] | None = None
    """Who waits for the end that is under way."""


@dataclass(eq=False, repr=False)
class TransactionCoordinator:
    _journal: TransactionJournal
    _schedule: Schedule
    _settings: Callable[[], BrokerConfig]
    _producer_ids: ProducerIds
    _participants: Participants
    _say: Callable[[str], None] = lambda line: None
    transactions: dict[str, Transaction] = field(default_factory=dict, init=False)
    _new: set[str] = field(default_factory=set, init=False)
    """Transactional ids not known yet for which a producer id is on its way."""
    _ongoing: dict[str, Transaction] = field(default_factory=dict, init=False)
    _timers: dict[str, Scheduled] = field(default_factory=dict, init=False)
    """The sweeps that are set, by name."""
    _is_unloaded: bool = field(default=False, init=False)

    # Life

    def replay(self, header: BatchHeader, records: Sequence[Record]) -> None:
        if header.is_control:
            return
        for record in records:
            found = read_record(record)
            if found is None:
                continue
            transactional_id, metadata = found
            if metadata is None:
                self.transactions.pop(transactional_id, None)
            else:
                self.transactions[transactional_id] = Transaction(transactional_id, metadata)

    def loaded(self, now: Now) -> None:
        for transaction in list(self.transactions.values()):
            metadata = transaction.metadata
            if metadata.state is TransactionState.ONGOING:
                # The whole time again: how much of it has passed, only wall clocks of two runs could tell, and one
                # that was set back and forth would end a transaction whose producer is about to commit it.
                self._watch(transaction, metadata.timeout_ms, now)
            elif metadata.state.is_prepared:
                self._tell_partitions(transaction, sorted(metadata.partitions), now)
        if self.transactions:
            self._await_expiry(now)

    def names(self) -> Collection[str]:
        return self.transactions

    def unload(self) -> None:
        self._is_unloaded = True
        for timer in self._timers.values():
            timer.cancel()
        for transaction in self.transactions.values():
            self._answer(transaction, Ended(ErrorCode.coordinator_not_available))

    # InitProducerId

    def init_producer(self, request: InitProducer, now: Now, reply: Callable[[Initialised], None]) -> None:
        """A producer begins, or goes on after trouble: whoever had the transactional id before is fenced."""
        try:
            self._init(request, now, reply)
        except ApiError as error:
            reply(Initialised(error.code))

    def _init(self, request: InitProducer, now: Now, reply: Callable[[Initialised], None]) -> None:
        check_transactional_id(request.transactional_id)
        if not 0 < request.timeout_ms <= self._settings().transaction_max_timeout_ms:
            raise ApiError(
                ErrorCode.invalid_transaction_timeout,
                f"{request.timeout_ms} ms is not above 0 and up to transaction.max.timeout.ms",
            )
        transaction = self._find(request.transactional_id)
        if transaction is None:
            self._create(request, now, reply)
            return
        metadata, expected = transaction.metadata, request.expected
        rules.check_successor(metadata, expected)
        if metadata.state is TransactionState.ONGOING:
            self._fence(transaction, now, lambda ended: reply(_after_fence(ended)))
        elif rules.needs_new_id(metadata, expected):
            self._take_id(
                transaction,
                now,
                lambda producer_id: rules.with_new_id(
                    metadata, producer_id, request.timeout_ms, now.wall_ms, is_renewal=expected is not None
                ),
                lambda outcome: reply(_initialised(outcome)),
            )
        else:
            changed = rules.with_next_epoch(metadata, expected, request.timeout_ms, now.wall_ms)
            self._change(transaction, changed, now)
            reply(_initialised(changed))

    def _create(self, request: InitProducer, now: Now, reply: Callable[[Initialised], None]) -> None:
        transactional_id = request.transactional_id
        self._new.add(transactional_id)

        def go_on(taken: int | ApiError) -> None:
            self._new.discard(transactional_id)
            try:
                producer_id = self._usable(taken)
                metadata = rules.first_epoch(producer_id, request.timeout_ms, now.wall_ms)
                self._append(transactional_id, metadata, now)
            except ApiError as error:
                reply(Initialised(error.code))
                return
            self.transactions[transactional_id] = Transaction(transactional_id, metadata)
            self._await_expiry(now)
            reply(_initialised(metadata))

        self._producer_ids.take(now, go_on)

    def _take_id(
        self,
        transaction: Transaction,
        now: Now,
        change: Callable[[int], TransactionMetadata],
        done: Callable[[TransactionMetadata | ApiError], None],
    ) -> None:
        """Fetch a producer id, and change the transaction with it. Nothing else changes it meanwhile."""
        transaction.is_busy = True

        def go_on(taken: int | ApiError) -> None:
            transaction.is_busy = False
            try:
                changed = change(self._usable(taken))
                self._change(transaction, changed, now)
            except ApiError as error:
                done(error)
                return
            done(changed)

        self._producer_ids.take(now, go_on)

    def _usable(self, taken: int | ApiError) -> int:
        if isinstance(taken, ApiError):
            raise taken
        if self._is_unloaded:
            raise ApiError(ErrorCode.coordinator_not_available, "the coordinator was unloaded")
        return taken

    # Partitions

    def add_partitions(self, request: AddPartitions, now: Now) -> ErrorCode:
        """Add partitions to the transaction for a client that will not write to them before this is answered."""
        try:
            self._add(request, now)
        except ApiError as error:
            return error.code
        return ErrorCode.none

    def add_before_write(self, request: AddPartitions, now: Now, done: Callable[[Refusals], None]) -> None:
        """Add partitions to the transaction, and say when they may be written to: in the order of the calls."""
        self._when_durable(request, self.add_partitions(request, now), done)

    def verify(self, request: AddPartitions, done: Callable[[Refusals], None]) -> None:
        """Say when partitions that were added to the transaction before may be written to, and which were not."""
        try:
            self._check(request)
        except ApiError as error:
            self._when_durable(request, error.code, done)
        else:
            self._when_durable(request, ErrorCode.none, done)

    def partitions_outside(self, request: AddPartitions) -> Refusals:
        """Which partitions are not part of the producer's transaction, and why: a question alone."""
        try:
            missing = self._check(request)
        except ApiError as error:
            return dict.fromkeys(request.partitions, error.code)
        return dict.fromkeys(missing, ErrorCode.transaction_abortable)

    def _add(self, request: AddPartitions, now: Now) -> None:
        transaction = self._known(request.transactional_id)
        before = transaction.metadata
        changed = rules.with_partitions(before, request, now.wall_ms)
        if changed is before:
            return
        self._change(transaction, changed, now)
        if before.state is not TransactionState.ONGOING:
            self._watch(transaction, changed.timeout_ms, now)

    def _check(self, request: AddPartitions) -> frozenset[TopicPartition]:
        return rules.missing_partitions(self._known(request.transactional_id).metadata, request)

    def _when_durable(
        self, request: AddPartitions, code: ErrorCode, done: Callable[[Refusals], None]
    ) -> None:
        def pass_on(error: Exception | None) -> None:
            if error is not None:
                done(dict.fromkeys(request.partitions, ErrorCode.coordinator_not_available))
            elif code is not ErrorCode.none:
                done(dict.fromkeys(request.partitions, code))
            else:
                # Asked again: the transaction may have been ended by somebody else while the record was flushed.
                done(self.partitions_outside(request))

        # All partitions of the transaction are named, so that whoever waits is called in order.
        transaction = self.transactions.get(request.transactional_id)
        partitions = transaction.metadata.partitions if transaction is not None else request.partitions
        self._participants.when_recorded(partitions, pass_on)

    # EndTxn

    def end(self, request: EndTransactionRequest, now: Now, reply: Callable[[Ended], None]) -> None:
        """Commit or abort; answered when every partition knows."""
        try:
            transaction = self._known(request.transactional_id)
            state = rules.end_of(transaction.metadata, request)
            if state is not None:
                self._decide(transaction, state, request.client_version, now, reply)
                return
        except ApiError as error:
            reply(Ended(error.code))
            return
        metadata = transaction.metadata
        reply(Ended(ErrorCode.none, metadata.producer_id, metadata.producer_epoch))

    def _fence(self, transaction: Transaction, now: Now, reply: Callable[[Ended], None]) -> None:
        """Abort what is ongoing, with an epoch above its producer's."""
        self._decide(transaction, TransactionState.PREPARE_ABORT, NEWER_PROTOCOL, now, reply)

    def _decide(
        self,
        transaction: Transaction,
        state: TransactionState,
        client_version: int,
        now: Now,
        reply: Callable[[Ended], None],
    ) -> None:
        metadata = transaction.metadata

        def decided(outcome: TransactionMetadata | ApiError) -> None:
            if isinstance(outcome, ApiError):
                reply(Ended(outcome.code))
            else:
                self._carry_out(transaction, now, reply)

        def change(next_producer_id: int) -> TransactionMetadata:
            return rules.prepared(metadata, state, client_version, next_producer_id, now.wall_ms)

        if client_version >= NEWER_PROTOCOL and metadata.is_exhausted:
            self._take_id(transaction, now, change, decided)
        else:
            changed = change(NO_PRODUCER_ID)
            self._change(transaction, changed, now)
            decided(changed)

    def _carry_out(self, transaction: Transaction, now: Now, reply: Callable[[Ended], None]) -> None:
        """The decision is appended: when it is durable, it goes to the partitions."""
        transaction.reply = reply

        def pass_on(error: Exception | None) -> None:
            if error is not None:
                self._answer(transaction, Ended(ErrorCode.coordinator_not_available))
            else:
                self._tell_partitions(transaction, sorted(transaction.metadata.partitions), now)

        self._participants.when_recorded(transaction.metadata.partitions, pass_on)

    def _tell_partitions(
        self, transaction: Transaction, partitions: Sequence[TopicPartition], now: Now
    ) -> None:
        if self._is_unloaded:
            return
        metadata = transaction.metadata
        decision = Decision(
            transaction.transactional_id,
            ProducerIdentity(metadata.producer_id, metadata.producer_epoch),
            metadata.state is TransactionState.PREPARE_COMMIT,
            metadata.client_version,
        )
        self._participants.write_markers(
            decision, partitions, now, lambda left: self._told(transaction, left, now)
        )

    def _told(self, transaction: Transaction, left: Sequence[TopicPartition], now: Now) -> None:
        """Answered before the completion is appended, so that the answer does not wait for its flush."""
        if self._is_unloaded:
            return
        after = rules.completed(transaction.metadata, now.wall_ms)
        self._answer(transaction, Ended(ErrorCode.none, after.producer_id, after.producer_epoch))
        if not left:
            transaction.is_held_up = False
            self._complete(transaction, after, now)
            return
        if not transaction.is_held_up:
            transaction.is_held_up = True
            topic, index = left[0]
            others = f" and {len(left) - 1} others" if len(left) > 1 else ""
            self._say(
                warn(
                    f"transaction {transaction.transactional_id!r} is decided, and {topic}-{index}{others} could not "
                    "be told: tried again until it is so, at the next start at the latest",
                    kind="markers",
                )
            )
        self._retry(transaction, left, now)

    def _complete(self, transaction: Transaction, after: TransactionMetadata, now: Now) -> None:
        try:
            self._journal.append_unhurried([record_of(transaction.transactional_id, after)], now)
        except ApiError:
            self._retry(transaction, (), now)
        else:
            transaction.metadata = after

    def _retry(self, transaction: Transaction, left: Sequence[TopicPartition], now: Now) -> None:
        """What has been decided is carried out sooner or later."""

        def again(later: Now) -> None:
            del self._timers[name]
            try:
                self._tell_partitions(transaction, left, later)
            except Exception:
                self._retry(transaction, left, later)
                raise

        name = f"retry {transaction.transactional_id}"
        self._timers[name] = self._schedule.at(now.monotonic_ms + RETRY_MS, again)

    def _answer(self, transaction: Transaction, ended: Ended) -> None:
        reply, transaction.reply = transaction.reply, None
        if reply is not None:
            reply(ended)

    # Time

    def _watch(self, transaction: Transaction, timeout_ms: int, now: Now) -> None:
        transaction.deadline_ms = now.monotonic_ms + timeout_ms
        self._ongoing[transaction.transactional_id] = transaction
        self._await_time_outs(now)

    def _await_time_outs(self, now: Now) -> None:
        interval_ms = self._settings().transaction_abort_timed_out_transaction_cleanup_interval_ms
        self._sweep("time-outs", interval_ms, self._abort_timed_out, now)

    def _await_expiry(self, now: Now) -> None:
        interval_ms = self._settings().transaction_remove_expired_transaction_cleanup_interval_ms
        self._sweep("expiry", interval_ms, self._forget_expired, now)

    def _sweep(self, name: str, interval_ms: int, action: Callable[[Now], None], now: Now) -> None:
        """Run `action` once, an interval from now, unless that is set already."""
        if name not in self._timers:

            def run(later: Now) -> None:
                del self._timers[name]
                action(later)

            self._timers[name] = self._schedule.at(now.monotonic_ms + interval_ms, run)

    def _abort_timed_out(self, now: Now) -> None:
        defects: list[Exception] = []
        for transaction in list(self._ongoing.values()):
            if transaction.deadline_ms > now.monotonic_ms or transaction.is_busy:
                continue
            self._say(
                info(
                    f"transaction {transaction.transactional_id!r} is not ended after "
                    f"{transaction.metadata.timeout_ms} ms: aborted",
                    kind="timed-out transaction",
                )
            )
            try:
                self._fence(transaction, now, lambda ended: None)
            except ApiError as error:
                text = f"transaction {transaction.transactional_id!r} cannot be aborted now: {error}"
                self._say(warn(text, kind="abort"))
            except Exception as defect:  # noqa: BLE001 - it must not keep the others' transactions open
                defects.append(defect)
        if self._ongoing:
            self._await_time_outs(now)
        if defects:
            raise ExceptionGroup("transactions whose time is over could not be aborted", defects)

    def _forget_expired(self, now: Now) -> None:
        """Forget the ids that were not used for long; the next producer that comes with one gets another id."""
        if self.transactions:
            # Before anything can go wrong: a defect in one round must not end all of them.
            self._await_expiry(now)
        before_ms = now.wall_ms - self._settings().transactional_id_expiration_ms
        expired = [
            transaction.transactional_id
            for transaction in self.transactions.values()
            if transaction.metadata.state.may_expire
            and transaction.metadata.last_update_ms <= before_ms
            and not transaction.is_busy
        ]
        left = len(expired)
        for tombstones in _batches_of_tombstones(expired):
            try:
                self._journal.append(list(tombstones.values()), now)
            except ApiError as error:
                self._say(warn(f"{left} transactional ids cannot be forgotten now: {error}", kind="expiry"))
                break
            for transactional_id in tombstones:
                del self.transactions[transactional_id]
            left -= len(tombstones)

    # Finding and changing

    def _find(self, transactional_id: str) -> Transaction | None:
        transaction = self.transactions.get(transactional_id)
        if transactional_id in self._new or (transaction is not None and transaction.is_busy):
            raise ApiError(ErrorCode.concurrent_transactions, "a producer id is being fetched")
        return transaction

    def _known(self, transactional_id: str) -> Transaction:
        check_transactional_id(transactional_id)
        transaction = self._find(transactional_id)
        if transaction is None:
            raise ApiError(
                ErrorCode.invalid_producer_id_mapping, f"no transactional id {transactional_id!r} is known"
            )
        return transaction

    def _change(self, transaction: Transaction, changed: TransactionMetadata, now: Now) -> None:
        self._append(transaction.transactional_id, changed, now)
        transaction.metadata = changed
        if changed.state is not TransactionState.ONGOING:
            self._ongoing.pop(transaction.transactional_id, None)

    def _append(self, transactional_id: str, metadata: TransactionMetadata, now: Now) -> None:
        try:
            self._journal.append([record_of(transactional_id, metadata)], now)
        except ApiError as error:
            if error.code is ErrorCode.message_too_large:
                # More partitions than a record can name: as with Kafka, this has no error of its own.
                raise ApiError(ErrorCode.unknown_server_error, error.message) from error
            raise

    # Showing

    def describe(self, transactional_id: str) -> TransactionMetadata | None:
        transaction = self.transactions.get(transactional_id)
        return transaction.metadata if transaction is not None else None

    def __iter__(self) -> Iterator[tuple[str, TransactionMetadata]]:
        return ((name, transaction.metadata) for name, transaction in self.transactions.items())


def check_transactional_id(transactional_id: str | None) -> None:
    if (
        not transactional_id
        or len(transactional_id.encode("utf-8", "surrogatepass")) > TRANSACTIONAL_ID_BYTES_MAX
    ):
        raise ApiError(
            ErrorCode.invalid_request, "a transactional id has at least one byte and at most 32767"
        )


def _batches_of_tombstones(transactional_ids: Iterable[str]) -> Iterator[dict[str, tuple[bytes, None]]]:
    """What takes ids out of the log, in parts that fit a batch each."""
    part: dict[str, tuple[bytes, None]] = {}
    size = 0
    for transactional_id in transactional_ids:
        tombstone = part[transactional_id] = tombstone_of(transactional_id)
        size += len(tombstone[0])
        if len(part) >= TOMBSTONES_PER_BATCH or size >= TOMBSTONE_BYTES_PER_BATCH:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _initialised(outcome: TransactionMetadata | ApiError) -> Initialised:
    if isinstance(outcome, ApiError):
        return Initialised(outcome.code)
    return Initialised(ErrorCode.none, outcome.producer_id, outcome.producer_epoch)


def _after_fence(ended: Ended) -> Initialised:
    """The transaction of the one before is out of the way; the producer comes again and gets the epoch after."""
    if ended.error is ErrorCode.none:
        return Initialised(ErrorCode.concurrent_transactions)
    return Initialised(ended.error)
