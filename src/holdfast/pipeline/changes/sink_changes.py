"""Changes of the sinks. A sink is known by its name: its ledger is kept under it, at the sink's own place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from holdfast.pipeline.changes.levels import Change, Document, from_to, refused, safe
from holdfast.pipeline.definition.places import kind_of_letters, place_of

NEW_PLACE: Final = (
    "Give the changed sink a new name and a place of its own; the old one can be left out then."
)
FROM_NOW_ON: Final = "It counts from the next batch on; rows that are there stay as they are."

FIXED: Final = {
    "parquet": {
        "partition_by": "Its directories are named by the old columns, and readers cannot make sense of both."
    },
    "delta": {
        "partition_by": "A table's partition columns cannot be changed.",
        "mode": "The table was made for the other mode: what is there is not what the new one would have kept.",
        "key": "The table has one row for each of the old key.",
    },
    "postgres": {
        "mode": "The table was made for the other mode: upsert needs a primary key, and append none.",
        "key": "The table's primary key is the old one.",
        "table": "The ledger of this name says which rows the old table holds.",
        "schema_name": "The ledger of this name is in the old schema, and says which rows the old table holds.",
    },
    "kafka": {},
}
"""Settings that cannot change under a name, by the kind of sink."""
MOVED: Final = {
    "parquet": {
        "path": "The new place starts where the other sinks stand, and earlier rows stay at the old one; files "
        "that were moved there bring their ledger along, and it goes on."
    },
    "delta": {
        "path": "The new place starts where the other sinks stand, and earlier rows stay at the old one; a table "
        "that was moved there brings its ledger along, and it goes on."
    },
    "postgres": {
        "url": "The same database under another address goes on; another one starts where the other sinks stand, and "
        "earlier rows stay in the old one."
    },
    "kafka": {
        "topic": "Records go to the new topic from the next batch on; earlier ones stay in the old one.",
        "bootstrap": "The same cluster under another address goes on; another one starts where the other sinks stand, "
        "and earlier records stay in the old one.",
        "key": "Records from the next batch on may go to other partitions than earlier ones of the same thing.",
    },
}
"""Settings that may, and what that means."""
LETTERS_STAY: Final = (
    "Those of before are at the old place, with their ledger: an audit would look at the new one."
)
OTHER_PIPELINE: Final = (
    "Give the pipeline another name and its sinks places of their own, or keep the old place."
)
SECRET: Final = ("url", "settings")
"""Shown by name only."""


def sink_changes(before: Document, after: Document) -> Iterator[Change]:
    """Of two whole definitions."""
    mine = {sink["name"]: sink for sink in before.get("sinks") or []}
    theirs = {sink["name"]: sink for sink in after.get("sinks") or []}
    taken = {place_of(sink): name for name, sink in mine.items()}
    for name, sink in theirs.items():
        holder = taken.get(place_of(sink))
        stayed = name in mine and place_of(mine[name]) == place_of(sink)
        if holder is not None and holder != name and not stayed:
            yield _on_anothers_place(sink, holder, is_renamed=holder not in theirs)
        elif name not in mine:
            yield _new(sink)
        else:
            yield from _changed(mine[name], sink, f"sinks.{name}")
    for name, sink in mine.items():
        if name not in theirs and place_of(sink) not in {place_of(each) for each in theirs.values()}:
            yield safe(
                f"sinks.{name}",
                f"{sink['kind']} sink removed",
                "Its rows and its ledger stay; should it come back under this name, it catches up from there, as long "
                "as the source still has the records.",
            )
    yield from _dead_letter(before.get("dead_letter") or {}, after.get("dead_letter") or {})


def _new(sink: Document) -> Change:
    rows = f" It takes the rows of {sink['rows']!r}." if sink.get("rows") else ""
    return safe(
        f"sinks.{sink['name']}",
        f"new {sink['kind']} sink",
        f"It starts where the other sinks stand.{rows}",
        "`holdfast pipeline backfill` brings what was before.",
    )


def _on_anothers_place(sink: Document, holder: str, *, is_renamed: bool) -> Change:
    what = f"renamed from {holder!r}" if is_renamed else f"it has the place of {holder!r} now"
    return refused(
        f"sinks.{sink['name']}",
        what,
        f"What is there belongs to the ledger of {holder!r}: a sink with another name would start anew on top of it.",
        f"Keep the name {holder!r}, or give {sink['name']!r} a place of its own.",
    )


def _changed(was: Document, now: Document, where: str) -> Iterator[Change]:
    if was["kind"] != now["kind"]:
        yield refused(
            where,
            f"{was['kind']} became {now['kind']}",
            "A ledger is kept by the sink's name, in the sink: another kind is another sink.",
            NEW_PLACE,
        )
        return
    kind = now["kind"]
    for name in sorted({*was, *now} - {"kind", "name"}):
        if was.get(name) == now.get(name):
            continue
        place = f"{where}.{name}"
        what = "changed" if name in SECRET else from_to(was.get(name), now.get(name))
        if name == "rows":
            yield _other_rows(kind, place, was, now)
        elif name == "order_by" and now.get("mode") == "scd2":
            yield refused(
                place, what, "The versions that are there begin where the old column says.", NEW_PLACE
            )
        elif name in FIXED[kind]:
            yield refused(place, what, FIXED[kind][name], NEW_PLACE)
        else:
            yield safe(place, what, MOVED[kind].get(name, FROM_NOW_ON))


def _other_rows(kind: str, place: str, was: Document, now: Document) -> Change:
    what = from_to(was.get("rows") or "the end of the steps", now.get("rows") or "the end of the steps")
    if kind == "kafka":
        return safe(place, what, "Records are made of these rows from the next batch on.")
    return refused(
        place,
        what,
        "Rows of another step have other columns, and mean something else, than those that are there.",
        NEW_PLACE,
    )


def _dead_letter(was: Document, now: Document) -> Iterator[Change]:
    before, after = kind_of_letters(was), kind_of_letters(now)
    if before != after:
        yield refused("dead_letter", f"{before} became {after}", LETTERS_STAY, OTHER_PIPELINE)
    elif after != "kafka":
        yield from _changed(
            {"kind": after, **was[after]}, {"kind": after, **now[after]}, f"dead_letter.{after}"
        )
    else:
        yield from _changed({"kind": after, **was}, {"kind": after, **now}, "dead_letter")
