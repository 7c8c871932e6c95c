"""Settings altered while the broker runs: what the server itself acts on is in force at once and after a restart."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import holdfast.broker.server
from holdfast.config.broker import ATTRIBUTES
from holdfast.config.catalog import BROKER
from holdfast.config.definitions import Scope
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import INCREMENTAL_ALTER_CONFIGS

StartBroker = Callable[..., BrokerProcess]
BROKER_RESOURCE = 4
SET, DELETE = 0, 1


def alter(client: WireClient, broker_id: str, name: str, operation: int, value: str | None = None) -> None:
    change = {"name": name, "config_operation": operation, "value": value}
    resource = {"resource_type": BROKER_RESOURCE, "resource_name": broker_id, "configs": [change]}
    (done,) = client.ask(INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]}).responses
    assert done.error_code == 0, done


def await_limit(broker: BrokerProcess, limit: int) -> None:
    """Until exactly so many of more connections are answered: earlier ones may still be closing."""
    deadline = time.monotonic() + 10
    accepted = -1
    while accepted != limit:
        assert time.monotonic() < deadline, f"{accepted} connections are accepted"
        with ExitStack() as stack:
            clients = [stack.enter_context(WireClient(broker.bootstrap_servers)) for _ in range(limit + 3)]
            accepted = sum(client.is_alive() for client in clients)


@pytest.mark.parametrize("broker_id", ["", "1"], ids=["every broker", "this broker"])
def test_the_most_connections_can_be_altered_while_running(start_broker: StartBroker, broker_id: str) -> None:
    broker = start_broker(max_connections="6")
    with WireClient(broker.bootstrap_servers) as admin:
        alter(admin, broker_id, "max.connections", SET, "3")
        await_limit(broker, 2)
        assert admin.is_alive()
    assert broker.has_said("max.connections=3")
    broker.restart()
    with WireClient(broker.bootstrap_servers) as admin:
        assert admin.is_alive()
        await_limit(broker, 2)
        alter(admin, broker_id, "max.connections", DELETE)
        await_limit(broker, 5)


def test_what_the_server_reads_once_cannot_be_altered_while_running() -> None:
    """What is read from the configuration of the start must be read-only; the rest comes from the node's."""
    (folder,) = holdfast.broker.server.__path__
    source = "\n".join(path.read_text("utf-8") for path in Path(folder).glob("*.py"))
    read = {name for name in re.findall(r"(?<!node\.)\bconfig\.([a-z_]+)", source) if name in ATTRIBUTES}
    assert {"listeners", "connections_max_idle_ms", "socket_request_max_bytes"} <= read
    alterable = {name for name in read if BROKER[ATTRIBUTES[name]].scope is not Scope.READ_ONLY}
    assert alterable == set()
