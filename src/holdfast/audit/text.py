"""A report on a terminal: what was looked at, what became of it, what is wrong, what stays unproven, the verdict.

The same tables whole and without frames where the output is piped. Nothing that comes from data is taken for markup,
and control characters in it are shown, not sent: a key must not be able to write on somebody's terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

from holdfast.audit import words
from holdfast.audit.model import Evidence, Fate, Kind, Report, Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

FINDINGS_SHOWN: Final = 50
"""Of findings on a terminal; all of them are in the certificate and the page."""
RANGES_SHOWN: Final = 8
COLOURS: Final = {Verdict.FAILED: "bold red", Verdict.INCONCLUSIVE: "bold yellow"}
"""The other verdicts are good."""
WRONG_COLUMNS: Final = frozenset(words.name(fate).upper() for fate in words.FAULTS)
"""Of counts that should be 0."""


@dataclass(frozen=True)
class Section:
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    """Columns that are set to the right."""


def plain(text: str) -> str:
    """One line, without what a terminal would obey."""
    return words.visible(text).replace("\n", "\\n")


def sections(report: Report) -> Iterator[Section]:
    """The tables of a report; those without rows are left out."""
    yield from (made for make in (*ACCOUNTS, findings) if (made := make(report)).rows)


def _partitions(report: Report) -> Section:
    kinds = [kind for kind in words.OTHER_KINDS if any(each.kinds.get(kind, 0) for each in report.partitions)]
    fates = words.used(each.fates for each in report.partitions)

    def counts(of_kinds: Mapping[str, int], of_fates: Mapping[str, int]) -> tuple[str, ...]:
        return (*_counts(of_kinds, [Kind.RECORD, *kinds]), *_counts(of_fates, fates))

    rows = [
        (words.place_text(each.place), words.span_text(each.start, each.end), *counts(each.kinds, each.fates))
        for each in report.partitions
    ]
    if len(rows) > 1:
        total = counts(
            *(words.summed(getattr(each, of) for each in report.partitions) for of in ("kinds", "fates"))
        )
        rows.append(("all", "", *total))
    columns = ("PARTITION", "OFFSETS", "RECORDS", *(_head(kind) for kind in kinds), *map(_head, fates))
    return Section("every offset of the source", columns, tuple(rows), frozenset(range(2, len(columns))))


def _sinks(report: Report) -> Section:
    fates = words.used(each.fates for each in report.sinks)
    rows = tuple(
        (
            each.name,
            each.kind,
            each.takes or ("dead letters" if each.kind == "dead_letter" else "the last step"),
            f"{each.entries:,}",
            f"{each.rows:,}",
            f"{report.lag[each.name]:,}" if each.name in report.lag else "-",
            *_counts(each.fates, fates),
        )
        for each in report.sinks
    )
    columns = ("SINK", "KIND", "ROWS OF", "ENTRIES", "ROWS", "LAG", *map(_head, fates))
    return Section("what the sinks hold", columns, rows, frozenset(range(3, len(columns))))


def _windows(report: Report) -> Section:
    numbers = ("windows", "records", "recomputed", "expected", "open")
    rows = tuple((each.sink, each.step, *_numbers(each, numbers)) for each in report.windows)
    columns = ("SINK", "STEP", "WINDOWS", "OF RECORDS", "MADE AGAIN", "EXPECTED", "STILL OPEN")
    return Section("windows, made again from the source", columns, rows, frozenset(range(2, len(columns))))


def _coverage(report: Report) -> Section:
    rows = tuple(
        (
            each.sink,
            each.column,
            *_numbers(each, Evidence),
            "yes" if each.name in report.accepted else "-",
            each.why or "-",
        )
        for each in report.coverage
    )
    columns = ("SINK", "COLUMN", "RECOMPUTED", "UNALTERED", "TRUSTED", "ACCEPTED", "WHY")
    title = f"cells: {words.cells(report)}" if rows else ""
    return Section(title, columns, rows, frozenset({2, 3, 4}))


ACCOUNTS: Final = (_partitions, _sinks, _windows, _coverage)
"""What there is, as far as it was looked at."""


def findings(report: Report, most: int = FINDINGS_SHOWN, ranges: int = RANGES_SHOWN) -> Section:
    """What is wrong, losses first."""
    found = sorted(report.findings, key=lambda each: words.FAULTS.index(each.fate))
    rows = [
        (
            words.name(each.fate),
            f"{each.count:,}" if each.count else "-",
            each.sink or "-",
            words.place_text(each.place) if each.place else "-",
            words.finding_offsets(each, ranges),
            ", ".join(each.keys) or "-",
            each.detail,
        )
        for each in found[:most]
    ]
    if len(found) > most:
        rows.append(("…", "", "", "", "", "", f"and {len(found) - most:,} more findings"))
    columns = ("FATE", "COUNT", "SINK", "PARTITION", "OFFSETS", "KEYS", "WHAT")
    return Section("what is wrong", columns, tuple(rows), frozenset({1}))


def _numbers(account: object, names: Iterable[str]) -> Iterator[str]:
    return (f"{getattr(account, name):,}" for name in names)


def _counts(counts: Mapping[str, int], names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{counts.get(each, 0):,}" for each in names)


def _head(fate: str) -> str:
    return words.name(fate).upper()


def scope_lines(report: Report) -> list[str]:
    scope = report.scope
    lines = [words.looked_at(report)]
    if scope.begins or scope.ends:
        lines.append(f"from {scope.begins or 'the start'} to {scope.ends or 'the end'}")
    if scope.expired:
        lines.append(f"{scope.expired:,} offsets expired before they could be looked at")
    if scope.pending:
        lines.append(f"{scope.pending:,} offsets beyond it are pending: not every sink has taken them yet")
    return lines


def unproven_lines(report: Report) -> list[tuple[str, bool]]:
    """What is taken on somebody's word, and whether it keeps the verdict open."""
    ordered = sorted(report.unproven, key=lambda each: not each.is_gap)
    return [(f"{each.what}: {each.why}", each.is_gap) for each in ordered]


def print_report(report: Report, file: IO[str] | None = None) -> None:
    """The whole report, for people."""
    to = sys.stdout if file is None else file
    if to.isatty():
        from rich.console import Console

        Console(file=to, highlight=False, markup=False).print(renderable(report))
        return
    for text in plain_lines(report):
        print(text, file=to)


def _parts(report: Report) -> Iterator[Section | tuple[str, str]]:
    """The report in order: tables, and lines with their style."""
    yield words.heading(report), "bold"
    for each in scope_lines(report):
        yield each, "dim"
    for section in sections(report):
        yield "", ""
        yield section
    if report.unproven:
        yield "", ""
        yield "not proven", "bold"
        for what, is_gap in unproven_lines(report):
            yield f"  {'! ' if is_gap else '- '}{what}", "yellow" if is_gap else "dim"
    if report.notes:
        yield "", ""
    for note in report.notes:
        yield f"note: {note}", "dim"
    yield "", ""
    yield words.verdict_line(report), COLOURS.get(report.verdict, "bold green")


def plain_lines(report: Report) -> Iterator[str]:
    """Without frames and colours, every cell whole."""
    for part in _parts(report):
        if isinstance(part, Section):
            yield part.title
            yield from _plain_table(part)
        else:
            yield plain(part[0])


def _plain_table(section: Section) -> Iterator[str]:
    lines = [section.columns, *(tuple(plain(cell) for cell in row) for row in section.rows)]
    widths = [max(len(row[at]) for row in lines) for at in range(len(section.columns))]
    for row in lines:
        cells = (
            cell.rjust(width) if at in section.numbers else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def renderable(report: Report) -> RenderableType:
    """For rich: a terminal, or part of a larger screen."""
    from rich.console import Group
    from rich.text import Text

    return Group(
        *(
            _rich_table(part) if isinstance(part, Section) else Text(plain(part[0]), part[1])
            for part in _parts(report)
        )
    )


def _rich_table(section: Section) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=section.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for at, column in enumerate(section.columns):
        table.add_column(column, justify="right" if at in section.numbers else "left", overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(plain(cell), _style(section.columns, at, cell)) for at, cell in enumerate(row)))
    return table


def _style(columns: Sequence[str], at: int, cell: str) -> str:
    column = columns[at]
    if column in WRONG_COLUMNS:
        return "dim" if cell == "0" else "bold red"
    if column == "FATE" and cell.upper() in WRONG_COLUMNS:
        return "bold red"
    if column == _head(Fate.PENDING) and cell != "0":
        return "yellow"
    return "dim" if cell in ("0", "-") else ""
