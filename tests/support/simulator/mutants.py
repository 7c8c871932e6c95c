"""Planted bugs, to prove that the checkers see them.

A mutant changes the seams under the broker, or one of its methods, for the length of a seed; the product
knows nothing of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.support.simulator.broker import Broker, Seams, SimulatedFlusher, Start

from holdfast.broker.log.producer_state import Duplicate
from holdfast.broker.log.recovery import _Opening
from holdfast.broker.log.scan import Damage
from holdfast.broker.node import intake
from holdfast.broker.node import node as node_module
from holdfast.broker.node.metadata_log import MetadataLog
from holdfast.broker.node.wall_clock import WallClock
from holdfast.seams import FileSystem, FlushJob, Now
from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.disk_handles import SimulatedFile
from holdfast.wire.metadata_records import MetadataRecord, ProducerIds


class Mutant:
    """The healthy broker; mutants override what they spoil."""

    name = "healthy"

    def file_system(self, disk: SimulatedDisk) -> FileSystem:
        return disk

    def flusher(self, disk: SimulatedDisk) -> SimulatedFlusher:
        return SimulatedFlusher(disk)

    def start(self, start: Start, seams: Seams) -> Broker:
        return start(seams)

    def kill(self, disk: SimulatedDisk) -> None:
        """The process dies, the machine does not."""
        disk.kill()

    @contextmanager
    def planted(self) -> Iterator[None]:
        yield


class NoFlush(Mutant):
    """The flusher reports success and flushes nothing."""

    name = "no-flush"

    class Flusher(SimulatedFlusher):
        def carry_out(self, job: FlushJob) -> OSError | None:
            return None

    def flusher(self, disk: SimulatedDisk) -> SimulatedFlusher:
        return self.Flusher(disk)


class AckBeforeFlush(Mutant):
    """The flusher reports success first and flushes afterwards."""

    name = "ack-before-flush"

    class Flusher(SimulatedFlusher):
        def step(self, rng: random.Random) -> None:
            if self.carried_out and rng.random() < 0.5:
                self.carry_out(self.carried_out.pop(0)[0])
            elif self.jobs:
                job = self.jobs.popleft().gathered()
                self.carried_out.append((job, None))
                self.report(job, None)

        def report_all(self) -> None:
            """Everything was reported long ago."""

    def flusher(self, disk: SimulatedDisk) -> SimulatedFlusher:
        return self.Flusher(disk)


class DirectoryNotFlushed(Mutant):
    """The flusher leaves directories out: a new segment's name is not durable."""

    name = "directory-not-flushed"

    class Flusher(SimulatedFlusher):
        def carry_out(self, job: FlushJob) -> OSError | None:
            files = tuple(target for target in job.targets if not isinstance(target, str))
            return super().carry_out(job._replace(targets=files))

    def flusher(self, disk: SimulatedDisk) -> SimulatedFlusher:
        return self.Flusher(disk)


class DuplicateAnsweredEarly(Mutant):
    """A retried batch that is a duplicate is answered without waiting for the first one's flush."""

    name = "duplicate-answered-early"

    @contextmanager
    def planted(self) -> Iterator[None]:
        admit = intake.admit

        def admit_early(*arguments: Any) -> Any:
            admitted = admit(*arguments)
            return admitted._replace(last_offset=-1) if isinstance(admitted, Duplicate) else admitted

        with patch.object(intake, "admit", admit_early):
            yield


class ProducerIdReused(Mutant):
    """The record that takes a block of producer ids never reaches the metadata log."""

    name = "producer-id-reused"

    @contextmanager
    def planted(self) -> Iterator[None]:
        append = MetadataLog.append

        def append_others(metadata: MetadataLog, records: Sequence[MetadataRecord], now: Now) -> None:
            if not records or not all(isinstance(record, ProducerIds) for record in records):
                append(metadata, records, now)
                return
            image = metadata.image
            image.apply_all(records, last_offset=image.last_offset, last_epoch=image.last_epoch)

        with patch.object(MetadataLog, "append", append_others):
            yield


class RecoveryWithoutFlush(Mutant):
    """Recovery verifies what the page cache holds, without flushing it first."""

    name = "recovery-without-flush"

    def start(self, start: Start, seams: Seams) -> Broker:
        def flush(file: SimulatedFile) -> None:
            if not file.path.endswith(".log") or "__cluster_metadata" in file.path:
                flush_really(file)

        flush_really = SimulatedFile.flush
        with patch.object(SimulatedFile, "flush", flush):
            return start(seams)


class FileLengthBelieved(Mutant):
    """Recovery takes the end of the file for the end of the log, space written ahead included."""

    name = "file-length-believed"

    @contextmanager
    def planted(self) -> Iterator[None]:
        cut = _Opening._cut

        def believe(opening: _Opening, index: int, damage: Damage) -> None:
            segment = opening.segments[index]
            length = segment.file.size()
            if any(segment.file.pread(length, damage.position)):
                cut(opening, index, damage)
            else:
                segment.size = length

        with patch.object(_Opening, "_cut", believe):
            yield


class LogLineRaises(Mutant):
    """What is raised by whoever takes the broker's log ends what the broker was about to do."""

    name = "log-line-raises"

    @contextmanager
    def planted(self) -> Iterator[None]:
        with patch.object(node_module, "unfailing", lambda say: say):
            yield


HEALTHY = Mutant()


class WallClockBelieved(Mutant):
    """Whatever expires by time goes by the wall clock, wherever that has jumped."""

    name = "wall-clock-believed"

    @contextmanager
    def planted(self) -> Iterator[None]:
        with patch.object(WallClock, "proven", lambda guard: guard._clock.now()):
            yield


STORAGE_MUTANTS: tuple[Mutant, ...] = (
    NoFlush(),
    AckBeforeFlush(),
    DuplicateAnsweredEarly(),
    DirectoryNotFlushed(),
    ProducerIdReused(),
    RecoveryWithoutFlush(),
    FileLengthBelieved(),
    LogLineRaises(),
    WallClockBelieved(),
)
