"""One line for each setting that holdfast acts on: what it does here.

Shown by DescribeConfigs when documentation is asked for, and by docs/CONFIGURATION.md. A topic setting and
its broker namesake share a line.

The tables of docs/CONFIGURATION.md are written from the catalogue so that they cannot disagree with it.
`python -m holdfast.config.descriptions` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from holdfast.config.catalog import BROKER, OUR_DEFAULTS, SYNONYMS, TOPIC
from holdfast.config.definitions import Setting
from holdfast.config.values import format_value

DESCRIPTIONS: Mapping[str, str] = {
    # ours
    "holdfast.busy.poll.us": "After a response, look for requests this long before sleeping, while most come that "
    "soon: lower latency for some processor time. 0 turns it off.",
    "holdfast.clock.settle.ms": "A wall clock that jumped ahead, or a machine that was off for more than an hour: for "
    "this long, by running time, whatever expires by time does so by the time that is known to have passed; then the "
    "wall clock is believed. 0 believes it at once.",
    "holdfast.cluster.id": "The cluster that the log directories must belong to; an empty or foreign directory is "
    "refused. Unset, an empty directory becomes a new cluster.",
    "holdfast.flush": "group: acks=all is answered after the data is flushed to disk, many requests sharing "
    "one flush. os: answered from the page cache, the operating system flushes when it likes.",
    "holdfast.flush.threads": "How many files are flushed at the same time.",
    "holdfast.metrics.listener": "Where /metrics, /livez, /readyz and /buildinfo are shown, as host:port, or a port "
    "alone for this machine only. Unset, nowhere.",
    "holdfast.requests.in.flight.max": "Requests of one connection that may be under way at once; past it, "
    "the connection is not read until one is answered.",
    "holdfast.slow.request.ms": "A request that takes longer gets a line in the log that says where the time went; "
    "what a fetch waits for data and a group's member for the others does not count. 0 turns it off.",
    "holdfast.write.ahead.bytes": "With holdfast.flush=group, a partition flushed often and by itself has up to so "
    "many zeros written behind its last message, which makes the next flushes cheaper; given back when idle, at a "
    "roll and at a stop. 0 turns it off.",
    # the node and its network
    "advertised.listeners": "Where clients are sent, as NAME://host:port; a port that is 0 or missing is the "
    "bound one. Needed when a listener binds every address.",
    "broker.id": "The old name of node.id.",
    "broker.rack": "The rack that Metadata shows for this broker.",
    "connections.max.idle.ms": "A connection that asks nothing for this long is closed; -1 never.",
    "controller.listener.names": "Listeners that belong to a controller: accepted and not opened.",
    "fetch.max.bytes": "The most a fetch answers, whatever the client asks for, first batch excepted.",
    "listener.security.protocol.map": "The protocol of each listener name; only PLAINTEXT is served.",
    "listeners": "What to bind, as NAME://host:port with IPv6 in brackets; port 0 takes any free one.",
    "max.connections": "Open connections beyond this number are closed at once; a quarter of the open files the "
    "process may have stays for logs in any case.",
    "max.incremental.fetch.session.cache.slots": "How many incremental fetch sessions are remembered.",
    "max.request.partition.size.limit": "The most partitions one DescribeTopicPartitions answer holds.",
    "node.id": "This broker's id.",
    "process.roles": "Must include broker; holdfast is always its own controller as well.",
    "queued.max.request.bytes": "Bytes of half-received requests, of all connections together, after which one is "
    "received at a time, and one that comes too slowly is closed while others wait; -1 for no limit. Unless given, a "
    "quarter of the memory this process may use, at least twice socket.request.max.bytes.",
    "socket.request.max.bytes": "A longer request closes its connection.",
    # topics
    "auto.create.topics.enable": "Whether asking for a topic that does not exist creates it.",
    "default.replication.factor": "The replication factor of topics created without one; one node has one "
    "replica.",
    "delete.topic.enable": "Whether topics can be deleted.",
    "num.partitions": "Partitions of topics created without a number.",
    # logs, the broker's names
    "log.cleaner.backoff.ms": "How long the compactor rests when there is nothing to compact.",
    "log.cleaner.dedupe.buffer.size": "Memory for the table of keys of one compaction.",
    "log.cleaner.delete.retention.ms": "How long compaction keeps tombstones and markers.",
    "log.cleaner.enable": "Whether compaction runs at all.",
    "log.cleaner.max.compaction.lag.ms": "A record is compacted at the latest this long after it came.",
    "log.cleaner.min.cleanable.ratio": "A log is compacted when its dirty part reaches this share.",
    "log.cleaner.min.compaction.lag.ms": "A record is left alone by compaction for at least this long.",
    "log.cleanup.policy": "delete: old segments go by retention. compact: the last value of each key stays. "
    "Both may be given; nothing keeps everything.",
    "log.dir": "Where data is kept, unless log.dirs says.",
    "log.dirs": "Directories for data; a new partition goes to the one with the fewest.",
    "log.flush.interval.messages": "Flush after this many messages, also with holdfast.flush=os.",
    "log.flush.interval.ms": "Flush what is older than this, also with holdfast.flush=os.",
    "log.flush.scheduler.interval.ms": "Stands in for log.flush.interval.ms when that is not set.",
    "log.index.interval.bytes": "Bytes of log between two entries of the offset index.",
    "log.index.size.max.bytes": "An index that reaches this size rolls the segment.",
    "log.message.timestamp.after.max.ms": "A record stamped further in the future than this is refused.",
    "log.message.timestamp.before.max.ms": "A record stamped further in the past than this is refused.",
    "log.message.timestamp.type": "CreateTime keeps the producer's time, LogAppendTime sets the broker's.",
    "log.retention.bytes": "Segments of a partition beyond this size go; -1 for no limit.",
    "log.retention.check.interval.ms": "How often retention looks for segments to remove.",
    "log.retention.hours": "log.retention.ms in hours, if neither that nor log.retention.minutes is set.",
    "log.retention.minutes": "log.retention.ms in minutes, if that is not set.",
    "log.retention.ms": "Segments whose last record is older than this go; -1 for no limit.",
    "log.roll.hours": "log.roll.ms in hours, if that is not set.",
    "log.roll.jitter.hours": "log.roll.jitter.ms in hours, if that is not set.",
    "log.roll.jitter.ms": "At most this much is taken off log.roll.ms, lest all segments roll at once.",
    "log.roll.ms": "A segment rolls when its first record is this old, even if it is not full.",
    "log.segment.bytes": "A segment rolls before it would exceed this size; one of a compacted topic, 1 GiB.",
    "log.segment.delete.delay.ms": "How long a removed segment's files stay, renamed, before they go.",
    "message.max.bytes": "The largest record batch accepted, as sent.",
    "producer.id.expiration.ms": "A producer that wrote nothing for this long is forgotten.",
    # logs, the topic's names
    "cleanup.policy": "delete, compact, both, or nothing to keep everything.",
    "compression.gzip.level": "Level for compression.type=gzip.",
    "compression.lz4.level": "Level for compression.type=lz4.",
    "compression.type": "producer stores batches as they came; any other value recompresses them.",
    "compression.zstd.level": "Level for compression.type=zstd.",
    "delete.retention.ms": "How long compaction keeps tombstones and markers.",
    "file.delete.delay.ms": "How long a removed segment's files stay, renamed, before they go.",
    "flush.messages": "Flush after this many messages, also with holdfast.flush=os.",
    "flush.ms": "Flush what is older than this, also with holdfast.flush=os.",
    "index.interval.bytes": "Bytes of log between two entries of the offset index.",
    "internal.segment.bytes": "For tests: stands in for segment.bytes, without its lower bound.",
    "max.compaction.lag.ms": "A record is compacted at the latest this long after it came.",
    "max.message.bytes": "The largest record batch accepted, as sent.",
    "message.timestamp.after.max.ms": "A record stamped further in the future than this is refused.",
    "message.timestamp.before.max.ms": "A record stamped further in the past than this is refused.",
    "message.timestamp.type": "CreateTime keeps the producer's time, LogAppendTime sets the broker's.",
    "min.cleanable.dirty.ratio": "The log is compacted when its dirty part reaches this share.",
    "min.compaction.lag.ms": "A record is left alone by compaction for at least this long.",
    "min.insync.replicas": "With fewer replicas in sync, acks=all is refused.",
    "retention.bytes": "Segments of a partition beyond this size go; -1 for no limit.",
    "retention.ms": "Segments whose last record is older than this go; -1 for no limit.",
    "segment.bytes": "A segment rolls before it would exceed this size; one of a compacted topic, 1 GiB.",
    "segment.index.bytes": "An index that reaches this size rolls the segment.",
    "segment.jitter.ms": "At most this much is taken off segment.ms, lest all segments roll at once.",
    "segment.ms": "A segment rolls when its first record is this old, even if it is not full.",
    # groups
    "group.consumer.assignment.interval.ms": "Between two computations of a group's assignment in the new "
    "protocol.",
    "group.consumer.assignors": "Who may divide partitions among members of the new protocol: uniform, range; "
    "the first is the default.",
    "group.consumer.heartbeat.interval.ms": "How often members of the new protocol are told to report.",
    "group.consumer.max.heartbeat.interval.ms": "The most a group's own heartbeat interval may be.",
    "group.consumer.max.session.timeout.ms": "The most a group's own session time-out may be.",
    "group.consumer.max.size": "The most members a group of the new protocol may have.",
    "group.consumer.migration.policy": "Whether a live group may change between the classic and the new "
    "protocol: disabled, upgrade, downgrade, bidirectional.",
    "group.consumer.min.heartbeat.interval.ms": "The least a group's own heartbeat interval may be.",
    "group.consumer.min.session.timeout.ms": "The least a group's own session time-out may be.",
    "group.consumer.regex.refresh.interval.ms": "How old the answer to a group's regular expression may become "
    "before it is looked up again.",
    "group.consumer.session.timeout.ms": "A member of the new protocol that is silent for this long is taken out "
    "of its group.",
    "group.coordinator.rebalance.protocols": "Which protocols groups may use; without consumer, the new protocol "
    "is not served.",
    "group.initial.rebalance.delay.ms": "How long an empty classic group waits for more members before its first "
    "generation.",
    "group.max.session.timeout.ms": "The most a classic member may ask for as session time-out.",
    "group.max.size": "The most members a classic group may have.",
    "group.min.session.timeout.ms": "The least a classic member may ask for as session time-out.",
    "offset.metadata.max.bytes": "The most text that may go with a committed offset; never above 32,767 bytes.",
    "offsets.retention.check.interval.ms": "How often expired committed offsets are looked for.",
    "offsets.retention.minutes": "Committed offsets of a group expire this long after it became empty, or after the "
    "commit where no group is.",
    "offsets.topic.num.partitions": "Partitions of __consumer_offsets when it is made.",
    "offsets.topic.segment.bytes": "Size of a segment of __consumer_offsets when it is made.",
    # transactions
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "How often transactions past their time-out "
    "are looked for.",
    "transaction.max.timeout.ms": "The longest time-out a transactional producer may ask for.",
    "transaction.partition.verification.enable": "Whether a transactional batch of the older protocol is checked "
    "against the transaction's coordinator before it is appended.",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "How often transactional ids out of use are "
    "looked for.",
    "transaction.state.log.num.partitions": "Partitions of __transaction_state when it is made.",
    "transaction.state.log.segment.bytes": "Size of a segment of __transaction_state when it is made.",
    "transactional.id.expiration.ms": "A transactional id that is not used for this long is forgotten.",
}


def reference() -> str:
    """Three tables in Markdown: our settings, Kafka's broker settings we act on, and the topic settings."""
    acted_on = [setting for _, setting in sorted(BROKER.items()) if setting.acted_on]
    topic = [setting for _, setting in sorted(TOPIC.items()) if setting.acted_on]
    ours = [setting for setting in acted_on if setting.is_ours]
    kafkas = [setting for setting in acted_on if not setting.is_ours]
    return "\n".join(
        (
            "## Settings that holdfast adds",
            "",
            *_table(ours, "Can be altered", lambda setting: setting.scope.value),
            "",
            "## Kafka's broker settings that holdfast acts on",
            "",
            *_table(kafkas, "Can be altered", lambda setting: setting.scope.value),
            "",
            "## Topic settings that holdfast acts on",
            "",
            *_table(topic, "Falls back to", lambda setting: _fallbacks(setting.name)),
            "",
        )
    )


def _fallbacks(name: str) -> str:
    return ", ".join(f"`{synonym.name}`" for synonym in SYNONYMS.get(name, ()))


def _table(settings: Iterable[Setting], heading: str, cell: Callable[[Setting], str]) -> list[str]:
    lines = [f"| Name | Type | Default | Allowed | {heading} | What it does |", "|---|---|---|---|---|---|"]
    for setting in settings:
        default = format_value(setting.default)
        shown = "" if default in (None, "") else f"`{default}`"
        if setting.name in OUR_DEFAULTS:
            shown += " (Kafka's differs)"
        allowed = "" if setting.rule is None else setting.rule.allowed
        cells = (
            f"`{setting.name}`",
            setting.type.name.lower(),
            shown.strip(),
            allowed,
            cell(setting),
            DESCRIPTIONS[setting.name],
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print(reference(), end="")
