"""What an audit of a pipeline takes from an earlier one and hands on to the next (`stateful.carried`), by sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from holdfast.audit.model import Fate, Finding
from holdfast.audit.scope import PipelineScope
from holdfast.audit.sinks.base import SinkReader
from holdfast.audit.unaltered import Unaltered, proven_entry
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place

if TYPE_CHECKING:
    from holdfast.audit.stateful.carried import Carried, Memory, TableRows
    from holdfast.pipeline.row_digest import Digests


@dataclass
class HandingOn:
    """Of one audit; without a memory nobody goes on from it."""

    memory: Memory | None
    scope: PipelineScope
    since: Mapping[Place, int]
    tables: dict[str, Digests] = field(init=False, default_factory=dict)

    @property
    def before(self) -> Carried | None:
        return None if self.memory is None else self.memory.before

    @property
    def turns(self) -> Mapping[str, int]:
        """By sink, the newest turn that is proven."""
        return {} if self.before is None else self.before.turns

    def table(self, reader: SinkReader) -> TableRows | None:
        """To be shown the rows of a table that has no marks."""
        if self.memory is None or not _has_no_marks(reader):
            return None
        ends = {(place.topic, place.partition): end for place, (_, end) in self.scope.spans.items()}
        old = {(place.topic, place.partition): at for place, at in self.since.items()}
        step = reader.takes.partition(".")[0]
        if step:  # rows of a step's own name it, and their turn; others name their record
            ends[step, -1] = _turn(self._proven(reader)) + 1
            old[step, -1] = self.turns.get(reader.name, -1) + 1
        return self.memory.table(reader.name, old, ends, is_kept_whole=reader.keeps_digests is None)

    def compared(self, reader: SinkReader, table: TableRows | None, found: Unaltered) -> list[Finding]:
        """What is wrong with the old rows of such a table."""
        if table is None or found.table is None:
            return []
        self.tables[reader.name] = found.table
        detail = f"{table.wrong:,} rows are not those that were there when they were proven"
        finding = Finding(Fate.ALTERED, reader.name, count=table.wrong, detail=detail)
        return [finding] if table.wrong else []

    def finish(self, readers: Mapping[str, SinkReader], carried: Carried | None) -> None:
        """Hand on what the stateful steps need, and what is known of the sinks."""
        from holdfast.audit.stateful.carried import Carried

        if self.memory is None:
            return
        made = carried or Carried()
        proven = {name: self._proven(reader) for name, reader in readers.items()}
        unread = [
            name for name, reader in readers.items() if _has_no_marks(reader) and name not in self.tables
        ]
        lacks = made.lacks or (f"the rows of sink {unread[0]!r} have no digests" if unread else "")
        self.memory.after = replace(
            made,
            lacks=lacks,
            numbers={name: entries[-1].number for name, entries in proven.items() if entries},
            turns={name: _turn(proven[name]) for name, reader in readers.items() if reader.takes},
            tables={} if lacks else self.tables,
            rows=None if lacks else made.rows,
        )

    def _proven(self, reader: SinkReader) -> Sequence[Entry]:
        """The entries that lie wholly in what is proven after this audit."""
        ends = {place: end for place, (_, end) in self.scope.spans.items()}
        entries = reader.entries()
        return entries[: proven_entry(entries, ends) + 1]


def _has_no_marks(reader: SinkReader) -> bool:
    """Its rows are replaced, or name no offset, and it is no sink of files (`holdfast.audit.proven`)."""
    return reader.keeps_digests is not None or (reader.kind == "postgres" and bool(reader.takes))


def _turn(entries: Sequence[Entry]) -> int:
    return max((entry.state for entry in entries if entry.state is not None), default=-1)
