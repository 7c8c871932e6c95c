"""`spark.readStream.format("holdfast")`: any Kafka as a Spark source that cannot lose a range quietly.

    spark.readStream.format("holdfast").options(**{"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "orders"})

Columns and options are those of Spark's own Kafka connector. What differs is what it refuses to do: it reads committed
records only, unless told otherwise; it stops where a topic was deleted and created again, where retention passed its
position, where the log was cut below it; and it has a limit for a batch, so that a long backlog is not one batch.

Positions are kept in Spark's checkpoint with each topic's id and leader epoch. A partition that was added is first
recorded there where it begins, in a batch without rows, so that a replay begins at the same place. Ranges are cut in a
process of the driver's and read in the workers, straight from Kafka's record batches to Arrow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from holdfast.pipeline.core.spark_settings import LOCAL_CORES
from holdfast.pipeline.guards import check_positions
from holdfast.pipeline.packing import Task, pack
from holdfast.pipeline.positions import BatchRange, Place, Position, Positions, Span
from holdfast.pipeline.source_options import Edge, SourceOptionError, SourceOptions, parse_options
from holdfast.reader import Cluster, Isolation, OffsetSpec, TopicInfo, TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int, "
    "headers array<struct<key: string, value: binary>>"
)
EARLIEST, LATEST = -2, -1
MAX_RECORDS = 250_000
"""Of a task, where the cores are not known: a tenth of a second's work or more. A task by itself costs a few hundredths
in Spark, worker and broker, so it should be no smaller; a batch of the usual size makes eight."""


class HoldfastSource(DataSource):
    """The source by its name; Spark makes one for every query."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._parsed = parse_options(options)

    @classmethod
    def name(cls) -> str:
        return "holdfast"

    def schema(self) -> str:
        return COLUMNS

    def reader(self, schema: StructType) -> DataSourceReader:
        return _RangeReader(self._parsed)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        if pyspark.__version__.startswith(("4.0.", "4.1.")):
            raise SourceOptionError(
                f"readStream.format('holdfast') needs Spark 4.2 or newer, and this is {pyspark.__version__}: before, a "
                "source in Python is not told how much a batch may hold. spark.read and pipelines work here"
            )
        from holdfast.pipeline.source_stream import StreamReader

        return StreamReader(self._parsed)


class _Piece(InputPartition):
    """What one task reads."""

    def __init__(self, task: Task, settings: Mapping[str, str], isolation: Isolation) -> None:
        super().__init__(None)
        self.task = task
        self.settings = dict(settings)
        self.isolation = isolation


class PieceReader:
    """In a worker: reads what a task was given."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Piece)
        with Cluster(partition.settings) as cluster:
            yield from cluster.read(partition.task, isolation=partition.isolation)


def pieces(batch: BatchRange, options: SourceOptions) -> list[_Piece]:
    """As many as there are cores in a session of ours on this machine; elsewhere nobody knows how many there are, and
    the number follows what there is to read."""
    cores = os.environ.get(LOCAL_CORES)
    if cores and not options.max_records:
        tasks = pack(batch, int(cores), at_least=options.min_partitions)
    else:
        tasks = pack(batch, None, at_least=options.min_partitions, worth=options.max_records or MAX_RECORDS)
    return [_Piece(task, options.settings, options.isolation) for task in tasks]


class Planner:
    """Finds topics, resolves offsets and cuts ranges; holds one connection per broker while the query runs."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._cluster = Cluster(options.settings)

    def close(self) -> None:
        self._cluster.close()

    def topics(self) -> dict[str, TopicInfo]:
        if self._options.pattern is not None:
            return self._cluster.topics(pattern=self._options.pattern)
        return self._cluster.topics(self._options.topics)

    def resolve(self, topics: Mapping[str, TopicInfo], edge: Edge) -> dict[Place, Position]:
        """The position of this edge in every partition that is read."""
        places = self._places(topics)
        if isinstance(edge, dict):
            return self._resolve_given(places, edge)
        if isinstance(edge, str):
            return self._offsets(places, "earliest" if edge == "earliest" else self._latest)
        found = self._offsets(places, edge)
        missing = {key: place for key, place in places.items() if found[place].offset < 0}
        if missing:  # No record is that young: the edge is the end of the log.
            found.update(self._offsets(missing, self._latest))
        return found

    @property
    def _latest(self) -> OffsetSpec:
        return "last-stable" if self._options.isolation == "read_committed" else "latest"

    def _offsets(self, places: Mapping[TopicPartition, Place], spec: OffsetSpec) -> dict[Place, Position]:
        answers = self._cluster.offsets(places, spec)
        return {places[key]: Position(answer.offset, answer.leader_epoch) for key, answer in answers.items()}

    def _resolve_given(
        self, places: Mapping[TopicPartition, Place], given: Mapping[TopicPartition, int]
    ) -> dict[Place, Position]:
        unknown = sorted(set(given) - set(places))
        absent = sorted(set(places) - set(given))
        if unknown or absent:
            what = "names partitions that are not there" if unknown else "leaves partitions out"
            names = ", ".join(f"{key.topic}-{key.partition}" for key in (unknown or absent)[:10])
            raise SourceOptionError(f"an option with offsets for each partition {what}: {names}")
        earliest = {key: place for key, place in places.items() if given[key] == EARLIEST}
        latest = {key: place for key, place in places.items() if given[key] == LATEST}
        found = {places[key]: Position(offset) for key, offset in given.items() if offset >= 0}
        if earliest:
            found.update(self._offsets(earliest, "earliest"))
        if latest:
            found.update(self._offsets(latest, self._latest))
        return found

    def _places(self, topics: Mapping[str, TopicInfo]) -> dict[TopicPartition, Place]:
        assigned = self._options.assigned
        return {
            TopicPartition(info.name, number): Place(info.name, info.topic_id, number)
            for info in topics.values()
            for number in info.partitions
            if not assigned or TopicPartition(info.name, number) in assigned
        }

    def ends(self, start: Positions) -> Positions:
        """Where the log ends for a reader that stands at `start`: every position still means what it meant."""
        topics = self.topics()
        check_positions(self._cluster, start, topics)
        return Positions(self.resolve(topics, "latest"))

    def starts_of_new(self, start: Positions, ends: Positions) -> dict[Place, Position]:
        """Partitions that came since: they begin at their beginning (HF402)."""
        new = {
            TopicPartition(place.topic, place.partition): place for place in ends.at if place not in start.at
        }
        return self._offsets(new, "earliest") if new else {}


class _RangeReader(PieceReader, DataSourceReader):
    """One batch query: the range is fixed when it is planned."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        planner = Planner(self._options)
        try:
            topics = planner.topics()
            starts = planner.resolve(topics, self._options.starting)
            ends = planner.resolve(topics, self._options.ending)
        finally:
            planner.close()
        spans = {
            place: Span(start.offset, max(start.offset, ends[place].offset), ends[place].leader_epoch)
            for place, start in starts.items()
        }
        return pieces(BatchRange(spans), self._options)


def cut(starts: Mapping[Place, Position], goals: Mapping[Place, Position], most: int | None) -> Positions:
    """How far a batch of at most `most` offsets goes: every partition by its share of what there is to read."""
    waiting = {place: max(0, goals[place].offset - start.offset) for place, start in starts.items()}
    total = sum(waiting.values())
    reached: dict[Place, Position] = {}
    for place, start in starts.items():
        there = waiting[place]
        share = there if most is None or total <= most else min(there, -(-there * most // total))
        # The epoch belongs to the last record before the position: unknown when the batch ends inside the log.
        epoch = goals[place].leader_epoch if share == there else -1
        reached[place] = Position(start.offset + share, epoch) if share else start
    return Positions(reached)


def to_offset(positions: Positions) -> dict[str, Any]:
    """Positions as Spark keeps a source's offset: nested dictionaries of plain values."""
    document: dict[str, Any] = {}
    for place, position in sorted(positions.at.items()):
        topic = document.setdefault(place.topic, {"id": str(place.topic_id), "offsets": {}, "epochs": {}})
        topic["offsets"][str(place.partition)] = position.offset
        topic["epochs"][str(place.partition)] = position.leader_epoch
    return document


def from_offset(document: Mapping[str, Any]) -> Positions:
    """The positions in an offset of ours."""
    return Positions.from_json(
        {
            name: {
                "id": topic["id"],
                "partitions": {
                    number: [offset, topic["epochs"][number]] for number, offset in topic["offsets"].items()
                },
            }
            for name, topic in document.items()
        }
    )
