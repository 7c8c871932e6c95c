"""Client settings: properties files, `name=value` flags, and Kafka's names in librdkafka's words.

Users bring the settings of Kafka's Java client. Most names are the same in librdkafka; the tables below
translate the rest. A name that means nothing outside the JVM is accepted and said so; a name nobody knows is
a usage error, raised by librdkafka itself when the client is made.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping

from holdfast.config.properties import parse_properties
from holdfast.errors import ConfigError

RENAMED: Mapping[str, str] = {
    "fetch.max.wait.ms": "fetch.wait.max.ms",
    "max.request.size": "message.max.bytes",
    "receive.buffer.bytes": "socket.receive.buffer.bytes",
    "send.buffer.bytes": "socket.send.buffer.bytes",
    "ssl.truststore.location": "ssl.ca.location",
}
"""Java's name to librdkafka's, where the value keeps its unit."""

MEANINGLESS_HERE = frozenset(
    {
        "default.api.timeout.ms",
        "key.deserializer",
        "key.serializer",
        "max.block.ms",
        "max.poll.records",
        "ssl.truststore.type",
        "value.deserializer",
        "value.serializer",
    }
)
"""Settings of the Java client that have no counterpart; accepted with one line each."""

_JAAS_FIELD = re.compile(r'(username|password)\s*=\s*"([^"]*)"')


def parse_assignments(texts: Iterable[str], flag: str) -> dict[str, str]:
    """`name=value` of a repeatable flag; the value is taken as it stands: a separator may be a blank."""
    settings: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{flag} {text!r} is not NAME=VALUE")
        settings[name.strip()] = value
    return settings


def read_properties(path: str) -> dict[str, str]:
    """A Java properties file, as Kafka's tools read it."""
    try:
        with open(path, "rb") as file:
            return dict(parse_properties(file.read(), path))
    except OSError as error:
        raise ConfigError(f"cannot read the properties file {path}: {error.strerror}") from error


def translate(settings: Mapping[str, str]) -> dict[str, str]:
    """Kafka's client settings as librdkafka takes them; the last writer of a name wins."""
    translated: dict[str, str] = {}
    for name, value in settings.items():
        if name in MEANINGLESS_HERE:
            print(f"holdfast: {name} has no effect in this client", file=sys.stderr)
        elif name == "sasl.jaas.config":
            found = dict(_JAAS_FIELD.findall(value))
            if found.keys() != {"username", "password"}:
                raise ConfigError('sasl.jaas.config needs username="…" and password="…"')
            translated |= {f"sasl.{field}": text for field, text in found.items()}
        elif name == "buffer.memory":
            translated["queue.buffering.max.kbytes"] = str(max(1, _integer(name, value) // 1024))
        else:
            translated[RENAMED.get(name, name)] = value
    return translated


def whole_number(settings: Mapping[str, str], name: str, default: int) -> int:
    """A setting that we need to know ourselves."""
    return _integer(name, settings[name]) if name in settings else default


def _integer(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name}={value!r} is not a whole number") from None
