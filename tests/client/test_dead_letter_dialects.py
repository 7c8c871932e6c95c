"""Headers of dead letters: every dialect is read, one is written, nothing another program wrote breaks us."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.dead_letter_dialects import (
    DIALECTS,
    PREFIXES,
    STACK_BYTES_MAX,
    TEXT_BYTES_MAX,
    Dialect,
    Failure,
    Header,
    class_name,
    failure_headers,
    read_failure,
    stack_of,
    without_failure,
)

FULL = Failure("t", 1, 2, 3, "g", "e", "m", "r", "s", 4, 5)

texts = st.text(max_size=40)
names = st.text(min_size=1, max_size=40)
int32 = st.integers(0, 2**31 - 1)
int64 = st.integers(0, 2**63 - 1)
failures = st.builds(
    Failure,
    topic=names,
    partition=int32,
    offset=int64,
    timestamp_ms=st.none() | int64,
    group=st.none() | texts,
    error=st.none() | names,
    message=st.none() | texts,
    reason=st.none() | texts,
    stack=st.none() | texts,
    attempts=st.none() | int32,
    failed_ms=st.none() | int64,
)
foreign = st.lists(
    st.tuples(
        texts.filter(lambda name: not name.startswith(tuple(PREFIXES.values()))), st.none() | st.binary()
    )
)
known_names = st.sampled_from([name for dialect in DIALECTS for name, _ in failure_headers(FULL, dialect)])


@given(failures, foreign)
def test_ours_says_everything_and_leaves_the_message_as_it_was(failure: Failure, own: list[Header]) -> None:
    headers = (*own, *failure_headers(failure))
    assert read_failure(headers) == failure
    assert without_failure(headers, "holdfast") == tuple(own)


@given(failures, st.sampled_from(DIALECTS), foreign)
def test_what_is_written_in_any_dialect_is_read_back(
    failure: Failure, dialect: Dialect, own: list[Header]
) -> None:
    headers = (*own, *failure_headers(failure, dialect))
    found = read_failure(headers)
    assert found is not None
    assert (found.dialect, found.topic, found.partition, found.offset) == (
        dialect,
        failure.topic,
        failure.partition,
        failure.offset,
    )
    assert (found.error, found.message, found.stack) == (failure.error, failure.message, failure.stack)
    assert without_failure(headers, dialect) == tuple(own)


@given(st.lists(st.tuples(known_names | texts, st.none() | st.binary(max_size=30))))
def test_nothing_that_headers_hold_raises(headers: list[Header]) -> None:
    found = read_failure(headers)
    if found is not None:
        assert found.place
        assert len(without_failure(headers, found.dialect)) < len(headers)


@given(failures, failures)
def test_the_last_failure_counts_and_taking_it_away_uncovers_the_one_before(
    first: Failure, second: Failure
) -> None:
    headers = (*failure_headers(first), *failure_headers(second))
    assert read_failure(headers) == second
    assert read_failure(without_failure(headers, "holdfast")) == first


@given(st.text(min_size=1, max_size=9).map(lambda text: text * TEXT_BYTES_MAX), st.sampled_from(DIALECTS))
def test_texts_are_bounded(text: str, dialect: Dialect) -> None:
    failure = Failure("t", 0, 0, message=text, error=text, reason=text, stack=text * 5)
    size = sum(len(value or b"") for _, value in failure_headers(failure, dialect))
    assert size <= 3 * TEXT_BYTES_MAX + STACK_BYTES_MAX + 10
    short = failure_headers(failure.shortened(), dialect)
    assert sum(len(value or b"") for _, value in short) <= 700


# KIP-1034: numbers are text.
STREAMS = [
    ("__streams.errors.exception", b"org.apache.kafka.common.errors.SerializationException"),
    ("__streams.errors.message", b"Size of data received by LongDeserializer is not 8"),
    ("__streams.errors.stacktrace", b"org.apache\n\tat ..."),
    ("__streams.errors.topic", b"clicks"),
    ("__streams.errors.partition", b"3"),
    ("__streams.errors.offset", b"1234567890123"),
]
# KIP-298
CONNECT = [
    ("__connect.errors.topic", b"orders"),
    ("__connect.errors.partition", b"1"),
    ("__connect.errors.offset", b"42"),
    ("__connect.errors.connector.name", b"jdbc-sink"),
    ("__connect.errors.task.id", b"0"),
    ("__connect.errors.stage", b"VALUE_CONVERTER"),
    ("__connect.errors.class.name", b"org.apache.kafka.connect.json.JsonConverter"),
    ("__connect.errors.exception.class.name", b"org.apache.kafka.connect.errors.DataException"),
    ("__connect.errors.exception.message", None),
]
# Spring Kafka: integers in network order, the wrapper's class beside the cause's.
SPRING = [
    ("kafka_dlt-original-topic", b"news.editorial.v1"),
    ("kafka_dlt-original-partition", (2).to_bytes(4, "big")),
    ("kafka_dlt-original-offset", (45).to_bytes(8, "big")),
    ("kafka_dlt-original-timestamp", (1_700_000_000_000).to_bytes(8, "big")),
    ("kafka_dlt-original-timestamp-type", b"CreateTime"),
    ("kafka_dlt-original-consumer-group", b"article-review"),
    ("kafka_dlt-exception-fqcn", b"org.springframework.kafka.listener.ListenerExecutionFailedException"),
    ("kafka_dlt-exception-cause-fqcn", b"java.nio.file.AccessDeniedException"),
    ("kafka_dlt-exception-message", b"no"),
    ("retry_topic-attempts", (4).to_bytes(4, "big")),
]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (
            STREAMS,
            Failure(
                "clicks",
                3,
                1234567890123,
                error="org.apache.kafka.common.errors.SerializationException",
                message="Size of data received by LongDeserializer is not 8",
                stack="org.apache\n\tat ...",
                dialect="streams",
            ),
        ),
        (
            CONNECT,
            Failure(
                "orders",
                1,
                42,
                group="jdbc-sink",
                error="org.apache.kafka.connect.errors.DataException",
                reason="VALUE_CONVERTER",
                dialect="connect",
            ),
        ),
        (
            SPRING,
            Failure(
                "news.editorial.v1",
                2,
                45,
                1_700_000_000_000,
                "article-review",
                "java.nio.file.AccessDeniedException",
                "no",
                attempts=4,
                dialect="spring",
            ),
        ),
    ],
)
def test_what_others_write_is_understood(headers: list[Header], expected: Failure) -> None:
    own: Header = ("trace", b"7")
    assert read_failure([own, *headers]) == expected
    assert without_failure([own, *headers], expected.dialect) == (own,)


def test_ours_on_top_of_anothers_counts_until_it_is_taken_away() -> None:
    ours = failure_headers(Failure("news-dlt", 0, 7))
    headers = (*SPRING, *ours)
    found = read_failure(headers)
    assert found is not None
    assert found.topic == "news-dlt"
    assert without_failure(headers, "holdfast") == tuple(SPRING)


def test_no_headers_of_any_dialect_say_nothing() -> None:
    assert read_failure([("trace", b"7"), ("hf-id", b"x:0:1")]) is None


def test_errors_are_named_as_their_users_write_them() -> None:
    class Own(ValueError):
        pass

    assert class_name(ValueError()) == "ValueError"
    assert class_name(Own()).startswith(__name__)
    with pytest.raises(Own) as raised:
        raise Own("deep")
    assert stack_of(raised.value).rstrip().endswith("deep")
