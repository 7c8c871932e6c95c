"""The Parquet sink as it lies on the disk: a directory for each batch, and the ledger's entry in it.

    <path>/batch=<20 digits>/…/part-….parquet     rows; `_ledger.json` the entry; `_entries.jsonl` of merged batches
    <path>/_hf/forgotten.json                     after a reset: directories below this number are in no ledger

What is looked at beyond the rows: the numbers of the directories follow each other; each has an entry that can be read
and belongs to this sink; its files hold as many rows as its entries say, from offsets of their ranges; nothing lies in
the table that no entry counts. A batch appears by one rename and is never changed, so the listing made at the start is
a snapshot; only merging (a run's own, or `pipeline compact`) replaces it, and then it has to be read again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from holdfast.audit.model import Finding, Unproven
from holdfast.audit.sinks import files
from holdfast.audit.sinks.base import (
    SinkRebuilt,
    SinkUnreadable,
    hole_findings,
    newest_turn,
    read_entry,
)
from holdfast.audit.sinks.files import Spans
from holdfast.pipeline.definition.model import ParquetSink, PipelineDefinition
from holdfast.pipeline.ledger import BEFORE_LEDGER, Entry, erased_rows

BATCH: Final = re.compile(r"batch=(\d{20})")
ENTRY: Final = "_ledger.json"
MERGED: Final = "_entries.jsonl"
FILES_NAMED: Final = 5
"""In one finding."""


@dataclass
class Directory:
    """One batch, or several that were merged."""

    number: int
    path: str
    entries: list[Entry] = field(default_factory=list)
    trouble: str = ""
    """Why its entries cannot be read."""

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def first_number(self) -> int:
        """Of the batches in it."""
        return self.number - max(len(self.entries), 1) + 1

    @cached_property
    def files(self) -> list[tuple[str, tuple[str, ...]]]:
        return list(files.files_below(self.path))

    @cached_property
    def spans(self) -> Spans:
        return files.spans_of([entry.range for entry in self.entries])


class ParquetReader(files.FilesReader):
    """One Parquet sink, as it stood when it was opened."""

    kind = "parquet"

    def __init__(self, definition: PipelineDefinition, sink: ParquetSink) -> None:
        super().__init__(definition, sink)
        self._identity = _identity(self.path)
        self._strangers: list[str] = []
        self._oddments: list[str] = []
        self._directories = self._list()
        self._forgotten_below = self._read_forgotten()
        for directory in self._directories:
            self._read_entries(directory)
            _ = directory.files
            if directory.number >= self._forgotten_below:
                self._entries += directory.entries
        self._refuse_rebuilt()

    # -------------------------------------------------------------------- what there is

    def _list(self) -> list[Directory]:
        try:
            found = files.listed(self.path)
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise SinkUnreadable(f"sink {self.name!r}: {self.path} is no directory") from error
        directories = []
        for entry in found:
            match = BATCH.fullmatch(entry.name)
            if match is not None and entry.is_dir():
                directories.append(Directory(int(match[1]), entry.path))
            elif not entry.name.startswith(("_", ".")):
                self._look_at_stranger(entry)
        return sorted(directories, key=lambda each: each.number)

    def _look_at_stranger(self, entry: os.DirEntry[str]) -> None:
        """Rows beside the batches are seen by readers; what holds none is only mentioned."""
        try:
            paths = [path for path, _ in files.files_below(entry.path)] if entry.is_dir() else [entry.path]
            has_rows = any(path.endswith(".parquet") or files.is_parquet(path) for path in paths)
        except (SinkUnreadable, OSError):
            has_rows = False
        (self._strangers if has_rows else self._oddments).append(entry.name)

    def _read_forgotten(self) -> int:
        try:
            return int(json.loads(files.text_of(f"{self.path}/_hf/forgotten.json"))["below"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SinkUnreadable(f"sink {self.name!r}: {self.path}/_hf/forgotten.json: {error}") from error

    def _read_entries(self, directory: Directory) -> None:
        """Of merged batches the newest entry stands by itself too, and the pipeline goes on from that one."""
        try:
            if os.path.exists(os.path.join(directory.path, MERGED)):
                directory.entries = self._entries_in(directory, MERGED)
                if self._entries_in(directory, ENTRY) != directory.entries[-1:]:
                    self._altered(f"{directory.name}: {ENTRY} says another entry than the last of {MERGED}")
            else:
                directory.entries = self._entries_in(directory, ENTRY)
        except (OSError, ValueError) as error:
            directory.trouble = str(error)

    def _entries_in(self, directory: Directory, name: str) -> list[Entry]:
        text = files.text_of(os.path.join(directory.path, name))
        lines = text.splitlines() if name == MERGED else [text]
        return [read_entry(line, self.pipeline, self.name) for line in lines]

    # -------------------------------------------------------------------- rows

    def _files(self) -> Iterator[files.DataFile]:
        for directory in self._directories:
            for path, folders in directory.files:
                yield self._file(directory, path, folders)

    def _file(self, directory: Directory, path: str, folders: Sequence[str]) -> files.DataFile:
        return files.DataFile(
            path,
            os.path.relpath(path, self.path),
            self._spans(directory),
            files.folder_values(folders),
            lambda: self._kinds(directory),
            directory.number < self._forgotten_below,
            newest_turn(directory.entries) if self._is_tap else None,
        )

    def _spans(self, directory: Directory) -> Spans:
        return {} if self._is_tap else directory.spans

    def _note_damage(self, file: files.DataFile, why: str) -> None:
        self._refuse_rebuilt()
        self._damaged[file.where] = why

    def _refuse_rebuilt(self) -> None:
        if _identity(self.path) != self._identity:
            raise SinkRebuilt(
                f"sink {self.name!r}: the small batches of {self.path} were merged while it was read; audit it again"
            )

    def _kinds(self, directory: Directory) -> Mapping[str, pa.DataType]:
        try:
            return files.spark_kinds(json.loads(files.text_of(f"{directory.path}/_schema.json"))["columns"])
        except (OSError, ValueError, KeyError):
            return {}

    # -------------------------------------------------------------------- what is wrong

    def _examine(self) -> None:
        for name in self._strangers:
            self._altered(f"{os.path.join(self.path, name)} is in no batch")
        self._found += self._holes()
        for directory in self._directories:
            if directory.trouble:
                self._altered(
                    f"{directory.name} has no ledger entry that can be read ({directory.trouble}); its "
                    f"{len(directory.files)} files are counted nowhere"
                )
            else:
                self._check_rows(directory)

    def _holes(self) -> Iterator[Finding]:
        """Numbers that are missing; only those of the ledger of today have to begin at a known number."""
        before: Directory | None = None
        for directory in self._directories:
            expected = 0 if before is None else before.number + 1
            if directory.first_number > expected:
                first, last = expected, directory.first_number - 1
                names = f"batch={first:020d}" + (f" to batch={last:020d}" if last > first else "")
                is_current = before is None or before.number >= self._forgotten_below
                earlier = before.entries[-1] if before and before.entries and is_current else None
                later = directory.entries[0] if directory.entries else None
                yield from hole_findings(self.name, f"{names} missing from {self.path}", earlier, later)
            before = directory

    def _check_rows(self, directory: Directory) -> None:
        """A batch whose files hold more or fewer rows than its entries say."""
        counts: dict[str, int] = {}
        there = [self._file(directory, path, folders) for path, folders in directory.files]
        for file in there:
            with self._noting(file):
                known = self._counts.get(file.where)
                counts[file.path] = files.count_rows(file.path) if known is None else known
        damaged = {each.where: self._damaged[each.where] for each in there if each.where in self._damaged}
        held, wanted = sum(counts.values()), self._rows_of(directory)
        of_entries = f"the entries of {directory.name} count {wanted:,} rows, and its"
        lacking = [f"{where}: {why}" for where, why in damaged.items()]
        if held < wanted and not damaged:
            lacking.append(f"{of_entries} {len(counts)} files hold {held:,}: a file or rows were removed")
        for what in lacking:
            self._gone(what, self._spans(directory), [each.path for each in there], wanted - held)
        strangers = [path for path in counts if not files.OURS.fullmatch(os.path.basename(path))]
        if damaged:
            return
        if held > wanted:
            alone = [path for path, rows in counts.items() if rows == held - wanted]
            suspects = strangers or (alone if len(alone) == 1 else [])
            names = ", ".join(os.path.basename(path) for path in suspects[:FILES_NAMED])
            what = f"{of_entries} files hold {held:,}: {held - wanted:,} that no entry counts"
            self._altered(what + (f", in {names}" if names else ""))
        elif held == wanted:
            for path in strangers:
                self._altered(f"{os.path.relpath(path, self.path)} is no file that the sink wrote")

    def _rows_of(self, directory: Directory) -> int:
        """That its entries count, but for those that were erased since."""
        erased = erased_rows(each.entry for each in self.erased)
        is_current = directory.number >= self._forgotten_below
        if not is_current and erased[BEFORE_LEDGER]:  # no ledger says any more of which
            return sum(files.count_rows(path) for path, _ in directory.files)
        return sum(entry.rows - is_current * erased[str(entry.number)] for entry in directory.entries)

    def gaps(self) -> Iterator[Unproven]:
        old = [each for each in self._directories if each.number < self._forgotten_below]
        if old:
            why = "readers see their rows, and no ledger counts them; rows that were taken again are there twice"
            yield Unproven(f"{len(old)} batches of {self.name} from before a reset", why)
        if self._oddments:
            what = f"{', '.join(self._oddments[:FILES_NAMED])} in {self.path}"
            yield Unproven(what, "it is in no batch, and holds no rows as far as can be seen")


def _identity(path: str) -> Any:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
