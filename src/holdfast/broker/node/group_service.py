"""Groups in a node: the coordinators of `__consumer_offsets`, and what they see of the cluster.

`Silences` counts how long members of groups have been silent, over starts of the broker. Every start gives every
member a whole session: a broker that is killed more often than a session lasts would keep a dead member, and the
partitions nobody reads, for ever. So a small file notes who has not been heard of, and the next start gives these
what is left of their sessions. Somebody who is heard of is not in the next note.

Only who was silent since the start is noted, every ten seconds while there is anybody: nothing is written where all
are alive, nor once their sessions are over. Whoever is in the note has ten seconds at least, which clients need to
find the broker again: under kills closer than that nobody is missed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final, NamedTuple
from uuid import UUID

from holdfast.atomic import read_whole, write_atomically
from holdfast.broker.groups.coordinator import GroupCoordinator
from holdfast.broker.groups.model import CoordinatorContext, TopicFacts
from holdfast.broker.groups.regex import Matches
from holdfast.broker.metadata.image import Resource, ResourceType, TopicImage
from holdfast.broker.node.context import Answer, Fields, Later
from holdfast.broker.node.coordination import (
    Coordination,
    CoordinatorPartition,
    InternalTopic,
    ProvenSchedule,
    Refusal,
    outcome_unknown,
)
from holdfast.broker.node.directories import REFUSED_ERRNOS
from holdfast.broker.node.loggers import GROUPS
from holdfast.broker.node.metadata_log import MetadataLog
from holdfast.broker.node.services import CoordinatorServices
from holdfast.saying import named
from holdfast.seams import FileSystem, Now

SILENCES_FILE: Final = "holdfast.silences"
NOTED_EVERY_MS: Final = 10_000
NOTED_MAX: Final = 10_000
"""Members in one note: a megabyte or so. Others begin anew."""

Member = tuple[str, str]
"""A group, and one of its members."""


class Silences:
    def __init__(self, fs: FileSystem, metadata: MetadataLog) -> None:
        self._fs = fs
        self._metadata = metadata
        self._ms: dict[Member, int] = {}

    @property
    def _path(self) -> str:
        return f"{self._metadata.hosted.directory.path}/{SILENCES_FILE}"

    def read(self) -> None:
        """A note that is missing, or that nobody can read, costs dead members a whole session more."""
        try:
            noted = json.loads(read_whole(self._fs, self._path))
            self._ms = {(str(group), str(member)): int(ms) for group, member, ms in noted}
        except (OSError, ValueError, TypeError):
            self._ms = {}

    def session_ms(self, group_id: str, member_id: str, timeout_ms: int) -> int:
        """What a member that is found at a start has left of its session."""
        left_ms = timeout_ms - self._ms.get((group_id, member_id), 0)
        return min(timeout_ms, max(left_ms, NOTED_EVERY_MS))

    def note(self, silent: Iterable[Member]) -> bool:
        """Another ten seconds have passed in which these were silent; whether there is anybody."""
        before, self._ms = (
            self._ms,
            {member: self._ms.get(member, 0) + NOTED_EVERY_MS for member in islice(silent, NOTED_MAX)},
        )
        if self._ms or before:
            data = json.dumps([[*member, ms] for member, ms in self._ms.items()]).encode()
            try:
                write_atomically(self._fs, self._path, data)
            except OSError as error:
                if error.errno not in REFUSED_ERRNOS:
                    self._metadata.hosted.directory.take_offline(error)
        return bool(self._ms)


TOPIC: Final = "__consumer_offsets"


class ImageTopics:
    """The topics of the node's image as groups see them."""

    def __init__(self, metadata: MetadataLog) -> None:
        self._metadata = metadata
        self._known: dict[str, _Known] = {}
        self._matches = Matches(self)

    def by_name(self, name: str) -> TopicFacts | None:
        topic = self._metadata.image.topic(name)
        return None if topic is None else self._facts(topic)

    def by_id(self, topic_id: UUID) -> TopicFacts | None:
        topic = self._metadata.image.topics_by_id.get(topic_id)
        return None if topic is None else self._facts(topic)

    def names(self) -> Iterable[str]:
        return [topic.name for topic in self._metadata.image.topics_by_id.values()]

    def matching(self, expression: str) -> frozenset[str]:
        return self._matches.of(expression)

    def changed(self, names: set[str]) -> None:
        """Topics were made, grown or deleted."""
        for name in names:
            self._known.pop(name, None)
        self._matches.changed(names)

    def _facts(self, topic: TopicImage) -> TopicFacts:
        racks = {
            broker.broker_id: broker.rack for broker in self._metadata.image.brokers.values() if broker.rack
        }
        known = self._known.get(topic.name)
        if known is None or known.topic is not topic or known.racks != racks:
            known = self._known[topic.name] = _Known(topic, racks, _facts_of(topic, racks))
        return known.facts


class _Known(NamedTuple):
    """What was made of a topic: looking at each of its partitions again would cost too much for every committed
    offset."""

    topic: TopicImage
    racks: dict[int, str]
    """Of brokers."""
    facts: TopicFacts


def _facts_of(topic: TopicImage, racks: Mapping[int, str]) -> TopicFacts:
    return TopicFacts(
        topic.name,
        topic.topic_id,
        len(topic.partitions),
        tuple(
            tuple(racks[replica] for replica in partition.replicas if replica in racks)
            for partition in topic.partitions
        )
        if racks
        else (),
    )


class GroupService(Coordination[GroupCoordinator]):
    def __init__(self, node: CoordinatorServices) -> None:
        super().__init__(node, self._internal_topic, self._machine)
        self._topics = ImageTopics(node.metadata)
        self._silences = Silences(node.seams.fs, node.metadata)
        self._deleted: dict[str, int] = {}
        """Topics whose committed offsets are to go, with the end of the metadata log that says so."""

    def _internal_topic(self) -> InternalTopic:
        config = self._node.metadata.settings.broker
        return InternalTopic(
            TOPIC,
            config.offsets_topic_num_partitions,
            config.offsets_topic_segment_bytes,
            (("cleanup.policy", "compact"), ("compression.type", "producer")),
        )

    def _machine(self, journal: CoordinatorPartition) -> GroupCoordinator:
        node = self._node
        return GroupCoordinator(
            CoordinatorContext(
                journal=journal,
                schedule=ProvenSchedule(node),
                randomness=node.seams.randomness,
                topics=self._topics,
                settings=lambda: node.metadata.settings.broker,
                overrides=self._overrides,
                say=named(node.say, GROUPS),
                first_session_ms=self._silences.session_ms,
            )
        )

    def load(self, now: Now) -> None:
        self._silences.read()
        super().load(now)
        self._await_silences(now.monotonic_ms)

    def _await_silences(self, now_ms: int) -> None:
        def note() -> None:
            silent = (each for coordinator in self for each in coordinator.machine.silent_members())
            if self._silences.note(silent):
                self._await_silences(now_ms + NOTED_EVERY_MS)

        self._node.timers.at(now_ms + NOTED_EVERY_MS, note)

    def _overrides(self, group_id: str) -> Mapping[str, str]:
        return self._node.metadata.image.settings(Resource(ResourceType.GROUP, group_id))

    @property
    def topics(self) -> ImageTopics:
        return self._topics

    def topics_changed(self, names: set[str], now: Now) -> None:
        """Topics were made, grown or deleted: groups that read them follow."""
        if TOPIC in names:
            self.forget_found()
        self._topics.changed(names)
        for coordinator in self:
            coordinator.machine.topics_changed(names, now)

    def topics_deleted(self, names: set[str], now: Now) -> None:
        """Committed offsets go with their topics, but not before the topics are gone for good.

        A deletion that is not durable may be undone by a crash, and the committed offsets would be missed. All that
        is made durable by one flush costs one look through the committed offsets.
        """
        metadata = self._node.metadata.hosted
        is_awaited = bool(self._deleted)
        self._deleted |= dict.fromkeys(names, metadata.log.end_offset)
        if not is_awaited:
            self._await_deletions(now)

    def _await_deletions(self, now: Now) -> None:
        offsets = self._node.metadata.hosted.offsets

        def forget(error: Exception | None) -> None:
            if error is not None:
                self._deleted.clear()
                return
            gone = {name for name, end_offset in self._deleted.items() if offsets.is_committed(end_offset)}
            self._deleted = {name: end for name, end in self._deleted.items() if name not in gone}
            if self._deleted:
                self._await_deletions(now)
            if gone:
                for coordinator in self:
                    coordinator.machine.topics_deleted(gone, now)

        offsets.when_committed(min(self._deleted.values()), forget)


def answer_all(journals: Iterable[CoordinatorPartition], fields: Fields, refusal: Refusal) -> Answer:
    """What several machines have said just now, when all of it may leave."""
    waiting = [journal for journal in dict.fromkeys(journals) if not journal.is_durable]
    if not waiting:
        return fields
    later = Later()
    left = len(waiting)

    def pass_gate(error: Exception | None) -> None:
        nonlocal left
        left -= 1
        if error is not None:
            later.resolve(refusal(outcome_unknown(error)))
        elif not left:
            later.resolve(fields)

    for journal in waiting:
        journal.when_durable(later.step(pass_gate))
    return later
