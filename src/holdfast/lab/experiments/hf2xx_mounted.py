"""HF205 once more: a real broker process, and a file system under it that forgets what was not flushed."""

from __future__ import annotations

from typing import Final

from holdfast.lab.engines import NotOnThisMachine
from holdfast.lab.experiment import Lab
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import Engine
from holdfast.testing.forgetful_mount import ForgetfulMount, why_not

PARTITIONS: Final = 4
POWER: Final = "the power fails"


def hf205_mounted(lab: Lab, flush: str) -> None:
    reason = why_not()
    if reason is not None:
        raise NotOnThisMachine(f"no file system can be mounted: {reason}")
    lab.plan(POWER, successes=PARTITIONS)
    directory = lab.directory / "disk"
    settings = {"holdfast.flush": flush}
    topic = lab.name("orders")
    with ForgetfulMount(directory, lab.seed) as mount:
        before = mount.as_after_a_boot()
        with BrokerProcess(str(directory), settings=settings, prefix=before) as broker:
            address = broker.bootstrap_servers
            engine = Engine("holdfast", address)
            engine.create_topic(topic, PARTITIONS)
            for number in range(lab.random.randint(2, 5)):
                for partition in range(PARTITIONS):
                    lab.write(engine, topic, [f"{partition}.{number}"], partition)
        mount.lose_power()
        lab.fault(POWER)
        after = mount.as_after_a_boot()
        with BrokerProcess(str(directory), settings=settings, prefix=after, listen=address):
            lab.scan(engine, topic, PARTITIONS)
