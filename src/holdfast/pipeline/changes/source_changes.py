"""Changes of the source: what is read, from where, and how bytes become columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from holdfast.pipeline.changes.levels import Change, Document, Facts, from_to, rebuild, refused, safe, show
from holdfast.pipeline.changes.step_changes import has_state

QUIET: Final = {
    "settings": "They are about connections; no row changes by them.",
    "starting": "It counts for a pipeline that no sink knows yet; this one goes on where its ledgers stand.",
    "batch_records": "How batches are cut changes no row.",
    "batch_bytes": "How batches are cut changes no row.",
}
HOLD_COLUMNS: Final = ("parquet", "delta", "postgres")
"""Sinks that hold rows in columns."""


def source_changes(before: Document, after: Document, facts: Facts) -> Iterator[Change]:
    """Of two whole definitions."""
    was, now = before["source"], after["source"]
    yield from _topics(was, now, facts)
    yield from _cluster(was, now, facts)
    for name, why in QUIET.items():
        if was.get(name) != now.get(name):
            yield safe(f"source.{name}", _quietly(name, was, now), why)
    for name in ("value", "key"):
        yield from _decoding(f"source.{name}", was.get(name), now.get(name), after)
    mine, theirs = was.get("values") or {}, now.get("values") or {}
    for topic in sorted({*mine, *theirs}):
        yield from _decoding(f"source.values.{topic}", mine.get(topic), theirs.get(topic), after)
    yield from _event_time(was.get("event_time"), now.get("event_time"), after)


def _quietly(name: str, was: Document, now: Document) -> str:
    """Settings may hold passwords: their names are enough."""
    if name != "settings":
        return from_to(was.get(name), now.get(name))
    mine, theirs = was.get(name) or {}, now.get(name) or {}
    return "changed: " + ", ".join(
        sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
    )


def _topics(was: Document, now: Document, facts: Facts) -> Iterator[Change]:
    mine, theirs = was.get("topics") or [], now.get("topics") or []
    if mine == theirs and was.get("pattern") == now.get("pattern"):
        return
    known = set(mine) if facts.topics is None else set(facts.topics)
    removed = sorted(topic for topic in known if not _reads(now, topic))
    for topic in removed:
        yield refused(
            "source.topics",
            f"topic {topic!r} is no longer read",
            "Ledgers, and windows and joins if there are any, stand in it; records it gets from now on would be left "
            "out without a word.",
            "Keep it and leave its rows out with a filter on `_topic`, or run the smaller definition under a new name.",
        )
    for topic in sorted(set(theirs) - set(mine)):
        if topic not in known:
            yield safe("source.topics", f"topic {topic!r} is new", "It is read from the start of its log.")
    if was.get("pattern") != now.get("pattern"):
        yield _pattern(was, now, facts, is_bad=bool(removed))
    elif sorted(mine) == sorted(theirs):
        yield safe("source.topics", "named in another order", "Positions are kept by topic and partition.")


def _pattern(was: Document, now: Document, facts: Facts, *, is_bad: bool) -> Change:
    what = from_to(was.get("pattern") or was.get("topics"), now.get("pattern") or now.get("topics"))
    if facts.topics is None and was.get("pattern") is not None:
        return refused(
            "source.pattern",
            what,
            "Which topics the old one found is not known here, so that one of them may be left out now.",
            "Ask again where the ledgers can be read.",
        )
    why = "Every topic that the ledgers know is still read; new ones are read from the start of their logs."
    if is_bad:
        why = "Topics it finds that are new are read from the start of their logs."
    return safe("source.pattern", what, why)


def _reads(source: Document, topic: str) -> bool:
    pattern = source.get("pattern")
    if pattern is None:
        return topic in (source.get("topics") or [])
    return re.fullmatch(pattern, topic) is not None


def _cluster(was: Document, now: Document, facts: Facts) -> Iterator[Change]:
    where, what = "source.bootstrap", from_to(was.get("bootstrap"), now.get("bootstrap"))
    if facts.is_same_cluster is False:
        yield refused(
            where,
            what if was.get("bootstrap") != now.get("bootstrap") else "the cluster behind it is another",
            "Its topics are not those that the ledgers stand in: their ids differ, and offsets of the two must not be "
            "mixed.",
            "Run against the new cluster under a new name, with places of its own.",
        )
    elif was.get("bootstrap") != now.get("bootstrap"):
        proof = (
            "the ids of its topics are the same"
            if facts.is_same_cluster
            else "a run compares topic ids first"
        )
        yield safe(where, what, f"Another address is not another cluster: {proof}, and stops if they differ.")


def _decoding(where: str, was: Any, now: Any, after: Document) -> Iterator[Change]:
    if was == now:
        return
    remade = has_state(after)
    if was is None or now is None:
        what = "has a decoding of its own now" if was is None else "has no decoding of its own any more"
        yield _judged(remade, where, what, "Records are parsed so from the next batch on.")
        return
    yield from _fields(where, was, now, after, remade)
    for name in sorted({*was, *now} - {"fields"}):
        if was.get(name) != now.get(name):
            yield _judged(
                remade,
                f"{where}.{name}",
                "changed" if name in ("registry", "schema") else from_to(was.get(name), now.get(name)),
                "Records are parsed so from the next batch on; rows that sinks hold stay as they are.",
            )


def _judged(remade: bool, where: str, what: str, why: str) -> Change:
    """Safe, unless a state was made of rows that were parsed otherwise."""
    if not remade:
        return safe(where, what, why)
    return rebuild(where, what, "The state was made of rows parsed by the old rules.")


def _fields(where: str, was: Document, now: Document, after: Document, remade: bool) -> Iterator[Change]:
    mine = {field["name"]: field for field in was.get("fields") or []}
    theirs = {field["name"]: field for field in now.get("fields") or []}
    for name in [*mine, *(each for each in theirs if each not in mine)]:
        place = f"{where}.fields.{name}"
        old, new = mine.get(name), theirs.get(name)
        if old == new:
            continue
        if old is None or new is None:
            yield _field_comes_or_goes(place, name, new is not None, after, remade)
        elif old["type"] != new["type"]:
            yield _other_type(place, name, old["type"], new["type"], after, remade)
        else:
            yield _judged(
                remade,
                place,
                "now required" if new.get("required", True) else "no longer required",
                "Records without it go "
                + ("to the dead letter" if new.get("required", True) else "on, with null")
                + " from the next batch on.",
            )


def _other_type(place: str, name: str, was: str, now: str, after: Document, remade: bool) -> Change:
    what = f"type {from_to(was, now)}"
    holders = [sink["name"] for sink in after.get("sinks") or [] if _holds_main_rows(sink)]
    if holders and not _reshapes(after):
        return refused(
            place,
            what,
            f"Sink {show(holders)} holds the column in its old type, and a type is never changed by itself.",
            f"Keep the type and cast in a step under another name (CAST({name} AS {now}) AS …), or run the new "
            "definition beside the old one under a new name.",
        )
    why = "Records are parsed so from the next batch on."
    if holders:
        why += f" Should it reach sink {show(holders)} in another type than it holds, that refuses it: `check` tells."
    return _judged(remade, place, what, why)


def _field_comes_or_goes(place: str, name: str, comes: bool, after: Document, remade: bool) -> Change:
    what = "new column" if comes else "column removed"
    strict = _strict_sinks(after)
    if strict and not _reshapes(after):
        return refused(
            place,
            what,
            f"Sink {show(strict)} takes rows with the columns it holds and no others (`schema: fail`).",
            "Write `schema: add-columns` in the sink: what it lacks is added, what is gone is stored as null.",
        )
    why = "Sinks that hold columns add it; older rows have null there."
    if not comes:
        why = "Sinks that hold the column store null from now on."
    if strict:
        why = f"Whether it reaches sink {show(strict)}, whose columns are fixed, depends on the steps: `check` tells."
    return _judged(remade, place, what, why)


def _strict_sinks(document: Document) -> list[str]:
    return [
        sink["name"]
        for sink in document.get("sinks") or []
        if _holds_main_rows(sink) and sink.get("schema", "fail") == "fail"
    ]


def _holds_main_rows(sink: Document) -> bool:
    return sink["kind"] in HOLD_COLUMNS and not sink.get("rows")


def _reshapes(document: Document) -> bool:
    """Whether a step decides which columns reach the sinks."""
    return any(step["kind"] in ("sql", "python") for step in document.get("steps") or [])


def _event_time(
    was: Mapping[str, Any] | None, now: Mapping[str, Any] | None, after: Document
) -> Iterator[Change]:
    if was == now:
        return
    where = "source.event_time"
    if not has_state(after):
        yield safe(where, from_to(was, now), "No step remembers anything by it.")
        return
    mine, theirs = was or {}, now or {}
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            yield rebuild(
                f"{where}.{name}",
                from_to(mine.get(name), theirs.get(name)),
                "What was late and what is closed followed from the old one.",
            )
