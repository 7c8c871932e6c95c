"""The settings in force: of the broker, and of each topic. The image tells what was altered while running."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.broker.metadata.image import Resource, ResourceType
from holdfast.broker.metadata.names import REQUIRED_SETTINGS
from holdfast.config.broker import BrokerConfig
from holdfast.config.topic import TopicConfig


class Settings:
    def __init__(self, config: BrokerConfig, altered: Callable[[Resource], Mapping[str, str]]) -> None:
        self.broker = config
        self._altered = altered
        self._topics: dict[str, TopicConfig] = {}

    def topic(self, topic: str) -> TopicConfig:
        config = self._topics.get(topic)
        if config is None:
            altered = self._altered(Resource(ResourceType.TOPIC, topic))
            config = self._topics[topic] = self.broker.topic_config(
                {**altered, **REQUIRED_SETTINGS.get(topic, {})}
            )
        return config

    def forget_topic(self, topic: str) -> None:
        self._topics.pop(topic, None)

    def reload(self) -> None:
        """Take the image's settings of this broker into force; topics resolve theirs afresh."""
        self.broker = self.broker.with_dynamic(
            self._altered(Resource(ResourceType.BROKER, str(self.broker.node_id))),
            self._altered(Resource(ResourceType.BROKER, "")),
        )
        self._topics.clear()
