"""The promise of each hop, the weakest, and what would raise it."""

from __future__ import annotations

import pytest

from holdfast.pipeline import Pipeline
from holdfast.pipeline.definition.explaining import Strength, TopicFacts, explain, without_password

STRONG = (
    Pipeline("p")
    .read("t", value={"format": "json", "unknown": "reject", "fields": {"id": "long"}})
    .filter("id > 0", name="f")
    .sql("SELECT * FROM input", name="q")
    .write("parquet", path="out")
)
DURABLE = TopicFacts("t", 3, 1, {"holdfast.flush": "group"})


def test_a_pipeline_without_a_weak_hop_is_exactly_once() -> None:
    explanation = explain(STRONG.definition(), [DURABLE])
    assert [hop.name for hop in explanation.hops] == [
        "topic t",
        "source",
        "parse value",
        "f",
        "q",
        "dead-letter",
        "parquet",
    ]
    assert {hop.strength for hop in explanation.hops} == {Strength.EXACTLY_ONCE}


@pytest.mark.parametrize(
    ("pipeline", "weakest", "strength", "remedy"),
    [
        (
            STRONG.read("t", starting="latest", value="text"),
            "source",
            Strength.SOME_LEFT_OUT,
            "starting: earliest",
        ),
        (
            STRONG.read("t", value={"format": "json", "fields": {"id": "long"}}),
            "parse value",
            Strength.FIELDS_LEFT_OUT,
            "source.value.unknown: keep",
        ),
        (
            STRONG.expect("id > 0", name="r", otherwise="drop"),
            "r",
            Strength.SOME_LEFT_OUT,
            "else: quarantine",
        ),
        (STRONG.python(len, name="py"), "py", Strength.CONDITIONAL, "no setting"),
        (STRONG.write("kafka", topic="o", writers=4), "kafka", Strength.CONDITIONAL, "writers: 1"),
    ],
)
def test_the_weakest_hop_is_named_with_what_would_raise_it(
    pipeline: Pipeline, weakest: str, strength: Strength, remedy: str
) -> None:  # HF402
    hop = explain(pipeline.definition()).weakest
    assert (hop.name, hop.strength) == (weakest, strength)
    assert hop.remedy is not None
    assert remedy in hop.remedy


@pytest.mark.parametrize(
    ("facts", "strength", "remedy"),
    [
        (TopicFacts("t", 1, 1, {"holdfast.flush": "os"}), Strength.MAY_LOSE, "holdfast.flush=group"),
        (TopicFacts("t", 1, 1, {"min.insync.replicas": "1"}), Strength.MAY_LOSE, "replication factor of 3"),
        (TopicFacts("t", 1, 3, {"min.insync.replicas": "1"}), Strength.MAY_LOSE, "min.insync.replicas=2"),
        (
            TopicFacts("t", 1, 3, {"min.insync.replicas": "2", "unclean.leader.election.enable": "true"}),
            Strength.MAY_LOSE,
            "unclean.leader.election.enable=false",
        ),
        (
            TopicFacts("t", 1, 1, {"holdfast.flush": "group", "cleanup.policy": "compact"}),
            Strength.SOME_LEFT_OUT,
            "min.compaction.lag.ms",
        ),
        (TopicFacts("t", 1, 3, {"min.insync.replicas": "2"}), Strength.EXACTLY_ONCE, None),
    ],
)
def test_what_the_broker_says_counts(facts: TopicFacts, strength: Strength, remedy: str | None) -> None:
    hop = explain(STRONG.definition(), [facts]).hops[0]
    assert hop.strength is strength
    assert (hop.remedy is None) if remedy is None else (remedy in (hop.remedy or ""))


def test_passwords_in_addresses_are_not_shown() -> None:
    assert without_password("postgresql://u:secret@h/d") == "postgresql://u:***@h/d"
    assert without_password("postgresql://u:${P}@h/d") == "postgresql://u:${P}@h/d"
    assert without_password("postgresql://h/d?password=x&a=b") == "postgresql://h/d?password=***&a=b"
    assert without_password("file:/run/url") == "file:/run/url"


def test_literal_settings_are_shown_by_name_alone() -> None:
    pipeline = STRONG.read("t", value="text", settings={"sasl.password": "swordfish", "sasl.username": "ada"})
    text = str(explain(pipeline.definition()).as_json())
    assert "sasl.password" in text
    assert "swordfish" not in text
    assert "ada" not in text


WITH_TIME = Pipeline("p").read(
    "t",
    value={"format": "json", "unknown": "reject", "fields": {"id": "long", "at": "timestamp"}},
    event_time="at",
)
TOTALS = WITH_TIME.window({"n": "count(*)"}, size="1m", name="totals").write(
    "kafka", topic="o", rows="totals"
)


def test_late_rows_without_a_sink_are_the_weakest_hop() -> None:
    weakest = explain(TOTALS.definition()).weakest
    assert (weakest.name, weakest.strength) == ("totals", Strength.SOME_LEFT_OUT)
    assert weakest.remedy == "a sink with rows: totals.late"
    kept = TOTALS.write("kafka", topic="l", name="late", rows="totals.late")
    assert explain(kept.definition()).weakest.strength is Strength.EXACTLY_ONCE


def test_partitions_left_out_when_idle_are_a_condition() -> None:
    pipeline = WITH_TIME.write("parquet", path="o").read(
        "t", value="text", event_time={"field": "_timestamp", "idle": "1m"}
    )
    weakest = explain(pipeline.definition()).weakest
    assert (weakest.name, weakest.strength) == ("event time", Strength.CONDITIONAL)
    assert "idle" in (weakest.remedy or "")


def test_every_step_says_what_it_remembers_and_for_how_long() -> None:
    pipeline = (
        WITH_TIME.dedupe("id", within="2h", name="once")
        .lookup("postgresql://u:secret@h/d", query="SELECT 1", on="id", columns="city", name="who")
        .window({"n": "count(*)"}, gap="5m", late="correct", correct_within="3d", name="visits")
        .keyed("json:dumps", key="id", schema="n long", state="n long", ttl="4d", name="watch")
        .join("id > 1", "id < 1", on="id", select=["l.id"], within="6m", name="pairs")
        .write("parquet", path="o")
    )
    hops = {hop.name: f"{hop.what}; {hop.why}" for hop in explain(pipeline.definition()).hops}
    for name, time in (("once", "2h"), ("visits", "3d"), ("watch", "4d"), ("pairs", "6m"), ("who", "1h")):
        assert time in hops[name], hops[name]
    assert "secret" not in hops["who"]
    assert "sessions that end after 5m" in hops["visits"]


def test_a_sink_says_whose_rows_it_takes() -> None:
    assert explain(TOTALS.definition()).sinks[-1].what == "rows totals: topic o"
