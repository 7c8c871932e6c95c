"""A report on a terminal and in a pipe."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID
from xml.etree import ElementTree

import pytest
from rich.console import Console

from holdfast.audit import junit, text, words
from holdfast.audit.model import Fate, Finding, Report, Unproven
from holdfast.pipeline.positions import Place

MakeReport = Callable[..., Report]


def shown(report: Report) -> str:
    to = io.StringIO()
    text.print_report(report, to)
    return to.getvalue()


def on_terminal(report: Report, width: int = 200) -> str:
    to = io.StringIO()
    Console(file=to, width=width, force_terminal=True, highlight=False, markup=False).print(
        text.renderable(report)
    )
    return to.getvalue()


@pytest.mark.parametrize(
    ("wrong", "unproven", "line"),
    [
        ((), ("filtered",), "lost 0, duplicated 0: proven"),
        (("lost",), (), "lost 4, duplicated 0: failed"),
        (("lost", "duplicated", "altered"), ("expired",), "lost 4, duplicated 1, altered 1: failed"),
        (
            (),
            ("expired",),
            "lost 0, duplicated 0: inconclusive, because offsets 0 to 99 of orders-0: they expired before the audit",
        ),
    ],
)
def test_the_last_line_is_the_verdict(
    make_report: MakeReport, wrong: tuple[str, ...], unproven: tuple[str, ...], line: str
) -> None:
    assert shown(make_report(*wrong, unproven=unproven)).splitlines()[-1] == line


def test_a_record_that_two_sinks_lack_is_lost_once(make_report: MakeReport) -> None:
    place = Place("orders", UUID(int=7), 1)
    findings = [Finding(Fate.LOST, sink, place, ((3, 4),), 2) for sink in ("parquet", "postgres")]
    report = replace(make_report(), findings=tuple(findings))
    assert report.total(Fate.LOST) == 2
    assert replace(report, partitions=()).total(Fate.LOST) == 2
    file = Finding(Fate.LOST, "parquet", detail="a file")
    assert replace(report, findings=(*findings, file)).total(Fate.LOST) == 3


def test_findings_name_ranges_and_keys(make_report: MakeReport) -> None:
    lines = shown(make_report("lost", "duplicated")).splitlines()
    lost = next(line for line in lines if line.startswith("lost  "))
    assert "204-206, 811" in lost
    assert "c-118, c-9" in lost
    assert "orders-1" in lost


def test_accounts_of_partitions_have_a_sum(make_report: MakeReport) -> None:
    lines = shown(make_report()).splitlines()
    total = next(line for line in lines if line.startswith("all "))
    assert total.split() == ["all", "2,970", "30", "2,700", "90", "180", "0", "0"]


def test_what_is_not_proven_is_always_printed_and_gaps_come_first(make_report: MakeReport) -> None:
    lines = shown(make_report(unproven=("filtered", "expired"))).splitlines()
    at = lines.index("not proven")
    assert lines[at + 1].startswith("  ! offsets 0 to 99")
    assert lines[at + 2].startswith("  - that step")


def test_a_key_cannot_write_on_the_terminal() -> None:
    evil = "\x1b[2J[bold]x[/bold]\nlost 0: proven\u202e"
    place = Place(evil, UUID(int=1), 0)
    report = Report(
        evil,
        findings=(Finding(Fate.LOST, evil, place, ((1, 1),), 1, (evil,), evil),),
        unproven=(Unproven(evil, evil),),
    )
    for output in (shown(report), on_terminal(report)):
        assert "\x1b[2J" not in output
        assert "\u202e" not in output
        assert "[bold]" in output
    assert "\nlost 0: proven" not in shown(report)


def test_only_so_many_findings_are_listed_and_the_rest_counted(make_report: MakeReport) -> None:
    many = [Finding(Fate.EXTRA, "parquet", count=1, detail=f"row {number}") for number in range(60)]
    output = shown(make_report(*many))
    assert "and 10 more findings" in output
    assert output.splitlines()[-1] == "lost 0, duplicated 0, extra 60: failed"


def test_terminal_and_pipe_say_the_same_words(make_report: MakeReport) -> None:
    report = make_report("lost", unproven=("filtered", "expired"))
    terminal = on_terminal(report, 400)
    for line in shown(report).splitlines():
        for word in line.split():
            assert word in terminal


# JUnit


def parsed(report: Report) -> ElementTree.Element:
    suite = ElementTree.fromstring(junit.junit(report)).find("testsuite")
    assert suite is not None
    return suite


def test_a_proven_report_has_no_failure(make_report: MakeReport) -> None:
    suite = parsed(make_report())
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("0", "0", "0")
    assert len(suite.findall("testcase")) == int(suite.get("tests", "")) == 3 + 3 + 1 + 1


def test_a_finding_fails_its_partition_and_its_sink(make_report: MakeReport) -> None:
    suite = parsed(make_report("lost"))
    failed = [case.get("name", "") for case in suite.findall("testcase") if case.find("failure") is not None]
    assert failed == ["orders-1 offsets 0 to 999", "parquet (parquet)"]
    failure = suite.find(".//failure")
    assert failure is not None
    assert failure.get("type") == "lost"
    assert "204-206" in failure.get("message", "")


def test_a_finding_about_nothing_in_particular_still_fails_a_case(make_report: MakeReport) -> None:
    suite = parsed(make_report(Finding(Fate.ALTERED, "", count=1, detail="the ledger has a hole")))
    assert suite.get("failures") == "1"


def test_an_inconclusive_report_is_an_error_never_a_pass(make_report: MakeReport) -> None:
    suite = parsed(make_report(unproven=("expired", "filtered")))
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")
    error = suite.find(".//error")
    assert error is not None
    assert "expired" in error.get("message", "")


def test_xml_holds_whatever_a_key_has_in_it() -> None:
    evil = "<&\"'>\x00\x1b\ufffe\ud800]]>"
    place = Place("t", UUID(int=1), 0)
    report = Report("t", findings=(Finding(Fate.LOST, evil, place, ((1, 1),), 1, (evil,), evil),))
    message = parsed(report).find(".//failure")
    assert message is not None
    assert "<&\"'>\\x00\\x1b" in message.get("message", "")


def test_every_fate_has_a_meaning_and_a_place_in_the_order() -> None:
    assert set(words.ORDER) == set(Fate) == set(words.MEANING)
    assert {fate for fate in Fate if fate.is_fault} == set(words.FAULTS)
