"""The page of an audit: self-contained, safe whatever the data says, and true to the report."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from uuid import UUID

import pytest

from holdfast.audit import certificate, html, html_style, plots, words
from holdfast.audit.model import (
    Fate,
    Finding,
    PartitionAccount,
    Report,
    SinkAccount,
    Unproven,
    WindowAccount,
)
from holdfast.pipeline.positions import Place

MakeReport = Callable[..., Report]
EVIL = "<script>alert('1')</script>\" onload=\"x\u202e\x1b[31m"
VOID = {"meta", "br", "rect", "line"}


class Page(HTMLParser):
    """What a browser would make of it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def evil_report() -> Report:
    place = Place(EVIL, UUID(int=1), 0)
    finding = Finding(Fate.LOST, EVIL, place, ((1, 2),), 2, (EVIL, EVIL), EVIL)
    return Report(
        EVIL,
        partitions=(PartitionAccount(place, 0, 9, {"record": 9}, {"output": 7, "lost": 2}, 0, 12),),
        sinks=(SinkAccount(EVIL, EVIL, 7, 1, {f"{EVIL}-0": 9}, {"output": 7}, EVIL),),
        windows=(WindowAccount(EVIL, EVIL, 1, 1, 1, 1, 0),),
        findings=(finding,),
        unproven=(Unproven(EVIL, EVIL, is_gap=True),),
        lag={EVIL: 3},
        notes=(EVIL,),
        fingerprint=EVIL,
        versions={EVIL: EVIL},
    )


def test_a_key_that_is_a_script_is_shown_and_never_run() -> None:
    source = html.page(evil_report(), certificate.certify(evil_report(), None))
    page = Page(source)
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "alert('1')" in page.text
    assert "\x1b" not in source
    assert "\u202e" not in source


@pytest.mark.parametrize("wrong", [(), ("lost", "duplicated", "altered")])
def test_the_page_takes_nothing_from_elsewhere_and_forbids_it(
    make_report: MakeReport, wrong: tuple[str, ...]
) -> None:
    source = html.page(make_report(*wrong))
    page = Page(source)
    tags = {tag for tag, _ in page.tags}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base", "form"})
    assert not any(
        name in ("src", "href", "xlink:href", "action") for _, attributes in page.tags for name in attributes
    )
    assert re.findall(r"https?://|@import|url\((?!#)", source) == []
    policy = next(
        attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes and tag == "meta"
    )
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script-src" not in policy


def test_the_page_says_what_the_report_says(make_report: MakeReport) -> None:
    report = make_report("lost", "duplicated", "altered", unproven=("filtered", "expired"))
    text = Page(html.page(report)).text
    assert words.verdict_line(report) in text
    assert "204-206, 811" in text
    assert "c-118" in text
    assert "holdfast trace orders:1@204" in text
    assert "it counts 41 rows, not 42" in text
    for each in report.unproven:
        assert each.what in text
        assert each.why in text
    assert "the pipeline's first entry" in text


@pytest.mark.parametrize(
    ("wrong", "unproven", "verdict"),
    [((), ("filtered",), "proven"), (("lost",), (), "failed"), ((), ("expired",), "inconclusive")],
)
def test_the_colour_of_the_verdict_is_that_of_the_verdict(
    make_report: MakeReport, wrong: tuple[str, ...], unproven: tuple[str, ...], verdict: str
) -> None:
    page = Page(html.page(make_report(*wrong, unproven=unproven)))
    shown = [attributes["class"] for tag, attributes in page.tags if tag == "div"]
    assert [each for each in shown if each and each.startswith("verdict")] == [f"verdict {verdict}"]


def test_the_certificate_is_on_the_page(make_report: MakeReport) -> None:
    report = make_report()
    made = certificate.certify(report, certificate.certify(report, None))
    text = Page(html.page(report, made)).text
    assert made.sha256 in text
    assert made.previous is not None
    assert made.previous in text


def test_every_fate_has_its_colour_in_light_and_dark() -> None:
    assert all(f"svg .fate.{fate} {{" in html_style.sheet() for fate in Fate)
    light, _, dark = html_style.STYLE.partition("@media (prefers-color-scheme: dark)")
    for fate in Fate:
        assert f"--{fate}:" in light
        assert f"--{fate}:" in dark


def test_a_record_that_two_sinks_lack_is_one_line_with_both(make_report: MakeReport) -> None:
    place = Place("orders", UUID(int=7), 1)
    findings = [Finding(Fate.LOST, sink, place, ((3, 4),), 2, ("a", "b")) for sink in ("parquet", "postgres")]
    text = Page(html.page(make_report(*findings))).text
    assert text.count("holdfast trace orders:1@3") == 1
    assert "orders:1@4 b parquet, postgres holdfast trace orders:1@4" in text


def test_a_key_is_not_given_to_a_record_that_may_have_none(make_report: MakeReport) -> None:
    finding = Finding(Fate.LOST, "parquet", Place("orders", UUID(int=7), 1), ((3, 5),), 3, ("a", "b"))
    assert "orders:1@3 - parquet" in Page(html.page(make_report(finding))).text


def test_an_empty_report_is_a_page_too() -> None:
    assert Page(html.page(Report("nothing"))).open == []


# Plots


def rectangles(drawn: str, css: str) -> list[tuple[float, float]]:
    return [
        (float(x), float(width))
        for x, width in re.findall(
            rf'<rect x="([\d.-]+)" y="[\d.-]+" width="([\d.]+)"[^>]*class="{css}"', drawn
        )
    ]


def test_one_lost_offset_among_millions_can_be_seen_where_it_lies() -> None:
    mark = plots.Mark("lost", 7_500_000, 7_500_000, "lost")
    drawn = plots.gaps([plots.Bar("orders-0", 0, 10_000_000, (0, 10_000_000), (mark,))])
    ((x, width),) = rectangles(drawn, "fate lost")
    assert width == plots.MARK_PX
    left, right = plots.LABEL_PX, plots.WIDTH - 12
    assert x == pytest.approx(left + 0.75 * (right - left), abs=plots.MARK_PX)


def test_marks_at_the_ends_stay_in_the_picture() -> None:
    marks = (plots.Mark("lost", 0, 0, ""), plots.Mark("lost", 999_999, 999_999, ""))
    drawn = plots.gaps([plots.Bar("orders-0", 0, 1_000_000, (0, 1_000_000), marks)])
    for x, width in rectangles(drawn, "fate lost"):
        assert x >= plots.LABEL_PX
        assert x + width <= plots.WIDTH - 12 + 0.01


def test_what_was_not_looked_at_is_not_drawn_as_looked_at() -> None:
    drawn = plots.gaps([plots.Bar("orders-0", 0, 100, (25, 75))])
    ((x, width),) = rectangles(drawn, "seen")
    whole = plots.WIDTH - 12 - plots.LABEL_PX
    assert x == pytest.approx(plots.LABEL_PX + whole / 4)
    assert width == pytest.approx(whole / 2, abs=0.01)


def test_a_timeline_marks_faults_however_few() -> None:
    counts = {"output": (1_000_000, 1_000_000), "lost": (0, 1)}
    drawn = plots.timeline((0, 1000), counts, order=("output", "lost"), wrong=("lost",))
    widths = [width for _, width in rectangles(drawn, "fate lost")]
    assert len(widths) == 2
    assert max(widths) >= plots.MARK_PX
    assert "lost: 1 of 1,000,001" in drawn


def test_heights_of_a_timeline_add_up_to_the_counts() -> None:
    counts = {"output": (30, 10), "late": (10, 0)}
    drawn = plots.timeline((0, 1000), counts, order=("output", "late"), wrong=())
    heights = [float(each) for each in re.findall(r'height="([\d.]+)" class="fate', drawn)]
    assert heights[0] == pytest.approx(3 * heights[1], rel=0.01)
    assert heights[2] == pytest.approx(heights[1], rel=0.01)


@pytest.mark.parametrize("largest", [0, 1, 3, 7, 99, 1_234, 5_000_000, 10**12])
def test_axes_reach_what_they_show_in_round_steps(largest: int) -> None:
    ticks = plots.steps(largest)
    assert ticks[0] == 0
    assert ticks[-1] >= largest
    assert 2 <= len(ticks) <= plots.TICKS_MAX + 1
    assert all(tick == int(tick) for tick in ticks)


def test_nothing_to_draw_is_no_picture() -> None:
    assert plots.gaps([]) == plots.lags([]) == plots.timeline((), {}, order=(), wrong=()) == ""
