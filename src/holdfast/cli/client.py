"""Clients of confluent-kafka, made one way: quiet on standard error, bounded when nobody answers.

librdkafka retries a connection for ever and prints each failure. Here its log lines go nowhere, its last
reason is kept, and `Connection.reach` gives up after `connect_timeout_ms` with that reason in one line.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ClusterMetadata

from holdfast.admin.brokers import Brokers
from holdfast.admin.errors import Unreachable
from holdfast.admin.settings import ConnectionSettings, parse_settings
from holdfast.cli.client_settings import read_properties, translate
from holdfast.cli.exits import CannotConnect, CommandFailed
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

    @classmethod
    def from_flags(
        cls,
        bootstrap_server: str,
        connect_timeout_ms: int,
        config_path: str | None,
        properties: Mapping[str, str] | None = None,
    ) -> Connection:
        given = read_properties(config_path) if config_path else {}
        given |= properties or {}
        given.pop("bootstrap.servers", None)
        return cls(bootstrap_server, connect_timeout_ms, translate(given))

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
