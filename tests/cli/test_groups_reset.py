"""What the flags of `groups reset-offsets` mean, and the files it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.groups_reset import parse_datetime, parse_duration, parse_topics, read_plans
from holdfast.errors import UsageError


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("1970-01-01T00:00:00.000", 0),
        ("2026-01-31T12:00:00.500", 1_769_860_800_500),
        ("2026-01-31T12:00:00", 1_769_860_800_000),
        ("2026-01-31T12:00:00.500Z", 1_769_860_800_500),
        ("2026-01-31T12:00:00.500+02:00", 1_769_853_600_500),
        ("2026-01-31T12:00:00.500+0200", 1_769_853_600_500),
        ("2026-01-31T12:00:00.500-02", 1_769_868_000_500),
    ],
)
def test_a_time_is_utc_unless_it_says_otherwise(text: str, milliseconds: int) -> None:
    assert parse_datetime(text) == milliseconds


@pytest.mark.parametrize(
    "text", ["", "yesterday", "2026-01-31", "2026-13-01T00:00:00", "12:00:00", "2026-01-31 12:00:00"]
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--to-datetime"):
        parse_datetime(text)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("P7D", 604_800_000),
        ("PT12H", 43_200_000),
        ("P1DT2H30M10S", 95_410_000),
        ("PT0.5S", 500),
        ("pt1m", 60_000),
        ("-PT1M", -60_000),
        ("PT-1M", -60_000),
        ("PT-1.5S", -1_500),
        ("PT1H-1M", 3_540_000),
    ],
)
def test_durations_are_those_of_java(text: str, milliseconds: int) -> None:
    assert parse_duration(text) == milliseconds


@pytest.mark.parametrize("text", ["", "P", "PT", "P1DT", "1D", "P1W", "P1M", "P1Y", "PT1D", "PT1", "PT1H1H"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--by-duration"):
        parse_duration(text)


def test_topics_come_with_partitions_or_whole() -> None:
    assert parse_topics(["a", "b:2,0", "b:1", "c:1", "c", "a:3"]) == {"a": None, "b": [0, 1, 2], "c": None}


@pytest.mark.parametrize("text", ["", ":", ":0", "a:", "a:x", "a:0,", "a:-1", "a:0:1"])
def test_what_is_no_topic_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--topic"):
        parse_topics([text])


def test_a_file_of_one_group_needs_no_group_in_it(tmp_path: Path) -> None:
    plan = tmp_path / "plan.csv"
    plan.write_text('orders,0,7\n\n"orders", 1 ,8\n')
    assert read_plans(str(plan), ["g"]) == {"g": {("orders", 0): 7, ("orders", 1): 8}}


def test_a_file_of_several_groups_names_them(tmp_path: Path) -> None:
    plan = tmp_path / "plan.csv"
    plan.write_text('g,orders,0,7\n"h,h",orders,0,8\n')
    expected = {"g": {("orders", 0): 7}, "h,h": {("orders", 0): 8}}
    assert read_plans(str(plan), []) == expected
    assert read_plans(str(plan), ["g"]) == expected


@pytest.mark.parametrize(
    ("text", "groups", "problem"),
    [
        ("", ["g"], "is empty"),
        ("orders,0,7\n", ["g", "h"], "line 1 .* is not group,topic,partition,offset"),
        ("orders,0,7\norders,0\n", ["g"], "line 2 .* is not topic,partition,offset"),
        ("orders,x,7\n", ["g"], "line 1 .* whole numbers"),
        ("orders,0,-7\n", ["g"], "line 1 .* whole numbers"),
        (",0,7\n", ["g"], "line 1 .* not empty"),
        ("orders,0,7\norders,0,8\n", ["g"], "line 2 .* orders-0 of group 'g' a second time"),
    ],
)
def test_a_file_that_makes_no_plan_is_refused(
    tmp_path: Path, text: str, groups: list[str], problem: str
) -> None:
    plan = tmp_path / "plan.csv"
    plan.write_text(text)
    with pytest.raises(UsageError, match=problem):
        read_plans(str(plan), groups)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the plan"):
        read_plans(str(tmp_path / "nowhere"), ["g"])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is no CSV file"):
        read_plans(str(tmp_path / "binary"), ["g"])
