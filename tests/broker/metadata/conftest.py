"""A small cluster to change: brokers and settings that the tests control."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pytest

from holdfast.broker.metadata.changes import register_broker
from holdfast.broker.metadata.image import ClusterImage
from holdfast.config.broker import BrokerConfig
from holdfast.testing.fakes import SeededRandomness
from holdfast.wire.metadata_records import EndPoint, RegisterBroker


def broker(broker_id: int, *, epoch: int = 1, fenced: bool = False, directories: int = 1) -> RegisterBroker:
    return RegisterBroker(
        broker_id=broker_id,
        broker_epoch=epoch,
        incarnation_id=UUID(int=1000 + broker_id),
        end_points=(EndPoint("PLAINTEXT", "localhost", 9092 + broker_id, 0),),
        fenced=fenced,
        log_dirs=tuple(UUID(int=100 * broker_id + number) for number in range(2, directories + 2)),
    )


def cluster(*brokers: RegisterBroker) -> ClusterImage:
    image = ClusterImage()
    for each in brokers or (broker(1),):
        image.apply_all(register_broker(image, each))
    return image


@pytest.fixture
def make_broker() -> Callable[..., RegisterBroker]:
    return broker


@pytest.fixture
def make_cluster() -> Callable[..., ClusterImage]:
    return cluster


@pytest.fixture
def image() -> ClusterImage:
    return cluster()


@pytest.fixture
def config() -> BrokerConfig:
    """The defaults, on a broker that makes two partitions when not told otherwise."""
    return BrokerConfig.load({"node.id": "1", "num.partitions": "2"})[0]


@pytest.fixture
def randomness() -> SeededRandomness:
    return SeededRandomness()
