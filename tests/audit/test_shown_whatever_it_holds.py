"""Whatever names, keys and errors hold: reports are shown and kept, and nothing in them becomes markup or command."""

from __future__ import annotations

import io
import json
import random
from html.parser import HTMLParser
from pathlib import Path
from uuid import UUID
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.audit import certificate, html, junit, text
from holdfast.audit.model import (
    Fate,
    Finding,
    PartitionAccount,
    Report,
    Scope,
    SinkAccount,
    Timeline,
    Unproven,
    WindowAccount,
)
from holdfast.pipeline.positions import Place

TAGS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "header",
        "h1",
        "h2",
        "p",
        "div",
        "strong",
        "b",
    ),
    *("span", "section", "table", "tr", "th", "td", "code", "br", "ul", "li", "dl", "dt", "dd", "footer"),
    *("svg", "rect", "line", "text", "defs", "pattern"),
}
MARKUP = (
    "<script>",
    "</style>",
    "</title>",
    "\" onload='",
    "<!--",
    "]]>",
    "&lt;",
    "{",
    "\x1b]0;x\x07",
    "\u202e",
    "\n",
)
odd = st.text(max_size=12) | st.lists(st.sampled_from(MARKUP), max_size=3).map("".join)
counts = st.integers(0, 2**53)


@st.composite
def reports(draw: st.DrawFn) -> Report:
    place = Place(draw(odd), UUID(int=draw(st.integers(0, 2**64))), draw(st.integers(0, 99)))
    start = draw(st.integers(0, 1000))
    end = start + draw(st.integers(0, 1000))
    findings = st.builds(
        Finding,
        st.sampled_from([Fate.LOST, Fate.DUPLICATED, Fate.EXTRA, Fate.ALTERED]),
        odd,
        st.none() | st.just(place),
        st.lists(st.integers(0, 2000).map(lambda at: (at, at + 3)), max_size=4).map(tuple),
        counts,
        st.lists(odd, max_size=5).map(tuple),
        odd,
    )
    return Report(
        draw(odd),
        scope=Scope(draw(odd), draw(odd), draw(counts), draw(counts), draw(counts)),
        partitions=(
            PartitionAccount(
                place, start, end, {"record": end - start}, {"output": end - start}, start, end + 2
            ),
        ),
        sinks=(
            SinkAccount(draw(odd), draw(odd), draw(counts), 1, {f"{place.topic}-{place.partition}": end}),
        ),
        windows=(WindowAccount(draw(odd), draw(odd), 1, 2, 3, 4, 5),),
        findings=tuple(draw(st.lists(findings, max_size=3))),
        unproven=tuple(draw(st.lists(st.builds(Unproven, odd, odd, st.booleans()), max_size=2))),
        timeline=Timeline(10, (0, 10), {"output": (draw(counts), 0), "lost": (0, draw(counts))}),
        lag={draw(odd): draw(counts)},
        notes=(draw(odd),),
        fingerprint=draw(odd),
        versions={draw(odd): draw(odd)},
    )


class Markup(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data!r}")


@settings(max_examples=examples(30))
@given(reports())
def test_a_page_has_no_markup_but_its_own(report: Report) -> None:
    found = Markup(html.page(report, certificate.certify(report, None)))
    assert found.tags <= TAGS
    assert not any(name.startswith("on") or name in ("src", "href", "style") for name in found.attributes)


@settings(max_examples=examples(30))
@given(reports())
def test_a_terminal_gets_no_command(report: Report) -> None:
    to = io.StringIO()
    text.print_report(report, to)
    assert all(character.isprintable() or character == "\n" for character in to.getvalue())
    assert to.getvalue().splitlines()[-1].startswith("lost ")


@settings(max_examples=examples(30))
@given(reports())
def test_xml_is_well_formed_and_agrees_with_the_verdict(report: Report) -> None:
    root = ElementTree.fromstring(junit.junit(report).encode("utf-8"))
    is_good = root.get("failures") == root.get("errors") == "0"
    assert is_good == (report.verdict == "proven")


@settings(max_examples=examples(30))
@given(reports())
def test_a_certificate_gives_back_the_report_and_its_hash(report: Report) -> None:
    made = certificate.certify(report, None)
    kept = json.loads(certificate.canonical(made.document))
    assert Report.from_json(kept["report"]) == report
    assert certificate.content_hash(kept) == made.sha256


def test_no_changed_byte_goes_unnoticed(tmp_path: Path) -> None:
    """Of a chain of two files: each change is found, or leaves the document as it was."""
    report = Report("orders", notes=("é", "plain"), findings=(Finding(Fate.LOST, "parquet", count=3),))
    paths = [certificate.write(report, str(tmp_path)).path for _ in range(2)]
    chance = random.Random(8)
    for path in map(Path, paths):
        original = path.read_bytes()
        document = json.loads(original)
        for at in chance.sample(range(len(original)), 250):
            changed = bytearray(original)
            changed[at] ^= 1 << chance.randrange(8)
            path.write_bytes(changed)
            broken = any(each.problem for each in certificate.verify(paths))
            assert broken or json.loads(bytes(changed)) == document, (at, bytes(changed[at - 10 : at + 10]))
        path.write_bytes(original)
    assert not any(each.problem for each in certificate.verify(paths))
