"""Each row goes to exactly one route, and is counted there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import holdfast.pipeline.engine.operators as operators
from holdfast.pipeline.core import frames
from holdfast.pipeline.core.failures import RuleBroken, StepError, Unbalanced
from holdfast.pipeline.definition.model import (
    Decoding,
    Dedupe,
    EventTime,
    Expect,
    Field,
    Filter,
    Python,
    Sql,
    Step,
    Window,
)
from holdfast.pipeline.engine.routing import Router
from holdfast.pipeline.ledger import Routes
from holdfast.pipeline.sinks.base import Batch

from .conftest import MemoryPrepared, MemorySink

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from .conftest import Bench


@pytest.fixture
def routed(bench: Bench) -> Bench:
    bench.sinks.pop("second")
    return bench


def run_steps(bench: Bench, *steps: Step) -> Routes:
    bench.change(steps=steps)
    [done] = bench.run_batches()
    assert (
        done.routes == bench.sinks["main"].ledger[-1].routes == bench.sinks["dead-letter"].ledger[-1].routes
    )
    return done.routes


def test_rules_after_a_query_still_know_the_whole_record(routed: Bench) -> None:
    routed.produce_orders(10)
    routes = run_steps(
        routed,
        Sql("renamed", "SELECT _hf, id AS number FROM input"),
        Expect("low", "number < 8"),
        Sql("back", "SELECT number AS id, _hf FROM input WHERE number <> 3"),
        Filter("even", "id % 2 = 0"),
    )
    assert routes == Routes(main=4, dead_letter={"low": 2}, filtered={"back": 1, "even": 3})
    assert routed.sinks["main"].ids == [0, 2, 4, 6]
    letters = sorted(routed.sinks["dead-letter"].content, key=lambda row: row["_hf"]["offset"])
    assert {row["_raw"] for row in letters} == {b'{"id": 8, "amount": 1.0}', b'{"id": 9, "amount": 1.0}'}
    assert {row["_key"] for row in letters} == {b"8", b"9"}
    assert {row["_reason"] for row in letters} == {"low"}
    assert {row["_error"] for row in letters} == {"it breaks the rule 'low': number < 8"}
    assert all(row["_key"] == str(row["id"]).encode() for row in routed.sinks["main"].content)


def test_a_rule_that_is_null_is_broken_and_tombstones_are_records(routed: Bench) -> None:
    from .conftest import order

    routed.produce([order(1), order(2, amount=None), None])
    routes = run_steps(routed, Expect("amount", "_tombstone OR amount > 0"))
    assert routes == Routes(main=2, dead_letter={"amount": 1})
    assert sorted(row["_tombstone"] for row in routed.sinks["main"].content) == [False, True]


def test_a_name_may_hold_anything_and_a_view_of_the_callers_stays(routed: Bench) -> None:
    odd = "a`b.c'd"
    value = Decoding("json", (Field("id", "long"), Field(odd, "string")))
    routed.change(source=replace(routed.definition.source, value=value, event_time=EventTime("_timestamp")))
    routed.produce([json.dumps({"id": number, odd: f"v{number % 2}"}).encode() for number in (1, 2, 3)])
    routed.spark.range(7).createOrReplaceTempView("input")
    try:
        routes = run_steps(
            routed,
            Sql("twice", "SELECT * FROM input LATERAL VIEW explode(array(1, 2)) AS n", expand=True),
            Dedupe("once", key=(odd,)),
            Window("totals", size="1h", key=(odd,), aggregates={f"n {odd}": "count(*)"}),
        )
        assert routes == Routes(main=2, duplicate=4)
        assert {row[odd] for row in routed.sinks["main"].content} == {"v0", "v1"}
        assert routed.spark.table("input").count() == 7
    finally:
        routed.spark.catalog.dropTempView("input")


def test_warnings_count_the_rows_that_got_as_far(routed: Bench) -> None:
    routed.produce_orders(10)
    routed.change(
        steps=(
            Filter("high", "id >= 4"),
            Expect("not-5", "id <> 5", otherwise="warn"),
            Expect("under-9", "id < 9", otherwise="drop"),
            Expect("under-3", "id < 3", otherwise="warn"),
        )
    )
    [done] = routed.run_batches()
    assert done.warned == {"not-5": 1, "under-3": 5}
    assert done.routes == Routes(main=5, filtered={"high": 4, "under-9": 1})
    assert routed.log[-2]["warned"] == done.warned


def test_a_rule_that_fails_stops_before_anything_is_committed(routed: Bench) -> None:
    routed.produce_orders(10)
    routed.change(steps=(Expect("few", "id < 7", otherwise="fail"),))
    with pytest.raises(
        RuleBroken, match=r"rule 'few' \(id < 7\) does not hold for 3 rows.*orders-\d offset \d"
    ):
        routed.run()
    assert routed.sinks["main"].content == []
    assert len(routed.sinks["main"].ledger) == 1  # the opening
    assert routed.log[-1]["event"] == "failed"
    routed.change(steps=(Expect("few", "id < 7"),))
    assert routed.run_batches()[0].routes == Routes(main=7, dead_letter={"few": 3})


class TestObserved:
    """Rules and projections are counted while the first sink takes its rows."""

    STEPS = (Filter("high", "id >= 4"), Sql("same", "SELECT _hf, id FROM input"), Expect("not-5", "id <> 5"))

    def test_no_job_of_its_own_counts_them(self, routed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: object) -> None:
            raise AssertionError("counted apart")

        monkeypatch.setattr(operators, "collect", refuse)
        routed.produce_orders(10)
        assert run_steps(routed, *self.STEPS) == Routes(
            main=5, dead_letter={"not-5": 1}, filtered={"high": 4}
        )

    def test_a_sink_that_looks_at_some_rows_first_does_not_spoil_the_count(
        self, routed: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepare = MemorySink.prepare

        def looks_first(sink: MemorySink, batch: Batch, rows: DataFrame) -> Any:
            rows.limit(1).collect()
            return prepare(sink, batch, rows)

        monkeypatch.setattr(MemorySink, "prepare", looks_first)
        routed.produce_orders(10)
        assert run_steps(routed, *self.STEPS) == Routes(
            main=5, dead_letter={"not-5": 1}, filtered={"high": 4}
        )

    def test_a_sink_that_spark_does_not_observe_costs_a_job(
        self, routed: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(frames, "OBSERVED_WITHIN_S", 0.0)
        monkeypatch.setattr(
            MemorySink, "prepare", lambda sink, _, rows: MemoryPrepared(sink, [], rows.rdd.count(), None)
        )
        routed.produce_orders(10)
        assert run_steps(routed, *self.STEPS) == Routes(
            main=5, dead_letter={"not-5": 1}, filtered={"high": 4}
        )


class TestExpanding:
    def test_rows_of_one_record_are_numbered_by_content(self, routed: Bench) -> None:
        routed.produce_orders(3)
        routes = run_steps(
            routed,
            Sql(
                "split",
                "SELECT _hf, id, explode(sequence(0L, id)) AS part FROM input WHERE id > 0",
                expand=True,
            ),
            Filter("not-last", "part < 2"),
        )
        assert routes == Routes(main=4, filtered={"split": 1, "not-last": 1})
        found = sorted((row["id"], row["part"], row["_hf"]["index"]) for row in routed.sinks["main"].content)
        assert found == [(1, 0, 0), (1, 1, 1), (2, 0, 0), (2, 1, 1)]

    def test_a_query_that_multiplies_rows_without_saying_so_is_stopped(self, routed: Bench) -> None:
        routed.produce_orders(3)
        routed.change(steps=(Sql("split", "SELECT _hf, id, explode(array(1, 2)) AS part FROM input"),))
        with pytest.raises(
            StepError, match=r"step 'split': it made 2 rows of one \(offset \d of orders-\d\).*expand"
        ):
            routed.run()
        assert routed.sinks["main"].content == []


class TestPython:
    def test_arrow_functions_may_leave_rows_out_by_lineage(self, routed: Bench) -> None:
        def odd(batch: pa.RecordBatch) -> pa.RecordBatch:
            import pyarrow.compute as pc

            return batch.filter(pc.equal(pc.bit_wise_and(batch["id"], 1), 1))

        routed.produce_orders(10)
        assert run_steps(routed, Python("odd", function=odd)) == Routes(main=5, filtered={"odd": 5})
        assert routed.sinks["main"].ids == [1, 3, 5, 7, 9]
        assert all(row["_key"] == str(row["id"]).encode() for row in routed.sinks["main"].content)

    def test_pandas_functions_may_be_one_to_one_without_lineage(self, routed: Bench, tmp_path: Path) -> None:
        (tmp_path / "steps.py").write_text(
            "import pandas as pd\n\n"
            "def label(rows):\n"
            "    return pd.DataFrame({'id': rows['id'], 'label': 'n' + rows['id'].astype(str)})\n"
        )
        routed.produce_orders(4)
        step = Python(
            "label", file="steps.py", function="label", schema="id long, label string", mode="pandas"
        )
        assert run_steps(routed, step, Expect("short", "label <> 'n3'")) == Routes(
            main=3, dead_letter={"short": 1}
        )
        assert sorted(row["label"] for row in routed.sinks["main"].content) == ["n0", "n1", "n2"]

    def test_functions_that_expand_are_numbered_too(self, routed: Bench) -> None:
        def twice(batch: pa.RecordBatch) -> pa.Table:
            import pyarrow as pa

            return pa.concat_tables([pa.Table.from_batches([batch])] * 2)

        routed.produce_orders(3)
        assert run_steps(routed, Python("twice", function=twice, expand=True)) == Routes(main=6)
        assert sorted(row["_hf"]["index"] for row in routed.sinks["main"].content) == [0, 0, 0, 1, 1, 1]

    def test_what_a_function_raises_is_told_with_its_line(self, routed: Bench, tmp_path: Path) -> None:
        (tmp_path / "steps.py").write_text("def fails(rows):\n    return rows.column('nope')\n")
        routed.produce_orders(4)
        routed.change(steps=(Python("broken", file="steps.py", function="fails"),))
        with pytest.raises(StepError) as caught:
            routed.run()
        text = str(caught.value)
        assert text.startswith("step 'broken': the function raised KeyError: ")
        assert "steps.py, line 2" in text
        assert "java" not in text
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize(
        ("code", "message"),
        [
            ("return rows.slice(1).drop_columns(['_hf'])", "without `_hf`"),
            ("return 7", "returned int, not a RecordBatch"),
            ("return rows.drop_columns(['id'])", "the column 'id' is missing"),
        ],
    )
    def test_what_a_function_must_not_return(
        self, routed: Bench, tmp_path: Path, code: str, message: str
    ) -> None:
        (tmp_path / "steps.py").write_text(f"def step(rows):\n    {code}\n")
        routed.produce_orders(4)
        routed.change(steps=(Python("odd", file="steps.py", function="step"),))
        with pytest.raises(StepError, match=message):
            routed.run()


def test_a_sink_that_lost_a_row_stops_the_batch(routed: Bench) -> None:
    routed.produce_orders(4)
    routed.run()
    routed.produce_orders(4)
    routed.sinks["main"].loses_a_row = True
    with pytest.raises(Unbalanced, match="sink 'main' wrote 3 rows aside and the route has 4"):
        routed.run()
    assert [len(sink.ledger) for sink in routed.sinks.values()] == [2, 2]
    assert len(routed.sinks["main"].content) == 4


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            (Sql("q", "SELEC id FROM input"),),
            r"step 'q': this is not SQL: Spark cannot read on at 'SELEC'",
        ),
        ((Sql("q", "SELECT _hf, nope FROM input"),), r"step 'q': there is no column 'nope'"),
        ((Sql("q", "SELECT id FROM input"),), "does not keep `_hf`"),
        ((Sql("q", "SELECT named_struct('topic', 'x') AS _hf FROM input"),), "once and unchanged"),
        ((Sql("q", "SELECT _hf, id, amount AS ID FROM input"),), "two columns the name 'id'"),
        ((Sql("q", "SELECT _hf, uuid() AS u FROM input"),), r"uuid\(\) gives another value"),
        ((Sql("q", "SELECT _hf, rand() AS u FROM input"),), r"rand\(\) gives another value"),
        (
            (Sql("q", "SELECT _hf, current_timestamp() AS u FROM input"),),
            r"current_timestamp\(\).*`_batch_time`",
        ),
        ((Sql("q", "SELECT _hf, unix_timestamp() AS u FROM input"),), r"current_timestamp\(\)"),
        ((Expect("q", "amount < rand()"),), r"rand\(\)"),
        ((Filter("q", "id"),), "gives bigint, not true or false"),
        ((Filter("q", "id >"),), r"this is not SQL"),
        ((Sql("q", "SELECT max(_hf) AS _hf, id FROM input GROUP BY id"),), "aggregates rows"),
        ((Sql("q", "SELECT * FROM input LIMIT 3"),), "limits the number of rows"),
        ((Sql("q", "SELECT input.* FROM input JOIN other USING (id)"),), "TABLE_OR_VIEW_NOT_FOUND"),
        ((Sql("q", "DROP VIEW input"),), "a step is a query"),
        ((Sql("q", "FROM input INSERT INTO other SELECT *"),), "a step is a query"),
        ((Python("q", function=len, schema="no schema at all"),), "its schema"),
        (
            (Sql("p", "SELECT * FROM input", expand=True), Sql("q", "SELECT * FROM input", expand=True)),
            "step 'q': 'p' expands already",
        ),
    ],
)
def test_steps_that_cannot_work_are_refused_in_words(
    spark: SparkSession, steps: tuple[Step, ...], message: str
) -> None:
    from holdfast.pipeline.definition.model import ParquetSink, PipelineDefinition, Source

    from .conftest import ORDERS

    definition = PipelineDefinition(
        "orders", Source(topics=("orders",), value=ORDERS), steps, (ParquetSink("out"),)
    )
    with pytest.raises(StepError, match=message) as caught:
        Router(spark, definition)
    assert "org.apache" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("steps", "makes_values"),
    [
        ((), False),
        ((Expect("low", "id < 8"), Filter("even", "id % 2 = 0")), False),
        ((Dedupe("once", ("id",), within="1m"), Expect("low", "id < 8")), False),
        ((Sql("same", "SELECT * FROM input"),), True),
        ((Expect("low", "id < 8"), Window("sums", {"n": "count(*)"}, size="1m", key=("id",))), True),
    ],
)
def test_only_steps_that_choose_rows_leave_them_in_the_stage(
    spark: SparkSession, steps: tuple[Step, ...], makes_values: bool
) -> None:
    from holdfast.pipeline.definition.model import PipelineDefinition, Source

    from .conftest import ORDERS

    source = Source(topics=("orders",), value=ORDERS, event_time=EventTime("_timestamp"))
    assert Router(spark, PipelineDefinition("orders", source, steps)).makes_values is makes_values


def test_a_lookup_within_the_query_is_fine(spark: SparkSession) -> None:
    from holdfast.pipeline.definition.model import PipelineDefinition, Source

    from .conftest import ORDERS

    query = "SELECT _hf, id, name FROM input LEFT JOIN VALUES (1, 'one'), (2, 'two') AS names(id, name) USING (id)"
    definition = PipelineDefinition(
        "orders", Source(topics=("orders",), value=ORDERS), (Sql("names", query),)
    )
    schema: Any = Router(spark, definition).empty_main.schema
    assert schema.names == ["_hf", "_key", "_timestamp", "_tombstone", "_headers", "id", "name"]
    assert [field.name for field in schema["_hf"].dataType] == ["topic", "partition", "offset", "index"]
