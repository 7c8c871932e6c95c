"""Results of the lab on paper: rows for a table, JSON, a page with a picture of each message's fate.

A directory of results has a folder for each run, `HF101-holdfast-1`, with `result.json` and the two histories it was
judged by, so that `holdfast check` can judge them again. `write_report` makes of it what is read in a repository
(`README.md` and a picture for each experiment), `page` what is read in a browser: one file with everything in it.

A picture of each message's fate: a row a message, time to the right, what happened to it as marks.

Time is not to scale: a wait of seconds and a step of microseconds would not fit one picture, so gaps are shortened
(to the logarithm of their milliseconds), and the seconds stand below. At most `ROWS_MAX` messages are drawn, those in
violation first; the title says of how many. Colours are not the only sign: every mark has a shape of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from holdfast.errors import UsageError
from holdfast.lab.checking import RULES, Judgement
from holdfast.lab.experiment import HALVES, Experiment, HalfResult, Outcome, Result
from holdfast.lab.history import Event, History, read_history, write_history

COLUMNS: Final = ("risk", "engine", "seed", "outcome", "unsafe half", "safe half", "seconds")
RESULT: Final = "result.json"


class ResultsError(UsageError):
    """A directory of results that cannot be read."""


def row_of(result: Result) -> tuple[str, ...]:
    seconds = result.unsafe.seconds + result.safe.seconds
    return (
        f"{result.id} {result.title}",
        result.engine + (f", network by {result.network}" if result.network else ""),
        str(result.seed),
        result.outcome.value + (f", safe with {result.safe_seeds} seeds" if result.safe_seeds > 1 else ""),
        summary_of(result.unsafe.judgement),
        summary_of(result.safe.judgement),
        f"{seconds:.1f}",
    )


def save_result(result: Result, directory: Path) -> Path:
    """Keep a result and its histories; one of the same experiment, engine and seed is replaced."""
    folder = directory / f"{result.id}-{result.engine}-{result.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    for half in HALVES:
        write_history(result.half(half).history, folder / f"{half}.jsonl")
    text = json.dumps(result.as_json(), indent=2, ensure_ascii=False) + "\n"
    (folder / RESULT).write_text(text, encoding="utf-8")
    return folder


def load_results(directory: Path) -> list[Result]:
    paths = sorted(directory.glob(f"*/{RESULT}"))
    if not paths:
        raise ResultsError(
            f"no results in {directory}: `holdfast lab run --all --results {directory}` makes them"
        )
    return [_load(path) for path in paths]


def _load(path: Path) -> Result:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        halves = [
            HalfResult(
                Judgement.from_json(document[half]["judgement"]),
                document[half]["seconds"],
                read_history(path.parent / f"{half}.jsonl"),
            )
            for half in HALVES
        ]
        return Result(
            document["id"],
            document["title"],
            document["engine"],
            document["seed"],
            Outcome(document["outcome"]),
            tuple(document["reasons"]),
            halves[0],
            halves[1],
            document["safe_seeds"],
            document.get("network"),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path} is no result of the lab: {error}") from error


def picture(result: Result, experiment: Experiment | None) -> str:
    settings = {
        "unsafe": experiment.unsafe_setting if experiment else "",
        "safe": experiment.safe_setting if experiment else "",
    }
    halves = [
        (
            f"{half}: {settings[half]}" if settings[half] else half,
            result.half(half).history,
            result.half(half).judgement,
        )
        for half in HALVES
    ]
    return timeline_svg(f"{result.id}: {result.title} ({result.engine})", halves)


def page(results: Sequence[Result], experiments: Mapping[str, Experiment]) -> str:
    """Everything on one page that needs no other file."""
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row_of(result)) + "</tr>"
        for result in results
    )
    heads = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    sections = "\n".join(_section(result, experiments.get(result.id)) for result in results)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>holdfast lab</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 960px; color: #1f2328; background: #fff; }}
table {{ border-collapse: collapse; font-size: 13px; }} td, th {{ border: 1px solid #d0d7de; padding: 4px 8px; }}
th {{ text-align: left; background: #f6f8fa; }} svg {{ max-width: 100%; height: auto; }}
</style></head><body>
<h1>holdfast lab</h1>
<p>{escape(headline(results))}</p>
<table><thead><tr>{heads}</tr></thead><tbody>
{rows}
</tbody></table>
{sections}
</body></html>
"""


def _section(result: Result, experiment: Experiment | None) -> str:
    reasons = "".join(f"<p>{escape(reason)}</p>" for reason in result.reasons)
    name = f"{result.id}-{result.engine}-{result.seed}"
    heading = f"<h2>{escape(result.id)} on {result.engine}: {result.outcome.value}</h2>"
    return f'<section id="{name}">{heading}{reasons}{picture(result, experiment)}</section>'


def headline(results: Iterable[Result]) -> str:
    outcomes = [result.outcome for result in results]
    words = [f"{outcomes.count(each)} {each.value}" for each in Outcome if outcomes.count(each)]
    return f"{len(outcomes)} runs: {', '.join(words)}" if outcomes else "no runs"


def write_report(directory: Path, results: Sequence[Result], experiments: Mapping[str, Experiment]) -> None:
    """A table, and a picture for each experiment: of its first engine, by name."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [
        "# What the lab has shown",
        "",
        "Every loss made to happen by the unsafe setting, and not by the safe one; counted by the checker from the",
        "histories of the runs. `holdfast lab run --all --results DIR` and `holdfast lab report` make it anew.",
        "",
        f"{headline(results)}.",
        "",
        "| risk | engine | outcome | unsafe half | safe half | seconds |",
        "|---|---|---|---|---|---|",
    ]
    drawn: set[str] = set()
    for result in results:
        name, engine, _, outcome, unsafe, safe, seconds = row_of(result)
        if result.id not in drawn:
            drawn.add(result.id)
            (directory / f"{result.id}.svg").write_text(
                picture(result, experiments.get(result.id)), encoding="utf-8"
            )
        linked = name.replace(result.id, f"[{result.id}](../risks/{result.id}.md)", 1)
        lines.append(
            f"| {linked} ([picture]({result.id}.svg)) | {engine} | {outcome} | {unsafe} | {safe} | {seconds} |"
        )
    (directory / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def as_document(results: Sequence[Result]) -> dict[str, Any]:
    return {"schema": 1, "results": [result.as_json() for result in results]}


WIDTH: Final = 900
LEFT: Final = 130
RIGHT: Final = 130
ROW: Final = 15
ROWS_MAX: Final = 24
PLOTTED: Final = ("send", "ack", "fail", "unknown", "drop", "keep", "stored", "deliver", "handle")
COUNTED: Final = ("sent", "acknowledged", "failed", "unknown", "stored", "handled")
MARKS: Final[Mapping[str, tuple[str, str, str]]] = {
    # what it is, colour, path around (0, 0)
    "send": ("sent", "#5a6b7b", "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0"),
    "ack": ("acknowledged", "#1f6feb", "M-4,-4h8v8h-8z"),
    "fail": ("refused", "#8250df", "M-4,-4L4,4M-4,4L4,-4"),
    "unknown": ("outcome unknown", "#8250df", "M-4,0h8"),
    "drop": ("let go", "#bf8700", "M-4,-3h8l-4,7z"),
    "keep": ("kept aside", "#0a7f5a", "M-4,3h8l-4,-7z"),
    "stored": ("in the log", "#1a7f37", "M-4,-4h8v8h-8z"),
    "deliver": ("handed out", "#57606a", "M0,-4L4,0L0,4L-4,0z"),
    "handle": ("handled", "#1a7f37", "M0,-5L5,0L0,5L-5,0z"),
}
HOLLOW: Final = frozenset({"send", "deliver", "ack"})
RED: Final = "#cf222e"


def timeline_svg(title: str, halves: Sequence[tuple[str, History, Judgement]]) -> str:
    """One picture with a panel for each half: its caption, what happened, and what the checker made of it."""
    parts: list[str] = []
    top = 34.0
    for caption, history, judgement in halves:
        drawn, height = _panel(caption, history, judgement, top)
        parts += drawn
        top += height
    parts += _legend(top)
    height = top + 40
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="system-ui, sans-serif" font-size="11" role="img">'
    )
    background = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
    heading = f'<text x="12" y="20" font-size="14" font-weight="600" fill="#1f2328">{escape(title)}</text>'
    return "\n".join([head, f"<title>{escape(title)}</title>", background, heading, *parts, "</svg>\n"])


def summary_of(judgement: Judgement) -> str:
    """The counts that say something, and what was violated."""
    counts = [f"{judgement.counts[name]} {name}" for name in COUNTED if judgement.counts.get(name)]
    found = [f"{judgement.count(kind)} {kind}" for kind in RULES if judgement.count(kind)]
    return "; ".join([", ".join(counts), ", ".join(found) or "nothing lost, nothing twice"])


def _panel(caption: str, history: History, judgement: Judgement, top: float) -> tuple[list[str], float]:
    events = [event for event in history if event.kind in PLOTTED or event.kind == "fault"]
    at = _scale(events)
    ids = _chosen(events, judgement)
    faults = list(dict.fromkeys(event.text("what") for event in events if event.kind == "fault"))
    total = len({event.id for event in events if event.kind in PLOTTED})
    more = f" ({len(ids)} of {total} messages drawn)" if total > len(ids) else ""
    bottom = top + 40 + ROW * len(ids)
    parts = [
        f'<text x="12" y="{top + 10:.0f}" font-weight="600" fill="#1f2328">{escape(caption)}</text>',
        f'<text x="12" y="{top + 25:.0f}" fill="#57606a">{escape(summary_of(judgement) + more)}</text>',
    ]
    parts += _faults(events, faults, at, top + 32, bottom)
    violated = {each.id: each.kind for each in reversed(judgement.violations)}
    for row, message in enumerate(ids):
        parts += _row(message, violated.get(message), events, at, top + 44 + ROW * row)
    seconds = (events[-1].t - events[0].t) / 1e9 if events else 0.0
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{bottom + 10:.0f}" text-anchor="end" fill="#57606a">{seconds:.1f} s</text>'
    )
    for number, what in enumerate(faults):
        text = escape(f"⚡{number + 1} {what}")
        parts.append(f'<text x="{LEFT}" y="{bottom + 10 + 13 * number:.0f}" fill="{RED}">{text}</text>')
    return parts, bottom - top + 24 + 13 * max(len(faults) - 1, 0)


def _scale(events: Sequence[Event]) -> dict[int, float]:
    """Where each moment stands, gaps shortened."""
    where: dict[int, float] = {}
    sum_so_far, last = 0.0, None
    for event in events:
        if last is not None:
            sum_so_far += math.log1p(max(event.t - last, 0) / 1e6) + 0.02
        last = event.t
        where[event.t] = sum_so_far
    width = WIDTH - LEFT - RIGHT
    return {t: LEFT + width * value / (sum_so_far or 1) for t, value in where.items()}


def _chosen(events: Sequence[Event], judgement: Judgement) -> list[str]:
    """Which messages are drawn, in the order they first appear."""
    ids = list(dict.fromkeys(event.id for event in events if event.kind in PLOTTED))
    if len(ids) <= ROWS_MAX:
        return ids
    violated = {each.id for each in judgement.violations}
    wanted = [each for each in ids if each in violated][: ROWS_MAX - 4]
    others = [each for each in ids if each not in violated]
    room = ROWS_MAX - len(wanted)
    step = max(len(others) // room, 1)
    chosen = {*wanted, *others[::step][:room]}
    return [each for each in ids if each in chosen]


def _faults(
    events: Sequence[Event], faults: Sequence[str], at: Mapping[int, float], top: float, bottom: float
) -> list[str]:
    """A line for each, with the number that stands before its name below."""
    return [
        f'<line x1="{at[event.t]:.1f}" x2="{at[event.t]:.1f}" y1="{top:.0f}" y2="{bottom - 6:.0f}" '
        f'stroke="{RED}" stroke-dasharray="4 3"/>'
        f'<text x="{at[event.t] + 3:.1f}" y="{top + 6:.0f}" fill="{RED}" font-size="9">'
        f"{faults.index(event.text('what')) + 1}</text>"
        for event in events
        if event.kind == "fault"
    ]


def _row(
    message: str, violation: str | None, events: Sequence[Event], at: Mapping[int, float], y: float
) -> list[str]:
    mine = [event for event in events if event.id == message and event.kind in PLOTTED]
    colour = RED if violation else "#1f2328"
    label = message if len(message) <= 18 else f"{message[:17]}…"
    start, end = at[mine[0].t], at[mine[-1].t]
    parts = [
        f'<text x="{LEFT - 12}" y="{y + 4:.0f}" text-anchor="end" fill="{colour}">{escape(label)}</text>',
        f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{y:.0f}" y2="{y:.0f}" stroke="#d0d7de"/>',
    ]
    for event in mine:
        what, mark, path = MARKS[event.kind]
        fill = "#ffffff" if event.kind in HOLLOW else mark
        parts.append(
            f'<path d="{path}" transform="translate({at[event.t]:.1f},{y:.0f})" fill="{fill}" stroke="{mark}" '
            f'stroke-width="1.5"><title>{escape(f"{message}: {what} ({event.actor})")}</title></path>'
        )
    if violation:
        parts.append(
            f'<text x="{WIDTH - RIGHT + 14}" y="{y + 4:.0f}" fill="{RED}" font-weight="600">✗ '
            f"{escape(violation)}</text>"
        )
    return parts


def _legend(top: float) -> list[str]:
    parts: list[str] = []
    x = 12.0
    for kind, (what, colour, path) in MARKS.items():
        fill = "#ffffff" if kind in HOLLOW else colour
        parts.append(
            f'<path d="{path}" transform="translate({x + 5:.0f},{top + 14:.0f})" fill="{fill}" '
            f'stroke="{colour}" stroke-width="1.5"/>'
            f'<text x="{x + 14:.0f}" y="{top + 18:.0f}" fill="#57606a" font-size="10">{escape(what)}</text>'
        )
        x += 28 + 5.9 * len(what)
    note = "time to the right, long waits shortened"
    parts.append(f'<text x="12" y="{top + 33:.0f}" fill="#57606a" font-size="10">{note}</text>')
    return parts
