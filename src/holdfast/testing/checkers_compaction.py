"""What must hold of compacted topics and of lookups by time.

CompactionChecker
    compacted-lost       of each key, the last acknowledged record that is committed or in no transaction is shown, or
                         a later one; a tombstone may be gone, and then nothing older of its key is left
LookupsChecker
    time-lookup          a lookup finds the first record of at least that time, and tells its time
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.testing import history
from holdfast.testing.checkers_base import Checker, broken
from holdfast.testing.checkers_records import RecordsChecker, SentBatch
from holdfast.testing.checkers_transactions import TransactionsChecker
from holdfast.testing.history import Partition

LARGEST = -3
TOMBSTONE = b"tombstone:"
"""How the value of a history begins that stands for a tombstone."""


class _Keyed(NamedTuple):
    key: bytes
    value: bytes
    offset: int
    transaction: str | None


@dataclass(slots=True)
class _Acknowledged:
    records: list[_Keyed] = field(default_factory=list)


class CompactionChecker(Checker):
    def __init__(self, transactions: TransactionsChecker) -> None:
        self._transactions = transactions
        self._compacted: set[Partition] = set()
        self._sent: dict[tuple[str, int], history.BatchSent] = {}
        self._key_of: dict[bytes, bytes] = {}
        self._acknowledged: dict[Partition, _Acknowledged] = {}
        self._expected: dict[tuple[str, Partition], dict[bytes, _Keyed]] = {}
        self._tombstones: dict[tuple[Partition, bytes], set[bytes]] = {}
        """Tombstones of each key that were sent and not acknowledged: one may be the last, and then all may be gone."""
        super().__init__(
            {
                history.CompactionAllowed: self._allowed,
                history.BatchSent: self._batch_sent,
                history.BatchAcknowledged: self._batch_acknowledged,
                history.ScanBegun: self._scan_begun,
                history.PartitionScanned: self._scanned,
            }
        )

    def _allowed(self, event: history.CompactionAllowed) -> None:
        self._compacted.add(event.partition)

    def _batch_sent(self, event: history.BatchSent) -> None:
        if event.partition in self._compacted:
            self._sent[event.producer, event.number] = event
            for key, value in zip(event.keys, event.values, strict=True):
                self._key_of[value] = key
                if value.startswith(TOMBSTONE):
                    self._tombstones.setdefault((event.partition, key), set()).add(value)

    def _batch_acknowledged(self, event: history.BatchAcknowledged) -> None:
        sent = self._sent.get((event.producer, event.number))
        if sent is None or not event.durable:
            return
        known = self._acknowledged.setdefault(event.partition, _Acknowledged())
        for index, (key, value) in enumerate(zip(sent.keys, sent.values, strict=True)):
            known.records.append(_Keyed(key, value, event.base_offset + index, sent.transaction))
            self._tombstones.get((event.partition, key), set()).discard(value)

    def _counts(self, record: _Keyed) -> bool:
        return record.transaction is None or self._transactions.outcome(record.transaction) == "committed"

    def _scan_begun(self, event: history.ScanBegun) -> None:
        last: dict[bytes, _Keyed] = {}
        known = self._acknowledged.get(event.partition)
        for record in known.records if known is not None else ():
            best = last.get(record.key)
            if self._counts(record) and (best is None or record.offset > best.offset):
                last[record.key] = record
        self._expected[event.reader, event.partition] = last

    def _scanned(self, event: history.PartitionScanned) -> None:
        shown: dict[bytes, int] = {}
        for offset, value in event.records:
            key = self._key_of.get(value)
            if key is not None:
                shown[key] = max(shown.get(key, -1), offset)
        for key, record in self._expected.pop((event.reader, event.partition), {}).items():
            offset = shown.get(key, -1)
            may_be_gone = record.value.startswith(TOMBSTONE) or self._tombstones.get((event.partition, key))
            if offset >= record.offset or (offset < 0 and may_be_gone):
                continue
            found = f"its last is at {offset}" if offset >= 0 else "nothing of it is there"
            broken(
                "compacted-lost",
                f"{event.reader} of {event.partition}: {record.value[:30]!r} of key {key!r} was acknowledged at "
                f"{record.offset}; {found}",
            )


class LookupsChecker(Checker):
    def __init__(self, records: RecordsChecker) -> None:
        self._records = records
        super().__init__({history.TimeLookedUp: self._looked_up})

    def _looked_up(self, event: history.TimeLookedUp) -> None:
        partition = self._records.of(event.partition)
        floor = self._records.floor(event.reader, event.partition)
        name = f"{event.reader} of {event.partition}: time {event.timestamp}"
        found = partition.owner.get(event.offset)
        if event.offset >= 0 and isinstance(found, SentBatch) and found.timestamp != event.found_timestamp:
            broken(
                "time-lookup",
                f"{name} is at {event.offset}, {event.found_timestamp}; it is {found.timestamp}",
            )
        if event.offset >= 0 and event.timestamp != LARGEST and event.found_timestamp < event.timestamp:
            broken("time-lookup", f"{name} is at {event.offset}, whose time is {event.found_timestamp}")
        if partition.may_expire or partition.compacted:
            return
        end = floor.stable if event.committed_only else floor.end
        known = [
            (offset, owner.timestamp)
            for offset, owner in partition.owner.items()
            if isinstance(owner, SentBatch) and partition.start_ceiling <= offset < end
        ]
        if event.timestamp == LARGEST:
            self._check_largest(event, known, name)
        else:
            self._check_first(event, known, name)

    def _check_largest(self, event: history.TimeLookedUp, known: list[tuple[int, int]], name: str) -> None:
        if event.committed_only and event.offset < 0:
            return  # the largest is undecided: as Kafka, the broker names no other in its place
        if known and max(timestamp for _, timestamp in known) > event.found_timestamp:
            broken(
                "time-lookup", f"{name}: the largest is said to be {event.found_timestamp} at {event.offset}"
            )

    def _check_first(self, event: history.TimeLookedUp, known: list[tuple[int, int]], name: str) -> None:
        later = [offset for offset, timestamp in known if timestamp >= event.timestamp]
        if later and (event.offset < 0 or min(later) < event.offset):
            broken("time-lookup", f"{name} is said to be at {event.offset}; {min(later)} has it")
