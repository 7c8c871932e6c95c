"""From figures to verdicts, to the table, to the stored file and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.measures import ALL
from bench.model import MeasureResult, Results, Round, Row
from bench.report import evaluate, figure, render, table


def result(rounds: list[Round], **missing: str) -> MeasureResult:
    return MeasureResult("speed", "2026-01-01 00:00 UTC", rounds, missing=missing)


def sides(*pairs: tuple[float, float]) -> list[Round]:
    return [{"ours": {"rate": mine}, "kafka": {"rate": other}} for mine, other in pairs]


HIGHER = Row("rate", "/s", "ours.rate", "kafka.rate", at_least=2.0)
LOWER = Row("latency", "µs", "ours.rate", "kafka.rate", at_most=0.5)


@pytest.mark.parametrize(
    ("row", "mine", "verdict"),
    [
        (HIGHER, 200.0, "met"),
        (HIGHER, 199.0, "not met"),
        (LOWER, 50.0, "met"),
        (LOWER, 51.0, "not met"),
        (Row("r", "s", "ours.rate", "kafka.rate"), 51.0, "reported"),
        (Row("r", "%", "ours.rate", "kafka.rate", below=2.0), 1.9, "met"),
        (Row("r", "%", "ours.rate", "kafka.rate", below=2.0), 2.0, "not met"),
        (Row("r", "%", "ours.rate", below=2.0), 1.0, "met"),
    ],
)
def test_verdict_compares_with_the_target(row: Row, mine: float, verdict: str) -> None:
    assert evaluate(row, result(sides((mine, 100.0)))).verdict == verdict


def test_verdict_goes_by_the_median_ratio_of_the_rounds() -> None:
    line = evaluate(HIGHER, result(sides((300, 100), (210, 100), (100, 100))))
    assert line.verdict == "met"
    assert line.ratio is not None
    assert line.ratio.median == pytest.approx(2.1)


def test_reaching_the_disks_own_rate_meets_the_target() -> None:
    row = Row(
        "bulk", "/s", "ours.rate", "kafka.rate", at_least=1.0, or_reaches="disk.mb", or_reaches_with="ours.mb"
    )
    rounds: list[Round] = [{"ours": {"rate": 50, "mb": 200}, "kafka": {"rate": 100}, "disk": {"mb": 190}}]
    assert evaluate(row, result(rounds)).verdict == "met"
    rounds[0]["ours"]["mb"] = 180
    line = evaluate(row, result(rounds))
    assert line.verdict == "not met"
    assert "disk alone 190 MB/s" in line.remark


def test_a_program_that_is_missing_is_named_in_the_report() -> None:
    row = Row("16 clients", "/s", "ours.rate", "redis.rate", against="Redis Streams", at_least=1.0)
    line = evaluate(row, result(sides((10, 1)), redis="redis-server is not installed"))
    assert line.verdict == "not measured"
    assert "redis-server is not installed" in table([line])


def test_what_was_never_run_is_not_measured() -> None:
    assert evaluate(HIGHER, None).verdict == "not measured"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0123, "0.012"), (0.5, "0.50"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346")],
)
def test_figures_have_about_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_a_partial_run_replaces_its_own_measure_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "results" / "latest.json"
    first = Results()
    first.merge([result(sides((1, 2))), MeasureResult("other", "then", sides((3, 4)))], {"processor": "old"})
    first.save(path)
    second = Results.load(path)
    second.merge([result(sides((5, 6)))], {"processor": "new"})
    second.save(path)
    final = Results.load(path)
    assert final.machine == {"processor": "new"}
    assert final.measures["speed"].values("ours.rate") == [5]
    assert final.measures["other"].values("kafka.rate") == [4]


def test_the_report_shows_every_row_and_counts_the_verdicts() -> None:
    results = Results(machine={"processor": "a fast one"}, measures={"speed": result(sides((300, 100)))})
    text = render({"speed": [HIGHER, LOWER]}, results, {"speed": "Speed"})
    assert "Of 2 targets measured, 1 are met and 1 are not." in text
    assert "| rate | 300 /s | 100 /s | 3.00× | 3.00 – 3.00 | ≥ 2× | met |" in text
    assert "**not met**" in text
    assert "a fast one" in text


def test_the_plot_is_drawn_from_the_same_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib comes with `make bench`")
    from bench.plot import draw

    lines = [evaluate(HIGHER, result(sides((300, 100), (200, 100)))), evaluate(LOWER, None)]
    draw(lines, tmp_path / "ratios.svg")
    assert "<svg" in (tmp_path / "ratios.svg").read_text(encoding="utf-8")


def test_every_measure_has_a_name_of_its_own_and_rows() -> None:
    names = [each.name for each in ALL]
    assert len(set(names)) == len(names)
    titles = [row.title for each in ALL for row in each.rows]
    assert len(set(titles)) == len(titles)
    for each in ALL:
        for row in each.rows:
            for metric in (row.ours, row.theirs, row.or_reaches, row.or_reaches_with):
                assert metric is None or metric.count(".") == 1, f"{row.title}: {metric}"
