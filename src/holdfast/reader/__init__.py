"""Raw record batches of any Kafka, decoded to Arrow without a Python object per record.

    from holdfast import reader

    for batch in reader.read("127.0.0.1:9092", "orders"):     # pyarrow.RecordBatch
        ...

    with reader.Cluster({"bootstrap.servers": "127.0.0.1:9092"}) as cluster:
        topic = cluster.topics(["orders"])["orders"]
        ranges = [reader.PartitionRange(topic.name, topic.topic_id, 0, start=0, end=1_000)]
        for batch in cluster.read(ranges):
            ...

Importing this package loads neither pyarrow nor the decoder's machine code; `warm()` does, and is worth calling in a
process that forks workers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import from_extra
from holdfast.reader.model import (
    Isolation,
    OffsetAnswer,
    OffsetSpec,
    PartitionInfo,
    PartitionRange,
    RangeReport,
    TopicInfo,
    TopicPartition,
)

if TYPE_CHECKING:
    from holdfast.admin.errors import ClusterError, NotAuthorised, Refused, Unreachable, UnsupportedBroker
    from holdfast.reader.arrow import SCHEMA, warm
    from holdfast.reader.cluster import Cluster
    from holdfast.reader.errors import CorruptBatch, EndNotReached, OffsetGone, TopicMissing, TopicRecreated
    from holdfast.reader.topic_reader import ranges_of, read

__all__ = [
    "SCHEMA",
    "Cluster",
    "ClusterError",
    "CorruptBatch",
    "EndNotReached",
    "Isolation",
    "NotAuthorised",
    "OffsetAnswer",
    "OffsetGone",
    "OffsetSpec",
    "PartitionInfo",
    "PartitionRange",
    "RangeReport",
    "Refused",
    "TopicInfo",
    "TopicMissing",
    "TopicPartition",
    "TopicRecreated",
    "Unreachable",
    "UnsupportedBroker",
    "ranges_of",
    "read",
    "warm",
]

_PLACES: Final = {
    "SCHEMA": "reader.arrow",
    "warm": "reader.arrow",
    "Cluster": "reader.cluster",
    "ranges_of": "reader.topic_reader",
    "read": "reader.topic_reader",
    "CorruptBatch": "reader.errors",
    "EndNotReached": "reader.errors",
    "OffsetGone": "reader.errors",
    "TopicMissing": "reader.errors",
    "TopicRecreated": "reader.errors",
    "ClusterError": "admin.errors",
    "NotAuthorised": "admin.errors",
    "Refused": "admin.errors",
    "Unreachable": "admin.errors",
    "UnsupportedBroker": "admin.errors",
}
"""Names whose modules are imported when they are first used."""


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with from_extra("reader", "reading topics"):
        found = getattr(importlib.import_module(f"holdfast.{place}"), name)
    globals()[name] = found
    return found
