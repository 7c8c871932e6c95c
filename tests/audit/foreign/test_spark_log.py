"""What a streaming query wrote down: read as Spark reads it, and what is no such thing is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.audit.checkpoint import read_query_log
from holdfast.audit.model import AuditError
from holdfast.errors import UsageError
from holdfast.pipeline.positions import Place, Position, Positions
from holdfast.pipeline.source import to_offset
from holdfast.reader import TopicPartition

if TYPE_CHECKING:
    from .conftest import World

ZERO, ONE = TopicPartition("orders", 0), TopicPartition("orders", 1)


def write(directory: Path, number: int, *sources: str, version: str = "v1") -> None:
    (directory / "offsets").mkdir(exist_ok=True, parents=True)
    (directory / "commits").mkdir(exist_ok=True)
    (directory / "offsets" / str(number)).write_text("\n".join([version, "{}", *sources]))
    (directory / "commits" / str(number)).write_text("v1\n{}")


def test_a_query_that_is_known_from_its_beginning(world: World) -> None:
    world.batches({0: 5}, {0: 9, 1: 4}, {0: 12, 1: 4}, committed=1, start={0: 2})
    log = read_query_log(str(world.checkpoint))
    assert log.is_whole
    assert (log.query_id, log.first, log.committed, log.planned, log.batch_ids) == ("3a0b", 0, 1, 2, (0, 1))
    # A partition that was added begins at its first offset.
    assert log.scopes == {ZERO: (2, 9), ONE: (0, 4)}
    assert log.planned_ends == {ZERO: 12, ONE: 4}


def test_without_its_beginning_the_oldest_entry_is_where_the_scope_begins(world: World) -> None:
    world.batches({0: 5}, {0: 9}, {0: 12}, first=17)
    (world.checkpoint / "offsets" / ".18.crc").write_bytes(b"x")
    log = read_query_log(f"file://{world.checkpoint}/")
    assert not log.is_whole
    assert (log.first, log.batch_ids, log.scopes) == (18, (18, 19), {ZERO: (5, 12)})


def test_entries_that_name_their_sources(tmp_path: Path) -> None:
    write(tmp_path, 3, 'a:b:{"x":{"0":1}}'.replace("a:b", "ab"), "cd:-", version="v2")
    write(tmp_path, 4, 'ab:{"x":{"0":7}}', 'cd:{"y":{"0":2}}', version="v2")
    assert read_query_log(str(tmp_path)).scopes == {
        TopicPartition("x", 0): (1, 7),
        TopicPartition("y", 0): (0, 2),
    }


def test_offsets_of_our_own_source_tell_the_topics_id(tmp_path: Path) -> None:
    from uuid import UUID

    place = Place("orders", UUID(int=7), 0)
    for number, offset in ((0, 5), (1, 9)):
        write(tmp_path, number, json.dumps(to_offset(Positions({place: Position(offset, 1)}))))
    log = read_query_log(str(tmp_path))
    assert (log.scopes, log.topic_ids) == ({ZERO: (5, 9)}, {"orders": UUID(int=7)})


def test_several_sources_are_taken_together_or_one_by_one(tmp_path: Path) -> None:
    rate = '{"value":3}'
    write(tmp_path, 0, '{"orders":{"0":1}}', "-", rate)
    write(tmp_path, 1, '{"orders":{"0":5}}', '{"bills":{"0":3}}', rate)
    log = read_query_log(str(tmp_path))
    assert log.scopes == {ZERO: (1, 5), TopicPartition("bills", 0): (0, 3)}
    assert log.left_out == (f"source 2: {rate}",)
    alone = read_query_log(str(tmp_path), 0)
    assert (alone.scopes, alone.left_out) == ({ZERO: (1, 5)}, ())
    with pytest.raises(UsageError, match="--source 3"):
        read_query_log(str(tmp_path), 3)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("v1\n{}", "is cut short"),
        ("", "is cut short"),
        ("v7\n{}\n{}", "has the version 'v7'"),
        ('v1\n{}\n{"orders":', "cannot be read"),
        ("v2\n{}\nnothing", "no source's name"),
    ],
)
def test_entries_that_cannot_be_read_are_named(tmp_path: Path, content: str, complaint: str) -> None:
    write(tmp_path, 0, '{"orders":{"0":1}}')
    (tmp_path / "offsets" / "1").write_text(content)
    with pytest.raises(AuditError, match=complaint) as refused:
        read_query_log(str(tmp_path))
    assert "offsets/1" in str(refused.value)


def test_directories_that_are_no_checkpoint_are_refused_with_a_hint(world: World) -> None:
    world.batches({0: 5})
    with pytest.raises(UsageError, match="there is no such directory"):
        read_query_log(str(world.directory / "none"))
    with pytest.raises(UsageError, match="holds some: checkpoint"):
        read_query_log(str(world.directory))
    with pytest.raises(UsageError, match="name the directory above"):
        read_query_log(str(world.checkpoint / "offsets"))
    with pytest.raises(UsageError, match="it has no directory 'offsets'"):
        read_query_log(str(world.out))
    (world.checkpoint / "offsets" / "0").unlink()
    with pytest.raises(AuditError, match="has not planned a batch yet"):
        read_query_log(str(world.checkpoint))
