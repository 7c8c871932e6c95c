"""A foreign Spark job is audited by its checkpoint: every way in which its rows can be wrong is named."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.audit_topics import Sent, append_transaction

from holdfast.audit import record_walk
from holdfast.audit.checkpoint import audit_checkpoint
from holdfast.audit.foreign_files import ParquetTable
from holdfast.audit.matching import MatchError, parse_match
from holdfast.audit.model import AuditError, Fate, Finding, Report, Verdict
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from .conftest import World


def finding(report: Report, fate: Fate) -> Finding:
    (found,) = [each for each in report.findings if each.fate is fate]
    return found


def gaps(report: Report) -> str:
    return "; ".join(f"{each.what}: {each.why}" for each in report.unproven if each.is_gap)


@pytest.fixture
def simple(world: World) -> World:
    """Twenty orders in each of two partitions, of which Spark has committed sixteen and ten."""
    world.send_orders(range(20))
    world.send_orders(range(100, 120), partition=1)
    world.batches({0: 10, 1: 5}, {0: 16, 1: 10}, {0: 18, 1: 10}, committed=1, start={0: 0, 1: 0})
    return world


FINE = [*range(16), *range(100, 110)]


def test_what_was_committed_and_is_there_is_proven(simple: World) -> None:
    simple.rows(FINE[:9], "part-0")
    simple.rows(FINE[9:], "day=7/part-1")
    report = simple.audit()
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert report.mode == "checkpoint"
    assert (report.scope.offsets, report.scope.pending) == (26, 14)
    assert [account.fates for account in report.partitions] == [{"output": 16}, {"output": 10}]
    assert report.sinks[0].rows == 26
    assert report.sinks[0].positions == {"orders-0": 16, "orders-1": 10}
    assert sum(report.timeline.counts["output"]) == 26
    assert Report.from_json(report.as_json()) == report


def test_lost_doubled_and_extra_rows_are_named_by_offset_and_key(simple: World) -> None:
    wrong = [each for each in FINE if each not in (3, 4, 105)] + [7, 7, 4711]
    simple.rows(wrong)
    report = simple.audit()
    assert report.verdict is Verdict.FAILED
    lost = {each.place.partition: each for each in report.findings if each.fate is Fate.LOST and each.place}
    assert (lost[0].ranges, lost[0].count, lost[0].keys) == (((3, 4),), 2, ("k0.3", "k0.4"))
    assert (lost[1].ranges, lost[1].keys) == (((5, 5),), ("k1.5",))
    twice = finding(report, Fate.DUPLICATED)
    assert (twice.ranges, twice.count, twice.keys) == (((7, 7),), 2, ("k0.7",))
    extra = finding(report, Fate.EXTRA)
    assert (extra.count, extra.keys) == (1, ("4711",))
    assert "part-0.parquet row 25" in extra.detail


def test_rows_of_a_batch_that_is_not_committed_are_pending_and_twice_is_twice(simple: World) -> None:
    simple.rows([*FINE, 16, 17])
    report = simple.audit()
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert "1 batch planned and not committed, pending: orders-0 16 to 17" in report.notes
    simple.rows([*FINE, 16, 16])
    assert finding(simple.audit(), Fate.DUPLICATED).ranges == ((16, 16),)


def test_the_scope_begins_at_the_oldest_entry_kept(world: World) -> None:
    world.send_orders(range(20))
    world.batches({0: 8}, {0: 12}, {0: 20}, first=41)
    # What came before may be there or not: nobody knows where the job began.
    for ids in (range(20), range(8, 20), range(5, 20)):
        world.rows(list(ids))
        report = world.audit()
        assert report.verdict is Verdict.PROVEN, report.reasons
        assert report.scope.begins.startswith("the oldest entry kept, the end of batch 41")
        assert (report.partitions[0].start, report.partitions[0].end) == (8, 20)
    world.rows([*range(8), *range(9, 20)])
    assert finding(world.audit(), Fate.LOST).ranges == ((8, 8),)
    world.rows([2, 2, *range(8, 20)])
    assert finding(world.audit(), Fate.DUPLICATED).ranges == ((2, 2),)


def test_records_that_expired_are_a_gap_and_their_rows_nobodys_fault(simple: World) -> None:
    simple.cluster.topics["orders"].partitions[0].log_start = 6
    simple.rows(FINE)
    report = simple.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "6 offsets of orders-0, 0 to 5" in gaps(report)
    assert report.partitions[0].kinds["expired"] == 6
    assert "6 rows" in gaps(report)


def test_a_log_that_ends_before_what_was_read_is_not_the_same(simple: World) -> None:
    simple.batches({0: 10, 1: 5}, {0: 50, 1: 10}, start={0: 0, 1: 0})
    simple.rows([*range(20), *range(100, 110)])
    report = simple.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "the log ends at 20" in gaps(report)


def test_records_that_cannot_be_read_are_counted_and_named(world: World) -> None:
    world.send([b'{"id":1}', b"broken", b'{"id":"x"}', b'{"id":4}'], keys=[b"a", b"b", b"c", b"d"])
    world.batches({0: 4}, start={0: 0})
    world.rows([1, 4, None, None])
    report = world.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "2 records of orders-0 at 1-2, keys b, c: id = value.id cannot be computed" in gaps(report)
    assert "2 rows" in gaps(report)
    # More than those records there cannot be.
    world.rows([1, 4, None, None, None])
    assert finding(world.audit(), Fate.EXTRA).count == 1


def test_rows_that_cannot_be_read_may_be_what_is_missing(world: World) -> None:
    world.send_orders(range(4))
    world.batches({0: 4}, start={0: 0})
    world.send([b"0", b"1", b"\xff\xfe", b"3"], topic="out")

    def audit() -> Report:
        return audit_checkpoint(str(world.checkpoint), "topic:out", "value = value.id", world.settings)

    report = audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "at 2: topic:out does not have them, and has 1 rows that cannot be read" in gaps(report)


def test_records_with_nothing_in_that_place_are_null_on_both_sides(world: World) -> None:
    world.send([b'{"id":1}', b"{}", None])
    world.batches({0: 3}, start={0: 0})
    world.rows([1, None, None])
    assert world.audit().verdict is Verdict.PROVEN
    world.rows([1, None])
    assert finding(world.audit(), Fate.LOST).count == 1


def test_rows_of_records_that_were_taken_back_are_extra(world: World) -> None:
    world.send_orders([1])
    log = world.cluster.topics["orders"].partitions[0]
    append_transaction(log, [Sent(b"k", b'{"id":2}', ())], producer_id=7, is_commit=False)
    append_transaction(log, [Sent(b"k", b'{"id":3}', ())], producer_id=7)
    world.batches({0: log.log_end}, start={0: 0})
    world.rows([1, 3])
    report = world.audit()
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert {kind: report.partitions[0].kinds[kind] for kind in ("record", "control", "aborted")} == {
        "record": 2,
        "control": 2,
        "aborted": 1,
    }
    world.rows([1, 2, 3, 99])
    taken, other = world.audit().findings
    assert (taken.fate, taken.ranges) == (Fate.EXTRA, ((1, 1),))
    assert "the transaction was aborted" in taken.detail
    assert (other.fate, other.keys, other.count) == (Fate.EXTRA, ("99",), 1)
    world.rows([1, 2, 2, 2, 3])
    assert [(each.ranges, each.count) for each in world.audit().findings] == [(((1, 1),), 1)]


def test_a_transaction_that_is_open_leaves_the_question_open(world: World) -> None:
    world.send_orders(range(3))
    log = world.cluster.topics["orders"].partitions[0]
    append_transaction(log, [Sent(b"k", b'{"id":3}', ())], producer_id=7)
    log.last_stable = 3
    world.batches({0: 4}, start={0: 0})
    world.rows([0, 1, 2])
    report = world.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "offsets 3 to 3 of orders-0: a transaction that begins at 3 is still open" in gaps(report)
    world.rows([0, 1, 2, 3])
    extra = finding(world.audit(), Fate.EXTRA)
    assert (extra.ranges, extra.detail) == (((3, 3),), "rows of records not committed yet")


def test_compacted_records_excuse_as_many_rows_and_no_losses(world: World) -> None:
    world.send_orders(range(3))
    world.cluster.topics["orders"].partitions[0].log_end = 6
    world.send_orders(range(6, 9))
    world.batches({0: 9}, start={0: 0})
    world.rows([*range(3), *range(6, 9)])
    report = world.audit()
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert report.partitions[0].kinds["compacted"] == 3
    world.rows(list(range(9)))
    report = world.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "3 rows" in gaps(report)
    world.rows([*range(9), 77])
    assert finding(world.audit(), Fate.EXTRA).count == 1
    world.rows([*range(7), 8])
    assert finding(world.audit(), Fate.LOST).ranges == ((7, 7),)


def test_rows_from_before_a_scope_that_the_log_has_forgotten_are_not_asked_for(world: World) -> None:
    world.send_orders(range(20))
    world.batches({0: 8}, {0: 20}, first=41)
    world.cluster.topics["orders"].partitions[0].log_start = 5
    world.rows(list(range(20)))
    report = world.audit()
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert any("5 rows" in each.what and not each.is_gap for each in report.unproven)
    world.rows([*range(20), 71, 72])
    assert finding(world.audit(), Fate.EXTRA).count == 2


def test_values_that_repeat_are_compared_by_their_number(world: World) -> None:
    world.send_orders([5, 5, 5, 6])
    world.batches({0: 4}, start={0: 0})
    world.rows([5, 5, 5, 6])
    report = world.audit()
    assert report.verdict is Verdict.PROVEN
    assert any("3 records with a value that repeats" in each.what for each in report.unproven)
    world.rows([5, 6])
    assert finding(world.audit(), Fate.LOST).count == 2
    report = world.audit(is_distinct=True)
    assert report.verdict is Verdict.PROVEN
    assert report.partitions[0].fates == {"output": 2, "superseded": 2}
    world.rows([5, 5, 6])
    assert finding(world.audit(is_distinct=True), Fate.DUPLICATED).count == 1


def test_values_shared_with_what_came_before_leave_doubt(world: World) -> None:
    world.send_orders([5, 6, 5, 7])
    world.batches({0: 2}, {0: 4}, first=9)
    world.rows([5, 6, 7])
    report = world.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "1 records of the scope" in gaps(report)


def test_a_filter_of_the_job_is_named_by_where(world: World) -> None:
    world.send_orders(range(14))
    world.batches({0: 14}, start={0: 0})
    kept = [each for each in range(14) if each % 7 > 2]
    world.rows(kept)
    assert finding(world.audit(), Fate.LOST).count == 6
    report = world.audit(where="value.amount > 2")
    assert report.verdict is Verdict.PROVEN
    assert report.partitions[0].fates == {"output": 8, "filtered": 6}
    # What the job should have left out is a row without a record that had to be there.
    world.rows([*kept, 0])
    extra = finding(world.audit(where="value.amount > 2"), Fate.EXTRA)
    assert (extra.ranges, extra.count) == (((0, 0),), 1)
    assert "that --where leaves out" in extra.detail


def test_dead_letters_account_for_what_is_not_in_the_sink(world: World) -> None:
    world.send_orders(range(5))
    world.batches({0: 5}, start={0: 0})
    world.rows([0, 1, 4])
    origin = [
        (
            ("__connect.errors.topic", b"orders"),
            ("__connect.errors.partition", b"0"),
            ("__connect.errors.offset", b"2"),
        )
    ]
    world.send([b"x", b"y"], topic="dlq", headers=[*origin, ()])
    report = world.audit(dead_letters="dlq")
    assert finding(report, Fate.LOST).ranges == ((3, 3),)
    assert report.partitions[0].fates == {"output": 3, "lost": 1, "dead_letter": 1}


def test_dead_letters_behind_an_open_transaction_may_account_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_walk, "DECIDED_SECONDS_MAX", 0.05)
    world.send_orders(range(5))
    world.batches({0: 5}, start={0: 0})
    world.rows([0, 1, 2, 4])
    world.send([b"x"], topic="dlq")
    world.cluster.topics["dlq"].partitions[0].last_stable = 0
    report = world.audit(dead_letters="dlq")
    assert (report.verdict, report.findings) == (Verdict.INCONCLUSIVE, ())
    assert any("the dead letters hold 1 offsets behind a transaction" in each for each in report.reasons)


def test_files_that_cannot_be_read_are_named_and_what_was_in_them_is_lost(simple: World) -> None:
    simple.rows(FINE[:10], "part-0")
    broken = simple.rows(FINE[10:], "part-1")
    broken.write_bytes(broken.read_bytes()[:-10])
    report = simple.audit()
    assert "part-1.parquet cannot be read" in finding(report, Fate.ALTERED).detail
    assert sum(each.count for each in report.findings if each.fate is Fate.LOST) == 16


@pytest.mark.long
def test_any_flipped_byte_of_a_file_is_survived(world: World) -> None:
    world.send_orders(range(5))
    world.batches({0: 5}, start={0: 0})
    path = world.rows(list(range(5)))
    whole = path.read_bytes()
    chance = random.Random(7)
    seen: set[str] = set()
    for _ in range(60):
        place = chance.randrange(len(whole))
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << chance.randrange(8))]) + whole[place + 1 :]
        )
        # Damage that shows names the file, or the column, or shows in the rows; there are statistics and padding too.
        try:
            report = world.audit()
        except MatchError as refused:
            outcome = str(refused)
        else:
            outcome = "; ".join(report.reasons)
            assert report.verdict is not Verdict.INCONCLUSIVE
        seen.add(outcome.partition(":")[0])
    assert len(seen) > 2


def test_a_column_that_was_added_later_is_null_before(world: World) -> None:
    world.send([b'{"id":1}', b'{"id":2,"note":"x"}'])
    world.batches({0: 2}, start={0: 0})
    world.rows([1], "a")
    pq.write_table(pa.table({"id": [2], "note": ["x"]}), world.out / "b.parquet")
    assert world.audit("id = value.id AND note = value.note").verdict is Verdict.PROVEN
    assert world.audit("note = value.note").verdict is Verdict.PROVEN


def test_what_readers_pass_over_is_passed_over(simple: World) -> None:
    simple.rows(FINE)
    simple.rows([1, 2], "_temporary/part-9")
    simple.rows([1, 2], ".hidden")
    (simple.out / "_SUCCESS").write_text("")
    (simple.out / "notes.txt").write_text("")
    assert simple.audit().verdict is Verdict.PROVEN


def test_of_sparks_file_sink_only_the_files_of_its_log_count(simple: World) -> None:
    paths = [simple.rows(FINE[:10], "part-0"), simple.rows(FINE[10:], "part-1"), simple.rows([1], "part-2")]
    log = simple.out / "_spark_metadata"
    log.mkdir()

    def note(name: str, *found: Path) -> None:
        lines = [f'{{"path":"file://{path}","size":1,"isDir":false,"action":"add"}}' for path in found]
        (log / name).write_text("\n".join(["v1", *lines]))

    note("0.compact", paths[0])
    note("1", paths[1])
    report = simple.audit()
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert any("1 file" in each and "does not name" in each for each in report.notes)
    note("1", paths[1], simple.out / "part-9.parquet")
    assert "part-9.parquet is named by _spark_metadata" in finding(simple.audit(), Fate.ALTERED).detail


def test_directories_that_are_values_are_columns(world: World) -> None:
    world.send([b'{"id":1,"day":"a b"}', b'{"id":2,"day":null}'])
    world.batches({0: 2}, start={0: 0})
    world.rows([1], "day=a%20b/part-0")
    world.rows([2], "day=__HIVE_DEFAULT_PARTITION__/part-0")
    assert world.audit("id = value.id AND day = value.day").verdict is Verdict.PROVEN
    os.rename(world.out / "day=a%20b", world.out / "day=b")
    report = world.audit("id = value.id AND day = value.day")
    assert finding(report, Fate.EXTRA).keys == ("(1, b)",)
    assert finding(report, Fate.LOST).ranges == ((0, 0),)


def test_columns_in_structs_are_reached_by_their_path(world: World) -> None:
    world.send_orders([1, 2])
    world.batches({0: 2}, start={0: 0})
    rows = pa.table({"order": pa.array([{"id": "1"}, {"id": "2"}])})
    pq.write_table(rows, world.out / "a.parquet")
    assert world.audit("order.id = value.id").verdict is Verdict.PROVEN


@pytest.mark.parametrize(
    ("match", "complaint"),
    [
        ("idd = value.id", "has no column 'idd'; did you mean 'id'?"),
        ("nothing = value.id", "it has id"),
        ("id.x = value.id", "has no column 'x'"),
        ("id = ", "expected an expression"),
    ],
)
def test_columns_that_are_not_there_are_refused(simple: World, match: str, complaint: str) -> None:
    simple.rows(FINE)
    with pytest.raises(MatchError) as refused:
        simple.audit(match)
    assert complaint in str(refused.value)


def test_a_list_cannot_be_compared(simple: World) -> None:
    pq.write_table(pa.table({"id": pa.array([[1]])}), simple.out / "a.parquet")
    with pytest.raises(MatchError, match="which cannot be compared"):
        simple.audit()


def test_a_sink_that_is_not_there_is_said(simple: World) -> None:
    with pytest.raises(AuditError, match="is not there"):
        audit_checkpoint(str(simple.checkpoint), f"parquet:{simple.out}/none", "id = key", simple.settings)
    with pytest.raises(UsageError, match="write parquet:PATH"):
        audit_checkpoint(str(simple.checkpoint), "s3:x", "id = key", simple.settings)


def test_a_file_that_goes_while_it_is_read_ends_the_audit(simple: World) -> None:
    simple.rows(FINE[:5], "a")
    simple.rows(FINE[5:], "b")
    table = ParquetTable(str(simple.out), parse_match("id = value.id"))
    table.kinds()
    rows = table.rows()
    next(rows)
    (simple.out / "b.parquet").unlink()
    with pytest.raises(AuditError, match="was removed while it was read"):
        next(rows)


def test_nothing_committed_proves_nothing(simple: World) -> None:
    for path in (simple.checkpoint / "commits").iterdir():
        path.unlink()
    report = simple.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "no batch is committed" in gaps(report)


def test_a_topic_is_a_sink_too(simple: World) -> None:
    simple.send(
        [b"%d" % each for each in FINE], topic="out", keys=[b"%d" % (each + 1) for each in FINE], partition=1
    )
    found = audit_checkpoint(str(simple.checkpoint), "topic:out", "value = value.id", simple.settings)
    assert found.verdict is Verdict.PROVEN, found.reasons
    wrong = audit_checkpoint(str(simple.checkpoint), "topic:out", "int(key) = value.id", simple.settings)
    assert {each.fate for each in wrong.findings} == {Fate.LOST}
    assert {each.ranges for each in wrong.findings} == {((0, 0),)}


def test_a_sink_that_forgets_leaves_the_question_open(simple: World) -> None:
    simple.send([b"%d" % each for each in FINE], topic="out")

    def audit() -> Report:
        return audit_checkpoint(str(simple.checkpoint), "topic:out", "value = value.id", simple.settings)

    assert audit().verdict is Verdict.PROVEN
    log = simple.cluster.topics["out"].partitions[0]
    log.log_start = 3
    report = audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "3 records of orders-0 at 0-2: topic:out does not have them, and has forgotten 3" in gaps(report)
    # More is missing than can have been forgotten.
    log.log_start = 0
    log.batches.clear()
    log.log_start, log.log_end = 1, 1
    assert finding_of(audit(), 0).fate is Fate.LOST


def finding_of(report: Report, partition: int) -> Finding:
    return next(each for each in report.findings if each.place and each.place.partition == partition)


def test_a_delta_table_is_a_sink_too(simple: World) -> None:
    from deltalake import DeltaTable, write_deltalake

    path = str(simple.directory / "delta")
    write_deltalake(path, pa.table({"id": pa.array(FINE[:20], pa.int64())}))
    write_deltalake(path, pa.table({"id": pa.array(FINE[20:], pa.int64())}), mode="append")

    def audit() -> Report:
        return audit_checkpoint(str(simple.checkpoint), f"delta:{path}", "id = value.id", simple.settings)

    assert audit().verdict is Verdict.PROVEN
    DeltaTable(path).delete("id = 12 or id = 100")
    assert [each.ranges for each in audit().findings] == [((12, 12),), ((0, 0),)]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.check
def test_any_damage_is_found_at_the_place(world: World, seed: int) -> None:
    chance = random.Random(seed)
    ids = chance.sample(range(10_000), 300)
    world.send_orders(ids[:170])
    world.send_orders(ids[170:], partition=1)
    world.batches({0: 60, 1: 30}, {0: 170, 1: 130}, start={0: 0, 1: 0})
    rows = list(ids)
    chance.shuffle(rows)
    victim = chance.choice(ids)
    damage: dict[str, Callable[[], None]] = {
        "lost": lambda: rows.remove(victim),
        "duplicated": lambda: rows.append(victim),
        "extra": lambda: rows.append(10_001),
    }
    name = chance.choice(list(damage))
    damage[name]()
    world.rows(rows[:100], "a")
    world.rows(rows[100:], "b")
    (found,) = world.audit().findings
    assert found.fate == name
    if name != "extra":
        place = ids.index(victim)
        assert found.ranges == ((place % 170 if place < 170 else place - 170,) * 2,)
        assert found.place is not None
        assert found.place.partition == (0 if place < 170 else 1)


@given(
    st.lists(st.integers(0, 6), max_size=12),
    st.lists(st.integers(0, 7), max_size=12),
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
@settings(max_examples=25)
@pytest.mark.check
def test_the_verdict_is_what_the_multisets_say(
    tmp_path_factory: pytest.TempPathFactory, sent: list[int], rows: list[int], cut: tuple[int, int]
) -> None:
    from tests.support.fake_cluster import FakeCluster

    from .conftest import World

    with FakeCluster() as cluster:
        world = World(cluster, tmp_path_factory.mktemp("world"))
        world.send_orders([99, *sent, 98])
        end = min(cut[0], len(sent)) + 1
        world.batches({0: end}, start={0: 0})
        world.rows([99, *rows])
        report = world.audit()
    must, may, there = Counter([99, *sent[: end - 1]]), Counter([99, *sent, 98]), Counter([99, *rows])
    is_wrong = bool(must - there) or bool(there - may)
    assert (report.verdict is Verdict.FAILED) == is_wrong, report.reasons
    assert report.total(Fate.LOST) == (must - there).total()


def test_a_job_that_goes_on_meanwhile_is_never_accused(world: World) -> None:
    world.send_orders(range(5))
    world.batches({0: 5}, start={0: 0})
    world.rows(list(range(5)), "0")

    def note(path: Path, text: str) -> None:
        """As Spark does: there at once or not at all."""
        aside = path.with_name(f".{path.name}.tmp")
        aside.write_text(text)
        aside.rename(path)

    def work() -> None:
        log = world.checkpoint
        for number in range(1, 40):
            ids = range(number * 5, number * 5 + 5)
            world.send_orders(ids)
            note(log / "offsets" / str(number), f'v1\n{{}}\n{{"orders":{{"0":{ids.stop}}}}}')
            world.rows(list(ids), f"_temporary/{number}").rename(world.out / f"{number}.parquet")
            note(log / "commits" / str(number), "v1\n{}")
            if number > 10:
                for name in ("offsets", "commits"):
                    (log / name / str(number - 11)).unlink()

    job = threading.Thread(target=work)
    job.start()
    audits = 0
    while job.is_alive() or audits == 0:
        report = world.audit()
        assert report.verdict is Verdict.PROVEN, report.reasons
        audits += 1
    job.join()
    assert world.audit().sinks[0].rows == 200
