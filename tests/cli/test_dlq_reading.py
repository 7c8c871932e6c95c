"""Asking about dead letters while the cluster is only just settling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError, KafkaException

from holdfast.cli import dlq_reading
from holdfast.cli.dlq_reading import patiently


def failing(codes: list[int]) -> Callable[[float], str]:
    def call(seconds: float) -> str:
        assert seconds > 0
        if codes:
            raise KafkaException(KafkaError(codes.pop(0)))
        return "answer"

    return call


def test_a_coordinator_that_is_only_changing_is_asked_again() -> None:
    codes = [KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS]
    assert patiently(failing(codes)) == "answer"
    assert not codes


def test_a_refusal_is_told_at_once() -> None:
    codes = [KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.NOT_COORDINATOR]
    with pytest.raises(KafkaException):
        patiently(failing(codes))
    assert codes == [KafkaError.NOT_COORDINATOR]


def test_patience_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlq_reading, "ANSWER_S", 0.0)
    with pytest.raises(KafkaException):
        patiently(failing([KafkaError.NOT_COORDINATOR] * 3))
