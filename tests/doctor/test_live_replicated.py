"""What the doctor says of three brokers of Apache Kafka 4.3 as they go away, from answers recorded there.

The topics' replicas: `sound` on 1, 2 and 3 with min.insync.replicas=2; `alone` on 1 and 2, `pair` on 2 and 3, `offline`
on 3, each with 1; `__consumer_offsets` on 3. First all are there, then 3 is killed, then 2. Broker 1 is asked.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.admin.errors import UnsupportedBroker
from holdfast.doctor.findings import Examination
from holdfast.doctor.live import judge
from holdfast.doctor.live_collect import collect
from holdfast.wire.api_keys import DESCRIBE_TOPIC_PARTITIONS, METADATA
from holdfast.wire.messages import decode_response

RECORDED = Path(__file__).parent / "recorded"
BY_SETTINGS = {
    ("HF211", "topic __consumer_offsets"),
    ("HF201", "topic offline"),
    ("HF201", "topic alone"),
    ("HF201", "topic pair"),
    ("HF202", "topic alone"),
    ("HF202", "topic pair"),
    ("HF201", "brokers"),
    ("HF202", "brokers"),
    ("HF205", "cluster"),
}
"""Said whoever is away."""


class Recorded:
    """The answers of a cluster, in the order in which they were asked for."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self._answers = iter(answers)

    def metadata(self, topics: Iterable[str] | None, *, lowest: int = 1) -> Any:
        return self._next(None, METADATA)

    def ask_any(self, api_key: int, fields: Mapping[str, Any], *, lowest: int = 0) -> Any:
        return self._next(None, api_key)

    def ask_broker(
        self, broker_id: int, api_key: int, fields: Mapping[str, Any], *, lowest: int = 0, highest: int = 99
    ) -> Any:
        return self._next(broker_id, api_key)

    def _next(self, broker_id: int | None, api_key: int) -> Any:
        answer = next(self._answers)
        assert (answer["broker"], answer["api"]) == (broker_id, api_key), "it asks otherwise than it did"
        return decode_response(api_key, answer["version"], base64.b64decode(answer["answer"]))


class Older(Recorded):
    """A cluster that keeps no account of who may lead."""

    def ask_any(self, api_key: int, fields: Mapping[str, Any], *, lowest: int = 0) -> Any:
        if api_key == DESCRIBE_TOPIC_PARTITIONS:
            raise UnsupportedBroker("too old")
        return super().ask_any(api_key, fields, lowest=lowest)


def examined(name: str) -> Examination:
    look = json.loads((RECORDED / f"{name}.json").read_text("ascii"))
    return judge(collect(Recorded(look["answers"]), (), lambda: int(look["time_ms"])))


def words(examination: Examination, risk_id: str, where: str) -> str:
    return " | ".join(
        f"{found.found}: {'' if found.fix is None else found.fix.text}"
        for found in examination.findings
        if (found.id, found.where) == (risk_id, where)
    )


def told(examination: Examination) -> set[tuple[str, str]]:
    return {(found.id, found.where) for found in examination.findings}


def test_with_every_broker_there_only_settings_are_at_fault() -> None:
    examination = examined("whole")
    assert told(examination) == BY_SETTINGS | {("HF206", "cluster")}
    assert examination.complete
    assert "3 brokers: 5 topics, 5 partitions, 1 group" in examination.examined[0]


def test_a_broker_away_is_told_with_whom_to_bring_back() -> None:
    examination = examined("one-away")
    now = {("HF201", "topic sound"), ("HF203", "topic offline"), ("HF203", "topic __consumer_offsets")}
    assert told(examination) == BY_SETTINGS | now
    assert "out of sync now: partition 0: bring back broker 3" in words(examination, "HF201", "topic sound")
    assert "acknowledges alone now: partition 0" in words(examination, "HF202", "topic pair")
    assert "no leader: partition 0" in words(examination, "HF203", "topic offline")


def test_under_the_minimum_writes_are_refused() -> None:
    # HF203
    examination = examined("two-away")
    refused = words(examination, "HF203", "topic sound")
    assert "min.insync.replicas=2: partition 0 refuses writes" in refused
    assert "bring back brokers 2, 3" in refused
    assert "acknowledges alone now" in words(examination, "HF202", "topic alone")


def test_of_a_partition_without_a_leader_only_who_led_last_helps() -> None:
    # HF204: 2 led it alone when it went; 3 is older, and its election would be an unclean one.
    offline = words(examined("two-away"), "HF203", "topic pair")
    assert offline.endswith("the last leader say: broker 2")


def test_where_the_cluster_cannot_say_who_led_last_every_replica_is_named() -> None:
    look = json.loads((RECORDED / "two-away.json").read_text("ascii"))
    without = [each for each in look["answers"] if each["api"] != DESCRIBE_TOPIC_PARTITIONS]
    assert len(without) == len(look["answers"]) - 1
    snapshot = collect(Older(without), (), lambda: int(look["time_ms"]))
    assert words(judge(snapshot), "HF203", "topic pair").endswith("the last leader say: brokers 2, 3")


def test_the_last_of_three_brokers_is_no_cluster_of_one() -> None:
    assert ("HF201", "cluster") not in told(examined("two-away"))


@pytest.mark.parametrize("name", ["one-away", "two-away"])
def test_groups_that_nobody_coordinates_are_missed_and_not_absent(name: str) -> None:
    examination = examined(name)
    (gap,) = examination.gaps
    assert (gap.what, gap.kind) == ("groups: those of __consumer_offsets-0", "connection")
    assert not examination.complete
