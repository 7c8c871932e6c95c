"""Requests that confluent-kafka has no way to make, said to the broker that must answer them.

librdkafka knows neither transactions as an administrator sees them, nor the deletion of single positions, nor
the epochs of the new group protocol, and it can crash when it asks for positions. For these a command speaks for
itself: over plain sockets, one request at a time.

The rules this client keeps:

- The version of a request is the newest that both sides know, asked for once per connection.
- A request goes where it belongs: to the leader of a partition, the coordinator of a group or transactional
  id, or a broker named by its id. Who that is, is asked for and remembered.
- `Refused` carries the broker's error code. `retried` asks again, with fresh metadata, while that code says
  that somebody else is in charge or that work is still under way, and no longer than `timeout_ms`.
- Nobody there is `CannotConnect`, with the address and the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar

from kio.schema.errors import ErrorCode

from holdfast.cli.advice import no_such_topic
from holdfast.cli.client import REQUEST_TIMEOUT_S, Connection
from holdfast.cli.exits import CannotConnect, CommandFailed
from holdfast.testing.wire_client import CLOSED, SILENT, WireClient
from holdfast.wire import apis, error_table

T = TypeVar("T")

METADATA: Final = 3
OFFSET_FETCH: Final = 9
FIND_COORDINATOR: Final = 10
INIT_PRODUCER_ID: Final = 22
WRITE_TXN_MARKERS: Final = 27
DESCRIBE_CONFIGS: Final = 32
INCREMENTAL_ALTER_CONFIGS: Final = 44
OFFSET_DELETE: Final = 47
DESCRIBE_PRODUCERS: Final = 61
DESCRIBE_TRANSACTIONS: Final = 65
LIST_TRANSACTIONS: Final = 66
CONSUMER_GROUP_DESCRIBE: Final = 69

CoordinatorKind = Literal["group", "transaction"]
KEY_TYPES: Final[Mapping[CoordinatorKind, int]] = {"group": 0, "transaction": 1}

BACKOFF_S: Final = 0.1

PASSING: Final = frozenset(
    {
        ErrorCode.leader_not_available,
        ErrorCode.not_leader_or_follower,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.concurrent_transactions,
    }
)
"""Answers that change by themselves: another broker takes over, or what was begun comes to its end."""


class Refused(CommandFailed):
    """A broker answered with an error."""

    def __init__(self, subject: str, code: ErrorCode, said: str | None = None, advice: str = "") -> None:
        known = error_table.BY_CODE.get(int(code))
        name = known.name if known is not None else f"ERROR_{int(code)}"
        reason = said.rstrip(".") if said else known.meaning if known is not None else "no reason was given"
        super().__init__(f"{subject}: {reason} ({name})" + (f"; {advice}" if advice else ""))
        self.code = code
        self.name = name


def check(code: ErrorCode, subject: str, said: str | None = None, advice: str = "") -> None:
    """Raise `Refused` unless the code means that all is well."""
    if code is not ErrorCode.none:
        raise Refused(subject, code, said, advice)


class Broker(NamedTuple):
    broker_id: int
    address: str


class Cluster(AbstractContextManager["Cluster"]):
    """The brokers of a cluster, each spoken to over a connection of its own."""

    def __init__(self, connection: Connection, timeout_ms: int = int(REQUEST_TIMEOUT_S * 1000)) -> None:
        if not connection.is_plain:
            raise CommandFailed(
                f"this can be asked over a plain connection only, not {connection.security_protocol}: "
                "librdkafka has no such request, and holdfast's own client speaks without TLS and SASL"
            )
        self._connection = connection
        self._timeout_ms = timeout_ms
        self._clients: dict[str, _Client] = {}
        self._coordinators: dict[tuple[CoordinatorKind, str], Broker] = {}
        self._metadata: Any = None
        self._bootstrap: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget()

    # -------------------------------------------------------------------- whom to ask

    def ask_any(self, api_key: int, fields: Mapping[str, Any]) -> Any:
        """An answer of the first bootstrap server that can be reached."""
        if self._bootstrap is not None:
            return self._ask(self._bootstrap, api_key, fields)
        problem: CannotConnect | None = None
        for server in self._connection.bootstrap_servers.split(","):
            try:
                answer = self._ask(server.strip(), api_key, fields)
            except CannotConnect as error:
                problem = error
                continue
            self._bootstrap = server.strip()
            return answer
        raise problem or CannotConnect("no bootstrap server was given")

    def ask_broker(self, broker_id: int, api_key: int, fields: Mapping[str, Any]) -> Any:
        return self._ask(self._address_of(broker_id), api_key, fields)

    def ask_leader(self, topic: str, partition: int, api_key: int, fields: Mapping[str, Any]) -> Any:
        return self.ask_broker(self.leader_of(topic, partition), api_key, fields)

    def ask_coordinator(
        self,
        kind: CoordinatorKind,
        key: str,
        api_key: int,
        fields: Mapping[str, Any],
        version_max: int | None = None,
    ) -> Any:
        return self._ask(self.coordinator_of(kind, key).address, api_key, fields, version_max)

    def retried(self, attempt: Callable[[], T]) -> T:
        """What an attempt returns, made again while its refusal is one of `PASSING`."""
        deadline = time.monotonic() + self._timeout_ms / 1000
        while True:
            try:
                return attempt()
            except Refused as refused:
                if refused.code not in PASSING or time.monotonic() >= deadline:
                    raise
            self._metadata = None
            self._coordinators.clear()
            time.sleep(BACKOFF_S)

    # -------------------------------------------------------------------- who is who

    def broker_ids(self) -> list[int]:
        return sorted(broker.node_id for broker in self._cluster_metadata().brokers)

    def partitions(self) -> dict[str, dict[int, Any]]:
        """Every partition, by topic and number, as the metadata describes it."""
        return {
            topic.name: {partition.partition_index: partition for partition in topic.partitions}
            for topic in self._cluster_metadata().topics
        }

    def partitions_of(self, topic: str) -> dict[int, Any]:
        found = self.partitions()
        if topic not in found:
            raise no_such_topic(topic)
        return found[topic]

    def leader_of(self, topic: str, partition: int) -> int:
        numbers = self.partitions_of(topic)
        if partition not in numbers:
            raise CommandFailed(
                f"topic '{topic}' has no partition {partition}; it has 0 to {len(numbers) - 1}"
            )
        leader = int(numbers[partition].leader_id)
        if leader < 0:
            raise Refused(f"cannot ask the leader of {topic}-{partition}", ErrorCode.leader_not_available)
        return leader

    def coordinator_of(self, kind: CoordinatorKind, key: str) -> Broker:
        known = self._coordinators.get((kind, key))
        if known is not None:
            return known
        fields = {"key_type": KEY_TYPES[kind], "coordinator_keys": [key], "key": key}
        answer = self.ask_any(FIND_COORDINATOR, fields)
        found = answer.coordinators[0] if hasattr(answer, "coordinators") else answer
        check(found.error_code, f"cannot find the coordinator of {kind} '{key}'", found.error_message)
        coordinator = Broker(found.node_id, f"{found.host}:{found.port}")
        self._coordinators[kind, key] = coordinator
        return coordinator

    def _address_of(self, broker_id: int) -> str:
        brokers = self._cluster_metadata().brokers
        for broker in brokers:
            if broker.node_id == broker_id:
                return f"{broker.host}:{broker.port}"
        ids = ", ".join(str(broker.node_id) for broker in brokers)
        raise CommandFailed(f"broker {broker_id} is not in the cluster; its brokers are {ids}")

    def _cluster_metadata(self) -> Any:
        if self._metadata is None:
            self._metadata = self.ask_any(METADATA, {"topics": None, "allow_auto_topic_creation": False})
        return self._metadata

    # -------------------------------------------------------------------- the connections

    def _ask(
        self, address: str, api_key: int, fields: Mapping[str, Any], version_max: int | None = None
    ) -> Any:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = _Client(
                address, self._connection.connect_timeout_ms, self._timeout_ms
            )
        return client.ask(api_key, fields, version_max)

    def _forget(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()


class _Client:
    """One broker: its address, one connection, and the versions it offers."""

    def __init__(self, address: str, connect_timeout_ms: int, timeout_ms: int) -> None:
        self._address = address
        self._connect_timeout_ms = connect_timeout_ms
        self._timeout_ms = timeout_ms
        self._offered: dict[int, tuple[int, int]] | None = None
        try:
            self._client = WireClient(address, timeout_s=connect_timeout_ms / 1000)
        except ValueError:
            raise CannotConnect(f"{address!r} is no HOST:PORT") from None

    def ask(self, api_key: int, fields: Mapping[str, Any], version_max: int | None = None) -> Any:
        version = self._version(api_key)
        return self._answer(api_key, version if version_max is None else min(version, version_max), fields)

    def close(self) -> None:
        self._client.close()

    def _version(self, api_key: int) -> int:
        if self._offered is None:
            # Version 0 of ApiVersions is the one every broker since 0.10 answers.
            answer = self._answer(apis.API_VERSIONS, 0, {})
            self._offered = {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys}
            self._client.timeout_s = self._timeout_ms / 1000
        api = apis.BY_KEY[api_key]
        lowest, highest = self._offered.get(api_key, (0, -1))
        version = min(api.max, highest)
        if version < max(api.served_from, lowest):
            raise CommandFailed(f"the broker at {self._address} does not offer {api.name}; it may be too old")
        return version

    def _answer(self, api_key: int, version: int, fields: Mapping[str, Any]) -> Any:
        try:
            answer = self._client.ask(api_key, version, fields)
        except OSError as error:
            raise self._unreachable(error.strerror or str(error)) from error
        if answer == CLOSED:
            raise self._unreachable("it closed the connection")
        if answer == SILENT:
            raise self._unreachable("it did not answer in time")
        return answer

    def _unreachable(self, reason: str) -> CannotConnect:
        waited_ms = self._connect_timeout_ms if self._offered is None else self._timeout_ms
        return CannotConnect(
            f"cannot connect to {self._address} within {waited_ms} ms: {reason}; "
            "is the broker running there? (--bootstrap-server, --connect-timeout-ms)"
        )
