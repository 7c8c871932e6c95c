"""The positions, shown to lag tools as a consumer group's. Written after each batch.

Positions are never read back. The metadata beside them names the heads of the sinks' ledgers, as a place that neither
the sinks nor the home have in common: a start and an audit hold the ledgers against them.

A group that has members belongs to somebody: it is refused. A commit that fails is told and forgotten, since nothing
depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from holdfast.pipeline.core.failures import EnvironmentFails
from holdfast.pipeline.positions import Positions

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S: Final = 10.0
UNDERSTOOD: Final = (
    "bootstrap.servers",
    "client.id",
    "security.protocol",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
    "enable.ssl.certificate.verification",
)
"""What librdkafka is told of the source's settings: the rest is about reading."""


class Monitoring:
    """One group, shown to whoever looks."""

    def __init__(self, settings: Mapping[str, str], group: str, warn: Callable[[str], None]) -> None:
        self.group = group
        self._warn = warn
        known = {name: value for name, value in settings.items() if name in UNDERSTOOD}
        configuration: dict[str, Any] = {**known, "logger": _silent()}
        self._admin = AdminClient(configuration)

    def refuse_members(self) -> None:
        """`EnvironmentFails` if the group is somebody's."""
        try:
            described = self._admin.describe_consumer_groups([self.group], request_timeout=TIMEOUT_S)
            members = described[self.group].result(TIMEOUT_S).members
        except (KafkaException, TimeoutError):
            return  # no such group yet, or it cannot be asked: then nothing can be shown either
        if members:
            raise EnvironmentFails(
                f"the group {self.group!r} has {len(members)} members, so its offsets are not for monitoring: name "
                "another one by `monitoring_group`"
            )

    def show(self, positions: Positions, heads: Sequence[str] = ()) -> None:
        """Commit these positions to the group, and these texts beside them."""
        offsets = [
            TopicPartition(
                place.topic, place.partition, at.offset, heads[number % len(heads)] if heads else None
            )
            for number, (place, at) in enumerate(sorted(positions.at.items()))
        ]
        if not offsets:
            return
        try:
            asked = self._admin.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(self.group, offsets)], request_timeout=TIMEOUT_S
            )
            answer = asked[self.group].result(TIMEOUT_S)
            failed = [each.error for each in answer.topic_partitions if each.error is not None]
            if failed:
                raise KafkaException(failed[0])
        except (KafkaException, TimeoutError) as error:
            self._warn(
                f"positions could not be shown as group {self.group!r}: {error}; nothing depends on it"
            )


def _silent() -> object:
    """librdkafka's own lines would end between those of the progress display."""
    import logging

    logger = logging.getLogger("holdfast.pipeline.monitoring")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger
