"""What must hold of transactions: all of one or none, decided once, and nobody fenced takes part.

    aborted-shown        a reader of committed records never sees one of an aborted transaction
    undecided-shown      nor one of a transaction whose commit nobody asked for
    committed-hidden     and never misses one of a committed transaction, or of none
    torn-transaction     the outcome is one: what was acknowledged, and what every reader saw, of all its records
                         and positions
    fenced-wrote         after a new session of a transactional id was begun, nothing an earlier one sends is stored
    fenced-ended         nor does it end its transaction

A transaction whose end was never acknowledged may have either outcome if its commit was asked for; otherwise it is
aborted sooner or later. The first reader to see or pass over one of its records fixes the outcome for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.testing import history
from holdfast.testing.checkers_base import Checker, broken

Outcome = Literal["committed", "aborted"]


@dataclass(slots=True, eq=False)
class _Session:
    name: str
    fenced: bool = False


@dataclass(slots=True, eq=False)
class _Transaction:
    name: str
    transactional_id: str
    session: _Session
    may_commit: bool = False
    """Its commit was asked for by a session that was not known to be fenced."""
    outcome: Outcome | None = None
    why: str = ""
    complete: bool = False
    """The commit was acknowledged and carried out."""


@dataclass(slots=True)
class _Holder:
    session: _Session
    producer_id: int
    epoch: int


class TransactionsChecker(Checker):
    def __init__(self) -> None:
        self._transactions: dict[str, _Transaction] = {}
        self._sessions: dict[str, _Session] = {}
        self._holders: dict[str, _Holder] = {}
        self._of_value: dict[bytes, _Transaction] = {}
        self._sent_fenced: set[tuple[str, int]] = set()
        """Batches, as (producer, number), sent by a session that had been fenced before."""
        self._sent_fenced_values: set[bytes] = set()
        super().__init__(
            {
                history.TransactionalIdTaken: self._taken,
                history.TransactionBegun: self._begun,
                history.TransactionEndRequested: self._end_requested,
                history.TransactionEnded: self._ended,
                history.BatchSent: self._sent,
                history.BatchAcknowledged: self._acknowledged,
                history.BatchesRead: self._read,
            }
        )

    # What other checkers ask

    def outcome(self, transaction: str) -> Outcome | None:
        return self._transactions[transaction].outcome

    def is_fenced(self, transaction: str) -> bool:
        return self._transactions[transaction].session.fenced

    def shown(self, transaction: str, what: str) -> None:
        """Something of the transaction was shown to somebody who wants nothing but committed."""
        known = self._transactions[transaction]
        if known.outcome == "aborted":
            broken("aborted-shown", f"{what} of {known.name} was shown, which is aborted: {known.why}")
        if not known.may_commit:
            broken("undecided-shown", f"{what} of {known.name} was shown; nobody could commit it")
        self._decide(known, "committed", f"{what} was shown")

    # Sessions

    def _session(self, name: str) -> _Session:
        return self._sessions.setdefault(name, _Session(name))

    def _taken(self, event: history.TransactionalIdTaken) -> None:
        session = self._session(event.session)
        holder = self._holders.get(event.transactional_id)
        if holder is not None and holder.session is not session:
            if holder.producer_id == event.producer_id and holder.epoch > event.epoch:
                session.fenced = True  # the answers of two requests crossed
                return
            holder.session.fenced = True
        self._holders[event.transactional_id] = _Holder(session, event.producer_id, event.epoch)
        for transaction in self._transactions.values():
            if (
                transaction.transactional_id == event.transactional_id
                and transaction.outcome is None
                and not transaction.may_commit
            ):
                self._decide(transaction, "aborted", f"{event.session} began after it")

    # Transactions

    def _begun(self, event: history.TransactionBegun) -> None:
        self._transactions[event.transaction] = _Transaction(
            event.transaction, event.transactional_id, self._session(event.session)
        )

    def _end_requested(self, event: history.TransactionEndRequested) -> None:
        transaction = self._transactions[event.transaction]
        if event.commit and not transaction.session.fenced:
            transaction.may_commit = True

    def _ended(self, event: history.TransactionEnded) -> None:
        transaction = self._transactions[event.transaction]
        if event.commit and not transaction.may_commit:
            broken("fenced-ended", f"{transaction.name} was committed by a session that was fenced before")
        self._decide(transaction, "committed" if event.commit else "aborted", "acknowledged")
        transaction.complete = event.complete

    def _decide(self, transaction: _Transaction, outcome: Outcome, why: str) -> None:
        if transaction.outcome is None:
            transaction.outcome, transaction.why = outcome, why
        elif transaction.outcome != outcome:
            broken(
                "torn-transaction",
                f"{transaction.name} is {transaction.outcome} ({transaction.why}) and {outcome} ({why})",
            )

    # Records

    def _sent(self, event: history.BatchSent) -> None:
        if event.transaction is None:
            return
        transaction = self._transactions[event.transaction]
        for value in event.values:
            self._of_value[value] = transaction
        if transaction.session.fenced:
            self._sent_fenced.add((event.producer, event.number))
            self._sent_fenced_values.update(event.values)

    def _acknowledged(self, event: history.BatchAcknowledged) -> None:
        if (event.producer, event.number) in self._sent_fenced:
            broken(
                "fenced-wrote",
                f"batch {event.number} of {event.producer} was sent after a newer session began",
            )

    def _read(self, event: history.BatchesRead) -> None:
        name = f"{event.reader} of {event.partition}"
        for stored in event.batches:
            if stored.marker is not None or not stored.values:
                continue
            value = stored.values[0]
            transaction = self._of_value.get(value)
            what = f"{name}: {value[:30]!r} at {stored.base_offset}"
            if value in self._sent_fenced_values:
                broken("fenced-wrote", f"{what} was sent after a newer session began")
            if not event.committed_only:
                continue
            if stored.base_offset in event.hidden:
                self._hidden(transaction, what)
            elif transaction is not None:
                self.shown(transaction.name, what)

    def _hidden(self, transaction: _Transaction | None, what: str) -> None:
        if transaction is None:
            broken("committed-hidden", f"{what} belongs to no transaction and was hidden")
        if transaction.outcome == "committed":
            broken("committed-hidden", f"{what} of {transaction.name} was hidden: {transaction.why}")
        self._decide(transaction, "aborted", f"{what} was hidden")
