"""The audit of a Structured Streaming job that we did not write: its checkpoint says what it did, the sink shows it.

    report = audit_checkpoint("/data/checkpoint", "parquet:/data/out", "id = value.id", settings)

The scope is what the query's own log can tell (`spark_log`): from the oldest entry kept to the last batch committed. A
batch that was planned and not committed is pending: its rows may be there, and may be there twice when it was tried
again, which is told.

What a Structured Streaming query says of itself, read from its checkpoint without Spark.

    offsets/N      written before batch N runs: up to where it reads, one line for each source
    commits/N      written when batch N is done
    sources/I/0    where source I began, for Spark's own Kafka source

A batch's range lies between two entries, so the oldest entry that is kept says where the scope begins, and nothing in
front of it is known. Spark keeps the last hundred (`spark.sql.streaming.minBatchesToRetain`). Of offsets, those of
Spark's Kafka source (`{"topic": {"0": 17}}`) and of ours are understood; other sources are named and left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from holdfast.audit.foreign_tables import open_table, read_dead_letters
from holdfast.audit.matched import Question, audit_matched
from holdfast.audit.matching import parse_condition
from holdfast.audit.model import AuditError, Report, Unproven, gap
from holdfast.errors import UsageError
from holdfast.reader import TopicPartition

VOID: Final = "-"
"""A source without an offset yet."""
VERSIONS: Final = ("v1", "v2")
ATTEMPTS: Final = 3

Standing = dict[TopicPartition, int]


@dataclass(frozen=True)
class QueryLog:
    """What is known of a query's batches."""

    directory: str
    query_id: str
    first: int
    """The oldest batch whose range is known; its start is where the scope begins."""
    committed: int
    """The last batch that is done; before `first` when none is."""
    planned: int
    """The last batch that was written down."""
    starts: Mapping[TopicPartition, int]
    """Where the scope begins: known partitions only, a new one begins at its first offset."""
    ends: Mapping[TopicPartition, int]
    """Up to where committed batches read."""
    planned_ends: Mapping[TopicPartition, int]
    topic_ids: Mapping[str, UUID] = field(default_factory=dict)
    """Where the log tells them: our source does, Spark's does not."""
    left_out: tuple[str, ...] = ()
    """Sources that are no Kafka."""
    is_whole: bool = False
    """Whether the scope begins where the query began."""
    batch_ids: tuple[int, ...] = ()
    """Of the committed batches of the scope."""

    @property
    def scopes(self) -> dict[TopicPartition, tuple[int, int]]:
        return {place: (self.starts.get(place, 0), end) for place, end in sorted(self.ends.items())}


def read_query_log(directory: str, source: int | None = None) -> QueryLog:
    """The log of the query that has its checkpoint here; `source` chooses one of several sources."""
    directory = directory.removeprefix("file://").rstrip("/") or "/"
    _check(directory)
    for _ in range(ATTEMPTS):
        try:
            return _Reader(directory, source).log()
        except FileNotFoundError as gone:
            vanished = gone  # Spark has let go of its oldest entry since we listed them
    raise AuditError(f"{directory} loses its entries faster than they can be read: {vanished.filename}")


def _check(directory: str) -> None:
    """Say what is wrong with a directory that is no checkpoint."""
    if not os.path.isdir(directory):
        raise UsageError(f"--checkpoint {directory}: there is no such directory")
    if os.path.isdir(os.path.join(directory, "offsets")):
        return
    names = sorted(os.listdir(directory))
    inner = [name for name in names if os.path.isdir(os.path.join(directory, name, "offsets"))]
    if inner:
        raise UsageError(
            f"--checkpoint {directory} is none itself, but holds some: {', '.join(inner[:5])}; name one of them"
        )
    if os.path.basename(directory) in ("offsets", "commits", "sources", "state", "metadata"):
        raise UsageError(
            f"--checkpoint {directory} is a part of one: name the directory above, {os.path.dirname(directory)}"
        )
    raise UsageError(
        f"--checkpoint {directory} is no checkpoint of Structured Streaming: it has no directory 'offsets'"
    )


def _numbers(directory: str) -> list[int]:
    if not os.path.isdir(directory):
        return []
    return sorted(int(name) for name in os.listdir(directory) if name.isdigit())


def _query_id(directory: str) -> str:
    try:
        with open(os.path.join(directory, "metadata"), encoding="utf-8") as file:
            return str(json.load(file).get("id", ""))
    except (OSError, ValueError, AttributeError):
        return ""


class _Reader:
    def __init__(self, directory: str, source: int | None) -> None:
        self._directory = directory
        self._source = source
        self._topic_ids: dict[str, UUID] = {}
        self._left_out: set[str] = set()

    def log(self) -> QueryLog:
        directory = self._directory
        entries = _numbers(os.path.join(directory, "offsets"))
        commits = set(_numbers(os.path.join(directory, "commits")))
        if not entries:
            raise AuditError(f"{directory}/offsets is empty: the query has not planned a batch yet")
        oldest, planned = entries[0], entries[-1]
        committed = max((number for number in entries if number in commits), default=-1)
        standings = {number: self._entry(number) for number in {oldest, planned, committed} if number >= 0}
        begin = self._beginning(standings[oldest]) if oldest == 0 else None
        is_whole = begin is not None
        starts = standings[oldest] if begin is None else begin
        in_scope = [number for number in entries if number <= committed and (is_whole or number > oldest)]
        return QueryLog(
            directory=directory,
            query_id=_query_id(directory),
            first=oldest if is_whole else oldest + 1,
            committed=committed,
            planned=planned,
            starts=starts,
            ends=standings[committed] if in_scope else dict(starts),
            planned_ends=standings[planned],
            topic_ids=self._topic_ids,
            left_out=tuple(sorted(self._left_out)),
            is_whole=is_whole,
            batch_ids=tuple(in_scope),
        )

    def _entry(self, number: int) -> Standing:
        """Where a batch ends, in every partition of the sources asked for."""
        path = os.path.join(self._directory, "offsets", str(number))
        version, _, *sources = _lines(path)
        if self._source is not None and not 0 <= self._source < len(sources):
            raise UsageError(f"--source {self._source}: {path} has {len(sources)} of them, counted from 0")
        found: Standing = {}
        for place, text in enumerate(sources):
            if self._source not in (None, place):
                continue
            if version == "v2":
                _, colon, text = text.partition(":")
                if not colon:
                    raise AuditError(f"{path} cannot be read: no source's name in line {place + 3}")
            if text != VOID:
                self._take(text, f"source {place}", path, found)
        return found

    def _take(self, text: str, name: str, path: str, found: Standing) -> None:
        try:
            standing = _standing(json.loads(text), self._topic_ids)
        except ValueError as error:
            raise AuditError(f"{path} cannot be read: {error}") from error
        if standing is None:
            self._left_out.add(f"{name}: {text[:60]}")
            return
        for place, offset in standing.items():
            # Two sources may read the same topic: the scope is what both have.
            found[place] = min(found.get(place, offset), offset)

    def _beginning(self, first: Standing) -> Standing | None:
        """Where the query began, as its sources wrote it down; None where they did not."""
        directory = os.path.join(self._directory, "sources")
        found: Standing = {}
        for number in _numbers(directory):
            path = os.path.join(directory, str(number), "0")
            if self._source in (None, number) and os.path.exists(path):
                self._take(_lines(path, least=2)[-1], f"source {number}", path, found)
        return found if found and set(found) >= set(first) else None


def _lines(path: str, least: int = 3) -> list[str]:
    try:
        with open(path, "rb") as file:
            # Spark's Kafka source writes a zero byte first, for versions before 2.1.
            text = file.read().lstrip(b"\0").decode("utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise AuditError(f"{path} cannot be read: {error}") from error
    lines = [line.strip() for line in text.splitlines()]
    if len(lines) < least:
        raise AuditError(f"{path} is cut short: {len(lines)} lines")
    if lines[0] not in VERSIONS:
        raise AuditError(f"{path} has the version {lines[0][:20]!r}; {' and '.join(VERSIONS)} are understood")
    return lines


def _standing(document: Any, ids: dict[str, UUID]) -> Standing | None:
    """Offsets of Spark's Kafka source or of ours, which names the topics' ids; nothing where it is none of the two."""
    if not isinstance(document, dict) or not document:
        return None
    found: Standing = {}
    for topic, content in document.items():
        offsets = content
        if isinstance(content, dict) and {"id", "offsets"} <= content.keys():
            ids[topic], offsets = UUID(content["id"]), content["offsets"]
        if not isinstance(offsets, dict):
            return None
        for number, offset in offsets.items():
            if not number.isdigit() or type(offset) is not int:
                return None
            found[TopicPartition(topic, int(number))] = offset
    return found


# ---------------------------------------------------------------------------- checkpoint


def audit_checkpoint(
    directory: str,
    sink: str,
    match: str,
    settings: Mapping[str, str],
    *,
    where: str | None = None,
    is_distinct: bool = False,
    source: int | None = None,
    dead_letters: str | None = None,
    sink_settings: Mapping[str, str] | None = None,
) -> Report:
    """Whether the sink holds what the query with this checkpoint has read, once each.

    `settings` reach the cluster of the source, `sink_settings` that of a sink that is a topic, if it is another one.
    """
    table = open_table(sink, match, sink_settings or settings)
    conditions = () if where is None else parse_condition(where)
    log = read_query_log(directory, source)
    unproven = [gap(each, "no source of Kafka: what it read was not looked at") for each in log.left_out]
    if not log.batch_ids:
        why = "its only entry says where the next batch begins"
        if log.committed < 0:
            why = "no batch is committed"
        unproven.append(gap(f"anything of {directory}", why))
    if not log.topic_ids:
        unproven.append(
            Unproven(
                "that the topics are still those that the query read",
                "Spark writes their names down, not their ids",
            )
        )
    return audit_matched(
        Question(
            subject=f"query {log.query_id or directory}",
            mode="checkpoint",
            settings=settings,
            scopes=log.scopes,
            begins=_begins(log),
            ends=f"the last batch committed, {log.committed}" if log.batch_ids else "no batch committed",
            topic_ids=log.topic_ids,
            table=table,
            conditions=conditions,
            is_distinct=is_distinct,
            dead_letters=read_dead_letters(dead_letters, settings),
            unproven=unproven,
            notes=_notes(log),
        )
    )


def _begins(log: QueryLog) -> str:
    if log.is_whole:
        return "the query's first batch"
    return f"the oldest entry kept, the end of batch {log.first - 1}; what came before it is not known"


def _notes(log: QueryLog) -> list[str]:
    if log.planned <= log.committed:
        return []
    count = log.planned - max(log.committed, log.first - 1)
    parts = [
        f"{place.topic}-{place.partition} {log.ends.get(place, 0)} to {end - 1}"
        for place, end in sorted(log.planned_ends.items())
        if end > log.ends.get(place, 0)
    ]
    listed = f": {', '.join(parts[:5])}" if parts else ""
    return [f"{count} batch{'es' if count > 1 else ''} planned and not committed, pending{listed}"]
