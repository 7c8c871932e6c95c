"""The Delta sink: the table's log as it is, the ledger that its commits name, and the files of the newest version.

A commit of the pipeline names its entry twice: as application transactions (`…/number`, `…/entry`, and a position for
each partition), which the log's checkpoints keep, and whole, in a file `_hf/<pipeline>--<sink>/<entry>.json` and in the
commit's own words. What is looked at beyond the rows: no version is missing; what a version adds is what its entry
counts; every file of the table is there, as large and with as many rows as the log says; nothing was removed but what
was merged. A file that lies in the directory and that no version names any more tells which offsets are gone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa

from holdfast.audit.lineage import NOWHERE, LineageBatch, as_ranges
from holdfast.audit.model import Unproven, gap
from holdfast.audit.sinks import files
from holdfast.audit.sinks.base import (
    CONTENT,
    SinkScope,
    SinkUnreadable,
    newest_turn,
    number_holes,
    read_entry,
)
from holdfast.audit.sinks.delta_log import Add, Commit, DeltaLog
from holdfast.pipeline.definition.model import DeltaSink, PipelineDefinition
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place

FORGOTTEN: Final = -1
ORPHANS_READ_MAX: Final = 1000
"""Files that no version names, and that are looked into for what is missing."""


class DeltaReader(files.FilesReader):
    """One Delta sink, at the version it had when it was opened."""

    kind = "delta"

    def __init__(self, definition: PipelineDefinition, sink: DeltaSink) -> None:
        super().__init__(definition, sink)
        self._application = f"hf-{definition.name}--{sink.name}"
        self.log = DeltaLog(self.path)
        self._by_version: dict[int, Entry] = {}
        self._reset_in = 0
        """The version by which its ledger was forgotten last."""
        self._entries = self._read_ledger()
        self._added_in = {
            add.path: version for version, commit in self.log.commits.items() for add in commit.adds
        }
        self._adds = {add.path: add for commit in self.log.commits.values() for add in commit.adds}
        self._foreign_rows = 0
        self._is_merged = sink.mode != "append"
        """It keeps one row for each key: commits of the pipeline take rows out, too."""
        self._metadata = self.log.state.metadata or {}
        self._schema = json.loads(self._metadata.get("schemaString") or "{}")
        has_digests = CONTENT in [each["name"] for each in self._schema.get("fields", ())]
        self.keeps_digests = has_digests if self._is_merged else None

    # -------------------------------------------------------------------- the ledger

    @property
    def _entry_directory(self) -> str:
        return f"{self.path}/_hf/{self.pipeline}--{self.name}"

    def _read_ledger(self) -> list[Entry]:
        entries: list[Entry] = []
        for version, commit in self.log.commits.items():
            number = commit.transactions.get(f"{self._application}/number")
            if number is None:
                continue
            if number == FORGOTTEN:
                entries = []
                self._by_version = {}
                self._reset_in = version
                continue
            entry = self._entry_of(commit, number)
            if entry is not None:
                entries.append(entry)
                self._by_version[version] = entry
        return self._older(entries) if not self.log.is_whole else entries

    def _entry_of(self, commit: Commit, number: int) -> Entry | None:
        name = commit.transactions.get(f"{self._application}/entry")
        where = f"version {commit.version} of {self.path}"
        kept = self._kept_entry(name)
        told = None
        if commit.told is not None:
            try:
                told = read_entry(commit.told, self.pipeline, self.name)
            except ValueError as error:
                self._altered(f"{where}: {error}")
        entry = told or kept
        if entry is None:
            self._altered(f"{where} names an entry {name} of the ledger that is gone")
            return None
        if kept is None:
            self._altered(f"{self._entry_directory}/{name}.json is gone or no entry, and {where} names it")
        elif told is not None and told.as_json() != kept.as_json():
            self._altered(f"{where} says another entry than {self._entry_directory}/{name}.json")
        said = commit.transactions.get
        positions = {self._position_name(place): at.offset for place, at in entry.positions.at.items()}
        if entry.number != number or any(said(each, at) != at for each, at in positions.items()):
            self._altered(f"{where}: its application transactions do not say what its entry says")
        return entry

    def _position_name(self, place: Place) -> str:
        return f"{self._application}/{place.topic_id}/{place.partition}"

    def _kept_entry(self, name: int | None) -> Entry | None:
        try:
            text = files.text_of(f"{self._entry_directory}/{name}.json")
            return read_entry(text, self.pipeline, self.name)
        except (OSError, ValueError):
            return None

    def _older(self, entries: list[Entry]) -> list[Entry]:
        """With those whose commits were cleaned up: each the one that leads to the next."""
        if not entries:
            number = self.log.state.transactions.get(f"{self._application}/number", FORGOTTEN)
            last = self._kept_entry(self.log.state.transactions.get(f"{self._application}/entry"))
            if number == FORGOTTEN or last is None:
                return []
            entries = [last]
        by_number: dict[int, list[Entry]] = {}
        for name in files.names_in(self._entry_directory):
            stem = name.removesuffix(".json")
            entry = self._kept_entry(int(stem)) if stem.isdigit() else None
            if entry is not None:
                by_number.setdefault(entry.number, []).append(entry)
        while True:
            first = entries[0]
            before = [each for each in by_number.get(first.number - 1, ()) if _leads_to(each, first)]
            if not before:
                return entries
            entries.insert(0, before[0])

    # -------------------------------------------------------------------- rows

    def _added(self) -> Iterator[Add]:
        """The files of the newest version."""
        return (add for _, add in sorted(self.log.state.files.items()))

    def _files(self) -> Iterator[files.DataFile]:
        for add in self._added():
            yield files.DataFile(
                self._located(add.path),
                add.path,
                self._spans_of(add),
                add.values,
                lambda: self._kinds,
                self._added_in.get(add.path, self._reset_in) < self._reset_in,
                self._turn_of(add),
            )

    def _located(self, path: str) -> str:
        return path if "://" in path else os.path.join(self.path, path)

    def rows(self, scope: SinkScope) -> Iterator[LineageBatch]:
        self._foreign_rows = 0
        return super().rows(scope)

    def _keeps(self, file: files.DataFile, batch: LineageBatch) -> bool:
        if batch.topic != NOWHERE or files.OURS.fullmatch(os.path.basename(file.where)):
            return True
        self._foreign_rows += len(batch)
        return False

    def _note_damage(self, file: files.DataFile, why: str) -> None:
        newer = DeltaLog(self.path)
        if newer.version > self.log.version and file.where not in newer.state.files:
            raise SinkUnreadable(
                f"sink {self.name!r}: {file.where} was removed from {self.path} while the table was read (a vacuum); "
                "audit it again"
            )
        self._damaged[file.where] = why

    def _entry_that_added(self, add: Add) -> Entry | None:
        """Nothing where several files were merged into it."""
        entry = self._by_version.get(self._added_in.get(add.path, -1))
        return entry if add.is_change and not self._is_merged else None

    def _spans_of(self, add: Add) -> files.Spans:
        """What the commit that added a file took."""
        entry = None if self._is_tap else self._entry_that_added(add)
        return {} if entry is None else files.spans_of([entry.range])

    def _turn_of(self, add: Add) -> int | None:
        entry = self._entry_that_added(add) if self._is_tap else None
        return None if entry is None else newest_turn([entry])

    @cached_property
    def _kinds(self) -> dict[str, pa.DataType]:
        return files.spark_kinds(self._schema)

    def columns(self) -> Sequence[str]:
        return [name for name in super().columns() if name != CONTENT]

    # -------------------------------------------------------------------- what is wrong

    def _examine(self) -> None:
        for first, last in as_ranges(np.array(self.log.holes, np.int64)):
            which = f"version {first} is" if first == last else f"versions {first} to {last} are"
            self._altered(f"{which} missing from {self.log.directory}")
        for trouble in [*self.log.troubles, *self.log.disagreements()]:
            self._altered(f"{self.log.directory}: {trouble}")
        if self.log.is_whole or (self._entries and self._entries[0].number == 0):
            self._found += number_holes(self.name, self._entries, f"the commits of {self.path}")
        for commit in self.log.commits.values():
            self._check_commit(commit)
        for add in self._added():
            self._check_file(add, self._located(add.path))

    def _check_commit(self, commit: Commit) -> None:
        entry = self._by_version.get(commit.version)
        if entry is not None and entry.erased is not None:
            self._check_erasure(commit, entry)
            return
        if self._is_merged and (entry is not None or commit.version <= self._reset_in):
            return  # what came and went is held against the keys of the records, and against the digests
        if entry is not None:
            added = sum(self._rows_of(add) for add in commit.adds)
            if added != entry.rows:
                self._uncounted(commit, entry, added)
        if commit.removes:
            self._check_removes(commit)

    def _check_erasure(self, commit: Commit, entry: Entry) -> None:
        """A commit that takes rows out takes as many as its entry says, if the entry is believed."""
        said = [each.erasure.rows for each in self.erased if each.entry.number == entry.number]
        gone, come = self._rows_moved(commit)
        if not said:
            self._check_removes(commit)
        elif gone is not None and gone - come != said[0]:
            erases = f"version {commit.version} of {self.path} erases {gone - come:,} rows"
            self._altered(f"{erases}, and its entry counts {said[0]:,}")

    def _rows_moved(self, commit: Commit) -> tuple[int | None, int]:
        """How many a commit removes, if all those files are known, and how many it adds."""
        known = [add for path in commit.removes if (add := self._adds.get(path)) is not None]
        gone = sum(map(self._rows_of, known)) if len(known) == len(commit.removes) else None
        return gone, sum(map(self._rows_of, commit.adds))

    def _rows_of(self, add: Add) -> int:
        if add.rows is not None:
            return add.rows
        try:
            return files.count_rows(self._located(add.path))
        except files.Damaged:
            return 0

    def _uncounted(self, commit: Commit, entry: Entry, added: int) -> None:
        what = f"version {commit.version} of {self.path} adds {added:,} rows, and its entry counts {entry.rows:,}"
        spans = files.spans_of([entry.range])
        for path, batches in self._orphans():
            is_within = all(
                (batch.topic, batch.partition) in spans and not len(files.outside(batch, spans))
                for batch in batches
            )
            if is_within and sum(map(len, batches)) <= entry.rows - added:
                self._name_rows(f"{what}: {path} is in no version of the log", batches)
                return
        if added > entry.rows:
            self._altered(what)
        elif commit.version <= self.log.checkpoint:
            self._altered(f"{what}: readers take what it added from checkpoint {self.log.checkpoint}")
        else:
            left = [self._located(add.path) for add in commit.adds]
            what += ": a file was taken out of the log"
            self._gone(what, {} if self._is_tap else spans, left, entry.rows - added)

    def _orphans(self) -> Iterator[tuple[str, list[LineageBatch]]]:
        """Files in the table's directory that no version names, and their rows."""
        named = self.log.named()
        ours = [name for name in files.names_in(self.path) if files.OURS.fullmatch(name)]
        for name in [each for each in ours if each not in named][:ORPHANS_READ_MAX]:
            with suppress(files.Damaged):
                yield name, list(files.lineage(f"{self.path}/{name}", name))

    def _name_rows(self, detail: str, batches: Sequence[LineageBatch]) -> None:
        """A finding for each partition that these rows are from."""
        places = {(batch.topic, batch.partition) for batch in batches}
        for topic, partition in sorted(places):
            held = [each.offsets for each in batches if (each.topic, each.partition) == (topic, partition)]
            self._altered_in(detail, (topic, partition), as_ranges(np.unique(np.concatenate(held))))

    def _check_removes(self, commit: Commit) -> None:
        """Files go only when others take their rows, without a change of data."""
        changed = [path for path, is_change in commit.removes.items() if is_change]
        where = f"version {commit.version} of {self.path} ({commit.operation or 'no operation named'})"
        for path in changed:
            what = f"{where} removes {path} as a change of data"
            batches: list[LineageBatch] = []
            with suppress(files.Damaged):
                batches = list(files.lineage(self._located(path), path))
            if batches:
                self._name_rows(what, batches)
            else:
                self._altered(what)
        gone, come = self._rows_moved(commit)
        if not changed and gone is not None and gone != come:
            self._altered(f"{where} merges {gone:,} rows into {come:,}")

    def _check_file(self, add: Add, located: str) -> None:
        size = files.size_of(located)
        if size is None:
            self._lost(f"{add.path} is in the log and not in {self.path}", add)
            return
        why = self._damaged.get(add.path)
        rows = self._counts.get(add.path, 0)
        try:
            if add.path not in self._counts:
                rows = files.count_rows(located)
        except files.Damaged as damage:
            why = str(damage)
        if why is not None:
            self._lost(f"{add.path}: {why}", add)
        elif add.rows not in (None, rows):
            self._altered(f"{add.path} holds {rows:,} rows, and the log says {add.rows:,}")
        elif size != add.size:
            what = f"{add.path} has {size:,} bytes, and the log says {add.size:,}"
            self._altered(f"{what}: it was written again")

    def _lost(self, what: str, add: Add) -> None:
        """A file that cannot be read; the others of its commit tell which offsets it had."""
        commit = self.log.commits.get(self._added_in.get(add.path, -1))
        others = [] if commit is None else [self._located(each.path) for each in commit.adds if each != add]
        had = "" if add.rows is None else f"; it had {add.rows:,} rows"
        self._gone(what, self._spans_of(add), others, add.rows or 0, had)

    def gaps(self) -> Iterator[Unproven]:
        if any(add.has_deletions for add in self._added()):
            why = "they are not read here: rows may be counted that readers do not see"
            yield gap(f"rows of {self.name} that deletion vectors hide", why)
        mapping = dict(self._metadata.get("configuration") or {})
        if mapping.get("delta.columnMapping.mode", "none") != "none":
            yield gap(f"columns of {self.name}", "the table maps their names, which is not read here")
        if self._foreign_rows:
            why = "somebody else wrote them into the table; they name no record"
            yield Unproven(f"{self._foreign_rows:,} rows of {self.name}", why)
        if self._entries and self._entries[0].number > 0:
            what = f"entries 0 to {self._entries[0].number - 1} of {self.name}"
            yield Unproven(what, "the table's log was cleaned up; its rows are compared all the same")


def _leads_to(before: Entry, after: Entry) -> bool:
    return all(
        place not in before.positions.at or before.positions.at[place].offset == span.start
        for place, span in after.range.spans.items()
    )
