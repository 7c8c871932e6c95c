"""Dead letters: what they tell, what they lose when they are too large, and what never moves."""

from __future__ import annotations

import pytest

from holdfast.client.dead_letter_dialects import Headers, read_failure
from holdfast.client.dead_letters import add_dead_letter
from holdfast.client.errors import DeliveryFailed
from holdfast.client.messages import DeadLetter, Message, Origin
from holdfast.client.retries import History
from holdfast.client.side_topics import TooLargeToSetAside

MESSAGE = Message("orders", 2, 7, 1_700_000_000_000, b"k", b"v", (("trace", b"1"), ("hf-id", b"00ff:2:7")))


class Limited:
    """A topic that takes so many bytes of headers."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sent: list[tuple[str, Message, Headers]] = []

    def send(self, topic: str, message: Message, headers: Headers, *, source: str) -> None:
        if sum(len(value or b"") for _, value in headers) > self.limit:
            raise DeliveryFailed(
                "too large", code="MSG_SIZE_TOO_LARGE", is_final=True, topic=topic, partition=None
            )
        self.sent.append((topic, message, headers))


def failed() -> ValueError:
    try:
        raise ValueError("unlucky " * 200)
    except ValueError as error:
        return error


def test_a_dead_letter_tells_where_it_was_and_what_went_wrong() -> None:
    topics = Limited(100_000)
    add_dead_letter(topics, "mailer", "orders-dlt", MESSAGE, "5 attempts", failed(), 5)
    ((topic, message, headers),) = topics.sent
    failure = read_failure(headers)
    assert failure is not None
    assert (topic, message) == ("orders-dlt", MESSAGE)
    assert (failure.topic, failure.partition, failure.offset, failure.timestamp_ms) == (
        "orders",
        2,
        7,
        1_700_000_000_000,
    )
    assert (failure.group, failure.error, failure.reason, failure.attempts) == (
        "mailer",
        "ValueError",
        "5 attempts",
        5,
    )
    assert failure.stack is not None
    assert "in failed" in failure.stack
    assert failure.failed_ms is not None
    # Its id would make a deduplicating reader of this topic drop it.
    assert headers[:2] == (("trace", b"1"), ("hf-origin-id", b"00ff:2:7"))


def test_the_cause_of_a_chosen_dead_letter_is_told() -> None:
    topics = Limited(100_000)
    chosen = DeadLetter("no such customer")
    chosen.__cause__ = KeyError("4711")
    add_dead_letter(topics, "mailer", "orders-dlt", MESSAGE, "no such customer", chosen, 1)
    failure = read_failure(topics.sent[0][2])
    assert failure is not None
    assert (failure.error, failure.reason) == ("KeyError", "no such customer")


def test_the_history_of_retries_becomes_the_origin() -> None:
    topics = Limited(100_000)
    history = History(Origin("orders", 2, 7, 5), "mailer", attempts=3, step=1, first_ms=1, due_ms=2)
    retried = Message("orders-retry-1", 2, 0, 9, b"k", b"v", (("trace", b"1"), *history.headers()))
    add_dead_letter(topics, "mailer", "orders-dlt", retried, "enough", failed(), 1, History.read(retried))
    headers = topics.sent[0][2]
    failure = read_failure(headers)
    assert failure is not None
    assert (failure.place, failure.timestamp_ms, failure.attempts) == ("orders-2@7", 5, 4)
    assert not [name for name, _ in headers if name.startswith("hf-retry-")]


def test_copied_headers_of_retries_do_not_become_the_origin() -> None:
    topics = Limited(100_000)
    history = History(Origin("orders", 2, 7, 5), "mailer", attempts=3, step=1, first_ms=1, due_ms=2)
    copied = Message("invoices", 1, 4, 9, b"k", b"v", history.headers())
    add_dead_letter(topics, "mailer", "invoices-dlt", copied, "enough", failed(), 1)
    headers = topics.sent[0][2]
    failure = read_failure(headers)
    assert failure is not None
    assert (failure.place, failure.timestamp_ms, failure.attempts) == ("invoices-1@4", 9, 1)
    assert not [name for name, _ in headers if name.startswith("hf-retry-")]


def test_a_letter_too_large_loses_its_stack_then_its_words() -> None:
    for limit, has_stack, is_long in ((100_000, True, True), (2500, False, True), (600, False, False)):
        topics = Limited(limit)
        add_dead_letter(topics, "mailer", "orders-dlt", MESSAGE, "enough", failed(), 1)
        failure = read_failure(topics.sent[0][2])
        assert failure is not None
        assert (failure.stack is not None) == has_stack
        assert (len(failure.message or "") > 200) == is_long


def test_a_message_that_does_not_fit_at_all_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        TooLargeToSetAside, match=r"orders-2@7.*committed offset was not moved.*configs alter --topic"
    ):
        add_dead_letter(Limited(10), "mailer", "orders-dlt", MESSAGE, "enough", failed(), 1)


def test_other_refusals_are_not_tried_again() -> None:
    class Refuses(Limited):
        def send(self, topic: str, message: Message, headers: Headers, *, source: str) -> None:
            self.sent.append((topic, message, headers))
            raise DeliveryFailed(
                "no", code="TOPIC_AUTHORIZATION_FAILED", is_final=True, topic=topic, partition=None
            )

    topics = Refuses(0)
    with pytest.raises(DeliveryFailed):
        add_dead_letter(topics, "mailer", "orders-dlt", MESSAGE, "enough", failed(), 1)
    assert len(topics.sent) == 1
