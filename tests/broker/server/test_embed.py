"""A broker inside a program: what its user is told when it cannot go on."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import cast

import pytest

from holdfast import Broker
from holdfast.errors import StorageError, UsageError
from holdfast.real import RealFile
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.wire_client import CLOSED, WireClient
from holdfast.wire.api_keys import CREATE_TOPICS, METADATA

WHY = "the metadata log is in"


def create_topic(broker: Broker, name: str) -> object:
    topic = {"name": name, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    with WireClient(broker.bootstrap_servers) as client:
        return client.ask(CREATE_TOPICS, 5, {"topics": [topic], "timeout": 30_000})


def break_metadata(broker: Broker) -> None:
    """From now on its metadata log cannot be written, which a change shows."""
    assert broker.server is not None
    file = cast(RealFile, broker.server.node.metadata.hosted.log.segments[-1].file)
    unwritable = os.open(file.path, os.O_RDONLY)
    os.dup2(unwritable, file.fd)
    os.close(unwritable)
    create_topic(broker, "refused")


def wait_until_ended() -> None:
    for thread in threading.enumerate():
        if thread.name == "holdfast-broker":
            thread.join(30)
            assert not thread.is_alive(), "half dead"


def test_a_broker_that_cannot_go_on_ends_and_leaving_the_block_says_why(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(StorageError, match=WHY), Broker(str(tmp_path / "data"), say=said.append) as broker:
        break_metadata(broker)
        wait_until_ended()
        with pytest.raises(ConnectionRefusedError):
            create_topic(broker, "late")
    assert any(WHY in line for line in said)


def test_stop_says_why_a_broker_had_ended_and_it_can_start_again(tmp_path: Path) -> None:
    broker = Broker(str(tmp_path / "data")).start()
    break_metadata(broker)
    with pytest.raises(StorageError, match=WHY):
        broker.stop()
    broker.stop()
    with broker:
        assert create_topic(broker, "created") != CLOSED


def test_an_error_of_the_block_itself_passes_with_a_note() -> None:
    """What a program ran into because its broker had ended is what it sees, and why."""
    with pytest.raises(KeyError) as raised, Broker() as broker:
        break_metadata(broker)
        raise KeyError("the program's own")
    assert WHY in raised.value.__notes__[0]
    assert not os.path.exists(broker.data_dir)


def test_a_temporary_directory_goes_with_a_broker_that_failed() -> None:
    broker = Broker().start()
    break_metadata(broker)
    with pytest.raises(StorageError, match=WHY):
        broker.stop()
    assert not os.path.exists(broker.data_dir)


def test_a_directory_may_be_a_path(tmp_path: Path) -> None:
    with Broker(tmp_path / "data") as broker:
        assert broker.data_dir == str(tmp_path / "data")
    assert (tmp_path / "data" / "meta.properties").exists()


def test_a_temporary_directory_is_made_by_the_start_and_goes_with_a_start_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    broker = Broker(listen="192.0.2.1:9092")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="cannot listen"):
        broker.start()
    assert list(tmp_path.iterdir()) == []


ELSEWHERE = {"advertised.listeners": "PLAINTEXT://broker.example:9192"}


@pytest.mark.parametrize("is_process", [False, True], ids=["embedded", "process"])
def test_its_own_address_is_where_it_listens_and_not_what_it_advertises(
    is_process: bool, tmp_path: Path
) -> None:
    broker = (
        BrokerProcess(tmp_path / "data", settings=ELSEWHERE, warm=True)
        if is_process
        else Broker(tmp_path / "data", settings=ELSEWHERE)
    )
    with broker, WireClient(broker.bootstrap_servers) as client:
        (node,) = client.ask(METADATA, 12, {"topics": []}).brokers
        assert (node.host, node.port) == ("broker.example", 9192)
        assert broker.bootstrap_servers.startswith("127.0.0.1:")
        if isinstance(broker, BrokerProcess):
            assert (
                f"ready on {broker.bootstrap_servers} (advertised as broker.example:9192) in " in broker.log()
            )


def test_who_listens_on_every_address_is_found_at_the_advertised_one(tmp_path: Path) -> None:
    told = {"advertised.listeners": "PLAINTEXT://localhost:0"}
    with Broker(tmp_path / "data", listen="0.0.0.0:0", settings=told) as broker:
        assert broker.bootstrap_servers.startswith("localhost:")
        create_topic(broker, "orders")
