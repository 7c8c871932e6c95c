"""What the experiments HF401 to HF410 share: a topic, a Spark job that reads it, and its history.

A row in a sink is a message that was handled; the order in which a query reads is that of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Producer

from holdfast.errors import HoldfastError
from holdfast.lab.experiment import Lab
from holdfast.lab.watching import field_of
from holdfast.pipeline.guards import GuardTripped
from holdfast.testing.engines import QUIET, NotComeAbout
from holdfast.testing.spark_scene import SparkScene, order

if TYPE_CHECKING:
    from pathlib import Path


JOB: Final = "job"
WAIT_SECONDS: Final = 120


class Job:
    """A topic, a Spark job that reads it, and its history."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.scene = SparkScene(lab.scene.bootstrap_servers, lab.engines.spark(), lab.directory)
        self.topic = self.scene.topic
        """As the history calls it: a topic that is created again has another name there."""
        self._ids: dict[bytes, str] = {}
        self._offsets: dict[str, int] = {}

    def identify(self, value: bytes | None) -> str:
        return self._ids.get(value or b"", (value or b"").decode(errors="replace"))

    def send(self, messages: Iterable[tuple[str, bytes]], partition: int = 0, txn: str | None = None) -> None:
        """Messages by name, acknowledged; in a transaction, if it is named: `end` says how that ended."""
        messages = list(messages)
        settings = {"transactional.id": self.scene.topic} if txn else {"enable.idempotence": True}
        producer = Producer({"bootstrap.servers": self.scene.bootstrap, **settings, **QUIET})
        if txn:
            producer.init_transactions(WAIT_SECONDS)
            producer.begin_transaction()
            self.lab.note("begin", "program", txn=txn, ids=[name for name, _ in messages])

        def told(error: Any, message: Any) -> None:
            name = self.identify(message.value())
            if error is not None:
                self.lab.outcome("program", name, error)
                return
            self._offsets[name] = field_of(message, "offset")
            place = {"topic": self.topic, "partition": partition, "offset": self._offsets[name]}
            self.lab.note("ack", "program", id=name, txn=txn, **place)

        for name, value in messages:
            self._ids[value] = name
            self.lab.note("send", "program", id=name, topic=self.topic, txn=txn)
            producer.produce(self.scene.topic, value, partition=partition, on_delivery=told)
        if producer.flush(WAIT_SECONDS):
            raise NotComeAbout(f"not everything was sent to {self.scene.topic}")
        if txn:
            commits = not txn.startswith("taken-back")
            (producer.commit_transaction if commits else producer.abort_transaction)(WAIT_SECONDS)
            self.scene.await_decided(self.scene.topic)
            self.lab.note("end", "program", txn=txn, outcome="committed" if commits else "aborted")

    def orders(self, numbers: Iterable[int], partition: int = 0, txn: str | None = None) -> None:
        self.send(((str(number), order(number)) for number in numbers), partition, txn)

    # What came of it

    def rows(self, ids: Sequence[int | str], partition: int = 0) -> None:
        """The rows of the sink, in the order of the log."""
        names = [str(each) for each in ids]
        for name in sorted(set(names), key=lambda each: self._offsets.get(each, 0)):
            offset = self._offsets.get(name)
            if offset is not None:
                place = {"topic": self.topic, "partition": partition, "offset": offset}
                self.lab.note("deliver", JOB, id=name, group=JOB, **place)
        for name in names:
            self.lab.note("handle", JOB, id=name, group=JOB)

    def sink(self, path: Path | None = None) -> list[int]:
        target = path or self.scene.out
        return self.scene.ids(target) if target.exists() else []

    def position(self, offset: int) -> None:
        """How far the job says that it has read."""
        self.lab.note("position", JOB, group=JOB, topic=self.topic, partition=0, offset=offset)

    def has_read_all(self) -> None:
        self.lab.note("read-end", JOB, group=JOB, topic=self.topic)

    def scan(self, start: int | None = None, partitions: int = 1) -> None:
        self.lab.scan(
            self.lab.scene,
            self.scene.topic,
            partitions,
            called=self.topic,
            identify=self.identify,
            start=start,
        )

    def stops(self, work: Callable[[], object], why: str) -> None:
        """The job refuses to go on, and says why."""
        try:
            work()
        except (GuardTripped, HoldfastError) as error:
            self.lab.say(f"stopped: {error}")
            self.lab.fault(why)
            return
        raise NotComeAbout(f"the job went on: {why}")


def fails(work: Callable[[], object], words: str) -> None:
    try:
        work()
    except Exception as error:  # Spark's errors have no class to name
        if words not in str(error):
            raise
        return
    raise NotComeAbout(f"it was to fail: {words}")


SPARK: Final[dict[str, Any]] = {"needs": frozenset({"java", "spark"}), "fast": False}
