"""Every way we know to lose a message, by its permanent identifier.

The identifier is the same for the doctor's rule, the lab's experiment, the page in docs/risks and the test. This table
is the one place with the words; the others refer to it. HF1xx are the producer's, HF2xx the broker's, HF3xx the
consumer's, HF4xx the pipeline's. HF000 is no way to lose a message by itself: a file that does not say what its
author believes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

RiskSeverity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Risk:
    id: str
    title: str
    severity: RiskSeverity
    """How bad a finding of it is when the rule does not say otherwise."""
    loses: str
    """What can be lost, and when."""
    remedy: str
    """What prevents it, in a few words."""

    @property
    def page(self) -> str:
        """The documentation page, relative to the repository; whether it exists is for the reader to check."""
        return f"docs/risks/{self.id}.md"


_TABLE: Final = (
    Risk(
        "HF000",
        "a setting that does not do what it says",
        "warning",
        "nothing by itself: the client ignores or refuses the setting, and runs with what it has instead",
        "the name or value that was meant",
    ),
    Risk(
        "HF101",
        "nobody looks at the result of a send",
        "error",
        "every message whose delivery fails for good: the program never hears of it",
        "a delivery callback, or waiting for the result",
    ),
    Risk(
        "HF102",
        "acknowledged before the followers have it",
        "error",
        "acknowledged messages that only the leader had, when the leader dies",
        "acks=all",
    ),
    Risk(
        "HF103",
        "the producer gives up before a broker is back",
        "warning",
        "messages whose time runs out while a broker restarts or a leader is elected",
        "a delivery time-out of minutes, retries left to it, and idempotence",
    ),
    Risk(
        "HF104",
        "the producer's buffer dies with its process",
        "error",
        "messages that were handed to the client and still in its memory when the process ended",
        "flush before exit; a spool on disk where the process may be killed",
    ),
    Risk(
        "HF105",
        "a full buffer drops messages",
        "warning",
        "messages produced while brokers are away and the buffer is full",
        "wait with a deadline when the buffer is full, then spool to disk",
    ),
    Risk(
        "HF106",
        "retries duplicate and reorder",
        "warning",
        "nothing is lost, but a retried batch is stored twice, or behind a later one: an old value of a key wins",
        "enable.idempotence=true",
    ),
    Risk(
        "HF107",
        "a fatal send error is swallowed",
        "error",
        "messages that can never be sent (too large, not permitted, not serialisable), without a trace",
        "let the error surface, and keep the failed message aside",
    ),
    Risk(
        "HF108",
        "a zombie producer goes on writing",
        "warning",
        "order and exactly-once: an instance that was replaced writes after its successor",
        "a transactional.id of its own for each instance that must be fenced",
    ),
    Risk(
        "HF109",
        "writes that belong together are half visible",
        "warning",
        "the other half: a crash between two sends leaves one of them alone",
        "one transaction around them",
    ),
    Risk(
        "HF201",
        "too few replicas",
        "warning",
        "the whole partition with one disk (factor 1), or with the second while the first is replaced (factor 2)",
        "a replication factor of 3",
    ),
    Risk(
        "HF202",
        "a leader that is alone acknowledges alone",
        "error",
        "messages acknowledged while only the leader was in sync, when its disk is lost or another is elected",
        "min.insync.replicas=2",
    ),
    Risk(
        "HF203",
        "every replica must be up to write",
        "warning",
        "nothing acknowledged; but one broker down refuses all writes, and producers drop what they cannot hold",
        "a replication factor one above min.insync.replicas",
    ),
    Risk(
        "HF204",
        "a replica that is behind may lead",
        "error",
        "committed messages that the new leader never had: every replica is cut back to its log",
        "unclean.leader.election.enable=false",
    ),
    Risk(
        "HF205",
        "acknowledged from the page cache",
        "note",
        "acknowledged messages when all brokers that hold them lose power together",
        "flush before acknowledging, or brokers that do not share their power",
    ),
    Risk(
        "HF206",
        "retention removes what was not read",
        "error",
        "messages older than retention that a stopped or slow group had not read yet",
        "retention longer than the longest outage, and an alarm on the time left",
    ),
    Risk(
        "HF207",
        "a mistyped topic creates itself",
        "warning",
        "messages sent to a topic nobody reads, kept with whatever defaults the broker has",
        "auto.create.topics.enable=false",
    ),
    Risk(
        "HF208",
        "size limits disagree",
        "warning",
        "messages too large for the next hop: refused after they were accepted, or never fetched",
        "the same limit from producer to consumer",
    ),
    Risk(
        "HF209",
        "a leader that is cut off acknowledges",
        "error",
        "messages acknowledged by a leader that has been replaced: they are discarded when it returns",
        "acks=all with min.insync.replicas=2",
    ),
    Risk(
        "HF210",
        "compaction overtakes a reader",
        "warning",
        "older values of a key, and tombstones, that a late reader still needed",
        "min.compaction.lag.ms and delete.retention.ms longer than the longest delay",
    ),
    Risk(
        "HF211",
        "committed offsets vanish",
        "warning",
        "a group's committed offsets: it starts anew, and skips or repeats everything by its reset policy",
        "a replicated offsets topic, offsets.retention.minutes longer than the longest pause",
    ),
    Risk(
        "HF212",
        "the broker's disk is temporary",
        "error",
        "everything the broker stores, when the machine restarts or the container is replaced",
        "a data directory on a disk, a volume or a claim that stays",
    ),
    Risk(
        "HF301",
        "committed before it is handled",
        "error",
        "messages that were read and committed but not yet handled when the process ends",
        "commit after handling",
    ),
    Risk(
        "HF302",
        "threads handle, the poll loop commits",
        "error",
        "messages still in a thread's hands when the loop commits past them and the process ends",
        "commit per partition only up to what every thread has finished",
    ),
    Risk(
        "HF303",
        "a later commit overtakes a failed message",
        "error",
        "a message whose handling failed, once a later one of its partition is committed",
        "commit only the contiguous prefix of what was handled",
    ),
    Risk(
        "HF304",
        "new partitions are read from their end",
        "warning",
        "the first messages of partitions added while the group runs",
        "auto.offset.reset=earliest",
    ),
    Risk(
        "HF305",
        "a group without committed offsets starts at the end",
        "warning",
        "what is in the topic already when a group has no valid committed offset: first start, expired, out of range",
        "auto.offset.reset=earliest, or none and a decision",
    ),
    Risk(
        "HF306",
        "a poison message is skipped, or blocks for ever",
        "error",
        "the message that could not be handled; or everything behind it",
        "a bounded number of retries, then a dead-letter topic",
    ),
    Risk(
        "HF307",
        "two owners of a partition",
        "warning",
        "order, and committed offsets: the old owner commits or works on after a rebalance",
        "drain, commit and release when partitions are revoked",
    ),
    Risk(
        "HF308",
        "handling outlasts the poll interval",
        "warning",
        "membership: the partition goes to another member, work is done twice, and commits fail",
        "pause and keep polling, or fewer records per poll",
    ),
    Risk(
        "HF309",
        "the last commit is not waited for",
        "warning",
        "nothing is lost, but what was handled since the last commit that arrived is handled again",
        "one synchronous commit before close",
    ),
    Risk(
        "HF310",
        "aborted messages are read",
        "warning",
        "correctness: messages of transactions that were rolled back are taken for real",
        "isolation.level=read_committed",
    ),
    Risk(
        "HF311",
        "effect and committed offset are not one",
        "warning",
        "an effect done twice, or not at all, when the process ends between the effect and the commit",
        "both in one transaction, or an idempotent key",
    ),
    Risk(
        "HF401",
        "lost ranges are hidden",
        "error",
        "ranges that retention or a deletion removed before they were read: the query goes on in silence",
        "failOnDataLoss=true",
    ),
    Risk(
        "HF402",
        "a stream begins at the end",
        "warning",
        "everything already in the topic at the first start",
        "startingOffsets=earliest",
    ),
    Risk(
        "HF403",
        "the checkpoint is lost, shared or temporary",
        "error",
        "the stream's offsets and state: it starts anew and skips or repeats",
        "a durable checkpoint of its own for each query",
    ),
    Risk(
        "HF404",
        "a replayed batch is written twice",
        "warning",
        "nothing is lost, but the rows of a batch that failed half-way stand twice in the sink",
        "a sink keyed by the batch",
    ),
    Risk(
        "HF405",
        "Spark's own Kafka sink repeats",
        "warning",
        "nothing is lost, but records of a task or batch that is tried again are sent again",
        "a transactional sink with a ledger",
    ),
    Risk(
        "HF406",
        "what cannot be parsed vanishes",
        "warning",
        "records that do not parse: they turn into nulls, and the next filter drops them",
        "a dead-letter route",
    ),
    Risk(
        "HF407",
        "late records are dropped unseen",
        "note",
        "records later than the watermark allows",
        "a route for late records, counted",
    ),
    Risk(
        "HF408",
        "a recreated topic is taken for the old one",
        "warning",
        "the first messages of the new topic: old offsets point past them",
        "the topic's id kept with the offsets",
    ),
    Risk(
        "HF409",
        "the source reads uncommitted messages",
        "warning",
        "correctness: messages of aborted transactions reach the sink",
        "kafka.isolation.level=read_committed",
    ),
    Risk(
        "HF410",
        "a replayed batch computes something else",
        "warning",
        "agreement between a batch and its repetition: rows differ, move to another partition or vanish",
        "steps that give the same result each time",
    ),
    Risk(
        "HF411",
        "an open transaction holds readers back",
        "error",
        "what lies behind the transaction's first message, once retention passes it unread",
        "transaction time-outs; end the transaction of the producer that hangs",
    ),
)

RISKS: Final[Mapping[str, Risk]] = MappingProxyType({risk.id: risk for risk in _TABLE})
"""By identifier, in the order of the table."""

PAGES: Final[frozenset[str]] = frozenset(RISKS) - {"HF000"}
"""Risks whose page is in docs/risks: reports name a page only when there is one."""
EXPERIMENTS: Final[frozenset[str]] = frozenset(RISKS) - {"HF000"}
"""Risks that `holdfast lab run` can show: reports name the command only when it works."""
