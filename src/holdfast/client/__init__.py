"""Clients that do not lose a message by accident, for the embedded broker and Apache Kafka alike.

Everything a program needs is here by name; each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast.client.aio import AsyncDelivery as AsyncDelivery
    from holdfast.client.aio import AsyncProducer as AsyncProducer
    from holdfast.client.changelog import StateLost as StateLost
    from holdfast.client.consumer import App as App
    from holdfast.client.consumer import Consumer as Consumer
    from holdfast.client.consuming.assignment import CommittedOffsetLost as CommittedOffsetLost
    from holdfast.client.consuming.assignment import UnreadableMessages as UnreadableMessages
    from holdfast.client.consuming.commits import OffsetsNotCommitted as OffsetsNotCommitted
    from holdfast.client.database.sink import DatabaseSink as DatabaseSink
    from holdfast.client.database.store import DatabaseUnreachable as DatabaseUnreachable
    from holdfast.client.database.store import SchemaMissing as SchemaMissing
    from holdfast.client.database.store import TransactionEnded as TransactionEnded
    from holdfast.client.dedupe import Dedupe as Dedupe
    from holdfast.client.delivery import Delivered as Delivered
    from holdfast.client.delivery import Delivery as Delivery
    from holdfast.client.errors import ClientError as ClientError
    from holdfast.client.errors import DeliveryFailed as DeliveryFailed
    from holdfast.client.errors import DeliveryStopped as DeliveryStopped
    from holdfast.client.errors import ForkedProducer as ForkedProducer
    from holdfast.client.errors import HandlerFailed as HandlerFailed
    from holdfast.client.errors import NotStored as NotStored
    from holdfast.client.errors import ProducerClosed as ProducerClosed
    from holdfast.client.errors import SendTimeout as SendTimeout
    from holdfast.client.errors import UndeliveredMessages as UndeliveredMessages
    from holdfast.client.errors import UnsafeSetting as UnsafeSetting
    from holdfast.client.messages import DeadLetter as DeadLetter
    from holdfast.client.messages import Message as Message
    from holdfast.client.messages import Origin as Origin
    from holdfast.client.messages import Retry as Retry
    from holdfast.client.metrics import Metrics as Metrics
    from holdfast.client.processor import Output as Output
    from holdfast.client.processor import Processor as Processor
    from holdfast.client.processor import ProcessorFenced as ProcessorFenced
    from holdfast.client.producer import FlushReport as FlushReport
    from holdfast.client.producer import Producer as Producer
    from holdfast.client.retries import NO_RETRIES as NO_RETRIES
    from holdfast.client.retries import RetryPolicy as RetryPolicy
    from holdfast.client.retries import RetryTopics as RetryTopics
    from holdfast.client.serializers import as_bytes as as_bytes
    from holdfast.client.serializers import as_json as as_json
    from holdfast.client.serializers import as_text as as_text
    from holdfast.client.serializers import with_schema as with_schema
    from holdfast.client.side_topics import SideTopicMissing as SideTopicMissing
    from holdfast.client.side_topics import TooLargeToSetAside as TooLargeToSetAside
    from holdfast.client.spool.store import SpoolFull as SpoolFull
    from holdfast.client.state import State as State
    from holdfast.client.state import StatefulProcessor as StatefulProcessor
    from holdfast.client.topic_ids import TopicRecreated as TopicRecreated
    from holdfast.client.tracing import Tracing as Tracing
    from holdfast.client.wrapped import WrappedProducer as WrappedProducer
    from holdfast.client.wrapped import wrap as wrap

_PLACES: Final = {
    "aio": ("AsyncDelivery", "AsyncProducer"),
    "changelog": ("StateLost",),
    "consumer": ("App", "Consumer"),
    "consuming.assignment": ("CommittedOffsetLost", "UnreadableMessages"),
    "consuming.commits": ("OffsetsNotCommitted",),
    "dedupe": ("Dedupe",),
    "database.sink": ("DatabaseSink",),
    "database.store": ("DatabaseUnreachable", "SchemaMissing", "TransactionEnded"),
    "delivery": ("Delivered", "Delivery"),
    "errors": (
        "ClientError",
        "DeliveryFailed",
        "DeliveryStopped",
        "NotStored",
        "ForkedProducer",
        "HandlerFailed",
        "ProducerClosed",
        "SendTimeout",
        "UndeliveredMessages",
        "UnsafeSetting",
    ),
    "messages": ("DeadLetter", "Message", "Origin", "Retry"),
    "metrics": ("Metrics",),
    "processor": ("Output", "Processor", "ProcessorFenced"),
    "producer": ("FlushReport", "Producer"),
    "retries": ("NO_RETRIES", "RetryPolicy", "RetryTopics"),
    "serializers": ("as_bytes", "as_json", "as_text", "with_schema"),
    "side_topics": ("SideTopicMissing", "TooLargeToSetAside"),
    "state": ("State", "StatefulProcessor"),
    "spool.store": ("SpoolFull",),
    "topic_ids": ("TopicRecreated",),
    "tracing": ("Tracing",),
    "wrapped": ("WrappedProducer", "wrap"),
}
_MODULES: Final = {name: module for module, names in _PLACES.items() for name in names}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"holdfast.client has no {name!r}")
    return getattr(import_module(f"holdfast.client.{module}"), name)
