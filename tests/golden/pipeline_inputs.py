"""What goes into the golden pipelines, in parts: the first two were written when they were made, the third comes later.

Every part needs what was remembered of the one before: ids come again, windows stay open over the seam, an order is
paid and a card is charged one part after it was tried.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

START_MS: Final = 1_767_225_600_000  # the first of January 2026
PARTITIONS: Final = 2
PER_PART: Final = 40


class Input(NamedTuple):
    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int


def time_text(number: int, step_ms: int = 250) -> str:
    at = datetime.fromtimestamp((START_MS + number * step_ms) / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def made(topic: str, number: int, value: Any) -> Input:
    """JSON, unless it is bytes or nothing already."""
    data = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    return Input(topic, number % PARTITIONS, b"%d" % number, data, START_MS + number * 250)


def numbers(part: int) -> range:
    return range((part - 1) * PER_PART, part * PER_PART)


def letters(part: int) -> Iterator[Input]:
    for number in numbers(part):
        letter: Any = {
            "id": number,
            "day": f"d{number % 3}",
            "amount": number + 0.25,
            "at": time_text(number),
        }
        if number % 9 == 4:
            letter["day"] = "spam"
        if number % 11 == 7:
            letter["id"] = -number
        if number % 10 == 3:
            del letter["amount"]
        yield made("letters", number, b"broken" if number % 13 == 6 else letter)


def sales(topic: str, part: int) -> Iterator[Input]:
    for number in numbers(part):
        sale: Any = {
            "id": number - 9 if number % 6 == 2 else number,
            "customer": f"c{number // 6 % 4}",  # who comes back after longer than a visit lasts
            "amount": -1 if number % 19 == 8 else number + 1,
            "at": time_text(max(0, number - 40) if number % 13 == 12 else number),
        }
        yield made(topic, number, b"broken" if number % 17 == 5 else None if number == 33 else sale)


def orders_and_payments(part: int) -> Iterator[Input]:
    """An order of the part before is paid in this one; a card that was tried in it is charged."""
    for number in numbers(part):
        order = {"id": number, "customer": f"c{number % 4}", "amount": number * 1.5, "at": time_text(number)}
        yield made("orders", number, order)
        if number % 2 == 0 and number >= PER_PART:
            before = number - PER_PART
            paid = {
                "order_id": before,
                "card": f"card-{before % 6}",
                "paid": 1.5 * before,
                "at": time_text(number),
            }
            yield made("payments", number, paid)
    last = numbers(part)[-1]
    for each in range(4):
        # Two charges of what was tried a part ago, then two tries.
        card, paid_now = f"stolen-{part - 1 + each // 2}-{each % 2}", 900.0 if each < 2 else 0.5
        payment = {"order_id": -1, "card": card, "paid": paid_now, "at": time_text(last)}
        yield made("payments", last, payment)


def changes(part: int) -> Iterator[Input]:
    for number in numbers(part):
        record, version = number % 12, number // 12
        change: Any = {"op": "put", "id": record, "version": version, "at": time_text(number)}
        if (record + version) % 5 == 3:
            change["op"] = "delete"
        else:
            change |= {"name": f"name {number}", "balance": number + 0.5}
        if number % 15 == 7:
            # What the part before brought comes again, and changes nothing.
            change = {"op": "put", "id": record, "version": max(0, version - 1), "at": time_text(number)}
        yield Input(
            "changes", record % PARTITIONS, b"%d" % record, json.dumps(change).encode(), START_MS + number
        )


INPUTS: Final[Mapping[str, Callable[[int], Iterator[Input]]]] = {
    "plain": letters,
    "mirror": lambda part: iter(()),  # reads what plain reads
    "counting": lambda part: sales("sales", part),
    "stopped": lambda part: sales("stops", part),
    "joining": orders_and_payments,
    "tables": changes,
}
TOPICS: Final = ("letters", "sales", "stops", "orders", "payments", "changes")


# What must come of them


def plain_rows(parts: int) -> dict[str, list[int]]:
    """The ids of letters by where they end."""
    ends: dict[str, list[int]] = {"kept": [], "dead": [], "filtered": []}
    for part in range(1, parts + 1):
        for each in letters(part):
            value = each.value or b""
            letter = {} if value == b"broken" else json.loads(value)
            if not letter or letter["id"] < 0:
                ends["dead"].append(int(each.key or b""))
            else:
                ends["filtered" if letter["day"] == "spam" else "kept"].append(letter["id"])
    return ends


def joined_rows(parts: int) -> tuple[set[tuple[Any, ...]], set[str]]:
    """Orders that are paid, with the city of their customer; and the cards that there is an alarm for."""
    cities = {"c0": "Lviv", "c1": "Córdoba", "c2": "大阪"}
    paid = {
        (number, f"c{number % 4}", cities.get(f"c{number % 4}"), 1.5 * number)
        for part in range(1, parts)
        for number in numbers(part)
        if number % 2 == 0
    }
    alarms = {f"stolen-{part}-{each}" for part in range(1, parts) for each in range(2)}
    return paid, alarms


def table_rows(parts: int) -> dict[int, tuple[str | None, float | None]]:
    """What the table of `tables` holds: names and balances by id."""
    seen: set[tuple[int, int]] = set()
    rows: dict[int, tuple[str | None, float | None]] = {}
    for part in range(1, parts + 1):
        for each in changes(part):
            change = json.loads(each.value or b"")
            if (change["id"], change["version"]) in seen:
                continue
            seen.add((change["id"], change["version"]))
            if change["op"] == "delete":
                rows.pop(change["id"], None)
            else:
                rows[change["id"]] = (change.get("name"), change.get("balance"))
    return rows
