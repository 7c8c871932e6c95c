"""Clients of confluent-kafka, made one way: quiet on standard error, bounded when nobody answers.

librdkafka retries a connection for ever and prints each failure. Here its log lines go nowhere, its last
reason is kept, and `Connection.reach` gives up after `connect_timeout_ms` with that reason in one line.

Client settings: properties files, `name=value` flags, and Kafka's names in librdkafka's words.

Users bring the settings of Kafka's Java client. Most names are the same in librdkafka; the tables below
translate the rest. A name that means nothing outside the JVM is accepted and said so; a name nobody knows is
a usage error, raised by librdkafka itself when the client is made.

What to do about a broker's refusal: one line per error, naming the thing it is about.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ClusterMetadata

from holdfast.admin.brokers import Brokers
from holdfast.admin.errors import Unreachable
from holdfast.admin.settings import ConnectionSettings, parse_settings
from holdfast.cli.exits import CannotConnect, CommandFailed
from holdfast.config.properties import parse_properties
from holdfast.errors import ConfigError

T = TypeVar("T")

CLIENT_ID = "holdfast-cli"
REQUEST_TIMEOUT_S = 30.0
"""How long one request of an administrative command may take once a broker has answered."""

UNREACHABLE = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
    }
)
"""Local errors that mean no broker could be spoken to."""

_silent = logging.getLogger("holdfast.cli.librdkafka")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False


class _Pollable(Protocol):
    def list_topics(self, topic: str | None = None, timeout: float = -1) -> ClusterMetadata: ...
    def poll(self, timeout: float = -1) -> Any: ...


@dataclass
class Connection:
    """Where to connect and how; what went wrong last."""

    bootstrap_servers: str
    connect_timeout_ms: int
    settings: Mapping[str, str] = field(default_factory=dict)
    """The user's own client settings, already in librdkafka's words; they win over a command's defaults."""
    last_reason: str = ""
    all_brokers_down: bool = False
    fatal_error: KafkaError | None = None
    """Set when the client can do nothing more: an idempotent producer whose guarantees no longer hold."""

    @property
    def needs_librdkafka(self) -> bool:
        """Whether our own client lacks what the settings ask for: Kerberos, OAUTHBEARER, a PKCS#12 key store."""
        try:
            self._direct_settings(1)
        except ConfigError:
            return True
        return False

    @contextmanager
    def brokers(self, timeout_ms: int = int(REQUEST_TIMEOUT_S * 1000)) -> Iterator[Brokers]:
        """For requests that librdkafka does not have; nobody there is `CannotConnect`."""
        try:
            with Brokers(self._direct_settings(timeout_ms)) as brokers:
                yield brokers
        except Unreachable as error:
            hint = "is the broker running there? (--bootstrap-server, --connect-timeout-ms)"
            raise CannotConnect(f"cannot connect to {self.bootstrap_servers}: {error}; {hint}") from error

    def _direct_settings(self, timeout_ms: int) -> ConnectionSettings:
        return parse_settings(
            {
                "request.timeout.ms": str(timeout_ms),
                "default.api.timeout.ms": str(timeout_ms),
                "socket.connection.setup.timeout.ms": str(self.connect_timeout_ms),
                "client.id": CLIENT_ID,
                **self.settings,
                "bootstrap.servers": self.bootstrap_servers,
            }
        )

    def client_config(self, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`defaults`, then the user's settings, then what makes the client ours."""
        return {
            **(defaults or {}),
            **self.settings,
            "bootstrap.servers": self.bootstrap_servers,
            "client.id": self.settings.get("client.id", CLIENT_ID),
            "error_cb": self._note_error,
            "logger": _silent,
        }

    def make(self, kind: Callable[[dict[str, Any]], T], defaults: Mapping[str, Any] | None = None) -> T:
        try:
            return kind(self.client_config(defaults))
        except (KafkaException, ValueError, TypeError) as error:
            reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
            raise ConfigError(f"the client refuses its settings: {reason}") from error

    def admin(self) -> AdminClient:
        """An admin client whose broker has answered, or `CannotConnect`."""
        client = self.make(AdminClient)
        self.reach(client)
        return client

    def reach(self, client: _Pollable, topic: str | None = None) -> ClusterMetadata:
        """The cluster's metadata: the first thing to ask for, and the proof that somebody answers."""
        try:
            return interruptible(lambda: client.list_topics(topic, timeout=self.connect_timeout_ms / 1000))
        except KafkaException as error:
            client.poll(0)  # hands over the reasons collected meanwhile
            raise self.unreachable(error.args[0]) from error

    def unreachable(self, error: KafkaError) -> CommandFailed:
        if error.code() not in UNREACHABLE:
            return CommandFailed(f"{error.str()} ({error.name()})")
        reason = self.last_reason or error.str()
        return CannotConnect(
            f"cannot connect to {self.bootstrap_servers} within {self.connect_timeout_ms} ms: {reason}; "
            "is the broker running there? (--bootstrap-server, --connect-timeout-ms)"
        )

    def _note_error(self, error: KafkaError) -> None:
        if error.fatal():
            self.fatal_error = error
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.all_brokers_down = True
        elif error.code() in UNREACHABLE or not self.last_reason:
            self.last_reason = _without_state(error.str())


def _without_state(reason: str) -> str:
    """librdkafka's reason without the broker's inner name in front and the state machine behind."""
    return reason.split("/bootstrap: ", 1)[-1].split(" (after ", 1)[0].split(": (errno", 1)[0]


def interruptible(call: Callable[[], T]) -> T:
    """Run a blocking C call in another thread, so that Ctrl-C is heard at once and not when the call returns."""
    return in_background(call).result()


def in_background(call: Callable[[], T]) -> Future[T]:
    """Run a blocking C call in a thread that nobody has to wait for."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  it is raised again where the result is awaited
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


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


ADVICE: Mapping[int, str] = {
    KafkaError.UNKNOWN_TOPIC_OR_PART: "create it with 'holdfast topics create --topic {name}', "
    "or see 'holdfast topics list'",
    KafkaError.TOPIC_ALREADY_EXISTS: "choose another name, or pass --if-not-exists",
    KafkaError.TOPIC_EXCEPTION: "a name has up to 249 letters, digits, '.', '_' and '-'",
    KafkaError.INVALID_PARTITIONS: "partitions can be added, never removed: pass a larger --partitions",
    KafkaError.INVALID_REPLICATION_FACTOR: "pass a --replication-factor no larger than the number of brokers",
    KafkaError.INVALID_REPLICA_ASSIGNMENT: "name brokers that exist, each once per partition",
    KafkaError.INVALID_CONFIG: "'holdfast configs describe --topic NAME --all' lists names and values",
    KafkaError.INVALID_REQUEST: "see what the broker says, and the command's --help",
    KafkaError.POLICY_VIOLATION: "the cluster's own policy forbids this; ask who runs it",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "this user may not do that to '{name}'; see --command-config",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "this user may not do that; see --command-config",
    KafkaError.MSG_SIZE_TOO_LARGE: "raise max.message.bytes of '{name}' and max.request.size of the producer",
    KafkaError._MSG_TIMED_OUT: "no broker confirmed it within delivery.timeout.ms; it may be stored all the same",
    KafkaError.NON_EMPTY_GROUP: "stop its members first; "
    "'holdfast groups describe --group {name} --members' names them",
    KafkaError.GROUP_ID_NOT_FOUND: "'holdfast groups list' shows which there are",
    KafkaError.INVALID_GROUP_ID: "a group's name has at least one character",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "this user may not do that to '{name}'; see --command-config",
    KafkaError.UNKNOWN_MEMBER_ID: "the group has active members; stop them first",
    KafkaError.COORDINATOR_NOT_AVAILABLE: "the cluster has no coordinator for it at the moment; try again",
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS: "its coordinator is still reading its log; try again",
    KafkaError.NOT_ENOUGH_REPLICAS: "too few replicas are in sync; 'holdfast topics describe --topic {name}'",
}


def describe_error(error: KafkaError, name: str) -> str:
    """What the broker said and what to do about it."""
    advice = ADVICE.get(error.code())
    said = f"{error.str().removeprefix('Broker: ').rstrip('.')} ({error.name()})"
    return f"{said}; {advice.format(name=name)}" if advice else said


def failure(exception: KafkaException, subject: str, name: str) -> CommandFailed:
    """An exception that ends the command: `subject` says what was attempted, `name` on what."""
    error: KafkaError = exception.args[0]
    message = f"{subject}: {describe_error(error, name)}"
    return CannotConnect(message) if error.code() in UNREACHABLE else CommandFailed(message)


def result_of(future: Future[T], subject: str, name: str) -> T:
    """What a request of the admin client came to; `subject` says what was attempted, `name` on what."""
    try:
        return future.result()
    except KafkaException as exception:
        raise failure(exception, subject, name) from exception


def no_such_topic(topic: str) -> CommandFailed:
    advice = ADVICE[KafkaError.UNKNOWN_TOPIC_OR_PART].format(name=topic)
    return CommandFailed(f"topic '{topic}' does not exist; {advice}")


def no_topic_to_change(topic: str) -> CommandFailed:
    """For commands that would change or delete it, and have --if-exists."""
    return CommandFailed(
        f"topic '{topic}' does not exist; 'holdfast topics list' shows which there are, and with --if-exists "
        "this is no failure"
    )
