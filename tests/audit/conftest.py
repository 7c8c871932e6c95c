"""Reports made by hand, for what shows and keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

import pytest

from holdfast.audit.model import (
    Fate,
    Finding,
    PartitionAccount,
    Report,
    Scope,
    SinkAccount,
    Timeline,
    Unproven,
    WindowAccount,
)
from holdfast.pipeline.positions import Place

TOPIC_ID = UUID(int=7)
PLACES = tuple(Place("orders", TOPIC_ID, number) for number in range(3))

FINDINGS = {
    "lost": Finding(
        Fate.LOST,
        "parquet",
        PLACES[1],
        ((204, 206), (811, 811)),
        4,
        ("c-118", "c-9"),
        "in no sink, in no route",
    ),
    "duplicated": Finding(
        Fate.DUPLICATED, "postgres", PLACES[2], ((7, 7),), 1, ("c-7",), "twice in the table"
    ),
    "altered": Finding(Fate.ALTERED, "totals", None, (), 1, ("city=Kiel",), "it counts 41 rows, not 42"),
}
UNPROVEN = {
    "filtered": Unproven(
        "that step 'no-trials' was right to filter 90 records", "--spark evaluates it again"
    ),
    "expired": Unproven("offsets 0 to 99 of orders-0", "they expired before the audit", is_gap=True),
}


@pytest.fixture
def make_report() -> Callable[..., Report]:
    """A report of three partitions with these findings and gaps, by their names above or as they are."""

    def make(
        *wrong: str | Finding,
        unproven: Sequence[str | Unproven] = ("filtered",),
        subject: str = "orders",
        end: int = 1000,
    ) -> Report:
        findings = tuple(FINDINGS[each] if isinstance(each, str) else each for each in wrong)

        def lost(place: Place, fate: Fate) -> int:
            return sum(each.count for each in findings if each.place == place and each.fate is fate)

        partitions = tuple(
            PartitionAccount(
                place,
                0,
                end,
                {"record": 990, "control": 10},
                {
                    "output": 900 - lost(place, Fate.LOST),
                    "filtered": 30,
                    "dead_letter": 60,
                    "lost": lost(place, Fate.LOST),
                    "duplicated": lost(place, Fate.DUPLICATED),
                },
                0,
                end + 50,
                "0123456789abcdef",
            )
            for place in PLACES
        )
        positions = {f"orders-{number}": end for number in range(3)}
        return Report(
            subject,
            "pipeline",
            1_763_200_130_000,
            8_123,
            Scope("the pipeline's first entry", "the lowest position of all sinks", 3 * end, 0, 150),
            partitions,
            (
                SinkAccount("parquet", "parquet", 2_700, 4, positions, {"output": 2_700}),
                SinkAccount("postgres", "postgres", 2_700, 4, positions, {"output": 2_700}),
                SinkAccount("totals", "parquet", 41, 4, positions, {"aggregated": 2_700}, "totals"),
            ),
            (WindowAccount("totals", "totals", 41, 2_700, 41, 41, 2),),
            findings,
            tuple(UNPROVEN[each] if isinstance(each, str) else each for each in unproven),
            Timeline(
                1000, (1_763_200_000_000, 1_763_200_001_000), {"output": (1_400, 1_300), "lost": (0, 4)}
            ),
            {"parquet": 150, "postgres": 150, "totals": 150},
            ("a note",),
            "f" * 64,
            {"holdfast": "0.1.0"},
        )

    return make
