"""Settings that lose messages: our clients refuse them, and name the risk."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.client import Consumer, UnsafeSetting


@pytest.mark.parametrize(
    ("risk", "config"),
    [
        ("HF301", {"enable.auto.commit": True}),
        ("HF305", {"auto.offset.reset": "latest"}),
        ("HF310", {"isolation.level": "read_uncommitted"}),
    ],
)
def test_a_setting_that_loses_messages_is_refused(risk: str, config: dict[str, Any]) -> None:
    with pytest.raises(UnsafeSetting, match=risk):
        Consumer("127.0.0.1:1", group="g", topics=["t"], config=config)
