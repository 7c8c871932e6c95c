"""The cache of a state: never ahead of its changelog, never another's, thrown away when it cannot be trusted."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

from holdfast.client import changelog
from holdfast.client.changelog import CacheTaken, Restoration, RestoreTarget, StateCache
from holdfast.client.state import State

DAY_MS = 86_400_000


def opened(tmp_path: Path, changelog_id: str = "id", age_ms_max: int = DAY_MS) -> StateCache:
    return StateCache(str(tmp_path / "group" / "topic-0.sqlite"), changelog_id, age_ms_max=age_ms_max)


def test_values_and_position_are_there_again(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.apply([(b"a", b"1"), (b"b", b"2"), (b"a", None), (b"c", b"")], 4)
    cache.close()
    again = opened(tmp_path)
    assert (again.position, again.get(b"a"), again.get(b"b"), again.get(b"c")) == (4, None, b"2", b"")
    assert list(again.all_keys()) == [b"b", b"c"]
    again.close()


def test_flushes_are_full(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    assert cache._connection.execute("pragma synchronous").fetchone() == (2,)
    cache.close()


def test_a_cache_of_another_changelog_is_thrown_away(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.apply([(b"a", b"1")], 1)
    cache.close()
    again = opened(tmp_path, "made anew")
    assert (again.position, again.get(b"a")) == (0, None)
    again.close()


def test_a_cache_that_slept_past_deletions_is_thrown_away(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.apply([(b"a", b"1")], 1)
    cache._connection.execute("update reflects set saved_ms = saved_ms - ?", (DAY_MS,))
    cache.close()
    again = opened(tmp_path, age_ms_max=DAY_MS // 2)
    assert (again.position, again.get(b"a")) == (0, None)
    again.close()


def test_a_cache_that_a_frozen_process_keeps_locked_is_begun_anew_in_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changelog, "BUSY_SECONDS", 0.05)
    frozen = opened(tmp_path)
    frozen.apply([(b"a", b"1")], 1)
    frozen._connection.execute("begin immediate")
    successor = opened(tmp_path)
    assert (successor.position, successor.get(b"a")) == (0, None)
    successor.apply([(b"a", b"2")], 2)
    frozen._connection.execute("insert or replace into state values (?, ?)", (b"a", b"late"))
    frozen._connection.execute("commit")
    frozen.close()
    assert successor.get(b"a") == b"2"
    third = opened(tmp_path)
    assert (third.position, third.get(b"a")) == (2, b"2")
    with pytest.raises(CacheTaken, match="another owner"):
        successor.apply([(b"a", b"3")], 3)
    third._connection.execute("begin immediate")
    with pytest.raises(CacheTaken, match="locked by another process"):
        successor.apply([(b"a", b"3")], 3)
    third._connection.execute("rollback")
    third.close()
    successor.close()
    assert [path.name for path in (tmp_path / "group").iterdir()] == ["topic-0.sqlite.1"]


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 100])
def test_a_damaged_file_is_thrown_away(tmp_path: Path, content: bytes) -> None:
    opened(tmp_path).close()
    (tmp_path / "group" / "topic-0.sqlite").write_bytes(content)
    again = opened(tmp_path)
    assert again.position == 0
    again.apply([(b"a", b"1")], 1)
    again.close()


def test_a_former_owner_writes_nothing_more(tmp_path: Path) -> None:
    former = opened(tmp_path)
    former.apply([(b"a", b"1")], 1)
    owner = opened(tmp_path)
    owner.apply([(b"a", b"2")], 2)
    with pytest.raises(CacheTaken):
        former.apply([(b"a", b"stale")], 2)
    assert (owner.get(b"a"), owner.position) == (b"2", 2)
    for each in (former, owner):
        each.close()


def test_failing_changes_leave_values_and_position(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.apply([(b"a", b"1")], 1)
    with pytest.raises(sqlite3.Error):
        cache.apply([(b"a", b"2"), (b"b", object())], 2)  # type: ignore[list-item]
    assert (cache.get(b"a"), cache.position) == (b"1", 1)
    cache.close()


def test_state_shows_open_changes_over_the_cache(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.apply([(b"a", b"1"), (b"b", b"2")], 2)
    state = State(cache)
    state[b"c"] = b"3"
    del state[b"a"]
    assert dict(state) == {b"b": b"2", b"c": b"3"}
    assert (len(state), b"a" in state, state.get(b"a")) == (2, False, None)
    with pytest.raises(KeyError):
        del state[b"a"]
    with pytest.raises(TypeError):
        state[b"d"] = "text"  # type: ignore[assignment]
    state.forget_changes()
    assert dict(state) == {b"a": b"1", b"b": b"2"}
    cache.close()


class Fetched:
    """What a consumer gives: a message, or with an error the end of the partition."""

    def __init__(self, offset: int, error: KafkaError | None = None) -> None:
        self._offset, self._error = offset, error

    def topic(self) -> str:
        return "totals-changelog"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def error(self) -> KafkaError | None:
        return self._error

    def key(self) -> bytes:
        return b"a"

    def value(self) -> bytes:
        return b"1"


def test_a_changelog_found_at_its_end_twice_in_one_step_is_restored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member, not yet fenced, wrote to it between the two."""
    end = KafkaError(KafkaError._PARTITION_EOF)
    fetched = [Fetched(0), Fetched(1, end), Fetched(1), Fetched(2, end)]

    class Consumer:
        def __init__(self, settings: dict[str, Any]) -> None: ...

        def assign(self, partitions: list[Any]) -> None: ...

        def poll(self, seconds: float) -> Fetched | None:
            return fetched.pop(0) if fetched else None

        def close(self) -> None: ...

    monkeypatch.setattr(changelog, "RawConsumer", Consumer)
    cache = opened(tmp_path)
    restoration = Restoration({"group.id": "totals"})
    restoration.add("totals-changelog", 0, RestoreTarget(cache, first=0, end=1))
    assert list(restoration.step(1.0)) == [("totals-changelog", 0)]
    assert cache.position == 2
    assert list(restoration.step(1.0)) == []
    cache.close()
