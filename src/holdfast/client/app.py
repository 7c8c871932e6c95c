"""Several handlers in one program, as one member of one group.

    app = App("localhost:9092", group="mailer")

    @app.handler("orders", workers=8, order="key")
    def confirm(message: Message) -> None:
        send_mail(json.loads(message.value))

    @app.handler("invoices", batch_max=100)
    async def file_away(messages: list[Message]) -> None:
        await archive(messages)

    app.run()

Each handler has workers, an order and a retry policy of its own; a slow one does not hold the others back, except where
they share the bound on bytes under way. What a handler promises is said in `holdfast.client.consumer`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from holdfast.client.consuming.member import Member, Options, Route, RunsMember, dead_letters_of
from holdfast.client.consuming.runs import Order
from holdfast.client.dead_letter_dialects import Dialect
from holdfast.client.retries import RetryPolicy
from holdfast.client.retry_topics import RetryTopics
from holdfast.errors import UsageError

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class App(RunsMember):
    def __init__(
        self,
        bootstrap: str,
        *,
        group: str,
        config: Mapping[str, Any] | None = None,
        unsafe: Collection[str] = (),
        **options: Any,
    ) -> None:
        """`options` are those of `Consumer` that hold for a member as a whole: lost_positions, dedupe, in_flight_max,
        in_flight_bytes_max, commit_seconds, drain_seconds, last_commit_seconds, memory_topic."""
        try:
            chosen = Options(**options)
        except TypeError as error:
            raise UsageError(f"App: {error}") from error
        self._member = Member(bootstrap, group, config or {}, unsafe, chosen)
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
                batch_max,
                dead_letter_topic,
                dead_letter_dialect,
                create_topics,
            )
            route.check()
            for topic in topics:
                if any(other.takes(topic) for other in self._routes):
                    raise UsageError(f"{topic} has a handler already: a message is handled once")
            self._routes.append(route)
            return function

        return register

    def run(self) -> None:
        """Handle messages until stopped, by SIGTERM or SIGINT too. Raises when something cannot go on."""
        if not self._routes:
            raise UsageError("an app needs a handler: @app.handler('topic')")
        self._member.run(self._routes)
