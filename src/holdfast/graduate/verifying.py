"""The manifest held against a running Kafka: every record, every committed offset, every producer and setting.

- A partition is read from its log start to the recorded end, and the digest of every block is computed from the bytes
  that came over the wire. Batches are served as they are stored, so equal bytes are equal records, in order, at their
  offsets.
- A compacted topic is read to its end. The last record of each key is there and unchanged, or has a newer one behind
  it, or was a tombstone.
- What lies below the log start now was taken by retention or by request since: it is named, with its offsets.
- Committed offsets are where they were or further on; producers and transactional ids are known with their epochs.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.admin.brokers import Brokers, committed_offsets
from holdfast.admin.errors import ClusterError, Refused, check
from holdfast.admin.settings import parse_settings
from holdfast.broker.log.checkpoints import encode_uuid
from holdfast.errors import InvalidRecords
from holdfast.graduate.fetching import Ends, batches, ends_of
from holdfast.graduate.report import Fault, Report
from holdfast.manifest.folding import (
    Latest,
    RecordDigest,
    decode_table,
    key_digest,
    keys_of_log,
    record_digest,
)
from holdfast.manifest.model import Block, Manifest, ManifestError, PartitionManifest, TopicManifest, to_json
from holdfast.wire.api_keys import DESCRIBE_CONFIGS, DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS
from holdfast.wire.batch import parse_records, records_bytes

PRODUCER_EXPIRATION_MS: Final = 86_400_000
"""Kafka's `producer.id.expiration.ms`."""
CHANGED_BY_STEPS: Final = frozenset({"min.insync.replicas", "flush.messages"})
FACTOR: Final = 3
MIN_INSYNC: Final = 2
FLUSH_DEFAULT: Final = "log.flush.interval.messages"
TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4
DYNAMIC_TOPIC_CONFIG: Final = 1


class Stretch(NamedTuple):
    """Offsets whose batches have one digest."""

    first: int
    end: int
    records: int
    sha256: str


def verify(
    manifest: Manifest,
    directory: str,
    settings: Mapping[str, str],
    taken: frozenset[tuple[str, str]] = frozenset(),
) -> Report:
    """`directory` holds the key tables; `taken` are settings that the hand-over took out, by resource and name."""
    began = time.monotonic()
    report = Report(
        subject=f"graduation-{manifest.cluster_id}",
        cluster_id=manifest.cluster_id,
        bootstrap_servers=settings["bootstrap.servers"],
        manifest_sha256=str(to_json(manifest)["sha256"]),
    )
    with Brokers(parse_settings({"client.id": "holdfast-graduate", **settings})) as brokers:
        _Verification(manifest, directory, brokers, report, taken).run()
    report.seconds = time.monotonic() - began
    return report


class _Verification:
    def __init__(
        self,
        manifest: Manifest,
        directory: str,
        brokers: Brokers,
        report: Report,
        taken: frozenset[tuple[str, str]],
    ) -> None:
        self._manifest = manifest
        self._directory = directory
        self._brokers = brokers
        self._report = report
        self._taken = taken

    def run(self) -> None:
        answer = self._brokers.metadata(None, lowest=10)
        if answer.cluster_id != self._manifest.cluster_id:
            self._report.find(
                Fault.ALTERED, "cluster", f"its id is {answer.cluster_id}, not {self._manifest.cluster_id}"
            )
            return
        there = {topic.name: topic for topic in answer.topics}
        for topic in self._manifest.topics:
            self._report.counts.topics += 1
            found = there.get(topic.name)
            if found is None:
                self._report.find(Fault.LOST, topic.name, "there is no such topic: lost, or deleted since")
            elif encode_uuid(found.topic_id.bytes) != topic.topic_id:
                self._report.find(
                    Fault.LOST, topic.name, "another topic has its name: this one was deleted, or lost"
                )
            else:
                self._topic(topic, found)
        self._settings()
        self._groups()
        self._transactions()
        self._replicas(answer.topics)
        names = {topic.name for topic in self._manifest.topics}
        made = sorted(name for name in there if name not in names)
        if made:
            self._report.notes.append(f"topics made since: {', '.join(made)}")

    # Records

    def _topic(self, topic: TopicManifest, found: Any) -> None:
        numbers = {each.partition_index for each in found.partitions}
        for partition in topic.partitions:
            name = f"{topic.name}-{partition.index}"
            counts = self._report.counts
            counts.partitions += 1
            if partition.index not in numbers:
                self._report.find(Fault.LOST, name, "there is no such partition")
                continue
            try:
                ends = ends_of(self._brokers, topic.name, partition.index)
                if ends.end < partition.end_offset:
                    self._report.find(
                        Fault.LOST, name, f"it ends at {ends.end}, and ended at {partition.end_offset}"
                    )
                if topic.is_compacted:
                    self._keys(topic, found.topic_id, partition, ends)
                else:
                    self._blocks(topic, found.topic_id, partition, ends)
                self._producers(topic.name, partition, ends)
            except (ClusterError, InvalidRecords) as error:
                self._report.find(Fault.UNPROVEN, name, f"it cannot be read: {error}")

    def _blocks(self, topic: TopicManifest, topic_id: UUID, partition: PartitionManifest, ends: Ends) -> None:
        name = f"{topic.name}-{partition.index}"
        counts = self._report.counts
        expired_to = 0
        wanted: list[Stretch] = []
        for stretch in _stretches(partition):
            counts.records += stretch.records
            if stretch.end <= ends.start:
                counts.records_expired += stretch.records
                expired_to = stretch.end
            elif stretch.first < ends.start:
                self._report.find(
                    Fault.UNPROVEN,
                    name,
                    f"offsets {ends.start} to {stretch.end - 1}: the log starts within them now, so their digest "
                    "cannot be computed; what is there has sound checksums",
                )
            else:
                wanted.append(stretch)
        if expired_to:
            self._report.expired.append(
                f"{name}: offsets {partition.log_start} to {max(expired_to, ends.start) - 1} were removed since; "
                f"the log starts at {ends.start}"
            )
        if wanted:
            self._compare(topic, topic_id, partition, wanted, ends)

    def _compare(
        self,
        topic: TopicManifest,
        topic_id: UUID,
        partition: PartitionManifest,
        wanted: list[Stretch],
        ends: Ends,
    ) -> None:
        counts = self._report.counts
        found = [hashlib.sha256() for _ in wanted]
        place = 0
        end = min(wanted[-1].end, ends.end)
        for batch in batches(self._brokers, topic.name, topic_id, partition.index, wanted[0].first, end):
            while place < len(wanted) and batch.header.base_offset >= wanted[place].end:
                place += 1
            if place == len(wanted):
                break
            found[place].update(batch.data)
            counts.bytes_read += len(batch.data)
        for stretch, digest in zip(wanted, found, strict=True):
            if digest.hexdigest() == stretch.sha256:
                counts.records_proven += stretch.records
            else:
                empty = digest.digest() == hashlib.sha256().digest()
                self._report.find(
                    Fault.LOST if empty else Fault.ALTERED,
                    f"{topic.name}-{partition.index}",
                    f"offsets {stretch.first} to {stretch.end - 1}: "
                    + (
                        f"none of {stretch.records} records is there"
                        if empty
                        else "the bytes are not those of the manifest"
                    ),
                )

    def _keys(self, topic: TopicManifest, topic_id: UUID, partition: PartitionManifest, ends: Ends) -> None:
        name = f"{topic.name}-{partition.index}"
        counts = self._report.counts
        table = self._table(partition)
        counts.keys += len(table)
        same: set[bytes] = set()
        log = keys_of_log()
        for batch in batches(self._brokers, topic.name, topic_id, partition.index, ends.start, ends.end):
            counts.bytes_read += len(batch.data)
            log.add(batch)
            header = batch.header
            if header.is_control or header.base_offset >= partition.end_offset:
                continue
            for record in parse_records(records_bytes(batch.data, header)):
                if record.key is None:
                    continue
                key = key_digest(record.key)
                recorded = table.get(key)
                if recorded is None or recorded.offset != header.base_offset + record.offset_delta:
                    continue
                if recorded.content == record_digest(header, record):
                    same.add(key)
                else:
                    self._report.find(
                        Fault.ALTERED, name, f"offset {recorded.offset}: not the record of the manifest"
                    )
                    same.discard(key)
        counts.keys_proven += len(same)
        missing = [(key, recorded) for key, recorded in table.items() if key not in same]
        for key, recorded in missing:
            newest = log.latest.get(key)
            if newest is not None and newest.offset > recorded.offset:
                counts.keys_superseded += 1
            elif recorded.content.is_tombstone or recorded.offset < ends.start:
                counts.keys_expired += 1
            else:
                self._report.find(
                    Fault.LOST, name, f"offset {recorded.offset}: the last record of its key is gone"
                )

    def _table(self, partition: PartitionManifest) -> dict[bytes, Latest[RecordDigest]]:
        wanted = partition.key_table
        if wanted is None:
            raise ManifestError("a compacted partition has no table of its keys")
        path = os.path.join(self._directory, wanted.file)
        with open(path, "rb") as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() != wanted.sha256:
            raise ManifestError(f"{path} was changed: it does not have the hash that the manifest says")
        return decode_table(data, path)

    # Producers, transactions, groups

    def _producers(self, topic: str, partition: PartitionManifest, ends: Ends) -> None:
        if not partition.producers:
            return
        fields = {"topics": [{"name": topic, "partition_indexes": [partition.index]}]}
        name = f"{topic}-{partition.index}"

        def ask() -> Any:
            leader = self._brokers.leader_of(topic, partition.index)
            found = self._brokers.ask_broker(leader, DESCRIBE_PRODUCERS, fields).topics[0].partitions[0]
            check(found.error_code, f"cannot ask for the producers of {name}")
            return found.active_producers

        known = {each.producer_id: each for each in self._brokers.retried(ask)}
        counts = self._report.counts
        for producer in partition.producers:
            counts.producers += 1
            there = known.get(producer.producer_id)
            who = f"producer {producer.producer_id}"
            if there is None:
                age_ms = time.time_ns() // 1_000_000 - producer.timestamp_ms
                if age_ms > PRODUCER_EXPIRATION_MS or producer.last_offset < ends.start:
                    counts.producers_expired += 1
                else:
                    self._report.find(Fault.LOST, name, f"nothing is known of {who}")
            elif there.producer_epoch < producer.epoch:
                self._report.find(
                    Fault.ALTERED, name, f"{who} has epoch {there.producer_epoch}, had {producer.epoch}"
                )
            elif (
                there.producer_epoch == producer.epoch
                and there.last_sequence != producer.last_sequence
                and ends.end == partition.end_offset
            ):
                self._report.find(
                    Fault.ALTERED,
                    name,
                    f"{who} has sequence {there.last_sequence}, had {producer.last_sequence}; "
                    "nothing was written since",
                )

    def _transactions(self) -> None:
        for wanted in self._manifest.transactions:
            self._report.counts.transactions += 1
            subject = f"transactional id {wanted.transactional_id}"

            def ask(key: str = wanted.transactional_id) -> Any:
                fields = {"transactional_ids": [key]}
                answer = self._brokers.ask_coordinator("transaction", key, DESCRIBE_TRANSACTIONS, fields)
                state = answer.transaction_states[0]
                check(state.error_code, f"cannot ask for transactional id {key}")
                return state

            try:
                found = self._brokers.retried(ask)
            except Refused as error:
                is_gone = error.code is ErrorCode.transactional_id_not_found
                self._report.find(Fault.LOST if is_gone else Fault.UNPROVEN, subject, str(error))
                continue
            if found.producer_id == wanted.producer_id and found.producer_epoch < wanted.producer_epoch:
                self._report.find(
                    Fault.ALTERED, subject, f"epoch {found.producer_epoch}, was {wanted.producer_epoch}"
                )

    def _groups(self) -> None:
        names = {topic.name for topic in self._manifest.topics}
        for group in self._manifest.groups:
            if not group.offsets:
                continue
            try:
                found = committed_offsets(self._brokers, group.group)
            except Refused as error:
                self._report.find(Fault.UNPROVEN, f"group {group.group}", str(error))
                continue
            for wanted in group.offsets:
                if wanted.topic not in names:
                    continue  # the topic was deleted before the hand-over
                self._report.counts.offsets += 1
                now = found.get((wanted.topic, wanted.partition))
                place = f"{wanted.topic}-{wanted.partition}"
                if now is None:
                    self._report.find(
                        Fault.LOST,
                        f"group {group.group}",
                        f"its committed offset {wanted.offset} in {place} is gone",
                    )
                elif now[0] > wanted.offset:
                    self._report.counts.offsets_moved_on += 1
                elif now[0] < wanted.offset:
                    self._report.find(
                        Fault.ALTERED,
                        f"group {group.group}",
                        f"it stands at {now[0]} in {place}, and stood at {wanted.offset}",
                    )

    # Settings and replicas

    def _settings(self) -> None:
        asked = [topic for topic in self._manifest.topics if topic.settings]
        for topic in asked:
            try:
                found = self._configs(topic.name)
            except Refused as error:
                self._report.find(Fault.UNPROVEN, f"topic {topic.name}", str(error))
                continue
            for name, value in topic.settings.items():
                if (f"topic {topic.name}", name) in self._taken or name in CHANGED_BY_STEPS:
                    continue
                self._report.counts.settings += 1
                now = found.get(name)
                if now is None or now.value != value:
                    self._report.find(
                        Fault.ALTERED,
                        f"topic {topic.name}",
                        f"{name} is {'not set' if now is None else now.value}, and was {value}: lost, or altered since",
                    )

    def _configs(self, topic: str) -> dict[str, Any]:
        described = _described(TOPIC_RESOURCE, topic, None)
        result = self._brokers.ask_any(DESCRIBE_CONFIGS, described, lowest=1).results[0]
        check(result.error_code, f"cannot read the settings of topic {topic}")
        return {each.name: each for each in result.configs}

    def _replicas(self, topics: Any) -> None:
        few = sorted(
            topic.name
            for topic in topics
            if any(len(partition.replica_nodes) < FACTOR for partition in topic.partitions)
        )
        loose = []
        for topic in topics:
            try:
                found = self._configs(topic.name).get("min.insync.replicas")
            except Refused as error:
                self._report.replicas = f"not examined: {error}"
                return
            if found is not None and int(found.value or 1) < MIN_INSYNC:
                loose.append(topic.name)
        broker = self._brokers.broker_ids()[0]
        described = _described(BROKER_RESOURCE, str(broker), [FLUSH_DEFAULT])
        flush = self._brokers.ask_broker(broker, DESCRIBE_CONFIGS, described, lowest=1).results[0]
        flushes = any(each.value == "1" for each in flush.configs)
        if not few and not loose:
            text = "every topic has 3, and 2 must have a message"
            self._report.replicas = text + (f"; {FLUSH_DEFAULT}=1 can go (step 4)" if flushes else "")
            return
        text = f"{len(few)} topics have fewer than {FACTOR}, {len(loose)} do with fewer than {MIN_INSYNC} in sync"
        if flushes:
            self._report.replicas = f"{text}; until then {FLUSH_DEFAULT}=1 has every broker flush first"
        else:
            self._report.replicas = (
                f"{text}, and {FLUSH_DEFAULT} is not 1: a power failure may take acknowledged messages"
            )


def _described(kind: int, name: str, keys: list[str] | None) -> dict[str, Any]:
    return {
        "resources": [{"resource_type": kind, "resource_name": name, "configuration_keys": keys}],
        "include_synonyms": False,
        "include_documentation": False,
    }


def _stretches(partition: PartitionManifest) -> Iterator[Stretch]:
    """What can be read over the wire, from the log start on."""
    first = 0
    for segment in partition.segments:
        first = segment.base_offset
        for block in segment.blocks:
            if block.offset <= partition.log_start:
                pass  # below the log start, before the hand-over
            elif first < partition.log_start:
                head: Block = partition.head or block
                yield Stretch(partition.log_start, block.offset, head.records, head.sha256)
            else:
                yield Stretch(first, block.offset, block.records, block.sha256)
            first = block.offset
