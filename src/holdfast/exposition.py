"""Numbers for Prometheus, in its text format: the one exposition of broker, exporter, clients, pipelines and audits.

A `Family` is a name with its kind and its meaning. Every component lists its families in a table, which is what
`docs/METRICS.md` is written from: a name is a promise to boards and alert rules. There are two ways to fill them:

- `Numbers` keeps values under a lock, for components with threads. What is set stays until it is set again.
- `Sheet` gathers the lines of one scrape, for the broker, whose numbers lie in its own objects.

Labels are text that somebody else may have chosen, so they are escaped, and a family of `Numbers` has at most
`SERIES_MAX` series: what comes on top is counted and left out.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from typing import Final, Literal, NamedTuple, Self

from holdfast.errors import UsageError

LOOPBACK: Final = "127.0.0.1"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SERIES_MAX: Final = 10_000
"""Series of one family: Prometheus takes more, and whoever looks at them does not."""
SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Bounds of durations: a flush of a good disk takes a tenth of a millisecond, a client waits half a minute."""
COUNTS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0, 10_000.0)
POLL_S: Final = 0.1
"""How often a server looks whether it is to end."""

Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        return f"# HELP {self.name} {self.meaning}\n# TYPE {self.name} {self.kind}\n"


Families = Mapping[str, Family]


def table(*families: Family) -> dict[str, Family]:
    return {family.name: family for family in families}


_TOPIC: Final = ("topic",)
_PLACE: Final = ("topic", "partition")
_GROUP: Final = ("consumergroup", "topic", "partition")
_GROUP_TOPIC: Final = ("consumergroup", "topic")
KAFKA_EXPORTER: Final[Families] = table(
    Family("kafka_brokers", "gauge", "Brokers in the cluster."),
    Family("kafka_broker_info", "gauge", "The broker's id, by address.", ("id", "address")),
    Family("kafka_topic_partitions", "gauge", "Partitions of a topic.", _TOPIC),
    Family("kafka_topic_partition_current_offset", "gauge", "Where the next message goes.", _PLACE),
    Family("kafka_topic_partition_oldest_offset", "gauge", "The first offset that is kept.", _PLACE),
    Family("kafka_topic_partition_in_sync_replica", "gauge", "Replicas that are in sync.", _PLACE),
    Family("kafka_topic_partition_leader", "gauge", "The leading broker's id; -1 for none.", _PLACE),
    Family("kafka_topic_partition_leader_is_preferred", "gauge", "1: the preferred replica leads.", _PLACE),
    Family("kafka_topic_partition_replicas", "gauge", "Replicas of a partition.", _PLACE),
    Family(
        "kafka_topic_partition_under_replicated_partition", "gauge", "1: a replica is not in sync.", _PLACE
    ),
    Family("kafka_consumergroup_current_offset", "gauge", "The group's committed offset.", _GROUP),
    Family(
        "kafka_consumergroup_current_offset_sum",
        "gauge",
        "The group's committed offsets of a topic, added up.",
        _GROUP_TOPIC,
    ),
    Family(
        "kafka_consumergroup_lag", "gauge", "Offsets from the committed one to the end of the log.", _GROUP
    ),
    Family("kafka_consumergroup_lag_sum", "gauge", "The group's lag in a topic.", _GROUP_TOPIC),
    Family("kafka_consumergroup_members", "gauge", "Members of the group.", ("consumergroup",)),
)
"""kafka_exporter's: what the broker tells of itself, and `holdfast exporter` of any cluster."""


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def label_text(labels: Iterable[tuple[str, str]]) -> str:
    pairs = ",".join(f'{name}="{escaped(value)}"' for name, value in labels)
    return f"{{{pairs}}}" if pairs else ""


def number(value: float) -> str:
    return str(value) if type(value) is int else f"{value:.15g}"


class Histogram:
    """Counts by bound, as Prometheus adds them up.

    `observe` costs a few tenths of a microsecond. `note` costs a tenth of that, and is for what happens thousands of
    times a second: somebody calls `add_up` every second, which keeps short what was noted.
    """

    __slots__ = ("_noted", "bounds", "counts", "note", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """One for each bound, and one for what is above the last."""
        self.total = 0.0
        self._noted: list[float] = []
        self.note = self._noted.append
        """Any thread may."""

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_up(self) -> None:
        values = self._noted[:]
        del self._noted[: len(values)]  # threads may have noted more
        self.total += sum(values)
        for place, count in Counter(map(bisect_left, repeat(self.bounds), values)).items():
            self.counts[place] += count

    def lines(self, name: str, labels: str = "") -> Iterator[str]:
        self.add_up()
        inner = f"{labels[1:-1]}," if labels else ""
        reached = 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            reached += count
            text = "+Inf" if bound is None else f"{bound:g}"
            yield f'{name}_bucket{{{inner}le="{text}"}} {reached}'
        yield f"{name}_sum{labels} {self.total:.9g}"
        yield f"{name}_count{labels} {reached}"


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """The value below which `share` of what was counted lies, as far as the bounds tell; 0 when there is nothing."""
    wanted = share * sum(counts)
    reached, low = 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and reached + count >= wanted:
            return low + (bound - low) * (wanted - reached) / count
        reached += count
        low = bound
    return low if sum(counts) else 0.0


class Sheet:
    """The lines of one scrape, by family."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._lines: dict[str, list[str]] = {name: [] for name in families}

    def lines(self, name: str) -> list[str]:
        """Where the lines of a family go, for those who write many."""
        return self._lines[name]

    def put(self, name: str, value: float, **labels: str) -> None:
        self._lines[name].append(f"{name}{label_text(labels.items())} {number(value)}")

    def put_histogram(self, name: str, histogram: Histogram, **labels: str) -> None:
        self._lines[name] += histogram.lines(name, label_text(labels.items()))

    def pieces(self) -> Iterator[str]:
        """The text, a family at a time. One that has nothing to say is left out."""
        for name, lines in self._lines.items():
            if lines:
                yield self._families[name].head + "\n".join(lines) + "\n"


class Numbers:
    """The values of a component's families; any thread may set, add and read."""

    def __init__(self, families: Families, **labels: str) -> None:
        """`labels` are part of every series."""
        self._families = families
        self._fixed = tuple(labels.items())
        self.lock = threading.RLock()
        """Holding it, several numbers change at once for whoever reads."""
        self._values: dict[str, dict[str, float | Histogram]] = {name: {} for name in families}
        self._left_out = 0

    def set(self, name: str, value: float, **labels: str) -> None:
        with self.lock:
            series, key = self._values[name], self._key(labels)
            if key in series or self._has_room(series):
                series[key] = value

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        with self.lock:
            series, key = self._values[name], self._key(labels)
            held = series.get(key, 0)
            assert not isinstance(held, Histogram)
            if key in series or self._has_room(series):
                series[key] = held + amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        with self.lock:
            series, key = self._values[name], self._key(labels)
            if key not in series and self._has_room(series):
                series[key] = Histogram()
            held = series.get(key)
            if isinstance(held, Histogram):
                held.observe(value)

    def forget(self, name: str) -> None:
        """Drop every series of a family: what they were about may be gone."""
        with self.lock:
            self._values[name].clear()

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        lines = []
        with self.lock:
            for name, series in self._values.items():
                if series:
                    lines.append(self._families[name].head[:-1])
                for labels, value in series.items():
                    if isinstance(value, Histogram):
                        lines += value.lines(name, labels)
                    else:
                        lines.append(f"{name}{labels} {number(value)}")
        return "\n".join(lines) + "\n"

    def series(self) -> dict[str, float]:
        """Every series that is no histogram, with its value."""
        with self.lock:
            return {
                f"{name}{labels}": value
                for name, series in self._values.items()
                for labels, value in series.items()
                if not isinstance(value, Histogram)
            }

    def _key(self, labels: Mapping[str, str]) -> str:
        return label_text((*self._fixed, *labels.items()))

    def _has_room(self, series: Mapping[str, object]) -> bool:
        has_room = len(series) < SERIES_MAX
        self._left_out += not has_room
        return has_room


def parse_address(text: str) -> tuple[str, int]:
    """`9400`, or `0.0.0.0:9400` for those who mean it: without a host only this machine can look."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or int(port) > 65_535:
        raise UsageError(f"{text!r} is no port, and no host and port")
    return host or LOOPBACK, int(port)


@contextmanager
def served(text: Callable[[], str], host: str, port: int) -> Iterator[int]:
    """The metrics at `/metrics` while within, by threads of their own; gives the port, which is a free one for 0."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        timeout = 10
        """Seconds a client may take: a connection that says nothing holds a thread."""

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "only /metrics is here")
                return
            body = text().encode("utf-8", "backslashreplace")
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name for it
            """Being asked every few seconds is not worth a line."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class ServedNumbers:
    """Numbers that somebody may look at while the block lasts; subclasses say what `text` shows."""

    def __init__(self, families: Families, listen: str | int | None = None) -> None:
        """`listen` is a port of this machine, or HOST:PORT, where `/metrics` is; 0 takes a free one: see `port`."""
        self.numbers = Numbers(families)
        self.port: int | None = None
        self._open = ExitStack()
        if listen is not None:
            self.port = self._open.enter_context(served(self.text, *parse_address(str(listen))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        return self.numbers.text()
