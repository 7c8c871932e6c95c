"""How reports speak: the order and the names of fates and kinds, the verdict in one line, ranges and places as text.

The terminal, the page, JUnit and metrics all take their words from here, so that they cannot say different things.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

from holdfast.audit.model import Evidence, Fate, Finding, Kind, Report, Verdict, ranges_text
from holdfast.pipeline.positions import Place

ALWAYS: Final = (Fate.LOST, Fate.DUPLICATED)
"""Shown when they are 0 too: that is the answer somebody asked for."""
OTHER_KINDS: Final = (Kind.CONTROL, Kind.ABORTED, Kind.COMPACTED, Kind.EXPIRED)

MEANING: Final[Mapping[Fate, str]] = {
    Fate.OUTPUT: "in every sink that should have it, once",
    Fate.AGGREGATED: "counted in its windows",
    Fate.SUPERSEDED: "a newer row of the same key stands in its place",
    Fate.FILTERED: "left the pipeline in a step",
    Fate.DUPLICATE: "its key had been seen",
    Fate.LATE: "came after its time was over",
    Fate.DEAD_LETTER: "set aside with a reason",
    Fate.ERASED: "taken out of the sinks on purpose, by an entry of their ledgers",
    Fate.PENDING: "beyond what the sinks have taken so far",
    Fate.LOST: "a record of the source that is nowhere",
    Fate.DUPLICATED: "there more than once",
    Fate.EXTRA: "in a sink, and no record of the source",
    Fate.ALTERED: "not what the source says",
}
"""In the order in which fates are told."""
ORDER: Final = tuple(MEANING)
FAULTS: Final = tuple(fate for fate in ORDER if fate.is_fault)


def name(fate: str) -> str:
    return fate.replace("_", " ")


def visible(text: str) -> str:
    """With what a terminal would obey, or a reader not see, shown by its number; line ends stay."""
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def place_text(place: Place) -> str:
    return f"{place.topic}-{place.partition}"


def span_text(start: int, end: int) -> str:
    """Offsets from `start` up to and without `end`."""
    return f"{start:,} to {end - 1:,}" if end > start else "none"


def finding_offsets(finding: Finding, shown: int = 5) -> str:
    return ranges_text(finding.ranges, shown) if finding.ranges else "-"


def moment(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration(milliseconds: int) -> str:
    return f"{milliseconds} ms" if milliseconds < 1000 else f"{milliseconds / 1000:,.1f} s"


def verdict_line(report: Report) -> str:
    """`lost 0, duplicated 0: proven`."""
    counts = [f"{name(fate)} {report.total(fate):,}" for fate in ALWAYS]
    counts += [f"{name(fate)} {count:,}" for fate in FAULTS[2:] if (count := report.total(fate))]
    said = f"{', '.join(counts)}: {report.verdict}"
    if report.verdict is Verdict.UNALTERED:
        return f"{said} since written, {cells(report)}"
    if report.verdict is Verdict.ACCEPTED:
        return f"{said}, {cells(report)}, as {', '.join(_accepted(report))} may be"
    if report.verdict is Verdict.INCONCLUSIVE:
        reasons = report.reasons
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        return f"{said}, because {reasons[0]}{more}"
    return said


def cells(report: Report) -> str:
    """`98.2 % of 1,204,000 cells recomputed, 1.8 % unaltered, 0 trusted`."""
    total = sum(each.cells for each in report.coverage)
    shares = {each: report.cells(each) for each in Evidence}
    recomputed = f"{percent(shares[Evidence.RECOMPUTED], total)} of {total:,} cells recomputed"
    rest = (f"{percent(shares[each], total)} {each}" for each in (Evidence.UNALTERED, Evidence.TRUSTED))
    return ", ".join((recomputed, *rest))


def percent(part: int, total: int) -> str:
    """Never rounded to all or to nothing."""
    if part in (0, total):
        return "100 %" if part else "0"
    return f"{min(max(100 * part / total, 0.1), 99.9):.1f} %"


def _accepted(report: Report) -> list[str]:
    return [each.name for each in report.coverage if each.trusted and each.name in report.accepted]


def used(fates: Iterable[Mapping[str, int]]) -> list[Fate]:
    """The fates that any of these accounts has, and those that are always shown."""
    seen = {fate for account in fates for fate, count in account.items() if count}
    return [fate for fate in ORDER if fate in seen or fate in ALWAYS]


def summed(accounts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Counts of several accounts together."""
    total: Counter[str] = Counter()
    for account in accounts:
        total.update(account)
    return total


def records(report: Report) -> int:
    return sum(account.kinds.get(Kind.RECORD, 0) for account in report.partitions)


def heading(report: Report) -> str:
    return f"audit of {report.mode} {report.subject}"


def looked_at(report: Report) -> str:
    """How much, and in how long."""
    offsets = sum(max(each.end - each.start, 0) for each in report.partitions)
    count = len(report.partitions)
    partitions = f"{count:,} partition{'' if count == 1 else 's'}"
    said = f"{records(report):,} records in {offsets:,} offsets of {partitions}"
    return f"{said}, in {duration(report.took_ms)}" if report.took_ms else said
