"""How to reach a cluster, from Kafka's dotted names.

Java's names and librdkafka's are both taken where they differ. Settings of consumers and producers that mean nothing
to this client are ignored: users pass one set to all their clients. Settings that would weaken or change the
connection, and cannot be honoured, are errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.errors import ConfigError

SECURITY_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
SASL_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")

_JAAS_FIELD: Final = re.compile(r'(username|password)\s*=\s*"((?:[^"\\]|\\.)*)"')
_NOT_PEM: Final = ("ssl.keystore.password", "ssl.truststore.password")


@dataclass(frozen=True)
class TlsSettings:
    ca_location: str | None = None
    ca_pem: str | None = None
    certificate_location: str | None = None
    key_location: str | None = None
    key_password: str | None = field(default=None, repr=False)
    verify_certificate: bool = True
    verify_host: bool = True


@dataclass(frozen=True)
class SaslSettings:
    mechanism: str
    username: str
    password: str = field(repr=False)


@dataclass(frozen=True)
class ConnectionSettings:
    bootstrap_servers: tuple[tuple[str, int], ...]
    client_id: str = "holdfast-admin"
    tls: TlsSettings | None = None
    sasl: SaslSettings | None = None
    connect_timeout_ms: int = 10_000
    """For one broker to take a connection and prove who it is."""
    request_timeout_ms: int = 30_000
    """For one answer."""
    deadline_ms: int = 60_000
    """For getting on at all: retries, elections and open transactions included."""
    retry_backoff_ms: int = 100


def parse_settings(given: Mapping[str, str]) -> ConnectionSettings:
    settings = {name: str(value) for name, value in given.items()}
    protocol = settings.get("security.protocol", "PLAINTEXT").upper()
    if protocol not in SECURITY_PROTOCOLS:
        raise ConfigError(f"security.protocol={protocol!r} is none of {', '.join(SECURITY_PROTOCOLS)}")
    return ConnectionSettings(
        bootstrap_servers=_servers(settings),
        client_id=settings.get("client.id", ConnectionSettings.client_id),
        tls=_tls(settings) if protocol.endswith("SSL") else None,
        sasl=_sasl(settings) if protocol.startswith("SASL") else None,
        connect_timeout_ms=_milliseconds(
            settings, ("socket.connection.setup.timeout.ms",), ConnectionSettings.connect_timeout_ms
        ),
        request_timeout_ms=_milliseconds(
            settings, ("request.timeout.ms", "socket.timeout.ms"), ConnectionSettings.request_timeout_ms
        ),
        deadline_ms=_milliseconds(settings, ("default.api.timeout.ms",), ConnectionSettings.deadline_ms),
        retry_backoff_ms=_milliseconds(settings, ("retry.backoff.ms",), ConnectionSettings.retry_backoff_ms),
    )


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, or [IPv6]:PORT."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ConfigError(f"bootstrap.servers: {text.strip()!r} is no HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _servers(settings: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    text = settings.get("bootstrap.servers", "")
    servers = tuple(parse_address(each) for each in text.split(",") if each.strip())
    if not servers:
        raise ConfigError("bootstrap.servers names no broker")
    return servers


def _milliseconds(settings: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        if name in settings:
            try:
                value = int(settings[name])
            except ValueError:
                raise ConfigError(f"{name}={settings[name]!r} is not a whole number") from None
            if value <= 0:
                raise ConfigError(f"{name}={value} must be greater than 0")
            return value
    return default


def _tls(settings: Mapping[str, str]) -> TlsSettings:
    for name in ("ssl.truststore.type", "ssl.keystore.type"):
        if settings.get(name, "PEM").upper() != "PEM":
            raise ConfigError(f"{name}={settings[name]} cannot be read here; use PEM files")
    for name in _NOT_PEM:
        if name in settings:
            raise ConfigError(f"{name} belongs to a Java key store, which cannot be read here; use PEM files")
    keystore = settings.get("ssl.keystore.location")
    identification = settings.get("ssl.endpoint.identification.algorithm", "https").strip().lower()
    if identification not in ("https", "none", ""):
        raise ConfigError(
            f"ssl.endpoint.identification.algorithm={identification!r} is neither https nor none"
        )
    return TlsSettings(
        ca_location=settings.get("ssl.ca.location") or settings.get("ssl.truststore.location"),
        ca_pem=settings.get("ssl.ca.pem") or settings.get("ssl.truststore.certificates"),
        certificate_location=settings.get("ssl.certificate.location") or keystore,
        key_location=settings.get("ssl.key.location") or keystore,
        key_password=settings.get("ssl.key.password"),
        verify_certificate=_boolean(settings, "enable.ssl.certificate.verification", default=True),
        verify_host=identification == "https",
    )


def _boolean(settings: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = settings.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{name}={text!r} is neither true nor false")
    return text == "true"


def _sasl(settings: Mapping[str, str]) -> SaslSettings:
    mechanism = (settings.get("sasl.mechanism") or settings.get("sasl.mechanisms") or "").upper()
    if mechanism not in SASL_MECHANISMS:
        raise ConfigError(
            f"sasl.mechanism={mechanism!r} is not spoken here; {', '.join(SASL_MECHANISMS)} are"
        )
    username, password = settings.get("sasl.username"), settings.get("sasl.password")
    if "sasl.jaas.config" in settings:
        fields = {
            name: re.sub(r"\\(.)", r"\1", value)
            for name, value in _JAAS_FIELD.findall(settings["sasl.jaas.config"])
        }
        username = username or fields.get("username")
        password = password or fields.get("password")
    if username is None or password is None:
        raise ConfigError("SASL needs sasl.username and sasl.password, or both in sasl.jaas.config")
    return SaslSettings(mechanism, username, password)
