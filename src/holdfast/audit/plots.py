"""Plots as inline SVG, drawn here: no library, no script, nothing fetched from elsewhere.

Colours are classes, not values, so that one picture follows the page from light to dark. Whatever comes from data (a
topic's name, a label) passes through `text` or `title`, which escape. Anything that must be seen has a least size: one
lost record among ten million is a mark as wide as `MARK_PX`, never a pixel's fraction.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from holdfast.audit.words import moment, name, visible

WIDTH: Final = 960
LABEL_PX: Final = 168
"""Room for the names of partitions."""
MARK_PX: Final = 4.0
ROW_PX: Final = 30
BAR_PX: Final = 16
TICKS_MAX: Final = 6
LABEL_CHARACTERS: Final = 24


@dataclass(frozen=True)
class Mark:
    """Offsets of a partition that something is wrong with, both ends included."""

    kind: str
    first: int
    last: int
    words: str


@dataclass(frozen=True)
class Bar:
    """One partition: what of it was looked at, what not, and what is wrong."""

    label: str
    start: int
    """The first offset of the picture."""
    end: int
    """Behind the last one."""
    scope: tuple[int, int]
    """What was looked at."""
    marks: Sequence[Mark] = field(default_factory=tuple)


def text(x: float, y: float, words: str, *, css: str = "", anchor: str = "start") -> str:
    classes = f' class="{css}"' if css else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{classes}>{html.escape(visible(words))}</text>'
    )


def title(words: str) -> str:
    return f"<title>{html.escape(visible(words))}</title>"


def rect(
    x: float, y: float, width: float, height: float, css: str, words: str = "", radius: float = 0
) -> str:
    rounded = f' rx="{radius:g}"' if radius else ""
    inner = title(words) if words else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}"{rounded} '
        f'class="{css}">{inner}</rect>'
    )


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" class="{css}"/>'


def picture(height: float, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(label, quote=True)}">'
        f"{''.join(parts)}</svg>"
    )


def shortened(words: str, most: int = LABEL_CHARACTERS) -> str:
    """The middle is left out: names differ at both ends."""
    if len(words) <= most:
        return words
    half = (most - 1) // 2
    return f"{words[: most - 1 - half]}…{words[-half:]}"


def compact(number: float) -> str:
    """A number for an axis."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def steps(largest: float, most: int = TICKS_MAX) -> list[float]:
    """Round numbers from 0 up to at least `largest`."""
    if largest <= 0:
        return [0.0, 1.0]
    raw = largest / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    step = max(step, 1.0)
    return [step * number for number in range(math.ceil(largest / step) + 1)]


def _short_moment(milliseconds: int, span_ms: int) -> str:
    at = datetime.fromtimestamp(milliseconds / 1000, UTC)
    if span_ms < 10_000:
        return at.strftime("%H:%M:%S.") + f"{at.microsecond // 1000:03d}"
    if span_ms < 86_400_000:
        return at.strftime("%H:%M:%S")
    return at.strftime("%m-%d %H:%M")


# ------------------------------------------------------------------------ over time


def timeline(
    starts_ms: Sequence[int],
    counts: Mapping[str, Sequence[int]],
    *,
    order: Sequence[str],
    wrong: Sequence[str],
) -> str:
    """Records by time, one on top of the other by fate; what is wrong is marked below, however little it is."""
    shown = [kind for kind in order if any(counts.get(kind, ()))]
    if not starts_ms or not shown:
        return ""
    left, right, top, height = 56.0, WIDTH - 12.0, 12.0, 190.0
    bottom = top + height
    totals = [sum(counts[kind][at] for kind in shown) for at in range(len(starts_ms))]
    ticks = steps(max(totals))
    scale = height / ticks[-1]
    slot = (right - left) / len(starts_ms)
    gap = 1.0 if slot > 4 else 0.0
    parts = []
    for tick in ticks:
        y = bottom - tick * scale
        number = text(left - 8, y + 4, compact(tick), css="tick", anchor="end")
        parts += [line(left, y, right, y, "grid"), number]
    for at, start_ms in enumerate(starts_ms):
        x, y = left + at * slot, bottom
        for kind in shown:
            count = counts[kind][at]
            if not count:
                continue
            tall = count * scale
            y -= tall
            words = f"{moment(start_ms)}\n{name(kind)}: {count:,} of {totals[at]:,}"
            parts.append(rect(x, y, slot - gap, tall, f"fate {kind}", words))
        for kind in wrong:
            if kind in shown and counts[kind][at]:
                wide = max(slot - gap, MARK_PX)
                words = f"{moment(start_ms)}\n{name(kind)}: {counts[kind][at]:,}"
                middle = x + (slot - gap - wide) / 2
                parts.append(rect(middle, bottom + 6, wide, 8, f"fate {kind}", words, radius=1))
    parts.append(line(left, bottom, right, bottom, "axis"))
    parts += _times(left, right, bottom + 30, starts_ms)
    return picture(bottom + 40, "records by time and fate", parts)


def _times(left: float, right: float, y: float, starts_ms: Sequence[int]) -> list[str]:
    bucket_ms = starts_ms[1] - starts_ms[0] if len(starts_ms) > 1 else 1000
    first, behind = starts_ms[0], starts_ms[-1] + bucket_ms
    parts = []
    anchors = ("start", *["middle"] * (TICKS_MAX - 2), "end")
    for number, anchor in enumerate(anchors):
        part = number / (len(anchors) - 1)
        words = _short_moment(int(first + part * (behind - first)), behind - first)
        parts.append(text(left + part * (right - left), y, words, css="tick", anchor=anchor))
    return parts


# ------------------------------------------------------------------------ where


def gaps(bars: Sequence[Bar]) -> str:
    """Every partition as a bar over its offsets: what was looked at, what was not, and each finding where it lies."""
    if not bars:
        return ""
    left, right = float(LABEL_PX), WIDTH - 12.0
    parts = [_hatching()]
    for number, bar in enumerate(bars):
        parts += _gap_row(bar, left, right, 8.0 + number * (ROW_PX + 8))
    return picture(8 + len(bars) * (ROW_PX + 8), "where in each partition something is wrong", parts)


def _hatching() -> str:
    return (
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" class="unseen"/>'
        '<line x1="0" y1="0" x2="0" y2="6" class="stripe"/></pattern></defs>'
    )


def _gap_row(bar: Bar, left: float, right: float, y: float) -> list[str]:
    start, end = min(bar.start, bar.scope[0]), max(bar.end, bar.scope[1], bar.start + 1)
    scale = (right - left) / (end - start)

    def place(offset: int) -> float:
        return left + (min(max(offset, start), end) - start) * scale

    first, behind = bar.scope
    parts = [text(0, y + BAR_PX - 4, shortened(bar.label), css="label")]
    parts.append(
        f'<rect x="{left:.2f}" y="{y:.2f}" width="{right - left:.2f}" height="{BAR_PX}" rx="3" '
        f'fill="url(#hatch)">{title(f"{bar.label}: offsets {start:,} to {end - 1:,}, not all looked at")}</rect>'
    )
    if behind > first:
        words = f"{bar.label}: offsets {first:,} to {behind - 1:,} were looked at"
        parts.append(rect(place(first), y, place(behind) - place(first), BAR_PX, "seen", words, radius=3))
    for mark in bar.marks:
        x, wide = place(mark.first), place(mark.last + 1) - place(mark.first)
        if wide < MARK_PX:
            x, wide = min(max(x + wide / 2 - MARK_PX / 2, left), right - MARK_PX), MARK_PX
        parts.append(rect(x, y - 3, wide, BAR_PX + 6, f"fate {mark.kind}", mark.words, radius=1))
    parts.append(text(left, y + BAR_PX + 13, f"{start:,}", css="tick"))
    parts.append(text(right, y + BAR_PX + 13, f"{end - 1:,}", css="tick", anchor="end"))
    return parts


# ------------------------------------------------------------------------ how far behind


def lags(rows: Sequence[tuple[str, str, int]]) -> str:
    """By partition and sink, how many offsets of the log the sink had not taken when it was looked at."""
    if not rows:
        return ""
    left, right = float(LABEL_PX), WIDTH - 90.0
    largest = max(max(lag for _, _, lag in rows), 1)
    parts = []
    label_before = ""
    for number, (label, sink, lag) in enumerate(rows):
        y = 6.0 + number * 24
        if label != label_before:
            parts.append(text(0, y + 12, shortened(label), css="label"))
            label_before = label
        wide = max((right - left) * lag / largest, 2.0)
        words = f"{label}: sink {sink} is {lag:,} offsets behind the end of the log"
        parts.append(rect(left, y, wide, 15, "lag" if lag else "lag none", words, radius=2))
        said = f"{lag:,}  {sink}" if lag else sink
        if wide > (right - left) * 0.7:
            parts.append(text(left + wide - 8, y + 12, said, css="on", anchor="end"))
        else:
            parts.append(text(left + wide + 8, y + 12, said, css="tick"))
    return picture(12 + len(rows) * 24, "how far each sink is behind the end of the log", parts)
