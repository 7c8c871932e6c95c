"""What librdkafka says at the start of a spooled producer."""

from __future__ import annotations

import time

import pytest

from holdfast.client.spool.deliverer import logged_producer


def test_the_setting_a_spool_rests_on_is_no_news_and_a_missing_broker_is(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    producer = logged_producer(
        {
            "bootstrap.servers": "127.0.0.1:1",
            "enable.idempotence": True,
            "enable.gapless.guarantee": True,
        }
    )
    end = time.monotonic() + 30
    while "Connection refused" not in caplog.text and time.monotonic() < end:
        producer.poll(0.1)
    assert "Connection refused" in caplog.text
    assert "gapless" not in caplog.text
    assert "CONFWARN" not in capfd.readouterr().err
