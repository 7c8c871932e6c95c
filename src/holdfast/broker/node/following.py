"""What is hosted follows the cluster's image: topics are made, grown and deleted, and settings take effect."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.image import Resource, ResourceType, TopicImage
from holdfast.broker.node.commit import GroupCommit
from holdfast.broker.node.group_service import GroupService
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.metadata_log import MetadataLog, TopicsBefore
from holdfast.broker.node.partitions import Deletions, HostedPartitions
from holdfast.errors import ApiError
from holdfast.seams import Now


@dataclass(eq=False, repr=False)
class ImageFollower:
    _metadata: MetadataLog
    _partitions: HostedPartitions
    _deletions: Deletions
    _commit: GroupCommit
    _groups: GroupService

    def follow(self, altered: Set[Resource], before: TopicsBefore, now: Now) -> None:
        """Follow the settings of `altered`, and the topics that were otherwise `before`."""
        if altered:
            self._follow_settings(altered)
        self._follow_topics(before, now)

    def _follow_settings(self, altered: Set[Resource]) -> None:
        """A setting of a topic concerns that topic; one of a broker may be the default of any."""
        settings = self._metadata.settings
        if all(kind is ResourceType.TOPIC for kind, _ in altered):
            for _, topic in altered:
                settings.forget_topic(topic)
            concerned = [hosted for _, topic in altered for hosted in self._hosted(topic)]
        else:
            settings.reload()
            concerned = list(self._partitions)
        for hosted in concerned:
            was_in_groups = hosted.flushes_in_groups
            hosted.log.config = settings.topic(hosted.topic)
            if (
                hosted.flushes_in_groups
                and not was_in_groups
                and hosted.log.needs_flush
                and not hosted.offline
            ):
                # The durable end says that all of this is flushed: now it is to be true.
                self._commit.request(hosted)

    def _hosted(self, topic: str) -> list[HostedPartition]:
        image = self._metadata.image.topic(topic)
        indexes = [partition.index for partition in image.partitions] if image is not None else []
        return [hosted for index in indexes if (hosted := self._partitions.get(topic, index)) is not None]

    def _follow_topics(self, before: TopicsBefore, now: Now) -> None:
        """First what goes, since a new topic may have an old one's name."""
        topics_by_id = self._metadata.image.topics_by_id
        deleted = {
            known.name
            for topic_id, known in before.items()
            if known is not None and topic_id not in topics_by_id
        }
        changed = set(deleted)
        for topic_id, known in before.items():
            if known is not None and topic_id not in topics_by_id:
                self._withdraw(known)
        for topic_id, known in before.items():
            topic = topics_by_id.get(topic_id)
            if topic is None:
                continue
            changed.add(topic.name)
            have = len(known.partitions) if known is not None else 0
            for partition in topic.partitions[have:]:
                self._partitions.create(topic, partition, now)
            for partition in topic.partitions[:have]:
                hosted = self._partitions.get(topic.name, partition.index)
                if hosted is not None:
                    hosted.leader_epoch = partition.leader_epoch
        self._groups.topics_changed(changed, now)
        if deleted:
            self._groups.topics_deleted(deleted, now)

    def _withdraw(self, topic: TopicImage) -> None:
        gone, doomed = self._partitions.withdraw(topic)
        self._metadata.settings.forget_topic(topic.name)
        for hosted in gone:
            hosted.fail(ApiError(ErrorCode.unknown_topic_or_partition, f"topic {topic.name!r} was deleted"))
        self._deletions.begin(doomed)

        def delete(error: Exception | None) -> None:
            if error is not None:
                return
            for segment in (segment for hosted in gone for segment in hosted.log.segments):
                segment.forget_file()
            self._deletions.decide(doomed)

        self._metadata.when_durable(delete)
