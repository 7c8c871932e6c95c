"""Clients that do not lose a message by accident, for the embedded broker and Apache Kafka alike.

Everything a program needs is here by name; each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast.client.aio import AsyncDelivery, AsyncProducer
    from holdfast.client.app import App
    from holdfast.client.changelog import StateLost
    from holdfast.client.consumer import Consumer, HandlerFailed
    from holdfast.client.consuming.assignment import PositionLost, UnreadableMessages
    from holdfast.client.consuming.positions import PositionsNotCommitted
    from holdfast.client.database.sink import DatabaseSink
    from holdfast.client.database.store import DatabaseUnreachable, SchemaMissing, TransactionEnded
    from holdfast.client.dedupe import Dedupe
    from holdfast.client.delivery import Delivered, Delivery
    from holdfast.client.errors import (
        ClientError,
        DeliveryFailed,
        DeliveryStopped,
        ForkedProducer,
        NotStored,
        ProducerClosed,
        SendTimeout,
        UndeliveredMessages,
        UnsafeSetting,
    )
    from holdfast.client.messages import DeadLetter, Message, Origin, Retry
    from holdfast.client.processor import Output, Processor, ProcessorFenced
    from holdfast.client.producer import FlushReport, Producer
    from holdfast.client.retries import NO_RETRIES, RetryPolicy
    from holdfast.client.retry_topics import RetryTopics
    from holdfast.client.serializers import as_bytes, as_json, as_text, with_schema
    from holdfast.client.side_topics import SideTopicMissing, TooLargeToSetAside
    from holdfast.client.spool.store import SpoolFull
    from holdfast.client.state import State, StatefulProcessor
    from holdfast.client.topic_ids import TopicRecreated
    from holdfast.client.wrapped import WrappedProducer, wrap

_PLACES: Final = {
    "aio": ("AsyncDelivery", "AsyncProducer"),
    "app": ("App",),
    "changelog": ("StateLost",),
    "consumer": ("Consumer", "HandlerFailed"),
    "consuming.assignment": ("PositionLost", "UnreadableMessages"),
    "consuming.positions": ("PositionsNotCommitted",),
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
        "ProducerClosed",
        "SendTimeout",
        "UndeliveredMessages",
        "UnsafeSetting",
    ),
    "messages": ("DeadLetter", "Message", "Origin", "Retry"),
    "processor": ("Output", "Processor", "ProcessorFenced"),
    "producer": ("FlushReport", "Producer"),
    "retries": ("NO_RETRIES", "RetryPolicy"),
    "retry_topics": ("RetryTopics",),
    "serializers": ("as_bytes", "as_json", "as_text", "with_schema"),
    "side_topics": ("SideTopicMissing", "TooLargeToSetAside"),
    "state": ("State", "StatefulProcessor"),
    "spool.store": ("SpoolFull",),
    "topic_ids": ("TopicRecreated",),
    "wrapped": ("WrappedProducer", "wrap"),
}
_MODULES: Final = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "NO_RETRIES",
    "App",
    "AsyncDelivery",
    "AsyncProducer",
    "ClientError",
    "Consumer",
    "DatabaseSink",
    "DatabaseUnreachable",
    "DeadLetter",
    "Dedupe",
    "Delivered",
    "Delivery",
    "DeliveryFailed",
    "DeliveryStopped",
    "FlushReport",
    "ForkedProducer",
    "HandlerFailed",
    "Message",
    "NotStored",
    "Origin",
    "Output",
    "PositionLost",
    "PositionsNotCommitted",
    "Processor",
    "ProcessorFenced",
    "Producer",
    "ProducerClosed",
    "Retry",
    "RetryPolicy",
    "RetryTopics",
    "SchemaMissing",
    "SendTimeout",
    "SideTopicMissing",
    "SpoolFull",
    "State",
    "StateLost",
    "StatefulProcessor",
    "TooLargeToSetAside",
    "TopicRecreated",
    "TransactionEnded",
    "UndeliveredMessages",
    "UnreadableMessages",
    "UnsafeSetting",
    "WrappedProducer",
    "as_bytes",
    "as_json",
    "as_text",
    "with_schema",
    "wrap",
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"holdfast.client has no {name!r}")
    return getattr(import_module(f"holdfast.client.{module}"), name)
