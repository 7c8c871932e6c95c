"""The demo's orders and their count: what is sent follows from the seed, and what is missing is found."""

from __future__ import annotations

import json

import pytest

from holdfast.demo.count import Tally, count
from holdfast.demo.orders import PARTITIONS, SPACING_MS, Kind, Orders, definition_text

START_MS = 1_700_000_000_000
ORDERS = Orders(6_000, START_MS, seed=7)
GOOD = sorted(ORDERS.ids(Kind.ORDER) | ORDERS.ids(Kind.LATE))
MALFORMED = sorted(ORDERS.ids(Kind.MALFORMED))
ALL = list(range(ORDERS.count))


def test_a_message_is_the_same_whoever_asks_for_it() -> None:
    again = Orders(6_000, START_MS, seed=7)
    assert [again.message(number) for number in reversed(ALL)] == list(reversed(list(ORDERS)))
    assert list(Orders(6_000, START_MS, seed=8)) != list(ORDERS)


def test_every_kind_is_among_the_messages() -> None:
    assert {message.kind for message in ORDERS} == {Kind.ORDER, Kind.COPY, Kind.LATE, Kind.MALFORMED}


def test_a_copy_says_word_for_word_what_an_order_before_it_said() -> None:
    messages = list(ORDERS)
    for number in ORDERS.ids(Kind.COPY):
        original = messages[ORDERS.id_of(number)]
        assert original.number < number
        assert original.kind is Kind.ORDER
        assert (original.key, original.value) == (messages[number].key, messages[number].value)


def test_a_late_order_happened_hours_before_its_neighbours() -> None:
    for number in ORDERS.ids(Kind.LATE):
        at = json.loads(ORDERS.message(number).value)["at"]
        neighbour = json.loads(ORDERS.message(min(each for each in GOOD if each > number)).value)["at"]
        assert at[:13] < neighbour[:13]


def test_the_closing_messages_are_later_than_every_order_in_every_partition() -> None:
    closing = ORDERS.closing()
    assert [message.partition for message in closing] == list(range(PARTITIONS))
    newest = max(json.loads(message.value)["at"] for message in ORDERS if message.kind is Kind.ORDER)
    assert all(json.loads(message.value)["at"] > newest for message in closing)
    assert SPACING_MS > 0


def test_the_definition_is_one_that_a_pipeline_takes(tmp_path: object) -> None:
    from holdfast.pipeline.definition.loading import load_pipeline

    file = f"{tmp_path}/orders.yaml"
    with open(file, "w", encoding="utf-8") as text:
        text.write(definition_text("127.0.0.1:9092", 500))
    loaded = load_pipeline(file)
    assert not loaded.warnings
    assert loaded.definition.source.batch_records == 500


# ------------------------------------------------------------------------------- the count


def test_a_run_without_loss_is_whole() -> None:
    tally = count(ORDERS, [*ALL, *ALL[:50]], GOOD, MALFORMED)
    assert tally.is_whole
    assert (tally.orders, tally.malformed, tally.stored) == (len(GOOD), len(MALFORMED), 6_050)


def without(numbers: list[int], *some: int) -> list[int]:
    return [number for number in numbers if number not in some]


def test_an_order_that_never_reached_the_topic_is_lost_before_the_broker() -> None:
    copied = {ORDERS.id_of(number) for number in ORDERS.ids(Kind.COPY)}
    lost = next(number for number in GOOD if number not in copied)
    tally = count(ORDERS, without(ALL, lost), without(GOOD, lost), MALFORMED)
    assert tally.lost_before_broker == {lost}
    assert not tally.lost_behind_broker
    assert not tally.is_whole


def test_an_order_of_which_only_the_copy_reached_the_topic_was_stored() -> None:
    original = ORDERS.id_of(min(ORDERS.ids(Kind.COPY)))
    assert count(ORDERS, without(ALL, original), GOOD, MALFORMED).is_whole
    tally = count(ORDERS, without(ALL, original), without(GOOD, original), MALFORMED)
    assert tally.lost_behind_broker == {original}


@pytest.mark.parametrize("number", [GOOD[0], GOOD[-1], min(ORDERS.ids(Kind.LATE))])
def test_an_order_that_no_output_has_is_lost_behind_the_broker(number: int) -> None:
    tally = count(ORDERS, ALL, without(GOOD, number), MALFORMED)
    assert tally.lost_behind_broker == {number}
    assert (tally.lost, tally.is_whole) == (1, False)


def test_an_order_written_three_times_is_twice_too_many() -> None:
    tally = count(ORDERS, ALL, [*GOOD, GOOD[5], GOOD[5]], MALFORMED)
    assert tally.twice == {GOOD[5]}
    assert (tally.surplus_rows, tally.is_whole) == (2, False)


def test_a_late_order_may_be_there_as_often_as_the_topic_has_it() -> None:
    late = min(ORDERS.ids(Kind.LATE))
    assert count(ORDERS, [*ALL, late], [*GOOD, late], MALFORMED).is_whole
    assert count(ORDERS, ALL, [*GOOD, late], MALFORMED).twice == {late}


def test_a_malformed_message_is_missed_when_it_is_no_dead_letter() -> None:
    tally = count(ORDERS, ALL, GOOD, MALFORMED[1:])
    assert tally.untraced == {MALFORMED[0]}
    assert not tally.is_whole


def test_a_malformed_message_in_the_output_is_taken_for_a_good_one() -> None:
    tally: Tally = count(ORDERS, ALL, [*GOOD, MALFORMED[0]], MALFORMED[1:])
    assert tally.taken_for_good == {MALFORMED[0]}
    assert not tally.untraced
    assert not tally.is_whole
