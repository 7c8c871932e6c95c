"""What a run reads of its home, and when."""

from __future__ import annotations

from pathlib import Path

from holdfast.pipeline.definition.fingerprint import canonical
from holdfast.pipeline.definition.loading import parse_yaml
from holdfast.pipeline.engine.home import Home

DEFINITION = """
pipeline: orders
source: {topics: orders, bootstrap: "localhost:9092", value: {format: json, fields: {id: long}}}
sinks: [parquet: {path: out}]
"""


def test_the_definition_that_is_kept_is_read_when_a_run_begins_and_not_after_every_batch(
    tmp_path: Path,
) -> None:
    """One that cannot be read any more stops the next start; what runs needs nothing of it."""
    home = Home(str(tmp_path), "orders")
    definition = canonical(parse_yaml(DEFINITION, directory=str(tmp_path)).definition)
    home.note_definition(definition)
    kept = tmp_path / "definition.json"
    kept.unlink()
    kept.symlink_to("definition.json")
    home.note_definition(definition)
    assert kept.is_symlink()
