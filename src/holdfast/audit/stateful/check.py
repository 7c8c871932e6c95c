"""Stateful steps, recomputed from the source's log and compared with the record and with the sinks.

    check = StatefulCheck(definition, decoder)
    observer = check.begin(spans)            # sees every record while the source is walked; None: nothing to do
    result = check.examine(left, readers, ends)     # `left` is what the pipeline recorded of rows that left the chain

It shares no code with the steps it judges: times, windows, duplicates and watermarks are computed here as
docs/adr/0010 defines them, in whole arrays. Who reached a step is taken from the record of what left before it
(`holdfast.pipeline.aside`, dead letters), which the ledgers' numbers and digests vouch for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.audit.decoding import KEY_PREFIX, Computing, Observer, SourceDecoder
from holdfast.audit.left import Left
from holdfast.audit.sinks.base import SinkReader
from holdfast.audit.stateful.aggregates import columns_needed
from holdfast.audit.stateful.carried import Carried
from holdfast.audit.stateful.examination import Examination, StatefulResult
from holdfast.audit.stateful.rows import Clock, Recorder
from holdfast.audit.stateful.turns import Spans
from holdfast.pipeline.definition.columns import plain_columns
from holdfast.pipeline.definition.model import (
    Dedupe,
    DeltaSink,
    PipelineDefinition,
    PostgresSink,
    Step,
    Window,
)
from holdfast.pipeline.definition.streams import is_stateful, merged
from holdfast.pipeline.positions import Place


class StatefulCheck:
    """The stateful steps of one pipeline, and its sinks that keep one row for each key."""

    def __init__(
        self,
        definition: PipelineDefinition,
        decoder: SourceDecoder,
        others: Mapping[str, Collection[str]] | None = None,
        before: Carried | None = None,
    ) -> None:
        self.before = before
        """What an earlier audit has handed on, which ended where the spans begin."""
        self.others = others or {}
        """By step, the fingerprints of definitions that had it otherwise: their rows are not made again."""
        self.definition = definition
        self.types = decoder.types
        event = definition.source.event_time
        self.clock = None if event is None else Clock.of(event)
        self.numbers = {step.name: number for number, step in enumerate(definition.steps)}
        self._recorder: Recorder | None = None
        self._spans: Spans = {}

    # -------------------------------------------------------------------- while reading

    @property
    def is_needed(self) -> bool:
        return bool(self.stateful or self.upserts)

    @property
    def stateful(self) -> list[Step]:
        return [step for step in self.definition.steps if is_stateful(step)]

    @property
    def upserts(self) -> list[PostgresSink | DeltaSink]:
        steps = {step.name for step in self.definition.steps if is_stateful(step)}
        found = (merged(sink) for sink in self.definition.sinks if sink.rows not in steps)
        return [sink for sink in found if sink is not None]

    def begin(self, spans: Spans) -> Observer | None:
        """What has to see every record of these spans."""
        if not self.is_needed:
            return None
        self._spans = dict(spans)
        keeps_ids = any(isinstance(step, Dedupe) and step.by == "hf-id" for step in self.stateful)
        wanted = sorted({name for name in self._wanted() if name in self.types})
        known = self.before.rows if self.before is not None else None
        self._recorder = Recorder(self.clock, wanted, keeps_ids=keeps_ids, spans=spans, before=known)
        return self._recorder

    def _wanted(self) -> Iterable[str]:
        """Columns of the source that keys and aggregates are made of."""
        for step in self.stateful:
            plain = self.plain(step.name)
            names = [*getattr(step, "key", ())]
            if isinstance(step, Window):
                names += columns_needed(step.aggregates)
            yield from (plain[name] for name in names if name in plain)
        for sink in self.upserts:
            plain = self.plain(sink.rows)
            yield from (plain[name] for name in sink.key if name in plain)
            yield from (KEY_PREFIX + name for name in sink.key)
            if sink.order_by is not None:
                yield plain.get(sink.order_by, "")
            if sink.delete_when is not None:
                yield from (field for name, field in plain.items() if name in sink.delete_when)

    def plain(self, rows: str) -> Mapping[str, str]:
        return plain_columns(self.definition, self.types, rows).columns

    # -------------------------------------------------------------------- the examination

    def examine(
        self,
        left: Left,
        readers: Sequence[SinkReader],
        ends: Mapping[Place, int],
        computing: Computing | None = None,
    ) -> StatefulResult:
        """`readers` are all sinks of the pipeline, `ends` where the audit ends, by partition; `computing` makes columns
        again that steps compute."""
        if self._recorder is None:
            return StatefulResult()
        rows = self._recorder.finish()
        self._recorder = None
        scope = {
            place: (start, min(end, ends.get(place, end))) for place, (start, end) in self._spans.items()
        }
        named = {reader.name: reader for reader in readers}
        return Examination(self, rows, scope, left, named, ends, computing).run()
