"""The numbers that spooling producers give their messages: whether all of them reached the topics.

A spool numbers its messages for each partition of a topic from 0 without a gap, and every record carries its number in
the header `hf-id` (`client/spool/marks.py`). So loss before the broker shows as a gap, and a message that was sent
twice as a number that is there twice, which readers recognise.

What the topics alone cannot tell is whether anything is missing behind the last number: the spool's files can. A number
that the files say was acknowledged and that is in no topic is *lost*; one that they still hold is *pending*; one that
was refused for good is named. The files are read first, so that what they call delivered must be in the topics. A spool
that delivers exactly once calls delivered what is committed, and the markers of that may still be on their way: they
are waited for, for a while. Behind a transaction that is open for longer nobody can look.

Numbers of topics that were not read are not known: a spool sends to any number of topics, and each counts for itself.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from holdfast import __version__
from holdfast.audit.lineage import as_ranges
from holdfast.audit.model import (
    AuditError,
    Examined,
    Fate,
    Finding,
    Kind,
    PartitionAccount,
    Report,
    Scope,
    SinkAccount,
    Unproven,
    gap,
    ranges_text,
)
from holdfast.audit.record_walk import BATCH_BYTES, Ground, await_decided, grounds_of
from holdfast.audit.source import COMPACTED, EXPIRED, SourceWalk
from holdfast.audit.spool_numbers import (
    Line,
    Range,
    Sequences,
    SpoolLines,
    count_of,
    merged,
    without,
)
from holdfast.client.messages import ID_HEADER
from holdfast.client.spool.format import UNDECIDED
from holdfast.client.spool.home import SpoolHome, is_spool_id
from holdfast.client.spool.peek import SpoolPeek
from holdfast.errors import UsageError
from holdfast.pipeline.positions import Place
from holdfast.reader import Cluster, PartitionRange, RangeReport, TopicPartition
from holdfast.real import RealFileSystem, RealRandomness

# ---------------------------------------------------------------------------- the files


@dataclass
class SpoolFiles:
    """What the files of spools say, by line."""

    acknowledged: dict[Line, int] = field(default_factory=dict)
    """Below this number, all was delivered or set aside."""
    stored: dict[Line, int] = field(default_factory=dict)
    left: dict[Line, list[Range]] = field(default_factory=dict)
    """Still to be sent."""
    refused: dict[Line, list[Range]] = field(default_factory=dict)
    reasons: dict[Line, str] = field(default_factory=dict)
    moved: dict[Line, int] = field(default_factory=dict)
    """Below this number, an earlier version has given the messages other numbers, with their partitions."""
    undecided: dict[str, int] = field(default_factory=dict)
    """By topic, messages without a partition yet."""
    damages: list[str] = field(default_factory=list)
    spools: list[str] = field(default_factory=list)

    @property
    def topics(self) -> set[str]:
        return {line.topic for line in (*self.stored, *self.refused)} | set(self.undecided)


def read_spools(directories: Iterable[str]) -> SpoolFiles:
    """Homes of spools, or single spools; nothing is locked or changed."""
    fs = RealFileSystem()
    found = SpoolFiles()
    for directory in directories:
        path = directory.rstrip("/")
        if not os.path.isdir(path):
            raise UsageError(f"--spool {directory}: there is no such directory")
        if is_spool_id(os.path.basename(path)):
            spools = [(os.path.basename(path), path)]
        else:
            home = SpoolHome(fs, path, RealRandomness())
            spools = [(each, home.directory(each)) for each in home.ids()]
        for spool, each in spools:
            found.spools.append(spool)
            _read_spool(SpoolPeek(fs, each), spool, found)
    return found


def _read_spool(peek: SpoolPeek, spool: str, found: SpoolFiles) -> None:
    state = peek.state(spool, is_in_use=False)
    for each in state.partitions:
        line = Line(spool, each.topic, each.partition)
        found.stored[line] = each.stored
        found.acknowledged[line] = each.confirmed
        found.moved[line] = each.moved
    for topic, count in state.undecided.items():
        found.undecided[topic] = found.undecided.get(topic, 0) + count
    left: dict[Line, list[int]] = {}
    for kept in peek.messages(is_left_only=True):
        message = kept.message
        left.setdefault(Line(spool, message.topic, message.partition), []).append(message.sequence)
    found.damages += [f"{each.path} at byte {each.at}: {each.bytes:,} bytes" for each in peek.damages]
    for line, numbers in left.items():
        found.left[line] = as_ranges(np.unique(np.array(numbers, np.int64)))
    for refused in peek.refused(is_all=True):
        message = refused.message
        line = Line(spool, message.topic, message.partition)
        found.refused.setdefault(line, []).append((message.sequence, message.sequence))
        found.reasons.setdefault(line, f"{refused.code}: {refused.reason}")


# ---------------------------------------------------------------------------- the judgement


def judge(
    lines: SpoolLines,
    files: SpoolFiles,
    grounds: Mapping[TopicPartition, Ground],
    missing: Mapping[TopicPartition, int],
    undecided: Mapping[TopicPartition, int] | None = None,
    *,
    is_whole: bool = True,
) -> tuple[Examined, dict[Line, dict[Fate, int]]]:
    """What the numbers say, and the fates of each line's.

    `missing` are offsets in no batch, by partition, `undecided` those behind an open transaction. `is_whole` when the
    topics were to be read from their first records: then a head that is gone is a gap of the proof.
    """
    judged = _Judgement(files, grounds, missing, undecided or {}, is_whole)
    for line in sorted({*lines.lines, *files.stored}):
        if judged.places_of(line):
            judged.judge(line, lines.lines.get(line, Sequences()))
    judged.rest(lines)
    return Examined(tuple(judged.findings), tuple(judged.unproven), notes=tuple(judged.notes)), judged.fates


class SpoolWatch:
    """Looks on while a pipeline's source is walked (an `Observer`): numbers of spools that are not there show."""

    needs_headers = True

    def __init__(self, spools: Sequence[str] = ()) -> None:
        """`spools` are directories whose files tell what was refused, and what is still to be sent."""
        self.lines = SpoolLines()
        self._files = read_spools(spools)

    def take(self, place: Place, batch: pa.RecordBatch, decoded: object) -> None:
        self.lines.take(batch)

    def examine(self, walked: SourceWalk) -> Examined:
        """What was found; nothing where no record has a number."""
        if not self.lines.lines:
            return Examined()
        grounds: dict[TopicPartition, Ground] = {}
        missing: dict[TopicPartition, int] = {}
        for place, walk in walked.partitions.items():
            expired = int((walk.codes == EXPIRED).sum())
            name = TopicPartition(place.topic, place.partition)
            grounds[name] = Ground(place, walk.start, walk.end, walk.start + expired, walk.end)
            missing[name] = int((walk.codes == COMPACTED).sum())
        examined, _ = judge(self.lines, self._files, grounds, missing, is_whole=False)
        return examined


class _Judgement:
    def __init__(
        self,
        files: SpoolFiles,
        grounds: Mapping[TopicPartition, Ground],
        missing: Mapping[TopicPartition, int],
        undecided: Mapping[TopicPartition, int],
        is_whole: bool,
    ) -> None:
        self._files = files
        self._grounds = grounds
        self._missing = missing
        self._undecided = undecided
        self._is_whole = is_whole
        self._open_ended: list[Line] = []
        """Lines whose files nobody has shown us."""
        self.findings: list[Finding] = []
        self.unproven: list[Unproven] = []
        self.notes: list[str] = []
        self.fates: dict[Line, dict[Fate, int]] = {}

    def places_of(self, line: Line) -> list[TopicPartition]:
        """Where messages of a line can be: in its partition, or in any when it was not known."""
        if line.partition != UNDECIDED:
            place = TopicPartition(line.topic, line.partition)
            return [place] if place in self._grounds else []
        return sorted(place for place in self._grounds if place.topic == line.topic)

    def judge(self, line: Line, seen: Sequences) -> None:
        files = self._files
        places = [self._grounds[place] for place in self.places_of(line)]
        ground = max(places, key=lambda place: place.log_start)
        acknowledged = files.acknowledged.get(line, 0)
        # A scope may end before what was delivered last.
        end = max(seen.highest + 1, acknowledged if self._is_whole else 0)
        first = 0
        if ground.log_start > 0:
            # What was at the log's head had numbers below those that are there now.
            first = seen.lowest if seen.ranges else end
            if first and self._is_whole:
                self._gap(f"numbers 0 to {first - 1} of {line}", "the topic does not hold its head any more")
        gaps = seen.gaps(max(first, files.moved.get(line, 0)), end)
        refused = merged(files.refused.get(line, ()))
        left = files.left.get(line, [])
        lost = without(gaps, [*refused, *left])
        held_back = self._held_back(line, lost, seen)
        lost = without(lost, held_back)
        pending = merged([*without(gaps, without(gaps, left)), *without(left, seen.ranges), *held_back])
        fates = {
            Fate.OUTPUT: seen.distinct,
            Fate.DUPLICATE: seen.repeated,
            Fate.PENDING: count_of(pending),
            Fate.DEAD_LETTER: count_of(refused),
            Fate.LOST: count_of(lost),
        }
        self.fates[line] = {fate: count for fate, count in fates.items() if count}
        if refused:
            why = files.reasons.get(line, "")
            self.notes.append(
                f"{line}: numbers {ranges_text(refused)} were refused and are kept aside: {why}"
            )
        if lost:
            self._lost(line, lost, acknowledged, ground)
        if seen.backwards:
            detail = (
                f"{line}: {seen.backwards:,} numbers came behind greater ones, the first at offset "
                f"{seen.backwards_at}; readers that keep the greatest number take them for repeated"
            )
            offsets = ((seen.backwards_at, seen.backwards_at),)
            self.findings.append(
                Finding(Fate.ALTERED, "", ground.place, offsets, seen.backwards, detail=detail)
            )
        if line.spool not in files.spools:
            self._open_ended.append(line)

    def _gap(self, what: str, why: str) -> None:
        self.unproven.append(gap(what, why))

    def _held_back(self, line: Line, lost: Sequence[Range], seen: Sequences) -> list[Range]:
        """Of the numbers that are not there those behind all that are, where an open transaction may hide them."""
        undecided = sum(self._undecided.get(place, 0) for place in self.places_of(line))
        behind = without(lost, [(0, seen.highest)] if seen.ranges else [])
        if not 0 < count_of(behind) <= undecided:
            return []
        self._gap(
            f"whether numbers {ranges_text(behind)} of {line} are in the topic",
            f"it holds {undecided:,} offsets behind a transaction that is still open",
        )
        return behind

    def _lost(self, line: Line, lost: Sequence[Range], acknowledged: int, ground: Ground) -> None:
        missing = sum(self._missing.get(place, 0) for place in self.places_of(line))
        numbers = ranges_text(lost)
        if missing:
            self._gap(
                f"numbers {numbers} of {line} are not in the topic",
                f"{missing:,} of its offsets are in no batch: compacted away, or lost",
            )
            return
        said = ", though the spool was told that they were delivered"
        if line.spool not in self._files.spools:
            said = " (or refused and kept aside, if so only its files know: --spool)"
        elif lost[-1][1] >= acknowledged:
            said = ""
        ids = [line.id_of(number) for first, last in lost[:5] for number in (first, last)]
        self.findings.append(
            Finding(
                Fate.LOST,
                f"spool {line.spool}",
                ground.place,
                (),
                count_of(lost),
                tuple(dict.fromkeys(ids))[:5],
                f"numbers {numbers} of the spool are in no record{said}",
            )
        )

    def rest(self, lines: SpoolLines) -> None:
        files = self._files
        if self._open_ended:
            spools = len({line.spool for line in self._open_ended})
            self.unproven.append(
                Unproven(
                    f"that nothing is missing behind the last numbers of {spools} spool{'s' if spools > 1 else ''}",
                    "only their files know what was stored last (--spool)",
                )
            )
        for damage in files.damages:
            self._gap(f"a spool's file: {damage}", "it is damaged there")
        for topic, count in sorted(files.undecided.items()):
            self.notes.append(f"{count:,} messages for {topic} have no partition yet, pending")
        for topic, count in sorted(lines.unnumbered.items()):
            self.notes.append(f"{count:,} records of {topic} have no {ID_HEADER}: no spool sent them")
        for topic, count in sorted(lines.strange.items()):
            self._gap(f"{count:,} records of {topic}", f"their {ID_HEADER} is none of a spool")
        unread = sorted(files.topics - {place.topic for place in self._grounds})
        if unread and self._is_whole:
            self._gap(f"what the spools sent to {', '.join(unread)}", "not audited; add --topic")


# ---------------------------------------------------------------------------- an audit of its own


def audit_spools(
    settings: Mapping[str, str], *, topics: Sequence[str] = (), spools: Sequence[str] = ()
) -> Report:
    """Whether every message of the spools reached the topics; without topics, those that the spools' files name."""
    started_s, clock_s = time.time(), time.monotonic()
    files = read_spools(spools)
    names = list(dict.fromkeys(topics)) or sorted(files.topics)
    if not names:
        raise AuditError("the spools name no topic: give --topic")
    lines = SpoolLines()
    with Cluster(settings) as cluster:
        undecided = await_decided(cluster, names)
        grounds = _whole(cluster, names)
        kinds: dict[TopicPartition, dict[str, int]] = {}
        for batch in _records(cluster, grounds, kinds):
            lines.take(batch)
    by_place = {TopicPartition(each.place.topic, each.place.partition): each for each in grounds}
    missing = {place: counts.get(Kind.COMPACTED, 0) for place, counts in kinds.items()}
    examined, fates = judge(lines, files, by_place, missing, undecided)
    if not lines.lines and not files.stored and not files.undecided:
        nothing = gap("anything", f"no record of {', '.join(names)} has an {ID_HEADER}")
        examined += Examined(unproven=(nothing,))
    return Report(
        subject=", ".join(names),
        mode="spool",
        started_ms=int(started_s * 1000),
        took_ms=int((time.monotonic() - clock_s) * 1000),
        scope=Scope(
            "the topics' first records",
            "the topics' ends when they were read",
            sum(each.log_end - each.log_start for each in grounds),
            sum(each.log_start for each in grounds),
            sum(counts.get(Fate.PENDING, 0) for counts in fates.values()) + sum(files.undecided.values()),
        ),
        partitions=tuple(_accounts(grounds, kinds, fates)),
        sinks=tuple(_spool_accounts(lines, files, fates)),
        findings=examined.findings,
        unproven=examined.unproven,
        notes=examined.notes,
        versions={"holdfast": __version__},
    )


def _whole(cluster: Cluster, topics: Sequence[str]) -> list[Ground]:
    infos = cluster.topics(topics)
    scopes = {
        TopicPartition(name, number): (0, 0) for name, info in infos.items() for number in info.partitions
    }
    return [
        Ground(each.place, each.log_start, each.log_end, each.log_start, each.log_end)
        for each in grounds_of(cluster, scopes)
    ]


def _records(
    cluster: Cluster, grounds: Sequence[Ground], kinds: dict[TopicPartition, dict[str, int]]
) -> Iterator[pa.RecordBatch]:
    ranges = [
        PartitionRange(
            each.place.topic, each.place.topic_id, each.place.partition, each.log_start, each.log_end
        )
        for each in grounds
        if each.log_start < each.log_end
    ]
    reports: list[RangeReport] = []
    yield from cluster.read(ranges, batch_bytes=BATCH_BYTES, reports=reports)
    for report in reports:
        kinds[TopicPartition(report.range.topic, report.range.partition)] = {
            Kind.RECORD: report.records,
            Kind.CONTROL: report.control,
            Kind.ABORTED: report.aborted,
            Kind.COMPACTED: report.missing,
        }


def _accounts(
    grounds: Sequence[Ground],
    kinds: Mapping[TopicPartition, Mapping[str, int]],
    fates: Mapping[Line, Mapping[Fate, int]],
) -> Iterator[PartitionAccount]:
    for each in grounds:
        place = TopicPartition(each.place.topic, each.place.partition)
        total = _together(counts for line, counts in fates.items() if (line.topic, line.partition) == place)
        counted = {str(kind): count for kind, count in kinds.get(place, {}).items()}
        yield PartitionAccount(each.place, each.start, each.end, counted, total, each.log_start, each.log_end)


def _together(accounts: Iterable[Mapping[Fate, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for account in accounts:
        total.update({str(fate): count for fate, count in account.items()})
    return dict(total)


def _spool_accounts(
    lines: SpoolLines, files: SpoolFiles, fates: Mapping[Line, Mapping[Fate, int]]
) -> Iterator[SinkAccount]:
    for spool in sorted({line.spool for line in fates}):
        own = [line for line in sorted(fates) if line.spool == spool]
        total = _together(fates[line] for line in own)
        positions = {
            f"{line.topic}-{line.partition}": lines.lines[line].highest + 1
            for line in own
            if line in lines.lines
        }
        rows = sum(lines.lines[line].seen for line in own if line in lines.lines)
        yield SinkAccount(f"spool {spool}", "spool", rows, 0, positions, total)
