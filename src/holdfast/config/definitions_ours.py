"""The settings holdfast adds to Kafka's. A new one is one row here and one line in `descriptions.py`."""

from __future__ import annotations

from holdfast.config.definitions import CLUSTER_WIDE, INT, LONG, STRING, Setting, at_least, between, one_of
from holdfast.config.definitions_log import Synonym

OUR_BROKER_SETTINGS: tuple[Setting, ...] = (
    Setting("holdfast.busy.poll.us", INT, 300, between(0, 10_000), acted_on=True),
    Setting("holdfast.clock.settle.ms", LONG, 86_400_000, at_least(0), CLUSTER_WIDE, acted_on=True),
    Setting("holdfast.cluster.id", STRING, None, acted_on=True),
    Setting("holdfast.flush", STRING, "group", one_of("group", "os"), CLUSTER_WIDE, acted_on=True),
    Setting("holdfast.flush.threads", INT, 16, between(1, 256), acted_on=True),
    Setting("holdfast.requests.in.flight.max", INT, 16, at_least(1), acted_on=True),
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
