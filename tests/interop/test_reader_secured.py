"""The batch reader over TLS and SASL, as Apache Kafka speaks them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka.admin import (
    AdminClient,
    NewTopic,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from tests.support.certificates import local_certificate
from tests.support.reader_cases import Rows, consumed, fill, read_rows, whole

from holdfast.reader import Cluster, NotAuthorised, Unreachable
from holdfast.testing.apache import SHORT_LIVED_JVM, ApacheKafka
from holdfast.testing.kafka_fixtures import HEAP_OPTIONS, PROPERTIES, require_apache_kafka
from holdfast.testing.processes import free_ports

pytestmark = [pytest.mark.check, pytest.mark.java, pytest.mark.xdist_group("test_reader_secured")]

CERTIFICATE, KEY = local_certificate()
SECURE = "listener.name.secure"
PACKAGE = "org.apache.kafka.common.security"
TOPIC = "secured"


@pytest.fixture(scope="module")
def secured() -> Iterator[tuple[str, Rows]]:
    """The address of a listener with TLS and SASL, and what a topic behind it holds."""
    require_apache_kafka()
    plain_port, controller_port, secure_port = free_ports(3)
    listeners = f"PLAINTEXT://127.0.0.1:{plain_port},SECURE://127.0.0.1:{secure_port}"
    listeners += f",CONTROLLER://127.0.0.1:{controller_port}"
    properties = {
        **PROPERTIES,
        "listeners": listeners,
        "advertised.listeners": listeners,
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SECURE:SASL_SSL",
        f"{SECURE}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        f"{SECURE}.plain.sasl.jaas.config": f'{PACKAGE}.plain.PlainLoginModule required user_ann="secret";',
        f"{SECURE}.scram-sha-256.sasl.jaas.config": f"{PACKAGE}.scram.ScramLoginModule required;",
        f"{SECURE}.scram-sha-512.sasl.jaas.config": f"{PACKAGE}.scram.ScramLoginModule required;",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": CERTIFICATE.read_text().replace("\n", "\\n"),
        "ssl.keystore.key": KEY.read_text().replace("\n", "\\n"),
    }
    kafka = ApacheKafka(properties, heap_options=HEAP_OPTIONS, jvm_options=SHORT_LIVED_JVM)
    kafka.port, kafka.controller_port = plain_port, controller_port
    with kafka:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0})
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            user = UserScramCredentialUpsertion("ann", ScramCredentialInfo(mechanism, 4096), b"secret")
            for done in admin.alter_user_scram_credentials([user]).values():
                done.result(30)
        admin.create_topics([NewTopic(TOPIC, 2, 1, config={"retention.ms": "-1"})])[TOPIC].result(30)
        fill(kafka.bootstrap_servers, TOPIC, 2, seed=7, count=30)
        expected = consumed(kafka.bootstrap_servers, TOPIC, range(2), "read_committed")
        yield f"127.0.0.1:{secure_port}", expected


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_reading_over_tls_and_sasl(secured: tuple[str, Rows], mechanism: str) -> None:
    address, expected = secured
    settings = {
        "bootstrap.servers": address,
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": mechanism,
        "sasl.username": "ann",
        "sasl.password": "secret",
        "ssl.ca.location": str(CERTIFICATE),
    }
    with Cluster(settings) as cluster:
        rows, _ = read_rows(cluster, whole(cluster, TOPIC))
    assert rows == expected
    with (
        Cluster(settings | {"sasl.password": "wrong"}) as cluster,
        pytest.raises(NotAuthorised, match="refuses the credentials"),
    ):
        cluster.topics()


def test_a_listener_spoken_to_in_the_wrong_way_is_told(secured: tuple[str, Rows]) -> None:
    settings = {"bootstrap.servers": secured[0], "socket.connection.setup.timeout.ms": "300"}
    with Cluster(settings) as cluster, pytest.raises(Unreachable, match=r"is security\.protocol right\?"):
        cluster.topics()
