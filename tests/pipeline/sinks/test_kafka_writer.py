"""Which of several reports a writer of the Kafka sink names."""

from __future__ import annotations

from confluent_kafka import KafkaError

from holdfast.pipeline.sinks.kafka_writer import Writer


class Report:
    """A record that was reported on."""

    def __init__(self, topic: str, size: int) -> None:
        self._topic, self._size = topic, size

    def topic(self) -> str:
        return self._topic

    def key(self) -> bytes:
        return b""

    def value(self) -> bytes:
        return b"x" * self._size


def said(writer: Writer) -> str:
    return writer._refused or ""


def test_what_fell_with_another_record_is_not_the_reason() -> None:
    writer = Writer("kafka", "hf-test", {"bootstrap.servers": "127.0.0.1:1"})
    writer._delivered(KafkaError(KafkaError._PURGE_QUEUE), Report("ledger", 513))
    assert not said(writer)
    writer._delivered(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), Report("out", 2_000_000))
    writer._delivered(KafkaError(KafkaError._PURGE_INFLIGHT), Report("out", 7))
    assert "'out' did not take a record of 2000000 bytes" in said(writer)
    writer.close()
