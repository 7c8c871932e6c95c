"""Numbers of the clients of a process: one object for all of them, for Prometheus or for the program itself.

    metrics = Metrics(listen="9405")
    Consumer("localhost:9092", group="mailer", topics=["orders"], metrics=metrics).run(handle)

Each client has a label of its own: a consumer's group, a producer's `client.id`. What a client knows anyway it is asked
for when somebody looks; failures are counted as they happen. On the way of a message nothing is counted, so a client
without `metrics` and one with them cost the same.

A client that was closed is shown as it was last: what a producer has left in its spool is worth seeing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeAlias

from holdfast.exposition import Families, Family, ServedNumbers, table

Read: TypeAlias = Callable[[], Mapping[str, float]]
"""What a client says when it is asked: values by family."""

_CLIENT: Final = ("client",)


def _family(name: str, kind: str, meaning: str) -> Family:
    return Family(name, "counter" if kind == "counter" else "gauge", meaning, _CLIENT)


FAMILIES: Final[Families] = table(
    _family("holdfast_producer_delivered_total", "counter", "Messages that brokers have acknowledged."),
    _family("holdfast_producer_refused_total", "counter", "Messages that failed for good."),
    _family("holdfast_producer_under_way", "gauge", "Messages neither delivered nor refused."),
    _family("holdfast_spool_messages", "gauge", "Messages in the spool that are not delivered yet."),
    _family("holdfast_spool_bytes", "gauge", "Bytes of them."),
    _family(
        "holdfast_spool_oldest_seconds",
        "gauge",
        "How long the oldest of them has been there; of what an earlier process has left, since the opening.",
    ),
    _family(
        "holdfast_spool_set_aside_messages", "gauge", "Messages that were refused, and lie in the spool."
    ),
    _family("holdfast_spool_waiting_causes", "gauge", "Why messages wait although brokers answer: how many."),
    _family("holdfast_consumer_handled_total", "counter", "Messages handled or set aside."),
    _family("holdfast_consumer_duplicates_total", "counter", "Messages passed over since they came before."),
    _family("holdfast_consumer_partitions", "gauge", "Partitions that the member has."),
    _family("holdfast_consumer_in_flight", "gauge", "Messages that are begun and not finished."),
    _family("holdfast_consumer_retries_total", "counter", "Times that a message was tried again."),
    _family("holdfast_consumer_retry_topic_messages_total", "counter", "Messages sent to a retry topic."),
    _family("holdfast_consumer_dead_letters_total", "counter", "Messages sent to a dead-letter topic."),
    _family("holdfast_consumer_commits_total", "counter", "Commits that were stored."),
    _family("holdfast_consumer_commit_failures_total", "counter", "Commits that were refused or taken back."),
)


class Tally:
    """What one client counts."""

    def __init__(self, metrics: Metrics | None, client: str, read: Read) -> None:
        self._metrics = metrics
        self.client = client
        self._read = read

    def add(self, name: str, amount: int = 1) -> None:
        if self._metrics is not None:
            self._metrics.numbers.add(name, amount, client=self.client)

    def look(self) -> None:
        """Ask the client."""
        if self._metrics is not None:
            for name, value in self._read().items():
                self._metrics.numbers.set(name, value, client=self.client)

    def end(self) -> None:
        """The client ends: it is asked once more."""
        if self._metrics is not None:
            self.look()
            self._metrics.forget(self)


UNWATCHED: Final = Tally(None, "", dict)
"""Of a client without metrics."""


class Metrics(ServedNumbers):
    """Given to clients as `metrics`. Closing it ends its threads; a client goes on without."""

    def __init__(
        self,
        *,
        listen: str | int | None = None,
        callback: Callable[[Mapping[str, float]], None] | None = None,
        every_seconds: float = 15.0,
    ) -> None:
        """`listen` is a port of this machine, or HOST:PORT, where `/metrics` is; 0 takes a free one: see `port`.

        `callback` gets every series with its value, every so many seconds, in a thread of its own. `text` is for a
        program that has an endpoint already.
        """
        self._tallies: list[Tally] = []
        self._names: set[str] = set()
        self._ending = threading.Event()
        super().__init__(FAMILIES, listen)
        if callback is not None:
            told = callback
            thread = threading.Thread(
                target=self._tell, args=(told, every_seconds), name="holdfast-metrics", daemon=True
            )
            self._open.callback(thread.join)
            self._open.callback(self._ending.set)
            thread.start()

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        self._look()
        return self.numbers.text()

    def series(self) -> dict[str, float]:
        """Every series, as Prometheus names it, with its value."""
        self._look()
        return self.numbers.series()

    def watch(self, client: str, read: Read) -> Tally:
        """For clients: show one from now on. A second one of the same name beside it gets a number."""
        name, number = client, 1
        while name in self._names:
            number += 1
            name = f"{client}-{number}"
        self._names.add(name)
        tally = Tally(self, name, read)
        self._tallies.append(tally)
        return tally

    def forget(self, tally: Tally) -> None:
        if tally in self._tallies:
            self._tallies.remove(tally)
            self._names.discard(tally.client)  # whoever runs again goes on with it

    def _look(self) -> None:
        for tally in list(self._tallies):
            tally.look()

    def _tell(self, callback: Callable[[Mapping[str, float]], None], every_seconds: float) -> None:
        while not self._ending.wait(every_seconds):
            callback(self.series())


@contextmanager
def watching(metrics: Metrics | None, client: str, read: Read) -> Iterator[Tally]:
    """Show a client while within."""
    tally = watched(metrics, client, read)
    try:
        yield tally
    finally:
        tally.end()


def watched(metrics: Metrics | None, client: str, read: Read) -> Tally:
    return UNWATCHED if metrics is None else metrics.watch(client, read)
