"""Traces of messages by OpenTelemetry, from the producer over the consumer to what its handler does (`holdfast[otel]`).

    tracing = Tracing()
    Producer("localhost:9092", tracing=tracing)
    Consumer("localhost:9092", group="mailer", topics=["orders"], tracing=tracing).run(handle)

A message that is sent gets a span of its own, which ends when brokers have acknowledged it or it has failed, and the
span's context in its headers: `traceparent`, unless the program has chosen another propagator. Through a spool the
headers stay with the message. A handler runs within a span below the producer's; a batch has links to all of its
messages. What a `Processor` sends goes on with the span of the message it was made of.

Names are those of OpenTelemetry's conventions for messaging. Without `tracing` nothing here is imported, and no message
passes by it: a client that traces has its calls wrapped when it is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from holdfast.client.delivery import Delivery
from holdfast.client.messages import DeadLetter, Message, Retry, is_coroutine
from holdfast.client.spool.format import Headers
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

    from holdfast.client.transactional import Output

_SYSTEM: Final = {"messaging.system": "kafka"}


class Tracing:
    """Given to clients as `tracing`."""

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        """`tracer_provider` is the program's own where none is given."""
        try:
            from opentelemetry import propagate, trace
        except ImportError as error:
            raise UsageError("tracing needs OpenTelemetry: pip install 'holdfast[otel]'") from error
        self._trace = trace
        self._propagate = propagate
        self._tracer = trace.get_tracer("holdfast", tracer_provider=tracer_provider)

    # Producers

    def sending(self, hand_over: Callable[..., Delivery]) -> Callable[..., Delivery]:
        """What hands messages to brokers or to a spool, with a span for each."""

        def traced(
            topic: str,
            partition: int | None,
            key: bytes | None,
            value: bytes | None,
            headers: Headers,
            *rest: Any,
        ) -> Delivery:
            span = self._tracer.start_span(
                f"send {topic}",
                kind=self._trace.SpanKind.PRODUCER,
                attributes={
                    **_SYSTEM,
                    "messaging.operation.name": "send",
                    "messaging.operation.type": "send",
                    "messaging.destination.name": topic,
                    "messaging.message.body.size": len(value or b""),
                },
            )
            headers = self._injected(headers, self._trace.set_span_in_context(span))
            try:
                delivery = hand_over(topic, partition, key, value, headers, *rest)
            except BaseException as error:
                self._failed(span, error)
                span.end()
                raise
            return delivery.notify(functools.partial(self._settled, span))

        return traced

    def _settled(self, span: Span, delivery: Delivery) -> None:
        place = delivery.delivered
        if place is not None:
            span.set_attribute("messaging.destination.partition.id", str(place.partition))
            span.set_attribute("messaging.kafka.offset", place.offset)
        elif delivery.error is not None:
            self._failed(span, delivery.error)
        span.end()

    # Consumers

    def handling(self, handler: Callable[..., Any], group: str) -> Callable[..., Any]:
        """A handler of messages or of batches, with a span around each call."""
        if is_coroutine(handler):

            @functools.wraps(handler)
            async def awaited(given: Any, *rest: Any) -> Any:
                with self._processing(given, group):
                    return await handler(given, *rest)

            return awaited

        @functools.wraps(handler)
        def called(given: Any, *rest: Any) -> Any:
            with self._processing(given, group):
                return handler(given, *rest)

        return called

    def transforming(self, transform: Callable[[Message], Any], group: str) -> Callable[[Message], Any]:
        """A transform with a span around each call; what it makes goes on with it."""

        def traced(message: Message) -> Any:
            with self._processing(message, group):
                outcome = transform(message)
                if outcome is None or isinstance(outcome, Retry | DeadLetter):
                    return outcome
                outputs: Iterable[Output] = outcome
                return [each._replace(headers=self._injected(each.headers)) for each in outputs]

        return traced

    @contextmanager
    def _processing(self, given: Message | Sequence[Message], group: str) -> Iterator[None]:
        messages = [given] if isinstance(given, Message) else list(given)
        first = messages[0]
        attributes: dict[str, str | int] = {
            **_SYSTEM,
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": first.topic,
            "messaging.consumer.group.name": group,
        }
        parent, links = None, []
        if isinstance(given, Message):
            parent = self._extracted(first)
            attributes["messaging.destination.partition.id"] = str(first.partition)
            attributes["messaging.kafka.offset"] = first.offset
            attributes["messaging.message.body.size"] = len(first.value or b"")
        else:
            attributes["messaging.batch.message_count"] = len(messages)
            contexts = (self._trace.get_current_span(self._extracted(each)) for each in messages)
            spans = (each.get_span_context() for each in contexts)
            links = [self._trace.Link(each) for each in spans if each.is_valid]
        with self._tracer.start_as_current_span(
            f"process {first.topic}",
            parent,
            kind=self._trace.SpanKind.CONSUMER,
            attributes=attributes,
            links=links,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except BaseException as error:
                self._failed(span, error)
                raise

    # Contexts

    def _injected(self, headers: Headers, context: Context | None = None) -> Headers:
        """The headers with a span's context in them, and with no other message's."""
        carrier: dict[str, str] = {}
        self._propagate.inject(carrier, context)
        kept = (each for each in headers if each[0] not in carrier)
        return (*kept, *((name, value.encode()) for name, value in carrier.items()))

    def _extracted(self, message: Message) -> Context:
        carrier = {
            name: value.decode("utf-8", "replace") for name, value in message.headers if value is not None
        }
        return self._propagate.extract(carrier)

    def _failed(self, span: Span, error: BaseException) -> None:
        span.set_attribute("error.type", type(error).__qualname__)
        span.record_exception(error)
        span.set_status(self._trace.StatusCode.ERROR)
