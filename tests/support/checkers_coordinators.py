"""What must hold of transactions, of groups and their members, and of the offsets that groups commit.

Transactions: all of one or none, decided once, and nobody fenced takes part.
    aborted-shown        a reader of committed records never sees one of an aborted transaction
    undecided-shown      nor one of a transaction whose commit nobody asked for
    committed-hidden     and never misses one of a committed transaction, or of none
    torn-transaction     the outcome is one: what was acknowledged, and what every reader saw, of all its records
                         and committed offsets
    fenced-wrote         after a new session of a transactional id was begun, nothing an earlier one sends is stored
    fenced-ended         nor does it end its transaction
A transaction whose end was never acknowledged may have either outcome if its commit was asked for; otherwise it is
aborted sooner or later. The first reader to see or pass over one of its records fixes the outcome for all.

Groups: one owner at a time, and who was fenced stays out until it joins anew.
  Classic groups (`GenerationAssigned`):
    double-owner         two members of one generation never own the same partition
    torn-generation      the members of one generation have parts of one assignment
  KIP-848 groups (`PartitionsHeld`, `PartitionsGiven`):
    given-before-release no member is given a partition before its last owner has confirmed release or was fenced
    epoch-moved-back     a member's epoch never falls
    fenced-heartbeat     a member whose partition another one has, since it was fenced, is told so
  Both:
    member-lost          the broker does not drop a member whose session has not run out
The observer does not see a member being fenced for its silence. It knows when the last heartbeat that the broker
took had left: until its patience has passed from then, the member holds what it was given.

Committed offsets: each is a register, and an acknowledged write is never lost.
    offset-lost        whoever asks is told the last acknowledged offset, or one that may have come after it;
                         never one that was replaced before: committed offsets never move back except by request
    offset-changed     what is told was committed so
    refused-offset     what the broker refused is never told
    fenced-commit        a member, or a producer, that was fenced before it sent an offset does not change it
    aborted-shown, undecided-shown, torn-transaction
                         an offset of a transaction shows if and only if the transaction is committed
Each commit has a name of its own that travels with the offset, so that equal offsets are told apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tests.support import history
from tests.support.history import Checker, Event, Partition, broken

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
        self.handlers = {
            history.TransactionalIdTaken: self._taken,
            history.TransactionBegun: self._begun,
            history.TransactionEndRequested: self._end_requested,
            history.TransactionEnded: self._ended,
            history.BatchSent: self._sent,
            history.BatchAcknowledged: self._acknowledged,
            history.BatchesRead: self._read,
        }

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


@dataclass(slots=True)
class _Generation:
    assignment: str
    owners: dict[Partition, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Member:
    alive_until_ms: int = -1
    """Until then the broker may not drop it; -1 when it is not a member as far as anybody knows."""
    epoch: int = -1
    fenced: bool = False
    """Another one has what it held, and it did not let go."""


@dataclass(slots=True)
class _Group:
    generations: dict[int, _Generation] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)
    """The member that each static instance was last."""
    last_generation: int = -1
    members: dict[str, _Member] = field(default_factory=dict)
    holders: dict[Partition, str] = field(default_factory=dict)

    def member(self, name: str) -> _Member:
        found = self.members.get(name)
        if found is None:
            found = self.members[name] = _Member()
        return found


class MembershipChecker(Checker):
    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self.handlers = {
            history.GroupDeletionRequested: self._deletion_requested,
            history.GenerationAssigned: self._assigned,
            history.MemberAlive: self._alive,
            history.MemberDropped: self._dropped,
            history.MemberLeaving: self._leaving,
            history.PartitionsHeld: self._held,
            history.PartitionsGiven: self._given,
        }

    def _of(self, group: str) -> _Group:
        return self._groups.setdefault(group, _Group())

    def is_fenced(self, group: str, member: str, generation: int) -> bool:
        """Whether what this member sends now, with this generation, must change nothing."""
        known = self._groups.get(group)
        if known is None or not member:
            return False
        return (member in known.members and known.members[member].fenced) or (
            0 <= generation < known.last_generation
        )

    def _deletion_requested(self, event: history.GroupDeletionRequested) -> None:
        """It may be refused: who an instance was last is true either way."""
        self._groups[event.group] = _Group(instances=self._of(event.group).instances)

    # Classic groups

    def _assigned(self, event: history.GenerationAssigned) -> None:
        group = self._of(event.group)
        name = f"{event.member} in generation {event.generation} of {event.group}"
        generation = group.generations.setdefault(event.generation, _Generation(event.assignment))
        if generation.assignment != event.assignment:
            broken("torn-generation", f"{name} is told {event.assignment}; others, {generation.assignment}")
        owner = event.instance or event.member
        for partition in event.partitions:
            other = generation.owners.setdefault(partition, owner)
            if other != owner:
                broken("double-owner", f"{name} owns {partition}, and so does {other}")
        group.last_generation = max(group.last_generation, event.generation)
        if event.instance is not None:
            before = group.instances.get(event.instance)
            if before is not None and before != event.member:
                group.member(before).fenced = True
            group.instances[event.instance] = event.member

    # Sessions

    def _alive(self, event: history.MemberAlive) -> None:
        member = self._of(event.group).member(event.member)
        member.alive_until_ms = max(member.alive_until_ms, event.sent_at_ms + event.patience_ms)

    def _dropped(self, event: history.MemberDropped) -> None:
        group = self._of(event.group)
        member = group.member(event.member)
        if event.at_ms < member.alive_until_ms and not member.fenced:
            broken(
                "member-lost",
                f"{event.member} of {event.group} is told {event.error} at {event.at_ms}; "
                f"its session lasts until {member.alive_until_ms}",
            )
        self._forget(group, event.member)

    def _leaving(self, event: history.MemberLeaving) -> None:
        self._forget(self._of(event.group), event.member)

    def _forget(self, group: _Group, name: str) -> None:
        group.members.pop(name, None)
        for partition in [partition for partition, holder in group.holders.items() if holder == name]:
            del group.holders[partition]

    # KIP-848 groups

    def _held(self, event: history.PartitionsHeld) -> None:
        group = self._of(event.group)
        for partition, holder in list(group.holders.items()):
            if holder == event.member and partition not in event.partitions:
                del group.holders[partition]

    def _given(self, event: history.PartitionsGiven) -> None:
        group = self._of(event.group)
        member = group.member(event.member)
        name = f"{event.member} of {event.group}"
        if event.sent_epoch <= 0:
            member.fenced = False
            member.epoch = -1
        elif member.fenced:
            broken(
                "fenced-heartbeat",
                f"{name}, epoch {event.sent_epoch}, was taken for a member after it was fenced",
            )
        if event.epoch < member.epoch:
            broken("epoch-moved-back", f"{name}: epoch {event.epoch}, and was {member.epoch}")
        member.epoch = event.epoch
        for partition in event.partitions or ():
            self._give(group, event, partition)

    def _give(self, group: _Group, event: history.PartitionsGiven, partition: Partition) -> None:
        holder = group.holders.get(partition)
        if holder is not None and holder != event.member:
            before = group.member(holder)
            if event.at_ms < before.alive_until_ms:
                broken(
                    "given-before-release",
                    f"{event.member} of {event.group} is given {partition} at {event.at_ms}; {holder} has not let "
                    f"it go and is alive until {before.alive_until_ms}",
                )
            before.fenced = True
        group.holders[partition] = event.member


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


class OffsetsChecker(Checker):
    def __init__(self, transactions: TransactionsChecker, membership: MembershipChecker) -> None:
        self._transactions = transactions
        self._membership = membership
        self._registers: dict[tuple[str, Partition], _Register] = {}
        self._pending: dict[str, list[tuple[_Register, _Write]]] = {}
        """Positions that travel in a transaction, by its name."""
        self._begun: dict[tuple[str, str], int] = {}
        self._event = 0
        self.handlers = {
            history.OffsetsCommitSent: self._sent,
            history.OffsetsCommitAnswered: self._answered,
            history.OffsetsDeletionRequested: self._deletion_requested,
            history.OffsetsDeleted: self._deleted,
            history.OffsetsFetchBegun: self._fetch_begun,
            history.OffsetsFetched: self._fetched,
            history.TransactionEnded: self._ended,
            history.EverythingSettled: self._settled,
        }

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

    def _sent(self, event: history.OffsetsCommitSent) -> None:
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

    def _answered(self, event: history.OffsetsCommitAnswered) -> None:
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
                broken("refused-offset", f"{event.group} {partition}: {event.commit} was shown, then refused")

    def _check_fenced(self, write: _Write, what: str) -> None:
        if write.fenced:
            broken("fenced-commit", f"{what}: {write.commit} ({write.offset}), whose sender had been fenced")

    def _deletion_requested(self, event: history.OffsetsDeletionRequested) -> None:
        for partition in event.partitions:
            self.register(event.group, partition).writes[event.deletion] = _Write(
                event.deletion, -1, self._event
            )

    def _deleted(self, event: history.OffsetsDeleted) -> None:
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

    def _fetch_begun(self, event: history.OffsetsFetchBegun) -> None:
        self._begun[event.reader, event.group] = self._event

    def _fetched(self, event: history.OffsetsFetched) -> None:
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
                "offset-lost", f"{name}: none, and {last.commit} ({last.offset}) was acknowledged or shown"
            )
        if len(possible) == 1:
            self._seen(register, possible[0], begun)

    def _something(self, register: _Register, begun: int, position: tuple[int, str], name: str) -> None:
        offset, commit = position
        write = register.writes.get(commit)
        if write is None or write.offset != offset:
            broken("offset-changed", f"{name}: {offset} of {commit!r} was not committed so")
        if write.refused:
            broken("refused-offset", f"{name}: {commit} ({offset}) was refused")
        self._check_fenced(write, name)
        if write.transaction is not None:
            self._transactions.shown(write.transaction, f"{name}: {commit} ({offset})")
        if write.replaced_at < begun:
            newer = max(
                register.writes.values(), key=lambda other: other.sent_at if other.done_at < NEVER else -1
            )
            broken(
                "offset-lost",
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
