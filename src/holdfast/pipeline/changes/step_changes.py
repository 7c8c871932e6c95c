"""Changes of the steps: which state was made by them, and has to be rebuilt.

A step's state is made of the rows that reach it. So it follows from the step itself and from every step before it that
lets rows through changed or not at all. Windows, keyed functions and joins let rows go on as they are, and so does
a rule that only warns: they are no part of what later steps remember.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from holdfast.pipeline.changes.levels import Change, Document, from_to, rebuild, safe, show

STATEFUL: Final = {
    "dedupe": "The keys it remembers were kept by the old rule.",
    "window": "Windows that are open were made by the old rule.",
    "keyed": "The states of its keys were made by the old rule.",
    "join": "The rows that wait for a partner were kept by the old rule.",
}
"""Steps with a state, and what of it another rule would have made otherwise."""
FROM_NOW_ON: Final = "It counts from the next batch on; rows that sinks hold stay as they are."
WITH_OWN_ROWS: Final = ("window", "keyed", "join")
RULES: Final = ("expect", "filter")
HARMLESS: Final = {
    ("lookup", "refresh"): "A version of the table is pinned for each batch, whatever its age.",
}
"""Settings that count in no state."""
NOT_SHOWN: Final = ("code", "query", "table")
"""Long, or an address that may hold a password."""


def has_state(document: Document) -> bool:
    return any(step["kind"] in STATEFUL for step in document.get("steps") or [])


def makes_rows(step: Document) -> bool:
    """Whether what this step does shows in the rows that later steps get."""
    is_warning = step["kind"] == "expect" and step.get("otherwise") == "warn"
    return step["kind"] not in WITH_OWN_ROWS and not is_warning


def step_changes(before: Document, after: Document) -> Iterator[Change]:
    """Of two whole definitions."""
    mine = {step["name"]: step for step in before.get("steps") or []}
    theirs = {step["name"]: step for step in after.get("steps") or []}
    for name in [*theirs, *(each for each in mine if each not in theirs)]:
        old, new = mine.get(name), theirs.get(name)
        if old is None and new is not None:
            yield _added(new, after)
        elif new is None and old is not None:
            yield _removed(old, before, after)
        elif old is not None and new is not None and old != new:
            yield from _changed(old, new, before, after)
    yield from _moved(before, after, mine.keys() & theirs.keys())


def _added(step: Document, after: Document) -> Change:
    where = f"steps.{step['name']}"
    what = f"new {step['kind']}"
    if step["kind"] in STATEFUL:
        return rebuild(
            where,
            what,
            "It remembers nothing of what was read so far, and its first rows would tell only a part.",
        )
    later = _remembering_after(step, after) if makes_rows(step) else []
    if later:
        return _remade(where, what, later)
    return safe(where, what, FROM_NOW_ON)


def _removed(step: Document, before: Document, after: Document) -> Change:
    where, what = f"steps.{step['name']}", f"{step['kind']} removed"
    later = _remembering_after(step, before, after) if makes_rows(step) else []
    if later:
        return _remade(where, what, later)
    why = FROM_NOW_ON
    if step["kind"] in STATEFUL:
        why = "What it remembers is forgotten; bringing it back needs a rebuild."
    return safe(where, what, why)


def _changed(old: Document, new: Document, before: Document, after: Document) -> Iterator[Change]:
    where = f"steps.{new['name']}"
    if old["kind"] != new["kind"]:
        is_bad = new["kind"] in STATEFUL
        later = _remembering_after(new, after, before)
        what = f"{from_to(old['kind'], new['kind'])}"
        if is_bad:
            yield rebuild(where, what, "Another kind of step remembers other things.")
        elif later and (makes_rows(old) or makes_rows(new)):
            yield _remade(where, what, later)
        else:
            yield safe(where, what, "It counts from the next batch on.")
        return
    later = _remembering_after(new, after, before) if makes_rows(old) or makes_rows(new) else []
    for name in sorted({*old, *new} - {"kind", "name"}):
        if old.get(name) == new.get(name):
            continue
        place = f"{where}.{name}"
        what = "changed" if name in NOT_SHOWN else from_to(old.get(name), new.get(name))
        harmless = HARMLESS.get((new["kind"], name))
        if harmless is not None:
            yield safe(place, what, harmless)
        elif new["kind"] in STATEFUL:
            yield rebuild(place, what, STATEFUL[new["kind"]])
        elif later:
            yield _remade(place, what, later)
        else:
            yield _only_rows(new, place, what)


def _only_rows(step: Document, place: str, what: str) -> Change:
    why = FROM_NOW_ON
    if step["kind"] == "python" and place.endswith(".schema"):
        why = "Rows get these columns from the next batch on; a sink that holds a column in another type refuses it."
    return safe(place, what, why)


def _remade(where: str, what: str, later: list[str]) -> Change:
    verb = "remembers" if len(later) == 1 else "remember"
    return rebuild(where, what, f"It comes before {show(later)}, which {verb} rows that passed it as it was.")


def _remembering_after(step: Document, document: Document, other: Document | None = None) -> list[str]:
    """Names of the stateful steps behind this one that are in the other definition too."""
    steps: list[Any] = list(document.get("steps") or [])
    names = [each["name"] for each in steps]
    at = names.index(step["name"])
    found = [each["name"] for each in steps[at + 1 :] if each["kind"] in STATEFUL]
    if other is None:
        return found
    there = {each["name"] for each in other.get("steps") or [] if each["kind"] in STATEFUL}
    return [name for name in found if name in there]


def _moved(before: Document, after: Document, common: set[str]) -> Iterator[Change]:
    """Steps that are in both, in another order."""
    was = [step["name"] for step in before.get("steps") or [] if step["name"] in common]
    now = [step["name"] for step in after.get("steps") or [] if step["name"] in common]
    if was == now:
        return
    touched = [
        step["name"]
        for step in after.get("steps") or []
        if step["name"] in common
        and step["kind"] in STATEFUL
        and _before(step["name"], before, common) != _before(step["name"], after, common)
    ]
    what = f"{' → '.join(was)} became {' → '.join(now)}"
    if touched:
        yield rebuild(
            "steps", what, f"Other steps come before {show(touched)} now than when its state was made."
        )
    else:
        yield safe("steps", what, "The order counts from the next batch on; no state follows from it.")


def _before(name: str, document: Document, common: set[str]) -> list[str]:
    """The steps in front of this one that decide which rows it gets."""
    found: list[str] = []
    for step in document.get("steps") or []:
        if step["name"] == name:
            return found
        if makes_rows(step) and step["name"] in common:
            found.append(step["name"])
    return found
