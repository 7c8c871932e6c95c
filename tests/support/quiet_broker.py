"""A node left to its timers: time passes, flushes and background work are done, and nobody asks it anything."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.broker.metadata import changes
from holdfast.broker.metadata.image import ResourceType
from holdfast.broker.node.hosted import HostedPartition
from holdfast.testing.bare_node import BareNode, check_defects
from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.fakes import ManualClock
from holdfast.wire.batch import Record, build_batch, check_whole
from holdfast.wire.metadata_records import Config


class QuietBroker(BareNode):
    """One node whose flushes and background work happen when told."""

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        disk: SimulatedDisk | None = None,
        boot_id: str = "boot",
        clock: ManualClock | None = None,
    ) -> None:
        clock = clock or ManualClock()
        disk = disk or SimulatedDisk(clock=clock)
        for path in (settings or {}).get("log.dirs", "/data").split(","):
            disk.prepare(path)
        self.has_defect = False
        """A timer may raise: otherwise that ends the test."""
        super().__init__(settings, disk=disk, clock=clock, boot_id=boot_id)

    def pass_time(self, ms: int, *, works: bool = True) -> None:
        """Let time pass, stopping at every deadline on the way."""
        end_ms = self.clock.now().monotonic_ms + ms
        while True:
            deadline_ms = self.node.next_deadline_ms
            now_ms = self.clock.now().monotonic_ms
            if deadline_ms is None or deadline_ms > end_ms:
                self.clock.advance(end_ms - now_ms)
                return
            said = len(self.said)
            self.node.tick(self.clock.advance(max(0, deadline_ms - now_ms)))
            if not self.has_defect:
                check_defects(self.said[said:])
            self.settle(works=works)

    def create(self, topic: str, partitions: int = 1, **settings: str) -> HostedPartition:
        """Returns the first partition; settings are given with underscores for dots."""
        configs = [(name.replace("_", "."), value) for name, value in settings.items()]
        new = changes.NewTopic(topic, partitions, 1, configs=configs)
        records = changes.create_topic(
            self.node.metadata.image, new, self.node.settings.broker, self.node.seams.randomness
        )
        self.node.metadata.append(records, self.clock.now())
        self.settle()
        hosted = self.node.partitions.get(topic, 0)
        assert hosted is not None
        return hosted

    def delete(self, topic: str) -> None:
        image = self.node.metadata.image.topic(topic)
        assert image is not None
        self.node.metadata.append(
            changes.delete_topic(self.node.metadata.image, image.topic_id), self.clock.now()
        )

    def set(self, topic: str, name: str, value: str) -> None:
        record = Config(resource_type=ResourceType.TOPIC, resource_name=topic, name=name, value=value)
        self.node.metadata.append([record], self.clock.now())
        self.settle()

    def append(self, hosted: HostedPartition, key: bytes, value: bytes | None, **options: int) -> None:
        now = self.clock.now()
        batch = build_batch([Record(0, 0, key, value)], base_timestamp=now.wall_ms, **options)  # type: ignore[arg-type]
        hosted.log.append(check_whole(batch), batch, hosted.leader_epoch, now)
        self.node.commit.appended(hosted)
        self.settle()

    def files(self, hosted: HostedPartition, suffix: str = ".log") -> list[str]:
        return [name for name in self.disk.list(hosted.log.directory) if name.endswith(suffix)]

    def restart(self) -> QuietBroker:
        self.node.stop(self.clock.now())
        return QuietBroker(self.settings, disk=self.disk, clock=self.clock)
