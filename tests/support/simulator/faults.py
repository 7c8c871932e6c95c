"""What goes wrong in a seed: drawn once, struck at its operation, counted when it hit.

Faults of the disk are planned here and counted by the disk when they hit; the others are counted here.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.support.checkers import Violation

from holdfast.errors import DataDirectoryLocked
from holdfast.testing.disk import Fault, PowerLost

if TYPE_CHECKING:
    from tests.support.simulator.world import World

FAULTS_MIN = 3
FAULTS_MAX = 7
DISK_FULL_STEPS = 40
"""How long a disk stays full before somebody frees space."""

CLOCK_AHEAD_RATE = 0.25
AHEAD_MS = 30 * 86_400_000
BAD_MOMENTS_MAX = 3
"""Deaths of a seed that come on top of its faults, when a client has just begun something delicate."""


class Faults:
    def __init__(self, world: World, operations: int) -> None:
        self._world = world
        rng = world.rng
        kinds: list[Callable[[], None]] = [
            self.lose_power,
            self.lose_power,
            self.lose_power_soon,
            self.lose_power_soon,
            self.kill,
            self.kill_soon,
            self.restart,
            self.fail_flush,
            self.fail_flush,
            self.fail_directory_flush,
            self.fail_write,
            self.cut_write_short,
            self.fill_disk,
            self.turn_read_only,
            self.move_directory,
            self.cut_connections,
            self.slow_flush,
            self.stall_disk,
            self.stall_disk,
            self.step_clock_back,
            self.start_second,
        ]
        count = rng.randint(FAULTS_MIN, FAULTS_MAX)
        places = sorted(rng.randrange(operations // 10, operations) for _ in range(count))
        self._schedule = [(place, rng.choice(kinds)) for place in places]
        # By chance of its own: a new kind of fault leaves what the seeds have been doing as it was.
        clock_rng = random.Random(world.seed + 7)
        if clock_rng.random() < CLOCK_AHEAD_RATE:
            self._schedule.append((clock_rng.randrange(operations // 10, operations), self.jump_clock_ahead))
            self._schedule.sort(key=lambda struck: struck[0])
        self._ahead_steps = clock_rng.randint(20, 80)
        self._schedule.reverse()
        self._bad_moments = BAD_MOMENTS_MAX
        self._deaths = (
            self.lose_power,
            self.kill,
            self.lose_power_soon,
            self.kill_soon,
            self.lose_power_before_a_flush,
            self.lose_power_before_a_flush,
            self.lose_power_before_a_flush,
        )

    def strike(self, operation: int) -> None:
        """Let whatever is due at this operation happen."""
        while self._schedule and self._schedule[-1][0] <= operation:
            _, fault = self._schedule.pop()
            if self._world.broker is not None:
                fault()

    def bad_moment(self, likelihood: float, steps_max: int = 9) -> None:
        """A client has begun what takes several steps: perhaps the broker dies in the middle of it."""
        world = self._world
        if self._bad_moments and world.rng.random() < likelihood:
            self._bad_moments -= 1
            world.after_steps(world.rng.randint(1, steps_max), world.rng.choice(self._deaths))

    def end(self) -> None:
        """Nothing more goes wrong."""
        self._schedule.clear()
        self._bad_moments = 0

    def lose_power(self) -> None:
        self._world.lose_power()

    def lose_power_soon(self) -> None:
        """In the middle of whatever the broker does next to its disk."""
        self._world.say("*** the power will fail")
        self._world.disk.lose_power_after(self._world.rng.randrange(12))

    def kill(self) -> None:
        self._world.kill()

    def kill_soon(self) -> None:
        self._world.say("*** the process will be killed")
        self._world.dies_by_kill = True
        self._world.disk.lose_power_after(self._world.rng.randrange(12))

    def restart(self) -> None:
        self._world.stop_cleanly()

    def _plan(self, fault: Fault) -> None:
        self._world.say(f"*** a {fault.operation} will fail")
        self._world.storage_trouble = True
        self._world.disk.plan(fault)

    def fail_flush(self) -> None:
        where = self._world.rng.choice(("", "", ".log", "__cluster_metadata"))
        self._plan(Fault("flush", path_contains=where, skip=self._world.rng.randrange(3)))

    def fail_directory_flush(self) -> None:
        self._plan(Fault("flush directory", skip=self._world.rng.randrange(2)))

    def fail_write(self) -> None:
        self._plan(Fault("write", skip=self._world.rng.randrange(4)))

    def cut_write_short(self) -> None:
        self._world.disk_was_full = True
        self._plan(Fault("write", error=errno.ENOSPC, partial=True, skip=self._world.rng.randrange(4)))

    def fill_disk(self) -> None:
        disk = self._world.disk
        self._world.disk_was_full = True
        self._world.say("*** the disk fills up")
        self._world.storage_trouble = True
        disk.capacity_bytes = disk.used_bytes + self._world.rng.randrange(3_000)
        self._world.after_steps(DISK_FULL_STEPS, self._free_disk)

    def _free_disk(self) -> None:
        self._world.disk.capacity_bytes = None
        self._world.say("*** the disk has space again")

    def turn_read_only(self) -> None:
        self._world.say("*** the disk turns read-only")
        self._world.storage_trouble = True
        self._world.disk.read_only = True

    def move_directory(self) -> None:
        """One directory is gone from its place; whoever has its files open writes to them, and finds them again."""
        self._world.take_away(("away",))
        self._world.storage_trouble = True

    def cut_connections(self) -> None:
        rng = self._world.rng
        links = self._world.links
        chosen = links if rng.random() < 0.3 else rng.sample(links, rng.randint(1, 2))
        for link in chosen:
            self._world.say(f"*** the connection of {link.name} is cut")
            link.cut()
        self._world.report.faults["connection cut"] += len(chosen)

    def slow_flush(self) -> None:
        if self._world.flusher.slow_down(self._world.rng.randint(20, 80)):
            self._world.say("*** a flush is slow")
            self._world.report.faults["slow flush"] += 1

    def lose_power_before_a_flush(self) -> None:
        """One flush hangs while the others go on, and then the power fails."""
        world = self._world
        if world.flusher.slow_down(80, world.rng.randrange(3)):
            world.say("*** a flush hangs")
            world.report.faults["slow flush"] += 1
            world.after_steps(world.rng.randint(3, 12), self.lose_power)

    def stall_disk(self) -> None:
        """Flushes hang, clients lose patience and retry, and then perhaps the power fails."""
        world = self._world
        steps = world.rng.randint(20, 60)
        world.say(f"*** the disk hangs for {steps} steps")
        world.report.faults["disk stalled"] += 1
        world.flusher.stall(steps)
        world.after_steps(steps // 3, self.cut_connections)
        if world.rng.random() < 0.6:
            world.after_steps(steps, self.lose_power)

    def step_clock_back(self) -> None:
        back_ms = self._world.rng.choice((10, 5_000, 600_000))
        self._world.say(f"*** the wall clock steps back {back_ms} ms")
        self._world.clock.step_wall(-back_ms)
        self._world.report.faults["clock stepped back"] += 1

    def jump_clock_ahead(self) -> None:
        """By more than anything is kept. Somebody notices and takes it back."""
        world = self._world
        world.say(f"*** the wall clock jumps {AHEAD_MS} ms ahead for {self._ahead_steps} steps")
        world.clock.step_wall(AHEAD_MS)
        world.after_steps(self._ahead_steps, self._take_back)
        world.report.faults["clock jumped ahead"] += 1

    def _take_back(self) -> None:
        self._world.clock.step_wall(-AHEAD_MS)

    def start_second(self) -> None:
        """Another process on the same directory must be turned away, and change nothing."""
        self._world.say("*** a second broker is started")
        self._world.report.faults["second start"] += 1
        try:
            self._world.start_another()
        except (DataDirectoryLocked, PowerLost):
            return
        raise Violation("second-start", "a second broker started on the same directory")
