"""From a stopped node to a directory that Apache Kafka starts on: look, prove, write down, change.

In this order: the directories are locked; what an unclean stop left is recovered; everything that Kafka would stumble
over is looked for, and the first thing that cannot be mended ends it with nothing changed; the manifest is taken, which
reads every record that was not digested ahead; what is changed is written down, durably; then it is changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

from holdfast.atomic import write_atomically
from holdfast.broker.log.checkpoints import CLEAN_SHUTDOWN_FILE, META_PROPERTIES_FILE
from holdfast.broker.node.directories import LOCK_FILE
from holdfast.broker.server.embed import Broker
from holdfast.config.broker import BrokerConfig
from holdfast.errors import DataDirectoryError, DataDirectoryLocked, HoldfastError, UsageError
from holdfast.graduate import changes, looking, properties, records, retention, steps
from holdfast.graduate.changes import Append, Journal, Tick
from holdfast.graduate.properties import Places
from holdfast.manifest import model
from holdfast.manifest.digesting import DigestCache
from holdfast.manifest.directory import DataDirectories, read_directories
from holdfast.manifest.model import Manifest
from holdfast.manifest.taking import digest_ahead, take, topic_is_compacted
from holdfast.real import RealFileSystem
from holdfast.saying import Say

FS: Final = RealFileSystem()
KAFKA_VERSIONS: Final = ("4.3",)
MANIFEST_FILE: Final = "manifest.json"
DIGESTS_FILE: Final = "digests.json"
PROPERTIES_FILE: Final = "server.properties"
WAY_BACK_FILE: Final = "way-back.txt"
ASIDE: Final = "aside-"
KEYS_AHEAD: Final = "keys-ahead"
VOTERS_RECORDS: Final = 2
"""In the control batch that ends a hand-over: the version of the quorum, and who votes."""


class Refused(HoldfastError):
    """The directories cannot be handed over as they are; nothing was changed."""


@dataclass(frozen=True)
class Request:
    """What `holdfast graduate` was asked for."""

    log_dirs: tuple[str, ...]
    listen: tuple[str, int]
    controller: tuple[str, int]
    output: str
    advertised: tuple[str, int] | None = None
    user: str | None = None
    kafka_version: str = "4.3"
    given: Mapping[str, str] = field(default_factory=dict)
    """What holdfast was started with."""


@dataclass(frozen=True)
class Outcome:
    """What was done, or would be."""

    is_dry_run: bool
    manifest: Manifest
    bytes_known: int
    """How much of the records had been digested ahead."""
    seconds: float
    mended: Sequence[str]
    notes: Sequence[str]
    without_counterpart: Sequence[str]
    put_off: Sequence[retention.PutOff]


def prepare(
    log_dirs: Sequence[str], output: str, progress: Callable[[int], None] = lambda count: None
) -> int:
    """Digest what a running node will not change any more; returns how many bytes are known then."""
    paths = _absolute(log_dirs)
    _check_output(paths, output)
    os.makedirs(output, exist_ok=True)
    cache = DigestCache(f"{output}/{DIGESTS_FILE}")
    known = digest_ahead(
        read_directories(paths, is_running=True), cache, progress, lambda *place: _keys_ahead(output, *place)
    )
    cache.save()
    return known


def graduate(
    request: Request, *, is_dry_run: bool = False, say: Say = lambda line: None, tick: Tick = lambda: None
) -> Outcome:
    began = time.monotonic()
    paths = _absolute(request.log_dirs)
    output = os.path.abspath(request.output)
    _check_output(paths, output)
    _check_request(request)
    _check_directories(paths)
    config, _ = BrokerConfig.load({}, {**_without_places(request.given), "log.dirs": ",".join(paths)})
    earlier = changes.load(output)
    if earlier is not None and earlier.state == changes.GRADUATED and not changes.used_since(earlier):
        raise UsageError(
            f"{', '.join(earlier.log_dirs)}: handed over already; --undo takes it back, --start starts Kafka"
        )
    if earlier is not None and earlier.state != changes.GRADUATED and not is_dry_run:
        say("an earlier hand-over or undo was interrupted: what it had changed is taken back first")
        with locked(earlier.log_dirs):
            changes.take_back(earlier, output)
    with ExitStack() as held:
        held.enter_context(locked(paths))
        if not _was_clean(paths):
            if is_dry_run:
                raise Refused("the last stop was not clean: without --dry-run the logs are recovered first")
            held.pop_all().close()
            _recover(paths, request, say)
            held.enter_context(locked(paths))
        directories = read_directories(paths, is_running=False)
        _refuse_handed_over(directories)
        found = looking.look(directories, _aside(output), request.user)
        if found.refusals:
            raise Refused("nothing was changed:\n" + "\n".join(f"  {line}" for line in found.refusals))
        os.makedirs(output, exist_ok=True)
        cache = DigestCache(f"{output}/{DIGESTS_FILE}")
        now_ms = time.time_ns() // 1_000_000
        tables: dict[str, bytes] = {}
        default_policy = ",".join(config.topic_defaults.cleanup_policy)
        manifest = take(
            directories,
            cache,
            now_ms,
            tables.__setitem__,
            lambda topic: topic_is_compacted(directories.image, topic, default_policy),
            keys_of=lambda *place: _keys_ahead(output, *place),
        )
        put_off = list(retention.put_off(directories, config, now_ms))
        places = Places(
            request.listen,
            request.advertised or request.listen,
            request.controller,
            paths,
            os.path.dirname(directories.metadata.path),
        )
        written = properties.server_properties(directories.node_id, places, request.given)
        made = records.changes(directories.image, directories.node_id, config)
        notes = [*found.notes, *_about_addresses(directories, places)]
        if made.taken:
            notes.append(
                f"{len(made.taken)} settings that Kafka does not know, or that would keep it from flushing, are taken "
                f"out; {output}/{WAY_BACK_FILE} has the commands that set them again"
            )
        if made.unflushed_topics:
            notes.append(f"not flushed before the answer, as before: {', '.join(made.unflushed_topics)}")
        if not is_dry_run:
            files = {
                **tables,
                MANIFEST_FILE: model.encode(manifest),
                PROPERTIES_FILE: written.text.encode(),
                steps.STEPS_FILE: steps.steps(
                    output, directories.cluster_id, directories.node_id, places, directories.image
                ).encode(),
                steps.REASSIGNMENT_FILE: steps.reassignment_text(
                    directories.image, directories.node_id
                ).encode(),
                WAY_BACK_FILE: "".join(f"{line}\n" for line in records.commands_back(made.taken)).encode(),
            }
            _write(output, files, cache)
            _make(_journal(directories, request, found, made, now_ms), output, tick)
    return Outcome(
        is_dry_run,
        manifest,
        cache.bytes_known,
        time.monotonic() - began,
        found.mended,
        notes,
        written.without_counterpart,
        put_off,
    )


def _write(output: str, files: Mapping[str, bytes], cache: DigestCache) -> None:
    try:
        cache.save()
        for name, data in files.items():
            os.makedirs(os.path.dirname(f"{output}/{name}"), exist_ok=True)
            write_atomically(FS, f"{output}/{name}", data)
    except OSError as error:
        raise Refused(
            f"{output} cannot be written to: {error.strerror or error}; nothing was changed"
        ) from error


def _make(journal: Journal, output: str, tick: Tick) -> None:
    try:
        changes.make(journal, output, tick)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise HoldfastError(
            f"{where}{error.strerror or error}. The hand-over stopped half way: mend that and run it again, which "
            f"takes back first what was changed; or take it back with `holdfast graduate --undo --output {output}`"
        ) from error


def _aside(output: str) -> str:
    """Where what is moved out goes; what an earlier hand-over moved stays where it is."""
    number = 1
    while any(names for _, _, names in os.walk(f"{output}/{ASIDE}{number}")):
        number += 1
    return f"{output}/{ASIDE}{number}"


def _keys_ahead(output: str, topic: str, index: int) -> str:
    return f"{output}/{KEYS_AHEAD}/{topic}-{index}.state"


def undo(output: str, tick: Tick = lambda: None) -> Journal:
    """Take everything back; returns what was."""
    output = os.path.abspath(output)
    journal = changes.load(output)
    if journal is None:
        raise UsageError(
            f"there is no {changes.JOURNAL_FILE} in {output}: nothing was handed over from there"
        )
    with locked(journal.log_dirs):
        changes.take_back(journal, output, tick)
    return journal


def _journal(
    directories: DataDirectories,
    request: Request,
    found: looking.Look,
    made: records.Changes,
    now_ms: int,
) -> Journal:
    metadata = directories.metadata
    path = metadata.segment_path(metadata.segments()[-1])
    voter = (directories.node_id, metadata.directory_id)
    data = records.batches(directories.image, made.records, voter, request.controller, now_ms)
    return Journal(
        state=changes.CHANGING,
        log_dirs=directories.paths,
        metadata_path=metadata.path,
        append=Append(path, FS.size(path), data.hex()),
        moves=tuple(found.moves),
        made=tuple(found.made),
        owners=tuple(found.owners),
        new_owner=found.new_owner,
        settings_taken=tuple(made.taken),
        details={"listen": properties.text_of(request.advertised or request.listen), "at_ms": now_ms},
    )


# What must hold before anything is looked at


def _absolute(log_dirs: Sequence[str]) -> tuple[str, ...]:
    return tuple(os.path.abspath(path) for path in log_dirs)


def _check_output(paths: Sequence[str], output: str) -> None:
    output = os.path.realpath(output)
    for path in map(os.path.realpath, paths):
        if output == path or output.startswith(f"{path}/"):
            raise UsageError(
                f"--output {output} lies in the log directory {path}, where Kafka would take it for a partition: give "
                "another one"
            )


def _check_directories(paths: Sequence[str]) -> None:
    """Before anything is locked or recovered: a directory that is empty must not become a new cluster."""
    for path in paths:
        if not FS.is_directory(path):
            raise DataDirectoryError(f"there is no directory {path}")
        if not FS.exists(f"{path}/{META_PROPERTIES_FILE}"):
            raise DataDirectoryError(
                f"{path} has no {META_PROPERTIES_FILE}: it is no log directory of holdfast. Nothing was changed"
            )


def _refuse_handed_over(directories: DataDirectories) -> None:
    """Whoever votes is the last thing that a hand-over appends; every start of holdfast or Kafka appends behind it."""
    last = None
    for batch in directories.metadata.batches():
        last = batch.header if batch.header.is_control else None
    if last is not None and last.records_count == VOTERS_RECORDS:
        raise UsageError(
            f"{', '.join(directories.paths)}: handed over already, with another --output than this one; --undo with "
            "that one takes it back, --start starts Kafka"
        )


def _check_request(request: Request) -> None:
    if request.kafka_version not in KAFKA_VERSIONS and not request.kafka_version.startswith(
        tuple(f"{each}." for each in KAFKA_VERSIONS)
    ):
        raise UsageError(
            f"--kafka-version {request.kafka_version}: the metadata here is of Kafka 4.3, which earlier versions do "
            "not read; later ones were not tried. Hand over to 4.3 and upgrade from there"
        )
    if request.advertised is None and request.listen[0] in ("0.0.0.0", "::"):
        raise UsageError(
            f"--listen {properties.text_of(request.listen)} is every address of the machine, which no client can be "
            "sent to: say with --advertise what clients use"
        )


def _without_places(given: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in given.items()
        if name not in ("listeners", "advertised.listeners", "log.dir", "log.dirs")
    }


@contextmanager
def locked(paths: Sequence[str]) -> Iterator[None]:
    with ExitStack() as held:
        for path in paths:
            if not FS.is_directory(path):
                raise DataDirectoryError(f"there is no directory {path}")
            try:
                lock = FS.lock(f"{path}/{LOCK_FILE}")
            except BlockingIOError:
                raise DataDirectoryLocked(
                    f"{path} is in use (its lock file {LOCK_FILE} is held): stop what uses it first; `holdfast "
                    "graduate prepare` is what may run beside holdfast"
                ) from None
            held.callback(lock.release)
        yield


def _was_clean(paths: Sequence[str]) -> bool:
    return all(FS.exists(f"{path}/{CLEAN_SHUTDOWN_FILE}") for path in paths)


def _recover(paths: Sequence[str], request: Request, say: Say) -> None:
    """Start and stop holdfast once: recovery is its own."""
    say("the last stop was not clean: holdfast recovers the logs first")
    with Broker(",".join(paths), settings=_without_places(request.given), say=say):
        pass
    if not _was_clean(paths):
        raise Refused(
            "a partition is damaged, and a directory with one is never taken for cleanly stopped: see the lines above; "
            "nothing was changed"
        )


def _about_addresses(directories: DataDirectories, places: Places) -> Iterator[str]:
    known = directories.image.brokers.get(directories.node_id)
    before = [(each.host, each.port) for each in known.end_points] if known is not None else []
    if before and places.advertised not in before:
        yield (
            f"clients knew this node as {', '.join(map(properties.text_of, before))}, and Kafka sends them to "
            f"{properties.text_of(places.advertised)}: those that can reach only the old address are cut off"
        )
    if properties.text_of(places.advertised).startswith(("127.", "[::1]", "localhost")):
        yield "Kafka listens on the loopback interface: other brokers cannot join before --listen names another"
