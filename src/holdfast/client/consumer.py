"""A consumer that commits only finished work.

    def handle(message: Message) -> None:
        send_mail(json.loads(message.value))

    Consumer("localhost:9092", group="mailer", topics=["orders"], workers=8).run(handle)

A handler that returns has handled its message. A handler that raises is retried, as the `RetryPolicy` says, and when it
is given up on the message goes to the dead-letter topic, or the consumer stops. Committed offsets follow finished work
and nothing else, per partition, however many workers there are. A handler may be a coroutine function: then `workers`
is how many are awaited at once. SIGTERM and SIGINT end it cleanly: what is under way finishes or is handed back,
offsets are committed, the group is left.

An `App` has several handlers in one program, as one member of one group.

    app = App("localhost:9092", group="mailer")

    @app.handler("orders", workers=8, order="key")
    def confirm(message: Message) -> None:
        send_mail(json.loads(message.value))

    @app.handler("invoices", batch_max=100)
    async def file_away(messages: list[Message]) -> None:
        await archive(messages)

    app.run()

Each handler has workers, an order and a retry policy of its own; a slow one does not hold the others back, except where
they share the bound on bytes under way. What a handler promises is the same as with a `Consumer`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from confluent_kafka import Consumer as RawConsumer

from holdfast.client.consuming.assignment import LostOffsets, Source, takes
from holdfast.client.consuming.handling import BatchHandler, Handler, Handling
from holdfast.client.consuming.loop import BATCH_MESSAGES, Loop, Options
from holdfast.client.consuming.marks import group_marks
from holdfast.client.consuming.workers import Coroutines, Order, Pool, Reports, Workers
from holdfast.client.dead_letter_dialects import Dialect
from holdfast.client.dead_letters import dead_letters_of
from holdfast.client.dedupe import Dedupe
from holdfast.client.errors import HandlerFailed
from holdfast.client.failures import FailureRouter
from holdfast.client.messages import check_handler, is_coroutine
from holdfast.client.metrics import UNWATCHED, Metrics, watched
from holdfast.client.process import Runs, stopping_on_signals
from holdfast.client.retries import HeldBack, RetryPolicy, RetryTopics
from holdfast.client.settings import consumer_settings
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.client.tracing import Tracing

__all__ = ["App", "BatchHandler", "Consumer", "Handler", "HandlerFailed"]

MAX_POLL_INTERVAL_MS: Final = 300_000
"""What the client assumes when nobody says otherwise."""
FETCH_BACKOFF_MS: Final = 20
BATCH_MAX: Final = 500
_DEFAULTS: Final = Options()

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Route:
    """Topics, and who handles their messages."""

    topics: Sequence[str]
    handler: Callable[..., Any]
    workers: int = 1
    order: Order = "partition"
    retry: RetryPolicy | RetryTopics = field(default_factory=RetryPolicy)
    dead_letter_topic: Callable[[str], str] = dead_letters_of
    dead_letter_dialect: Dialect = "holdfast"
    create_topics: bool = False
    """Whether retry topics and dead-letter topics that are missing may be created."""
    batch_max: int | None = None
    """Messages in a batch; None: the handler takes one at a time."""

    def check(self) -> None:
        if self.workers < 1:
            raise UsageError(f"workers={self.workers}: at least one is needed")
        if self.order not in ("partition", "key", "none"):
            raise UsageError(f"order={self.order!r}: it is kept by 'partition', by 'key', or 'none'")
        if not self.topics or isinstance(self.topics, str):
            raise UsageError("topics: a list with at least one is needed")
        if self.batch_max is not None and self.batch_max < 1:
            raise UsageError(f"batch_max={self.batch_max}: a batch has at least one message")
        check_handler(self.handler, awaits=True)

    def pool(self, aside: FailureRouter, reports: Reports) -> Pool:
        """The workers of its handler."""
        handling = Handling(aside.policy, aside, aside.tally)
        run_max = self.batch_max or BATCH_MESSAGES
        if self.batch_max is None and self.order == "none" and self.workers > 1:
            # Any worker takes the next one: a run is worked off by one of them.
            run_max = 1
        if is_coroutine(self.handler):
            awaited = handling.awaiting if self.batch_max is None else handling.awaiting_batches
            return Coroutines(self.workers, self.order, run_max, awaited(self.handler), reports)
        called = handling.one_by_one if self.batch_max is None else handling.in_batches
        return Workers(self.workers, self.order, run_max, called(self.handler), reports)


class Member(Runs):
    """A member of a group with its handlers: what `Consumer` and `App` are made of."""

    def __init__(
        self,
        bootstrap: str,
        group: str,
        config: Mapping[str, Any],
        unsafe: Collection[str],
        options: Options,
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._tally = UNWATCHED
        self._bootstrap = bootstrap
        self._group = group
        self._options = options
        self._settings = consumer_settings(bootstrap, group, dict(config), unsafe)
        # The end of a partition is where offsets pass the markers of transactions behind the last message.
        self._settings["enable.partition.eof"] = True
        # By default a client whose queue was full once does not fetch for a second, which a fast handler waits for.
        self._settings.setdefault("fetch.queue.backoff.ms", FETCH_BACKOFF_MS)
        self._answered = self._settings.pop("on_commit", None)
        if options.in_flight_max < 1 or options.in_flight_bytes_max < 1:
            raise UsageError("at least one message and one byte must be allowed to be under way")
        longest_ms = int(self._settings.get("max.poll.interval.ms", MAX_POLL_INTERVAL_MS))
        if (options.drain_seconds + options.last_commit_seconds) * 1000 >= longest_ms:
            raise UsageError(
                f"drain_seconds={options.drain_seconds} and last_commit_seconds={options.last_commit_seconds} must "
                f"together be below max.poll.interval.ms={longest_ms}: a member that takes longer to let go of "
                "partitions is thrown out, and what it finished is done again"
            )
        super().__init__("consumer")
        self._loop: Loop | None = None

    @property
    def handled(self) -> int:
        """Messages handled or set aside so far."""
        return self._loop.handled if self._loop is not None else 0

    @property
    def duplicates(self) -> int:
        """Messages passed over so far because they were seen before."""
        return self._loop.duplicates if self._loop is not None else 0

    def _run(self, routes: Sequence[Route]) -> None:
        """Handle messages until stopped. Raises when a message cannot be handled and may not be set aside."""
        for route in routes:
            route.check()
        if (tracing := self._tracing) is not None:
            routes = [
                replace(route, handler=tracing.handling(route.handler, self._group)) for route in routes
            ]
        with self._one_run():
            self._tally = watched(
                self._metrics, self._group, lambda: self._loop.numbers() if self._loop else {}
            )
            asides = [self._aside(route) for route in routes]
            try:
                for aside in asides:
                    aside.prepare(lambda: not self.is_stopping)
                self._loop = self._make_loop(routes, asides)
                with stopping_on_signals(self.stop):
                    self._loop.run()
            finally:
                for aside in asides:
                    aside.close()
                self._tally.end()

    def _make_loop(self, routes: Sequence[Route], asides: Sequence[FailureRouter]) -> Loop:
        reports = Reports()
        pools = [route.pool(aside, reports) for route, aside in zip(routes, asides, strict=True)]
        known: dict[str, Pool] = {}
        held: dict[str, HeldBack] = {}
        for aside, pool in zip(asides, pools, strict=True):
            known.update((topic, pool) for topic in aside.retry_topics)
            if (waiting := aside.held_back()) is not None:
                held.update((topic, waiting) for topic in aside.retry_topics)

        def pool_of(topic: str) -> Pool:
            found = known.get(topic)
            if found is None:
                at = next(at for at, route in enumerate(routes) if takes(route.topics, topic))
                found = known[topic] = pools[at]
            return found

        return Loop(
            self._make_consumer,
            [*(topic for route in routes for topic in route.topics), *held],
            pool_of,
            pools,
            reports,
            self._options,
            is_stopping=lambda: self.is_stopping,
            held=held,
            marks=group_marks(self._options.marks_topic, self._group, self._settings),
            settings=self._settings,
            sources=[Source(route.topics, route.dead_letter_topic) for route in routes],
            tally=self._tally,
        )

    def _aside(self, route: Route) -> FailureRouter:
        return FailureRouter(
            self._bootstrap,
            self._group,
            route.topics,
            route.retry,
            self._settings,
            dead_letter_topic=route.dead_letter_topic,
            dialect=route.dead_letter_dialect,
            create=route.create_topics,
            tally=self._tally,
        )

    def _make_consumer(self, answered: Callable[..., None]) -> RawConsumer:
        def on_commit(error: Any, stored: Any) -> None:
            answered(error, stored)
            if self._answered is not None:
                self._answered(error, stored)

        return RawConsumer({**self._settings, "on_commit": on_commit})


class Consumer(Member):
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
        lost_offsets: LostOffsets = "stop",
        dedupe: Dedupe | Literal["hf-id"] | None = "hf-id",
        in_flight_max: int = _DEFAULTS.in_flight_max,
        in_flight_bytes_max: int = _DEFAULTS.in_flight_bytes_max,
        commit_seconds: float = _DEFAULTS.commit_seconds,
        drain_seconds: float = _DEFAULTS.drain_seconds,
        last_commit_seconds: float = _DEFAULTS.last_commit_seconds,
        marks_topic: str | None = _DEFAULTS.marks_topic,
        config: Mapping[str, Any] | None = None,
        unsafe: Collection[str] = (),
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`in_flight_max` bounds the messages of one partition that are under way, `in_flight_bytes_max` the bytes of
        all of them; `drain_seconds` how long they may take to finish when the partition is taken away or the consumer
        stops, and `last_commit_seconds` how long their offsets may take to be committed then. `create_topics` lets
        missing retry topics and dead-letter topics be created. In `marks_topic`, which is made when it is missing,
        groups are remembered apart from their committed offsets, so that one whose offsets expired is not taken for a
        new one; with None it is."""
        options = Options(
            lost_offsets,
            dedupe,
            in_flight_max,
            in_flight_bytes_max,
            commit_seconds,
            drain_seconds,
            last_commit_seconds,
            marks_topic,
        )
        super().__init__(bootstrap, group, config or {}, unsafe, options, metrics, tracing)
        self._route = Route(
            topics if isinstance(topics, str) else list(topics),
            print,
            workers,
            order,
            retry or RetryPolicy(),
            dead_letter_topic,
            dead_letter_dialect,
            create_topics,
        )
        self._route.check()

    def run(self, handler: Handler) -> None:
        """Handle messages until stopped. Raises when a message cannot be handled and may not be set aside."""
        self._run([replace(self._route, handler=handler)])

    def run_batches(self, handler: BatchHandler, *, batch_max: int = BATCH_MAX) -> None:
        """Like `run`, with lists of messages of one partition: what there is, up to `batch_max`.

        A batch is handled whole or fails whole; see `RetryPolicy`. One that is given up on is handed over again in
        halves, down to the message that fails alone.
        """
        self._run([replace(self._route, handler=handler, batch_max=batch_max)])


class App(Member):
    def __init__(
        self,
        bootstrap: str,
        *,
        group: str,
        config: Mapping[str, Any] | None = None,
        unsafe: Collection[str] = (),
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
        **options: Any,
    ) -> None:
        """`options` are those of `Consumer` that hold for a member as a whole: lost_offsets, dedupe, in_flight_max,
        in_flight_bytes_max, commit_seconds, drain_seconds, last_commit_seconds, marks_topic."""
        try:
            chosen = Options(**options)
        except TypeError as error:
            raise UsageError(f"App: {error}") from error
        super().__init__(bootstrap, group, config or {}, unsafe, chosen, metrics, tracing)
        self._routes: list[Route] = []

    def handler(
        self,
        *topics: str,
        workers: int = 1,
        order: Order = "partition",
        retry: RetryPolicy | RetryTopics | None = None,
        batch_max: int | None = None,
        dead_letter_topic: Callable[[str], str] = dead_letters_of,
        dead_letter_dialect: Dialect = "holdfast",
        create_topics: bool = False,
    ) -> Callable[[Decorated], Decorated]:
        """Handle the messages of topics with the function below: one at a time, or in lists of up to `batch_max`."""

        def register(function: Decorated) -> Decorated:
            route = Route(
                topics,
                function,
                workers,
                order,
                retry or RetryPolicy(),
                dead_letter_topic,
                dead_letter_dialect,
                create_topics,
                batch_max,
            )
            route.check()
            for topic in topics:
                if any(takes(other.topics, topic) for other in self._routes):
                    raise UsageError(f"{topic} has a handler already: a message is handled once")
            self._routes.append(route)
            return function

        return register

    def run(self) -> None:
        """Handle messages until stopped, by SIGTERM or SIGINT too. Raises when something cannot go on."""
        if not self._routes:
            raise UsageError("an app needs a handler: @app.handler('topic')")
        self._run(self._routes)
