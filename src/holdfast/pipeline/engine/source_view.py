"""The source as the loop sees it: which partitions there are, how far they reach, and that they are the same still."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from holdfast.pipeline.core.failures import DefinitionWrong
from holdfast.pipeline.definition.errors import nearest
from holdfast.pipeline.definition.model import Source
from holdfast.pipeline.definition.naming import LEDGER_PREFIX
from holdfast.pipeline.engine.planning import Ledgers, Log
from holdfast.pipeline.engine.spark_checkpoint import PREFIX, beginning_of
from holdfast.pipeline.guards import GuardTripped, check_positions
from holdfast.pipeline.positions import Place, Positions
from holdfast.reader import OffsetSpec, TopicInfo, TopicPartition

if TYPE_CHECKING:
    from holdfast.reader.cluster import Cluster


class SourceView:
    """Asks the cluster; keeps nothing but the question."""

    def __init__(
        self, cluster: Cluster, source: Source, own_topics: Collection[str] = (), directory: str = "."
    ) -> None:
        self.cluster = cluster
        self._source = source
        self._directory = directory
        """Where relative paths start."""
        self._own_topics = frozenset(own_topics)
        """Topics the pipeline writes to: a pattern never matches them, or it would read what it wrote."""

    def look(self, ledgers: Ledgers) -> dict[Place, Log]:
        """How far every partition reaches, after the guards have let the ledgers' positions pass."""
        topics = self._topics()
        self._guard(ledgers, topics)
        self._require(topics)
        partitions = {
            TopicPartition(info.name, number): Place(info.name, info.topic_id, number)
            for info in topics.values()
            for number in info.partitions
        }
        if not partitions:
            return {}
        starts = self.cluster.offsets(partitions, "earliest")
        ends = self.cluster.offsets(partitions, "last-stable")
        return {
            place: Log(starts[partition].offset, ends[partition].offset, ends[partition].leader_epoch)
            for partition, place in partitions.items()
        }

    def beginning(self, logs: Mapping[Place, Log]) -> dict[Place, int]:
        """Where a pipeline starts that no sink knows, as its definition says."""
        starting = self._source.starting
        if starting == "earliest":
            return {place: log.start for place, log in logs.items()}
        if starting == "latest":
            return {place: log.end for place, log in logs.items()}
        if starting.startswith(PREFIX):
            return beginning_of(os.path.join(self._directory, starting.removeprefix(PREFIX)), logs)
        spec: OffsetSpec = starting_ms(starting)
        partitions = {TopicPartition(place.topic, place.partition): place for place in logs}
        answers = self.cluster.offsets(partitions, spec)
        return {
            place: min(answers[partition].offset, logs[place].end)
            if answers[partition].offset >= 0
            else logs[place].end
            for partition, place in partitions.items()
        }

    def found_by(self, pattern: str | None) -> frozenset[str] | None:
        """The topics that this pattern finds now, but for those the pipeline writes; nothing for no pattern."""
        if pattern is None:
            return None
        return frozenset(name for name in self.cluster.topics(pattern=pattern) if not self._is_own(name))

    def is_ours(self, topic: str) -> bool:
        """Whether the definition reads this topic."""
        if self._source.pattern is None:
            return topic in self._source.topics
        return not self._is_own(topic) and re.fullmatch(self._source.pattern, topic) is not None

    def _topics(self) -> dict[str, TopicInfo]:
        if self._source.pattern is None:
            return self.cluster.refresh(self._source.topics)
        found = self.cluster.topics(pattern=self._source.pattern)
        return {name: info for name, info in found.items() if not self._is_own(name)}

    def _is_own(self, topic: str) -> bool:
        return topic in self._own_topics or topic.startswith(LEDGER_PREFIX)

    def _require(self, topics: Mapping[str, TopicInfo]) -> None:
        missing = [name for name in self._source.topics if name not in topics]
        if missing:
            like = nearest(missing[0], self.cluster.topics())
            wrong = DefinitionWrong(f"there is no topic {missing[0]!r} on {self._servers()}{like}")
            wrong.path = ("source", "topics")
            raise wrong

    def _guard(self, ledgers: Ledgers, topics: Mapping[str, TopicInfo]) -> None:
        """Each sink's own positions, since sinks may stand apart."""
        checked: list[Positions] = []
        for sink, entry in ledgers.items():
            if entry is None:
                continue
            standing = Positions(
                {place: at for place, at in entry.positions.at.items() if self.is_ours(place.topic)}
            )
            if standing in checked:
                continue
            checked.append(standing)
            try:
                check_positions(self.cluster, standing, topics, self._source.pattern)
            except GuardTripped as tripped:
                raise GuardTripped(
                    f"sink {sink!r}: {tripped}. Nothing was read or committed; `holdfast pipeline reset` shows what a "
                    "new start would replay, and asks"
                ) from None

    def _servers(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self.cluster.settings.bootstrap_servers)


def starting_ms(text: str) -> int:
    """Milliseconds of an ISO time; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise DefinitionWrong(
            f"source.starting is {text!r}: write earliest, latest, a time such as 2026-01-31T12:00:00Z, "
            "or checkpoint:DIRECTORY"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def read_places(source: Source, positions: Positions) -> list[Place]:
    """Those of the places that the definition still reads: the ones that make the watermark."""
    return [
        place
        for place in positions
        if place.topic in source.topics
        or (source.pattern is not None and re.fullmatch(source.pattern, place.topic) is not None)
    ]


def ends_of(logs: Mapping[Place, Log]) -> dict[Place, int]:
    return {place: log.end for place, log in logs.items()}
