"""Every durable thing of a broker, taken away in every way, at a start and while the broker runs.

A trial asks clients before and after, and its outcome is one of four words:

- `served`: clients see what they saw before. Whatever was lost is made again from what is left.
- `offline`: some partitions or coordinators answer an error that clients take for an outage. The others are served, and
  the broker's log names what is away.
- `refused`: the broker does not start, and says why.
- `ends`: the broker ends while it runs, and says why. What the next start does is in the other table.

Anything else is a loss, with what differs: fewer records, offsets given out twice, committed offsets that are gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final, NamedTuple

from tests.absent.world import ALLOWED, PARTITIONS, SETTINGS, Seen, World, look, world

from holdfast.errors import HoldfastError
from holdfast.testing.bare_node import BareNode
from holdfast.testing.disk import SimulatedDisk
from holdfast.wire.batch import Record, build_batch

WAYS: Final = ("missing", "empty", "older", "another's", "unreadable")
MOMENTS: Final = ("at a start", "while running")
HOUSEKEEPING_MS: Final = 1000


class Thing(NamedTuple):
    name: str
    path: str


def segment(base: int, suffix: str) -> str:
    return f"/b/orders-1/{base:020d}{suffix}"


THINGS: Final = (
    Thing("log directory with the metadata log", "/a"),
    Thing("log directory without it", "/b"),
    Thing("`meta.properties`", "/b/meta.properties"),
    Thing("`meta.properties` beside the metadata log", "/a/meta.properties"),
    Thing("`__cluster_metadata-0/`", "/a/__cluster_metadata-0"),
    Thing("its segment", "/a/__cluster_metadata-0/00000000000000000029.log"),
    Thing("its snapshot", "/a/__cluster_metadata-0/00000000000000000029-0000000001.checkpoint"),
    Thing("`__consumer_offsets-N/`", "/a/__consumer_offsets-0"),
    Thing("its segment", "/a/__consumer_offsets-0/00000000000000000000.log"),
    Thing("`__transaction_state-N/`", "/b/__transaction_state-0"),
    Thing("its segment", "/b/__transaction_state-0/00000000000000000000.log"),
    Thing("a partition's directory", "/b/orders-1"),
    Thing("its first segment", segment(0, ".log")),
    Thing("a segment in the middle", segment(11, ".log")),
    Thing("the last segment", segment(22, ".log")),
    Thing("a compacted segment", "/a/totals-0/00000000000000000010.log"),
    Thing("`*.index`", segment(22, ".index")),
    Thing("`*.timeindex`", segment(22, ".timeindex")),
    Thing("`*.txnindex`", segment(5, ".txnindex")),
    Thing("`*.txnindex` of the last segment", segment(22, ".txnindex")),
    Thing("`*.sums`", segment(5, ".sums")),
    Thing("`*.snapshot`", segment(28, ".snapshot")),
    Thing("`leader-epoch-checkpoint`", "/b/orders-1/leader-epoch-checkpoint"),
    Thing("`partition.metadata`", "/b/orders-1/partition.metadata"),
    Thing("`recovery-point-offset-checkpoint`", "/b/recovery-point-offset-checkpoint"),
    Thing("`log-start-offset-checkpoint`", "/a/log-start-offset-checkpoint"),
    Thing("`cleaner-offset-checkpoint`", "/a/cleaner-offset-checkpoint"),
    Thing("`replication-offset-checkpoint`", "/a/replication-offset-checkpoint"),
    Thing("`.kafka_cleanshutdown`", "/b/.kafka_cleanshutdown"),
    Thing("`holdfast.session`", "/b/holdfast.session"),
    Thing("`holdfast.clock`", "/a/holdfast.clock"),
    Thing("`.lock`", "/b/.lock"),
)


class Outcome(NamedTuple):
    word: str
    detail: str
    said: tuple[str, ...]

    @property
    def is_loss(self) -> bool:
        return self.word == "LOSS"


@cache
@cache
def try_out(thing: Thing, way: str, moment: str) -> Outcome | None:
    """None where the trial makes no sense: there is no such file to take, or none elsewhere to put in its place."""
    here = world()
    disk = here.disk.copy()
    if moment == "at a start":
        return _at_start(here, disk, thing, way)
    return _while_running(here, disk, thing, way)


def _at_start(here: World, disk: SimulatedDisk, thing: Thing, way: str) -> Outcome | None:
    if not _take(disk, thing.path, way):
        return None
    try:
        node = BareNode(SETTINGS, disk=disk, clock=here.clock)
    except HoldfastError as error:
        disk.locks.clear()
        return _given_back(here.seen, here, disk, thing, Outcome("refused", str(error), ()))
    outcome = _judged(here.seen, node)
    if outcome.word != "offline":
        return outcome
    # What is served has gone on, what was away has not.
    known = _merged(here.seen, look(node))
    node.node.stop(here.clock.now())
    return _given_back(known, here, disk, thing, outcome)


def _given_back(known: Seen, here: World, disk: SimulatedDisk, thing: Thing, outcome: Outcome) -> Outcome:
    """What was away is there again: so must everything be that was known of it."""
    disk.clear_faults()
    if disk.exists(thing.path):
        _remove(disk, thing.path)
    _copy(here.disk, disk, thing.path)
    try:
        node = BareNode(SETTINGS, disk=disk, clock=here.clock)
    except HoldfastError as error:
        return outcome._replace(word="LOSS", detail=f"given back, the start is refused: {error}")
    differences = list(_differences(known, look(node)))
    away = [f"{name} is {value}" for name, value in _values(look(node)) if isinstance(value, str)]
    if differences or away:
        return outcome._replace(word="LOSS", detail=f"given back: {'; '.join(differences + away)}")
    return outcome


def _merged(before: Seen, after: Seen) -> Seen:
    return Seen(
        before.cluster_id,
        {
            key: before.records[key] if isinstance(found, str) else found
            for key, found in after.records.items()
        },
        before.committed if isinstance(after.committed, str) else after.committed,
        before.transaction if isinstance(after.transaction, str) else after.transaction,
    )


def _while_running(here: World, disk: SimulatedDisk, thing: Thing, way: str) -> Outcome | None:
    node = BareNode(SETTINGS, disk=disk, clock=here.clock)
    client = node.connect()
    for topic, index in PARTITIONS:
        client.produce(topic, _probe(node), index)  # files that are in use stay open
    known = look(node)
    if not _take(disk, thing.path, way):
        return None
    node.advance(HOUSEKEEPING_MS)
    node.settle()
    outcome = _judged(known, node)
    if node.node.failures.fatal is not None and not outcome.is_loss:
        outcome = outcome._replace(word="ends", detail=node.node.failures.fatal)
    return outcome if outcome.is_loss else _started_again(here, node, outcome)


def _started_again(here: World, node: BareNode, outcome: Outcome) -> Outcome:
    """What was acknowledged while something was away is there at the next start, or that start says what is not."""
    known = look(node)
    node.disk.kill()
    try:
        again = BareNode(SETTINGS, disk=node.disk, clock=here.clock)
    except HoldfastError:
        return outcome
    found = look(again)
    losses = list(_differences(_merged(found, known), found))
    return outcome._replace(word="LOSS", detail=f"after a start: {'; '.join(losses)}") if losses else outcome


def _judged(before: Seen, node: BareNode) -> Outcome:
    """Clients look, write, and look again."""
    seen = look(node)
    losses = list(_differences(before, seen))
    away = [name for name, value in _values(seen) if isinstance(value, str)]
    client = node.connect()
    for topic, index in PARTITIONS:
        known = before.records[topic, index]
        done = client.produce(topic, _probe(node), index)
        if done.error_code:
            if done.error_code.name not in ALLOWED:
                losses.append(f"{topic}-{index}: a write is refused with {done.error_code.name}")
        elif done.base_offset != known[1]:
            losses.append(
                f"{topic}-{index}: offset {done.base_offset} is given out again, {known[1]} was next"
            )
    said = tuple(node.said)
    if losses:
        return Outcome("LOSS", "; ".join(losses), said)
    if not away:
        return Outcome("served", "", said)
    unnamed = [name for name in away if not any(name in line for line in said)]
    if unnamed:
        return Outcome("LOSS", f"nothing is said of {', '.join(unnamed)}", said)
    return Outcome("offline", ", ".join(away), said)


def _probe(node: BareNode) -> bytes:
    return build_batch([Record(0, 0, b"probe", b"probe")], base_timestamp=node.clock.now().wall_ms)


def _values(seen: Seen) -> Iterator[tuple[str, Any]]:
    for (topic, index), records in seen.records.items():
        yield f"{topic}-{index}", records
    yield "__consumer_offsets-0", seen.committed
    yield "__transaction_state-0", seen.transaction


def _differences(before: Seen, after: Seen) -> Iterator[str]:
    if after.cluster_id != before.cluster_id:
        yield "the cluster is another one"
    for (name, known), (_, found) in zip(_values(before), _values(after), strict=True):
        if isinstance(found, str):
            if found not in ALLOWED:
                yield f"{name}: clients are told {found}"
        elif found != known and not _goes_on(known, found):
            yield f"{name}: {_short(known)} was there, {_short(found)} is"


def _goes_on(known: Any, found: Any) -> bool:
    """Whether a partition that was read in vain took records in the meantime, and has lost none."""
    if not (isinstance(known, tuple) and isinstance(known[-1], tuple)):
        return False
    start, end, records = found
    return bool(start == known[0] and end >= known[1] and records[: len(known[2])] == known[2])


def _short(value: Any) -> str:
    if isinstance(value, tuple) and isinstance(value[-1], tuple):
        return f"{value[0]}..{value[1]} with {len(value[2])} records"
    return str(value)


# Taking away


def _take(disk: SimulatedDisk, path: str, way: str) -> bool:
    if not disk.exists(path):
        return False
    if way == "missing":
        _remove(disk, path)
    elif way == "empty":
        _empty(disk, path)
    elif way == "unreadable":
        disk.unreadable.add(path)
    else:
        source = world().earlier if way == "older" else world(1).disk
        if not source.exists(path):
            return False
        _remove(disk, path)
        _copy(source, disk, path)
    if disk.exists("/") and way != "unreadable":
        disk.flush_all("/")
    return True


def _remove(disk: SimulatedDisk, path: str) -> None:
    if disk.is_directory(path):
        disk.remove_tree(path)
    else:
        disk.remove(path)


def _empty(disk: SimulatedDisk, path: str) -> None:
    if disk.is_directory(path):
        disk.remove_tree(path)
        disk.make_directory(path)
    else:
        file = disk.open(path, "write")
        file.truncate(0)
        file.close()


def _copy(source: SimulatedDisk, target: SimulatedDisk, path: str) -> None:
    if source.is_directory(path):
        target.make_directory(path)
        for name in source.list(path):
            _copy(source, target, f"{path}/{name}")
        return
    content = source.open(path, "read").pread(source.size(path), 0)
    target.open(path, "create").pwritev([content], 0)
