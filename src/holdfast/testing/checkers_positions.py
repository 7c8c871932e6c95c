"""What must hold of a group's committed positions: each is a register, and an acknowledged write is never lost.

    position-lost        whoever asks is told the last acknowledged position, or one that may have come after it;
                         never one that was replaced before: positions never move back except by request
    position-changed     what is told was committed so
    refused-position     what the broker refused is never told
    fenced-commit        a member, or a producer, that was fenced before it sent a position does not change it
    aborted-shown, undecided-shown, torn-transaction
                         a position of a transaction shows if and only if the transaction is committed

Each commit has a name of its own that travels with the position, so that equal offsets are told apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.testing import history
from holdfast.testing.checkers_base import Checker, broken
from holdfast.testing.checkers_groups import MembershipChecker
from holdfast.testing.checkers_transactions import TransactionsChecker
from holdfast.testing.history import Event, Partition

NEVER = 1 << 62


@dataclass(slots=True, eq=False)
class _Write:
    commit: str
    offset: int
    """-1 for a deletion, and for the beginning."""
    sent_at: int
    done_at: int = NEVER
    """It was acknowledged or shown by then."""
    replaced_at: int = NEVER
    """By then another one had replaced it."""
    refused: bool = False
    fenced: bool = False
    transaction: str | None = None


@dataclass(slots=True)
class _Register:
    writes: dict[str, _Write] = field(default_factory=lambda: {"": _Write("", -1, 0, 0)})
    shown: _Write | None = None
    shown_at: int = -1


class PositionsChecker(Checker):
    def __init__(self, transactions: TransactionsChecker, membership: MembershipChecker) -> None:
        self._transactions = transactions
        self._membership = membership
        self._registers: dict[tuple[str, Partition], _Register] = {}
        self._pending: dict[str, list[tuple[_Register, _Write]]] = {}
        """Positions that travel in a transaction, by its name."""
        self._begun: dict[tuple[str, str], int] = {}
        self._event = 0
        super().__init__(
            {
                history.PositionsCommitSent: self._sent,
                history.PositionsCommitAnswered: self._answered,
                history.PositionsDeletionRequested: self._deletion_requested,
                history.PositionsDeleted: self._deleted,
                history.PositionsFetchBegun: self._fetch_begun,
                history.PositionsFetched: self._fetched,
                history.TransactionEnded: self._ended,
                history.EverythingSettled: self._settled,
            }
        )

    def observe(self, event: Event) -> None:
        self._event += 1
        super().observe(event)

    def register(self, group: str, partition: Partition) -> _Register:
        key = group, partition
        found = self._registers.get(key)
        if found is None:
            found = self._registers[key] = _Register()
        return found

    # Writing

    def _sent(self, event: history.PositionsCommitSent) -> None:
        fenced = self._membership.is_fenced(event.group, event.member, event.generation)
        if event.transaction is not None and self._transactions.is_fenced(event.transaction):
            fenced = True
        for partition, offset in event.positions.items():
            register = self.register(event.group, partition)
            known = register.writes.get(event.commit)
            if known is not None:
                continue  # sent again: the first time counts
            write = _Write(event.commit, offset, self._event, fenced=fenced, transaction=event.transaction)
            register.writes[event.commit] = write
            if event.transaction is not None:
                self._pending.setdefault(event.transaction, []).append((register, write))

    def _answered(self, event: history.PositionsCommitAnswered) -> None:
        for partition in event.accepted:
            register = self.register(event.group, partition)
            write = register.writes[event.commit]
            self._check_fenced(write, f"{event.group} {partition}: was accepted")
            if write.transaction is None:
                self._done(register, write)
        for partition in event.refused:
            register = self.register(event.group, partition)
            write = register.writes[event.commit]
            write.refused = True
            if write.done_at < NEVER:
                broken(
                    "refused-position", f"{event.group} {partition}: {event.commit} was shown, then refused"
                )

    def _check_fenced(self, write: _Write, what: str) -> None:
        if write.fenced:
            broken("fenced-commit", f"{what}: {write.commit} ({write.offset}), whose sender had been fenced")

    def _deletion_requested(self, event: history.PositionsDeletionRequested) -> None:
        for partition in event.partitions:
            self.register(event.group, partition).writes[event.deletion] = _Write(
                event.deletion, -1, self._event
            )

    def _deleted(self, event: history.PositionsDeleted) -> None:
        for (group, _), register in self._registers.items():
            write = register.writes.get(event.deletion)
            if group == event.group and write is not None:
                self._done(register, write)

    def _ended(self, event: history.TransactionEnded) -> None:
        if event.commit and event.complete:
            for register, write in self._pending.pop(event.transaction, ()):
                if not write.refused:
                    self._done(register, write)

    def _settled(self, _: history.EverythingSettled) -> None:
        for transaction, writes in self._pending.items():
            if self._transactions.outcome(transaction) == "committed":
                for register, write in writes:
                    if not write.refused and not write.fenced:
                        self._done(register, write)

    def _done(self, register: _Register, write: _Write) -> None:
        """Whatever was over when this one was sent is replaced by now."""
        write.done_at = min(write.done_at, self._event)
        for other in register.writes.values():
            if other is not write and other.done_at < write.sent_at:
                other.replaced_at = min(other.replaced_at, self._event)

    # Reading

    def _fetch_begun(self, event: history.PositionsFetchBegun) -> None:
        self._begun[event.reader, event.group] = self._event

    def _fetched(self, event: history.PositionsFetched) -> None:
        begun = self._begun.get((event.reader, event.group), 0)
        for partition, position in event.positions.items():
            register = self.register(event.group, partition)
            name = f"{event.reader}: {event.group} {partition}"
            if position is None:
                self._nothing(register, begun, name)
            else:
                self._something(register, begun, position, name)

    def _nothing(self, register: _Register, begun: int, name: str) -> None:
        """No position: as at the beginning, or after some deletion."""
        possible = [
            write for write in register.writes.values() if write.offset < 0 and write.replaced_at >= begun
        ]
        if not possible:
            last = max(
                register.writes.values(), key=lambda write: write.sent_at if write.done_at < NEVER else -1
            )
            broken(
                "position-lost", f"{name}: none, and {last.commit} ({last.offset}) was acknowledged or shown"
            )
        if len(possible) == 1:
            self._seen(register, possible[0], begun)

    def _something(self, register: _Register, begun: int, position: tuple[int, str], name: str) -> None:
        offset, commit = position
        write = register.writes.get(commit)
        if write is None or write.offset != offset:
            broken("position-changed", f"{name}: {offset} of {commit!r} was not committed so")
        if write.refused:
            broken("refused-position", f"{name}: {commit} ({offset}) was refused")
        self._check_fenced(write, name)
        if write.transaction is not None:
            self._transactions.shown(write.transaction, f"{name}: {commit} ({offset})")
        if write.replaced_at < begun:
            newer = max(
                register.writes.values(), key=lambda other: other.sent_at if other.done_at < NEVER else -1
            )
            broken(
                "position-lost",
                f"{name}: {commit} ({offset}) is back, replaced before this was asked; "
                f"{newer.commit} ({newer.offset}) came after it",
            )
        self._seen(register, write, begun)

    def _seen(self, register: _Register, write: _Write, begun: int) -> None:
        before = register.shown
        if before is not None and before is not write and register.shown_at < begun:
            before.replaced_at = min(before.replaced_at, self._event)
        self._done(register, write)
        register.shown, register.shown_at = write, self._event
