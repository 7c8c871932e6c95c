"""Kafka's settings of logs: the broker's, the topic's, and which of those stands behind which of these.

Here are the settings, too, that holdfast adds to Kafka's. A new one is one row here and one line in
`descriptions.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.config.definitions import (
    BOOLEAN,
    CLUSTER_WIDE,
    DOUBLE,
    DOUBLE_MAX,
    GZIP_LEVEL,
    INT,
    LIST,
    LONG,
    LONG_MAX,
    NOT_EMPTY,
    PER_BROKER,
    STRING,
    THROTTLED_REPLICAS,
    Setting,
    at_least,
    between,
    items_of,
    one_of,
)

LOG_SETTINGS: tuple[Setting, ...] = (
    Setting("compression.gzip.level", INT, -1, GZIP_LEVEL, CLUSTER_WIDE, acted_on=True),
    Setting("compression.lz4.level", INT, 9, between(1, 17), CLUSTER_WIDE, acted_on=True),
    Setting(
        "compression.type",
        STRING,
        "producer",
        one_of("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
        CLUSTER_WIDE,
        acted_on=True,
    ),
    Setting("compression.zstd.level", INT, 3, between(-131_072, 22), CLUSTER_WIDE, acted_on=True),
    Setting("cordoned.log.dirs", LIST, (), None, PER_BROKER),
    Setting("follower.fetch.last.tiered.offset.enable", BOOLEAN, False, None, CLUSTER_WIDE),
    Setting("log.cleaner.backoff.ms", LONG, 15_000, at_least(0), CLUSTER_WIDE, acted_on=True),
    Setting("log.cleaner.dedupe.buffer.size", LONG, 134_217_728, None, CLUSTER_WIDE, acted_on=True),
    Setting("log.cleaner.delete.retention.ms", LONG, 86_400_000, at_least(0), CLUSTER_WIDE, acted_on=True),
    Setting("log.cleaner.enable", BOOLEAN, True, acted_on=True),
    Setting("log.cleaner.io.buffer.load.factor", DOUBLE, 0.9, None, CLUSTER_WIDE),
    Setting("log.cleaner.io.buffer.size", INT, 524_288, at_least(0), CLUSTER_WIDE),
    Setting("log.cleaner.io.max.bytes.per.second", DOUBLE, DOUBLE_MAX, None, CLUSTER_WIDE),
    Setting("log.cleaner.max.compaction.lag.ms", LONG, LONG_MAX, at_least(1), CLUSTER_WIDE, acted_on=True),
    Setting("log.cleaner.min.cleanable.ratio", DOUBLE, 0.5, between(0, 1), CLUSTER_WIDE, acted_on=True),
    Setting("log.cleaner.min.compaction.lag.ms", LONG, 0, at_least(0), CLUSTER_WIDE, acted_on=True),
    Setting("log.cleaner.threads", INT, 1, at_least(0), CLUSTER_WIDE),
    Setting(
        "log.cleanup.policy", LIST, ("delete",), items_of("compact", "delete"), CLUSTER_WIDE, acted_on=True
    ),
    Setting("log.dir", LIST, ("/tmp/kafka-logs",), NOT_EMPTY, acted_on=True),
    Setting("log.dir.failure.timeout.ms", LONG, 30_000, at_least(1)),
    Setting("log.dirs", LIST, None, NOT_EMPTY, acted_on=True),
    Setting("log.flush.interval.messages", LONG, LONG_MAX, at_least(1), CLUSTER_WIDE, acted_on=True),
    Setting("log.flush.interval.ms", LONG, None, None, CLUSTER_WIDE, acted_on=True),
    Setting("log.flush.offset.checkpoint.interval.ms", INT, 60_000, at_least(0)),
    Setting("log.flush.scheduler.interval.ms", LONG, LONG_MAX, acted_on=True),
    Setting("log.flush.start.offset.checkpoint.interval.ms", INT, 60_000, at_least(0)),
    Setting("log.index.interval.bytes", INT, 4_096, at_least(0), CLUSTER_WIDE, acted_on=True),
    Setting("log.index.size.max.bytes", INT, 10_485_760, at_least(4), CLUSTER_WIDE, acted_on=True),
    Setting("log.initial.task.delay.ms", LONG, 30_000, at_least(0), internal=True),
    Setting("log.local.retention.bytes", LONG, -2, at_least(-2), CLUSTER_WIDE),
    Setting("log.local.retention.ms", LONG, -2, at_least(-2), CLUSTER_WIDE),
    Setting("log.message.timestamp.after.max.ms", LONG, 3_600_000, at_least(0), CLUSTER_WIDE, acted_on=True),
    Setting("log.message.timestamp.before.max.ms", LONG, LONG_MAX, at_least(0), CLUSTER_WIDE, acted_on=True),
    Setting(
        "log.message.timestamp.type",
        STRING,
        "CreateTime",
        one_of("CreateTime", "LogAppendTime"),
        CLUSTER_WIDE,
        acted_on=True,
    ),
    Setting("log.preallocate", BOOLEAN, False, None, CLUSTER_WIDE),
    Setting("log.retention.bytes", LONG, -1, None, CLUSTER_WIDE, acted_on=True),
    Setting("log.retention.check.interval.ms", LONG, 300_000, at_least(1), acted_on=True),
    Setting("log.retention.hours", INT, 168, acted_on=True),
    Setting("log.retention.minutes", INT, None, acted_on=True),
    Setting("log.retention.ms", LONG, None, None, CLUSTER_WIDE, acted_on=True),
    Setting("log.roll.hours", INT, 168, at_least(1), acted_on=True),
    Setting("log.roll.jitter.hours", INT, 0, at_least(0), acted_on=True),
    Setting("log.roll.jitter.ms", LONG, None, None, CLUSTER_WIDE, acted_on=True),
    Setting("log.roll.ms", LONG, None, None, CLUSTER_WIDE, acted_on=True),
    Setting("log.segment.bytes", INT, 1_073_741_824, at_least(1_048_576), CLUSTER_WIDE, acted_on=True),
    Setting("log.segment.delete.delay.ms", LONG, 60_000, at_least(0), CLUSTER_WIDE, acted_on=True),
    Setting("message.max.bytes", INT, 1_048_588, at_least(0), CLUSTER_WIDE, acted_on=True),
    Setting("min.insync.replicas", INT, 1, at_least(1), CLUSTER_WIDE, acted_on=True),
    Setting("num.recovery.threads.per.data.dir", INT, 2, at_least(1), CLUSTER_WIDE),
    Setting("remote.fetch.max.wait.ms", INT, 500, at_least(1), CLUSTER_WIDE),
    Setting("remote.list.offsets.request.timeout.ms", LONG, 30_000, at_least(1), CLUSTER_WIDE),
    Setting("remote.log.index.file.cache.total.size.bytes", LONG, 1_073_741_824, at_least(1), CLUSTER_WIDE),
    Setting("remote.log.index.file.cache.ttl.ms", LONG, 900_000, at_least(-1), internal=True),
    Setting("remote.log.manager.copier.thread.pool.size", INT, 10, at_least(1), CLUSTER_WIDE),
    Setting("remote.log.manager.copy.max.bytes.per.second", LONG, LONG_MAX, at_least(1), CLUSTER_WIDE),
    Setting("remote.log.manager.copy.quota.window.num", INT, 11, at_least(1)),
    Setting("remote.log.manager.copy.quota.window.size.seconds", INT, 1, at_least(1)),
    Setting("remote.log.manager.expiration.thread.pool.size", INT, 10, at_least(1), CLUSTER_WIDE),
    Setting("remote.log.manager.fetch.max.bytes.per.second", LONG, LONG_MAX, at_least(1), CLUSTER_WIDE),
    Setting("remote.log.manager.fetch.quota.window.num", INT, 11, at_least(1)),
    Setting("remote.log.manager.fetch.quota.window.size.seconds", INT, 1, at_least(1)),
    Setting("remote.log.manager.follower.thread.pool.size", INT, 2, at_least(1), CLUSTER_WIDE),
    Setting("remote.log.manager.task.interval.ms", LONG, 30_000, at_least(1)),
    Setting("remote.log.manager.task.retry.backoff.max.ms", LONG, 30_000, at_least(1), internal=True),
    Setting("remote.log.manager.task.retry.backoff.ms", LONG, 500, at_least(1), internal=True),
    Setting("remote.log.manager.task.retry.jitter", DOUBLE, 0.2, between(0, 0.5), internal=True),
    Setting("remote.log.manager.thread.pool.size", INT, 2, at_least(1)),
    Setting("remote.log.metadata.custom.metadata.max.bytes", INT, 128, at_least(0)),
    Setting(
        "remote.log.metadata.manager.class.name",
        STRING,
        "org.apache.kafka.server.log.remote.metadata.storage.TopicBasedRemoteLogMetadataManager",
        NOT_EMPTY,
    ),
    Setting("remote.log.metadata.manager.class.path", STRING, None),
    Setting("remote.log.metadata.manager.impl.prefix", STRING, "rlmm.config.", NOT_EMPTY),
    Setting("remote.log.metadata.manager.listener.name", STRING, None, NOT_EMPTY),
    Setting("remote.log.reader.max.pending.tasks", INT, 100, at_least(1)),
    Setting("remote.log.reader.threads", INT, 10, at_least(1), CLUSTER_WIDE),
    Setting("remote.log.storage.manager.class.name", STRING, None, NOT_EMPTY),
    Setting("remote.log.storage.manager.class.path", STRING, None),
    Setting("remote.log.storage.manager.impl.prefix", STRING, "rsm.config.", NOT_EMPTY),
    Setting("remote.log.storage.system.enable", BOOLEAN, False),
    Setting("unclean.leader.election.enable", BOOLEAN, False, None, CLUSTER_WIDE),
    Setting("unclean.leader.election.interval.ms", LONG, 300_000, at_least(1), internal=True),
)

TOPIC_SETTINGS: tuple[Setting, ...] = (
    Setting("cleanup.policy", LIST, ("delete",), items_of("compact", "delete"), acted_on=True),
    Setting("compression.gzip.level", INT, -1, GZIP_LEVEL, acted_on=True),
    Setting("compression.lz4.level", INT, 9, between(1, 17), acted_on=True),
    Setting(
        "compression.type",
        STRING,
        "producer",
        one_of("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
        acted_on=True,
    ),
    Setting("compression.zstd.level", INT, 3, between(-131_072, 22), acted_on=True),
    Setting("delete.retention.ms", LONG, 86_400_000, at_least(0), acted_on=True),
    Setting("file.delete.delay.ms", LONG, 60_000, at_least(0), acted_on=True),
    Setting("flush.messages", LONG, LONG_MAX, at_least(1), acted_on=True),
    Setting("flush.ms", LONG, LONG_MAX, at_least(0), acted_on=True),
    Setting("follower.replication.throttled.replicas", LIST, (), THROTTLED_REPLICAS),
    Setting("index.interval.bytes", INT, 4_096, at_least(0), acted_on=True),
    # For tests: a segment size without the lower bound of segment.bytes, which it replaces when set.
    Setting("internal.segment.bytes", INT, None, at_least(1), acted_on=True, internal=True),
    Setting("leader.replication.throttled.replicas", LIST, (), THROTTLED_REPLICAS),
    Setting("local.retention.bytes", LONG, -2, at_least(-2)),
    Setting("local.retention.ms", LONG, -2, at_least(-2)),
    Setting("max.compaction.lag.ms", LONG, LONG_MAX, at_least(1), acted_on=True),
    Setting("max.message.bytes", INT, 1_048_588, at_least(0), acted_on=True),
    Setting("message.timestamp.after.max.ms", LONG, 3_600_000, at_least(0), acted_on=True),
    Setting("message.timestamp.before.max.ms", LONG, LONG_MAX, at_least(0), acted_on=True),
    Setting(
        "message.timestamp.type", STRING, "CreateTime", one_of("CreateTime", "LogAppendTime"), acted_on=True
    ),
    Setting("min.cleanable.dirty.ratio", DOUBLE, 0.5, between(0, 1), acted_on=True),
    Setting("min.compaction.lag.ms", LONG, 0, at_least(0), acted_on=True),
    Setting("min.insync.replicas", INT, 1, at_least(1), acted_on=True),
    Setting("preallocate", BOOLEAN, False),
    Setting("remote.log.copy.disable", BOOLEAN, False),
    Setting("remote.log.delete.on.disable", BOOLEAN, False),
    Setting("remote.storage.enable", BOOLEAN, False),
    Setting("retention.bytes", LONG, -1, acted_on=True),
    Setting("retention.ms", LONG, 604_800_000, at_least(-1), acted_on=True),
    Setting("segment.bytes", INT, 1_073_741_824, at_least(1_048_576), acted_on=True),
    Setting("segment.index.bytes", INT, 10_485_760, at_least(4), acted_on=True),
    Setting("segment.jitter.ms", LONG, 0, at_least(0), acted_on=True),
    Setting("segment.ms", LONG, 604_800_000, at_least(1), acted_on=True),
    Setting("unclean.leader.election.enable", BOOLEAN, False),
)

HOUR_MS = 3_600_000
MINUTE_MS = 60_000


class Synonym(NamedTuple):
    """A broker setting that a topic setting falls back to."""

    name: str
    factor: int = 1
    """What one unit of the broker setting is worth in the topic setting's unit."""


TOPIC_SYNONYMS: dict[str, tuple[Synonym, ...]] = {
    "cleanup.policy": (Synonym("log.cleanup.policy"),),
    "compression.gzip.level": (Synonym("compression.gzip.level"),),
    "compression.lz4.level": (Synonym("compression.lz4.level"),),
    "compression.type": (Synonym("compression.type"),),
    "compression.zstd.level": (Synonym("compression.zstd.level"),),
    "delete.retention.ms": (Synonym("log.cleaner.delete.retention.ms"),),
    "file.delete.delay.ms": (Synonym("log.segment.delete.delay.ms"),),
    "flush.messages": (Synonym("log.flush.interval.messages"),),
    "flush.ms": (Synonym("log.flush.interval.ms"), Synonym("log.flush.scheduler.interval.ms")),
    "index.interval.bytes": (Synonym("log.index.interval.bytes"),),
    "local.retention.bytes": (Synonym("log.local.retention.bytes"),),
    "local.retention.ms": (Synonym("log.local.retention.ms"),),
    "max.compaction.lag.ms": (Synonym("log.cleaner.max.compaction.lag.ms"),),
    "max.message.bytes": (Synonym("message.max.bytes"),),
    "message.timestamp.after.max.ms": (Synonym("log.message.timestamp.after.max.ms"),),
    "message.timestamp.before.max.ms": (Synonym("log.message.timestamp.before.max.ms"),),
    "message.timestamp.type": (Synonym("log.message.timestamp.type"),),
    "min.cleanable.dirty.ratio": (Synonym("log.cleaner.min.cleanable.ratio"),),
    "min.compaction.lag.ms": (Synonym("log.cleaner.min.compaction.lag.ms"),),
    "min.insync.replicas": (Synonym("min.insync.replicas"),),
    "preallocate": (Synonym("log.preallocate"),),
    "retention.bytes": (Synonym("log.retention.bytes"),),
    "retention.ms": (
        Synonym("log.retention.ms"),
        Synonym("log.retention.minutes", MINUTE_MS),
        Synonym("log.retention.hours", HOUR_MS),
    ),
    "segment.bytes": (Synonym("log.segment.bytes"),),
    "segment.index.bytes": (Synonym("log.index.size.max.bytes"),),
    "segment.jitter.ms": (Synonym("log.roll.jitter.ms"), Synonym("log.roll.jitter.hours", HOUR_MS)),
    "segment.ms": (Synonym("log.roll.ms"), Synonym("log.roll.hours", HOUR_MS)),
    "unclean.leader.election.enable": (Synonym("unclean.leader.election.enable"),),
}
"""The broker settings behind a topic setting; the first one that is set counts."""


OUR_BROKER_SETTINGS: tuple[Setting, ...] = (
    Setting("holdfast.busy.poll.us", INT, 300, between(0, 10_000), acted_on=True),
    Setting("holdfast.clock.settle.ms", LONG, 86_400_000, at_least(0), CLUSTER_WIDE, acted_on=True),
    Setting("holdfast.cluster.id", STRING, None, acted_on=True),
    Setting("holdfast.flush", STRING, "group", one_of("group", "os"), CLUSTER_WIDE, acted_on=True),
    Setting("holdfast.flush.threads", INT, 16, between(1, 256), acted_on=True),
    Setting("holdfast.metrics.listener", STRING, None, acted_on=True),
    Setting("holdfast.requests.in.flight.max", INT, 16, at_least(1), acted_on=True),
    Setting("holdfast.slow.request.ms", LONG, 1000, at_least(0), CLUSTER_WIDE, acted_on=True),
    Setting("holdfast.write.ahead.bytes", INT, 1048576, between(0, 16 << 20), CLUSTER_WIDE, acted_on=True),
)

OUR_TOPIC_SETTINGS: tuple[Setting, ...] = (
    Setting("holdfast.flush", STRING, "group", one_of("group", "os"), acted_on=True),
    Setting("holdfast.write.ahead.bytes", INT, 1048576, between(0, 16 << 20), acted_on=True),
)

OUR_TOPIC_SYNONYMS: dict[str, tuple[Synonym, ...]] = {
    "holdfast.flush": (Synonym("holdfast.flush"),),
    "holdfast.write.ahead.bytes": (Synonym("holdfast.write.ahead.bytes"),),
}
