"""The audit of a pipeline as a whole: small pipelines whose log and sinks are written without Spark."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.audit_sinks import Ledger, ParquetBuilder, rows_of
from tests.support.audit_topics import (
    FakeTopics,
    Sent,
    TopicBuilder,
    append_transaction,
    dead_letter,
    dead_letters,
    sink_record,
)
from tests.support.fake_cluster import FETCH, FakeCluster, FakePartition

from holdfast.audit import record_walk
from holdfast.audit.model import AuditError, Fate, Report, Verdict
from holdfast.audit.pipeline_audit import AuditOptions, audit_pipeline
from holdfast.errors import UsageError
from holdfast.pipeline.aside import schema as aside_schema
from holdfast.pipeline.definition.fingerprint import canonical, fingerprint
from holdfast.pipeline.definition.model import (
    Decoding,
    Dedupe,
    Field,
    Filter,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    Source,
    Sql,
)
from holdfast.pipeline.definition.naming import home_of
from holdfast.pipeline.digest import digest_of_offsets
from holdfast.pipeline.engine.aside import AsideFiles
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.ledger import Entry, Intake, Routes
from holdfast.pipeline.positions import Place
from holdfast.wire.batch import Record, build_batch

TIME_MS = 1_700_000_000_000
FILTER = Filter("no-trials", "not trial")
RULE = "positive"
Row = tuple[int, int]
"""Offset and number."""


@dataclass
class Shop:
    """A topic of one partition, a pipeline that reads it, and what it has written."""

    cluster: FakeCluster
    directory: str
    definition: PipelineDefinition
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    builders: dict[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> FakePartition:
        return self.cluster.topics["orders"].partitions[0]

    @property
    def place(self) -> Place:
        return Place("orders", self.cluster.topics["orders"].topic_id, 0)

    def send(self, count: int, broken: Collection[int] = ()) -> None:
        start = self.log.log_end
        values = [value_of(start + at, is_broken=start + at in broken) for at in range(count)]
        records = [
            Record(at, 100 * at, f"key-{start + at}".encode(), value, ()) for at, value in enumerate(values)
        ]
        self.log.append(build_batch(records, base_timestamp=TIME_MS + start * 100))

    def open(
        self, at: int = 0, sinks: Sequence[str] = ("dead-letter", "parquet"), generation: int = 0
    ) -> None:
        """The opening entries of these sinks."""
        for name in sinks:
            self.ledgers[name] = Ledger("shop", name, fingerprint(self.definition))
            self.builders[name] = self._builder(name)
            opening = self.ledgers[name].opening({self.place: at})
            self._commit(name, replace(opening, generation=generation), [])

    def _builder(self, name: str) -> Any:
        topics = FakeTopics(self.cluster)
        if name == "dead-letter":
            return dead_letters(topics, "shop-dlt", "shop")
        sink = next(each for each in self.definition.sinks if each.name == name)
        if isinstance(sink, KafkaSink):
            return TopicBuilder(topics, sink.topic, "shop", name)
        assert isinstance(sink, ParquetSink)
        return ParquetBuilder(os.path.join(self.directory, sink.path))

    def _commit(self, name: str, entry: Entry, rows: Iterable[Row]) -> None:
        listed = list(rows)
        builder = self.builders[name]
        lineage = [("orders", 0, offset, number) for offset, number in listed]
        if name == "dead-letter":
            letters = [
                dead_letter("shop", ("orders", 0, at), f"key-{at}".encode(), value_of(at), reason=RULE)
                for at, _ in listed
            ]
            builder.commit(entry, letters)
        elif isinstance(builder, TopicBuilder):
            keyed = ((each, f"key-{each[2]}".encode()) for each in lineage)
            builder.commit(entry, [sink_record(each, key, value_of(each[2]), 0) for each, key in keyed])
        else:
            builder.commit(entry, rows_of(lineage, {"id": pa.array([at for at, _ in listed], pa.int64())}))

    def batch(
        self,
        start: int,
        end: int,
        *,
        main: Iterable[int | Row] | None = None,
        dead: Iterable[int] = (),
        left: Iterable[tuple[int, str, str]] = (),
        records: Iterable[int] | None = None,
        told: Mapping[str, int] | None = None,
        sinks: Sequence[str] = ("dead-letter", "parquet"),
        kept: Mapping[str, Iterable[int | Row]] | None = None,
        is_recorded: bool = True,
    ) -> None:
        """What a run writes for a range. `left` are offset, route and step; `told` what ledgers say instead of what is
        true; `kept` what a sink really has instead of the rows of `main`."""
        read = list(range(start, end)) if records is None else list(records)
        dead, left = list(dead), list(left)
        gone = {*dead, *(offset for offset, _, _ in left)}
        rows = [_row(each) for each in (set(read) - gone if main is None else main)]
        filtered = [each for each in left if each[1] == "filtered"]
        routes = Routes(
            main=(told or {}).get("main", len(rows)),
            dead_letter={RULE: (told or {}).get("dead", len(dead))} if dead or "dead" in (told or {}) else {},
            filtered={FILTER.name: len(filtered)} if filtered else {},
            duplicate=sum(each[1] == "duplicate" for each in left),
            late=sum(each[1] == "late" for each in left),
        )
        digest = digest_of_offsets("orders", 0, np.array(sorted(read), np.int64))
        for name in sinks:
            own: Iterable[int | Row] = [(at, 0) for at in dead] if name == "dead-letter" else rows
            wrote = routes.main if name != "dead-letter" else sum(routes.dead_letter.values())
            takes = next((sink.rows for sink in self.definition.sinks if sink.name == name), "")
            if takes:
                own = [(at, 0) for at, route, _ in left if route == "duplicate"]
                wrote = routes.duplicate
            if kept is not None and name in kept:
                own = kept[name]
            entry = self.ledgers[name].entry(
                {self.place: (start, end)},
                rows=wrote,
                intake=Intake(records=len(read), digest=digest),
                routes=routes,
            )
            self._commit(name, entry, sorted(_row(each) for each in own))
        if left and is_recorded:
            names = ("topic", "partition", "offset", "index", "route", "step")
            listed = [
                dict(zip(names, ("orders", 0, at, 0, route, step), strict=True)) for at, route, step in left
            ]
            files = AsideFiles(os.path.join(self.directory, ".holdfast", "shop"))
            table = pa.Table.from_pylist(listed, pa.schema([(name, _plain(name)) for name in names]))
            files.write(entry.range, entry.fingerprint, table.cast(aside_schema()), [])

    def audit(self, **options: Any) -> Report:
        report = audit_pipeline(self.definition, options=AuditOptions(**options))
        assert Report.from_json(report.as_json()) == report
        return report


def value_of(offset: int, *, is_broken: bool = False) -> bytes:
    return b'{"id":%d' % offset + (b"" if is_broken else b"}")


def _row(each: int | Row) -> Row:
    return (each, 0) if isinstance(each, int) else each


def _plain(name: str) -> pa.DataType:
    return {"partition": pa.int32(), "offset": pa.int64(), "index": pa.int32()}.get(name, pa.string())


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as found:
        found.add_topic("orders")
        yield found


def shop_of(cluster: FakeCluster, directory: Path, **more: Any) -> Shop:
    settings = {"default.api.timeout.ms": "3000", "retry.backoff.ms": "1"}
    source = Source(
        topics=("orders",),
        bootstrap=cluster.bootstrap_servers,
        settings=settings,
        value=Decoding("json", (Field("id", "long"),)),
    )
    definition = PipelineDefinition(
        "shop", source, sinks=(ParquetSink("out"),), directory=str(directory), **more
    )
    return Shop(cluster, str(directory), definition)


@pytest.fixture
def shop(cluster: FakeCluster, tmp_path: Path) -> Shop:
    return shop_of(cluster, tmp_path, steps=(FILTER,))


def fates(report: Report) -> dict[str, int]:
    (account,) = report.partitions
    return dict(account.fates)


def found(report: Report) -> set[tuple[Fate, str, tuple[tuple[int, int], ...]]]:
    return {(each.fate, each.sink, each.ranges) for each in report.findings}


# ---------------------------------------------------------------------------- proven


def test_every_record_is_accounted_for_and_the_verdict_is_proven(shop: Shop) -> None:
    shop.send(10)
    append_transaction(shop.log, [Sent(b"x", b"", ())] * 2, producer_id=7, is_commit=False)
    shop.send(5)
    records = [*range(10), *range(13, 18)]
    shop.open()
    shop.batch(0, 6, dead=[2], left=[(4, "filtered", FILTER.name)])
    shop.batch(6, 18, records=records[6:])
    shop.send(3)
    report = shop.audit(accepted=("dead-letter.failure",))
    assert report.verdict is Verdict.ACCEPTED
    assert shop.audit().verdict is Verdict.INCONCLUSIVE
    (account,) = report.partitions
    assert dict(account.kinds) == {"record": 15, "control": 1, "aborted": 2}
    assert dict(account.fates) == {"output": 13, "dead_letter": 1, "filtered": 1, "pending": 3}
    assert (account.start, account.end, account.log_end) == (0, 18, 21)
    assert (report.scope.offsets, report.scope.pending, report.scope.expired) == (18, 3, 0)
    assert {sink.name: (sink.rows, sink.entries) for sink in report.sinks} == {
        "dead-letter": (1, 3),
        "parquet": (13, 3),
    }
    assert dict(report.lag) == {"dead-letter": 3, "parquet": 3}
    assert sum(map(sum, report.timeline.counts.values())) == 15
    assert ("steps.no-trials", 1) in [(each.name, each.unaltered) for each in report.coverage]


def test_what_a_sink_lacks_has_twice_or_nobody_produced_is_named_with_its_keys(shop: Shop) -> None:
    shop.send(10)
    append_transaction(shop.log, [Sent(b"x", b"", ())], producer_id=7, is_commit=False)
    shop.open()
    shop.batch(0, 12, records=range(10), kept={"parquet": [0, 1, 4, 5, 6, 6, 7, 8, 9, 10, 90]})
    report = shop.audit()
    assert report.verdict is Verdict.FAILED
    assert {
        (Fate.LOST, "parquet", ((2, 3),)),
        (Fate.DUPLICATED, "parquet", ((6, 6),)),
        (Fate.EXTRA, "parquet", ((10, 10),)),
        (Fate.EXTRA, "parquet", ((90, 90),)),
    } <= found(report)
    by_fate = {each.fate: each for each in report.findings if each.ranges != ((90, 90),)}
    assert by_fate[Fate.LOST].keys == ("key-2", "key-3")
    assert by_fate[Fate.DUPLICATED].keys == ("key-6",)
    assert "row" in by_fate[Fate.DUPLICATED].detail
    assert (fates(report)["lost"], fates(report)["duplicated"]) == (2, 1)


def test_a_row_of_a_dead_letter_in_the_sink_too_is_there_twice(shop: Shop) -> None:
    shop.send(5)
    shop.open()
    shop.batch(0, 5, dead=[3], kept={"parquet": [0, 1, 2, 3, 4]})
    report = shop.audit()
    assert (Fate.DUPLICATED, "parquet", ((3, 3),)) in found(report)


def test_a_dead_letter_that_is_gone_is_blamed_on_the_dead_letters(shop: Shop) -> None:
    shop.send(6)
    shop.open()
    shop.batch(0, 6, dead=[3, 4], kept={"dead-letter": [4]})
    report = shop.audit()
    assert found(report) == {(Fate.LOST, "dead-letter", ((3, 3),))}
    assert report.findings[0].keys == ("key-3",)
    assert fates(report) == {"output": 4, "dead_letter": 1, "lost": 1}


def test_records_that_left_as_undecodable_are_decoded_again(shop: Shop) -> None:
    """2 cannot be decoded and is a dead letter for that; 5 cannot and is in the sink; 7 can and was sent away."""
    shop.send(9, broken=[2, 5])
    shop.open()
    shop.batch(0, 9, dead=[2, 7], kept={"dead-letter": []})
    letters = [
        dead_letter("shop", ("orders", 0, at), f"key-{at}".encode(), value, reason="parse")
        for at, value in ((2, value_of(2, is_broken=True)), (7, value_of(7)))
    ]
    shop.builders["dead-letter"].topics.transaction("by-hand", {"shop-dlt": letters})
    report = shop.audit()
    wrong = {(each.sink, each.ranges): each.detail for each in report.findings if each.fate is Fate.ALTERED}
    assert "they can be" in wrong["dead-letter", ((7, 7),)]
    assert "cannot be decoded" in wrong["", ((5, 5),)]
    assert ("dead-letter", ((2, 2),)) not in wrong


# ---------------------------------------------------------------------------- scope


def test_a_sink_that_lags_ends_the_scope_and_nothing_is_lost(shop: Shop) -> None:
    shop.send(10)
    shop.open()
    shop.batch(0, 4)
    shop.batch(4, 10, sinks=("dead-letter",))
    report = shop.audit()
    assert report.verdict is Verdict.PROVEN
    assert fates(report) == {"output": 4, "pending": 6}
    assert report.lag["parquet"] == 6


def test_what_has_expired_makes_it_inconclusive_unless_the_caller_begins_behind_it(shop: Shop) -> None:
    shop.send(5)
    shop.send(5)
    shop.open()
    shop.batch(0, 10)
    shop.log.log_start = 5
    report = shop.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert (report.scope.expired, report.verdict.exit_code) == (5, 4)
    assert "expired" in report.reasons[0]
    later = shop.audit(start="earliest")
    assert later.verdict is Verdict.PROVEN
    assert later.partitions[0].start == 5


def test_a_log_that_was_cut_below_what_the_sinks_have_is_a_gap(shop: Shop) -> None:
    shop.send(5)
    shop.send(5)
    shop.open()
    shop.batch(0, 10)
    del shop.log.batches[1]
    shop.log.log_end = 5
    report = shop.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "the source has lost records" in report.reasons[0]
    assert fates(report) == {"output": 5}


def test_a_failure_wins_over_a_gap(shop: Shop) -> None:
    shop.send(5)
    shop.send(5)
    shop.open()
    shop.batch(0, 10, kept={"parquet": [0, 1, 2, 3, 4, 5, 6, 8, 9]})
    shop.log.log_start = 5
    report = shop.audit()
    assert report.verdict is Verdict.FAILED
    assert any(each.is_gap for each in report.unproven)


def test_a_place_to_begin_that_is_none_is_refused(shop: Shop) -> None:
    shop.send(1)
    shop.open()
    with pytest.raises(UsageError, match="--from yesterday"):
        shop.audit(start="yesterday")


def test_a_topic_that_was_recreated_is_a_gap_and_not_a_comparison_with_other_records(shop: Shop) -> None:
    shop.send(4)
    shop.open()
    shop.batch(0, 4)
    shop.cluster.add_topic("orders")
    shop.send(4)
    report = shop.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "deleted and created again" in report.reasons[0]


def test_without_the_source_there_is_no_audit(shop: Shop) -> None:
    shop.send(4)
    shop.open()
    shop.batch(0, 4)
    del shop.cluster.topics["orders"]
    with pytest.raises(AuditError, match="the source is gone"):
        shop.audit()


def test_a_pipeline_that_never_ran_cannot_be_audited(shop: Shop) -> None:
    with pytest.raises(AuditError, match="has never run"):
        shop.audit()


def test_a_pipeline_that_has_taken_nothing_proves_nothing(shop: Shop) -> None:
    shop.send(4)
    shop.open()
    report = shop.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert fates(report) == {"pending": 4}


def test_a_beginning_behind_everything_proves_nothing(shop: Shop) -> None:
    shop.send(4)
    shop.open()
    shop.batch(0, 4)
    report = shop.audit(start="2100-01-01")  # the fake cluster has no record that young
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "no offset lies between" in report.reasons[0]


def test_an_empty_source_is_proven(shop: Shop) -> None:
    shop.open()
    assert shop.audit().verdict is Verdict.PROVEN


def test_a_sink_that_was_emptied_has_lost_its_rows(shop: Shop) -> None:
    shop.send(4)
    shop.open()
    shop.batch(0, 4)
    shutil.rmtree(os.path.join(shop.directory, "out"))
    report = shop.audit()
    assert report.verdict is Verdict.FAILED
    (finding,) = report.findings
    assert (finding.fate, finding.sink, finding.count) == (Fate.LOST, "parquet", 4)


def test_a_sink_that_is_new_in_the_definition_is_a_gap(shop: Shop) -> None:
    shop.send(4)
    shop.open()
    shop.batch(0, 4)
    sinks = (*shop.definition.sinks, ParquetSink("more", name="more"))
    shop.definition = replace(shop.definition, sinks=sinks)
    report = shop.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert any("'more'" in each for each in report.reasons)


def test_a_sink_that_was_added_later_owes_only_what_came_since(shop: Shop) -> None:
    sinks = (*shop.definition.sinks, ParquetSink("more", name="more"))
    shop.definition = replace(shop.definition, sinks=sinks)
    shop.send(8)
    shop.open()
    shop.batch(0, 4)
    shop.open(4, ["more"])
    shop.batch(4, 8, sinks=("dead-letter", "parquet", "more"))
    report = shop.audit()
    assert report.verdict is Verdict.PROVEN
    assert any("'more' begins at 4" in note for note in report.notes)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_what_a_sink_had_before_it_began_anew_is_a_gap(shop: Shop, is_recorded: bool) -> None:
    """Nobody is accused of it; not where the record of what left is gone too, either."""
    sinks = (ParquetSink("more", name="more"), *shop.definition.sinks)
    shop.definition = replace(shop.definition, sinks=sinks)
    shop.send(8)
    shop.open()
    shop.batch(0, 4, left=[(1, "filtered", FILTER.name)], is_recorded=is_recorded)
    shop.open(4, ["more"], generation=1)
    shop.batch(4, 8, sinks=("dead-letter", "parquet", "more"))
    report = shop.audit()
    assert report.verdict is Verdict.INCONCLUSIVE, report.reasons
    assert any("what sink 'more' had before" in reason for reason in report.reasons)


def test_a_sink_that_had_come_further_is_an_older_copy_and_has_lost_the_rest(shop: Shop) -> None:
    shop.send(10)
    shop.open()
    shop.batch(0, 4)
    shop.batch(4, 10, dead=[9], sinks=("dead-letter",))
    note = Path(shop.directory, ".holdfast", "shop", "sinks.json")
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text('{"version": 1, "sinks": {"parquet": {"generation": 0, "number": 1}}}')
    assert shop.audit().verdict is Verdict.PROVEN  # it lags
    note.write_text('{"version": 1, "sinks": {"parquet": {"generation": 0, "number": 2}}}')
    report = shop.audit()
    assert report.verdict is Verdict.FAILED
    (finding,) = report.findings
    assert (finding.fate, finding.sink, finding.count) == (Fate.LOST, "parquet", 5)
    assert "its ledger has 2 entries, and had 3: it is an older copy" in finding.detail
    note.write_text("{")
    with pytest.raises(AuditError, match=r"sinks\.json .* cannot be read"):
        shop.audit()


def test_only_what_is_new_is_read_after_an_earlier_proof(shop: Shop) -> None:
    shop.send(8)
    shop.open()
    shop.batch(0, 4, kept={"parquet": [0, 1, 1]})
    shop.batch(4, 8)
    report = shop.audit(since={shop.place: 4})
    assert (report.partitions[0].start, report.partitions[0].end) == (4, 8)
    assert fates(report) == {"output": 4}
    assert not {each for each in report.findings if each.fate in (Fate.LOST, Fate.DUPLICATED)}


def test_partitions_that_no_ledger_knows_are_pending(shop: Shop, cluster: FakeCluster) -> None:
    shop.send(4)
    shop.open()
    shop.batch(0, 4)
    cluster.topics["orders"].partitions.append(FakePartition())
    cluster.topics["orders"].partitions[1].append(build_batch([Record(0, 0, b"k", b"{}", ())]))
    report = shop.audit()
    assert report.verdict is Verdict.PROVEN
    assert report.scope.pending == 1
    assert any("orders-1 is new" in note for note in report.notes)


# ---------------------------------------------------------------------------- while it moves


def test_source_and_sinks_that_grow_while_they_are_read_change_nothing(shop: Shop) -> None:
    shop.send(6)
    shop.open()
    shop.batch(0, 6)
    grown: list[int] = []

    def grow(fields: object) -> None:
        if not grown:
            grown.append(shop.log.log_end)
            shop.send(4)
            shop.batch(6, 10, sinks=("parquet",))

    shop.cluster.script(FETCH, *[grow] * 50)
    report = shop.audit()
    assert grown
    assert report.verdict is Verdict.PROVEN
    assert fates(report)["output"] == 6


# ---------------------------------------------------------------------------- what left the steps


def test_records_that_left_without_a_record_of_it_are_a_gap_where_the_number_fits(shop: Shop) -> None:
    shop.send(6)
    shop.open()
    shop.batch(0, 6, left=[(1, "filtered", FILTER.name), (4, "filtered", FILTER.name)], is_recorded=False)
    report = shop.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert fates(report) == {"output": 4, "filtered": 2}
    assert "has no record of them" in report.reasons[0]


def test_a_record_of_what_left_that_cannot_be_reached_is_a_gap_and_a_damaged_one_a_finding(
    shop: Shop,
) -> None:
    shop.send(6)
    shop.open()
    shop.batch(0, 6, left=[(1, "filtered", FILTER.name)])
    assert shop.audit().verdict is Verdict.UNALTERED
    aside = os.path.join(shop.directory, ".holdfast", "shop", "aside")
    (name,) = os.listdir(aside)
    with open(os.path.join(aside, name), "r+b") as file:
        file.truncate(40)
    assert shop.audit().verdict is Verdict.FAILED
    shutil.rmtree(aside)
    Path(aside).write_text("no directory")
    report = shop.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "Not a directory" in report.reasons[0]


def test_records_that_are_nowhere_are_lost_where_more_are_missing_than_left(shop: Shop) -> None:
    shop.send(6)
    shop.open()
    left = [(1, "filtered", FILTER.name)]
    shop.batch(0, 6, left=left, is_recorded=False, kept={"parquet": [0, 2, 3, 5]})
    report = shop.audit()
    assert report.verdict is Verdict.FAILED
    assert (Fate.LOST, "parquet", ((1, 1), (4, 4))) in found(report)


def test_a_sink_that_took_a_batch_by_itself_is_held_to_what_left_of_its_own(shop: Shop) -> None:
    """A sink lags, the filter is changed, and it catches up: what it lacks, the new filter let go."""
    sinks = (*shop.definition.sinks, ParquetSink("more", name="more"))
    shop.definition = replace(shop.definition, sinks=sinks)
    shop.send(6)
    shop.open(sinks=("dead-letter", "parquet", "more"))
    shop.batch(0, 6)
    shop.definition = replace(shop.definition, steps=(Filter(FILTER.name, "not trial and id <> 4"),))
    shop.ledgers["more"].fingerprint = fingerprint(shop.definition)
    shop.batch(0, 6, sinks=("more",), left=[(4, "filtered", FILTER.name)])
    report = shop.audit()
    assert not report.findings
    assert [each.name for each in report.trusted] == ["parquet.id"], "another definition made it"


def test_rows_of_an_earlier_definition_are_compared_where_it_says_the_same_of_their_sink(shop: Shop) -> None:
    first = shop.definition
    shop.send(9)
    shop.open()
    shop.batch(0, 3)
    with Home(home_of(first), "shop") as home:
        home.note_definition(canonical(first))
        more = replace(first, sinks=(*first.sinks, ParquetSink("more", name="more")))
        home.note_definition(canonical(more))
        assert home.kept_definition() == canonical(more)
        shop.definition = more
        for name in ("dead-letter", "parquet"):
            shop.ledgers[name].fingerprint = fingerprint(more)
        shop.open(3, sinks=("more",))
        names = ("dead-letter", "parquet", "more")
        shop.batch(3, 6, sinks=names)
        assert shop.audit().verdict is Verdict.PROVEN
        last = replace(more, steps=(Sql("other", "SELECT * FROM input"),))
        home.note_definition(canonical(last))
    shop.definition = last
    for name in names:
        shop.ledgers[name].fingerprint = fingerprint(last)
    shop.batch(6, 9, sinks=names)
    covered = {each.name: (each.recomputed, each.trusted) for each in shop.audit().coverage}
    assert (covered["parquet.id"], covered["more.id"]) == ((3, 6), (3, 3))


def test_a_file_without_a_column_is_altered_and_no_crash(shop: Shop) -> None:
    shop.send(6)
    shop.open()
    shop.batch(0, 3)
    shop.batch(3, 6)
    path = next(Path(shop.directory).glob(f"out/batch={1:020d}/*.parquet"), None)
    assert path is not None
    pq.write_table(pq.read_table(path).drop_columns(["id"]), path)
    report = shop.audit()
    assert (Fate.ALTERED, "parquet", ((0, 2),)) in found(report)


def test_a_sink_of_duplicates_has_those_that_were_set_aside_and_no_others(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    shop = shop_of(cluster, tmp_path, steps=(Dedupe("once", ("id",)),))
    sinks = (*shop.definition.sinks, ParquetSink("again", name="again", rows="once.duplicates"))
    source = replace(shop.definition.source, event_time=None)
    shop.definition = replace(shop.definition, sinks=sinks, source=source)
    shop.send(6)
    names = ("dead-letter", "parquet", "again")
    shop.open(sinks=names)
    left = [(1, "duplicate", "once"), (4, "duplicate", "once")]
    shop.batch(0, 6, left=left, sinks=names, kept={"again": [1, 5]})
    report = shop.audit()
    assert {(Fate.LOST, "again", ((4, 4),)), (Fate.EXTRA, "again", ((5, 5),))} <= found(report)


# ---------------------------------------------------------------------------- records of several rows


@pytest.mark.parametrize(
    ("kept", "fate"),
    [
        (None, None),
        ([(0, 0), (0, 1), (0, 2), (1, 0), (2, 1)], Fate.LOST),
        ([(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)], Fate.LOST),
        ([(0, 0), (0, 1), (0, 2), (0, 2), (1, 0), (2, 0), (2, 1)], Fate.DUPLICATED),
    ],
    ids=["whole", "the first of a record is gone", "the last of a record is gone", "one is there twice"],
)
def test_rows_of_expanded_records_are_counted_by_number(
    cluster: FakeCluster, tmp_path: Path, kept: list[Row] | None, fate: Fate | None
) -> None:
    expand = Sql("lines", "SELECT _hf, explode(lines) FROM input", expand=True)
    shop = shop_of(cluster, tmp_path, steps=(expand,))
    shop.send(3)
    shop.open()
    rows = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    shop.batch(0, 3, main=rows, kept=None if kept is None else {"parquet": kept})
    report = shop.audit()
    if fate is None:
        assert shop.audit(accepted=("parquet.id",)).verdict is Verdict.ACCEPTED
    else:
        assert fate in {each.fate for each in report.findings}


# ---------------------------------------------------------------------------- logs and topics that forget


def test_records_compacted_away_since_they_were_read_are_there_and_their_values_trusted(shop: Shop) -> None:
    shop.send(3)
    shop.send(3)
    shop.open()
    shop.batch(0, 6)
    del shop.log.batches[0]
    report = shop.audit()
    assert not report.findings
    [trusted] = report.trusted
    assert (trusted.name, trusted.recomputed, trusted.trusted) == ("parquet.id", 3, 3)
    assert dict(report.partitions[0].kinds) == {"compacted": 3, "record": 3}


def copying_shop(cluster: FakeCluster, tmp_path: Path) -> Shop:
    """Six records in two batches, copied to a topic."""
    shop = shop_of(cluster, tmp_path)
    shop.definition = replace(shop.definition, sinks=(KafkaSink("copies"),))
    names = ("dead-letter", "kafka")
    shop.send(6)
    shop.open(sinks=names)
    shop.batch(0, 3, sinks=names)
    shop.batch(3, 6, sinks=names)
    return shop


def test_a_topic_that_has_dropped_its_head_makes_missing_rows_a_gap(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    shop = copying_shop(cluster, tmp_path)
    copies = cluster.topics["copies"].partitions[0]
    assert shop.audit().verdict is Verdict.PROVEN
    copies.log_start = 4  # three rows and the marker behind them
    report = shop.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert any("'kafka'" in each for each in report.reasons)
    assert "lost" not in fates(report)


def test_rows_behind_a_transaction_that_stays_open_are_a_gap_and_no_loss(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_walk, "DECIDED_SECONDS_MAX", 0.05)
    shop = copying_shop(cluster, tmp_path)
    copies = cluster.topics["copies"].partitions[0]
    copies.last_stable = 4  # somebody's transaction is open in front of the second batch
    report = shop.audit()
    assert report.verdict is Verdict.INCONCLUSIVE
    assert any("behind a transaction that is still open" in each for each in report.reasons), report.reasons
    assert "lost" not in fates(report)
    copies.last_stable = None
    assert shop.audit().verdict is Verdict.PROVEN
