"""TLS and SASL: the right credentials read, the wrong ones are told apart from a broker that is not there."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import pytest
from tests.support.certificates import local_certificate
from tests.support.fake_cluster import FakeCluster
from tests.support.reader_cases import rows_of, whole

from holdfast import reader
from holdfast.admin import sasl
from holdfast.admin.settings import SaslSettings, parse_settings
from holdfast.errors import ConfigError
from holdfast.reader import Cluster
from holdfast.wire.batch import make_batch

CERTIFICATE, KEY = (str(path) for path in local_certificate())
QUICK = {"socket.connection.setup.timeout.ms": "300"}


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    return context


def read_all(fake: FakeCluster, settings: Mapping[str, str]) -> int:
    topic = fake.add_topic("t", partitions=2)
    for partition in topic.partitions:
        for _ in range(20):
            partition.append(make_batch([bytes(20_000)] * 5))
    with Cluster({"bootstrap.servers": fake.bootstrap_servers, **settings}) as cluster:
        return len(rows_of(cluster.read(whole(cluster, "t"), batch_bytes=300_000)))


@pytest.mark.parametrize("brokers", [1, 2])
def test_tls_with_a_certificate_to_trust(brokers: int) -> None:
    with FakeCluster(brokers, tls=server_context()) as fake:
        settings = {"security.protocol": "SSL", "ssl.ca.location": CERTIFICATE}
        assert read_all(fake, settings) == 200


def test_tls_without_one_is_refused_unless_asked_for() -> None:
    with FakeCluster(tls=server_context()) as fake:
        with pytest.raises(reader.NotAuthorised, match=r"certificate of .* is not trusted"):
            read_all(fake, {"security.protocol": "SSL", **QUICK})
        settings = {"security.protocol": "SSL", "enable.ssl.certificate.verification": "false"}
        assert read_all(fake, settings) == 200
        with pytest.raises(reader.Unreachable, match=r"is security\.protocol right\?"):
            read_all(fake, {"security.protocol": "PLAINTEXT", **QUICK})
    with FakeCluster() as fake, pytest.raises(reader.Unreachable):
        read_all(fake, {"security.protocol": "SSL", **QUICK})


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_sasl(mechanism: str, protocol: str) -> None:
    tls = server_context() if protocol == "SASL_SSL" else None
    settings = {
        "security.protocol": protocol,
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": 'some.LoginModule required username="ann" password="s\\"ecret";',
        "ssl.ca.location": CERTIFICATE,
    }
    with FakeCluster(tls=tls, passwords={"ann": 's"ecret'}) as fake:
        assert read_all(fake, settings) == 200
        wrong = settings | {"sasl.username": "ann", "sasl.password": "other"}
        with pytest.raises(reader.NotAuthorised, match="refuses the credentials: wrong password"):
            read_all(fake, wrong)


def test_scram_as_in_rfc_7677(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_urlsafe", lambda size: "rOprNGfwEbeRWgbNEkqO")
    steps = sasl.dialogue(SaslSettings("SCRAM-SHA-256", "user", "pencil"))
    assert next(steps) == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    challenge = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    assert steps.send(challenge) == (
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    )
    with pytest.raises(StopIteration):
        steps.send(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")


@pytest.mark.parametrize(
    ("challenge", "final"),
    [
        (b"r=other,s=W22Z,i=4096", None),
        (b"r=nonce,s=W22Z,i=4096", None),
        (b"r=nonce+,s=W22Z,i=1", None),
        (b"r=nonce+,s=W22Z,i=99999999999", None),
        (b"r=nonce+,s=*,i=4096", None),
        (b"\xff", None),
        (b"r=nonce+,s=W22Z,i=4096", b"e=unknown-user"),
        (b"r=nonce+,s=W22Z,i=4096", b"v=AAAA"),
        (b"r=nonce+,s=W22Z,i=4096", b""),
    ],
)
def test_a_broker_that_cannot_prove_itself_is_not_trusted(
    challenge: bytes, final: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_urlsafe", lambda size: "nonce")
    steps = sasl.dialogue(SaslSettings("SCRAM-SHA-512", "u=,s", "pass"))
    assert next(steps) == b"n,,n=u=3D=2Cs,r=nonce"
    if final is None:
        with pytest.raises(reader.NotAuthorised):
            steps.send(challenge)
    else:
        steps.send(challenge)
        with pytest.raises(reader.NotAuthorised):
            steps.send(final)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "bootstrap.servers names no broker"),
        ({"bootstrap.servers": "localhost"}, "is no HOST:PORT"),
        ({"bootstrap.servers": "h:1", "security.protocol": "TLS"}, "is none of PLAINTEXT"),
        ({"bootstrap.servers": "h:1", "security.protocol": "SASL_SSL"}, "is not spoken here"),
        (
            {"bootstrap.servers": "h:1", "security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"},
            "needs sasl.username",
        ),
        (
            {"bootstrap.servers": "h:1", "security.protocol": "SSL", "ssl.truststore.type": "JKS"},
            "use PEM files",
        ),
        (
            {"bootstrap.servers": "h:1", "security.protocol": "SSL", "ssl.keystore.password": "x"},
            "use PEM files",
        ),
        ({"bootstrap.servers": "h:1", "request.timeout.ms": "soon"}, "is not a whole number"),
        ({"bootstrap.servers": "h:1", "request.timeout.ms": "0"}, "greater than 0"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cluster(settings)


def test_settings_keep_their_secrets() -> None:
    settings = parse_settings(
        {
            "bootstrap.servers": "[::1]:9092, b:9093",
            "security.protocol": "sasl_ssl",
            "sasl.mechanisms": "scram-sha-256",
            "sasl.username": "ann",
            "sasl.password": "hidden",
            "ssl.key.password": "hidden",
            "ssl.endpoint.identification.algorithm": "none",
            "auto.offset.reset": "earliest",
        }
    )
    assert settings.bootstrap_servers == (("::1", 9092), ("b", 9093))
    assert settings.tls is not None
    assert not settings.tls.verify_host
    assert "hidden" not in repr(settings)


def test_files_of_tls_that_cannot_be_read_are_told_at_once() -> None:
    settings = {"bootstrap.servers": "h:1", "security.protocol": "SSL", "ssl.ca.location": "/nowhere.pem"}
    with pytest.raises(ConfigError, match="TLS settings cannot be used"):
        Cluster(settings)
