"""Counting the routes of a walk: by number and by digest, each row where it stands.

A walk of rules and projections alone is counted while its rows are written: Spark observes each run of rules as rows
pass. That is one pass less, and worth having only if it is right: what was observed is taken when it adds up to what
was given, else everything is counted in a job of its own. Walks with other steps are always counted so, before any
sink sees a row.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.core.failures import RuleBroken, StepError, Unbalanced
from holdfast.pipeline.core.sql import LINEAGE, PLACE
from holdfast.pipeline.definition.model import Expect
from holdfast.pipeline.digest import Tally, join_halves
from holdfast.pipeline.engine.walking import (
    ALIVE,
    DUPLICATE,
    LATE,
    LEFT,
    NONE,
    ROUTE,
    Counted,
    Link,
    counting,
    is_warning,
    missing_rows,
    plus,
)

if TYPE_CHECKING:
    from pyspark.sql import Observation

    from holdfast.pipeline.state.operator import Turn

EXAMPLES: Final = 5
"""Of rows that break a rule, named in the error."""
OBSERVED_WITHIN_S: Final = 5.0
"""Metrics come after the job that made them, by another thread; longer than this is never."""


def count_links(links: Sequence[Link], given: Counted, *, have_run: bool) -> None:
    """Fill in the counts of every link; `have_run`: a job over the last link's rows is done, and was observed."""
    if not (have_run and _observed(links, given)):
        collect([link for link in links if link.rules or (link.turn is None and not link.keeps_every_row)])
    for link in links:
        if link.turn is not None:
            _take_turn(link, link.turn, given)
        elif link.step is not None and link.keeps_every_row:
            link.counts = {ALIVE: given}
        elif link.step is not None:
            _account(link, given)
        elif link.total != given:
            raise Unbalanced(
                f"{link.total.tally.rows} rows came out of the rules {link} and {given.tally.rows} went in. Nothing "
                "was committed; please report this"
            )
        _stop_if_broken(link)
        given = link.counts.setdefault(ALIVE, NONE)


def collect(links: Sequence[Link]) -> None:
    """Count these links in one job."""
    if not links:
        return
    frames = [counting(number, link) for number, link in enumerate(links)]
    for link in links:
        link.counts.clear()
        link.warned.clear()
    for row in reduce(lambda one, other: one.unionAll(other), frames).collect():
        link = links[row["link"]]
        tally = Tally(row["n"], join_halves(row["low"], row["high"]))
        firsts = tally
        if not link.given_rows_are_first:
            firsts = Tally(row["first_n"], join_halves(row["first_low"], row["first_high"]))
        if tally.rows:
            link.counts[row["route"]] = Counted(tally, firsts)
        _add_warnings(link, row["warned"])


def _add_warnings(link: Link, broken: Sequence[int]) -> None:
    warnings = [rule for rule in link.rules if is_warning(rule)]
    for rule, count in zip(warnings, broken, strict=True):
        if count:
            link.warned[rule.name] = link.warned.get(rule.name, 0) + count


# ---------------------------------------------------------------------------- observed


def _observed(links: Sequence[Link], given: Counted) -> bool:
    """Take what Spark observed, if all of it is there and adds up."""
    for link in links:
        if not link.rules:
            continue
        metrics = _metrics(link.observation) if link.observation is not None else None
        if metrics is None:
            return False
        for route in range(len(link.turned_away) + 1):
            tally = Tally(metrics[f"n{route}"], join_halves(metrics[f"low{route}"], metrics[f"high{route}"]))
            if tally.rows:
                link.counts[route] = Counted(tally, tally)
        if link.total != given:
            return False
        _add_warnings(link, [metrics[name] for name in sorted(metrics) if name.startswith("warned")])
        link.turned_away_text = metrics.get(LEFT)
        given = link.counts.get(ALIVE, NONE)
    return True


def _metrics(observation: Observation) -> Mapping[str, Any] | None:
    """Nothing when they do not come: an action that Spark does not observe."""
    made: Any = observation._jo
    deadline_s = time.monotonic() + OBSERVED_WITHIN_S
    while not made.future().isCompleted():
        if time.monotonic() > deadline_s:
            return None
        time.sleep(0.002)
    metrics: Mapping[str, Any] = observation.get
    return metrics or None


# ---------------------------------------------------------------------------- what does not add up


def _account(link: Link, given: Counted) -> None:
    """What a query or function left out is its filtered route, row by row."""
    assert link.step is not None
    got = link.counts.get(ALIVE, NONE)
    wanted = given if not link.expands else Counted(given.firsts, given.firsts)
    found = got if not link.expands else Counted(got.firsts, got.firsts)
    if found != wanted:
        missing = missing_rows(link)
        collect([missing])
        vanished = missing.counts.get(ALIVE, NONE)
        if plus(found, vanished) != wanted:
            raise _surplus(link)
        link.counts[1] = vanished


def _take_turn(link: Link, turn: Turn, given: Counted) -> None:
    """What a step with a memory says became of its rows is all of them."""
    assert link.step is not None
    told = turn.taken + turn.late + turn.duplicate
    if told != given.tally:
        raise Unbalanced(
            f"step {link.step.name!r} accounts for {told.rows} rows and {given.tally.rows} reached it (digests "
            f"{told.digest:016x} and {given.tally.digest:016x}). Nothing was committed; please report this"
        )
    if link.is_tap:
        link.counts = {ALIVE: given}
        return
    tallies = {ALIVE: turn.taken, DUPLICATE: turn.duplicate, LATE: turn.late}
    link.counts = {route: Counted(tally, tally) for route, tally in tallies.items() if tally.rows}
    if not link.given_rows_are_first:
        _count_firsts(link, turn)


def _count_firsts(link: Link, turn: Turn) -> None:
    """Rows of one record may have gone different ways: the first of each is counted where it went."""
    frames = {
        ALIVE: turn.rows,
        DUPLICATE: turn.streams.get("duplicates"),
        LATE: turn.streams.get("late"),
    }
    chosen = {route: frame for route, frame in frames.items() if route in link.counts and frame is not None}
    parts = [Link(link.given, frame, False, step=link.step) for frame in chosen.values()]
    collect(parts)
    for route, part in zip(chosen, parts, strict=True):
        link.counts[route] = Counted(link.counts[route].tally, part.counts.get(ALIVE, NONE).firsts)


def _surplus(link: Link) -> StepError:
    assert link.step is not None
    place = [f"{LINEAGE}.{name}" for name in PLACE]
    twice = link.frame.selectExpr(*place).groupBy(*PLACE).count()
    example = twice.where("count > 1").orderBy("topic", "partition", "offset").first()
    if example is None:
        return StepError(
            link.step.name,
            "it returned rows of records it was not given. Nothing was committed; keep `_hf` as it is",
        )
    return StepError(
        link.step.name,
        f"it made {example['count']} rows of one (offset {example['offset']} of {example['topic']}-"
        f"{example['partition']}): a step that multiplies rows says `expand: true`. Nothing was committed",
    )


def _stop_if_broken(link: Link) -> None:
    for number, rule in link.turned_away:
        if isinstance(rule, Expect) and rule.otherwise == "fail" and number in link.counts:
            rows = link.frame.where(f"{ROUTE} = {number}").selectExpr(
                f"{LINEAGE}.topic", f"{LINEAGE}.partition", f"{LINEAGE}.offset"
            )
            examples = [
                f"{row.topic}-{row.partition} offset {row.offset}"
                for row in rows.orderBy("topic", "partition", "offset").limit(EXAMPLES).collect()
            ]
            raise RuleBroken(
                f"rule {rule.name!r} ({rule.that}) does not hold for {link.counts[number].tally.rows} rows, and it "
                f"says `fail`: {', '.join(examples)}. Nothing of the batch was committed: correct the rule or the "
                "source, or let it quarantine such rows"
            )
