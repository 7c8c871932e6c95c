"""Messages that were seen before.

There are two ways to know one. In both, whether a message is a duplicate depends on its partition's log and on nothing
else, so every member that ever reads it decides alike, after a restart, a rebalance or a crash; only a spool that was
silent for long may be remembered for longer after a restart.

By `hf-id` (`spool:opening:topic:partition:sequence`, see `spool.marks`): a spool sends again what it does not know to
have arrived, perhaps a day later, and always under the same id. One number per opening of a spool is enough: a message
with a sequence at or below the highest seen is a duplicate. An id that names another topic or partition than the one it
is in was copied from elsewhere, and says nothing. The numbers are kept in the metadata string of the committed offset,
which a broker bounds to 4096 bytes (`offset.metadata.max.bytes`): in one record with the committed offset, and fenced
like it. They belong to that committed offset; beside one that somebody else has set they are not used. 200 openings per
partition fit; beyond that the one longest silent is forgotten, and so is one silent for `keep_seconds`. A duplicate of
a forgotten one is handed out.

By a key that a function of the user's finds in a message: a duplicate is a message whose key was already in the
partition within the last `window` offsets and `keep_seconds` before it, by the messages' own timestamps. Keys are many
and of any size, so they are not stored anywhere: whoever takes a partition over reads the last `window` offsets before
its committed offset again, only to learn their keys.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol, TypeAlias

from holdfast.client.messages import HEADERS, ID_HEADER, Fields, Message, as_message, last_header
from holdfast.client.spool.marks import SEQUENCE_DIGITS_MAX, MarkedId, parse_mark
from holdfast.errors import UsageError

NOTE_PREFIX: Final = "hf1:"
SPOOLS_MAX: Final = 200
"""Openings per partition: what fits into the metadata of a committed offset, with room for growing numbers."""
KEEP_SECONDS: Final = 7 * 24 * 3600.0
WINDOW_MAX: Final = 1_000_000
"""Offsets read again by whoever takes a partition over, at most."""
_ENTRY: Final = struct.Struct(">QIH")
"""An opening of a spool, by its key, and its sequence in 48 bits."""
_LINES_KEPT_MAX: Final = 4096

Identity: TypeAlias = bytes | str | int | None
KeyFunction: TypeAlias = Callable[[Message], Identity]


class Seen(Protocol):
    """What a partition's reader remembers."""

    def fresh(self, messages: Sequence[Fields]) -> Sequence[Fields]:
        """Those that were not seen before. To be asked in the order of the log, once per message."""

    def learn(self, message: Message) -> None:
        """A message before the committed offset: it was handled by somebody."""

    def note(self, position: int) -> str:
        """The metadata to commit with an offset. Committed offsets only grow."""


class SpoolId(NamedTuple):
    spool: int
    """The key of the spool and its opening."""
    topic: str | None
    """None when an earlier version gave the id."""
    partition: int
    sequence: int


_lines: dict[bytes, tuple[int, str | None, int]] = {}
"""What ids have in front of their sequences, and what it says: few of them are read again and again."""


def parse_id(value: bytes | None) -> SpoolId | None:
    """The parts of an `hf-id`; none when it is not one: such a message is never a duplicate."""
    if value is None:
        return None
    begin, _, number = value.rpartition(b":")
    line = _lines.get(begin)
    if line is not None and number.isdigit() and len(number) < SEQUENCE_DIGITS_MAX:
        return SpoolId(*line, int(number))
    found = parse_mark(value)
    if found is None:
        return None
    line = _key_of(found), found.topic, found.partition
    if not found.is_undecided:
        if len(_lines) >= _LINES_KEPT_MAX:
            _lines.clear()
        _lines[begin] = line
    return SpoolId(*line, found.sequence)


def _key_of(found: MarkedId) -> int:
    """64 bits that stand for an opening of a spool: for what earlier versions stored, the spool's id, as ever."""
    if not found.opening:
        return int(found.spool, 16)
    name = f"{found.spool}:{found.opening}:{'u' if found.is_undecided else ''}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())


class SeenIds:
    """The highest sequence of every opening of a spool, as read, and as of the offset that may be committed."""

    def __init__(self, stored: str = "", position: int = -1, *, keep_seconds: float = KEEP_SECONDS) -> None:
        """`stored` is what `note` gave for the committed offset."""
        self._keep_ms = int(keep_seconds * 1000)
        self._read = _Numbers(_parse_note(stored, position))
        self._finished = _Numbers(dict(self._read.items()))
        self._ahead: deque[tuple[int, SpoolId, int]] = deque()
        """Read and not before the committed offset yet: offset, id and timestamp."""

    def fresh(self, messages: Sequence[Fields]) -> Sequence[Fields]:
        if not any(map(HEADERS, messages)):
            return messages
        return [fields for fields in messages if not self._is_duplicate(fields)]

    def _is_duplicate(self, fields: Fields) -> bool:
        topic, partition, offset, timestamp_ms, _, _, headers = fields
        if not headers or (found := parse_id(last_header(headers, ID_HEADER))) is None:
            return False
        if found.partition != partition or found.topic not in (None, topic):
            return False
        is_new = self._read.add(found, timestamp_ms, self._keep_ms)
        if is_new:
            self._ahead.append((offset, found, timestamp_ms))
        return not is_new

    def learn(self, message: Message) -> None:
        """No offsets before the committed one: the numbers are in its metadata."""

    def note(self, position: int) -> str:
        ahead = self._ahead
        while ahead and ahead[0][0] < position:
            _, found, timestamp_ms = ahead.popleft()
            self._finished.add(found, timestamp_ms, self._keep_ms)
        return _format_note(self._finished.items(), position)


class _Numbers:
    """Openings of spools and their highest sequences, the longest silent first; an earlier reader's count as silent."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self._numbers: OrderedDict[int, tuple[int, int | None]] = OrderedDict(
            (spool, (sequence, None)) for spool, sequence in numbers.items()
        )

    def add(self, found: SpoolId, timestamp_ms: int, keep_ms: int) -> bool:
        """False when that sequence was passed before."""
        numbers = self._numbers
        highest = numbers.get(found.spool)
        if highest is not None and found.sequence <= highest[0]:
            return False
        numbers[found.spool] = (found.sequence, timestamp_ms)
        numbers.move_to_end(found.spool)
        while len(numbers) > SPOOLS_MAX or self._is_old(timestamp_ms - keep_ms):
            numbers.popitem(last=False)
        return True

    def _is_old(self, before_ms: int) -> bool:
        (_, timestamp_ms) = next(iter(self._numbers.values()))
        return timestamp_ms is not None and timestamp_ms < before_ms

    def items(self) -> list[tuple[int, int]]:
        return [(spool, sequence) for spool, (sequence, _) in self._numbers.items()]


def _format_note(numbers: list[tuple[int, int]], position: int) -> str:
    if not numbers:
        return ""
    packed = b"".join(_ENTRY.pack(spool, sequence >> 16, sequence & 0xFFFF) for spool, sequence in numbers)
    return f"{NOTE_PREFIX}{position}:{base64.b64encode(packed).decode()}"


def _parse_note(stored: str, position: int) -> dict[int, int]:
    """Numbers beside a committed offset; none when they are not ours, damaged, or belong to another committed
    offset."""
    if not stored.startswith(NOTE_PREFIX):
        return {}
    place, _, encoded = stored[len(NOTE_PREFIX) :].partition(":")
    if place != str(position):
        return {}
    try:
        packed = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return {}
    if len(packed) % _ENTRY.size:
        return {}
    return {spool: high << 16 | low for spool, high, low in _ENTRY.iter_unpack(packed)}


class SeenKeys:
    """The keys of the last `window` offsets, with where and when each was last."""

    def __init__(self, key: KeyFunction, window: int, keep_seconds: float) -> None:
        if not 1 <= window <= WINDOW_MAX:
            raise UsageError(
                f"a window of {window} offsets: 1 to {WINDOW_MAX} can be read again on take-over"
            )
        self._key = key
        self._window = window
        self._keep_ms = int(keep_seconds * 1000)
        self._last: OrderedDict[bytes | str | int, tuple[int, int]] = OrderedDict()
        self._through = -1
        """The last offset that was looked at."""

    def fresh(self, messages: Sequence[Fields]) -> Sequence[Fields]:
        return [fields for fields in messages if not self._is_duplicate(as_message(fields))]

    def _is_duplicate(self, message: Message) -> bool:
        self._through = message.offset
        key = self._key_of(message)
        last = self._last
        while last and next(iter(last.values()))[0] < message.offset - self._window:
            last.popitem(last=False)
        if key is None:
            return False
        found = last.get(key)
        last[key] = (message.offset, message.timestamp_ms)
        last.move_to_end(key)
        return found is not None and message.timestamp_ms - found[1] <= self._keep_ms

    def _key_of(self, message: Message) -> Identity:
        """A message that has no key that could be found is not a duplicate: its handler will meet what is wrong with
        it, and errors are judged there."""
        try:
            return self._key(message)
        except Exception:  # noqa: BLE001 - a function of the user's
            return None

    def learn(self, message: Message) -> None:
        if message.offset > self._through:
            self._is_duplicate(message)

    def note(self, position: int) -> str:
        return ""


class Dedupe(NamedTuple):
    """What a consumer is asked to recognise."""

    key: KeyFunction | None = None
    """None for duplicates by `hf-id`."""
    window: int = 10_000
    """For keys: how many offsets back a duplicate may lie."""
    keep_seconds: float = KEEP_SECONDS

    @property
    def lookback(self) -> int:
        """Offsets before the committed offset that a new reader must see."""
        return 0 if self.key is None else self.window

    def start(self, stored: str, position: int) -> Seen:
        """For a partition that begins at a committed offset which has this stored beside it."""
        if self.key is None:
            return SeenIds(stored, position, keep_seconds=self.keep_seconds)
        return SeenKeys(self.key, self.window, self.keep_seconds)
