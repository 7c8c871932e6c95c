"""A ledger of files tells the batches of the pipeline's present life, whatever else lies beside them."""

from __future__ import annotations

import itertools
import os
import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from holdfast.pipeline.definition.model import DeltaSink, PipelineDefinition, Source
from holdfast.pipeline.engine.history import beginnings, kept_entries, of_entries
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import BatchRange, Place, Positions, Span, to_text
from holdfast.pipeline.sinks.delta import DeltaSinkWriter, PreparedDelta

P0, P1 = (Place("orders", uuid.UUID(int=7), number) for number in range(2))
Spans = dict[Place, tuple[int, int]]


@dataclass
class Lake:
    """A Delta sink that is given entries without rows."""

    path: Path
    time_ms: int = 1_000
    definition: PipelineDefinition = field(init=False)

    def __post_init__(self) -> None:
        sink = DeltaSink(str(self.path), name="lake")
        self.definition = PipelineDefinition("shop", Source(), sinks=(sink,))
        self.sink = DeltaSinkWriter(sink, "shop")
        write_deltalake(str(self.path), pa.table({"id": pa.array([1])}))

    def entry(self, spans: Spans, before: Entry | None) -> Entry:
        taken = BatchRange({place: Span(*span, 3) for place, span in spans.items()})
        standing = Positions({}) if before is None else before.positions
        self.time_ms += 10
        number = 0 if before is None else before.number + 1
        return Entry("shop", "lake", number, taken, standing.moved(taken), self.time_ms, "f")

    def live(self, *batches: Spans) -> list[Entry]:
        """What a pipeline commits from its opening on."""
        return self.go_on(None, *batches)

    def go_on(self, last: Entry | None, *batches: Spans) -> list[Entry]:
        made = []
        for spans in batches:
            last = self.entry(spans, last)
            self.sink.commit(PreparedDelta(self.sink, None, []), last)
            made.append(last)
        return made

    def fail(self, spans: Spans, before: Entry) -> None:
        """The entry of a commit that was cut short."""
        text = to_text(self.entry(spans, before).as_json())
        (self.directory / f"{secrets.randbits(62)}.json").write_text(text)

    @property
    def directory(self) -> Path:
        return Path(self.sink.ledger.directory)

    def told(self) -> Sequence[Entry] | None:
        return kept_entries(self.definition, self.definition.sinks[0])


@pytest.fixture(params=["oldest first", "newest first"])
def lake(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """Whatever order its directory is listed in."""
    numbers = itertools.count(10**6)
    monkeypatch.setattr(secrets, "randbits", lambda bits: next(numbers))
    listed: Callable[[str], list[str]] = os.listdir
    is_backwards = request.param == "newest first"
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listed(path), reverse=is_backwards))
    return Lake(tmp_path / "lake")


def test_entries_of_a_life_before_the_reset_are_not_of_this_one(lake: Lake) -> None:
    lake.live({P0: (0, 0), P1: (0, 0)}, {P0: (0, 50), P1: (0, 40)}, {P0: (50, 100)}, {P1: (40, 60)})
    lake.sink.forget()
    second = lake.live({P0: (100, 100), P1: (60, 60)}, {P0: (100, 110), P1: (60, 70)}, {P0: (110, 120)})
    assert lake.told() == second
    assert beginnings(of_entries(lake.told() or ())) == {P0: 100, P1: 60}


def test_a_life_that_took_the_same_batches_has_its_own_times(lake: Lake) -> None:
    batches: Sequence[Spans] = ({P0: (0, 0)}, {P0: (0, 50)}, {P0: (50, 100)})
    lake.live(*batches)
    lake.sink.forget()
    assert lake.told() is None
    second = lake.live(*batches)
    assert lake.told() == second


def test_what_a_commit_that_failed_left_is_not_taken(lake: Lake) -> None:
    first = lake.live({P0: (0, 0)})
    lake.fail({P0: (0, 7)}, first[-1])
    (lake.directory / "77.json").write_text('{"version": 1, "num')
    first += lake.go_on(first[-1], {P0: (0, 50)}, {P1: (0, 0)}, {P0: (50, 60), P1: (0, 5)})
    lake.fail({P0: (60, 61)}, first[-1])
    assert lake.told() == first


def test_a_ledger_that_lacks_an_entry_does_not_tell_where_it_began(lake: Lake) -> None:
    made = lake.live({P0: (0, 0)}, {P0: (0, 50)}, {P0: (50, 60)})
    assert lake.told() == made
    (lake.directory / f"{10**6 + 1}.json").unlink()
    assert lake.told() is None
