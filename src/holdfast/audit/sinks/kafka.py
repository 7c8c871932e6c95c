"""The Kafka sink: its ledger topic, and the committed records of its topic that say where they came from.

The ledger is read first, then where the topic ends, then the topic up to there: what the ledger has is in it, and what
came since is beyond the ledger's positions. Apache Kafka writes the markers of a transaction one partition after the
other, so what the topic holds undecided when the ledger has been read is waited for, for a while. A transaction writes
its ledger record before it is committed anywhere; so if the ledger has not grown meanwhile, and has nothing undecided,
every record of the pipeline that the topic holds is one the ledger knows of, and the two are of one moment.

A record says where it came from in its header `hf-source`; one without it is somebody else's and is only counted.
Offsets that the topic has dropped, or has compacted away, are a gap: what was there nobody can say.

The ledger of a Kafka sink: a compacted topic, in which the last record of partition w is what writer w has.

A record holds an entry, the number of writers its batch was made with, and the entry before it. The sink stands at the
newest entry that all its writers have; what only some of them have is a batch under way, and its rows are pending.
Compaction takes older entries away, so numbers may be missing here. A record without a value is a reset: nothing before
it counts.

Dead letters: records as they came, with where from and why in headers of holdfast's own dialect.

A record may have failed before and carry the headers of that too: the last set counts, which begins with the topic.
Others may use the same topic; theirs name another group than the pipeline. A dead letter that was redriven stays where
it is, and what was sent again is a record of the source with a place of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.admin.errors import ClusterError
from holdfast.audit.compare import finding
from holdfast.audit.lineage import LineageBatch, split_columns
from holdfast.audit.model import Fate, Finding, Unproven, gap
from holdfast.audit.record_walk import await_decided
from holdfast.audit.sinks import headers
from holdfast.audit.sinks.base import (
    EVERYTHING,
    ContentBatch,
    SinkReader,
    SinkScope,
    SinkUnreadable,
    Values,
    read_entry,
)
from holdfast.pipeline.definition.model import KafkaSink, PipelineDefinition
from holdfast.pipeline.definition.naming import ledger_topic
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place
from holdfast.reader import Cluster, PartitionRange, RangeReport, TopicPartition, ranges_of
from holdfast.reader.errors import TopicMissing


class Sent(NamedTuple):
    """One writer's share of a batch."""

    rows: int
    writers: int
    """That have one."""
    chain: str
    """Of the entry that the writer has it under."""


@dataclass
class Writer:
    """What one partition of the ledger still says, since the last reset."""

    entries: dict[int, Entry] = field(default_factory=dict)
    last: Entry | None = None
    writers: int = 1
    """Of its last batch."""
    previous: Entry | None = None
    sent: dict[int, Sent] = field(default_factory=dict)
    """By the number of an entry, what this writer says that it has of it."""

    @property
    def number(self) -> int:
        return -1 if self.last is None else self.last.number


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
            sent = Sent(int(document["sent"][0]), count, entry.chain) if "sent" in document else None
        except (ValueError, KeyError, TypeError) as error:
            self.troubles.append(f"partition {partition}, offset {offset}: {error}")
            return
        if previous is not None:
            writer.entries[previous.number] = previous
        writer.entries[entry.number] = entry
        writer.last, writer.writers, writer.previous = entry, count, previous
        if sent is not None:
            writer.sent[entry.number] = sent

    def standing(self) -> Entry | None:
        """The newest batch that every writer of it has."""
        newest = self._newest()
        return newest.previous if self.is_under_way() else newest.last

    def is_under_way(self) -> bool:
        """Only some of its writers have the newest batch."""
        newest = self._newest()
        done = {at for at, each in self.writers.items() if each.number == newest.number}
        return newest.last is not None and not done >= set(range(newest.writers))

    def _newest(self) -> Writer:
        """The writer with the newest batch."""
        return max(self.writers.values(), key=lambda each: each.number, default=Writer())

    def entries(self) -> list[Entry]:
        """Those kept, ascending, up to where the sink stands."""
        standing = self.standing()
        if standing is None:
            return []
        found = {number: each for writer in self.writers.values() for number, each in writer.entries.items()}
        return [*(found[at] for at in sorted(found) if at < standing.number), standing]

    def disagreements(self) -> list[str]:
        """Numbers under which writers keep different entries."""
        seen: dict[int, Entry] = {}
        found = []
        for partition, writer in sorted(self.writers.items()):
            for number, entry in writer.entries.items():
                other = seen.setdefault(number, entry)
                if other.range != entry.range or other.positions != entry.positions:
                    found.append(f"partition {partition} says another entry {number} than the others")
        return [*found, *self._other_shares(seen)]

    def _other_shares(self, entries: Mapping[int, Entry]) -> Iterator[str]:
        """Entries whose shares are of different batches, or do not add up to the entry's rows."""
        for number, entry in sorted(entries.items()):
            shares = [each.sent[number] for each in self.writers.values() if number in each.sent]
            if len({each.chain for each in shares}) > 1:
                yield f"the writers have shares of different batches under the entry {number}"
            elif shares and len(shares) == shares[0].writers:
                rows = sum(each.rows for each in shares)
                if rows != entry.rows:
                    yield f"the writers have {rows} rows of the entry {number}, which has {entry.rows}"


# ---------------------------------------------------------------------------- kafka


SOURCE: Final = "hf-source"
BATCH_BYTES: Final = 8 << 20
"""Of records in memory at once, for each partition that is read."""


class TopicReader(SinkReader):
    """A topic and its ledger: what the sinks and the dead letters have in common."""

    kind = "kafka"

    def __init__(self, definition: PipelineDefinition, sink: KafkaSink, settings: Mapping[str, str]) -> None:
        super().__init__(definition.name, sink.name, sink.rows)
        self._sink = sink
        self.topic = sink.topic
        self.ledger_topic = ledger_topic(self.pipeline, self.name)
        self._ledger = TopicLedger(self.pipeline, self.name)
        self.foreign = 0
        """Records that are not the pipeline's, of those read."""
        self.own = 0
        self.reports: list[RangeReport] = []
        self._since: dict[tuple[str, int], tuple[Place, int]] = {}
        self._again: dict[Place, list[int]] = {}
        self._settings = own_settings(settings, sink.bootstrap, sink.settings)
        try:
            with Cluster(self._settings) as cluster:
                ledger = self._find_ranges(cluster, self.ledger_topic)
                self._has_ledger = ledger is not None
                self._read_ledger(cluster, ledger or [])
                self.undecided_offsets = sum(await_decided(cluster, [self.topic]).values())
                self._ranges = self._whole_ranges = self._find_ranges(cluster, self.topic)
                self.is_exact = self._has_stood_still(cluster, ledger or [])
                self._dropped = {each.partition: each.start for each in self._ranges or () if each.start > 0}
                """By partition: how many offsets it no longer begins with."""
        except ClusterError as error:
            raise SinkUnreadable(f"sink {self.name!r}: {error}") from error
        self._entries = self._ledger.entries()

    def _read_ledger(self, cluster: Cluster, ranges: Sequence[PartitionRange]) -> None:
        for batch in cluster.read(ranges, batch_bytes=BATCH_BYTES, headers=False):
            columns = (batch.column(each).to_pylist() for each in ("partition", "offset", "value"))
            for partition, offset, value in zip(*columns, strict=True):
                self._ledger.take(partition, offset, value)

    def _has_stood_still(self, cluster: Cluster, ledger: Sequence[PartitionRange]) -> bool:
        """Nothing was added to the ledger since it was read, nothing in it is undecided, no batch is half done."""
        places = {TopicPartition(each.topic, each.partition): each.end for each in ledger}
        if not places or self._ledger.is_under_way():
            return False
        again = cluster.refresh([self.ledger_topic]).get(self.ledger_topic)
        if again is None or again.topic_id != ledger[0].topic_id or len(again.partitions) != len(places):
            return False
        decided, all_of_it = cluster.offsets(places, "last-stable"), cluster.offsets(places, "latest")
        return all(decided[place].offset == all_of_it[place].offset == end for place, end in places.items())

    @staticmethod
    def _find_ranges(cluster: Cluster, topic: str) -> list[PartitionRange] | None:
        """All of a topic, as far as it is decided; None when there is no such topic."""
        try:
            return ranges_of(cluster, topic)
        except TopicMissing:
            return None

    def columns(self) -> Sequence[str]:
        return ("_hf", "key", "value", "headers")

    # -------------------------------------------------------------------- records

    @property
    def ends(self) -> Mapping[int, int]:
        """Where each partition ended. If the sink is exact, everything its ledger has lies below."""
        return {each.partition: each.end for each in self._ranges or ()}

    def start_at(self, offsets: Mapping[int, int], since: Mapping[Place, int] | None = None) -> None:
        """Read from there on only: what lies before was read by an earlier audit. It held all of the source below
        `since`, and so what comes behind must not be of that again."""
        self._since = {(each.topic, each.partition): (each, offset) for each, offset in (since or {}).items()}
        self._ranges = [
            each._replace(start=min(max(each.start, offsets.get(each.partition, 0)), each.end))
            for each in self._ranges or ()
        ]

    def records(self, *, is_whole: bool = False) -> Iterator[pa.RecordBatch]:
        """The committed records of the topic, as far as it went when it was opened; `is_whole`: wherever it is read
        from."""
        self.foreign = self.own = 0
        self.reports = []
        ranges = self._whole_ranges if is_whole else self._ranges
        if not ranges:
            return
        try:
            with Cluster(self._settings) as cluster:
                yield from cluster.read(ranges, batch_bytes=BATCH_BYTES, reports=self.reports)
        except ClusterError as error:
            raise SinkUnreadable(f"sink {self.name!r}: {error}") from error

    def places(self, batch: pa.RecordBatch) -> headers.Places:
        """Where each record came from."""
        return headers.parse_sources(headers.first_header(batch.column("headers"), SOURCE))

    def known(self, *, is_whole: bool = False) -> Iterator[tuple[pa.RecordBatch, headers.Places]]:
        """The records that are the pipeline's."""
        for batch in self.records(is_whole=is_whole):
            places = self.places(batch)
            is_known = places.offsets >= 0
            self.own += int(is_known.sum())
            if not is_known.all():
                self.foreign += int((~is_known).sum())
                chosen = pa.array(np.flatnonzero(is_known))
                batch = batch.take(chosen)
                places = headers.Places(places.topics.take(chosen), *(each[is_known] for each in places[1:]))
            if batch.num_rows:
                yield batch, places

    def rows(self, scope: SinkScope) -> Iterator[LineageBatch]:
        self._again = {}
        for batch, (topics, *numbers) in self.known():
            where = f"{self.topic}-{batch.column('partition')[0].as_py()}"
            for found in split_columns(topics, *map(pa.array, numbers), where=where):
                self._note_again(found)
                yield found

    def _note_again(self, batch: LineageBatch) -> None:
        """Records that an earlier audit has read already."""
        place, since = self._since.get((batch.topic, batch.partition), (None, 0))
        again = batch.offsets[batch.offsets < since]
        if place is not None and len(again):
            self._again.setdefault(place, []).extend(again.tolist())

    def table_batches(self, columns: Sequence[str], scope: SinkScope = EVERYTHING) -> Iterator[pa.Table]:
        """Of a record: `key`, `value` and `headers`, beside its lineage."""
        for batch, places in self.known():
            yield pa.table(places.columns() | self._parts(batch, columns))

    def _parts(self, kept: pa.RecordBatch, columns: Sequence[str]) -> dict[str, pa.Array]:
        names = ("key", "value", "timestamp", "headers")
        return {name: kept.column(name) for name in columns if name in names}

    def contents(self, types: Mapping[str, str], scope: SinkScope = EVERYTHING) -> Iterator[ContentBatch]:
        for batch, places in self.known(is_whole=scope is EVERYTHING):
            lineage = {name.removeprefix("_hf_"): each for name, each in places.columns().items()}
            yield ContentBatch({name: batch.column(name) for name in types}, lineage)

    def find(self, place: Place, offset: int) -> list[str]:
        found = []
        for batch, places in self.known():
            hits = np.flatnonzero((places.offsets == offset) & (places.partitions == place.partition))
            for hit in hits.tolist():
                if places.topics[hit].as_py() == place.topic:
                    partition, at = (batch.column(name)[hit].as_py() for name in ("partition", "offset"))
                    found.append(f"{self.topic}-{partition}@{at}")
        return found

    # -------------------------------------------------------------------- what is wrong

    def problems(self) -> Iterator[Finding]:
        wrong = (*self._ledger.troubles, *self._ledger.disagreements())
        details = [f"{self.ledger_topic}: {each}" for each in wrong]
        if self._ranges is None and self.entries():
            details.append(f"the topic {self.topic} is gone, and the ledger {self.ledger_topic} has entries")
        if not self._has_ledger and self.own:
            details.append(
                f"there is no ledger {self.ledger_topic}, and {self.topic} holds {self.own:,} records of the pipeline"
            )
        yield from (Finding(Fate.ALTERED, self.name, detail=each) for each in details)
        for place, offsets in self._again.items():
            again = np.unique(np.asarray(offsets, np.int64))
            what = f"it was proven before, and {self.topic} has it now, behind what it held then"
            yield finding(Fate.DUPLICATED, self.name, place, again, what, len(offsets))

    @property
    def _compacted(self) -> int:
        return sum(report.missing for report in self.reports)

    @property
    def gone_offsets(self) -> int:
        """What the topic once had and has no more, in offsets: so many records may be missing without anybody's
        fault. Known after its records were read."""
        return sum(self._dropped.values()) + self._compacted

    def gaps(self) -> Iterator[Unproven]:
        if self._dropped and self.entries():
            counts = (f"{count:,} of partition {number}" for number, count in self._dropped.items())
            what = f"what {self.topic} held below the offsets it begins with"
            yield gap(what, f"it has dropped {', '.join(counts)}")
        if self._compacted:
            yield gap(f"{self._compacted:,} offsets of {self.topic}", "they were compacted away")
        if self.foreign:
            yield Unproven(f"{self.foreign:,} records of {self.topic}", "they are not this pipeline's")


class KafkaReader(TopicReader):
    """One Kafka sink."""

    def values(self, columns: Sequence[str] | None = None, scope: SinkScope = EVERYTHING) -> Iterator[Values]:
        """Of windows: from the columns in a record's value; a record without one takes back what its key stands for."""
        for batch, places in self.known() if self._sink.value is None else ():
            rows = list(map(window_row, *(batch.column(name).to_pylist() for name in ("key", "value"))))
            names = dict.fromkeys(name for row in rows for name in row)
            found = places.columns()
            found |= {name: _column(name, [row.get(name) for row in rows]) for name in names}
            yield Values(pa.table(found), self.topic)


def own_settings(source: Mapping[str, str], bootstrap: str | None, own: Mapping[str, str]) -> dict[str, str]:
    """How the cluster of a topic is reached: the source's, unless the definition names another one."""
    found = {**source, **own} if bootstrap is None else {**own, "bootstrap.servers": bootstrap}
    return {name: str(value) for name, value in found.items()}


def window_row(key: bytes | None, value: bytes | None) -> dict[str, Any]:
    """The columns of a window's record."""
    try:
        document = json.loads(value if value is not None else key or b"{}")
    except ValueError:
        document = None
    if not isinstance(document, dict):
        return {}
    return document if value is not None else {**document, "_hf_count": 0, "_hf_digest": 0}


def _column(name: str, values: list[Any]) -> pa.Array:
    try:
        if name in ("window_start", "window_end"):
            return pa.array(values, pa.string()).cast(pa.timestamp("us", tz="UTC"))
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if each is None else json.dumps(each) for each in values], pa.string())


# ---------------------------------------------------------------------------- dead letter


PREFIX: Final = "hf-dlt-"
WHY: Final = {"reason": "reason", "error": "message"}
"""By column, the header that says it."""


class DeadLetters(TopicReader):
    """The dead letters of one pipeline."""

    def columns(self) -> Sequence[str]:
        """`headers` are the record's own, `failure` those that say why it is here."""
        return (*super().columns(), "failure")

    def places(self, batch: pa.RecordBatch) -> headers.Places:
        names, values, ends = headers.flat_headers(batch.column("headers"))
        begin = headers.last_of_each(headers.places_of(names, f"{PREFIX}topic"), ends)

        def last(name: str) -> pa.Array:
            at = headers.last_of_each(headers.places_of(names, PREFIX + name), ends)
            return headers.taken(values, np.where(at > begin, at, -1))

        topics = _texts(headers.taken(values, begin))
        partitions, offsets = headers.decimal(last("partition")), headers.decimal(last("offset"))
        is_ours = pc.fill_null(pc.equal(last("group"), self.pipeline.encode()), False)
        is_known = pc.and_(is_ours, topics.is_valid()).to_numpy(zero_copy_only=False) & (partitions >= 0)
        offsets = np.where(is_known, offsets, -1)
        return headers.Places(pc.dictionary_encode(topics), partitions, offsets, np.zeros_like(offsets))

    def _parts(self, kept: pa.RecordBatch, columns: Sequence[str]) -> dict[str, pa.Array]:
        found = super()._parts(kept, columns)
        found |= {name: self._said(kept, said) for name, said in WHY.items() if name in columns}
        if "where" in columns:
            at = zip(kept.column("partition").to_pylist(), kept.column("offset").to_pylist(), strict=True)
            where = [f"{self.topic}-{partition}@{offset}" for partition, offset in at]
            found["where"] = pa.array(where, pa.string())
        return found

    @staticmethod
    def _said(batch: pa.RecordBatch, name: str) -> pa.Array:
        """What the last header of this name says."""
        return _texts(headers.last_header(batch.column("headers"), PREFIX + name))


def _texts(values: pa.Array) -> pa.Array:
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        raw = values.to_pylist()
        texts = [None if each is None else each.decode("utf-8", "replace") for each in raw]
        return pa.array(texts, pa.string())
