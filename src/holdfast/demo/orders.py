"""What the demo sends: seeded orders, some malformed, some sent twice, some late; and what must become of each.

A message is a function of its number, so a sender that was killed goes on anywhere, and whoever counts afterwards knows
what to look for without asking anybody. Every message carries its number in the header `order`.

- an *order* has its number as its id, and has to be in the output once;
- a *copy* is an order before it once more, under a number of its own: it must not make two of it;
- a *late* one happened hours before its neighbours: it has to be in the sink of late rows, as often as in the topic,
  since what is too late is too late to be told from a copy;
- a *malformed* one has to be a dead letter;
- at the end, one message for each partition says that the day is over. It closes the last windows, and is filtered.

Nothing here reads a clock: events begin at `start_ms`, which is given.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

SOURCE: Final = "orders"
DEAD_LETTERS: Final = "orders-dlt"
PARTITIONS: Final = 4
NUMBER_HEADER: Final = "order"

SPACING_MS: Final = 10
"""Between two orders, by their own time: a minute of the demo is a quarter of an hour of the shop."""
LATE_BY_MS: Final = 2 * 3_600_000
CLOSING_AFTER_MS: Final = 6 * 3_600_000
LATE_FROM: Final = 400
"""Before this every partition has an order to be late behind."""
COPY_REACH: Final = 2_000
"""A copy comes up to so many messages after its order: in another batch, often."""
CUSTOMERS: Final = 997
COUNTRIES: Final = ("de", "fr", "it", "nl", "pl", "se")

MALFORMED_SHARE: Final = 0.010
COPY_SHARE: Final = 0.015
LATE_SHARE: Final = 0.005

JAVA_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""No time is spent on the best code for a run of a minute: half the processor time of Spark's start."""

DEFINITION: Final = """\
# The demo's pipeline: orders checked, each once, added up by country.
pipeline: demo-orders
source:
  topics: [{source}]
  bootstrap: ${{KAFKA:-{bootstrap}}}
  value:
    format: json
    fields:
      id: long
      customer: string
      country: string
      amount: decimal(10,2)
      at: timestamp
      note: string?
  event_time: {{field: at, delay: 2m}}
  batch_records: {batch_records}
steps:
  - expect: {{name: positive-amount, that: amount > 0, else: quarantine}}
  - filter: {{name: end-of-day, where: note IS NULL}}
  - dedupe: {{name: once, key: [_key, id], within: 1h}}
  - window:
      name: totals
      size: 30s
      key: country
      aggregates: {{orders: count(*), total: sum(amount)}}
sinks:
  - parquet: {{path: out/orders, name: orders}}
  - parquet: {{path: out/totals, name: totals, rows: totals}}
  - parquet: {{path: out/late, name: late, rows: once.late}}
  - parquet: {{path: out/late-for-totals, name: late-for-totals, rows: totals.late}}
dead_letter: {dead_letters}
home: home
trigger: 1s
spark:
  spark.driver.extraJavaOptions: {java_options}   # for a JVM that lives for a minute
"""


class Kind(StrEnum):
    ORDER = "order"
    COPY = "copy"
    LATE = "late"
    MALFORMED = "malformed"
    CLOSING = "closing"


class OrderMessage(NamedTuple):
    number: int
    kind: Kind
    key: bytes
    value: bytes
    partition: int | None = None
    """None: the partition follows from the key."""

    @property
    def headers(self) -> list[tuple[str, str | bytes | None]]:
        return [(NUMBER_HEADER, b"%d" % self.number)]


@dataclass(frozen=True)
class Orders:
    """All messages of one run."""

    count: int
    """Without the closing ones, whose numbers follow."""
    start_ms: int
    seed: int = 0

    def __iter__(self) -> Iterator[OrderMessage]:
        return map(self.message, range(self.count))

    def kind(self, number: int) -> Kind:
        chance = self._draw(number, "kind")
        if chance < MALFORMED_SHARE:
            return Kind.MALFORMED
        chance -= MALFORMED_SHARE
        if chance < COPY_SHARE:
            return Kind.COPY if self._original(number) is not None else Kind.ORDER
        chance -= COPY_SHARE
        return Kind.LATE if chance < LATE_SHARE and number >= LATE_FROM else Kind.ORDER

    def message(self, number: int) -> OrderMessage:
        kind = self.kind(number)
        if kind is Kind.COPY:
            original = self._original(number)
            assert original is not None
            return self._order(original)._replace(number=number, kind=kind)
        if kind is Kind.MALFORMED:
            return self._malformed(number)
        return self._order(number)._replace(kind=kind)

    def closing(self) -> list[OrderMessage]:
        """One for each partition, later than every order."""
        at_ms = self.start_ms + self.count * SPACING_MS + CLOSING_AFTER_MS
        return [
            OrderMessage(
                self.count + partition,
                Kind.CLOSING,
                b"shop",
                _text({**_content(self.count + partition, at_ms), "note": "end of day"}),
                partition,
            )
            for partition in range(PARTITIONS)
        ]

    def ids(self, kind: Kind) -> set[int]:
        """The numbers of the messages of one kind."""
        return {number for number in range(self.count) if self.kind(number) is kind}

    def id_of(self, number: int) -> int:
        """The order that a message is about: a copy's is the one it repeats."""
        original = self._original(number) if self.kind(number) is Kind.COPY else None
        return number if original is None else original

    def _draw(self, number: int, what: str) -> float:
        mixed = hashlib.blake2b(f"{self.seed}:{what}:{number}".encode(), digest_size=6)
        return int.from_bytes(mixed.digest()) / (1 << 48)

    def _original(self, number: int) -> int | None:
        """A plain order before this message, up to `COPY_REACH` before it."""
        newest = number - 1 - int(self._draw(number, "copy") * COPY_REACH)
        for earlier in range(newest, -1, -1):
            if self._draw(earlier, "kind") >= MALFORMED_SHARE + COPY_SHARE + LATE_SHARE:
                return earlier
        return None

    def _order(self, number: int) -> OrderMessage:
        at_ms = self.start_ms + number * SPACING_MS
        if self.kind(number) is Kind.LATE:
            at_ms -= LATE_BY_MS + int(self._draw(number, "late") * LATE_BY_MS)
        content = _content(number, at_ms)
        content["country"] = COUNTRIES[int(self._draw(number, "country") * len(COUNTRIES))]
        content["amount"] = round(1 + self._draw(number, "amount") * 499, 2)
        return OrderMessage(number, Kind.ORDER, _key(number), _text(content))

    def _malformed(self, number: int) -> OrderMessage:
        """In one of the ways in which messages are wrong."""
        content = _content(number, self.start_ms + number * SPACING_MS)
        text = json.dumps(content)
        wrong = (
            text[:-9],
            text + text,
            "",
            json.dumps({**content, "amount": "a lot"}),
            json.dumps({name: value for name, value in content.items() if name != "customer"}),
            json.dumps({**content, "amount": -1}),
        )
        way = int(self._draw(number, "way") * len(wrong))
        return OrderMessage(number, Kind.MALFORMED, _key(number), wrong[way].encode())


def _content(number: int, at_ms: int) -> dict[str, object]:
    moment = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
    return {
        "id": number,
        "customer": f"c-{number % CUSTOMERS}",
        "country": COUNTRIES[0],
        "amount": 1.0,
        "at": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }


def _text(content: dict[str, object]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _key(number: int) -> bytes:
    return b"c-%d" % (number % CUSTOMERS)


def definition_text(bootstrap: str, batch_records: int) -> str:
    """The pipeline's definition, whose paths begin where its file lies."""
    return DEFINITION.format(
        source=SOURCE,
        dead_letters=DEAD_LETTERS,
        bootstrap=bootstrap,
        batch_records=batch_records,
        java_options=JAVA_OPTIONS,
    )
