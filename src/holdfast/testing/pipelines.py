"""Testing a pipeline: records in, rows and dead letters out. No Kafka, no sink and no home are needed.

    with PipelineTester() as tester:
        trial = tester.run("orders.yaml", [{"value": {"id": 1, "amount": 9.5}}, {"value": "not json"}])
        assert trial.rows["parquet"] == [{"id": 1, "amount": 9.5}]
        assert [letter["reason"] for letter in trial.dead_letters] == ["parse"]

Each run is one of the engine's own (`pipeline.operations.trying`) on a broker in this process; all share one warm Spark
session. `holdfast pipeline test` runs cases that a YAML file lists, with the same tester.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Self

import yaml
from confluent_kafka import Producer

from holdfast.broker.server.embed import Broker
from holdfast.errors import UsageError
from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.operations.trying import Row, Trial, run_trial

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORD: Final = frozenset({"topic", "partition", "key", "value", "value_base64", "headers", "timestamp"})
CASE: Final = frozenset({"name", "records", "expect"})
DEAD_LETTERS: Final = "dead_letters"
FLUSH_SECONDS: Final = 30.0


class PipelineTester:
    """Runs definitions on given records; Spark starts with the first one, or is the session that is given."""

    def __init__(self, spark: SparkSession | None = None) -> None:
        self._spark = spark
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(
        self, definition: PipelineDefinition | str | os.PathLike[str], records: Sequence[Mapping[str, Any]]
    ) -> Trial:
        """What the definition, or the one in this file, makes of the records.

        A record is a mapping with `value` (a text, bytes, null, or anything else as JSON), or `value_base64`, and
        where wanted `key`, `headers`, `timestamp` (milliseconds or a time), `topic` and `partition`.
        """
        if not isinstance(definition, PipelineDefinition):
            definition = load_pipeline(os.fspath(definition)).definition
        source = replace(definition.source, bootstrap=None, settings={})
        sent = [_record(each, definition) for each in records]
        partitions = dict.fromkeys(definition.source.topics, 1)
        for topic, partition, _ in sent:
            partitions[topic] = max(partitions.get(topic, 1), partition + 1)
        with Broker() as broker:
            for topic, count in partitions.items():
                broker.create_topic(topic, count)
            producer = Producer(
                {"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 0, "log_level": 0}
            )
            for topic, partition, rest in sent:
                producer.produce(topic, partition=partition, **rest)
            if producer.flush(FLUSH_SECONDS):
                raise UsageError(f"the records could not be written within {FLUSH_SECONDS:.0f} s")
            alone = replace(definition, source=source)
            return run_trial(
                alone,
                bootstrap=broker.bootstrap_servers,
                spark=self._session(definition),
                replays=True,
            )

    def _session(self, definition: PipelineDefinition) -> SparkSession:
        if self._spark is None:
            from holdfast.pipeline.session import spark_session

            home = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-spark-"))
            self._spark = spark_session("tests", home, master="local[2]", settings=definition.spark)
            self._stack.callback(self._spark.stop)
        return self._spark


def _record(given: Mapping[str, Any], definition: PipelineDefinition) -> tuple[str, int, dict[str, Any]]:
    _refuse_unknown(given, RECORD, "a record")
    topics = definition.source.topics
    topic = given.get("topic") or (topics[0] if len(topics) == 1 else None)
    if topic is None:
        raise UsageError(
            f"a record needs a topic: the pipeline reads {definition.source.pattern or ', '.join(topics)}"
        )
    content: dict[str, Any] = {"value": _bytes(given.get("value")), "key": _bytes(given.get("key"))}
    if "value_base64" in given:
        content["value"] = base64.b64decode(given["value_base64"])
    headers = given.get("headers") or {}
    content["headers"] = [(name, _bytes(value)) for name, value in headers.items()]
    if (timestamp := given.get("timestamp")) is not None:
        moment = timestamp if isinstance(timestamp, int) else _moment_ms(timestamp)
        content["timestamp"] = moment
    return topic, int(given.get("partition", 0)), content


def _bytes(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return json.dumps(value, default=_plain).encode()


def _moment_ms(given: str | datetime) -> int:
    moment = datetime.fromisoformat(given) if isinstance(given, str) else given
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


# ---------------------------------------------------------------------------- cases of a file


@dataclass(frozen=True)
class Case:
    """Records, and what must become of them."""

    name: str
    records: Sequence[Mapping[str, Any]]
    expect: Mapping[str, Sequence[Row]]
    """Rows by sink, and `dead_letters`; of each row the columns that matter. A sink that is not named may have any."""


@dataclass(frozen=True)
class Cases:
    definition: PipelineDefinition
    cases: Sequence[Case]


def load_cases(path: str) -> Cases:
    """The cases of a file; `UsageError` names what is wrong with it."""
    try:
        with open(path, encoding="utf-8") as file:
            document = yaml.safe_load(file)
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("cases"), list):
        raise UsageError(f"{path}: write `pipeline: FILE` and a list `cases`, each with records and expect")
    _refuse_unknown(document, {"pipeline", "cases"}, path)
    file_of = document.get("pipeline")
    if not isinstance(file_of, str):
        raise UsageError(f"{path}: `pipeline` names the definition's file")
    definition = load_pipeline(os.path.join(os.path.dirname(path), file_of)).definition
    sinks = {*(sink.name for sink in definition.sinks), DEAD_LETTERS}
    cases = []
    for number, each in enumerate(document["cases"], 1):
        where = f"{path}: case {number}"
        if not isinstance(each, dict) or not isinstance(each.get("records"), list):
            raise UsageError(f"{where}: write a list `records`, and what to `expect`")
        _refuse_unknown(each, CASE, where)
        expect = each.get("expect")
        if not isinstance(expect, dict) or not expect:
            raise UsageError(f"{where}: `expect` has rows by sink ({', '.join(sorted(sinks))}); [] for none")
        _refuse_unknown(expect, sinks, f"{where}: expect")
        cases.append(
            Case(
                str(each.get("name", number)),
                each["records"],
                {name: rows or [] for name, rows in expect.items()},
            )
        )
    return Cases(definition, cases)


def _refuse_unknown(given: Mapping[str, Any], known: set[str] | frozenset[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"{where}: {name!r} is none of {', '.join(sorted(known))}")


def differences(case: Case, trial: Trial) -> Iterator[str]:
    """What is not as the case expects, a line each."""
    for sink, expected in case.expect.items():
        found = list(trial.dead_letters if sink == DEAD_LETTERS else trial.rows[sink])
        for wanted in sorted(expected, key=len, reverse=True):
            match = next((row for row in found if _agrees(wanted, row)), None)
            if match is None:
                yield f"{sink}: no row with {_text(wanted)}"
            else:
                found.remove(match)
        for row in found:
            yield f"{sink}: nobody expects {_text(row)}"


def _agrees(wanted: Mapping[str, Any], row: Row) -> bool:
    def is_as_wanted(name: str, value: Any) -> bool:
        found = row[name]
        return str(value) in str(found) if name == "error" else bool(comparable(value) == comparable(found))

    return all(name in row and is_as_wanted(name, value) for name, value in wanted.items())


def comparable(value: Any) -> Any:
    """The same for values that a YAML file and Spark write differently: times, dates, decimals, bytes, numbers."""
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, datetime):
        return (value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)).isoformat()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return {name: comparable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(each) for each in value]
    return value


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date) else comparable(value)


def _text(row: Mapping[str, Any]) -> str:
    return json.dumps(comparable(row), ensure_ascii=False, default=str)
