"""Windows of event time as SQL: which ones a row belongs to, when they close, and which rows are too late for them.

Times are milliseconds since the epoch, as Kafka's are; what an event time has below a millisecond plays no part. A
window of `size` starts at a multiple of `size` (sliding: of `every`). A session is what rows make together: each
reaches from its time to `gap` later, and those that touch are one.

- A row is late for a window that ends at or before the row's own watermark (`_hf.watermark`), and late altogether when
  that goes for every window it belongs to. A row without event time is late.
- Windows close when the pipeline's watermark reaches their end. Sessions wait `gap` longer: a row that is not late, for
  its own reach is not over, could still touch one that ended less than that before.
- With `late: correct` a window is remembered for `correct_within` more, and a row is late only after that.

So nothing that is not late can belong to something that is forgotten, however the rows are cut into batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.core.sql import quoted
from holdfast.pipeline.definition.model import Window
from holdfast.pipeline.definition.units import parse_duration_ms
from holdfast.pipeline.state.segments import UNTIL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EVENT_MS: Final = "unix_millis(_hf.event_time)"
WATERMARK_MS: Final = "unix_millis(_hf.watermark)"
START: Final = "_start"
END: Final = "_end"
"""Of a session; other windows end where their size says."""
LAST: Final = "_last"
"""The start of the last of the sliding windows that a row belongs to; `_start` is that of the first."""


@dataclass(frozen=True)
class Spans:
    """The windows of one step."""

    kind: str
    size_ms: int
    """Session: the gap."""
    every_ms: int
    hold_ms: int
    """How long a window is remembered after it closed, to be corrected."""

    @property
    def is_session(self) -> bool:
        return self.kind == "session"

    @property
    def wait_ms(self) -> int:
        """From a window's end until it closes."""
        return self.size_ms if self.is_session else 0

    @property
    def is_sliding(self) -> bool:
        return self.kind == "sliding"

    @property
    def spread_ms(self) -> int:
        """How much earlier than a row of the state the first window it belongs to may be over."""
        return self.size_ms if self.is_sliding else 0

    @property
    def times(self) -> tuple[str, ...]:
        """The columns of a window's time in the state."""
        return (START, END) if self.is_session else (START, LAST) if self.is_sliding else (START,)

    @property
    def end(self) -> str:
        """When a window ends, as SQL."""
        return END if self.is_session else f"{START} + {self.size_ms}L"

    @property
    def until(self) -> str:
        """When a row of the state is over, as SQL: its window, or the last of them, is forgotten."""
        end = f"{LAST} + {self.size_ms}L" if self.is_sliding else self.end
        return f"{end} + {self.wait_ms + self.hold_ms}L"

    @property
    def latest_start(self) -> str:
        """Of the windows a row belongs to, as SQL over rows."""
        return EVENT_MS if self.is_session else f"{EVENT_MS} - pmod({EVENT_MS}, {self.every_ms}L)"

    @property
    def is_late(self) -> str:
        """Whether a row is late for every window it belongs to, as SQL over rows."""
        over = f"{self.latest_start} + {self.size_ms + self.hold_ms}L <= {WATERMARK_MS}"
        return f"coalesce({over}, _hf.event_time IS NULL)"

    def assigned(self, rows: DataFrame) -> DataFrame:
        """Rows with the times of their window, or of their first and last; a late row has null."""
        if not self.is_sliding:
            marked = rows.selectExpr(
                "*", f"CASE WHEN NOT {self.is_late} THEN {self.latest_start} END AS {START}"
            )
            return (
                marked.selectExpr("*", f"{START} + {self.size_ms}L AS {END}") if self.is_session else marked
            )
        holding = f"{EVENT_MS} - {self.size_ms - 1}L"
        in_time = f"{WATERMARK_MS} - {self.size_ms + self.hold_ms - 1}L"
        # `greatest` passes over null: without a watermark nothing is late.
        first = f"greatest({self._at_or_after(holding)}, {self._at_or_after(in_time)})"
        return rows.selectExpr(
            "*",
            f"CASE WHEN NOT {self.is_late} THEN {first} END AS {START}",
            f"CASE WHEN NOT {self.is_late} THEN {self.latest_start} END AS {LAST}",
        )

    def _at_or_after(self, time: str) -> str:
        """The first start of a window that is not before this time."""
        return f"({time}) + pmod(-({time}), {self.every_ms}L)"

    def spread(self, pieces: DataFrame) -> DataFrame:
        """Rows of the state, one for each window they belong to."""
        if not self.is_sliding:
            return pieces
        others = [quoted(name) for name in pieces.columns if name not in (START, LAST, UNTIL)]
        each = pieces.selectExpr(*others, f"explode(sequence({START}, {LAST}, {self.every_ms}L)) AS {START}")
        return each.selectExpr("*", f"{self.end} + {self.hold_ms}L AS {UNTIL}")


def spans_of(step: Window) -> Spans:
    hold_ms = parse_duration_ms(step.correct_within) if step.late == "correct" else 0
    size = step.gap if step.kind == "session" else step.size
    if size is None:
        raise StepError(
            step.name, f"a {step.kind} window needs `{'gap' if step.kind == 'session' else 'size'}`"
        )
    size_ms = parse_duration_ms(size)
    every_ms = size_ms
    if step.kind == "sliding":
        if step.every is None:
            raise StepError(step.name, "a sliding window needs `every`")
        every_ms = parse_duration_ms(step.every)
    if every_ms <= 0 or size_ms < every_ms:
        raise StepError(step.name, "a window is longer than nothing, and `every` is at most its `size`")
    return Spans(step.kind, size_ms, every_ms, hold_ms)
