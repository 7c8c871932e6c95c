"""What must hold of every history, however the broker was killed, cut off or starved of disk.

Each checker takes events (`holdfast.testing.history`) one at a time, raises `Violation` at the first that
breaks its rule, and never looks at the broker. Their rules stand in their modules:

    checkers_records        records: none lost, none twice, none changed
    checkers_compaction     compacted topics keep the last value of each key; lookups by time
    checkers_topics         producer ids, topics, settings, leader epochs
    checkers_transactions   all of a transaction or none
    checkers_groups         members and what they own
    checkers_positions      committed positions

An outcome the client never learnt may be either; both, or half of it, breaks one of the rules.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.testing.checkers_base import Violation
from holdfast.testing.checkers_compaction import CompactionChecker, LookupsChecker
from holdfast.testing.checkers_groups import MembershipChecker
from holdfast.testing.checkers_positions import PositionsChecker
from holdfast.testing.checkers_records import RecordsChecker
from holdfast.testing.checkers_topics import ProducerIdsChecker, TopicsChecker
from holdfast.testing.checkers_transactions import TransactionsChecker
from holdfast.testing.history import Event

__all__ = ["Checkers", "Violation", "check"]


class Checkers:
    """All checkers over one history."""

    def __init__(self) -> None:
        self.records = RecordsChecker()
        self.transactions = TransactionsChecker()
        self.membership = MembershipChecker()
        self.positions = PositionsChecker(self.transactions, self.membership)
        self._all = (
            self.records,
            self.transactions,
            self.membership,
            self.positions,
            CompactionChecker(self.transactions),
            LookupsChecker(self.records),
            ProducerIdsChecker(),
            TopicsChecker(),
        )

    def observe(self, event: Event) -> None:
        for checker in self._all:
            checker.observe(event)


def check(events: Iterable[Event]) -> None:
    """Raise `Violation` when the history breaks a rule."""
    checkers = Checkers()
    for event in events:
        checkers.observe(event)
