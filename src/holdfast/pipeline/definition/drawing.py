"""A definition as a picture: the chain of steps on the left, what leaves it in the middle, sinks on the right.

One SVG without script, font or anything fetched. Colours follow the reader's light or dark theme. Whatever comes from
the definition is escaped, and secrets stay references, since the words are those of `explain`.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from holdfast.pipeline.definition import model
from holdfast.pipeline.definition.explaining import Explanation, Hop, explain, short
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME
from holdfast.pipeline.definition.streams import DUPLICATES, LATE, MAIN, streams_of, takers

BOX_PX: Final = (250, 44)
COLUMNS_PX: Final = (20, 330, 640)
ROW_PX: Final = 60
TOP_PX: Final = 56
WORDS_MAX: Final = 38
"""Characters that a box has room for; the whole text is the box's title, which browsers show."""
STREAMS: Final = {"": "rows it makes", LATE: "rows that came too late", DUPLICATES: "rows seen before"}
STYLE: Final = (
    "text{font:12px system-ui,sans-serif;fill:#1c2733}.name{font-weight:600}.quiet{fill:#66758a}"
    "rect{fill:#fff;stroke:#9fb0c3;rx:6px}.sink rect{fill:#e8f5ee;stroke:#3a9d6a}"
    ".side rect{fill:#fdf3e1;stroke:#d29b3b}"
    "path{fill:none;stroke:#7b8da3;stroke-width:1.4}svg{background:#f7f9fb}"
    "@media(prefers-color-scheme:dark){text{fill:#dbe4ee}.quiet{fill:#93a3b8}rect{fill:#1d2835;stroke:#51647a}"
    ".sink rect{fill:#16332a}.side rect{fill:#3a2f1a}path{stroke:#7f93aa}svg{background:#121a23}}"
)


@dataclass
class Canvas:
    """Boxes by row and column, and the arrows between them."""

    rows: int = 0
    parts: list[str] = field(default_factory=list)

    def box(self, column: int, row: int, name: str, what: str, css: str = "") -> tuple[int, int]:
        width, height = BOX_PX
        x, y = COLUMNS_PX[column], TOP_PX + row * ROW_PX
        self.rows = max(self.rows, row + 1)
        self.parts.append(
            f'<g class="{css}"><title>{html.escape(f"{name}: {what}")}</title>'
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}"/>'
            f'<text class="name" x="{x + 10}" y="{y + 18}">{html.escape(short(name, WORDS_MAX))}</text>'
            f'<text class="quiet" x="{x + 10}" y="{y + 35}">{html.escape(short(what, WORDS_MAX))}</text></g>'
        )
        return column, row

    def arrow(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """Down to a box of the same column; down and across to one below; else across, and up or down in the lane
        before the other's column."""
        width, height = BOX_PX
        (column, row), (to_column, to_row) = start, end
        x, y = COLUMNS_PX[column], TOP_PX + row * ROW_PX
        to_x, to_y = COLUMNS_PX[to_column], TOP_PX + to_row * ROW_PX + height // 2
        if column == to_column:
            path = f"M{x + width // 2} {y + height}V{to_y - height // 2}"
        elif to_column - column > 1 and to_row > row:
            path = f"M{x + width // 2} {y + height}V{to_y}H{to_x}"
        else:
            path = f"M{x + width} {y + height // 2}H{to_x - 18 - 10 * (to_column - column)}V{to_y}H{to_x}"
        self.parts.append(f'<path d="{path}" marker-end="url(#end)"/>')

    def svg(self, title: str) -> str:
        width, height = COLUMNS_PX[-1] + BOX_PX[0] + 20, TOP_PX + self.rows * ROW_PX + 4
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
                f"<title>{html.escape(title)}</title><style>{STYLE}</style>",
                '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
                ' orient="auto"><path d="M1 1L7 4L1 7"/></marker></defs>',
                f'<text class="name" x="20" y="30" style="font-size:16px">{html.escape(title)}</text>',
                *self.parts,
                "</svg>\n",
            )
        )


def draw(definition: model.PipelineDefinition) -> str:
    """The definition as an SVG document."""
    explanation = explain(definition)
    canvas = Canvas()
    sinks = {hop.name: hop for hop in explanation.sinks}
    dead = canvas.box(2, 0, sinks[DEAD_LETTER_NAME].name, sinks[DEAD_LETTER_NAME].what, "side")
    row, sink_row = 0, 1
    above: tuple[int, int] | None = None
    for hop, step in _chain(definition, explanation):
        box = canvas.box(0, row, f"{hop.kind} {hop.name}" if step else hop.name, hop.what)
        if above is not None:
            canvas.arrow(above, box)
        above = box
        if hop.kind == "parse" or (isinstance(step, model.Expect) and step.otherwise == "quarantine"):
            canvas.arrow(box, dead)
        side_row = row
        for stream in () if step is None else streams_of(step):
            taken = takers(definition, stream)
            words = STREAMS[stream.kind] + ("" if taken else ", counted only")
            side = canvas.box(1, side_row, stream.text, words, "side")
            canvas.arrow(box, side)
            for sink in taken:
                sink_row = max(sink_row, side_row)
                canvas.arrow(side, canvas.box(2, sink_row, sink.name, sinks[sink.name].what, "sink"))
                sink_row += 1
            side_row = max(side_row + 1, sink_row if taken else 0)
        row = max(row + 1, side_row)
    sink_row = max(sink_row, row)
    for sink in takers(definition, MAIN):
        if above is not None:
            canvas.arrow(above, canvas.box(2, sink_row, sink.name, sinks[sink.name].what, "sink"))
        sink_row += 1
    return canvas.svg(f"pipeline {definition.name}")


def _chain(
    definition: model.PipelineDefinition, explanation: Explanation
) -> Iterator[tuple[Hop, model.Step | None]]:
    """The hops that every row goes through; the last of them are the steps."""
    steps_at = len(explanation.before) - len(definition.steps)
    for at, hop in enumerate(explanation.before):
        yield hop, definition.steps[at - steps_at] if at >= steps_at else None
