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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from holdfast import __version__
from holdfast.audit import words
from holdfast.audit.lineage import as_ranges
from holdfast.audit.matched_values import Zone
from holdfast.audit.model import (
    AuditError,
    Examined,
    Fate,
    Finding,
    Report,
    Said,
    Scope,
    SinkAccount,
    Unproven,
    gap,
    ranges_text,
)
from holdfast.audit.record_walk import Ground, await_decided, grounds_of, note_kinds, read_zone
from holdfast.audit.source import EXPIRED, SourceWalk
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
from holdfast.reader import Cluster, RangeReport, TopicPartition
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
    lines: SpoolLines, files: SpoolFiles, grounds: Iterable[Ground], *, is_whole: bool = True
) -> tuple[Examined, dict[Line, dict[str, int]]]:
    """What the numbers say, and the fates of each line's.

    `is_whole` when the topics were to be read from their first records: then a head that is gone is a gap of the proof.
    """
    judgement = _Judgement(files, sorted(grounds, key=lambda each: each.place), is_whole)
    return Examined.of(judgement.said(lines)), judgement.fates


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
        grounds = []
        for place, walk in walked.partitions.items():
            expired = int((walk.codes == EXPIRED).sum())
            ends = (walk.start, walk.end, walk.start + expired, walk.end)
            grounds.append(Ground(place, *ends, kinds=walk.kinds()))
        examined, _ = judge(self.lines, self._files, grounds, is_whole=False)
        return examined


@dataclass
class _Judgement:
    files: SpoolFiles
    grounds: Sequence[Ground]
    is_whole: bool
    fates: dict[Line, dict[str, int]] = field(default_factory=dict)

    def said(self, lines: SpoolLines) -> Iterator[Said]:
        for line in sorted({*lines.lines, *self.files.stored}):
            # Messages whose partition was not known are in any.
            places = [
                each
                for each in self.grounds
                if each.place.topic == line.topic and line.partition in (UNDECIDED, each.place.partition)
            ]
            if places:
                yield from self._of_line(line, places, lines.lines.get(line, Sequences()))
        yield from self._rest(lines)

    def _of_line(self, line: Line, places: Sequence[Ground], seen: Sequences) -> Iterator[Said]:
        files = self.files
        ground = max(places, key=lambda each: each.log_start)
        acknowledged = files.acknowledged.get(line, 0)
        # A scope may end before what was delivered last.
        end = max(seen.highest + 1, acknowledged if self.is_whole else 0)
        first = 0
        if ground.log_start > 0:
            # What was at the log's head had numbers below those that are there now.
            first = seen.lowest if seen.ranges else end
            if first and self.is_whole:
                yield gap(f"numbers 0 to {first - 1} of {line}", "the topic does not hold its head any more")
        refused = merged(files.refused.get(line, ()))
        left = files.left.get(line, [])
        lost = without(seen.gaps(max(first, files.moved.get(line, 0)), end), [*refused, *left])
        # Of the numbers that are not there an open transaction may hide those behind all that are.
        undecided = sum(each.undecided for each in places)
        hidden = without(lost, [(0, seen.highest)])
        if not 0 < count_of(hidden) <= undecided:
            hidden = []
        if hidden:
            yield gap(
                f"whether numbers {ranges_text(hidden)} of {line} are in the topic",
                f"it holds {undecided:,} offsets behind a transaction that is still open",
            )
        lost = without(lost, hidden)
        fates: dict[str, int] = {
            Fate.OUTPUT: seen.distinct,
            Fate.DUPLICATE: seen.repeated,
            Fate.PENDING: count_of(merged([*without(left, seen.ranges), *hidden])),
            Fate.DEAD_LETTER: count_of(refused),
            Fate.LOST: count_of(lost),
        }
        self.fates[line] = {fate: count for fate, count in fates.items() if count}
        if refused:
            why = files.reasons.get(line, "")
            yield f"{line}: numbers {ranges_text(refused)} were refused and are kept aside: {why}"
        if lost:
            yield self._lost(line, lost, acknowledged, ground.place, sum(each.missing for each in places))
        if seen.backwards:
            detail = (
                f"{line}: {seen.backwards:,} numbers came behind greater ones, the first at offset "
                f"{seen.backwards_at}; readers that keep the greatest number take them for repeated"
            )
            offsets = ((seen.backwards_at, seen.backwards_at),)
            yield Finding(Fate.ALTERED, "", ground.place, offsets, seen.backwards, detail=detail)

    def _lost(self, line: Line, lost: Sequence[Range], acknowledged: int, place: Place, missing: int) -> Said:
        numbers = ranges_text(lost)
        if missing:
            return gap(
                f"numbers {numbers} of {line} are not in the topic",
                f"{missing:,} of its offsets are in no batch: compacted away, or lost",
            )
        said = ", though the spool was told that they were delivered"
        if line.spool not in self.files.spools:
            said = " (or refused and kept aside, if so only its files know: --spool)"
        elif lost[-1][1] >= acknowledged:
            said = ""
        ids = dict.fromkeys(line.id_of(number) for first, last in lost[:5] for number in (first, last))
        detail = f"numbers {numbers} of the spool are in no record{said}"
        return Finding(Fate.LOST, f"spool {line.spool}", place, (), count_of(lost), tuple(ids)[:5], detail)

    def _rest(self, lines: SpoolLines) -> Iterator[Said]:
        files = self.files
        unshown = len({line.spool for line in self.fates} - set(files.spools))
        if unshown:
            yield Unproven(
                f"that nothing is missing behind the last numbers of {unshown} spool{'s' if unshown > 1 else ''}",
                "only their files know what was stored last (--spool)",
            )
        for damage in files.damages:
            yield gap(f"a spool's file: {damage}", "it is damaged there")
        for topic, count in sorted(files.undecided.items()):
            yield f"{count:,} messages for {topic} have no partition yet, pending"
        for topic, count in sorted(lines.unnumbered.items()):
            yield f"{count:,} records of {topic} have no {ID_HEADER}: no spool sent them"
        for topic, count in sorted(lines.strange.items()):
            yield gap(f"{count:,} records of {topic}", f"their {ID_HEADER} is none of a spool")
        unread = sorted(files.topics - {each.place.topic for each in self.grounds})
        if unread and self.is_whole:
            yield gap(f"what the spools sent to {', '.join(unread)}", "not audited; add --topic")


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
    reports: list[RangeReport] = []
    with Cluster(settings) as cluster:
        await_decided(cluster, names)
        infos = cluster.topics(names)
        places = [TopicPartition(name, number) for name, info in infos.items() for number in info.partitions]
        grounds = [
            replace(each, start=each.log_start, end=each.log_end)
            for each in grounds_of(cluster, dict.fromkeys(places, (0, 0)))
        ]
        for batch in read_zone(cluster, grounds, Zone.SCOPE, reports):
            lines.take(batch)
    note_kinds(grounds, reports)
    examined, fates = judge(lines, files, grounds)
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
        partitions=tuple(
            each.account(
                words.summed(
                    counts for line, counts in fates.items() if (line.topic, line.partition) == each.at
                )
            )
            for each in grounds
        ),
        sinks=tuple(_spool_accounts(lines, fates)),
        findings=examined.findings,
        unproven=examined.unproven,
        notes=examined.notes,
        versions={"holdfast": __version__},
    )


def _spool_accounts(lines: SpoolLines, fates: Mapping[Line, Mapping[str, int]]) -> Iterator[SinkAccount]:
    for spool in sorted({line.spool for line in fates}):
        own = [line for line in sorted(fates) if line.spool == spool]
        total = words.summed(fates[line] for line in own)
        seen = {line: lines.lines[line] for line in own if line in lines.lines}
        positions = {f"{line.topic}-{line.partition}": each.highest + 1 for line, each in seen.items()}
        rows = sum(each.seen for each in seen.values())
        yield SinkAccount(f"spool {spool}", "spool", rows, 0, positions, total)
