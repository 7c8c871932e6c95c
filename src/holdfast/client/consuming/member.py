"""A member of a group with its handlers: what `Consumer` and `App` are made of."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from confluent_kafka import Consumer as RawConsumer

from holdfast.client.consuming.assignment import LostPositions
from holdfast.client.consuming.event_loop import Coroutines
from holdfast.client.consuming.handling import Handling
from holdfast.client.consuming.loop import BATCH_MESSAGES, Limits, Loop
from holdfast.client.consuming.memory import MEMORY_TOPIC, GroupMemory
from holdfast.client.consuming.runs import Order, Pool, Reports
from holdfast.client.consuming.subscription import Source, takes
from holdfast.client.consuming.workers import Workers
from holdfast.client.dead_letter_dialects import Dialect
from holdfast.client.dedupe import Dedupe
from holdfast.client.failure_router import FailureRouter
from holdfast.client.forks import check_idle
from holdfast.client.handlers import check_handler, is_coroutine
from holdfast.client.retries import RetryPolicy
from holdfast.client.retry_topics import HeldBack, RetryTopics
from holdfast.client.settings import consumer_settings, is_incremental
from holdfast.client.signals import say, stopping_on_signals
from holdfast.errors import UsageError

MAX_POLL_INTERVAL_MS: Final = 300_000
"""What the client assumes when nobody says otherwise."""

FETCH_BACKOFF_MS: Final = 20


def dead_letters_of(topic: str) -> str:
    return f"{topic}-dlt"


@dataclass(frozen=True, slots=True)
class Route:
    """Topics, and who handles their messages."""

    topics: Sequence[str]
    handler: Callable[..., Any]
    workers: int = 1
    order: Order = "partition"
    retry: RetryPolicy | RetryTopics = field(default_factory=RetryPolicy)
    batch_max: int | None = None
    """Messages in a batch; none: the handler takes one at a time."""
    dead_letter_topic: Callable[[str], str] = dead_letters_of
    dead_letter_dialect: Dialect = "holdfast"
    create_topics: bool = False
    """Whether retry topics and dead-letter topics that are missing may be created."""

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

    def takes(self, topic: str) -> bool:
        """Whether a topic is ours."""
        return takes(self.topics, topic)


@dataclass(frozen=True, slots=True)
class Options:
    """What holds for a member as a whole."""

    lost_positions: LostPositions = "stop"
    dedupe: Dedupe | Literal["hf-id"] | None = "hf-id"
    in_flight_max: int = 2000
    in_flight_bytes_max: int = 64 * 1024 * 1024
    commit_seconds: float = 1.0
    drain_seconds: float = 20.0
    last_commit_seconds: float = 10.0
    memory_topic: str | None = MEMORY_TOPIC


class Member:
    def __init__(
        self, bootstrap: str, group: str, config: Mapping[str, Any], unsafe: Collection[str], options: Options
    ) -> None:
        self._bootstrap = bootstrap
        self._group = group
        self._options = options
        self._settings = consumer_settings(bootstrap, group, dict(config), unsafe)
        # The end of a partition is where positions pass the markers of transactions behind the last message.
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
        self._stopping = threading.Event()
        self._running_in: int | None = None
        """The process of the run that goes on."""
        self._loop: Loop | None = None

    @property
    def handled(self) -> int:
        return self._loop.handled if self._loop is not None else 0

    @property
    def duplicates(self) -> int:
        return self._loop.duplicates if self._loop is not None else 0

    def stop(self) -> None:
        self._stopping.set()

    def run(self, routes: Sequence[Route]) -> None:
        """Handle messages until stopped. Raises when a message cannot be handled and may not be set aside."""
        for route in routes:
            route.check()
        check_idle(self._running_in, "consumer")
        asides = [self._aside(route) for route in routes]
        self._running_in = os.getpid()
        try:
            for aside in asides:
                aside.prepare(lambda: not self._stopping.is_set())
            self._run(routes, asides)
        finally:
            self._running_in = None
            self._stopping.clear()
            for aside in asides:
                aside.close()

    def _run(self, routes: Sequence[Route], asides: Sequence[FailureRouter]) -> None:
        reports = Reports()
        pools = [_pool(route, aside, reports) for route, aside in zip(routes, asides, strict=True)]
        known: dict[str, Pool] = {}
        held: dict[str, HeldBack] = {}
        for aside, pool in zip(asides, pools, strict=True):
            known.update((topic, pool) for topic in aside.retry_topics)
            if (waiting := aside.held_back()) is not None:
                held.update((topic, waiting) for topic in aside.retry_topics)

        def pool_of(topic: str) -> Pool:
            found = known.get(topic)
            if found is None:
                at = next(at for at, route in enumerate(routes) if route.takes(topic))
                found = known[topic] = pools[at]
            return found

        options = self._options
        topics = [topic for route in routes for topic in route.topics]
        self._loop = Loop(
            self._make_consumer,
            [*topics, *held],
            pool_of,
            pools,
            reports,
            Limits(
                options.in_flight_max,
                options.in_flight_bytes_max,
                options.commit_seconds,
                options.drain_seconds,
                options.last_commit_seconds,
            ),
            stopping=self._stopping,
            dedupe=Dedupe() if options.dedupe == "hf-id" else options.dedupe,
            held=held,
            lost_positions=options.lost_positions,
            is_incremental=is_incremental(self._settings),
            say=say,
            memory=self._memory(),
            settings=self._settings,
            sources=[Source(route.topics, route.dead_letter_topic) for route in routes],
        )
        with stopping_on_signals(self.stop):
            self._loop.run()

    def _memory(self) -> GroupMemory | None:
        topic = self._options.memory_topic
        return GroupMemory(self._group, self._settings, say, topic) if topic is not None else None

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
        )

    def _make_consumer(self, answered: Callable[..., None]) -> RawConsumer:
        def on_commit(error: Any, stored: Any) -> None:
            answered(error, stored)
            if self._answered is not None:
                self._answered(error, stored)

        return RawConsumer({**self._settings, "on_commit": on_commit})


def _pool(route: Route, aside: FailureRouter, reports: Reports) -> Pool:
    handling = Handling(aside.policy, aside)
    run_max = route.batch_max or BATCH_MESSAGES
    if route.batch_max is None and route.order == "none" and route.workers > 1:
        # Any worker takes the next one: a run is worked off by one of them.
        run_max = 1
    if is_coroutine(route.handler):
        awaited = handling.awaiting if route.batch_max is None else handling.awaiting_batches
        return Coroutines(route.workers, route.order, run_max, awaited(route.handler), reports)
    called = handling.one_by_one if route.batch_max is None else handling.in_batches
    return Workers(route.workers, route.order, run_max, called(route.handler), reports)


class RunsMember:
    """What a consumer and an app show of the group member that they run."""

    _member: Member

    @property
    def handled(self) -> int:
        """Messages handled or set aside so far."""
        return self._member.handled

    @property
    def duplicates(self) -> int:
        """Messages passed over so far because they were seen before."""
        return self._member.duplicates

    def stop(self) -> None:
        """End `run` cleanly; safe from any thread and from signal handlers."""
        self._member.stop()
