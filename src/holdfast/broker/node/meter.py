"""What requests cost and what came of them: counted as they pass, read by `metrics` when somebody asks.

A request has five moments: its last byte arrived, it was begun, its work was done and it was parked, its response was
ready, its response left. What lies between them has Kafka's names in Kafka's metrics and these in ours:

    queue   arrived to begun        RequestQueueTimeMs    earlier requests of the connection came first
    append  begun to parked         LocalTimeMs           the broker's own work, with the write to the page cache
    flush   parked to ready         RemoteTimeMs          a flush, data to fetch, the other members of a group
    wait    ready to left           ResponseQueueTimeMs   an earlier request of the connection was not answered

Counting is on the way of every produce request, so as little as possible happens there: of the clock no more readings
than the moments need, and the moments, or a duration, are put on a list, which is added up once a second by what runs
outside of the interpreter. All of it happens on the node's thread. Times are counted by powers of two of nanoseconds: a
number's length in bits is the quickest thing to know of it. What a topic took in messages and bytes is not counted at
all, since its logs know it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import sub
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Fields, Session
from holdfast.exposition import COUNTS, Histogram
from holdfast.saying import Level, Line, Say, warn
from holdfast.seams import Clock
from holdfast.wire.api_keys import FETCH, JOIN_GROUP, METADATA, PRODUCE, SYNC_GROUP
from holdfast.wire.apis import BY_KEY

if TYPE_CHECKING:
    from holdfast.broker.node.connection import Exchange

BITS_MIN: Final = 16
BITS_MAX: Final = 64
"""No clock counts further."""
BOUNDS: Final = tuple((1 << bits) / 1e9 for bits in range(BITS_MIN, 36))
"""In seconds: from 66 µs, quicker than any request is answered, to 34 s, longer than any client waits."""
NEVER_NS: Final = 1 << 62
_WAITS: Final = (FETCH, JOIN_GROUP, SYNC_GROUP)
"""These wait for data or for the other members of a group, as they are meant to."""
_USUAL: Final = frozenset(
    {
        ErrorCode.concurrent_transactions,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.fetch_session_id_not_found,
        ErrorCode.group_id_not_found,
        ErrorCode.illegal_generation,
        ErrorCode.invalid_fetch_session_epoch,
        ErrorCode.leader_not_available,
        ErrorCode.member_id_required,
        ErrorCode.not_coordinator,
        ErrorCode.rebalance_in_progress,
        ErrorCode.stale_member_epoch,
        ErrorCode.topic_already_exists,
        ErrorCode.unknown_leader_epoch,
        ErrorCode.unstable_offset_commit,
        ErrorCode.unsupported_version,
    }
)
"""What clients are told in the usual course of things, and know what to do about."""
QUANTILE_WINDOW_NS: Final = 60 * 10**9
"""Quantiles are of the requests of the last one to two of these."""


class TopicTraffic:
    """What went in and out of a topic since the broker started."""

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "failed_fetches",
        "failed_produces",
        "fetches",
        "messages_in",
        "produces",
    )

    def __init__(self) -> None:
        self.messages_in = self.bytes_in = self.bytes_out = 0  # the first two as of the last scrape
        self.produces = self.fetches = self.failed_produces = self.failed_fetches = 0

    def add(self, other: TopicTraffic) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class RequestStats:
    """The requests of one API in one version."""

    __slots__ = ("_moments", "answered_at", "counts", "flush_ns", "queue_ns", "total_ns", "wait_ns")

    def __init__(self) -> None:
        self.counts = [0] * (BITS_MAX + 1)
        """Of those answered, by the bits of the nanoseconds they took."""
        self.total_ns = self.queue_ns = self.flush_ns = self.wait_ns = 0
        self._moments: list[int] = []
        self.answered_at = self._moments.extend
        """Notes the five moments of a request, in their order, for `add_up`."""

    def took(self, taken: Iterable[int]) -> None:
        for bits, count in Counter(map(int.bit_length, taken)).items():
            self.counts[bits] += count

    def add_up(self) -> None:
        moments = self._moments
        arrived, begun, parked, ready, left = (moments[at::5] for at in range(5))
        moments.clear()
        self.total_ns += sum(left) - sum(arrived)
        self.queue_ns += sum(begun) - sum(arrived)
        self.flush_ns += sum(ready) - sum(parked)
        self.wait_ns += sum(left) - sum(ready)
        self.took(map(sub, left, arrived))

    @property
    def answered(self) -> int:
        return sum(self.counts)

    @property
    def append_ns(self) -> int:
        return self.total_ns - self.queue_ns - self.flush_ns - self.wait_ns

    def histogram_counts(self) -> list[int]:
        """Of those answered, by `BOUNDS`, and of those that took longer."""
        last = BITS_MIN + len(BOUNDS)
        return [sum(self.counts[: BITS_MIN + 1]), *self.counts[BITS_MIN + 1 : last], sum(self.counts[last:])]


class Refused(NamedTuple):
    """One error in a response."""

    code: ErrorCode
    topic: object
    """As the response names it, by name or id; None where it names none."""
    where: str
    message: str | None


def api_name(api_key: int) -> str:
    api = BY_KEY.get(api_key)
    return api.name if api is not None else str(api_key)


@dataclass(eq=False, repr=False)
class Meter:
    clock: Clock
    say: Say = field(default=lambda line: None)
    """Who was refused what, and what was slow."""
    slow_ns: int = field(default=NEVER_NS, init=False)
    """A request that takes as long is told of."""
    requests: dict[int, RequestStats] = field(default_factory=dict, init=False)
    """By API key and version: see `stats_of`."""
    refusals: Counter[tuple[int, ErrorCode]] = field(default_factory=Counter, init=False)
    """By API key and error."""
    topics: dict[str, TopicTraffic] = field(default_factory=dict, init=False)
    elsewhere: TopicTraffic = field(default_factory=TopicTraffic, init=False)
    """Of topics that are deleted, or that never were."""
    flush_messages: Histogram = field(default_factory=lambda: Histogram(COUNTS), init=False)
    """Messages that one flush of a partition made durable: how well requests share flushes."""
    flush_seconds: Histogram = field(default_factory=Histogram, init=False)
    """The flusher's, where it has one: it is added up with the others."""
    names_by_id: Mapping[UUID, str] = field(default_factory=dict, init=False)
    """Of the topics there are."""
    scrub_passes: int = field(default=0, init=False)
    _produced: dict[tuple[str, int], tuple[list[int], list[int]]] = field(default_factory=dict, init=False)
    """By topic and version: how long the usual produce requests took since `add_up`, and waited for a flush."""
    _seen: list[tuple[int, dict[str, list[int]]]] = field(default_factory=list, init=False)
    """The counts of every API as they stood at some moments, the last one QUANTILE_WINDOW_NS ago at most."""

    # Requests

    def stats_of(self, api_key: int, version: int) -> RequestStats:
        key = api_key << 8 | version
        stats = self.requests.get(key)
        if stats is None:
            stats = self.requests[key] = RequestStats()
        return stats

    def answered(self, exchange: Exchange, left_ns: int) -> None:
        """The response of a request leaves."""
        stats = self.requests.get(exchange.api_key << 8 | exchange.version)
        if stats is None:
            stats = self.stats_of(exchange.api_key, exchange.version)
        arrived_ns = exchange.arrived_ns
        stats.answered_at((arrived_ns, exchange.begun_ns, exchange.parked_ns, exchange.ready_ns, left_ns))
        if left_ns - arrived_ns >= self.slow_ns:
            self._tell_slow(exchange, left_ns)

    def took(self, topic: str, version: int) -> tuple[Callable[[int], None], Callable[[int], None]]:
        """For usual produce requests to a topic: what takes how long each has taken, and how long it was parked."""
        taken, parked = self._produced.setdefault((topic, version), ([], []))
        return taken.append, parked.append

    def _tell_slow(self, exchange: Exchange, left_ns: int) -> None:
        arrived, begun, parked, ready = (
            exchange.arrived_ns,
            exchange.begun_ns,
            exchange.parked_ns,
            exchange.ready_ns,
        )
        took_ns = left_ns - arrived
        if exchange.api_key in _WAITS and took_ns - (ready - parked) < self.slow_ns:
            return
        parts = zip(
            ("queue", "append", "flush", "wait"),
            (begun - arrived, parked - begun, ready - parked, left_ns - ready),
            strict=True,
        )
        text = ", ".join(f"{part} {ns / 1e6:,.0f}" for part, ns in parts)
        self.say(
            warn(
                f"slow request: {api_name(exchange.api_key)} of {exchange.connection.session} took "
                f"{took_ns / 1e6:,.0f} ms: {text}",
                kind="slow request",
            )
        )

    def every_second(self, slow_ms: int) -> None:
        self.slow_ns = slow_ms * 1_000_000 or NEVER_NS
        for (topic, _), (taken, _) in self._produced.items():
            if taken and max(taken) >= self.slow_ns:
                text = f"took up to {max(taken) / 1e6:,.0f} ms in queue and append"
                self.say(
                    warn(
                        f"slow request: of {len(taken):,} Produce to {topic} one {text}", kind="slow request"
                    )
                )
        self.add_up()

    def add_up(self) -> None:
        """Once a second, and for each scrape: count what was noted since. A second of a busy broker takes 2 ms."""
        for (topic, version), (taken, parked) in self._produced.items():
            if taken:
                self.known_traffic(topic).produces += len(taken)
                stats = self.stats_of(PRODUCE, version)
                stats.total_ns += sum(taken)
                stats.flush_ns += sum(parked)
                stats.took(taken)
                taken.clear()
                parked.clear()
        for stats in self.requests.values():
            stats.add_up()
        self.flush_messages.add_up()
        self.flush_seconds.add_up()

    def by_api(self) -> dict[int, list[tuple[int, RequestStats]]]:
        """Versions and their requests, by API key."""
        found: dict[int, list[tuple[int, RequestStats]]] = {}
        for key, stats in self.requests.items():
            found.setdefault(key >> 8, []).append((key & 0xFF, stats))
        return found

    def recent_counts(self, counts: dict[str, list[int]]) -> dict[str, list[int]]:
        """What was added to these counts, by API, in the last minute or two, or since there is anything."""
        now_ns = self.clock.monotonic_ns()
        if not self._seen or now_ns - self._seen[-1][0] >= QUANTILE_WINDOW_NS:
            self._seen = [*self._seen[-1:], (now_ns, counts)]
            if len(self._seen) == 1:
                return counts
        then = self._seen[0][1] if len(self._seen) > 1 else {}
        return {
            api: [new - old for new, old in zip(now, then.get(api, [0] * len(now)), strict=True)]
            for api, now in counts.items()
        }

    # Refusals

    def refused(self, session: Session, api_key: int, refusal: Refused) -> None:
        self.refusals[api_key, refusal.code] += 1
        if api_key == PRODUCE:
            self.known_traffic(self.name_of(refusal.topic)).failed_produces += 1
        is_usual = refusal.code in _USUAL or api_key == METADATA  # its handler says what is worth saying
        level = Level.DEBUG if is_usual else Level.WARN if api_key == PRODUCE else Level.INFO
        request, code = api_name(api_key), refusal.code.name.upper()
        where = f" for {refusal.where}" if refusal.where else ""
        why = f": {refusal.message}" if refusal.message else ""
        text = f"refused {request} of {session}{where}: {code}{why}"
        self.say(Line(text, level, kind=f"refused {request} {code}"))

    def look_through(self, session: Session, api_key: int, fields: Fields) -> None:
        """Count the errors that a response tells."""
        for refusal in refusals_in(fields):
            self.refused(session, api_key, refusal)

    # Topics

    def traffic_of(self, topic: str) -> TopicTraffic:
        """Of a topic that exists."""
        return self.topics.setdefault(topic, TopicTraffic())

    def name_of(self, topic: object) -> str | None:
        return (
            self.names_by_id.get(topic)
            if isinstance(topic, UUID)
            else topic
            if isinstance(topic, str)
            else None
        )

    def known_traffic(self, topic: str | None) -> TopicTraffic:
        return self.topics.get(topic, self.elsewhere) if topic is not None else self.elsewhere

    def forget_topic(self, topic: str) -> None:
        self.add_up()
        for key in [key for key in self._produced if key[0] == topic]:
            del self._produced[key]
        gone = self.topics.pop(topic, None)
        if gone is not None:
            gone.messages_in = gone.bytes_in = 0  # its partitions have told theirs
            self.elsewhere.add(gone)


_TOPIC_FIELDS: Final = ("name", "topic", "topic_name", "topic_id")
_PARTITION_FIELDS: Final = ("index", "partition_index", "partition")
_OTHER_FIELDS: Final = ("group_id", "transactional_id", "resource_name", "member_id", "key")


def refusals_in(fields: Fields, above: Fields | None = None) -> Iterator[Refused]:
    """The errors of a response: its own, and of what it lists."""
    code = fields.get("error_code")
    if code:
        yield _refusal(code, fields, above or {})
    for value in fields.values():
        if type(value) is list and value and type(value[0]) is dict:
            for each in value:
                yield from refusals_in(each, fields)


def _refusal(code: int, fields: Fields, above: Fields) -> Refused:
    topic = _first(_TOPIC_FIELDS, fields) or _first(_TOPIC_FIELDS, above)
    partition = _first(_PARTITION_FIELDS, fields)
    where = str(topic) if topic is not None else str(_first(_OTHER_FIELDS, fields) or "")
    if topic is not None and isinstance(partition, int):
        where = f"{topic}-{partition}"
    return Refused(ErrorCode(code), topic, where, fields.get("error_message"))


def _first(names: tuple[str, ...], fields: Fields) -> object:
    return next((fields[name] for name in names if fields.get(name) is not None), None)
