"""Prometheus' own parser reads what the exposition writes, whatever labels hold."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.support.tiers import examples

from holdfast.errors import UsageError
from holdfast.exposition import (
    SECONDS,
    SERIES_MAX,
    Family,
    Histogram,
    Numbers,
    Sheet,
    parse_address,
    quantile,
    served,
    table,
)

FAMILIES = table(
    Family("messages_total", "counter", "Messages.", ("topic",)),
    Family("depth", "gauge", "How deep."),
    Family("took_seconds", "histogram", "How long.", ("phase",)),
)


def read(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@settings(max_examples=examples(50))
@given(topic=st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1))
def test_any_label_comes_back_from_prometheus_parser(topic: str) -> None:
    numbers = Numbers(FAMILIES, subject="orders")
    numbers.add("messages_total", 3, topic=topic)
    key = ("messages_total", frozenset({("subject", "orders"), ("topic", topic)}))
    assert read(numbers.text())[key] == 3


def test_a_histogram_adds_up() -> None:
    numbers = Numbers(FAMILIES)
    for value in (0.00005, 0.3, 99.0):
        numbers.observe("took_seconds", value, phase="write")
    found = read(numbers.text())
    of = ("phase", "write")
    assert found["took_seconds_bucket", frozenset({of, ("le", "0.0001")})] == 1
    assert found["took_seconds_bucket", frozenset({of, ("le", "0.5")})] == 2
    assert found["took_seconds_bucket", frozenset({of, ("le", "+Inf")})] == 3
    assert found["took_seconds_count", frozenset({of})] == 3
    assert found["took_seconds_sum", frozenset({of})] == pytest.approx(99.30005)


def test_what_is_set_is_replaced_and_what_is_added_grows() -> None:
    numbers = Numbers(FAMILIES)
    for value in (5, 2):
        numbers.set("depth", value)
        numbers.add("messages_total", value, topic="a")
    assert read(numbers.text()) == {
        ("depth", frozenset()): 2,
        ("messages_total", frozenset({("topic", "a")})): 7,
    }
    numbers.forget("depth")
    assert "depth" not in numbers.text()


def test_series_are_bounded() -> None:
    numbers = Numbers(FAMILIES)
    for number in range(SERIES_MAX + 10):
        numbers.add("messages_total", topic=str(number))
    numbers.add("messages_total", topic="0")
    found = read(numbers.text())
    assert len(found) == SERIES_MAX
    assert found["messages_total", frozenset({("topic", "0")})] == 2


def test_a_sheet_leaves_out_what_has_nothing_to_say() -> None:
    sheet = Sheet(FAMILIES)
    sheet.put("depth", True)
    sheet.put_histogram("took_seconds", Histogram((1.0,)), phase="read")
    text = "".join(sheet.pieces())
    assert "# TYPE depth gauge\ndepth 1\n" in text
    assert "messages_total" not in text


def test_quantiles_are_as_exact_as_the_bounds() -> None:
    histogram = Histogram()
    for _ in range(99):
        histogram.observe(0.003)
    histogram.observe(20.0)
    assert 0.0025 <= quantile(SECONDS, histogram.counts, 0.5) <= 0.005
    assert quantile(SECONDS, histogram.counts, 0.999) > 10
    assert quantile(SECONDS, [0] * len(histogram.counts), 0.5) == 0


def test_what_is_noted_is_counted_like_what_is_observed() -> None:
    values = (0.0, 0.0001, 0.00011, 0.3, 29.0, 31.0)
    noted, observed = Histogram(), Histogram()
    for value in values:
        noted.note(value)
        observed.observe(value)
    noted.add_up()
    noted.note(7.0)
    observed.observe(7.0)
    assert list(noted.lines("took")) == list(observed.lines("took"))
    assert list(noted.lines("took")) == list(observed.lines("took")), "counted once"


def test_numbers_are_served_until_the_block_ends() -> None:
    numbers = Numbers(FAMILIES)
    numbers.set("depth", 1)
    with served(numbers.text, *parse_address("0")) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.read().decode() == numbers.text()
        with pytest.raises(UsageError, match="cannot listen"), served(numbers.text, "127.0.0.1", port):
            pass
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
