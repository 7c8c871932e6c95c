"""The Kafka sink: rows and ledger in one transaction per writer.

Records are computed and set aside when a batch is prepared (`kafka_records`), and sent when it is committed: few by
writers that live in the driver, many by tasks, one for each writer (`kafka_sending`). Opening the sink takes every
transactional id the ledger knows, which ends what an earlier copy left open and fences it, and only then is the ledger
read. From there on this copy alone moves the ledger, until it is fenced itself. Tasks fence the driver's own writers:
the driver takes over once more before its next batch.

A tombstone stays one, unless the definition's `value` says itself what it becomes: its value is null, and its key is
the one that the definition's `key` gives for the columns of the record's key, else the record's own.

With several writers a batch is several transactions. A hash of its key, or of its lineage, gives each row to a writer:
a batch that only some of its writers had committed is finished by the others, with the number of writers and the entry
it began with, if the shares that are in are still made of the same records.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.client.settings import shared_settings
from holdfast.pipeline.core.sql import LINEAGE
from holdfast.pipeline.definition.columns import KEY_PREFIX
from holdfast.pipeline.definition.model import KafkaSink
from holdfast.pipeline.definition.naming import ledger_topic
from holdfast.pipeline.ledger import Entry, Rejected
from holdfast.pipeline.sealing import Written
from holdfast.pipeline.sinks.base import (
    REJECTED_MAX,
    Batch,
    Prepared,
    Problem,
    RowsRejected,
    Sink,
    SinkContext,
    SinkError,
    SinkFenced,
)
from holdfast.pipeline.sinks.columns import (
    JSON_OPTIONS,
    check_json_keys,
    column_named,
    is_stored,
    stored_schema,
)
from holdfast.pipeline.sinks.kafka_ledger import (
    Last,
    LedgerRecord,
    LedgerTopic,
    Sent,
    Standing,
    Topic,
    standing_of,
)
from holdfast.pipeline.sinks.kafka_records import Digesting, RecordDigesting, Records, Share, set_aside, sizes
from holdfast.pipeline.sinks.kafka_sending import TASK_ROWS, Envelope, Holding, Sending, send_by_tasks
from holdfast.pipeline.sinks.kafka_writer import BATCH_BYTES, Message, Writer

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

TOMBSTONE = "_tombstone"
SOURCE_HEADER = "hf-source"
"""Where a record came from: `topic:partition@offset#index`."""
BATCH_OVERHEAD_BYTES = 1024
COLUMNS = {"key": "binary", "value": "binary", "headers": "array<struct<key:string,value:binary>>"}
"""What is in the digest of a record, beside its lineage."""
TAKE_OVERS_MAX: Final = 3
"""A take-over begins again when a task of an earlier run comes in between."""


class PreparedRecords:
    """Records aside, to be sent."""

    def __init__(self, sink: KafkaSinkWriter, records: Records) -> None:
        self.rows = records.rows
        self.digest: int | None = records.digest
        self.written = None if sink.key is None else Written(records.content, COLUMNS)
        self._sink = sink
        self._records = records

    def commit(self, entry: Entry) -> Entry:
        entry = self._sink.send(entry, self._records)
        self.discard()
        return entry

    def discard(self) -> None:
        self._records.remove()


@dataclass(frozen=True)
class RecordEnvelope:
    """Records of rows: the row's place and the definition's headers beside key and value."""

    headers: tuple[str, ...]

    def messages(self, batch: pa.RecordBatch) -> Iterator[Message]:
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names[1:]}
        keys, values, sources = columns["key"], columns["value"], columns["source"]
        if not self.headers:
            for key, value, source in zip(keys, values, sources, strict=True):
                yield key, value, [(SOURCE_HEADER, source)], -1
            return
        extra = zip(*(columns[f"header_{at}"] for at in range(len(self.headers))), strict=True)
        for key, value, source, headers in zip(keys, values, sources, extra, strict=True):
            yield key, value, [(SOURCE_HEADER, source), *zip(self.headers, headers, strict=True)], -1


class KafkaSinkWriter(Sink):
    """The sink to the engine."""

    topic_config: Mapping[str, str] = {}
    """Of the topic, where it has to be made."""
    rejects = True
    """Whether records that the topic does not take can become dead letters."""

    def __init__(self, definition: KafkaSink, pipeline: str, last_of_key: str | None = None) -> None:
        """`last_of_key` is what to say where the topic is compacted."""
        self.name = definition.name
        self._definition = definition
        self._pipeline = pipeline
        self._last_of_key = last_of_key
        self._spark: SparkSession | None = None
        self._ledger: LedgerTopic | None = None
        self._settings: dict[str, Any] = {}
        self._writers: list[Writer] = []
        self._lasts: list[Last] = []
        """What the ledger says, partition by partition, since this copy alone moves it."""
        self._holder = ""
        """The name of the newest take-over."""
        self._holders: set[str] = set()
        """The names of all."""
        self._claimed: set[int] = set()
        """Partitions of the ledger that have had one of them: no other copy has been there since."""
        self._batch_bytes = BATCH_BYTES
        self._is_writing = False
        self._fenced: SinkFenced | None = None
        self._standing: Standing | None = None
        self._missing: str | None = None
        self._limit: int | None = None
        """Of the topic, for a batch of records."""
        self._needs_keys = False
        """The topic is compacted: brokers take no record without a key."""
        self._holds: Topic | None = None
        """The topic as it was when it was opened."""
        self._scratch = ""
        self._has_warned = False
        self.partitions = 0

    # Definition

    def check(self, rows: StructType) -> list[Problem]:
        from pyspark.errors import AnalysisException, ParseException
        from pyspark.sql import SparkSession

        problems: list[Problem] = []
        if self._definition.writers < 1:
            problems.append(Problem("writers", "there has to be one at least"))
        if self._definition.value is None:
            problems += check_json_keys(stored_schema(rows).fields)
        spark = SparkSession.getActiveSession()
        if spark is None:
            return problems
        empty = spark.createDataFrame([], rows)
        expressions = {"key": self._definition.key, "value": self._definition.value}
        expressions |= {f"headers.{name}": text for name, text in self._definition.headers.items()}
        for where, text in expressions.items():
            if text is None:
                continue
            try:
                kind = empty.selectExpr(f"({text}) AS it").schema[0].dataType.simpleString()
            except (AnalysisException, ParseException) as error:
                problems.append(Problem(where, str(error).splitlines()[0]))
                continue
            if kind.startswith(("struct", "array", "map", "variant", "void")):
                problems.append(
                    Problem(where, f"it gives {kind}; a record takes a string or bytes (to_json(…)?)")
                )
        return problems

    # Life

    def open(self, context: SinkContext, spark: SparkSession | None) -> None:
        own = dict(self._definition.settings)
        if self._definition.bootstrap is not None:
            self._settings = {**own, "bootstrap.servers": self._definition.bootstrap}
        else:
            self._settings = {**shared_settings(context.source), **own}
        if "bootstrap.servers" not in self._settings:
            raise SinkError(f"sink {self.name!r}: neither the sink nor the source names a bootstrap server")
        self._ledger = LedgerTopic(
            self.ledger_topic, self.name, self._pipeline, self._settings, is_writing=spark is not None
        )
        self._scratch = os.path.join(context.home, "sinks", self.name)
        self._warn = context.warn
        if spark is None:
            return
        self._is_writing = True
        self._spark = spark
        shutil.rmtree(self._scratch, ignore_errors=True)  # of a run that was cut short
        self._take_over()

    @property
    def _opened(self) -> LedgerTopic:
        assert self._ledger is not None, "open comes first"
        return self._ledger

    @property
    def ledger_topic(self) -> str:
        return ledger_topic(self._pipeline, self.name)

    @property
    def topic(self) -> str:
        return self._definition.topic

    def _ensure_topic(self, had: Topic | None) -> None:
        """Make the topic where it is missing, unless the ledger knows it: then it is lost, and not new."""
        self._missing = self._lost_topic(had)
        if self._missing is not None:
            return
        self.partitions = self._opened.partitions(self.topic)
        if self.partitions == 0:
            near = get_close_matches(self.topic, self._opened.topics(), 1)
            self.partitions = self._opened.create(self.topic, -1, self.topic_config)
            meant = f"; there is {near[0]!r}, in case that was meant" if near else ""
            self._warn(f"sink {self.name!r}: there was no topic {self.topic!r}, and it was created{meant}")
        settings = self._opened.topic_settings(self.topic)
        limit = settings.get("max.message.bytes")
        self._limit = None if limit is None else int(limit)
        if limit is not None:
            # Brokers refuse a batch as a whole: one made of small records must not be too large.
            self._batch_bytes = max(1024, min(BATCH_BYTES, int(limit) - BATCH_OVERHEAD_BYTES))
        self._needs_keys = "compact" in (settings.get("cleanup.policy") or "")
        if self._needs_keys and self._last_of_key and not self._has_warned:
            self._has_warned = True
            self._warn(f"sink {self.name!r}: the topic {self.topic!r} is compacted: {self._last_of_key}")
        topic_id = self._opened.topic_id(self.topic)
        self._holds = Topic(self.topic, topic_id) if topic_id else None

    def _lost_topic(self, had: Topic | None) -> str | None:
        if had is None or had.name != self.topic:
            return None
        now = self._opened.topic_id(self.topic)
        if now in (had.id, ""):
            return None
        what = (
            "is gone" if now is None else f"was deleted and created again (its id is {now}, and was {had.id})"
        )
        return f"the topic {self.topic!r}, which the ledger says has records of this pipeline, {what}"

    def _take_over(self) -> None:
        """Fence every writer there ever was, then read what they have committed."""
        for attempt in range(TAKE_OVERS_MAX):
            try:
                with self._opened.reading():
                    self._take_ids()
                return
            except SinkFenced:
                self.close()
                if attempt == TAKE_OVERS_MAX - 1 or self._fenced is not None:
                    raise

    def _take_ids(self) -> None:
        known = self._read()  # a ledger of somebody else's is found before anybody is fenced
        if self._is_writing:
            self._ensure_topic(known.topic)
        count = self._opened.ensure(self._definition.writers)
        self._writers = [self._holding.writer(number) for number in range(count)]
        self._side_by_side([writer.start for writer in self._writers])
        standing = self._read()
        self._holder = uuid.uuid4().hex
        self._holders.add(self._holder)
        self._claim(at for at, last in enumerate(self._lasts) if last.holder)
        self._standing = standing

    def _read(self) -> Standing:
        """What the ledger says; `SinkFenced` where another copy has taken over since this one had."""
        self._lasts = self._opened.read()
        if any(self._lasts[at].holder not in self._holders for at in self._claimed):
            self._fenced = SinkFenced(
                f"sink {self.name!r}: another copy of the pipeline has taken over its ledger {self.ledger_topic!r}"
            )
            raise SinkFenced(str(self._fenced))
        return standing_of([last.record for last in self._lasts])

    @property
    def _holding(self) -> Holding:
        return Holding(self.name, self._pipeline, self.ledger_topic, self._settings, self._batch_bytes)

    def _claim(self, partitions: Collection[int] | Iterator[int]) -> None:
        """From here on tasks of this take-over, and of no other, may write there."""
        wanted = [at for at in partitions if self._lasts[at].holder != self._holder]

        def claim(at: int) -> None:
            self._writers[at].note([self._holding.note(at, self._lasts[at].value, self._holder)])
            self._lasts[at] = self._lasts[at]._replace(holder=self._holder)

        self._side_by_side([lambda at=at: claim(at) for at in wanted])  # type: ignore[misc]
        self._claimed.update(wanted)

    @staticmethod
    def _side_by_side(calls: Sequence[Callable[[], Any]]) -> None:
        """All of them are over when this returns, or raises: one that was fenced before any other failure."""
        if len(calls) <= 1:
            for call in calls:
                call()
            return
        with ThreadPoolExecutor(max_workers=len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
        failures = [failure for future in futures if (failure := future.exception()) is not None]
        for failure in sorted(failures, key=lambda each: not isinstance(each, SinkFenced)):
            raise failure

    def _current(self) -> Standing:
        if self._fenced is not None:
            raise SinkFenced(str(self._fenced))
        if self._standing is None or not self._is_writing:
            if self._is_writing:
                self._take_over()
                assert self._standing is not None
            else:
                self._standing = self._read()
        return self._standing

    def last_entry(self) -> Entry | None:
        return self._current().last

    def unfinished(self) -> Entry | None:
        """A batch some writers have and others have not: it has to be the next, cut exactly so."""
        record = self._current().unfinished
        return None if record is None else record.entry

    def missing(self) -> str | None:
        standing = self._current()
        return self._missing if self._is_writing else self._lost_topic(standing.topic)

    def holds_rows(self) -> bool:
        return self._opened.has_records(self.topic)

    def forget(self) -> None:
        """Every transactional id is held by now, so nobody writes to the ledger behind the first writer's back."""
        was_writing = self._is_writing
        if not self._writers:
            if self._opened.partitions(self.ledger_topic) == 0:
                return
            self._take_over()
        try:
            # Of all writers in one transaction: half of it would be a batch half done.
            self._writers[0].note(self._holding.note(at, None, "") for at in range(len(self._writers)))
        except BaseException:
            self.close()
            raise
        self._standing, self._lasts = Standing(), [Last()] * len(self._writers)
        self._claimed.clear()
        if was_writing:
            self._ensure_topic(None)
        else:
            self.close()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers = []
        self._standing = None

    # Batches

    def prepare(self, batch: Batch, rows: DataFrame) -> Prepared:
        standing = self._current()
        writers = self._definition.writers
        if standing.unfinished is not None:
            writers = standing.unfinished.writers
        if self._missing is not None:
            raise SinkError(f"sink {self.name!r}: {self._missing}")
        directory = os.path.join(self._scratch, batch.label)
        if batch.is_empty:
            return PreparedRecords(self, Records(directory, (Share(),) * writers))
        envelope = self.envelope(batch.batch_time_ms)
        is_small = batch.local is not None
        records = set_aside(
            self.records(rows), directory, writers, self._digesting(envelope), is_small=is_small
        )
        try:
            self._reject_untaken(records, envelope)
            return PreparedRecords(self, records)
        except BaseException:
            records.remove()
            raise

    def envelope(self, batch_time_ms: int) -> Envelope:
        """What makes the records of a batch."""
        return RecordEnvelope(tuple(self._definition.headers))

    def _digesting(self, envelope: Envelope) -> Digesting | None:
        names = (SOURCE_HEADER, *self._definition.headers)
        return None if self.key is None else RecordDigesting(self.key, names)

    def _reject_untaken(self, records: Records, envelope: Envelope) -> None:
        """`RowsRejected` for records that the topic does not take. Compressed, a large one may fit, so it is tried."""
        found = list(islice(self._untaken(records, envelope), REJECTED_MAX + 1))
        if found:
            raise RowsRejected(found)

    def _untaken(self, records: Records, envelope: Envelope) -> Iterator[Rejected]:
        size_max = records.largest if self._limit is None else self._limit - BATCH_OVERHEAD_BYTES
        keyless = records.keyless if self._needs_keys else 0
        if not self.rejects or (records.largest <= size_max and not keyless):
            return
        for batch in (each for share in records.shares for each in share.batches()):
            lacks_key = pc.and_(batch.column("key").is_null(), self._needs_keys)
            for at in pc.indices_nonzero(pc.or_(lacks_key, pc.greater(sizes(batch), size_max))).to_pylist():
                (message,) = envelope.messages(batch.slice(at, 1))
                why: str | None = f"the record has no key, and topic {self.topic!r} is compacted"
                if not lacks_key[at].as_py():
                    why = self._writers[0].refusal(self.topic, message)
                if why is not None:
                    place = batch.column(LINEAGE)[at].as_py()
                    yield Rejected(place["topic"], place["partition"], place["offset"], self.name, why)

    def records(self, rows: DataFrame) -> DataFrame:
        """Key, value and headers of every row, beside its lineage."""
        from pyspark.sql import functions

        rows = _with_keys_of_tombstones(rows)
        key = self._definition.key
        columns: list[Column] = [functions.col(LINEAGE)]
        if key is not None:
            value = _as_bytes(functions.expr(key), rows)
            if {"_key", TOMBSTONE} <= set(rows.columns):
                of_record = functions.when(functions.col(TOMBSTONE), functions.col("_key"))
                value = functions.coalesce(value, of_record)
            columns.append(value.alias("key"))
        elif "_key" in rows.columns:
            columns.append(functions.col("_key").alias("key"))
        else:
            columns.append(functions.lit(None).cast("binary").alias("key"))
        columns.append(self._value(rows).alias("value"))
        source = "concat(_hf.topic, ':', _hf.partition, '@', _hf.offset, '#', _hf.index)"
        columns.append(functions.expr(f"encode({source}, 'utf-8')").alias("source"))
        for at, text in enumerate(self._definition.headers.values()):
            columns.append(_as_bytes(functions.expr(text), rows).alias(f"header_{at}"))
        return rows.select(*columns)

    def _value(self, rows: DataFrame) -> Column:
        from pyspark.sql import functions

        given = self._definition.value
        if given is not None:
            value = _as_bytes(functions.expr(given), rows)
        else:
            named = [column_named(name) for name in rows.columns if name != LINEAGE and is_stored(name)]
            text = functions.to_json(functions.struct(*named), JSON_OPTIONS) if named else functions.lit("{}")
            value = functions.encode(text, "utf-8")
        if TOMBSTONE in rows.columns and TOMBSTONE not in (given or ""):
            value = functions.when(functions.col(TOMBSTONE), functions.lit(None)).otherwise(value)
        return value.cast("binary")

    def send(self, entry: Entry, records: Records) -> Entry:
        """Every writer that does not have this batch yet commits its part of it; the entry that they have then."""
        standing = self._current()
        record = LedgerRecord(entry, len(records.shares), standing.last, self._holds)
        if standing.unfinished is not None:
            self._refuse_other(standing, entry, records)
            record = standing.unfinished
        elif entry.number != (0 if standing.last is None else standing.last.number + 1):
            raise SinkFenced(f"sink {self.name!r}: entry {entry.number} does not follow the ledger")
        sendings = [
            Sending(at, share, replace(record, sent=_sent(share)).encode(), self._lasts[at])
            for at, share in enumerate(records.shares)
            if at not in standing.done
        ]
        try:
            self._send(sendings, self.envelope(record.entry.batch_time_ms))
        except SinkFenced as fenced:
            self._fenced = fenced
            self.close()
            raise
        except BaseException:
            # What is committed is not known here; the next look takes the ids again and reads the ledger.
            self.close()
            raise
        if self._standing is not None:
            self._standing = Standing(record.entry, topic=record.topic)
        return record.entry

    def _send(self, sendings: Sequence[Sending], envelope: Envelope) -> None:
        if self._spark is not None and sum(each.share.rows for each in sendings) > TASK_ROWS:
            self._claim([each.number for each in sendings])
            held = [replace(each, before=self._lasts[each.number]) for each in sendings]
            send_by_tasks(self._spark, self._holding, self.topic, envelope, held)
            self.close()  # the tasks have the ids now
            return

        def write(each: Sending) -> None:
            messages = (message for batch in each.share.batches() for message in envelope.messages(batch))
            note = self._holding.note(each.number, each.value, each.before.holder)
            self._writers[each.number].write(self.topic, messages, note)
            self._lasts[each.number] = each.before._replace(value=each.value)

        self._side_by_side([lambda each=each: write(each) for each in sendings])  # type: ignore[misc]

    def _refuse_other(self, standing: Standing, entry: Entry, records: Records) -> None:
        """Whoever finishes a batch brings the very rows that it was begun with."""
        assert standing.unfinished is not None
        begun = standing.unfinished.entry
        if (begun.range, begun.number) != (entry.range, entry.number):
            raise SinkError(
                f"sink {self.name!r}: writers have part of the batch {begun.range}, so it has to be finished "
                f"first, and not {entry.range}"
            )
        if begun.fingerprint != entry.fingerprint:
            raise SinkError(
                f"sink {self.name!r}: writers have part of the batch {begun.range}, made with another definition "
                "of the pipeline; finish it with that one, then change the definition"
            )
        others = [at for at, sent in standing.sent.items() if sent != _sent(records.shares[at])]
        is_digested = bool(begun.digests)  # an earlier holdfast's is not
        if others or begun.rows != entry.rows or (is_digested and begun.digests != entry.digests):
            raise SinkError(
                f"sink {self.name!r}: writers have part of the batch {begun.range}, with {begun.rows} rows, and now "
                f"it comes out otherwise, with {entry.rows}: what the writers lack would be lost or repeated. A step "
                "gave something else for the same records: make it give the same, and run again"
            )
        before, now = begun.content, entry.content
        if before is not None and now is not None and before.key == now.key and before.digest != now.digest:
            self._warn(
                f"sink {self.name!r}: a batch of which writers have part came out with other values: a step gives "
                "something else each time. An audit will find rows of it altered"
            )


def _sent(share: Share) -> Sent:
    return Sent(share.rows, f"{share.digest:016x}")


def _with_keys_of_tombstones(rows: DataFrame) -> DataFrame:
    """A tombstone has no value: columns that the record's key has too are taken from there."""
    from pyspark.sql import functions

    names = [name for name in rows.columns if KEY_PREFIX + name in rows.columns]
    if not names or TOMBSTONE not in rows.columns:
        return rows
    kinds = {field.name: field.dataType for field in rows.schema.fields}
    taken = {
        name: functions.when(
            functions.col(TOMBSTONE),
            functions.coalesce(column_named(name), column_named(KEY_PREFIX + name).cast(kinds[name])),
        ).otherwise(column_named(name))
        for name in names
    }
    return rows.withColumns(taken)


def _as_bytes(value: Column, rows: DataFrame) -> Column:
    """Bytes as they are, anything else as its text."""
    from pyspark.sql import functions
    from pyspark.sql.types import BinaryType

    kind = rows.select(value.alias("it")).schema[0].dataType
    return value if isinstance(kind, BinaryType) else functions.encode(value.cast("string"), "utf-8")
