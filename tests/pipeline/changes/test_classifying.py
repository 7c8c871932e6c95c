"""Every change of a definition is safe, needs a rebuild, or is refused; told from two documents alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pipeline.changes.classifying import (
    UnsafeChange,
    classify,
    refuse_unsafe,
    without_sinks,
    worst,
)
from holdfast.pipeline.changes.levels import Facts, Level
from holdfast.pipeline.definition.fingerprint import canonical, state_marks
from holdfast.pipeline.definition.model import (
    DeadLetter,
    Decoding,
    Dedupe,
    DeltaSink,
    EventTime,
    Expect,
    Field,
    Filter,
    Join,
    KafkaSink,
    Lookup,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    Source,
    Sql,
    Window,
)

VALUE = Decoding("json", (Field("id", "long"), Field("amount", "double", required=False)))
SOURCE = Source(
    topics=("orders",), bootstrap="one:9092", value=VALUE, event_time=EventTime("at", delay="10m")
)
CLEAN = Filter("clean", "amount > 0")
TOTALS = Window("totals", {"n": "count(*)"}, size="1h", key=("id",))
LAKE = ParquetSink("out", name="lake", schema="add-columns")
PLAIN = PipelineDefinition("p", SOURCE, steps=(CLEAN,), sinks=(LAKE,))
STATEFUL = replace(
    PLAIN, steps=(CLEAN, TOTALS), sinks=(LAKE, ParquetSink("sums", name="sums", rows="totals"))
)

NOTHING_ASKED = Facts()
Alter = Callable[[PipelineDefinition], PipelineDefinition]


def changes(before: PipelineDefinition, alter: Alter, facts: Facts = NOTHING_ASKED) -> list[tuple[str, str]]:
    return [
        (change.level.value, change.where)
        for change in classify(canonical(before), canonical(alter(before)), facts)
    ]


def source(**settings: Any) -> Alter:
    return lambda definition: replace(definition, source=replace(definition.source, **settings))


def steps(*steps: Any) -> Alter:
    return lambda definition: replace(definition, steps=steps)


def sinks(*sinks: Any) -> Alter:
    return lambda definition: replace(definition, sinks=sinks)


def value(**settings: Any) -> Alter:
    return source(value=replace(VALUE, **settings))


def test_the_same_definition_has_no_changes() -> None:
    assert changes(STATEFUL, lambda same: same) == []


def test_what_changes_no_row_is_not_even_listed() -> None:
    def alter(definition: PipelineDefinition) -> PipelineDefinition:
        small = replace(definition.source, batch_records=5, batch_bytes=5)
        return replace(definition, source=small, trigger="10s", home="/elsewhere", monitoring_group="g")

    assert changes(STATEFUL, alter) == []


@pytest.mark.parametrize(
    ("alter", "where"),
    [
        (sinks(LAKE, ParquetSink("other", name="other")), "sinks.other"),
        (sinks(LAKE, KafkaSink("t")), "sinks.kafka"),
        (sinks(), "sinks.lake"),
        (sinks(replace(LAKE, file_bytes=1)), "sinks.lake.file_bytes"),
        (sinks(replace(LAKE, compression="zstd")), "sinks.lake.compression"),
        (sinks(replace(LAKE, schema="fail")), "sinks.lake.schema"),
        (sinks(replace(LAKE, path="elsewhere")), "sinks.lake.path"),
        (steps(CLEAN, Expect("positive", "id > 0")), "steps.positive"),
        (steps(replace(CLEAN, where="amount > 1")), "steps.clean.where"),
        (steps(), "steps.clean"),
        (steps(CLEAN, Sql("double", "SELECT _hf, id * 2 AS id FROM input")), "steps.double"),
        (steps(CLEAN, Lookup("names", "names.csv", {"id": "id"}, ("name",))), "steps.names"),
        (source(topics=("orders", "more")), "source.topics"),
        (source(bootstrap="two:9092"), "source.bootstrap"),
        (source(starting="latest"), "source.starting"),
        (source(settings={"sasl.password": "x"}), "source.settings"),
        (source(event_time=EventTime("at", delay="1h")), "source.event_time"),
        (value(unknown="reject"), "source.value.unknown"),
        (value(fields=(*VALUE.fields, Field("more", "string"))), "source.value.fields.more"),
        (value(fields=VALUE.fields[:1]), "source.value.fields.amount"),
        (value(fields=(VALUE.fields[0], Field("amount", "double"))), "source.value.fields.amount"),
        (lambda it: replace(it, dead_letter=DeadLetter("bad")), "dead_letter.topic"),
        (
            lambda it: replace(it, spark={"spark.sql.shuffle.partitions": "4"}),
            "spark.spark.sql.shuffle.partitions",
        ),
    ],
)
def test_without_a_memory_these_are_safe(alter: Alter, where: str) -> None:
    assert changes(PLAIN, alter) == [("safe", where)]


@pytest.mark.parametrize(
    ("alter", "where"),
    [
        (steps(CLEAN, replace(TOTALS, size="2h")), "steps.totals.size"),
        (steps(CLEAN, replace(TOTALS, key=())), "steps.totals.key"),
        (steps(CLEAN, replace(TOTALS, aggregates={"n": "sum(id)"})), "steps.totals.aggregates"),
        (steps(CLEAN, replace(TOTALS, late="correct")), "steps.totals.late"),
        (steps(replace(CLEAN, where="amount > 1"), TOTALS), "steps.clean.where"),
        (steps(TOTALS), "steps.clean"),
        (steps(CLEAN, Expect("positive", "id > 0"), TOTALS), "steps.positive"),
        (steps(CLEAN, Sql("s", "SELECT _hf, id FROM input"), TOTALS), "steps.s"),
        (steps(CLEAN, Dedupe("once", ("id",)), TOTALS), "steps.once"),
        (steps(CLEAN, TOTALS, Dedupe("once", ("id",))), "steps.once"),
        (steps(CLEAN, TOTALS, replace(TOTALS, name="again")), "steps.again"),
        (steps(TOTALS, CLEAN), "steps"),
        (source(event_time=EventTime("at", delay="1h")), "source.event_time.delay"),
        (source(event_time=EventTime("at", delay="10m", idle="1m")), "source.event_time.idle"),
        (value(unknown="reject"), "source.value.unknown"),
        (value(fields=(*VALUE.fields, Field("more", "string"))), "source.value.fields.more"),
        (source(values={"orders": VALUE}), "source.values.orders"),
    ],
)
def test_what_a_state_was_made_of_needs_a_rebuild(alter: Alter, where: str) -> None:
    before = replace(STATEFUL, sinks=(LAKE,))
    assert ("rebuild", where) in changes(before, alter)
    assert not [level for level, _ in changes(before, alter) if level == "refused"]


@pytest.mark.parametrize(
    "alter",
    [
        steps(CLEAN, TOTALS, Expect("positive", "id > 0")),
        steps(CLEAN, Expect("odd", "id % 2 = 1", otherwise="warn"), TOTALS),
        steps(CLEAN),
        sinks(LAKE),
        sinks(*STATEFUL.sinks, ParquetSink("late", name="late", rows="totals.late")),
        source(topics=("orders", "more")),
        source(bootstrap="two:9092"),
    ],
)
def test_with_a_memory_what_does_not_reach_it_stays_safe(alter: Alter) -> None:
    assert {level for level, _ in changes(STATEFUL, alter)} == {"safe"}


def test_a_window_before_another_does_not_touch_the_other() -> None:
    found = changes(STATEFUL, steps(CLEAN, replace(TOTALS, name="first"), TOTALS))
    assert found == [("rebuild", "steps.first")]


def test_a_tap_may_move_past_another_tap() -> None:
    other = replace(TOTALS, name="other")
    before = replace(STATEFUL, steps=(CLEAN, TOTALS, other))
    assert changes(before, steps(CLEAN, other, TOTALS)) == [("safe", "steps")]


def test_how_often_a_lookup_is_refreshed_touches_no_state() -> None:
    names = Lookup("names", "names.csv", {"id": "id"}, ("name",))
    before = replace(STATEFUL, steps=(names, TOTALS))
    assert changes(before, steps(replace(names, refresh="2h"), TOTALS)) == [("safe", "steps.names.refresh")]
    assert changes(before, steps(replace(names, table="n.csv"), TOTALS)) == [("rebuild", "steps.names.table")]


def test_a_rule_that_stops_warning_and_starts_to_turn_away_counts() -> None:
    rule = Expect("odd", "id % 2 = 1", otherwise="warn")
    before = replace(STATEFUL, steps=(rule, TOTALS))
    assert changes(before, steps(replace(rule, otherwise="drop"), TOTALS)) == [
        ("rebuild", "steps.odd.otherwise")
    ]


def test_a_join_that_takes_the_name_of_a_window_is_another_step() -> None:
    join = Join("totals", "orders", "more", {"id": "id"}, select={"a": "l.id"})
    assert ("rebuild", "steps.totals") in changes(STATEFUL, steps(CLEAN, join))


def test_a_new_name_for_a_step_that_remembers_nothing_touches_no_state() -> None:
    found = changes(STATEFUL, steps(replace(CLEAN, name="cleaned"), TOTALS))
    assert found == [("safe", "steps.cleaned"), ("safe", "steps.clean")]


def test_a_registry_that_moved_may_have_decoded_otherwise() -> None:
    before = replace(STATEFUL, source=replace(SOURCE, value=replace(VALUE, registry={"url": "a"})))
    assert changes(before, source(value=replace(VALUE, registry={"url": "b"}))) == [
        ("rebuild", "source.value.registry")
    ]


POSTGRES = PostgresSink("postgresql://h/d", "orders", mode="upsert", key=("id",))
VERSIONS = DeltaSink("out/versions", mode="scd2", key=("id",), order_by="at")


@pytest.mark.parametrize(
    ("before", "alter", "where"),
    [
        (PLAIN, lambda it: replace(it, name="q", dead_letter=DeadLetter("p-dlt")), "pipeline"),
        (PLAIN, source(topics=("others",)), "source.topics"),
        (PLAIN, sinks(replace(LAKE, name="renamed")), "sinks.renamed"),
        (PLAIN, sinks(DeltaSink("out", name="lake")), "sinks.lake"),
        (PLAIN, sinks(DeltaSink("out/", name="delta")), "sinks.delta"),
        (PLAIN, sinks(replace(LAKE, partition_by=("id",))), "sinks.lake.partition_by"),
        (PLAIN, value(fields=(Field("id", "string"), VALUE.fields[1])), "source.value.fields.id"),
        (STATEFUL, sinks(STATEFUL.sinks[0], replace(STATEFUL.sinks[1], rows="")), "sinks.sums.rows"),
        (replace(PLAIN, sinks=(POSTGRES,)), sinks(replace(POSTGRES, table="t")), "sinks.postgres.table"),
        (replace(PLAIN, sinks=(POSTGRES,)), sinks(replace(POSTGRES, key=("a",))), "sinks.postgres.key"),
        (
            replace(PLAIN, sinks=(replace(LAKE, schema="fail"),)),
            value(fields=(*VALUE.fields, Field("more", "string"))),
            "source.value.fields.more",
        ),
    ],
)
def test_what_ledgers_or_sinks_would_not_fit_is_refused(
    before: PipelineDefinition, alter: Alter, where: str
) -> None:
    found = classify(canonical(before), canonical(alter(before)))
    refused = [change for change in found if change.level is Level.REFUSED]
    assert [change.where for change in refused] == [where]
    assert all(change.todo for change in refused)


def test_two_sinks_that_change_places_are_both_refused() -> None:
    other = ParquetSink("b", name="other")
    before = replace(PLAIN, sinks=(LAKE, other))
    found = changes(before, sinks(replace(LAKE, path="b"), replace(other, path="out")))
    assert [each for each in found if each[0] == "refused"] == [
        ("refused", "sinks.lake"),
        ("refused", "sinks.other"),
    ]


def test_sinks_that_shared_a_place_before_are_no_change() -> None:
    before = replace(PLAIN, sinks=(LAKE, replace(LAKE, name="same")))
    assert changes(before, lambda same: same) == []


def test_a_column_for_strict_sinks_is_theirs_to_judge_where_steps_choose_columns() -> None:
    strict = replace(
        PLAIN, steps=(Sql("s", "SELECT _hf, id FROM input"),), sinks=(replace(LAKE, schema="fail"),)
    )
    assert changes(strict, value(fields=(*VALUE.fields, Field("x", "string")))) == [
        ("safe", "source.value.fields.x")
    ]


def test_another_type_that_no_sink_holds_as_it_is_read_is_theirs_to_judge() -> None:
    alter = value(fields=(Field("id", "string"), VALUE.fields[1]))
    assert changes(replace(PLAIN, sinks=(KafkaSink("t"),)), alter) == [("safe", "source.value.fields.id")]
    cast = replace(PLAIN, steps=(Sql("s", "SELECT _hf, CAST(id AS long) AS id FROM input"),))
    assert changes(cast, alter) == [("safe", "source.value.fields.id")]
    assert ("rebuild", "source.value.fields.id") in changes(replace(cast, steps=(*cast.steps, TOTALS)), alter)


# ---------------------------------------------------------------------------- what ledgers know


def test_a_pattern_must_still_find_every_topic_of_the_ledgers() -> None:
    before = replace(PLAIN, source=replace(SOURCE, topics=(), pattern="or.*"))
    alter = source(pattern="ord.*")
    assert changes(before, alter) == [("refused", "source.pattern")]
    assert changes(before, alter, Facts(topics=frozenset({"orders"}))) == [("safe", "source.pattern")]
    assert changes(before, alter, Facts(topics=frozenset({"orders", "orbits"}))) == [
        ("refused", "source.topics"),
        ("safe", "source.pattern"),
    ]


def test_names_may_become_a_pattern_that_finds_them() -> None:
    assert changes(PLAIN, source(topics=(), pattern="orders.*")) == [("safe", "source.pattern")]
    assert ("refused", "source.topics") in changes(PLAIN, source(topics=(), pattern="other.*"))


def test_another_cluster_is_refused_and_another_address_of_it_is_not() -> None:
    assert changes(PLAIN, source(bootstrap="two:1"), Facts(is_same_cluster=True)) == [
        ("safe", "source.bootstrap")
    ]
    assert changes(PLAIN, source(bootstrap="two:1"), Facts(is_same_cluster=False)) == [
        ("refused", "source.bootstrap")
    ]
    assert changes(PLAIN, lambda it: it, Facts(is_same_cluster=False)) == [("refused", "source.bootstrap")]


# ---------------------------------------------------------------------------- the guide's table

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "changing-a-pipeline.md").read_text()
OF_THE_GUIDE: dict[str, list[tuple[PipelineDefinition, Alter]]] = {
    "when batches run, how large they are, the monitoring group": [
        (STATEFUL, lambda it: replace(it, trigger="10s", monitoring_group="g")),
        (STATEFUL, source(batch_records=5)),
    ],
    "a new sink": [(STATEFUL, sinks(*STATEFUL.sinks, KafkaSink("t")))],
    "a sink left out": [(STATEFUL, sinks(LAKE))],
    "a new or changed rule, filter, query, function, lookup behind every stateful step": [
        (STATEFUL, steps(CLEAN, TOTALS, Expect("positive", "id > 0"))),
        (STATEFUL, steps(CLEAN, TOTALS, Filter("odd", "id % 2 = 1"))),
        (STATEFUL, steps(CLEAN, TOTALS, Sql("s", "SELECT _hf, id FROM input"))),
        (STATEFUL, steps(CLEAN, TOTALS, Lookup("names", "names.csv", {"id": "id"}, ("name",)))),
    ],
    "a rule that only warns": [(STATEFUL, steps(CLEAN, Expect("odd", "id > 0", otherwise="warn"), TOTALS))],
    "a new topic, more partitions": [(STATEFUL, source(topics=("orders", "more")))],
    "another address of the same cluster": [(STATEFUL, source(bootstrap="two:9092"))],
    "a new path of a file sink, a new topic of a Kafka sink": [
        (PLAIN, sinks(replace(LAKE, path="elsewhere"))),
        (replace(PLAIN, sinks=(KafkaSink("t"),)), sinks(KafkaSink("u"))),
    ],
    "a new or removed column": [
        (PLAIN, value(fields=(*VALUE.fields, Field("more", "string")))),
        (PLAIN, value(fields=VALUE.fields[:1])),
    ],
    "windows, deduplication, joins, keyed functions: anything about them, or a new one": [
        (STATEFUL, steps(CLEAN, replace(TOTALS, size="2h"))),
        (STATEFUL, steps(CLEAN, TOTALS, Dedupe("once", ("id",)))),
        (STATEFUL, steps(CLEAN, TOTALS, Join("both", "orders", "more", {"id": "id"}, select={"a": "l.id"}))),
    ],
    "`event_time`": [(STATEFUL, source(event_time=EventTime("at", delay="1h")))],
    "a step before a stateful one, or how records are decoded": [
        (STATEFUL, steps(replace(CLEAN, where="amount > 1"), TOTALS)),
        (STATEFUL, value(unknown="reject")),
    ],
    "the pipeline's name": [(PLAIN, lambda it: replace(it, name="q"))],
    "another cluster, a topic no longer read": [(PLAIN, source(topics=("others",)))],
    "a sink renamed at its place, two sinks that change places, another kind of sink under a name": [
        (PLAIN, sinks(replace(LAKE, name="renamed"))),
        (
            replace(PLAIN, sinks=(LAKE, ParquetSink("b", name="other"))),
            sinks(replace(LAKE, path="b"), ParquetSink("out", name="other")),
        ),
        (PLAIN, sinks(DeltaSink("out", name="lake"))),
    ],
    "`partition_by`; an upsert's or scd2's mode, key or table, and scd2's `order_by`; other `rows` of a sink that "
    "holds columns": [
        (PLAIN, sinks(replace(LAKE, partition_by=("id",)))),
        *(
            (replace(PLAIN, sinks=(POSTGRES,)), sinks(replace(POSTGRES, **change)))
            for change in ({"mode": "append", "key": ()}, {"key": ("amount",)}, {"table": "t"})
        ),
        *(
            (replace(PLAIN, sinks=(VERSIONS,)), sinks(replace(VERSIONS, **change)))
            for change in ({"mode": "upsert"}, {"key": ("amount",)}, {"order_by": "amount"})
        ),
        (STATEFUL, sinks(STATEFUL.sinks[0], replace(STATEFUL.sinks[1], rows=""))),
    ],
    "the type of a column that sinks hold": [
        (PLAIN, value(fields=(Field("id", "string"), VALUE.fields[1]))),
    ],
}


def test_every_row_of_the_guides_table_is_so() -> None:
    table = re.findall(r"^\| (.+?) \| (–|safe|rebuild|refused) \|", GUIDE, re.MULTILINE)
    assert [change for change, _ in table] == list(OF_THE_GUIDE)
    order = ["–", "safe", "rebuild", "refused"]
    for change, level in table:
        for before, alter in OF_THE_GUIDE[change]:
            levels = ["–", *(each for each, _ in changes(before, alter))]
            assert max(levels, key=order.index) == level, change


# ---------------------------------------------------------------------------- what a run does with it


def test_a_run_goes_on_with_safe_changes_and_with_no_memory_of_an_earlier_run() -> None:
    after = canonical(replace(PLAIN, sinks=(LAKE, KafkaSink("t"))))
    assert worst(refuse_unsafe(canonical(PLAIN), after)) is Level.SAFE
    assert refuse_unsafe(None, after) == []


def test_a_run_names_the_command_that_helps() -> None:
    after = canonical(replace(STATEFUL, steps=(CLEAN, replace(TOTALS, size="2h"))))
    with pytest.raises(
        UnsafeChange, match=r"pipeline rebuild FILE(.|\n)*steps\.totals\.size: 1h → 2h"
    ) as refused:
        refuse_unsafe(canonical(STATEFUL), after)
    assert [change.level for change in refused.value.changes] == [Level.REBUILD]
    assert refused.value.exit_code == 1


def test_what_is_refused_comes_before_what_can_be_rebuilt() -> None:
    after = canonical(replace(STATEFUL, name="q", steps=(CLEAN, replace(TOTALS, size="2h"))))
    with pytest.raises(UnsafeChange, match="cannot take over") as refused:
        refuse_unsafe(canonical(STATEFUL), after)
    assert [change.level for change in refused.value.changes] == [Level.REFUSED, Level.REBUILD]


def test_a_sink_whose_ledger_was_reset_is_a_new_one() -> None:
    before = without_sinks(canonical(PLAIN), ["lake"])
    after = canonical(replace(PLAIN, sinks=(DeltaSink("out2", name="lake"),)))
    assert [(change.level, change.where) for change in classify(before, after)] == [
        (Level.SAFE, "sinks.lake")
    ]


def test_no_secret_is_shown() -> None:
    names = Lookup("names", "postgresql://u:old@h/d", {"id": "id"}, ("name",), query="SELECT 1")
    before = replace(
        PLAIN, steps=(names,), sinks=(POSTGRES,), source=replace(SOURCE, settings={"sasl.password": "old"})
    )
    after = replace(
        before,
        steps=(replace(names, table="postgresql://u:hidden@h/d"),),
        sinks=(replace(POSTGRES, url="postgresql://u:hidden@h/d"),),
        source=replace(SOURCE, settings={"sasl.password": "hidden"}),
    )
    text = " ".join(map(str, classify(canonical(before), canonical(after))))
    assert "sasl.password" in text
    assert "steps.names.table" in text
    assert "hidden" not in text


# ---------------------------------------------------------------------------- the same judgement as the engine's

POOL: tuple[Any, ...] = (
    CLEAN,
    replace(CLEAN, where="amount > 1"),
    replace(CLEAN, name="cleaned"),
    Expect("odd", "id % 2 = 1", otherwise="warn"),
    Expect("odd", "id % 2 = 1"),
    Sql("s", "SELECT _hf, id FROM input"),
    Dedupe("once", ("id",)),
    Dedupe("once", ("id",), within="2d"),
    TOTALS,
    replace(TOTALS, size="2h"),
    replace(TOTALS, name="others"),
)
chains = st.lists(st.sampled_from(POOL), max_size=5, unique_by=lambda step: step.name).map(tuple)


@given(before=chains, after=chains)
def test_a_rebuild_is_asked_for_exactly_where_a_state_is_of_other_rules(
    before: tuple[Any, ...], after: tuple[Any, ...]
) -> None:
    was, now = (canonical(replace(PLAIN, steps=steps)) for steps in (before, after))
    found = {change.level for change in classify(was, now)}
    known = state_marks(was)
    is_stale = any(known.get(name) != mark for name, mark in state_marks(now).items())
    assert (Level.REBUILD in found) == is_stale
    assert (found == set()) == (was == now)
