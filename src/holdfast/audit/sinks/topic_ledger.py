"""The ledger of a Kafka sink: a compacted topic, in which the last record of partition w is what writer w has.

A record holds an entry, the number of writers its batch was made with, and the entry before it. The sink stands at the
newest entry that all its writers have; what only some of them have is a batch under way, and its rows are pending.
Compaction takes older entries away, so numbers may be missing here. A record without a value is a reset: nothing before
it counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.audit.sinks.ledger import read_entry
from holdfast.pipeline.ledger import Entry


@dataclass
class Writer:
    """What one partition of the ledger still says, since the last reset."""

    entries: dict[int, Entry] = field(default_factory=dict)
    last: Entry | None = None
    writers: int = 1
    """Of its last batch."""
    previous: Entry | None = None


@dataclass
class TopicLedger:
    """All of a ledger topic that is kept."""

    pipeline: str
    sink: str
    writers: dict[int, Writer] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    def take(self, partition: int, offset: int, value: bytes | None) -> None:
        """The next record of a partition."""
        if value is None:
            self.writers[partition] = Writer()
            return
        writer = self.writers.setdefault(partition, Writer())
        try:
            document = json.loads(value)
            entry = read_entry(document["entry"], self.pipeline, self.sink)
            before = document["previous"]
            previous = None if before is None else read_entry(before, self.pipeline, self.sink)
            count = int(document["writers"])
        except (ValueError, KeyError, TypeError) as error:
            self.troubles.append(f"partition {partition}, offset {offset}: {error}")
            return
        if previous is not None:
            writer.entries[previous.number] = previous
        writer.entries[entry.number] = entry
        writer.last, writer.writers, writer.previous = entry, count, previous

    def standing(self) -> Entry | None:
        """The newest batch that every writer of it has."""
        newest = self._newest()
        if newest is None:
            return None
        return newest.previous if self.is_under_way() else newest.last

    def is_under_way(self) -> bool:
        """Only some of its writers have the newest batch."""
        newest = self._newest()
        if newest is None:
            return False
        number = _number(newest.last)
        done = {at for at, each in self.writers.items() if each.last and each.last.number == number}
        return not done >= set(range(newest.writers))

    def _newest(self) -> Writer | None:
        """The writer with the newest batch."""
        known = [each for each in self.writers.values() if each.last is not None]
        return max(known, key=lambda each: _number(each.last), default=None)

    def entries(self) -> list[Entry]:
        """Those kept, ascending, up to where the sink stands."""
        standing = self.standing()
        if standing is None:
            return []
        found = _merged(each.entries for each in self.writers.values())
        return [found[number] for number in sorted(found) if number <= standing.number]

    def disagreements(self) -> list[str]:
        """Numbers under which writers keep different entries."""
        seen: dict[int, Entry] = {}
        found = []
        for partition, writer in sorted(self.writers.items()):
            for number, entry in writer.entries.items():
                other = seen.setdefault(number, entry)
                if other.range != entry.range or other.positions != entry.positions:
                    found.append(f"partition {partition} says another entry {number} than the others")
        return found


def _number(entry: Entry | None) -> int:
    return -1 if entry is None else entry.number


def _merged(parts: Iterable[Mapping[int, Entry]]) -> dict[int, Entry]:
    found: dict[int, Entry] = {}
    for part in parts:
        found.update(part)
    return found
