"""A definition's source, inferred from values that a topic holds: a beginning for whoever writes the rest.

Values that are all JSON objects give fields, each with the narrowest type that takes every value seen; a field that is
missing or null somewhere is optional. Everything else is `text` or `bytes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from typing import Any, Final

RECORDS: Final = 1000
"""How many values are looked at."""
BARE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
WORDS: Final = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
UNKNOWN: Final = "string"
"""For what was null wherever it was seen."""

TEMPLATE: Final = """\
# Inferred from {count} records of {topic}: check the types, then add steps.
#   holdfast pipeline preview {file}
pipeline: {name}

source:
  topics: [{topic}]
  bootstrap: ${{KAFKA:-{bootstrap}}}
{value}
steps: []

sinks:
  - parquet: out/{name}

trigger: available-now         # ends when all is done; 10s goes on
"""


def newest_values(settings: Mapping[str, str], topic: str, records: int = RECORDS) -> list[bytes | None]:
    """Of the newest records of the topic, evenly from its partitions."""
    from holdfast.reader.cluster import Cluster
    from holdfast.reader.topic_reader import ranges_of

    with Cluster(settings) as cluster:
        ranges = ranges_of(cluster, topic)
        share = -(-records // len(ranges))
        last = [each._replace(start=max(each.start, each.end - share)) for each in ranges]
        return [value for batch in cluster.read(last) for value in batch.column("value").to_pylist()]


def definition_text(topic: str, values: Sequence[bytes | None], *, file: str, bootstrap: str) -> str:
    """A definition that reads this topic to Parquet."""
    name = re.sub("[^A-Za-z0-9]+", "-", topic).strip("-") or "topic"
    return TEMPLATE.format(
        topic=topic, name=name, file=file, bootstrap=bootstrap, count=len(values), value=_value(values)
    )


def _value(values: Iterable[bytes | None]) -> str:
    present = [value for value in values if value is not None]
    fields = infer_fields(present)
    if fields is None:
        return f"  value: {'text' if all(map(_is_text, present)) else 'bytes'}\n"
    lines = [f"      {_key(name)}: {_scalar(kind)}\n" for name, kind in fields.items()]
    return "  value:\n    format: json\n    fields:\n" + "".join(lines)


def infer_fields(values: Sequence[bytes]) -> dict[str, str] | None:
    """The fields of JSON objects in the order they are met; nothing if some value is no such object."""
    documents = []
    for value in values:
        try:
            document = json.loads(value)
        except ValueError:
            return None
        if not isinstance(document, dict):
            return None
        documents.append(document)
    if not any(documents):
        return None
    return _fields(documents)


def _fields(documents: Sequence[dict[str, Any]]) -> dict[str, str]:
    found: dict[str, list[Any]] = {}
    for document in documents:
        for name, value in document.items():
            found.setdefault(name, []).append(value)
    return {
        name: type_of(seen) + ("?" if len(seen) < len(documents) or None in seen else "")
        for name, seen in found.items()
    }


def type_of(seen: Iterable[Any]) -> str:
    """The narrowest of Spark's types that takes all of these values, nulls apart."""
    values = [value for value in seen if value is not None]
    if not values:
        return UNKNOWN
    if all(isinstance(value, bool) for value in values):
        return "boolean"
    if all(
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 for value in values
    ):
        return "long"
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return "double"
    if all(isinstance(value, str) for value in values):
        return next((kind for kind, fits in TEXTS.items() if all(map(fits, values))), "string")
    if all(isinstance(value, list) for value in values):
        return f"array<{type_of(each for value in values for each in value)}>"
    if all(isinstance(value, dict) for value in values) and (inner := _fields(values)):
        parts = (
            f"{name if BARE.fullmatch(name) else f'`{name}`'}:{kind.rstrip('?')}"
            for name, kind in inner.items()
        )
        return f"struct<{','.join(parts)}>"
    return "string"


def _is_moment(text: str) -> bool:
    try:
        return "T" in text and datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _is_date(text: str) -> bool:
    try:
        return len(text) == len("2026-01-31") and date.fromisoformat(text) is not None
    except ValueError:
        return False


TEXTS: Final = {"timestamp": _is_moment, "date": _is_date}


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _key(name: str) -> str:
    return name if BARE.fullmatch(name) and name.lower() not in WORDS else json.dumps(name)


def _scalar(kind: str) -> str:
    return json.dumps(kind) if ":" in kind else kind
