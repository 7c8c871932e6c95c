"""A report as one page: it needs no network, runs no script, and shows what data contains as text.

Every piece of data passes through `escaped`; only what this module wrote itself is markup. Beyond that the
page forbids scripts and everything from elsewhere to the browser (its Content-Security-Policy), so that a key which
found a way around the first rule would meet the second.
"""

from __future__ import annotations

import html as escaping
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Final

from holdfast.audit import plots, words
from holdfast.audit.html_style import sheet
from holdfast.audit.model import KEYS_MAX, Fate, Finding, Kind, Report, Verdict
from holdfast.audit.text import ACCOUNTS, WRONG_COLUMNS, Section, findings
from holdfast.pipeline.positions import Place

if TYPE_CHECKING:
    from holdfast.audit.certificate import Certificate

POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
)
FINDINGS_SHOWN: Final = 2_000
RANGES_SHOWN: Final = 200
BARS_MAX: Final = 120
"""Partitions in a plot: those with findings first; the table below has all."""
MARKS_MAX: Final = 400
"""Ranges marked in one partition's bar: more would lie on each other."""
FIRST_LOST: Final = 20


def page(report: Report, certificate: Certificate | None = None) -> str:
    """The whole page."""
    title = escaped(f"{report.verdict}: {words.heading(report)}")
    parts = (_head, _verdict, _tiles, _wrong, _first_lost, _gaps, _timeline, _lag, _tables, _unproven)
    body = "".join((*(part(report) for part in parts), _scope(report, certificate), _foot(report)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{title}</title><style>{sheet()}</style></head><body><main>{body}</main></body></html>\n"
    )


def escaped(text: str) -> str:
    """Data as text. Characters that turn the direction of writing, or cannot be seen, are shown by their numbers."""
    return escaping.escape(words.visible(text), quote=True)


def _head(report: Report) -> str:
    return (
        f"<header><h1>{escaped(words.heading(report))}</h1>"
        f'<p class="sub">{escaped(words.moment(report.started_ms))} · {escaped(words.looked_at(report))}</p></header>'
    )


def _verdict(report: Report) -> str:
    explained = {
        Verdict.PROVEN: "Every offset in the scope is accounted for, and the sinks hold what they should, once.",
        Verdict.UNALTERED: "Every offset is accounted for; what was not recomputed is what its digest says.",
        Verdict.ACCEPTED: "Every offset is accounted for, and each column that is trusted was accepted by its name.",
        Verdict.FAILED: f"{len(report.findings):,} finding{'' if len(report.findings) == 1 else 's'}, listed below.",
        Verdict.INCONCLUSIVE: "Nothing was found wrong, and something that had to be looked at could not be.",
    }[report.verdict]
    css = Verdict.PROVEN if report.verdict.exit_code == 0 else report.verdict
    return (
        f'<div class="verdict {css}"><strong>{escaped(words.verdict_line(report))}</strong>'
        f"<p>{escaped(explained)}</p></div>"
    )


def _tiles(report: Report) -> str:
    counts = {fate: report.total(fate) for fate in words.ORDER}
    tiles = [("", "records", words.records(report))]
    for fate in _shown(report):
        css = "" if not fate.is_fault else "bad" if counts[fate] else "good"
        tiles.append((css, words.name(fate), counts[fate]))
    drawn = (f'<div class="tile {css}"><b>{n:,}</b><span>{said}</span></div>' for css, said, n in tiles)
    return f'<div class="tiles">{"".join(drawn)}</div>'


# ------------------------------------------------------------------------ what is wrong


def _wrong(report: Report) -> str:
    if not report.findings:
        return ""
    table = _table(findings(report, FINDINGS_SHOWN, RANGES_SHOWN))
    said = "Offsets are those of the source; keys are of the first records."
    if len(report.findings) > FINDINGS_SHOWN:
        said += " The certificate has all of them."
    return _section("What is wrong", said, table)


def _first_lost(report: Report) -> str:
    """The first records that are lost, one by one: what somebody looks up next, each with the command for it."""
    missing: dict[str, list[str]] = {}
    keys: dict[str, str] = {}
    for finding in report.findings:
        if finding.fate is Fate.LOST and finding.place is not None:
            for name, key in _lost_names(finding.place, finding):
                missing.setdefault(name, []).append(finding.sink)
                if key is not None:
                    keys[name] = key
    if not missing:
        return ""
    rows = tuple(
        (name, keys.get(name, "-"), ", ".join(filter(None, sinks)) or "-", f"holdfast trace {name}")
        for name, sinks in list(missing.items())[:FIRST_LOST]
    )
    columns = ("RECORD", "KEY", "MISSING IN", "ITS LIFE")
    return _section("The first lost records", "", _table(Section("", columns, rows)))


def _lost_names(place: Place, finding: Finding) -> Iterator[tuple[str, str | None]]:
    """The first records of a finding, and their keys. Records without a key leave none: only when all of the first have
    one is it known whose is whose."""
    keys = finding.keys if len(finding.keys) == min(finding.count, KEYS_MAX) else ()
    offsets = (offset for first, last in finding.ranges for offset in range(first, last + 1))
    for offset, key in zip_longest(islice(offsets, FIRST_LOST), keys):
        if offset is not None:
            yield f"{place.topic}:{place.partition}@{offset}", key


# ------------------------------------------------------------------------ plots


def _gaps(report: Report) -> str:
    marks: dict[object, list[plots.Mark]] = {}
    for finding in report.findings:
        if finding.place is None:
            continue
        listed = marks.setdefault(finding.place, [])
        for first, last in finding.ranges[: MARKS_MAX - len(listed)]:
            words_of = f"{words.name(finding.fate)}: {first:,}" + (f" to {last:,}" if last > first else "")
            listed.append(plots.Mark(str(finding.fate), first, last, f"{words_of}\n{finding.sink}".strip()))
    ordered = sorted(report.partitions, key=lambda each: (each.place not in marks, each.place))
    bars = [
        plots.Bar(
            words.place_text(each.place),
            min(each.start, each.log_start),
            max(each.end, each.log_end),
            (each.start, each.end),
            marks.get(each.place, ()),
        )
        for each in ordered[:BARS_MAX]
    ]
    drawn = plots.gaps(bars)
    if not drawn:
        return ""
    kinds = [fate for fate in words.FAULTS if any(each.fate is fate for each in report.findings)]
    legend = _legend(
        [("seen", "looked at"), ("unseen", "not looked at: before the scope, expired, or pending")]
        + [(fate, words.name(fate)) for fate in kinds]
    )
    rest = len(report.partitions) - len(bars)
    cut = f"<p>{rest:,} more partitions without findings are in the table below.</p>" if rest > 0 else ""
    said = "Each partition as a bar over its offsets. A mark is a few pixels wide at least, however few offsets it is."
    return _section("Where", said, drawn + legend + cut)


def _timeline(report: Report) -> str:
    line = report.timeline
    drawn = plots.timeline(line.starts_ms, line.counts, order=words.ORDER, wrong=words.FAULTS)
    if not drawn:
        return ""
    shown = [fate for fate in words.ORDER if any(line.counts.get(fate, ()))]
    legend = _legend([(fate, words.name(fate)) for fate in shown])
    return _section("When", "Records by the time kept with them, and what became of them.", drawn + legend)


def _lag(report: Report) -> str:
    together: dict[tuple[str, int], list[str]] = {}
    behind: Counter[str] = Counter()
    for account in report.partitions:
        label = words.place_text(account.place)
        for sink in report.sinks:
            if label in sink.positions:
                lag = max(account.log_end - sink.positions[label], 0)
                together.setdefault((label, lag), []).append(sink.name)
                behind[label] = max(behind[label], lag)
    rows = [(label, ", ".join(names), lag) for (label, lag), names in together.items()]
    rows.sort(key=lambda row: (-behind[row[0]], row[0], row[2]))
    drawn = plots.lags(rows[:BARS_MAX])
    if not drawn:
        return ""
    if not any(behind.values()):
        return _section("Lag", "Every sink stood at the end of the log when the audit began.", "")
    said = "Offsets between where each sink stands and the end of the log, when the audit began."
    return _section("Lag", said, drawn)


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><span class="chip {css}"></span>{escaped(label)}</li>' for css, label in entries)
    return f'<ul class="legend">{items}</ul>'


# ------------------------------------------------------------------------ tables


def _tables(report: Report) -> str:
    made = (make(report) for make in ACCOUNTS)
    return "".join(
        _section(each.title[:1].upper() + each.title[1:], "", _table(each)) for each in made if each.rows
    )


LONG: Final = ("OFFSETS", "KEYS", "WHAT")
"""Columns whose cells are broken anywhere."""
CODE: Final = ("KEYS", "KEY", "ITS LIFE")


def _table(section: Section) -> str:
    heads = "".join(
        f"<th{_number(at, section)}>{escaped(column.capitalize())}</th>"
        for at, column in enumerate(section.columns)
    )
    rows = "".join(_row(row, section) for row in section.rows)
    return f'<div class="scroll"><table><tr>{heads}</tr>{rows}</table></div>'


def _row(row: Sequence[str], section: Section) -> str:
    cells = []
    for at, (column, cell) in enumerate(zip(section.columns, row, strict=True)):
        classes = ["n"] if at in section.numbers else ["long"] if column in LONG else []
        shown = escaped(cell)
        if cell in ("0", "-"):
            classes.append("zero")
        elif column in WRONG_COLUMNS or (column == "COUNT" and "FATE" in section.columns):
            classes.append("bad")
        elif column in CODE:
            shown = f"<code>{shown}</code>"
        elif column == "FATE":
            classes.append("w")
            shown = f'<span class="chip {escaped(cell.replace(" ", "_"))}"></span>{shown}'
        css = f' class="{" ".join(classes)}"' if classes else ""
        cells.append(f"<td{css}>{shown}</td>")
    return f"<tr{' class=sum' if row[0] == 'all' and row[1] == '' else ''}>{''.join(cells)}</tr>"


def _number(at: int, section: Section) -> str:
    return ' class="n"' if at in section.numbers else ""


# ------------------------------------------------------------------------ what it stands on


def _unproven(report: Report) -> str:
    if not report.unproven and not report.notes:
        return ""
    ordered = sorted(report.unproven, key=lambda each: not each.is_gap)
    items = [
        f"<li{' class=gap' if each.is_gap else ''}><b>{escaped(each.what)}</b>: {escaped(each.why)}</li>"
        for each in ordered
    ]
    items += [f"<li>{escaped(note)}</li>" for note in report.notes]
    return _section(
        "What this does not prove",
        "What is taken on somebody's word, and what could not be looked at; the latter keeps the verdict open.",
        f'<ul class="plain">{"".join(items)}</ul>',
    )


def _scope(report: Report, certificate: Certificate | None) -> str:
    scope = report.scope
    entries: dict[str, str] = {
        "from": scope.begins or "the start",
        "to": scope.ends or "the end",
        "offsets": f"{scope.offsets:,}",
    }
    kinds = words.summed(each.kinds for each in report.partitions)
    counts: dict[str, int] = {kind: kinds[kind] for kind in (Kind.RECORD, *words.OTHER_KINDS)}
    counts |= {
        name: count for name, count in (("expired", scope.expired), ("pending", scope.pending)) if count
    }
    entries |= {name: f"{count:,}" for name, count in counts.items() if count}
    if report.fingerprint:
        entries["definition"] = report.fingerprint
    entries |= {f"version of {name}": value for name, value in report.versions.items()}
    if certificate is not None:
        entries["certificate"] = f"number {certificate.number:,}"
        entries["SHA-256"] = certificate.sha256
        entries["of the one before"] = certificate.previous or "none: it is the first"
    items = (f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in entries.items())
    return _section("What was looked at", "", f"<dl>{''.join(items)}</dl>")


def _foot(report: Report) -> str:
    meanings = "".join(
        f'<li><span><span class="chip {fate}"></span><b>{escaped(words.name(fate))}</b>: '
        f"{escaped(words.MEANING[fate])}</span></li>"
        for fate in _shown(report)
    )
    return f'<footer><ul class="legend">{meanings}</ul></footer>'


def _shown(report: Report) -> Iterable[Fate]:
    return [fate for fate in words.ORDER if report.total(fate) or fate in words.ALWAYS]


def _section(title: str, said: str, body: str) -> str:
    below = f"<p>{escaped(said)}</p>" if said else ""
    return f"<section><h2>{escaped(title)}</h2>{below}{body}</section>"
