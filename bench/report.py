"""From raw figures to `RESULTS.md`: one table, the notes, the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from bench.model import MeasureResult, Results, Row
from bench.stats import Summary, paired_ratios, percentile, summarise

Verdict = Literal["met", "not met", "reported", "not measured"]


class Line(NamedTuple):
    """One row with its figures."""

    row: Row
    ours: Summary | None
    theirs: Summary | None
    ratio: Summary | None
    verdict: Verdict
    remark: str


def evaluate(row: Row, result: MeasureResult | None) -> Line:
    """The figures and the verdict of one row."""
    if result is None:
        return Line(row, None, None, None, "not measured", "not run yet")
    ours = result.values(row.ours)
    theirs = result.values(row.theirs) if row.theirs is not None else []
    if not ours:
        return Line(row, None, None, None, "not measured", result.why_missing(row.ours))
    mine = summarise(ours)
    if row.theirs is None:
        return Line(row, mine, None, None, _verdict(row, mine, None, result), "")
    if not theirs:
        return Line(row, mine, None, None, "not measured", result.why_missing(row.theirs))
    ratios = paired_ratios(ours, theirs)
    ratio = summarise(ratios) if ratios else None
    return Line(row, mine, summarise(theirs), ratio, _verdict(row, mine, ratio, result), _remark(row, result))


def _verdict(row: Row, ours: Summary, ratio: Summary | None, result: MeasureResult) -> Verdict:
    verdicts = []
    if row.at_most is not None and ratio is not None:
        verdicts.append(ratio.median <= row.at_most)
    if row.at_least is not None and ratio is not None:
        verdicts.append(ratio.median >= row.at_least or _reaches_limit(row, result))
    if row.below is not None:
        verdicts.append(ours.median < row.below)
    if row.above is not None:
        verdicts.append(ours.median >= row.above)
    if not verdicts:
        return "reported"
    return "met" if all(verdicts) else "not met"


def _reaches_limit(row: Row, result: MeasureResult) -> bool:
    if row.or_reaches is None or row.or_reaches_with is None:
        return False
    limit, ours = result.values(row.or_reaches), result.values(row.or_reaches_with)
    return bool(limit and ours) and percentile(paired_ratios(ours, limit), 0.5) >= 1.0


def _remark(row: Row, result: MeasureResult) -> str:
    if row.or_reaches is None or row.or_reaches_with is None:
        return ""
    limit, ours = result.values(row.or_reaches), result.values(row.or_reaches_with)
    if not limit or not ours:
        return ""
    return f"{percentile(ours, 0.5):.0f} MB/s; disk alone {percentile(limit, 0.5):.0f} MB/s"


def figure(value: float) -> str:
    """A number as a reader wants it: three significant digits, thousands separated."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def _cells(line: Line) -> list[str]:
    row = line.row
    ours = f"{figure(line.ours.median)} {row.unit}" if line.ours else "–"
    theirs = f"{figure(line.theirs.median)} {row.unit}" if line.theirs else "–"
    if line.theirs and row.against != "Apache Kafka":
        theirs += f" ({row.against})"
    spread_of = line.ratio or line.ours
    spread = f"{spread_of.low_quartile:.2f} – {spread_of.high_quartile:.2f}" if spread_of else "–"
    ratio = f"{line.ratio.median:.2f}×" if line.ratio else "–"
    verdict: str = f"**{line.verdict}**" if line.verdict == "not met" else line.verdict
    if line.verdict == "not measured":
        verdict = f"not measured: {line.remark}"
    elif line.remark:
        verdict += f" ({line.remark})"
    return [row.title, ours, theirs, ratio, spread, row.target, verdict]


def table(lines: Sequence[Line]) -> str:
    """The lines as a Markdown table."""
    head = ["measure", "ours", "compared with", "ratio", "spread", "target", ""]
    rows = [head, ["---"] * len(head), *(_cells(line) for line in lines)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


INTRODUCTION = """\
# Results

Both brokers on the same machine in the same run: Apache Kafka with kafka-server-start's heap and
collector options and its defaults, ours with its defaults. Each was warmed until three runs in a row lay
within a tenth of each other; then rounds alternated, in turn beginning with one and the other. A figure
is the median of the rounds; a ratio is ours by theirs within each round, and then the median; the spread
is the interquartile range of the ratio. A target is met when the median ratio meets it. `bench/README.md`
says how each measure is taken, `bench/results/` has every round.

"Flushed" is `holdfast.flush=group` on our side, flushed before it is acknowledged, and `flush.messages=1` on
Kafka's; "page cache" is `holdfast.flush=os` and Kafka's default.
"""


def render(rows: Mapping[str, Sequence[Row]], results: Results, titles: Mapping[str, str]) -> str:
    """The whole of RESULTS.md. `rows` and `titles` are keyed by measure, in the order of the report."""
    parts = [INTRODUCTION, "![ratios and targets](ratios.svg)\n"]
    lines = {name: [evaluate(row, results.measures.get(name)) for row in rows[name]] for name in rows}
    every = [line for each in lines.values() for line in each]
    counts = {verdict: sum(line.verdict == verdict for line in every) for verdict in ("met", "not met")}
    missing = sum(line.verdict == "not measured" for line in every)
    parts.append(
        f"Of {sum(counts.values())} targets measured, {counts['met']} are met and {counts['not met']} are not"
        + (f"; {missing} lines were not measured.\n" if missing else ".\n")
    )
    for name, measured in lines.items():
        parts.append(f"## {titles[name]}\n\n{table(measured)}\n")
        result = results.measures.get(name)
        if result is not None:
            parts.append(f"{len(result.rounds)} rounds, {result.taken_at}.\n")
            parts.extend(f"- {note}" for note in result.notes)
            if result.notes:
                parts.append("")
    parts.append("## The machine\n\n| | |\n|---|---|")
    parts.extend(f"| {name} | {value} |" for name, value in results.machine.items())
    return "\n".join(parts) + "\n"
