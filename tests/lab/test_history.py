"""Histories on disk: what is written is read again, and what is no event is named and left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lab.checking import judge
from holdfast.lab.history import (
    LINE_BYTES_MAX,
    HistoryError,
    Recorder,
    parse_history,
    read_history,
    write_history,
)

GOOD = b'{"t":1,"actor":"p","event":"send","id":"a","topic":"t"}\n'


def recorded() -> Recorder:
    recorder = Recorder()
    recorder.add("send", "p", id="ä 1", topic="t")
    recorder.add("ack", "p", id="ä 1", topic="t", partition=0, offset=0)
    recorder.add("stored", "log", id="ä 1", topic="t", partition=0, offset=0)
    return recorder


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    history = recorded().history()
    write_history(history, tmp_path / "h.jsonl")
    assert read_history(tmp_path / "h.jsonl") == history


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{not json}\n", "not JSON"),
        (b"[1, 2]\n", "not an object"),
        (b'{"t":1,"actor":"p","event":"sent","id":"a"}\n', "no event is called 'sent'"),
        (b'{"t":1,"actor":"p","event":"send","id":"a"}\n', "'send' without 'topic'"),
        (b'{"actor":"p","event":"note","what":"x"}\n', "without 't'"),
        (b'{"t":1.5,"actor":"p","event":"note","what":"x"}\n', "t is 1.5"),
        (b'{"t":true,"actor":"p","event":"note","what":"x"}\n', "t is True"),
        (b'{"t":1,"actor":7,"event":"note","what":"x"}\n', "actor is 7"),
        (b'{"t":1,"actor":"p","event":"send","id":5,"topic":"t"}\n', "id is 5"),
        (
            b'{"t":1,"actor":"p","event":"stored","id":"a","topic":"t","partition":"0","offset":1}\n',
            "partition",
        ),
        (b'{"t":1,"actor":"p","event":"begin","txn":"x","ids":"ab"}\n', "ids is not a list"),
        (b'{"t":1,"actor":"p","event":"end","txn":"x","outcome":"perhaps"}\n', "'perhaps'"),
        (b'{"t":0,"actor":"p","event":"note","what":"x"}\n', "before that of an earlier line"),
        (b'{"t":2,"actor":"p","event":"note","what":"x"}', "cut off"),
        (b'{"t":2,"actor":"p","event":"note","what":"' + b"x" * LINE_BYTES_MAX + b'"}\n', "longer than"),
        (b"[" * 100_000 + b"\n", "not JSON"),
    ],
)
def test_a_line_that_is_no_event_is_named_by_its_number_and_the_rest_is_read(line: bytes, says: str) -> None:
    history = parse_history([GOOD, b"\n", line])
    assert len(history.events) == 1
    (problem,) = history.problems
    assert problem.startswith("line 3: ")
    assert says in problem


def test_a_history_with_a_broken_line_is_judged_in_part() -> None:
    lines = [event.as_line().encode() for event in recorded().events]
    assert judge(parse_history(lines)).verdict == "clean"
    found = judge(parse_history([*lines, b"broken\n"]))
    assert found.verdict == "partial"
    assert found.partial[0].startswith("line 4: ")


def test_a_recorder_refuses_what_is_no_event() -> None:
    with pytest.raises(HistoryError, match="'send' without 'topic'"):
        Recorder().add("send", "p", id="a")


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="No such file"):
        read_history(tmp_path / "none")


@given(st.lists(st.binary(max_size=40)))
def test_any_bytes_are_read_without_an_error(lines: list[bytes]) -> None:
    history = parse_history(lines)
    assert len(history.events) + len(history.problems) == sum(1 for each in lines if each.strip())


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_any_value_in_any_field_is_an_event_or_a_problem(value: object) -> None:
    for name in ("t", "actor", "event", "id", "topic"):
        document = {"t": 1, "actor": "p", "event": "send", "id": "a", "topic": "t", name: value}
        history = parse_history([json.dumps(document).encode() + b"\n"])
        assert len(history.events) + len(history.problems) == 1
