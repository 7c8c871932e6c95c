"""Rows that were erased on purpose are told as such, exactly those; whatever else is missing or wrong is still found.

The worlds are those of `soundness`: random pipelines with random histories on the real sinks. Seed n is the same every
time.
"""

from __future__ import annotations

import json
import pickle
import random
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.audit.soundness.judging import noticed
from tests.audit.soundness.programs import make_program
from tests.audit.soundness.strokes import damage
from tests.audit.soundness.worlds import Estate, Outcome, World, lived
from tests.support.tiers import by_tier

from holdfast.pipeline.operations.erasing import CannotErase, perform_erase, plan_erase
from holdfast.pipeline.sinks.erasing import WrongCondition

SEEDS = by_tier(quick=1, check=8, long=300)
CONDITIONS = ("id % 3 = 1", "who = 'ann' OR who = 'bob'", "id < 9", "true")
ERASABLE = ("parquet", "delta", "append", "upsert")


@pytest.fixture(scope="module")
def estate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Estate]:
    with Estate(tmp_path_factory.mktemp("estate")) as made:
        yield made


def erase(world: World, sink: str, *conditions: str) -> int:
    """How many rows went, by the first of the conditions that this sink has the columns for."""
    for condition in conditions:
        try:
            plan = plan_erase(world.definition, condition, "request 7", sinks=[sink])
        except WrongCondition:
            continue
        assert perform_erase(plan).sinks == plan.rows
        return plan.rows[sink]
    raise AssertionError(f"none of {conditions} is about {sink}")


def told(outcome: Outcome) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in outcome.report["erased"]:
        assert "erased by 'request 7'" in each["detail"]
        found[each["sink"]] = found.get(each["sink"], 0) + each["count"]
    return found


def is_as_good(before: Outcome, after: Outcome) -> bool:
    """With fewer cells, all that are left may be recomputed."""
    return after.exit_code == before.exit_code and after.verdict in (before.verdict, "proven")


def play(estate: Estate, seed: int) -> list[str]:
    chance = random.Random(f"erasure {seed}")
    wrong: list[str] = []
    with lived(estate, seed) as world:
        before = world.audit()
        sinks = [sink.name for sink in world.program.sinks if sink.kind in ERASABLE]
        went = {sink: erase(world, sink, *chance.sample(CONDITIONS, len(CONDITIONS))) for sink in sinks}
        went = {sink: rows for sink, rows in went.items() if rows}
        after = world.audit()
        if not is_as_good(before, after) or told(after) != went:
            wrong.append(f"{went} erased, {told(after)} told: {before.verdict}, then {after.why()}")
        world.produce(5)
        world.run()
        world.compact()
        later = world.audit()
        if not is_as_good(before, later) or told(later) != went:
            wrong.append(f"{went} erased, {told(later)} told: {before.verdict}, later {later.why()}")
        done = damage(world, chance)
        if done is not None:
            wrong += noticed(world, later, done, world.audit(), ())
        return [f"seed {seed}: {line}; {world}" for line in wrong]


@pytest.mark.timeout(600 + 4 * SEEDS)
@pytest.mark.check
def test_erased_rows_are_told_and_damage_beside_them_is_found(estate: Estate) -> None:
    wrong = [line for seed in range(SEEDS) for line in play(estate, seed)]
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------------------- one kind of sink


def world_with(estate: Estate, kind: str, test: str) -> World:
    """Of a seed of this test's own whose program has such a sink for all rows of the steps; nothing was done yet."""
    first = 10_000 + zlib.crc32(test.encode()) % 100_000
    seed = next(
        seed
        for seed in range(first, first + 1000)
        if kind in {sink.kind for sink in make_program(seed).sinks if not sink.takes}
        and {"id", "who"} <= make_program(seed).rows_columns("").keys()
    )
    return World(estate, estate.directory / "worlds" / str(seed), seed)


@pytest.fixture(params=ERASABLE)
def world(request: pytest.FixtureRequest, estate: Estate) -> Iterator[tuple[World, str]]:
    """A world with a sink of the kind that has every row of the steps, and the name of that."""
    kind = request.param
    world = world_with(estate, kind, request.node.name)
    try:
        world.begin()
        world.produce(30)
        world.run()
        yield world, next(sink.name for sink in world.program.sinks if sink.kind == kind and not sink.takes)
    finally:
        world.end()


KILLED = """
import os, pickle, sys
from unittest.mock import patch
from holdfast.pipeline.operations.erasing import perform_erase, plan_erase
from holdfast.pipeline.sinks import delta, files, postgres
owner = {"Disk": files.Disk, "Delta": delta.DeltaSinkWriter, "Table": postgres.PostgresSinkWriter}[sys.argv[1]]
definition = pickle.load(sys.stdin.buffer)
with patch.object(owner, sys.argv[2], lambda *given, **more: os.kill(os.getpid(), 9)):
    perform_erase(plan_erase(definition, "id % 3 = 1", "request 7", sinks=[sys.argv[3]]))
"""
POINTS = {
    "parquet": (("Disk", "exchange"), ("Disk", "remove_tree")),
    "delta": (("Delta", "commit_actions"), ("Disk", "remove")),
    "append": (("Table", "advance"),),
    "upsert": (("Table", "advance"),),
}


def beside(world: World, sink: str) -> list[str]:
    """Files that hold rows and are in no version of the sink."""
    left = [path.name for path in world.directory.glob(f".{sink}.compact-*")]
    log = world.directory / sink / "_delta_log"
    if log.exists():
        removed = set()
        for path in log.glob("*.json"):
            actions = [json.loads(line) for line in path.read_text().splitlines()]
            if any("erased" in each.get("commitInfo", {}).get("holdfast", "") for each in actions):
                removed |= {each["remove"]["path"] for each in actions if "remove" in each}
        left += [name for name in removed if (log.parent / name).exists()]
    return left


@pytest.mark.check
def test_a_kill_in_the_middle_is_finished_or_undone_by_the_next_call(world: tuple[World, str]) -> None:
    made, sink = world
    before = made.audit()
    kind = next(each.kind for each in made.program.sinks if each.name == sink)
    rows = plan_erase(made.definition, "id % 3 = 1", "request 7", sinks=[sink]).rows[sink]
    assert rows
    for owner, name in POINTS[kind]:
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, owner, name, sink],
            input=pickle.dumps(made.definition),
            capture_output=True,
            timeout=120,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
        between = made.audit()
        assert is_as_good(before, between), between.why()
        assert told(between) in ({}, {sink: rows})
    erase(made, sink, "id % 3 = 1")
    after = made.audit()
    assert is_as_good(before, after), after.why()
    assert told(after) == {sink: rows}
    assert beside(made, sink) == []
    made.produce(5)
    made.run()
    assert is_as_good(before, made.audit())


@pytest.mark.check
def test_whoever_lacks_the_key_cannot_pass_off_a_deletion_as_an_erasure(world: tuple[World, str]) -> None:
    """The entry of a real erasure is put back under another key, or its chain is taken off; the rows are as it says."""
    made, sink = world
    erase(made, sink, "id % 3 = 1")
    kind = next(each.kind for each in made.program.sinks if each.name == sink)

    def forge(change: Callable[[dict[str, Any]], None]) -> None:
        if kind in ("append", "upsert"):
            database, schema = made.estate.database, made.program.name
            [(number, entry)] = database.execute(
                f"SELECT number, entry FROM {schema}.holdfast_ledger WHERE entry ? 'erased'"
            ).fetchall()
            change(entry)
            database.execute(
                f"UPDATE {schema}.holdfast_ledger SET entry = %s WHERE number = %s AND sink = %s",
                (json.dumps(entry), number, sink),
            )
            return
        for path in (made.directory / sink).rglob("*.json"):
            text = path.read_text()
            if kind == "parquet" and '"erased"' in text:
                entry = json.loads(text)
                change(entry)
                path.write_text(json.dumps(entry))
            elif kind == "delta" and '"reason"' in text.replace("\\", ""):
                path.write_text("\n".join(_forged(line, change) for line in text.splitlines()))

    for change in (_unchained, _of_other_key, _of_other_rows):
        forge(change)
        assert made.audit().exit_code in (1, 4)
    forge(_of_other_rows)
    assert made.audit().exit_code == 1


def _forged(line: str, change: Callable[[dict[str, Any]], None]) -> str:
    document = json.loads(line)
    if "erased" in document:
        change(document)
    elif "holdfast" in document.get("commitInfo", {}):
        entry = json.loads(document["commitInfo"]["holdfast"])
        change(entry)
        document["commitInfo"]["holdfast"] = json.dumps(entry)
    return json.dumps(document)


def _unchained(entry: dict[str, Any]) -> None:
    entry.pop("chain", None)


def _of_other_key(entry: dict[str, Any]) -> None:
    entry["chain"] = "0123456789abcdef:" + "0" * 32


def _of_other_rows(entry: dict[str, Any]) -> None:
    entry["erased"]["reason"] = "another"


@pytest.mark.check
def test_what_cannot_be_erased_is_said(estate: Estate) -> None:
    world = world_with(estate, "kafka", "refused")
    with lived(estate, world.seed) as world:
        topic = next(sink.name for sink in world.program.sinks if sink.kind == "kafka")
        with pytest.raises(CannotErase, match="compaction"):
            plan_erase(world.definition, "true", "request 7", sinks=[topic])
        others = [sink.name for sink in world.program.sinks if sink.kind in ERASABLE]
        for name in others:
            with pytest.raises(WrongCondition, match="nothing_like_it"):
                plan_erase(world.definition, "nothing_like_it = 1", "request 7", sinks=[name])


def test_files_hold_nothing_of_what_was_erased(estate: Estate) -> None:
    world = world_with(estate, "parquet", "bytes")
    try:
        world.begin()
        world.produce(30)
        world.run()
        sink = next(each for each in world.program.sinks if each.kind == "parquet" and not each.takes)
        erase(world, sink.name, "who = 'ann'")
        for path in (world.directory / sink.name).rglob("*"):
            assert path.is_dir() or b"ann" not in path.read_bytes(), path
    finally:
        world.end()
