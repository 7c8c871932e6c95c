"""The audit of one pipeline: every record of its scope held against every sink.

The order matters, since source and sinks may move while they are read:

1. the home is asked how far each sink had come; then every sink is opened, which takes its snapshot: ledger first,
   rows of that moment after it;
2. the logs' ends are asked for. They are not below any position, and what comes later is nobody's loss;
3. the scope follows from both, and stays;
4. what left the steps is read (dead letters, the home's record), then the log is walked once, with everybody looking on
   who needs the content of records; then the sinks' rows are read and compared;
5. the ledgers are held against all of it.

Nothing is written, locked or committed anywhere.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow

import holdfast
from holdfast.audit import coverage, ledgers, reporting, unaltered, versions
from holdfast.audit.compare import Holding
from holdfast.audit.content import ContentCheck
from holdfast.audit.decoding import Computing, Observer, PlainSample, SourceDecoder
from holdfast.audit.handing_on import HandingOn
from holdfast.audit.left import (
    PARSE,
    REJECTED_BY,
    Left,
    expands,
    read_left,
    remembering,
    take_letters,
)
from holdfast.audit.model import (
    STEPS,
    AuditError,
    ColumnCoverage,
    Examined,
    Fate,
    Finding,
    Report,
    Said,
    Unproven,
    gap,
)
from holdfast.audit.proven import TopicStart
from holdfast.audit.scope import PipelineScope, decide_scope, start_ms
from holdfast.audit.sink_judging import DecodingWatch, SinkJudge, SinkRows, main_sinks
from holdfast.audit.sinks.base import SinkReader, SinkRebuilt
from holdfast.audit.sinks.kafka import TopicReader
from holdfast.audit.sinks.opening import open_dead_letters, open_sink
from holdfast.audit.source import LogEnds, look, walk
from holdfast.audit.spool import SpoolWatch
from holdfast.audit.state_files import examine_state
from holdfast.errors import UsageError
from holdfast.pipeline.aside import batch_name
from holdfast.pipeline.definition import naming
from holdfast.pipeline.definition.fingerprint import EARLIER, canonical, marks_of
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.definition.secrets import expand_definition
from holdfast.pipeline.definition.streams import merged
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place
from holdfast.pipeline.sealing import Head
from holdfast.reader import TopicPartition
from holdfast.reader.cluster import Cluster

if TYPE_CHECKING:
    from holdfast.audit.stateful import StatefulCheck, StatefulResult
    from holdfast.audit.stateful.carried import Memory

TRIES: Final = 3
"""A pipeline merges for a twentieth of its time at most, so that a second time is enough for all but a large table."""
ERASABLE: Final = ("parquet", "delta", "postgres")
"""Kinds of sinks whose ledgers may say that rows were erased."""
Tell = Callable[[str], None]
Marks = Mapping[str, Mapping[str, str]]


class Steps(Computing, Protocol):
    """Evaluates the steps again, and says what their word is against."""

    def begin(self, audit: PipelineAudit, judge: SinkJudge) -> None: ...

    def examine(self, audit: PipelineAudit, judge: SinkJudge, content: ContentCheck) -> Examined: ...


@dataclass(frozen=True)
class AuditOptions:
    """What a caller may want otherwise."""

    start: str | None = None
    """`earliest`, for what the source still has, or a time: where the scope begins."""
    since: Mapping[Place, int] | None = None
    """By partition, up to where an earlier audit has proven everything; one that is not named begins as usual."""
    topic_starts: Mapping[str, TopicStart] = field(default_factory=dict)
    """With `since`, by sink that is a topic: from where on it has to be read."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Kafka's client settings, over those of the definition's source."""
    spools: Sequence[str] = ()
    """Directories of spools: their files tell what was refused, and what is still to be sent."""
    accepted: tuple[str, ...] = ()
    """Columns, as `SINK.COLUMN`, that may be trusted."""
    memory: Memory | None = None
    """With `since`, what the earlier audit has handed on; and what this one does. Nothing: nobody goes on from it."""
    tell: Tell | None = None
    """Is told what is being done; an empty text at the end."""


def audit_pipeline(
    definition: PipelineDefinition,
    *,
    bootstrap: str | None = None,
    options: AuditOptions | None = None,
    steps: Steps | None = None,
) -> Report:
    """Audit a pipeline as its definition stands; `AuditError` where that cannot be begun.

    `steps` evaluates the steps again; without it, what they made of the records is taken on the pipeline's word.
    A running pipeline merges small batches under the audit's feet now and then: it begins again.
    """
    for _ in range(TRIES - 1):
        with suppress(SinkRebuilt):
            return _audited(definition, bootstrap, options or AuditOptions(), steps)
    return _audited(definition, bootstrap, options or AuditOptions(), steps)


def _audited(
    definition: PipelineDefinition, bootstrap: str | None, options: AuditOptions, steps: Steps | None
) -> Report:
    if options.start is not None:
        start_ms(options.start)
    _check_accepted(definition, options.accepted)
    started = time.time()
    expanded, _ = expand_definition(definition)
    settings = {**naming.client_settings(expanded, bootstrap), **options.settings}
    [(mark, marks)] = marks_of(canonical(definition)).items()
    home = naming.home_of(expanded)
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(settings))
        cluster.refresh(expanded.source.topics)  # a cluster that is not there should be named as the source
        reached = ledgers.reached(home)
        witnesses = unaltered.witnesses_of(definition, expanded, cluster, reached)
        readers = open_readers(expanded, settings, stack)
        for name, start in (options.topic_starts if options.since is not None else {}).items():
            reader = readers.get(name)
            if isinstance(reader, TopicReader):
                reader.start_at(start.offsets, start.since)
        earlier = earlier_marks(home)
        audit = PipelineAudit(
            expanded, mark, marks, earlier, settings, cluster, readers, options, reached, witnesses, steps
        )
        report = audit.run()
    return replace(
        report,
        started_ms=round(started * 1000),
        took_ms=round((time.time() - started) * 1000),
        versions={
            "holdfast": holdfast.__version__,
            "python": platform.python_version(),
            "pyarrow": pyarrow.__version__,
        },
    )


def earlier_marks(home: str) -> dict[str, Marks]:
    """By fingerprint, what the home keeps of the definitions that ran; nothing where it keeps nothing."""
    try:
        with open(os.path.join(home, "definition.json"), encoding="utf-8") as file:
            found = json.load(file)[EARLIER]
        return {mark: {"state": each["state"], "content": each["content"]} for mark, each in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # then every batch counts as made by the definition at hand, where its fingerprint does not tell


def _check_accepted(definition: PipelineDefinition, accepted: Sequence[str]) -> None:
    sinks = (*(sink.name for sink in definition.sinks), naming.DEAD_LETTER_NAME, STEPS)
    for name in accepted:
        if not any(name.startswith(f"{sink}.") for sink in sinks):
            raise UsageError(f"--accept {name}: name a column of a sink, of {', '.join(sinks)}")


def open_readers(
    definition: PipelineDefinition, settings: Mapping[str, str], stack: ExitStack
) -> dict[str, SinkReader]:
    """Every sink's reader by name, the dead letters' first."""
    opened = [open_dead_letters(definition, settings)]
    stack.callback(opened[0].close)
    for sink in definition.sinks:
        opened.append(open_sink(definition, sink, settings))
        stack.callback(opened[-1].close)
    return {reader.name: reader for reader in opened}


@dataclass
class PipelineAudit:
    """One audit, from the readers to the report."""

    definition: PipelineDefinition
    """With its secrets."""
    fingerprint: str
    marks: Marks
    """Of the definition: of its stateful steps (`state`) and its sinks (`content`)."""
    earlier: Mapping[str, Marks]
    """By fingerprint, those of definitions that ran before, as the home has them."""
    settings: Mapping[str, str]
    """How the source's brokers are reached."""
    cluster: Cluster
    readers: Mapping[str, SinkReader]
    options: AuditOptions
    reached: Mapping[str, Head]
    """How far each sink had come, as the home said before the readers were opened."""
    witnesses: Mapping[str, Sequence[unaltered.Witness]]
    """The heads of the sinks' ledgers, as they are known outside of the sinks; read before the readers were opened."""
    steps: Steps | None = None

    examined: Examined = field(init=False, default_factory=Examined)
    scope: PipelineScope = field(init=False)
    logs: dict[Place, LogEnds] = field(init=False)
    rows: SinkRows = field(init=False)
    keeper: unaltered.Keeper = field(init=False)
    handing: HandingOn = field(init=False)

    def __post_init__(self) -> None:
        self.home = naming.home_of(self.definition)
        self.entries = {name: reader.entries() for name, reader in self.readers.items()}
        self.opened = {name: reader for name, reader in self.readers.items() if self.entries[name]}
        """Those with a ledger."""

    def run(self) -> Report:
        tell, readers = self.options.tell or (lambda what: None), list(self.opened.values())
        tell("reading the ledgers")
        self._decide()
        tell("reading what left the steps")
        decoder = SourceDecoder(self.definition.source)
        stateful = self._stateful(decoder)
        looker = stateful.begin(self.scope.spans)
        left = self._left()
        content = ContentCheck(self.definition, decoder, self.same)
        letters = left.routes[Fate.DEAD_LETTER].counts
        dead = {place: counts > 0 for place, counts in letters.items()}
        watcher = content.begin(readers, self.scope.spans, dead)
        spools = SpoolWatch(self.options.spools)
        decodings = DecodingWatch(self.scope.spans, self.batches, self.fingerprint)
        sample = PlainSample(decoder)
        watchers = (looker, watcher, spools, decodings, sample)
        observers: list[Observer] = [each for each in watchers if each is not None]
        tell(f"walking {self.scope.offsets:,} offsets of the source")
        walked = walk(self.cluster, self.scope.spans, self.logs, decoder=decoder, observers=observers)
        for place, count in sorted(walked.expired_on_the_way.items()):
            what = f"{count:,} offsets of {place.topic}-{place.partition}"
            self._say([gap(what, "they expired while they were being read")])
        self.examined += spools.examine(walked) + sample.examine()
        tell("comparing the sinks")
        judge = SinkJudge(
            self.definition, self.scope, self.logs, self.opened, self.batches, left, self.rows, walked
        )
        self.examined += judge.judge()
        self.examined += judge.decodings(decodings)
        if self.steps is not None:
            tell("evaluating the steps again")
            self.steps.begin(self, judge)
        result = None
        if looker is not None:
            tell("making windows, duplicates and late rows again")
            ends = {place: end for place, (_, end) in self.scope.spans.items()}
            result = stateful.examine(left, readers, ends, self.steps)
            self.examined += result.examined
        tell("comparing contents")
        self.examined += content.examine(readers)
        for reader in readers:
            self._say((*reader.problems(), *reader.gaps()))
        if self.steps is None:
            self.examined += content.not_evaluated()
        else:
            self.examined += self.steps.examine(self, judge, content)
        self._say(self._word())
        tell("")
        return self._report(judge, result)

    def same(self, sink: str) -> set[str]:
        """The fingerprints of definitions that make the same rows for a sink."""
        own = self.marks["content"].get(sink)
        same = {mark for mark, each in self.earlier.items() if own and each["content"].get(sink) == own}
        return {self.fingerprint, *same}

    # -------------------------------------------------------------------- before the walk

    def _decide(self) -> None:
        if not any(self.entries.values()):
            known = [
                each for name in self.readers for each in unaltered.gone(name, self.witnesses.get(name, ()))
            ]
            if known:
                raise unaltered.SinksGone("; ".join(each.what() for each in known))
            raise AuditError(
                f"pipeline {self.definition.name!r} has never run: none of its sinks has a ledger. "
                "`holdfast pipeline run` makes one"
            )
        sinks = (*self.definition.sinks, naming.dead_letter_sink(self.definition))
        kinds = {sink.name: naming.kind_of_sink(sink) for sink in sinks}
        chains = {
            name: ledgers.follow(name, kinds[name], self.definition.name, self.entries[name])
            for name in self.opened
        }
        for name, chain in chains.items():
            self.examined += chain.examined
            if chain.begins_anew:
                others = [entries for other, entries in self.entries.items() if other != name]
                chains[name] = replace(chain, added_at=ledgers.added_at(name, others))
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
        self.batches = ledgers.cover(self.entries, self.scope.spans)
        """Entries that say what became of the scope, each offset in one."""
        self.handing = HandingOn(self.options.memory, self.scope, self.options.since or {})
        self.rows = SinkRows(self.scope.spans, expands(self.definition), turns=self.handing.turns)
        self.keeper = unaltered.keeper_of(self.definition)
        for reader in self.opened.values():
            if reader.kind in ERASABLE:
                reader.erased, unproven = unaltered.erasures(reader, self.keeper)
                self._say(unproven)
        newest = [entries[-1] for entries in self.entries.values() if entries]
        self._say((*self.scope.unproven, *self.scope.notes, *self._absent(newest), *self._older()))
        self._say((*examine_state(self.definition, self.home, newest), *self._emptiness()))

    def _say(self, said: Iterable[Said]) -> None:
        self.examined += Examined.of(said)

    def _emptiness(self) -> Iterator[Unproven]:
        """An audit of nothing proves nothing, unless nothing is there, or all of it was proven before."""
        if self.scope.offsets or self.options.since is not None:
            return
        if self.options.start is not None and any(log.end for log in self.logs.values()):
            yield gap("anything", f"no offset lies between {self.options.start} and where the sinks stand")
        elif any(self.scope.pending.values()):
            yield gap("anything", "the pipeline has not taken a record yet")

    def _wanted(self) -> set[str]:
        """The topics that the definition reads now, of which the ledgers may not know yet."""
        source = self.definition.source
        if source.pattern is None:
            return set(source.topics)
        found = set(self.cluster.topics(pattern=source.pattern)) - naming.own_topics(self.definition)
        return {name for name in found if not name.startswith("hf-ledger-")}

    def _given(self) -> Callable[[Place], int] | None:
        if self.options.start is None:
            return None
        moment = start_ms(self.options.start)
        partitions = {TopicPartition(place.topic, place.partition): place for place in self.logs}
        answers = {} if moment is None else self.cluster.offsets(partitions, moment)
        starts = {place: self.logs[place].start for place in self.logs}
        for each, answer in answers.items():
            place = partitions[each]
            starts[place] = answer.offset if answer.offset >= 0 else self.logs[place].end
        return starts.__getitem__

    def _absent(self, newest: Sequence[Entry]) -> Iterator[Said]:
        """Sinks without a ledger: new ones, or ones that were emptied."""
        ran_as_it_stands = any(entry.fingerprint == self.fingerprint and entry.range for entry in newest)
        for name in (each for each in self.readers if each not in self.opened):
            gone = unaltered.gone(name, self.witnesses.get(name, ()))
            rows = ledgers.rows_for(name, self.batches)
            if gone:
                yield from (replace(each, count=rows) for each in gone)
            elif ran_as_it_stands:
                detail = "it has no ledger, and the pipeline has run with it: it was emptied or is elsewhere"
                yield Finding(Fate.LOST if rows else Fate.ALTERED, name, count=rows, detail=detail)
            else:
                yield gap(f"sink {name!r}", "it has no ledger yet: the pipeline has not run with it")

    def _older(self) -> Iterator[Finding]:
        """Sinks that had come further than their ledgers say: older copies of what they were."""
        fullest = max(self.entries.values(), key=lambda entries: sum(each.routes.total for each in entries))
        for name, ((generation, number, _), _) in self.reached.items():
            last = self.entries[name][-1] if self.entries.get(name) else None
            if last is not None and (last.generation, last.number) < (generation, number):
                lacking = [entry for entry in fullest if not ledgers.has_batch(last, entry)]
                rows = ledgers.rows_for(name, lacking)
                detail = (
                    f"its ledger has {last.number + 1} entries, and had {number + 1}: it is an older copy"
                )
                yield Finding(Fate.LOST, name, count=max(1, rows), detail=detail)

    def _stateful(self, decoder: SourceDecoder) -> StatefulCheck:
        from holdfast.audit.stateful import StatefulCheck

        others = {
            step: {mark for mark, each in self.earlier.items() if each["state"].get(step) != own}
            for step, own in self.marks["state"].items()
        }
        return StatefulCheck(self.definition, decoder, others, self.handing.before)

    def _left(self) -> Left:
        left = read_left(self.definition, self.home, self.scope.spans, self.batches)
        reader = self.opened.get(naming.DEAD_LETTER_NAME)
        dead = Holding(str(Fate.DEAD_LETTER), self.scope.spans) if reader is None else self.rows.of(reader)
        if reader is not None:
            take_letters(reader, left, by_step=bool(remembering(self.definition)))
        left.routes = {Fate.DEAD_LETTER: dead, **left.routes}
        self.examined += left.examined
        left.own = self._left_of_each(left, dead)
        return left

    def _left_of_each(self, left: Left, dead: Holding) -> dict[str, Left]:
        """For sinks that took a batch by themselves, cut otherwise or by another definition: what left of theirs."""
        found: dict[str, Left] = {}
        usual = {batch_name(entry.range, entry.fingerprint) for entry in self.batches}
        for name in main_sinks(self.definition, self.opened):
            own = ledgers.cover(self.entries, self.scope.spans, name)
            if {batch_name(entry.range, entry.fingerprint) for entry in own} == usual:
                continue
            apart = read_left(self.definition, self.home, self.scope.spans, own)
            self.examined += apart.examined
            left.unrecorded += apart.unrecorded
            apart.routes = {Fate.DEAD_LETTER: dead, **apart.routes}
            found[name] = apart
        return found

    # -------------------------------------------------------------------- after it

    def _word(self) -> Iterator[ColumnCoverage]:
        """What is taken on the pipeline's word: why records left, by step; that they did, and which, is not."""
        let_go: Counter[str] = Counter()
        for entry in self.batches:
            let_go.update(entry.routes.filtered)
            let_go.update({step: count for step, count in entry.routes.dead_letter.items() if step != PARSE})
        why = "which records it let go is recorded; whether it was right --spark evaluates again"
        for step, count in sorted(let_go.items()) if self.steps is None else ():
            if count and not step.startswith(REJECTED_BY):
                yield ColumnCoverage(STEPS, step, unaltered=count, why=why)
        rejected = Counter(each.sink for entry in self.batches for each in entry.rejected)
        why = "only the sink can tell whether it could take them, and an audit writes nothing"
        for sink, count in sorted(rejected.items()):
            yield ColumnCoverage(STEPS, f"{REJECTED_BY}{sink}", unaltered=count, why=why)

    # -------------------------------------------------------------------- the report

    def _coverage(self, judge: SinkJudge) -> tuple[ColumnCoverage, ...]:
        """Every cell; the digests speak where one is not recomputed."""
        windows = {each.sink: each.windows for each in self.examined.windows}
        columns = {name: reader.columns() for name, reader in self.opened.items()}
        rows = {name: self.rows.inside(reader, windows) for name, reader in self.opened.items()}
        claims = [*self.examined.coverage, *judge.lineage()]
        lacking = {each.sink for each in coverage.settled(columns, rows, claims) if each.trusted}
        for name, reader in self.opened.items():
            heads = self.witnesses.get(name, ())
            table = self.handing.table(reader)
            since, turn = self.options.since, self.rows.turns.get(name)
            digests = unaltered.check(
                reader, self.keeper, heads, with_rows=name in lacking, since=since, turn=turn, table=table
            )
            self._say((*digests.findings, *self.handing.compared(reader, table, digests)))
            unsure = digests.rows - digests.unaltered
            for column in columns[name] if name in lacking else ():
                count = max(0, rows[name] - unsure) if column in digests.columns else 0
                claims.append(ColumnCoverage(name, column, unaltered=count, why=digests.why))
        covered: Iterable[ColumnCoverage] = coverage.settled(columns, rows, claims)
        for sink in map(merged, self.definition.sinks):
            if sink is not None and sink.mode == "scd2" and sink.name in self.opened:
                wrong = versions.check(self.opened[sink.name], sink)
                self._say(wrong or ())
                covered = versions.derived(covered, sink, is_checked=wrong is not None)
        return tuple(covered)

    def _report(self, judge: SinkJudge, result: StatefulResult | None) -> Report:
        walked = judge.walked
        fates = judge.fates(result)
        covered = self._coverage(judge)
        self.handing.finish(self.opened, None if result is None else result.carried)
        erased = tuple(each for reader in self.opened.values() for each in unaltered.erased_findings(reader))
        findings = reporting.named(self.examined.findings, self.cluster, walked, self.opened)
        ends = {place: log.end for place, log in self.logs.items()}
        return Report(
            subject=self.definition.name,
            mode="pipeline",
            scope=self.scope.summary(),
            partitions=reporting.partition_accounts(walked, fates, self.logs),
            sinks=tuple(
                reporting.sink_account(
                    reader, self.rows.holdings.get(name), judge.judgements.get(name, []), self.examined
                )
                for name, reader in self.opened.items()
            ),
            windows=self.examined.windows,
            findings=findings,
            unproven=tuple(dict.fromkeys(self.examined.unproven)),
            timeline=reporting.timeline(walked, fates),
            lag={
                name: sum(
                    max(0, ends[at] - stands.offset)
                    for at, stands in each.positions().at.items()
                    if at in ends
                )
                for name, each in self.opened.items()
            },
            notes=(*self.examined.notes, *(each.what() for each in erased)),
            fingerprint=self.fingerprint,
            coverage=covered,
            accepted=self.options.accepted,
            erased=erased,
        )
