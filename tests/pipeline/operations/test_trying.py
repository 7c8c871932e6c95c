"""Trials: what a definition makes of records, with nothing written anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from confluent_kafka.admin import AdminClient
from hypothesis import given
from hypothesis import strategies as st

from holdfast.broker.server.embed import Broker
from holdfast.errors import UsageError
from holdfast.pipeline.definition.example import write_files
from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.engine.planning import Log
from holdfast.pipeline.operations.trying import last_of, newest, run_trial
from holdfast.pipeline.positions import Place
from holdfast.testing.pipelines import Case, PipelineTester, differences, load_cases

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFINITION = """\
pipeline: orders
source:
  topics: [orders]
  bootstrap: nowhere.invalid:1
  settings: {security.protocol: SASL_SSL}
  value: {format: json, fields: {id: long, amount: double, day: "date?"}}
steps:
  - expect: {name: positive, that: amount > 0, else: quarantine}
  - filter: {name: not-four, where: id <> 4}
  - sql: SELECT *, amount * 2 AS twice FROM input
sinks:
  - parquet: out
  - kafka: {topic: copies, key: id, headers: {half: amount / 2}}
"""
CASES = """\
pipeline: orders.yaml
cases:
  - name: one of each
    records:
      - value: {id: 1, amount: 1.5, day: 2026-01-31}
        timestamp: 2026-01-31T12:00:00Z
      - value: {id: 2, amount: -1}
      - value: {id: 4, amount: 1}
      - {value: not json, key: k, partition: 2}
    expect:
      parquet:
        - {id: 1, twice: 3, day: 2026-01-31}
      kafka:
        - {key: "1", headers: {half: "0.75"}}
      dead_letters:
        - {reason: parse, key: k, partition: 2}
        - {reason: positive, error: positive}
"""


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    (tmp_path / "orders.yaml").write_text(DEFINITION)
    path = tmp_path / "orders.test.yaml"
    path.write_text(CASES)
    return path


@pytest.mark.spark
def test_cases_agree_or_say_what_differs(cases: Path, spark: SparkSession, tmp_path: Path) -> None:
    loaded = load_cases(str(cases))
    (case,) = loaded.cases
    with PipelineTester(spark) as tester:
        trial = tester.run(loaded.definition, case.records)
        assert list(differences(case, trial)) == []
        assert trial.summary.routes.filtered == {"not-four": 1}
        other = Case("", case.records, {"parquet": [{"id": 9}], "dead_letters": [{"reason": "parse"}]})
        assert [line.split(" {")[0] for line in differences(other, trial)] == [
            "parquet: no row with",
            "parquet: nobody expects",
            "dead_letters: nobody expects",
        ]
        again = tester.run(str(tmp_path / "orders.yaml"), [{"value": {"id": 7, "amount": 2}}])
    assert [row["id"] for row in again.rows["parquet"]] == [7]
    assert not (tmp_path / "out").exists()


@pytest.mark.spark
def test_the_cases_of_the_example_pass(spark: SparkSession, tmp_path: Path) -> None:
    write_files(str(tmp_path))
    loaded = load_cases(str(tmp_path / "orders.test.yaml"))
    with PipelineTester(spark) as tester:
        for case in loaded.cases:
            assert list(differences(case, tester.run(loaded.definition, case.records))) == []


@pytest.mark.spark
def test_a_preview_writes_nothing_and_commits_nothing(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "orders.yaml").write_text(
        DEFINITION.replace("  settings: {security.protocol: SASL_SSL}\n", "")
    )
    definition = load_pipeline(str(tmp_path / "orders.yaml")).definition
    before = sorted(path.name for path in tmp_path.iterdir())
    with Broker() as broker:
        broker.create_topic("orders", 1)
        tester_records: list[dict[str, Any]] = [{"id": number, "amount": 1.0} for number in range(30)]
        _produce(broker, tester_records)
        bounds = newest(definition, 3, broker.bootstrap_servers)
        trial = run_trial(definition, bounds=bounds, bootstrap=broker.bootstrap_servers, spark=spark)
        assert [row["id"] for row in trial.rows["parquet"]] == [27, 28, 29]
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        assert {name for name in admin.list_topics().topics if not name.startswith("__")} == {"orders"}
        assert not admin.list_consumer_groups().result(30).valid
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def _produce(broker: Broker, values: list[dict[str, Any]]) -> None:
    import json

    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for value in values:
        producer.produce("orders", json.dumps(value))
    assert producer.flush(30) == 0


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6), st.integers(1, 120)
)
def test_the_newest_records_are_as_many_as_there_are(logs: list[tuple[int, int]], wanted: int) -> None:
    given_logs = {
        Place("t", UUID(int=1), number): Log(start, start + length, 0)
        for number, (start, length) in enumerate(logs)
    }
    bounds = last_of(given_logs, wanted)
    taken = {place: bounds.end[place] - bounds.start[place] for place in given_logs}
    assert sum(taken.values()) == min(wanted, sum(log.end - log.start for log in given_logs.values()))
    assert all(given_logs[place].start <= start <= bounds.end[place] for place, start in bounds.start.items())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("pipeline: orders.yaml", "pipeline: 4", "`pipeline` names the definition's file"),
        ("cases:", "case:", "a list `cases`"),
        ("    expect:\n", "    expects:\n", "'expects' is none of expect, name, records"),
        ("      parquet:\n", "      parquett:\n", "'parquett' is none of dead_letters, kafka, parquet"),
        ("    records:\n", "    records: 4\n    expect: {}\n    ignored:\n", "a list `records`"),
    ],
)
def test_a_file_of_cases_that_is_wrong_is_told(cases: Path, old: str, new: str, words: str) -> None:
    cases.write_text(cases.read_text().replace(old, new, 1))
    with pytest.raises(UsageError) as told:
        load_cases(str(cases))
    assert words in str(told.value)
