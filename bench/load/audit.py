"""An audit in a process of its own, and what it audits: orders in a topic, and the Parquet sink of a pipeline.

The sink is written without Spark, in its real format, by `tests.support.audit_sinks`: batches of a million orders,
one in a thousand of them a dead letter.
"""

from __future__ import annotations

import os
import pickle
import resource
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa

    from holdfast.pipeline.definition.model import PipelineDefinition
    from holdfast.pipeline.positions import Place
    from holdfast.reader import Cluster

BATCH: Final = 1_000_000
BROKEN_EVERY: Final = 1000
FLUSH_SECONDS: Final = 120.0


def pipeline_of(spec: dict[str, Any]) -> str:
    """Each topic has a pipeline of its own, and so a ledger for its dead letters."""
    return f"audit-{spec['topic']}"


def definition_of(spec: dict[str, Any]) -> PipelineDefinition:
    from holdfast.pipeline.definition.model import (
        DeadLetter,
        Decoding,
        Field,
        ParquetSink,
        PipelineDefinition,
        Source,
    )

    fields = (Field("id", "long"), Field("customer", "string"), Field("amount", "double"))
    directory = spec["directory"]
    return PipelineDefinition(
        pipeline_of(spec),
        Source((spec["topic"],), bootstrap=spec["bootstrap_servers"], value=Decoding("json", fields)),
        sinks=(ParquetSink(os.path.join(directory, "out"), "out"),),
        dead_letter=DeadLetter(f"{spec['topic']}-dlt"),
        home=os.path.join(directory, "home"),
        directory=directory,
    )


def audit(spec: dict[str, Any]) -> dict[str, Any]:
    """From the first import to the verdict."""
    begun_at = time.monotonic()
    from holdfast.audit.model import Fate
    from holdfast.audit.pipeline_audit import AuditOptions, audit_pipeline

    since = _places(spec, spec["since"]) if spec.get("since") else None
    # No pipeline wrote the letters: nobody took digests of why each was set aside.
    options = AuditOptions(since=since, accepted=("dead-letter.failure",))
    report = audit_pipeline(definition_of(spec), options=options)
    seconds = time.monotonic() - begun_at
    if report.verdict.exit_code:
        raise SystemExit(f"the audit is {report.verdict}: {report.reasons[:3]}")
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time(),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
        "count": report.total(Fate.OUTPUT) + report.total(Fate.DEAD_LETTER),
    }


def _places(spec: dict[str, Any], offsets: dict[str, int]) -> dict[Place, int]:
    from holdfast.pipeline.positions import Place
    from holdfast.reader import Cluster

    with Cluster({"bootstrap.servers": spec["bootstrap_servers"]}) as cluster:
        topic = cluster.topics([spec["topic"]])[spec["topic"]]
    return {Place(topic.name, topic.topic_id, int(number)): offset for number, offset in offsets.items()}


def fill(spec: dict[str, Any]) -> dict[str, Any]:
    """Send orders, and write to the sink what a pipeline would have written of them; returns where it stands."""
    from holdfast.reader import Cluster

    _produce(spec)
    with Cluster({"bootstrap.servers": spec["bootstrap_servers"]}) as cluster:
        ends = _write(spec, cluster)
    return {"ends": ends}


def _produce(spec: dict[str, Any]) -> None:
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": spec["bootstrap_servers"],
            "linger.ms": 20,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    for number in range(spec["first"], spec["first"] + spec["count"]):
        customer = f"customer-{number % 100_003}"
        value = f'{{"id": {number}, "customer": "{customer}", "amount": {number % 9973}.25}}'
        if number % BROKEN_EVERY == 0:
            value = value[:-1]
        while True:
            try:
                producer.produce(spec["topic"], value, customer, number % spec["partitions"])
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(FLUSH_SECONDS):
        raise SystemExit("not all orders were acknowledged")


def _write(spec: dict[str, Any], cluster: Cluster) -> dict[str, int]:
    from tests.support.audit_sinks import Ledger

    from holdfast.pipeline.definition.fingerprint import fingerprint
    from holdfast.pipeline.positions import Place
    from holdfast.reader import TopicPartition

    definition = definition_of(spec)
    kept = os.path.join(spec["directory"], "ledgers.pickle")
    topic = cluster.topics([spec["topic"]])[spec["topic"]]
    places = [Place(topic.name, topic.topic_id, number) for number in topic.partitions]
    ends = {
        each.partition: answer.offset
        for each, answer in cluster.offsets(
            [TopicPartition(topic.name, number) for number in topic.partitions], "last-stable"
        ).items()
    }
    if os.path.exists(kept):
        with open(kept, "rb") as file:
            ledgers = pickle.load(file)
        starts = {place: at.offset for place, at in ledgers["out"].last.positions.at.items()}
    else:
        ledgers = {
            name: Ledger(pipeline_of(spec), name, fingerprint(definition)) for name in ("out", "dead-letter")
        }
        starts = dict.fromkeys(places, 0)
    _commit_all(spec, cluster, ledgers, starts, {place: ends[place.partition] for place in places})
    with open(kept, "wb") as file:
        pickle.dump(ledgers, file)
    return {str(number): offset for number, offset in ends.items()}


def _commit_all(
    spec: dict[str, Any],
    cluster: Cluster,
    ledgers: dict[str, Any],
    starts: dict[Place, int],
    ends: dict[Place, int],
) -> None:
    from tests.support.audit_sinks import ParquetBuilder
    from tests.support.audit_topics import BrokerTopics, dead_letters

    out = ParquetBuilder(os.path.join(spec["directory"], "out"))
    letters = dead_letters(BrokerTopics(spec["bootstrap_servers"]), f"{spec['topic']}-dlt", pipeline_of(spec))
    letters.last = ledgers["dead-letter"].last
    if ledgers["out"].last is None:
        out.commit(ledgers["out"].opening(starts))
        letters.commit(ledgers["dead-letter"].opening(starts))
    size = BATCH // len(starts)
    at = dict(starts)
    while any(at[place] < ends[place] for place in at):
        spans = {place: (offset, min(offset + size, ends[place])) for place, offset in at.items()}
        _commit_one(spec, cluster, ledgers, spans, out, letters)
        at = {place: end for place, (_, end) in spans.items()}


def _commit_one(
    spec: dict[str, Any],
    cluster: Cluster,
    ledgers: dict[str, Any],
    spans: dict[Place, tuple[int, int]],
    out: Any,
    letters: Any,
) -> None:
    import pyarrow as pa
    from tests.support.audit_topics import dead_letter

    from holdfast.pipeline.digest import MASK, digest_of_offsets
    from holdfast.pipeline.ledger import Intake, Routes

    tables: list[pa.Table] = []
    broken: list[Any] = []
    digests = {"main": 0, "dead_letter": 0}
    for name, partition, table, dead in _decoded(spec, cluster, spans):
        tables.append(table)
        offsets = table.column("_hf").combine_chunks().field("offset").to_numpy()
        digests["main"] += digest_of_offsets(name, partition, offsets)
        if len(dead):
            digests["dead_letter"] += digest_of_offsets(name, partition, dead.column("offset").to_numpy())
        broken += [
            dead_letter(pipeline_of(spec), (name, partition, row["offset"]), row["key"], row["value"])
            for row in dead.to_pylist()
        ]
    rows = pa.concat_tables(tables)
    entry = {
        "intake": Intake(records=rows.num_rows + len(broken), digest=sum(digests.values()) & MASK),
        "routes": Routes(main=rows.num_rows, dead_letter={"parse": len(broken)}),
        "digests": {name: f"{digest & MASK:016x}" for name, digest in digests.items() if digest},
    }
    out.commit(ledgers["out"].entry(spans, rows=rows.num_rows, **entry), rows)
    letters.commit(ledgers["dead-letter"].entry(spans, rows=len(broken), **entry), broken)


def _decoded(
    spec: dict[str, Any], cluster: Cluster, spans: dict[Place, tuple[int, int]]
) -> Iterator[tuple[str, int, pa.Table, pa.Table]]:
    """Good rows, and those that cannot be read, batch by batch."""
    import numpy as np
    import pyarrow as pa

    from holdfast.audit.decoding import SourceDecoder
    from holdfast.reader import PartitionRange

    decoder = SourceDecoder(definition_of(spec).source)
    ranges = [
        PartitionRange(place.topic, place.topic_id, place.partition, start, end)
        for place, (start, end) in spans.items()
        if start < end
    ]
    for batch in cluster.read(ranges, headers=False):
        name, partition = batch.column("topic")[0].as_py(), batch.column("partition")[0].as_py()
        decoded = decoder.decode(name, batch)
        index = pa.array(np.zeros(batch.num_rows, np.int32))
        places = pa.StructArray.from_arrays(
            [batch.column("topic"), batch.column("partition"), batch.column("offset"), index],
            ["topic", "partition", "offset", "index"],
        )
        rows = pa.table({"_hf": places, **decoded.columns}).filter(decoded.errors.is_null())
        dead = pa.Table.from_batches([batch.select(["offset", "key", "value"])]).filter(
            decoded.errors.is_valid()
        )
        yield name, partition, rows, dead
