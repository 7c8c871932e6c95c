"""The ratios and their targets as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.report import Line

MET, NOT_MET, REPORTED = "#2a7f4f", "#b3382c", "#8a8f98"


def draw(lines: Sequence[Line], path: Path) -> None:
    """A row per ratio: the median, the quartiles as a bar, the target as a tick; on a logarithmic axis."""
    import matplotlib as mpl

    mpl.use("svg")
    # Fixed names inside the file, so that the same figures give the same bytes.
    mpl.rcParams["svg.hashsalt"] = "holdfast"
    from matplotlib import pyplot

    # A logarithmic axis has no place for zero, nor for less.
    drawn = [line for line in lines if line.ratio is not None and line.ratio.low_quartile > 0]
    canvas, axes = pyplot.subplots(figsize=(10, 1.2 + 0.26 * max(len(drawn), 1)))
    for place, line in enumerate(drawn):
        ratio, row = line.ratio, line.row
        assert ratio is not None
        colour = {"met": MET, "not met": NOT_MET}.get(line.verdict, REPORTED)
        axes.plot([ratio.low_quartile, ratio.high_quartile], [place, place], color=colour, lw=4, alpha=0.4)
        axes.plot([ratio.median], [place], "o", color=colour, ms=5)
        target = row.at_most if row.at_most is not None else row.at_least
        if target is not None:
            axes.plot([target], [place], "|", color="black", ms=11, mew=1.5)
            # The wanted side of the target.
            axes.plot([target], [place], "<" if row.at_most is not None else ">", color="black", ms=4)
    axes.axvline(1.0, color="#c8ccd2", lw=1, zorder=0)
    axes.set_xscale("log")
    axes.set_yticks(range(len(drawn)), [line.row.title.replace("**", "") for line in drawn], fontsize=7)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel(
        "ours by theirs, median and quartiles of the rounds; | is the target, < > its wanted side"
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    canvas.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, metadata={"Date": None})
    pyplot.close(canvas)
