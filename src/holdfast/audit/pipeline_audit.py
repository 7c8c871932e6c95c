"""The audit of one pipeline: every record of its scope held against every sink.

The order matters, since source and sinks may move while they are read:

1. every sink is opened, which takes its snapshot: ledger first, rows of that moment after it;
2. the logs' ends are asked for. They are not below any position, and what comes later is nobody's loss;
3. the scope follows from both, and stays;
4. what left the steps is read (dead letters, the home's record), then the log is walked once, with everybody looking on
   who needs the content of records; then the sinks' rows are read and compared;
5. the ledgers are held against all of it.

Nothing is written, locked or committed anywhere.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import holdfast
from holdfast.audit import ledgers, reporting
from holdfast.audit.compare import CODE, Holding, Judgement, fates_of, finding, judge, judge_routes, strays
from holdfast.audit.content_check import ContentCheck
from holdfast.audit.decoding import Observer, SourceDecoder
from holdfast.audit.left import Left, expands, read_dead_letters, read_left
from holdfast.audit.model import AuditError, Examined, Fate, Finding, Report, Unproven
from holdfast.audit.scope import PipelineScope, decide_scope, start_ms
from holdfast.audit.side_streams import check_side, check_turns, side_stream
from holdfast.audit.sinks.base import DeadLetterReader, SinkReader, SinkScope
from holdfast.audit.sinks.opening import open_dead_letters, open_sink
from holdfast.audit.source import LogEnds, SourceWalk, look, walk
from holdfast.audit.spool import SpoolWatch
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.model import (
    Filter,
    Join,
    KafkaSink,
    Keyed,
    PipelineDefinition,
    PostgresSink,
    Window,
)
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME, client_settings, dead_letter_of, home_of
from holdfast.pipeline.definition.secrets import expand_definition
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place
from holdfast.reader import TopicPartition
from holdfast.reader.cluster import Cluster

if TYPE_CHECKING:
    from holdfast.audit.memory import MemoryCheck, MemoryResult

Tell = Callable[[str], None]


@dataclass(frozen=True)
class AuditOptions:
    """What a caller may want otherwise."""

    start: str | None = None
    """`earliest`, for what the source still has, or a time: where the scope begins."""
    since: Mapping[Place, int] | None = None
    """By partition, up to where an earlier audit has proven everything; one that is not named begins as usual."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Kafka's client settings, over those of the definition's source."""
    tell: Tell | None = None
    """Is told what is being done; an empty text at the end."""


def audit_pipeline(
    definition: PipelineDefinition, *, bootstrap: str | None = None, options: AuditOptions | None = None
) -> Report:
    """Audit a pipeline as its definition stands; `AuditError` where that cannot be begun."""
    options = options or AuditOptions()
    started = time.time()
    expanded, _ = expand_definition(definition)
    settings = {**client_settings(expanded, bootstrap), **options.settings}
    with ExitStack() as stack:
        readers = open_readers(expanded, settings, stack)
        cluster = stack.enter_context(Cluster(settings))
        audit = PipelineAudit(expanded, fingerprint(definition), cluster, readers, options)
        report = audit.run()
    took_ms = round((time.time() - started) * 1000)
    return _stamped(report, round(started * 1000), took_ms)


def _stamped(report: Report, started_ms: int, took_ms: int) -> Report:
    from dataclasses import replace

    import pyarrow

    versions = {
        "holdfast": holdfast.__version__,
        "python": platform.python_version(),
        "pyarrow": pyarrow.__version__,
    }
    return replace(report, started_ms=started_ms, took_ms=took_ms, versions=versions)


def open_readers(
    definition: PipelineDefinition, settings: Mapping[str, str], stack: ExitStack
) -> dict[str, SinkReader]:
    """Every sink's reader by name, the dead letters' first."""
    found: dict[str, SinkReader] = {}
    dead = open_dead_letters(definition, settings)
    stack.callback(dead.close)
    found[DEAD_LETTER_NAME] = dead
    for sink in definition.sinks:
        reader = open_sink(definition, sink, settings)
        stack.callback(reader.close)
        found[sink.name] = reader
    return found


@dataclass
class PipelineAudit:
    """One audit, from the readers to the report."""

    definition: PipelineDefinition
    """With its secrets."""
    fingerprint: str
    cluster: Cluster
    readers: Mapping[str, SinkReader]
    options: AuditOptions = field(default_factory=AuditOptions)

    examined: Examined = field(init=False, default_factory=Examined)
    scope: PipelineScope = field(init=False)
    logs: dict[Place, LogEnds] = field(init=False)
    entries: dict[str, Sequence[Entry]] = field(init=False, default_factory=dict)
    holdings: dict[str, Holding] = field(init=False, default_factory=dict)
    judgements: dict[str, list[Judgement]] = field(init=False, default_factory=dict)

    def run(self) -> Report:
        tell = self.options.tell or (lambda what: None)
        tell("reading the ledgers")
        self._decide()
        tell("reading what left the steps")
        decoder = SourceDecoder(self.definition.source)
        memory, looker = self._memory(decoder)
        left = self._left(memory)
        content = ContentCheck(self.definition, decoder, self.fingerprint)
        watcher = content.begin(list(self._opened().values()), self.scope.spans)
        spools = SpoolWatch()
        observers: list[Observer] = [each for each in (looker, watcher, spools) if each is not None]
        tell(f"walking {self.scope.offsets:,} offsets of the source")
        walked = walk(self.cluster, self.scope.spans, self.logs, decoder=decoder, observers=observers)
        self._note_expired(walked)
        self.examined += spools.examine(walked)
        tell("comparing the sinks")
        routes = {fate: left.routes[fate] for fate in (Fate.DEAD_LETTER, *left.routes) if fate in left.routes}
        self._settle_unrecorded(left, walked)
        self._judge(left, routes, walked)
        self._sides(left, walked)
        self._ledgers(left, routes, walked)
        result = None
        if memory is not None:
            tell("making windows, duplicates and late rows again")
            ends = {place: end for place, (_, end) in self.scope.spans.items()}
            result = memory.examine(list(self._opened().values()), ends)
            self.examined += result.examined
        tell("comparing contents")
        self.examined += content.examine(list(self._opened().values()))
        for reader in self._opened().values():
            self.examined += Examined(tuple(reader.problems()), tuple(reader.gaps()))
        self._word(left)
        tell("")
        return self._report(routes, walked, result)

    # -------------------------------------------------------------------- before the walk

    def _opened(self) -> dict[str, SinkReader]:
        return {name: reader for name, reader in self.readers.items() if self.entries.get(name)}

    def _decide(self) -> None:
        self.entries = {name: reader.entries() for name, reader in self.readers.items()}
        if not any(self.entries.values()):
            raise AuditError(
                f"pipeline {self.definition.name!r} has never run: none of its sinks has a ledger. "
                "`holdfast pipeline run` makes one"
            )
        chains = {
            name: ledgers.follow(name, self.readers[name].kind, self.definition.name, entries)
            for name, entries in self.entries.items()
            if entries
        }
        for chain in chains.values():
            self.examined += chain.examined
        topics = {place.topic for chain in chains.values() for place in chain.positions}
        self.logs = look(self.cluster, topics | self._wanted())
        if topics and not self.logs:
            raise AuditError(
                f"the source is gone: there is no topic {sorted(topics)[0]!r} any more, and nothing to compare with"
            )
        self.scope = decide_scope(
            chains,
            self.logs,
            given=self._given(),
            given_text="" if self.options.start is None else f"--from {self.options.start}",
            since=self.options.since,
            starts_at_log_start=self.definition.source.starting == "earliest",
        )
        self.examined += Examined((), tuple(self.scope.unproven), (), tuple(self.scope.notes))
        self.examined += self._absent()
        if not self.scope.offsets and any(self.scope.pending.values()) and not self.options.since:
            self.examined += Examined(
                unproven=(Unproven("anything", "the pipeline has not taken a record yet", is_gap=True),)
            )

    def _wanted(self) -> set[str]:
        """The topics that the definition reads now, of which the ledgers may not know yet."""
        source = self.definition.source
        if source.pattern is None:
            return set(source.topics)
        own = {sink.topic for sink in self.definition.sinks if isinstance(sink, KafkaSink)}
        own.add(dead_letter_of(self.definition).topic)
        found = self.cluster.topics(pattern=source.pattern)
        return {name for name in found if name not in own and not name.startswith("hf-ledger-")}

    def _given(self) -> Callable[[Place], int] | None:
        text = self.options.start
        if text is None:
            return None
        moment = start_ms(text)
        if moment is None:
            return lambda place: self.logs[place].start
        partitions = {TopicPartition(place.topic, place.partition): place for place in self.logs}
        answers = self.cluster.offsets(partitions, moment)
        starts = {
            place: answers[each].offset if answers[each].offset >= 0 else self.logs[place].end
            for each, place in partitions.items()
        }
        return lambda place: starts[place]

    def _absent(self) -> Examined:
        """Sinks without a ledger: new ones, or ones that were emptied."""
        found: list[Finding] = []
        unproven: list[Unproven] = []
        newest = [entries[-1] for entries in self.entries.values() if entries]
        ran_as_it_stands = any(entry.fingerprint == self.fingerprint and entry.range for entry in newest)
        for name, entries in self.entries.items():
            if entries:
                continue
            if ran_as_it_stands:
                detail = "it has no ledger, and the pipeline has run with it: it was emptied or is elsewhere"
                routes = [entry.routes for entry in ledgers.cover(self.entries, self.scope.spans)]
                is_dead_letter = name == DEAD_LETTER_NAME
                rows = sum(sum(each.dead_letter.values()) if is_dead_letter else each.main for each in routes)
                found.append(Finding(Fate.LOST if rows else Fate.ALTERED, name, count=rows, detail=detail))
            else:
                unproven.append(
                    Unproven(
                        f"sink {name!r}",
                        "it has no ledger yet: the pipeline has not run with it",
                        is_gap=True,
                    )
                )
        return Examined(tuple(found), tuple(unproven))

    def _memory(self, decoder: SourceDecoder) -> tuple[MemoryCheck | None, Observer | None]:
        from holdfast.audit.memory import MemoryCheck

        check = MemoryCheck(self.definition, decoder)
        observer = check.begin(self.scope.spans)
        return (None, None) if observer is None else (check, observer)

    def _left(self, memory: MemoryCheck | None) -> Left:
        batches = ledgers.cover(self.entries, self.scope.spans)
        sides = [side_stream(self.definition, reader.takes) for reader in self._opened().values()]
        left = read_left(
            self.definition,
            home_of(self.definition),
            self.scope.spans,
            batches,
            memory,
            {(side.route, side.step) for side in sides if side is not None},
        )
        reader = self.readers[DEAD_LETTER_NAME] if self.entries[DEAD_LETTER_NAME] else None
        dead = read_dead_letters(
            reader,  # type: ignore[arg-type]
            self.scope.spans,
            self._rows_of,
            memory,
        )
        left.routes = {Fate.DEAD_LETTER: dead, **left.routes}
        self.examined += left.examined
        return left

    # -------------------------------------------------------------------- after it

    def _note_expired(self, walked: SourceWalk) -> None:
        for place, count in sorted(walked.expired_on_the_way.items()):
            self.examined += Examined(
                unproven=(
                    Unproven(
                        f"{count:,} offsets of {place.topic}-{place.partition}",
                        "they expired while they were being read",
                        is_gap=True,
                    ),
                )
            )

    def _rows_of(self, reader: SinkReader | DeadLetterReader) -> Holding:
        """The rows of a sink, read once."""
        if reader.name not in self.holdings:
            numbers = expands(self.definition) and reader.kind != "dead_letter"
            holding = Holding(reader.name, self.scope.spans, numbers_rows=numbers)
            holding.add(reader.rows(SinkScope(self.scope.spans)))
            self.holdings[reader.name] = holding
        return self.holdings[reader.name]

    def _is_upsert(self, name: str) -> bool:
        sink = next((each for each in self.definition.sinks if each.name == name), None)
        return isinstance(sink, PostgresSink) and sink.mode == "upsert"

    def _mains(self) -> dict[str, SinkReader]:
        """Sinks that keep every row of the end of the steps."""
        return {
            name: reader
            for name, reader in self._opened().items()
            if reader.kind != "dead_letter" and not reader.takes and not self._is_upsert(name)
        }

    def _judge(self, left: Left, routes: Mapping[Fate, Holding], walked: SourceWalk) -> None:
        found: list[Finding] = []
        parts = list(walked.partitions.values())
        self.judgements[""] = [judge_routes(list(routes.values()), part) for part in parts]
        for name, reader in self._mains().items():
            holding = self._rows_of(reader)
            starts = self.scope.sink_starts.get(name, {})
            self.judgements[name] = [
                judge(holding, list(routes.values()), part, since=starts.get(part.place, part.start))
                for part in parts
            ]
            self._excuse(reader, self.judgements[name])
        found.extend(self._blame_routes(left, routes, walked))
        for judgements in self.judgements.values():
            for each in judgements:
                found.extend(each.findings)
        for name, reader in self._opened().items():
            if reader.takes or (reader.kind != "dead_letter" and self._is_upsert(name)):
                continue
            found.extend(self._strays(reader))
        self.examined += Examined(tuple(found))

    def _blame_routes(self, left: Left, routes: Mapping[Fate, Holding], walked: SourceWalk) -> list[Finding]:
        """Records in no sink that had left by a route, as far as the ledgers tell: the route has lost them."""
        mains = [name for name in self._mains() if any(each.lost.any() for each in self.judgements[name])]
        if not mains or len(mains) != len(self._mains()):
            return []
        parts = list(walked.partitions.values())
        lost = {
            part.place: np.logical_and.reduce([self.judgements[name][number].lost for name in mains])
            for number, part in enumerate(parts)
        }
        books = ledgers.Books(walked, routes, {}, {})
        batches = ledgers.cover(self.entries, self.scope.spans)
        found: list[Finding] = []
        blamed = ledgers.missing_from_routes(batches, books, lost, self._known(left, routes))
        for fate, masks in blamed.items():
            for number, part in enumerate(parts):
                mask = masks[part.place]
                if not mask.any():
                    continue
                for name in mains:
                    self.judgements[name][number].blame_other(mask, name, part)
                offsets = np.flatnonzero(mask).astype(np.int64) + part.start
                what = f"the ledgers count them as {ledgers.ROUTE_NAMES[fate]}, and they are nowhere"
                found.append(finding(Fate.LOST, routes[fate].name, part.place, offsets, what))
        return found

    def _known(self, left: Left, routes: Mapping[Fate, Holding]) -> list[Fate]:
        """The routes that could be read whole."""
        dead = self.readers[DEAD_LETTER_NAME]
        known = [Fate.DEAD_LETTER] if self.entries[DEAD_LETTER_NAME] and not _gone(dead) else []
        if not left.unrecorded:
            known += [fate for fate in routes if fate is not Fate.DEAD_LETTER]
        return known

    def _excuse(self, reader: SinkReader, judgements: list[Judgement]) -> None:
        """Where a topic has dropped or compacted as many rows as are missing, they may have been among those."""
        missing = sum(int(each.lost.sum()) for each in judgements)
        gone = {
            each.name: count for each in (reader, self.readers[DEAD_LETTER_NAME]) if (count := _gone(each))
        }
        if not 0 < missing <= sum(gone.values()):
            return
        for each in judgements:
            each.excuse()
        self.examined += Examined(
            unproven=(
                Unproven(
                    f"whether {missing:,} records were in {reader.name!r}",
                    " and ".join(f"{name} has lost {count:,} offsets" for name, count in gone.items())
                    + " to retention or compaction",
                    is_gap=True,
                ),
            )
        )

    def _sides(self, left: Left, walked: SourceWalk) -> None:
        """Sinks of streams beside the chain; windows are the memory's."""
        steps = {step.name: step for step in self.definition.steps}
        for name, reader in self._opened().items():
            side = side_stream(self.definition, reader.takes)
            if side is not None and not left.unrecorded and not self._is_upsert(name):
                holding = self._rows_of(reader)
                starts = self.scope.sink_starts.get(name, {})
                expected = left.kept[side.route, side.step]
                found = check_side(holding, expected, list(walked.partitions.values()), starts)
                self.examined += Examined((*found, *self._strays(reader)))
            elif isinstance(steps.get(reader.takes), Keyed | Join) and not self._is_upsert(name):
                self.examined += check_turns(reader, self.entries[name])

    def _strays(self, reader: SinkReader) -> list[Finding]:
        positions = {place: at.offset for place, at in reader.positions().at.items()}
        ends = {place: self.logs[place].end for place in self.scope.spans}
        unread = {(place.topic, place.partition) for place in positions if place not in ends}
        return strays(self._rows_of(reader), positions, ends, is_exact=reader.is_exact, unread=unread)

    def _settle_unrecorded(self, left: Left, walked: SourceWalk) -> None:
        """Records in no sink, of batches whose record of what left is not there: taken for it where the number fits."""
        mains = [self._rows_of(reader) for reader in self._mains().values()]
        if not mains or not left.unrecorded:
            return
        for entry in left.unrecorded:
            if not ledgers.is_whole(entry, self.scope.spans):
                continue
            nowhere = {
                place: _nowhere(place, span.start, span.end, [mains[0], *left.routes.values()], walked)
                for place, span in entry.range.spans.items()
            }
            expected = entry.routes.total - entry.routes.main - sum(entry.routes.dead_letter.values())
            if sum(map(len, nowhere.values())) == expected:
                for place, offsets in nowhere.items():
                    start = self.scope.spans[place][0]
                    left.routes[Fate.FILTERED].counts[place][offsets - start] += 1

    def _ledgers(self, left: Left, routes: Mapping[Fate, Holding], walked: SourceWalk) -> None:
        doubtful: dict[Place, npt.NDArray[np.bool_]] = {}
        for judgements in self.judgements.values():
            for part, each in zip(walked.partitions.values(), judgements, strict=True):
                wrong = each.lost | each.twice
                if each.unknown is not None:
                    wrong = wrong | each.unknown
                doubtful[part.place] = doubtful[part.place] | wrong if part.place in doubtful else wrong
        mains = {name: self._rows_of(reader) for name, reader in self._mains().items()}
        books = ledgers.Books(walked, routes, mains, doubtful)
        batches = ledgers.cover(self.entries, self.scope.spans)
        self.examined += ledgers.check_intake(batches, books)
        books.mains = {name: each for name, each in mains.items() if not _gone(self.readers[name])}
        self.examined += ledgers.check_routes(batches, books, self._known(left, routes))
        for name in books.mains:
            self.examined += ledgers.check_rows(name, self.entries[name], books)

    def _word(self, left: Left) -> None:
        """What is taken on the pipeline's word."""
        if left.routes[Fate.FILTERED].rows:
            self.examined += Examined(
                unproven=tuple(
                    Unproven(
                        f"that filter {step.name!r} was right about the records it let go",
                        "its SQL is not evaluated here; --spark evaluates it again",
                    )
                    for step in self.definition.steps
                    if isinstance(step, Filter)
                )
            )

    # -------------------------------------------------------------------- the report

    def _report(
        self, routes: Mapping[Fate, Holding], walked: SourceWalk, result: MemoryResult | None
    ) -> Report:
        mains = [self._rows_of(reader) for reader in self._mains().values()]
        fates = {
            part.place: self._fates(number, part.place, routes, mains, walked, result)
            for number, part in enumerate(walked.partitions.values())
        }
        findings = reporting.named(self.examined.findings, self.cluster, walked, self._opened())
        ends = {place: log.end for place, log in self.logs.items()}
        return Report(
            subject=self.definition.name,
            mode="pipeline",
            scope=self.scope.summary(),
            partitions=reporting.partition_accounts(walked, fates, self.logs),
            sinks=tuple(
                reporting.sink_account(
                    reader, self.holdings.get(name), self.judgements.get(name, []), self.examined.findings
                )
                for name, reader in self._opened().items()
            ),
            windows=self.examined.windows,
            findings=findings,
            unproven=tuple(dict.fromkeys(self.examined.unproven)),
            timeline=reporting.timeline(walked, fates),
            lag={
                name: sum(
                    max(0, ends[place] - at.offset)
                    for place, at in reader.positions().at.items()
                    if place in ends
                )
                for name, reader in self._opened().items()
            },
            notes=self.examined.notes,
            fingerprint=self.fingerprint,
        )

    def _fates(
        self,
        number: int,
        place: Place,
        routes: Mapping[Fate, Holding],
        mains: Sequence[Holding],
        walked: SourceWalk,
        result: MemoryResult | None,
    ) -> npt.NDArray[np.uint8]:
        part = walked.partitions[place]
        has_windows = any(isinstance(step, Window) for step in self.definition.steps)
        main = Fate.OUTPUT if mains or not has_windows else Fate.AGGREGATED
        judged = [judgements[number] for judgements in self.judgements.values()]
        fates = fates_of(part, routes, mains, main, judged)
        if result is not None and not mains:
            _mark(fates, part.start, result.waiting.get(place), Fate.PENDING, main)
            for superseded in result.superseded.values():
                _mark(fates, part.start, superseded.get(place), Fate.SUPERSEDED, main)
        return fates


def _gone(reader: SinkReader) -> int:
    """Offsets that a topic has dropped or compacted away; other sinks forget nothing."""
    return int(getattr(reader, "gone_offsets", 0))


def _mark(fates: npt.NDArray[np.uint8], start: int, offsets: Any, fate: Fate, instead_of: Fate) -> None:
    if offsets is None or not len(offsets):
        return
    at = offsets - start
    at = at[(at >= 0) & (at < len(fates))]
    at = at[fates[at] == CODE[instead_of]]
    fates[at] = CODE[fate]


def _nowhere(
    place: Place, start: int, end: int, holdings: Sequence[Holding], walked: SourceWalk
) -> npt.NDArray[np.int64]:
    """Records between two offsets that none of these has."""
    part = walked.partitions[place]
    chosen = slice(start - part.start, end - part.start)
    missing = part.records[chosen]
    for holding in holdings:
        missing = missing & (holding.counts[place][chosen] == 0)
    return np.flatnonzero(missing).astype(np.int64) + start


__all__ = ["AuditOptions", "PipelineAudit", "audit_pipeline", "open_readers"]
