"""Windows recomputed from the log: a clean pipeline is never accused, and a wrong row is always found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.audit.model import Fate
from holdfast.audit.sinks.base import Values
from holdfast.audit.stateful import StatefulResult
from holdfast.audit.stateful.carried import Carried
from holdfast.audit.stateful.windows import held_rows, milliseconds, rows_in_order
from holdfast.pipeline.definition.model import (
    Dedupe,
    EventTime,
    Filter,
    ParquetSink,
    PostgresSink,
    Python,
    Sql,
    Window,
)

if TYPE_CHECKING:
    from .conftest import Reader, Sent, World

EXAMPLES = hypothesis_settings(max_examples=examples(60))
TUMBLING = Window("totals", {"total": "sum(amount)"}, size="4s", key=("customer",))
SLIDING = replace(TUMBLING, kind="sliding", every="1s")
SESSION = replace(TUMBLING, kind="session", size=None, gap="2s")
ONCE = Dedupe("once", ("customer",), within="3s")


@st.composite
def windows(draw: Any, *, growing: bool = False) -> Window:
    step: Window = draw(st.sampled_from((TUMBLING, SLIDING, SESSION)))
    if step.kind == "session" and not growing:
        return step
    emit = draw(st.sampled_from(("closed", "changes")))
    return replace(step, emit=emit, late=draw(st.sampled_from(("route", "correct"))), correct_within="3s")


@st.composite
def histories(draw: Any) -> tuple[list[dict[str, Any]], list[int]]:
    """Records, some late, some without event or with a clock far ahead; and where batches end."""
    drawn = draw(
        st.lists(
            st.tuples(
                st.integers(0, 1),
                st.sampled_from(("a", "b", "c", None)),
                st.integers(0, 3000),
                st.sampled_from((0, 0, 0, 0, 1000, 3000, 9000, -9_000_000, None)),
                st.integers(0, 4),
            ),
            min_size=1,
            max_size=30,
        )
    )
    now = 0
    found = []
    for partition, customer, passed, behind, amount in drawn:
        now += passed
        event = None if behind is None else max(0, now - behind)
        found.append(
            {"partition": partition, "customer": customer, "event": event, "time": now, "amount": amount}
        )
    cuts = sorted(set(draw(st.lists(st.integers(1, len(found)), max_size=5))) - {len(found)})
    return found, cuts


Histories = tuple[list[dict[str, Any]], list[int]]


def made(
    world: type[World], sent: type[Sent], history: Histories, *steps: Window | Dedupe | Filter | Sql | Python
) -> World:
    records, cuts = history
    return world(tuple(steps), [sent(**record) for record in records], cuts)


@EXAMPLES
@given(
    history=histories(),
    step=windows(growing=True),
    once=st.booleans(),
    idle=st.sampled_from((None, "2ms")),
    field=st.sampled_from(("at", "_timestamp")),
)
def test_windows_of_a_pipeline_that_kept_the_rules_are_never_accused(
    world: type[World],
    sent: type[Sent],
    history: Histories,
    step: Window,
    once: bool,
    idle: str | None,
    field: str,
) -> None:
    play = made(world, sent, history, *([ONCE] if once else []), step)
    play.event = EventTime(field, "2s", idle)
    found = play.audit(play.play()).examined
    assert [each.what() for each in found.findings] == []
    assert [each for each in found.unproven if each.is_gap] == []
    assert found.windows[0].recomputed == found.windows[0].expected


def handed_on(carried: Carried, turn: int, rows: int | None = None) -> Carried:
    """As an audit of all sinks hands it on, and as the next reads it; `rows` are those of a table without marks."""
    tables = {} if rows is None else {"windows": np.zeros((rows, 2), np.uint64)}
    assert carried.lacks == ""
    read = Carried.from_bytes(replace(carried, turns={"windows": turn}, tables=tables).as_bytes())
    assert read is not None
    return read


def test_an_audit_goes_on_from_one_that_saw_no_record(world: type[World], sent: type[Sent]) -> None:
    only = {"partition": 0, "customer": "a", "event": 0, "time": 0, "amount": 1}
    play = made(world, sent, ([only], []), TUMBLING)
    played = play.play()
    first = play.audit(played, turns=(0, 0))
    found = play.audit(played, turns=(0, None), before=handed_on(first.carried, 0))
    assert found.examined.findings == ()
    assert found.carried.rows is not None
    assert found.carried.rows.offsets.tolist() == [0]


@EXAMPLES
@given(
    history=histories(),
    step=windows(),
    once=st.booleans(),
    idle=st.sampled_from((None, "2ms")),
    is_table=st.booleans(),
    data=st.data(),
)
def test_an_audit_goes_on_from_what_another_has_handed_on(
    world: type[World],
    sent: type[Sent],
    reader: type[Reader],
    history: Histories,
    step: Window,
    once: bool,
    idle: str | None,
    is_table: bool,
    data: st.DataObject,
) -> None:
    """Windows, duplicates and late rows of the batches behind a cut: never accused, and a wrong row is found."""
    play = made(world, sent, history, *([ONCE] if once else []), step)
    play.event = EventTime("at", "2s", idle)
    if is_table:
        key = (*step.key, "window_start")
        play.sinks = (PostgresSink("postgresql://db", "t", "windows", "upsert", key, rows="totals"),)
    played = play.play()
    cut = data.draw(st.integers(0, len(play.spans())))

    def standing(rows: list[Any], turn: int) -> list[Any]:
        rows = [row for row in rows if row.turn <= turn]
        return list({(row.customer, row.start): row for row in rows}.values()) if is_table else rows

    def audit(
        rows: list[Any], turns: tuple[int, int | None], before: Carried | None = None
    ) -> StatefulResult:
        entries = played.entries[: None if turns[1] is None else turns[1] + 1]
        return play.audit(played, [reader("windows", rows, entries)], turns=turns, before=before)

    first = audit(standing(played.rows, cut), (0, cut))
    assert first.examined.findings == ()
    known = handed_on(first.carried, cut, len(standing(played.rows, cut)) if is_table else None)
    rows = standing(played.rows, len(played.entries))
    found = audit(rows, (cut, None), known)
    assert [each.what() for each in found.examined.findings] == []
    assert not any(each.is_gap for each in found.examined.unproven)
    full = audit(rows, (0, None))
    assert found.carried.rows is not None
    assert full.carried.rows is not None
    assert found.carried.rows.offsets.tolist() == full.carried.rows.offsets.tolist()
    assert found.carried.chains == full.carried.chains
    new = [at for at, row in enumerate(rows) if row.turn > cut or is_table]
    assume(new)
    at = data.draw(st.sampled_from(new))
    assert audit(rows[:at] + rows[at + 1 :], (cut, None), known).examined.findings
    if rows[at].turn > cut and is_newest(rows, at):
        wrong = [*rows[:at], replace(rows[at], total=rows[at].total + 1), *rows[at + 1 :]]
        assert audit(wrong, (cut, None), known).examined.findings


def is_newest(rows: list[Any], at: int) -> bool:
    """Whether the window was not given out again later: aggregates are computed again for its newest row."""
    window = (rows[at].customer, rows[at].start)
    return all(row.turn <= rows[at].turn for row in rows if (row.customer, row.start) == window)


@EXAMPLES
@given(history=histories(), step=windows(), data=st.data())
def test_one_wrong_row_of_a_window_is_found(
    world: type[World], sent: type[Sent], history: Histories, step: Window, data: st.DataObject
) -> None:
    play = made(world, sent, history, step)
    played = play.play()
    assume(played.rows)
    at = data.draw(st.integers(0, len(played.rows) - 1))
    row = played.rows[at]
    wrong = data.draw(
        st.sampled_from(
            (
                replace(row, count=row.count + 1),
                replace(row, digest=row.digest ^ 1),
                replace(row, customer="somebody"),
                replace(row, start=row.start + 1000),
                replace(row, end=row.end + 1),
                replace(row, turn=row.turn + 1000),
                None,
            )
        )
    )
    rest = played.rows[:at] + played.rows[at + 1 :]
    found = play.audit(replace(played, rows=rest if wrong is None else [*rest, wrong])).examined
    assert found.findings
    assert all(finding.sink == "windows" for finding in found.findings)
    twice = play.audit(replace(played, rows=[*played.rows, row])).examined
    assert [finding.fate for finding in twice.findings] == [Fate.DUPLICATED]


@EXAMPLES
@given(history=histories(), step=windows(), data=st.data())
def test_a_row_that_was_wrongly_late_or_wrongly_not_is_found(
    world: type[World], sent: type[Sent], history: Histories, step: Window, data: st.DataObject
) -> None:
    play = made(world, sent, history, step)
    played = play.play()
    everything = [(number, at) for number, log in enumerate(play.logs) for at in range(len(log))]
    where = data.draw(st.sampled_from(everything))
    late = [each for each in played.late if each != where]
    if where not in played.late:
        late.append(where)
    found = play.audit(replace(played, late=late)).examined
    assert [(finding.place.partition, finding.ranges) for finding in found.findings if finding.place] == [
        (where[0], ((where[1], where[1]),))
    ]


def steady(
    world: type[World], sent: type[Sent], *steps: Any, count: int = 24, cuts: tuple[int, ...] = (8, 16)
) -> World:
    """A record each second, in turn to both partitions, of two customers."""
    records = [
        sent(number % 2, "ab"[number // 2 % 2], number * 1000, number * 1000, number)
        for number in range(count)
    ]
    return world(tuple(steps), records, list(cuts))


def test_an_aggregate_that_is_not_that_of_its_records_is_found(world: type[World], sent: type[Sent]) -> None:
    play = steady(world, sent, TUMBLING)
    played = play.play()
    played.rows[0] = replace(played.rows[0], total=played.rows[0].total + 1)
    (finding,) = play.audit(played).examined.findings
    assert finding.fate is Fate.ALTERED
    assert "total is" in finding.detail
    assert finding.keys == (f"customer={played.rows[0].customer}",)


def test_a_watermark_that_the_log_does_not_give_is_found(world: type[World], sent: type[Sent]) -> None:
    play = steady(world, sent, TUMBLING)
    played = play.play()
    entry = played.entries[2]
    assert entry.watermark_ms is not None
    played.entries[2] = replace(entry, watermark_ms=entry.watermark_ms + 60_000)
    (finding,) = play.audit(played).examined.findings
    assert finding.fate is Fate.ALTERED
    assert "watermark" in finding.detail


def test_an_idle_partition_is_left_out_of_the_watermark(world: type[World], sent: type[Sent]) -> None:
    """All records go to one partition: only `idle` lets windows close, and the ledger's times decide when."""
    records = [sent(0, "a", number * 1000, number * 1000) for number in range(20)]
    play = world((TUMBLING,), records, [10], event=EventTime("at", "2s", idle="1ms"))
    played = play.play()
    assert played.rows
    assert play.audit(played).examined.findings == ()
    play.event = EventTime("at", "2s")  # then nothing should have closed
    fates = {finding.fate for finding in play.audit(played).examined.findings}
    assert fates == {Fate.EXTRA, Fate.ALTERED}


def test_without_the_key_all_keys_together_are_proven(world: type[World], sent: type[Sent]) -> None:
    named = Sql("named", "SELECT * EXCEPT (customer), upper(customer) AS customer FROM input")
    play = steady(world, sent, named, TUMBLING)
    played = play.play()
    found = play.audit(played).examined
    assert found.findings == ()
    assert not any(each.recomputed for each in found.coverage)
    assert "customer" in found.coverage[0].why
    played.rows[0] = replace(played.rows[0], digest=played.rows[0].digest + 1)
    assert [finding.fate for finding in play.audit(played).examined.findings] == [Fate.ALTERED]
    del played.rows[0]
    assert play.audit(played).examined.findings


def test_sessions_of_a_computed_key_are_not_taken_as_proven(world: type[World], sent: type[Sent]) -> None:
    named = Python("named", function="f")
    play = steady(world, sent, named, SESSION)
    assert [each.is_gap for each in play.audit(play.play()).examined.unproven] == [True]


def test_behind_a_step_that_expands_nothing_is_claimed(world: type[World], sent: type[Sent]) -> None:
    many = Sql("many", "SELECT *, explode(sequence(1, 2)) AS n FROM input", expand=True)
    play = steady(world, sent, many, TUMBLING)
    found = play.audit(replace(play.play(), rows=[])).examined
    assert found.findings == ()
    assert "several rows" in found.coverage[0].why


def test_a_time_that_is_none_is_before_everything() -> None:
    times = pa.chunked_array([["2026-03-01U12:02:00.000000Z", "1970-01-01T00:00:01.000000Z", None]])
    assert milliseconds(times).tolist() == [-(2**62) // 1000, 1000, -(2**62) // 1000]


def test_a_time_with_a_part_of_a_millisecond_is_that_of_no_window() -> None:
    times = pa.chunked_array([pa.array([1_000_000, 1_000_001, -1], pa.timestamp("us", tz="UTC"))])
    assert milliseconds(times).tolist() == [1000, -(2**62) // 1000, -(2**62) // 1000]


@pytest.mark.parametrize(
    ("changed", "made_again"),
    [({}, 4), ({"index": [0, 1, 9, 0]}, 1), ({"index": [1, 0, 2, 0]}, 1), ({"partition": [0, 0, 0, 1]}, 3)],
)
def test_the_number_of_a_row_in_its_batch_is_made_again_or_left_to_the_digests(
    changed: dict[str, list[int]], made_again: int
) -> None:
    start = pa.array([0, 60_000_000, 0, 0], pa.timestamp("us", tz="UTC"))
    rows = {
        "_hf_topic": ["totals"] * 4, "_hf_partition": changed.get("partition", [0] * 4), "_hf_offset": [3, 3, 3, 4],
        "_hf_index": changed.get("index", [0, 1, 2, 0]), "customer": [None, None, "a", "a"], "window_start": start,
        "window_end": start, "_hf_count": [1] * 4, "_hf_digest": [1] * 4,
    }  # fmt: skip
    assert rows_in_order(*held_rows([Values(pa.table(rows))]), ("customer",)) == made_again


def test_an_audit_that_begins_late_claims_nothing_of_windows(world: type[World], sent: type[Sent]) -> None:
    play = steady(world, sent, TUMBLING)
    found = play.audit(play.play(), cut=True).examined
    assert found.findings == ()
    assert [each.is_gap for each in found.unproven] == [True]


def test_a_ledger_that_kept_its_last_entries_only_proves_what_stands(
    world: type[World], sent: type[Sent], reader: type[Reader]
) -> None:
    play = steady(world, sent, replace(TUMBLING, emit="changes"))
    played = play.play()
    cut_short = [replace(entry) for entry in played.entries[-2:]]
    audit = play.audit(played, [reader("windows", played.rows, cut_short)]).examined
    assert audit.findings == ()
    newest = max(range(len(played.rows)), key=lambda at: played.rows[at].turn)
    wrong = list(played.rows)
    wrong[newest] = replace(wrong[newest], count=99)
    (finding,) = play.audit(played, [reader("windows", wrong, cut_short)]).examined.findings
    assert finding.fate is Fate.ALTERED


def test_a_sink_that_was_added_later_has_only_what_came_since(
    world: type[World], sent: type[Sent], reader: type[Reader]
) -> None:
    play = steady(world, sent, TUMBLING)
    play.sinks = (*play.sinks, ParquetSink("unused", name="second", rows="totals"))
    played = play.play()
    later = played.entries[2:]
    opening = replace(played.entries[0], positions=played.entries[1].positions)
    spans = {at: (span.start, span.end) for at, span in played.entries[2].range.spans.items()}
    opening = replace(
        opening,
        range=replace(
            opening.range,
            spans={
                at: span._replace(start=spans[at][0], end=spans[at][0])
                for at, span in opening.range.spans.items()
            },
        ),
    )
    ledger = [opening, *(replace(entry, number=entry.number - 1) for entry in later)]
    held = [row for row in played.rows if row.turn >= 2]
    first = reader("windows", played.rows, played.entries)
    assert play.audit(played, [first, reader("second", held, ledger)]).examined.findings == ()
    (lost,) = play.audit(played, [first, reader("second", held[1:], ledger)]).examined.findings
    assert (lost.fate, lost.sink) == (Fate.LOST, "second")
    assert any(row.turn < 2 for row in played.rows)
    extra = play.audit(played, [first, reader("second", played.rows, ledger)]).examined.findings
    assert {each.fate for each in extra} == {Fate.EXTRA}
    reset = [replace(entry, generation=1) for entry in ledger]
    reset[0] = replace(reset[0], state=1)
    assert play.audit(played, [first, reader("second", played.rows, reset)]).examined.findings == ()


def test_a_table_that_keeps_one_row_for_each_window_holds_the_last(
    world: type[World], sent: type[Sent], reader: type[Reader]
) -> None:
    play = steady(world, sent, replace(TUMBLING, emit="changes"), cuts=(7, 13))
    key = ("customer", "window_start")
    play.sinks = (PostgresSink("url", "t", name="windows", mode="upsert", key=key, rows="totals"),)
    played = play.play()
    standing = {(row.customer, row.start): row for row in played.rows}
    held = list(standing.values())
    assert len(held) < len(played.rows)
    assert play.audit(played, [reader("windows", held, played.entries)]).examined.findings == ()
    old = next(
        row for row in played.rows if standing[row.customer, row.start] is not row
    )  # one that was replaced
    stale = [old if (row.customer, row.start) == (old.customer, old.start) else row for row in held]
    (finding,) = play.audit(played, [reader("windows", stale, played.entries)]).examined.findings
    assert finding.fate is Fate.ALTERED


def test_a_session_that_grew_stands_as_it_is_in_the_end(world: type[World], sent: type[Sent]) -> None:
    play = steady(world, sent, replace(SESSION, emit="changes"), cuts=(5, 9, 14))
    played = play.play()
    found = play.audit(played).examined
    assert found.findings == ()
    assert any("replaced" in each.why for each in found.coverage)
    newest = max(range(len(played.rows)), key=lambda at: played.rows[at].turn)
    played.rows[newest] = replace(played.rows[newest], count=99)
    assert [finding.fate for finding in play.audit(played).examined.findings] == [Fate.ALTERED]
    del played.rows[0]
    assert Fate.LOST in [finding.fate for finding in play.audit(played).examined.findings]


@pytest.mark.parametrize("emit", ["closed", "changes"])
def test_windows_of_another_length_from_before_a_rebuild_accuse_nobody(
    world: type[World], sent: type[Sent], emit: Any
) -> None:
    """The first batches were made by windows of two seconds; then the length was changed, and the state rebuilt."""
    before = steady(world, sent, replace(TUMBLING, size="2s", emit=emit)).play()
    play = steady(world, sent, replace(TUMBLING, emit=emit))
    after = play.play()
    newest = after.entries[-1].state
    assert newest is not None
    others = [replace(entry, fingerprint="other") for entry in before.entries[:-1]]
    mixed = replace(
        after,
        entries=[*others, after.entries[-1]],
        rows=[row for row in before.rows if row.turn < newest]
        + [row for row in after.rows if row.turn >= newest],
    )
    assert play.audit(mixed).examined.findings
    found = play.audit(mixed, others={"totals": {"other"}}).examined
    assert found.findings == ()
    [account] = found.windows
    assert account.windows == len(mixed.rows)
    recomputed = {each.column: each.recomputed for each in found.coverage}
    assert 0 < recomputed["customer"] == sum(row.turn >= newest for row in mixed.rows)
    mixed.rows[-1] = replace(mixed.rows[-1], count=99)
    assert play.audit(mixed, others={"totals": {"other"}}).examined.findings


def test_records_in_open_windows_wait(world: type[World], sent: type[Sent]) -> None:
    play = steady(world, sent, TUMBLING)
    result = play.audit(play.play())
    waiting = sorted(offset for offsets in result.waiting.values() for offset in offsets.tolist())
    assert 0 < len(waiting) < 24
    assert max(waiting) == 11
