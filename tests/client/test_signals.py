"""Lines for the operator reach standard error or nobody; nothing that is done depends on them."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from holdfast.client.process import say


def test_a_line_without_a_standard_error_does_not_go_to_the_programs_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    say("nobody reads this")
    assert capsys.readouterr().out == ""


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_standard_error_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for gone in (Broken(), closed):
        monkeypatch.setattr(sys, "stderr", gone)
        say("nobody reads this")
