"""The simulated disk against a model, by hypothesis: whatever is done, a crash keeps exactly what it may.

The model keeps, per file, what its last flush made durable, and, per directory, which names a flush fixed. It
knows nothing of pages or pending changes.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.tiers import examples

from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.disk_files import PAGE_BYTES, SECTOR_BYTES

NAMES = ("a", "b", "c")


class DiskMachine(RuleBasedStateMachine):
    """One directory, a few files; names and bytes are followed apart."""

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        self.disk = SimulatedDisk(seed)
        self.disk.prepare("/d")
        self.seen: dict[str, bytearray] = {}
        self.durable: dict[str, bytes] = {}
        """Content at the last flush of a file whose name is durable and which nothing changed since."""
        self.named: set[str] = set()
        """Names whose entry is as the last directory flush left it."""

    def _changed_name(self, name: str) -> None:
        self.named.discard(name)
        self.durable.pop(name, None)

    @rule(name=st.sampled_from(NAMES), size=st.integers(1, 3 * PAGE_BYTES), fill=st.integers(1, 255))
    def append(self, name: str, size: int, fill: int) -> None:
        if name not in self.seen:
            self.seen[name] = bytearray()
            self._changed_name(name)
        file = self.disk.open(f"/d/{name}", "create")
        content = self.seen[name]
        file.pwritev([bytes([fill]) * size], len(content))
        content += bytes([fill]) * size
        file.close()

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.seen)))
        content = self.seen[name]
        position = data.draw(st.integers(0, len(content)))
        patch = data.draw(st.binary(max_size=2 * PAGE_BYTES))
        self.disk.open(f"/d/{name}", "write").pwritev([patch], position)
        if patch:
            content[position : position + len(patch)] = patch
            self.durable.pop(name, None)

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.seen)))
        length = data.draw(st.integers(0, len(self.seen[name])))
        self.disk.open(f"/d/{name}", "write").truncate(length)
        if length < len(self.seen[name]):
            self.durable.pop(name, None)
        del self.seen[name][length:]

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.seen)))
        self.disk.open(f"/d/{name}", "read").flush()
        assert self.disk.held(f"/d/{name}") == self.seen[name]
        if name in self.named:
            self.durable[name] = bytes(self.seen[name])

    @rule()
    def flush_directory(self) -> None:
        self.disk.flush_directory("/d")
        self.named = set(self.seen)
        for name in self.seen:
            held = self.disk.held(f"/d/{name}")
            if held == self.seen[name]:
                self.durable[name] = held

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.seen)))
        self.disk.remove(f"/d/{name}")
        del self.seen[name]
        self._changed_name(name)

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), new=st.sampled_from(NAMES))
    def rename(self, data: st.DataObject, new: str) -> None:
        old = data.draw(st.sampled_from(sorted(self.seen)))
        self.disk.rename(f"/d/{old}", f"/d/{new}")
        if old != new:
            self.seen[new] = self.seen.pop(old)
            self._changed_name(old)
            self._changed_name(new)

    @rule()
    def kill(self) -> None:
        self.disk.kill()

    @rule()
    def crash(self) -> None:
        self.disk.crash()
        found = {name: self._read(name) for name in self.disk.list("/d")}
        for name in self.named:
            assert name in found, "a durable name survives"
        for name, content in self.durable.items():
            assert found[name][: len(content)] == content, (
                "durable bytes survive, whatever was appended since"
            )
        self.seen = {name: bytearray(content) for name, content in found.items()}
        self.named = set(found)
        self.durable = dict(found)

    def _read(self, name: str) -> bytes:
        return self.disk.open(f"/d/{name}", "read").pread(1 << 30, 0)

    @invariant()
    def what_was_written_is_seen(self) -> None:
        assert self.disk.list("/d") == sorted(self.seen)
        for name, content in self.seen.items():
            assert self._read(name) == content

    @invariant()
    def space_is_accounted_for(self) -> None:
        assert self.disk.used_bytes == sum(map(len, self.seen.values()))


assert PAGE_BYTES % SECTOR_BYTES == 0
TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
