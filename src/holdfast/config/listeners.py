"""Where the broker listens, and where it sends clients.

`listeners` says what to bind, `advertised.listeners` what Metadata answers. A client that was sent to an
address it cannot reach fails far from the mistake, so the mistake is refused at start. The rules:

- Nothing told: 127.0.0.1 and ::1, port 9092, under one name. One name may stand for an IPv4 and an IPv6
  address; the IPv6 one is then left out where the machine has no IPv6.
- Every address (`0.0.0.0`, `::` or no host) can be bound and cannot be advertised: `advertised.listeners`
  must say what can.
- An advertised port that is 0 or missing is the port that was bound.
- Listeners named in `controller.listener.names` are accepted and not opened: one node is its own controller.
- Only PLAINTEXT is served.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.errors import ConfigError

EVERY_ADDRESS = "0.0.0.0"
PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_HOST_CHARACTERS = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-%._:")


class Listener(NamedTuple):
    """One address to bind."""

    name: str
    host: str
    """An address or a name; empty for every address of the machine."""
    port: int
    """0 for any free one."""
    protocol: str
    advertised_host: str
    """What clients of this listener are told; never empty, never "every address"."""
    advertised_port: int
    """0 for the port that was bound."""
    optional: bool = False
    """The IPv6 half of a pair: to be left out, with a log line, where IPv6 is missing."""


class Endpoint(NamedTuple):
    """`NAME://host:port` as written."""

    name: str
    host: str
    port: int


def parse_endpoint(text: str, where: str, *, port_needed: bool = True) -> Endpoint:
    name, separator, address = text.partition("://")
    host, port_text = _host_and_port(address)
    port_is_number = port_text.isascii() and port_text.isdigit() and len(port_text) <= 5
    port = int(port_text) if port_is_number else -1
    if not port_text and not port_needed:
        port = 0
    if not separator or not name.strip() or not set(host) <= _HOST_CHARACTERS or not 0 <= port <= 65535:
        raise ConfigError(
            f"{where}: {text!r} is not NAME://host:port, such as PLAINTEXT://127.0.0.1:9092 or "
            "PLAINTEXT://[::1]:9092 (port 0 to 65535)"
        )
    return Endpoint(name.strip().upper(), host, port)


def _host_and_port(address: str) -> tuple[str, str]:
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, rest.removeprefix(":")
    if ":" not in address:
        return address, ""
    host, _, port = address.rpartition(":")
    return host, port


def parse_protocol_map(text: str, where: str) -> dict[str, str]:
    """`listener.security.protocol.map` as listener name → protocol."""
    protocols: dict[str, str] = {}
    for item in text.split(","):
        if not item.strip():
            continue
        name, separator, protocol = (part.strip() for part in item.partition(":"))
        if not separator or not name or protocol not in PROTOCOLS:
            raise ConfigError(
                f"{where}: {item.strip()!r} is not NAME:PROTOCOL with one of {', '.join(PROTOCOLS)}"
            )
        protocols[name.upper()] = protocol
    return protocols


def is_every_address(host: str) -> bool:
    """0.0.0.0, :: and their other spellings, or no host at all."""
    return set(host) <= set("0.:")


def address_text(host: str, port: int) -> str:
    """HOST:PORT, or [IPv6]:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def endpoint_text(name: str, host: str, port: int) -> str:
    return f"{name}://{address_text(host, port)}"


def listeners_for(listen: str) -> str:
    """The value of `listeners` that `--listen HOST:PORT` stands for."""
    text = listen if "://" in listen else f"PLAINTEXT://{listen}"
    return endpoint_text(*parse_endpoint(text, "--listen"))


def resolve_listeners(
    listeners: Sequence[str],
    advertised: Sequence[str] | None,
    protocol_map: str,
    controller_names: Iterable[str],
    where: dict[str, str],
) -> tuple[tuple[Listener, ...], list[str]]:
    """The listeners to open and the notices about those that are not.

    `where` gives the place of each of the settings, by name, for errors.
    """
    at = {name: where.get(name, name) for name in _SETTINGS}
    protocols = parse_protocol_map(protocol_map, at["listener.security.protocol.map"])
    controllers = {name.upper() for name in controller_names}
    endpoints = [parse_endpoint(text, at["listeners"]) for text in listeners]
    _check_distinct(endpoints, at["listeners"])
    notices = [
        f"listener {endpoint_text(*endpoint)} is a controller's and is not opened: "
        "holdfast is its own controller"
        for endpoint in endpoints
        if endpoint.name in controllers
    ]
    ours = [endpoint for endpoint in endpoints if endpoint.name not in controllers]
    if not ours:
        raise ConfigError(
            f"{at['listeners']}: every listener is a controller's; give one for clients, such as "
            "listeners=PLAINTEXT://127.0.0.1:9092"
        )
    told = _advertised(advertised, endpoints, controllers, at["advertised.listeners"])
    ipv4_names = {endpoint.name for endpoint in ours if ":" not in endpoint.host}
    resolved = []
    for endpoint in ours:
        protocol = _protocol(endpoint, protocols, at["listeners"])
        host, port = told.get(endpoint.name) or (endpoint.host, 0)
        if is_every_address(host):
            raise _cannot_advertise(endpoint, at["listeners"])
        optional = ":" in endpoint.host and endpoint.name in ipv4_names
        resolved.append(Listener(*endpoint, protocol, host, port, optional))
    return tuple(resolved), notices


_SETTINGS = (
    "listeners",
    "advertised.listeners",
    "listener.security.protocol.map",
    "controller.listener.names",
)


def _check_distinct(endpoints: Sequence[Endpoint], where: str) -> None:
    for position, endpoint in enumerate(endpoints):
        for other in endpoints[:position]:
            if endpoint.name == other.name and (":" in endpoint.host) == (":" in other.host):
                raise ConfigError(
                    f"{where}: listener {endpoint.name} is given twice; a name may stand for one IPv4 and "
                    "one IPv6 address"
                )
            if endpoint.port and endpoint[1:] == other[1:]:
                raise ConfigError(
                    f"{where}: listeners {other.name} and {endpoint.name} have the same address and port"
                )


def _advertised(
    advertised: Sequence[str] | None, endpoints: Sequence[Endpoint], controllers: set[str], where: str
) -> dict[str, tuple[str, int]]:
    told: dict[str, tuple[str, int]] = {}
    bound = {endpoint.name for endpoint in endpoints}
    for text in advertised or ():
        endpoint = parse_endpoint(text, where, port_needed=False)
        if endpoint.name in controllers:
            continue
        if endpoint.name not in bound:
            raise ConfigError(f"{where}: {text!r} advertises {endpoint.name}, which is not in listeners")
        if is_every_address(endpoint.host):
            raise ConfigError(
                f"{where}: {text!r} sends clients to no address at all; advertise a host name or address "
                "that clients can reach"
            )
        told[endpoint.name] = (endpoint.host, endpoint.port)
    return told


def _protocol(endpoint: Endpoint, protocols: dict[str, str], where: str) -> str:
    protocol = protocols.get(endpoint.name)
    if protocol is None:
        raise ConfigError(
            f"{where}: no protocol is known for listener {endpoint.name}; add {endpoint.name}:PLAINTEXT to "
            "listener.security.protocol.map"
        )
    if protocol != "PLAINTEXT":
        raise ConfigError(
            f"{where}: listener {endpoint.name} asks for {protocol}, which is not served yet; use PLAINTEXT "
            "on an address that only trusted machines reach"
        )
    return protocol


def _cannot_advertise(endpoint: Endpoint, where: str) -> ConfigError:
    text = endpoint_text(*endpoint)
    port = endpoint.port or 9092
    return ConfigError(
        f"{where}: {text} listens on every address of this machine, and clients cannot be sent to "
        f'"every address". Say where they reach it, with advertised.listeners='
        f"{endpoint.name}://<host name>:{port}, or listen on one address, such as "
        f"{endpoint.name}://127.0.0.1:{port}"
    )
