"""Sample data: a stream of events of a kind, some of them spoilt, sent twice or long overdue; and what it came to.

The same settings give the same bytes, on every machine. Memory does not grow with the number of messages: besides what
the kind remembers there are the last messages, from which copies are taken, and counts.

The kinds of sample data: each makes one event after the other, and knows what results over them must come to.

An event is a key and a JSON object on one line, written without a JSON library because its texts need no escaping. What
a kind remembers is bounded by its number of keys, never by how many events there were. Its results are over the events
it made: a copy is no second event, and a late one is one.

Chance and time that are the same everywhere: one seeded stream of numbers, whole milliseconds.

Only `random()` is drawn, the one method whose numbers Python promises to keep; nothing passes through the machine's
mathematical library, whose last digits differ.
"""

from __future__ import annotations

import datetime
import hashlib
import random
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

from holdfast.errors import UsageError

DEFAULT_START_MS: Final = 1_767_225_600_000
"""2026-01-01T00:00:00Z: a time that does not change from run to run."""


@dataclass(frozen=True)
class GenerateSettings:
    """What sample data is asked for."""

    kind: str
    seed: int = 0
    count: int = 10_000
    """Messages in all: copies and malformed ones included."""
    keys: int | None = None
    """How many customers, services, rows or cards there are, or users at a time; None for the kind's default."""
    start_ms: int = DEFAULT_START_MS
    spacing_ms: int = 100
    """Between two events, on average."""
    disorder_ms: int = 0
    """How far behind the newest an event may be that is not late."""
    malformed: float = 0.0
    """What part of the messages cannot be parsed."""
    duplicates: float = 0.0
    """What part is a copy of one shortly before."""
    late: float = 0.0
    """What part happened long before it came."""
    late_by_ms: int = 3_600_000
    """A late event is this much behind at least, and twice this at most."""

    def __post_init__(self) -> None:
        parts = {"malformed": self.malformed, "duplicates": self.duplicates, "late": self.late}
        for name, part in parts.items():
            if not 0 <= part <= 1:
                raise UsageError(f"{name} is a part of the messages, from 0 to 1, not {part}")
        if sum(parts.values()) > 1:
            raise UsageError(f"{', '.join(parts)} are parts of the messages; together they are more than all")
        if self.keys is not None and self.keys < 1:
            raise UsageError("there must be one key at least")


T = TypeVar("T")


class Chance:
    def __init__(self, seed: str) -> None:
        self.draw = random.Random(seed).random
        """From 0 up to 1."""

    def below(self, limit: int) -> int:
        return int(self.draw() * limit)

    def between(self, low: int, high: int) -> int:
        return low + int(self.draw() * (high - low + 1))

    def one_of(self, among: Sequence[T]) -> T:
        return among[int(self.draw() * len(among))]

    def skewed(self, limit: int) -> int:
        """Small numbers far more often: a tenth of the customers place almost half of the orders."""
        part = self.draw()
        return int(part * part * part * limit)


@lru_cache(maxsize=4096)
def _second_text(second: int) -> str:
    return datetime.datetime.fromtimestamp(second, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")


def time_text(time_ms: int) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    second, rest_ms = divmod(time_ms, 1000)
    return f"{_second_text(second)}.{rest_ms:03}Z"


def money_text(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02}"


class Event(NamedTuple):
    key: str
    value: str


class Kind(ABC):
    """One kind of sample data, as many keys as it was told."""

    def __init__(self, chance: Chance, keys: int) -> None:
        self._chance = chance
        self._keys = keys

    def is_fixed(self, now_ms: int) -> bool:
        """Whether the next event belongs to a pattern: then it comes now, and as it is. Asked before each."""
        return False

    @abstractmethod
    def make(self, now_ms: int, at_ms: int) -> Event:
        """The next event; `at_ms` is when it happened, which may be long before `now_ms`."""

    @abstractmethod
    def results(self) -> dict[str, Any]:
        """What a correct pipeline finds in all events made so far."""


class Orders(Kind):
    """id, customer, amount, at, and sometimes a note; the fields that `holdfast pipeline init` reads."""

    NOTES: Final = ("gift", "call first", "leave at the door", "urgent")

    def __init__(self, chance: Chance, keys: int) -> None:
        super().__init__(chance, keys)
        self._count = 0
        self._cents = 0
        self._customers = bytearray(keys)

    def make(self, now_ms: int, at_ms: int) -> Event:
        chance = self._chance
        self._count += 1
        number = chance.skewed(self._keys)
        self._customers[number] = 1
        cents = chance.between(100, 50_000)
        self._cents += cents
        customer = f"customer-{number}"
        note = f',"note":"{chance.one_of(self.NOTES)}"' if chance.draw() < 0.2 else ""
        value = (
            f'{{"id":{self._count},"customer":"{customer}","amount":{money_text(cents)},'
            f'"at":"{time_text(at_ms)}"{note}}}'
        )
        return Event(customer, value)

    def results(self) -> dict[str, Any]:
        return {
            "orders": self._count,
            "amount": money_text(self._cents),
            "customers": sum(self._customers),
        }


class Activity(Kind):
    """user, action, page, at: people come, look at pages and leave.

    Within a session nobody pauses for more than 15 minutes, and nobody is back before 45 are over: with a gap of 30
    the sessions are those that were made.
    """

    PAGES: Final = ("home", "search", "product", "cart", "checkout", "help")
    ACTIONS: Final = ("view", "view", "view", "click", "click", "scroll")
    PAUSE_MS_MAX: Final = 15 * 60_000
    AWAY_MS_MIN: Final = 45 * 60_000
    LEAVING: Final = 0.08

    def __init__(self, chance: Chance, keys: int) -> None:
        super().__init__(chance, keys)
        self._active: list[tuple[int, int] | None] = [None] * keys
        """Who is there, and when they were last seen."""
        self._away: deque[tuple[int, int]] = deque()
        """When they were last seen, and who; in that order. Bounded: who was away long enough comes again."""
        self._place: int | None = None
        """Whose turn it is, once that is drawn."""
        self._users = 0
        self._sessions = 0
        self._actions: dict[str, int] = {}

    def is_fixed(self, now_ms: int) -> bool:
        if self._place is None:
            self._place = self._chance.below(len(self._active))
        there = self._active[self._place]
        if there is not None and now_ms - there[1] > self.PAUSE_MS_MAX:
            self._away.append((there[1], there[0]))
            there = self._active[self._place] = None
        return there is None  # a session begins with an event that is not late

    def make(self, now_ms: int, at_ms: int) -> Event:
        chance = self._chance
        assert self._place is not None, "is_fixed is asked before"
        place, self._place = self._place, None
        there = self._active[place]
        number, seen_ms = (self._arrive(now_ms), now_ms) if there is None else there
        if now_ms - at_ms <= self.PAUSE_MS_MAX:
            seen_ms = now_ms  # what comes late fills no pause
        if chance.draw() < self.LEAVING:
            self._away.append((seen_ms, number))
            self._active[place] = None
        else:
            self._active[place] = (number, seen_ms)
        action = chance.one_of(self.ACTIONS)
        self._actions[action] = self._actions.get(action, 0) + 1
        user = f"user-{number}"
        value = (
            f'{{"user":"{user}","action":"{action}","page":"/{chance.one_of(self.PAGES)}",'
            f'"at":"{time_text(at_ms)}"}}'
        )
        return Event(user, value)

    def _arrive(self, now_ms: int) -> int:
        self._sessions += 1
        if self._away and now_ms - self._away[0][0] >= self.AWAY_MS_MIN:
            return self._away.popleft()[1]
        self._users += 1
        return self._users

    def results(self) -> dict[str, Any]:
        return {
            "events": sum(self._actions.values()),
            "users": self._users,
            "sessions": self._sessions,
            "actions": dict(sorted(self._actions.items())),
        }


class Logs(Kind):
    """at, service, level, message, latency_ms: now and then a service has a bad minute."""

    SERVICES: Final = ("api", "billing", "search", "login", "mail", "images", "stock", "reports")
    BAD_MINUTES: Final = 24
    """One minute of a service in so many."""

    def __init__(self, chance: Chance, keys: int) -> None:
        super().__init__(chance, keys)
        names = [self.SERVICES[number % len(self.SERVICES)] for number in range(keys)]
        rounds = [number // len(self.SERVICES) for number in range(keys)]
        self._services = [
            name if turn == 0 else f"{name}-{turn + 1}" for name, turn in zip(names, rounds, strict=True)
        ]
        self._levels = {"DEBUG": 0, "INFO": 0, "WARN": 0, "ERROR": 0}
        self._errors: dict[str, int] = {}

    def make(self, now_ms: int, at_ms: int) -> Event:
        chance = self._chance
        service = chance.one_of(self._services)
        is_bad = zlib.crc32(f"{service}:{at_ms // 60_000}".encode()) % self.BAD_MINUTES == 0
        level = self._level(chance.draw(), is_bad)
        self._levels[level] += 1
        if level == "ERROR":
            self._errors[service] = self._errors.get(service, 0) + 1
        latency_ms = chance.between(1, 200) * (10 if level == "ERROR" else 1)
        message = f"request {chance.below(1_000_000)} {'failed' if level == 'ERROR' else 'done'}"
        value = (
            f'{{"at":"{time_text(at_ms)}","service":"{service}","level":"{level}",'
            f'"message":"{message}","latency_ms":{latency_ms}}}'
        )
        return Event(service, value)

    @staticmethod
    def _level(part: float, is_bad: bool) -> str:
        if part < (0.5 if is_bad else 0.02):
            return "ERROR"
        return (
            "WARN" if part < 0.6 and is_bad else "WARN" if part < 0.1 else "DEBUG" if part > 0.9 else "INFO"
        )

    def results(self) -> dict[str, Any]:
        return {
            "lines": sum(self._levels.values()),
            "levels": dict(self._levels),
            "errors_by_service": dict(sorted(self._errors.items())),
        }


class Changes(Kind):
    """op, id, version, name, city, balance, at: the changes of a table's rows, in their order for each id.

    `version` grows by one with each change of an id. A delete has no columns but these.
    """

    CITIES: Final = ("Lisbon", "Oslo", "Ghent", "Turin", "Graz", "Brno")

    def __init__(self, chance: Chance, keys: int) -> None:
        super().__init__(chance, keys)
        self._versions = [0] * keys
        self._cents: list[int | None] = [None] * keys
        """Of rows that are there."""
        self._made = {"insert": 0, "update": 0, "delete": 0}

    def make(self, now_ms: int, at_ms: int) -> Event:
        chance = self._chance
        number = chance.below(len(self._versions))
        is_there = self._cents[number] is not None
        op = "insert" if not is_there else "delete" if chance.draw() < 0.15 else "update"
        self._made[op] += 1
        self._versions[number] += 1
        head = f'{{"op":"{op}","id":{number},"version":{self._versions[number]}'
        if op == "delete":
            self._cents[number] = None
            columns = ""
        else:
            cents = chance.below(1_000_000)
            self._cents[number] = cents
            columns = (
                f',"name":"name-{number}","city":"{chance.one_of(self.CITIES)}","balance":{money_text(cents)}'
            )
        return Event(str(number), f'{head}{columns},"at":"{time_text(at_ms)}"}}')

    def results(self) -> dict[str, Any]:
        there = [cents for cents in self._cents if cents is not None]
        return {"changes": dict(self._made), "rows": len(there), "balance": money_text(sum(there))}


class Payments(Kind):
    """id, card, amount, merchant, country, at: of 5 to 400, but for stolen cards.

    A stolen card is tried with less than 1 and then, within a minute and as the card's next payment, charged with more
    than 500.
    """

    MERCHANTS: Final = ("grocer", "fuel", "books", "cinema", "shoes", "garden", "travel")
    COUNTRIES: Final = ("PT", "NO", "BE", "IT", "AT", "CZ")
    STOLEN: Final = 0.002
    SOON_MS: Final = 45_000

    def __init__(self, chance: Chance, keys: int) -> None:
        super().__init__(chance, keys)
        self._count = 0
        self._cents = 0
        self._tried: tuple[int, int] | None = None
        """The card that the next payment charges, and when it was tried."""
        self._is_trying = False
        self._frauds = 0

    def is_fixed(self, now_ms: int) -> bool:
        if self._tried is None and not self._is_trying:
            self._is_trying = self._chance.draw() < self.STOLEN
        return self._is_trying or self._tried is not None

    def make(self, now_ms: int, at_ms: int) -> Event:
        chance = self._chance
        if self._tried is not None:
            number, tried_ms = self._tried
            self._tried = None
            self._frauds += 1
            return self._payment(number, chance.between(50_100, 200_000), min(at_ms, tried_ms + self.SOON_MS))
        number = chance.skewed(self._keys)
        if self._is_trying:
            self._is_trying = False
            self._tried = (number, at_ms)
            return self._payment(number, chance.between(10, 99), at_ms)
        return self._payment(number, chance.between(500, 40_000), at_ms)

    def _payment(self, number: int, cents: int, at_ms: int) -> Event:
        chance = self._chance
        self._count += 1
        self._cents += cents
        card = f"card-{number:06}"
        value = (
            f'{{"id":{self._count},"card":"{card}","amount":{money_text(cents)},'
            f'"merchant":"{chance.one_of(self.MERCHANTS)}","country":"{chance.one_of(self.COUNTRIES)}",'
            f'"at":"{time_text(at_ms)}"}}'
        )
        return Event(card, value)

    def results(self) -> dict[str, Any]:
        return {"payments": self._count, "amount": money_text(self._cents), "frauds": self._frauds}


class Choice(NamedTuple):
    make: type[Kind]
    keys: int


KINDS: Final[Mapping[str, Choice]] = {
    "orders": Choice(Orders, 1000),
    "activity": Choice(Activity, 50),
    "logs": Choice(Logs, 8),
    "changes": Choice(Changes, 1000),
    "payments": Choice(Payments, 500),
}


RECENT_MAX: Final = 256
"""A copy is of one of so many messages before it: what a producer that tries again has in flight."""


class GeneratedMessage(NamedTuple):
    key: bytes
    value: bytes
    """Without a line end in it."""


class Generator:
    """Messages by iteration, once; `summary` tells what they came to so far."""

    def __init__(self, settings: GenerateSettings) -> None:
        choice = KINDS.get(settings.kind)
        if choice is None:
            raise UsageError(f"there is no {settings.kind!r}; there are {', '.join(KINDS)}")
        self._settings = settings
        self._chance = Chance(f"{settings.kind}:{settings.seed}")
        self._kind = choice.make(
            Chance(f"{settings.kind}:{settings.seed}:events"), settings.keys or choice.keys
        )
        self._recent: list[GeneratedMessage] = []
        self._now_ms = settings.start_ms
        self._messages = self._events = self._copies = self._malformed = self._late = 0
        self._bytes = 0
        self._times_ms: tuple[int, int] | None = None
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[GeneratedMessage]:
        while self._messages < self._settings.count:
            message = self._next()
            self._messages += 1
            self._bytes += len(message.value)
            self._digest.update(message.value + b"\n")
            yield message

    def _next(self) -> GeneratedMessage:
        settings, chance = self._settings, self._chance
        self._now_ms += int(2 * settings.spacing_ms * chance.draw())
        if self._kind.is_fixed(self._now_ms):
            return self._event(self._now_ms)
        part = chance.draw()
        if part < settings.duplicates:
            if self._recent:
                self._copies += 1
                return chance.one_of(self._recent)
        elif part < settings.duplicates + settings.malformed:
            self._malformed += 1
            return self._spoilt()
        at_ms = self._now_ms - int(settings.disorder_ms * chance.draw())
        if (
            part >= 1 - settings.late and self._events >= RECENT_MAX
        ):  # nothing is late where nothing came before
            self._late += 1
            at_ms -= int(settings.late_by_ms * (1 + chance.draw()))
        return self._event(at_ms)

    def _event(self, at_ms: int) -> GeneratedMessage:
        event: Event = self._kind.make(self._now_ms, at_ms)
        message = GeneratedMessage(event.key.encode(), event.value.encode())
        first, last = self._times_ms or (at_ms, at_ms)
        self._times_ms = min(first, at_ms), max(last, at_ms)
        if len(self._recent) < RECENT_MAX:
            self._recent.append(message)
        else:
            self._recent[self._events % RECENT_MAX] = message
        self._events += 1
        return message

    def _spoilt(self) -> GeneratedMessage:
        """What no parser may take: cut, doubled, not UTF-8, or no JSON at all."""
        whole = self._chance.one_of(self._recent) if self._recent else GeneratedMessage(b"none", b'{"id":0}')
        match self._chance.below(4):
            case 0:
                return GeneratedMessage(
                    whole.key, whole.value[: 1 + self._chance.below(len(whole.value) - 1)]
                )
            case 1:
                return GeneratedMessage(whole.key, whole.value + whole.value)
            case 2:
                return GeneratedMessage(whole.key, whole.value[:-1] + b"\xff\xfe")
            case _:
                return GeneratedMessage(whole.key, b"<html>502 Bad Gateway</html>")

    def summary(self) -> dict[str, Any]:
        """What was generated, and what results over it must come to."""
        first, last = self._times_ms or (None, None)
        return {
            "kind": self._settings.kind,
            "seed": self._settings.seed,
            "messages": self._messages,
            "bytes": self._bytes,
            "sha256": self._digest.hexdigest(),
            "events": self._events,
            "duplicates": self._copies,
            "malformed": self._malformed,
            "late": self._late,
            "first": None if first is None else time_text(first),
            "last": None if last is None else time_text(last),
            "results": self._kind.results(),
        }
