"""A consumer that commits only finished work.

    def handle(message: Message) -> None:
        send_mail(json.loads(message.value))

    Consumer("localhost:9092", group="mailer", topics=["orders"], workers=8).run(handle)

A handler that returns has handled its message. One that raises is asked again, as the `RetryPolicy` says, and when it
is given up on the message goes to the dead-letter topic, or the consumer stops. Positions follow finished work and
nothing else, per partition, however many workers there are. A handler may be a coroutine function: then `workers` is
how many are awaited at once. SIGTERM and SIGINT end it cleanly: what is under way finishes or is handed back, positions
are committed, the group is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal

from holdfast.client.consuming.assignment import LostPositions
from holdfast.client.consuming.handling import BatchHandler, Handler, HandlerFailed
from holdfast.client.consuming.member import Member, Options, Route, RunsMember, dead_letters_of
from holdfast.client.consuming.runs import Order
from holdfast.client.dead_letter_dialects import Dialect
from holdfast.client.dedupe import Dedupe
from holdfast.client.retries import RetryPolicy
from holdfast.client.retry_topics import RetryTopics

__all__ = ["BatchHandler", "Consumer", "Handler", "HandlerFailed"]

BATCH_MAX: Final = 500
_DEFAULTS: Final = Options()


class Consumer(RunsMember):
    def __init__(
        self,
        bootstrap: str,
        *,
        group: str,
        topics: Sequence[str],
        workers: int = 1,
        order: Order = "partition",
        retry: RetryPolicy | RetryTopics | None = None,
        dead_letter_topic: Callable[[str], str] = dead_letters_of,
        dead_letter_dialect: Dialect = "holdfast",
        create_topics: bool = False,
        lost_positions: LostPositions = "stop",
        dedupe: Dedupe | Literal["hf-id"] | None = "hf-id",
        in_flight_max: int = _DEFAULTS.in_flight_max,
        in_flight_bytes_max: int = _DEFAULTS.in_flight_bytes_max,
        commit_seconds: float = _DEFAULTS.commit_seconds,
        drain_seconds: float = _DEFAULTS.drain_seconds,
        last_commit_seconds: float = _DEFAULTS.last_commit_seconds,
        memory_topic: str | None = _DEFAULTS.memory_topic,
        config: Mapping[str, Any] | None = None,
        unsafe: Collection[str] = (),
    ) -> None:
        """`in_flight_max` bounds the messages of one partition that are under way, `in_flight_bytes_max` the bytes of
        all of them; `drain_seconds` how long they may take to finish when the partition is taken away or the consumer
        stops, and `last_commit_seconds` how long their positions may take to be stored then. `create_topics` lets
        missing retry topics and dead-letter topics be created. In `memory_topic`, which is made when it is missing,
        groups are remembered apart from their positions, so that one whose positions expired is not taken for a new
        one; none: it is."""
        self._options = Options(
            lost_positions,
            dedupe,
            in_flight_max,
            in_flight_bytes_max,
            commit_seconds,
            drain_seconds,
            last_commit_seconds,
            memory_topic,
        )
        self._member = Member(bootstrap, group, config or {}, unsafe, self._options)
        self._topics = topics if isinstance(topics, str) else list(topics)
        self._workers = workers
        self._order = order
        self._retry = retry or RetryPolicy()
        self._dead_letter_topic = dead_letter_topic
        self._dead_letter_dialect = dead_letter_dialect
        self._create_topics = create_topics
        self._route(print, None).check()

    def run(self, handler: Handler) -> None:
        """Handle messages until stopped. Raises when a message cannot be handled and may not be set aside."""
        self._member.run([self._route(handler, None)])

    def run_batches(self, handler: BatchHandler, *, batch_max: int = BATCH_MAX) -> None:
        """Like `run`, with lists of messages of one partition: what there is, up to `batch_max`.

        A batch is handled whole or fails whole; see `RetryPolicy`. One that is given up on is handed over again in
        halves, down to the message that fails alone.
        """
        self._member.run([self._route(handler, batch_max)])

    def _route(self, handler: Callable[..., Any], batch_max: int | None) -> Route:
        return Route(
            self._topics,
            handler,
            self._workers,
            self._order,
            self._retry,
            batch_max,
            self._dead_letter_topic,
            self._dead_letter_dialect,
            self._create_topics,
        )
