"""Commands whose requests librdkafka does not have, at a cluster that asks for TLS and SASL."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from tests.support.certificates import local_certificate
from tests.support.fake_cluster import FakeCluster

from holdfast.audit.group import positions
from holdfast.cli.app import run_command
from holdfast.cli.client import Connection
from holdfast.doctor.live_ask import Cluster
from holdfast.errors import ConfigError
from holdfast.reader import TopicPartition
from holdfast.wire import api_keys, apis

CERTIFICATE, KEY = (str(path) for path in local_certificate())
SETTINGS = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-256",
    "sasl.username": "ann",
    "sasl.password": "secret",
    "ssl.ca.location": CERTIFICATE,
}


class AdministeredCluster(FakeCluster):
    """Answers what administrators ask."""

    def _fields(self, broker: int, api_key: int, request: Any, scram: dict[str, str]) -> dict[str, Any]:
        if api_key == api_keys.API_VERSIONS:
            return {"api_keys": [self._offered(each.key) for each in apis.APIS]}
        host, port = self.bootstrap_servers.split(",")[broker].split(":")
        if api_key == api_keys.LIST_TRANSACTIONS:
            state = {"transactional_id": "billing", "producer_id": 7, "transaction_state": "Ongoing"}
            return {"transaction_states": [state]}
        if api_key == api_keys.DESCRIBE_CONFIGS:
            setting = {"name": "log.retention.ms", "value": "1000", "config_source": 3, "synonyms": []}
            return {"results": [{"resource_type": 4, "resource_name": "", "configs": [setting]}]}
        if api_key == api_keys.FIND_COORDINATOR:
            return {"coordinators": [{"key": "g", "node_id": broker, "host": host, "port": int(port)}]}
        if api_key == api_keys.OFFSET_FETCH:
            offsets = [{"partition_index": 0, "committed_offset": 5, "error_code": ErrorCode.none}]
            return {"groups": [{"group_id": "g", "topics": [{"name": "t", "partitions": offsets}]}]}
        return super()._fields(broker, api_key, request, scram)


@pytest.fixture(scope="module")
def secured() -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    with AdministeredCluster(tls=context, passwords={"ann": "secret"}) as cluster:
        yield cluster.bootstrap_servers


def properties(directory: Path, **changes: str) -> str:
    path = directory / "client.properties"
    path.write_text("".join(f"{name}={value}\n" for name, value in {**SETTINGS, **changes}.items()))
    return str(path)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (("transactions", "list"), '"billing"'),
        (("configs", "describe", "--entity-type", "brokers", "--entity-default"), '"log.retention.ms"'),
    ],
)
def test_commands_speak_tls_and_sasl(
    secured: str, command: tuple[str, ...], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(
        (
            *command,
            "--bootstrap-server",
            secured,
            "--command-config",
            properties(tmp_path),
            "--output",
            "json",
        )
    )
    shown = capsys.readouterr().out
    json.loads(shown)
    assert found in shown


def test_wrong_credentials_are_told_apart_from_nobody_there(secured: str) -> None:
    connection = Connection(secured, 5000, {**SETTINGS, "sasl.password": "wrong"})
    with pytest.raises(Exception, match="refuses the credentials"), connection.brokers() as brokers:
        brokers.broker_ids()


def test_the_doctor_and_the_audit_speak_it_too(secured: str) -> None:
    settings = {**SETTINGS, "bootstrap.servers": secured}
    with Cluster(settings) as cluster:
        assert len(cluster.metadata(None).brokers) == 1
    assert positions("g", "parquet:/nowhere", settings, ()).ends == {TopicPartition("t", 0): 5}


def test_what_librdkafka_alone_can_do_is_known_before_anybody_is_asked() -> None:
    assert not Connection("127.0.0.1:1", 300, SETTINGS).needs_librdkafka
    kerberos = Connection("127.0.0.1:1", 300, {**SETTINGS, "sasl.mechanism": "GSSAPI"})
    assert kerberos.needs_librdkafka
    with pytest.raises(ConfigError, match="'GSSAPI' is not spoken here"), kerberos.brokers():
        pass
