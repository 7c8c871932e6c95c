"""What happened to messages, one event a line: the only thing the checker looks at.

A history is a file of JSON lines. Every line is an object with `t` (nanoseconds, of one clock), `actor` (who saw it)
and `event`, one of `KINDS`; the table says which fields a kind must have. Messages are known by `id`, which is theirs
alone; places by `topic`, `partition` and `offset`. A topic that is deleted and created again is another one, and is
called by another name.

Outcomes of a send: `ack`, the sender was told that it is stored; `fail`, it was told that it is not; `unknown`, nobody
can say: a send that timed out is unknown, never failed. Nothing at all is unknown too. What the *program* then does is
its own: `drop` says that it lets go of the message, `keep` that the message is aside where somebody finds it.

The reader is strict: a line that is no event is named with its number, and the rest is read all the same. Whoever
judges such a history knows that it is partial.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import IO, Any, Final

from holdfast.errors import UsageError

KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    # What the run wants to see; without it the run is void.
    "plan": (),
    # The sender's side
    "send": ("id", "topic"),
    "ack": ("id",),
    "fail": ("id", "error"),
    "unknown": ("id",),
    "drop": ("id", "why"),
    "keep": ("id", "where"),
    # Writes that belong together, transaction or not
    "begin": ("txn", "ids"),
    "end": ("txn", "outcome"),
    # From now on only writers of this epoch may write in this role.
    "takeover": ("role", "epoch"),
    # The log, as read after everything
    "stored": ("id", "topic", "partition", "offset"),
    "log-end": ("topic",),
    # Readers
    "assign": ("group", "topic", "partition"),
    "deliver": ("id", "group", "topic", "partition", "offset"),
    "handle": ("id", "group"),
    "commit": ("group", "topic", "partition", "offset"),
    "position": ("group", "topic", "partition", "offset"),
    "reset": ("group", "topic", "partition"),
    "read-end": ("group", "topic"),
    # The world
    "fault": ("what",),
    "note": ("what",),
}
TEXTS: Final = frozenset(
    {"id", "topic", "error", "why", "where", "txn", "outcome", "role", "group", "what", "key", "fault"}
)
NUMBERS: Final = frozenset({"partition", "offset", "epoch", "successes", "start"})
OUTCOMES: Final = frozenset({"committed", "aborted", "unknown"})
LINE_BYTES_MAX: Final = 1 << 20
"""No event of ours is near it; a longer line is something else than a history."""


class HistoryError(UsageError):
    """A history that cannot be read at all."""


@dataclass(frozen=True, slots=True)
class Event:
    t: int
    actor: str
    kind: str
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> int | None:
        value = self.fields.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def id(self) -> str:
        return self.text("id")

    @property
    def place(self) -> tuple[str, int, int] | None:
        """Topic, partition and offset, when it has all three."""
        topic, partition, offset = self.text("topic"), self.number("partition"), self.number("offset")
        return (topic, partition, offset) if topic and partition is not None and offset is not None else None

    def as_line(self) -> str:
        document = {"t": self.t, "actor": self.actor, "event": self.kind, **self.fields}
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"


@dataclass(frozen=True)
class History:
    events: tuple[Event, ...]
    problems: tuple[str, ...] = ()
    """Lines that are no events; whoever judges without them judges a part."""

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def of(self, *kinds: str) -> Iterator[Event]:
        return (event for event in self.events if event.kind in kinds)


@dataclass
class Recorder:
    """Writes a history down as it happens; any thread may."""

    now_ns: Callable[[], int] = time.monotonic_ns
    on_event: Callable[[Event], None] | None = None
    events: list[Event] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, event: str, actor: str, /, **fields: Any) -> Event:
        """One event; refused when its kind or its fields are none."""
        given = {name: value for name, value in fields.items() if value is not None}
        problem = problem_of({"t": 0, "actor": actor, "event": event, **given})
        if problem is not None:
            raise HistoryError(f"not an event: {problem}")
        with self._lock:
            made = Event(self.now_ns(), actor, event, given)
            self.events.append(made)
        if self.on_event is not None:
            self.on_event(made)
        return made

    def history(self) -> History:
        with self._lock:
            return History(tuple(self.events))


def write_history(history: Iterable[Event], path: str | PathLike[str]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(event.as_line() for event in history)


def read_history(path: str | PathLike[str]) -> History:
    """The events of a file in the order of its lines; what is not one is named in `problems`."""
    try:
        with open(path, "rb") as file:
            return parse_history(file)
    except OSError as error:
        raise HistoryError(f"cannot read {path}: {error.strerror}") from error


def parse_history(lines: IO[bytes] | Iterable[bytes]) -> History:
    events: list[Event] = []
    problems: list[str] = []
    last_t: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        found = _parse_line(line)
        if isinstance(found, str):
            problems.append(f"line {number}: {found}")
            continue
        if last_t is not None and found.t < last_t:
            problems.append(f"line {number}: t {found.t} is before that of an earlier line, {last_t}")
            continue
        last_t = found.t
        events.append(found)
    return History(tuple(events), tuple(problems))


def _parse_line(line: bytes) -> Event | str:
    """An event, or what is wrong with the line."""
    if len(line) > LINE_BYTES_MAX:
        return f"longer than {LINE_BYTES_MAX} bytes"
    if not line.endswith(b"\n"):
        return "cut off: it does not end with a line break"
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(document, dict):
        return f"not an object: {_short(document)}"
    problem = problem_of(document)
    if problem is not None:
        return problem
    fields = {name: value for name, value in document.items() if name not in ("t", "actor", "event")}
    return Event(document["t"], document["actor"], document["event"], fields)


def problem_of(document: Mapping[str, Any]) -> str | None:
    """Why an object is no event, or None."""
    kind = document.get("event")
    if not isinstance(kind, str) or kind not in KINDS:
        return f"no event is called {_short(kind)}"
    for name in ("t", "actor", *KINDS[kind]):
        if name not in document:
            return f"{kind!r} without {name!r}"
    if not _is_number(document["t"]):
        return f"t is {_short(document['t'])}, not a whole number of nanoseconds"
    if not isinstance(document["actor"], str):
        return f"actor is {_short(document['actor'])}, not a text"
    for name, value in document.items():
        if name in TEXTS and not isinstance(value, str):
            return f"{name} is {_short(value)}, not a text"
        if name in NUMBERS and not _is_number(value):
            return f"{name} is {_short(value)}, not a whole number"
    if kind == "begin" and not _are_texts(document["ids"]):
        return "ids is not a list of texts"
    if kind == "end" and document["outcome"] not in OUTCOMES:
        return f"no transaction ends {_short(document['outcome'])}"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
