"""What a worker says it wrote is looked for by the driver before anything is committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.pipeline.sinks.base import SinkError
from holdfast.pipeline.sinks.writing import FileSet, WrittenFile, require_there


@pytest.mark.parametrize(
    ("content", "told"), [(None, "the driver finds no such file"), (b"abc", "the driver finds 3 bytes")]
)
def test_a_file_that_only_the_worker_has_stops_the_batch(
    content: bytes | None, told: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "part.parquet").write_bytes(content)
    with pytest.raises(SinkError, match=f"a worker wrote 7 bytes to .*{told}.*Nothing was committed"):
        require_there(FileSet(str(tmp_path)), WrittenFile("part.parquet", 1, 7, 0))


def test_a_file_that_is_there_is_taken(tmp_path: Path) -> None:
    (tmp_path / "part.parquet").write_bytes(b"content")
    require_there(FileSet(str(tmp_path)), WrittenFile("part.parquet", 1, 7, 0))
