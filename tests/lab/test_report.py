"""What is made of results: pictures, a page, a table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast.lab.checking import judge
from holdfast.lab.engines import Engines
from holdfast.lab.experiment import Result, run_experiment
from holdfast.lab.experiments import EXPERIMENTS
from holdfast.lab.history import History, Recorder
from holdfast.lab.report import (
    ROWS_MAX,
    ResultsError,
    load_results,
    page,
    save_result,
    timeline_svg,
    write_report,
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Result]:
    with Engines(tmp_path_factory.mktemp("lab")) as engines:
        yield run_experiment(EXPERIMENTS["HF206"], engines, "holdfast")


def drawn(picture: str) -> list[str]:
    root = ElementTree.fromstring(picture)
    return [element.text or "" for element in root.iter() if element.tag.endswith("text")]


def test_a_picture_has_a_row_for_each_message_and_says_what_was_lost(result: Result) -> None:
    unsafe = result.unsafe
    texts = drawn(timeline_svg("HF206", [("unsafe", unsafe.history, unsafe.judgement)]))
    lost = unsafe.judgement.ids("lost")
    assert lost
    assert sum(text == "✗ lost" for text in texts) == len(lost)
    assert set(lost) <= set(texts)
    assert any(text.startswith("⚡1 ") for text in texts)


def many(count: int, gone: set[int]) -> History:
    recorder = Recorder()
    for number in range(count):
        recorder.add("send", "p", id=f"m{number}", topic="t")
        recorder.add("ack", "p", id=f"m{number}", topic="t", partition=0, offset=number)
    for number in set(range(count)) - gone:
        recorder.add("stored", "log", id=f"m{number}", topic="t", partition=0, offset=number)
    recorder.add("log-end", "log", topic="t")
    return recorder.history()


def test_of_many_messages_those_in_violation_are_drawn_first() -> None:
    history = many(500, {321, 499})
    texts = drawn(timeline_svg("x", [("unsafe", history, judge(history))]))
    rows = [text for text in texts if re.fullmatch(r"m\d+", text)]
    assert len(rows) <= ROWS_MAX
    assert {"m321", "m499"} <= set(rows)
    assert any(f"{len(rows)} of 500 messages drawn" in text for text in texts)


def test_an_empty_history_has_a_picture_too() -> None:
    assert "0.0 s" in timeline_svg("x", [("unsafe", History(()), judge(History(())))])


def test_names_from_a_history_cannot_break_the_page() -> None:
    recorder = Recorder()
    recorder.add("send", "<p>", id="<script>&", topic="t")
    recorder.add("fault", "lab", what="</svg><b>")
    history = recorder.history()
    texts = drawn(timeline_svg("<x>", [("unsafe", history, judge(history))]))
    assert "<script>&" in texts


def test_the_page_needs_no_other_file(result: Result) -> None:
    text = page([result], EXPERIMENTS)
    assert "HF206 on holdfast: HELD" in text
    assert "<svg" in text
    assert re.findall(r'(?:src|href)="', text) == []


def test_a_report_has_a_table_and_pictures(result: Result, tmp_path: Path) -> None:
    save_result(result, tmp_path / "results")
    write_report(tmp_path / "report", load_results(tmp_path / "results"), EXPERIMENTS)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["HF206.svg", "README.md"]
    assert "| [HF206](../risks/HF206.md)" in (tmp_path / "report" / "README.md").read_text()


def test_a_directory_without_results_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no results in"):
        load_results(tmp_path)


def test_a_damaged_result_is_named(result: Result, tmp_path: Path) -> None:
    folder = save_result(result, tmp_path)
    (folder / "result.json").write_text('{"id": "HF206"}')
    with pytest.raises(ResultsError, match=r"HF206-holdfast-1/result.json is no result"):
        load_results(tmp_path)
