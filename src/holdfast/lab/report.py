"""Results of the lab on paper: rows for a table, JSON, a page with a picture of each message's fate.

A directory of results has a folder for each run, `HF101-holdfast-1`, with `result.json` and the two histories it was
judged by, so that `holdfast check` can judge them again. `write_report` makes of it what is read in a repository
(`README.md` and a picture for each experiment), `page` what is read in a browser: one file with everything in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from holdfast.errors import UsageError
from holdfast.lab.checking import Judgement
from holdfast.lab.experiment import HALVES, Experiment, HalfResult, Outcome, Result
from holdfast.lab.history import read_history, write_history
from holdfast.lab.timeline import summary_of, timeline_svg

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
