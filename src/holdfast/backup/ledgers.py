"""Pipelines beside a restored cluster, by the ledgers in their sinks.

A sink outside the cluster still has what it had: its ledger may count messages that are lost. A Kafka sink in the
cluster was restored with its ledger, and so was the dead letter sink that every pipeline has: their rows and their
source are of one moment, but the pipeline's home and its other sinks know that they had more. A run refuses both; here
they are found before, with what lets the pipeline go on.

Ledgers in the cluster are read from the backup. Nobody needs to have started what was restored.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from holdfast.audit.sinks.opening import open_dead_letters, open_sink
from holdfast.backup.outside import Beyond, NotExamined
from holdfast.backup.repository import FS, Backup, Repository, StoredPartition
from holdfast.broker.log.scan import read_batches
from holdfast.errors import HoldfastError
from holdfast.manifest.folding import LastByKey
from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.definition.model import KafkaSink
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME, dead_letter_sink, ledger_topic
from holdfast.pipeline.engine.deployment import Deployment
from holdfast.pipeline.engine.known_sinks import NOTE
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.sinks.kafka_ledger import LedgerRecord, standing_of


def pipelines_beyond(
    repository: Repository,
    backup: Backup,
    definitions: Iterable[str],
    goes_on_at: Mapping[tuple[str, int], int],
) -> Iterator[Beyond | NotExamined]:
    """`goes_on_at` is the first offset that each restored partition gives out."""
    for path in definitions:
        yield from _Pipeline(path, repository, backup, goes_on_at).beyond()


@dataclass
class _Pipeline:
    path: str
    repository: Repository
    backup: Backup
    goes_on_at: Mapping[tuple[str, int], int]
    deployed: Deployment = field(init=False)
    ledgers: dict[str, Entry | None] = field(default_factory=dict, init=False)
    """The newest entry of each sink that could be read."""
    restored: set[str] = field(default_factory=set, init=False)
    """Sinks in the cluster that was restored."""

    def __post_init__(self) -> None:
        self.deployed = Deployment.of(load_pipeline(self.path).definition)

    def beyond(self) -> Iterator[Beyond | NotExamined]:
        yield from self._read_ledgers()
        for name, entry in self.ledgers.items():
            if entry is not None:
                yield from self._ahead_of_source(name, entry)
        if os.path.isdir(self.deployed.home_path):
            known = self.deployed.known_sinks()
            for name in sorted(self.restored):
                why = known.behind(name, self.ledgers)
                if why is not None:
                    entry = self.ledgers[name]
                    yield Beyond(
                        self._called(name),
                        ledger_topic(self.deployed.definition.name, name),
                        known.entries(name, self.ledgers),
                        0 if entry is None else entry.number + 1,
                        f"{why}. {self._advice(name)}",
                    )
        elif self.restored:
            yield NotExamined(
                f"home of pipeline {self.deployed.definition.name}",
                f"there is no {self.deployed.home_path} on this machine, which knows how far the sinks in the cluster "
                "had come; `holdfast pipeline run` tells",
            )

    def _called(self, name: str) -> str:
        return f"sink {name} of pipeline {self.deployed.definition.name}"

    # Ledgers

    def _read_ledgers(self) -> Iterator[NotExamined]:
        definition = self.deployed.definition
        for sink in (dead_letter_sink(definition), *definition.sinks):
            name = sink.name
            try:
                if isinstance(sink, KafkaSink) and sink.bootstrap in (None, definition.source.bootstrap):
                    self.ledgers[name] = self._in_backup(name)
                    self.restored.add(name)
                    continue
                opened = self._opened(sink)
                with closing(opened) as reader:
                    self.ledgers[name] = next(reversed(reader.entries()), None)
            except (HoldfastError, OSError) as error:
                yield NotExamined(self._called(name), str(error))

    def _opened(self, sink: Any) -> Any:
        definition, settings = self.deployed.definition, self.deployed.settings
        if sink.name == DEAD_LETTER_NAME:
            return open_dead_letters(definition, settings)
        return open_sink(definition, sink, settings)

    def _in_backup(self, name: str) -> Entry | None:
        """The newest entry that every writer has, by the last committed record of each partition of the ledger."""
        topic = ledger_topic(self.deployed.definition.name, name)
        partitions = sorted(
            (each for each in self.backup.partitions if each.topic == topic), key=lambda each: each.index
        )
        return standing_of([self._last_record(each) for each in partitions]).last

    def _last_record(self, partition: StoredPartition) -> LedgerRecord | None:
        keys: LastByKey[bytes | None] = LastByKey(bytes, lambda _, record: record.value)
        for segment in partition.segments:
            with closing(FS.open(self.repository.file(segment.file), "read")) as file:
                for batch in read_batches(file, segment.bytes):
                    keys.add(batch)
        newest = max(keys.latest.values(), key=lambda each: each.offset, default=None)
        if newest is None or newest.content is None:
            return None
        try:
            return LedgerRecord.decode(newest.content)
        except (ValueError, KeyError) as error:
            raise HoldfastError(
                f"offset {newest.offset} of {partition.name} is no entry of a ledger ({error})"
            ) from error

    # What is wrong

    def _ahead_of_source(self, name: str, entry: Entry) -> Iterator[Beyond]:
        stored = {(UUID(hex=each.topic_id), each.index): each for each in self.backup.partitions}
        names = {each.topic for each in self.backup.partitions}
        for place, position in sorted(entry.positions.at.items()):
            partition = stored.get((place.topic_id, place.partition))
            end = 0 if partition is None else partition.end_offset
            if position.offset <= end:
                continue
            if partition is None and place.topic not in names:
                advice = f"the backup has no topic {place.topic}: it was made later, or is another cluster's"
            elif partition is None:
                advice = f"the backup has another topic of that name: holdfast pipeline reset {self.path}"
            elif position.offset <= self.goes_on_at[place.topic, place.partition]:
                advice = (
                    f"rows of offsets from {end} on are of messages that are lost (their lineage names them). The "
                    "pipeline goes on by itself: these offsets are left out, and none is given to another message"
                )
            else:
                advice = (
                    f"rows of offsets from {end} on are of messages that are lost (their lineage names them), and a "
                    "run refuses to go on. Restore once more, to an empty directory, with "
                    f"--skip-offsets={position.offset - end} or more: then no offset is given twice, and it goes on"
                )
            yield Beyond(self._called(name), f"{place.topic}-{place.partition}", position.offset, end, advice)

    def _advice(self, name: str) -> str:
        if any(entry is not None for other, entry in self.ledgers.items() if other not in self.restored):
            return (
                f"holdfast pipeline run {self.path} --accept-loss={name} lets it go on where the other sinks stand; "
                "what it had written after the backup is lost"
            )
        return (
            f"All sinks of the pipeline were restored in one moment with their source. Move {self.deployed.home_path}/"
            f"{NOTE} away, and holdfast pipeline run {self.path} goes on where they stand"
        )
