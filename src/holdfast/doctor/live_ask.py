"""How the doctor asks brokers: few requests, each about many things, and a broker that is gone is asked once.

The rules kept here:

- Nobody answers at all: `ClusterUnreachable`. After somebody has, a broker that cannot be spoken to raises
  `BrokerGone`, then and at once whenever it is asked again: a cluster that dies half-way costs one time-out, not one
  for each question.
- The version of a request is the newest both sides know, within what the caller can read.
- Nothing here changes a cluster but `alter_configs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

from kio.schema.errors import ErrorCode

from holdfast.doctor.findings import ConfigChange
from holdfast.errors import HoldfastError, PeerError
from holdfast.reader.connection import Address, Connection, text_of, tls_context
from holdfast.reader.errors import NotAuthorised, Unreachable, UnsupportedBroker
from holdfast.reader.settings import parse_settings
from holdfast.wire import error_table
from holdfast.wire.messages import decode_response, encode_request

T = TypeVar("T")

LIST_OFFSETS: Final = 2
METADATA: Final = 3
OFFSET_FETCH: Final = 9
FIND_COORDINATOR: Final = 10
LIST_GROUPS: Final = 16
DESCRIBE_CONFIGS: Final = 32
INCREMENTAL_ALTER_CONFIGS: Final = 44
DESCRIBE_CLUSTER: Final = 60
DESCRIBE_PRODUCERS: Final = 61
DESCRIBE_TRANSACTIONS: Final = 65
LIST_TRANSACTIONS: Final = 66
DESCRIBE_TOPIC_PARTITIONS: Final = 75

RESOURCE_TYPES: Final[Mapping[str, int]] = {"topic": 2, "broker": 4, "group": 32}
SET: Final = 0

DEFAULTS: Final[Mapping[str, str]] = {"client.id": "holdfast-doctor", "request.timeout.ms": "15000"}
"""A broker that takes longer to answer is as good as gone; each may cost that once."""

DENIED: Final = frozenset(
    {
        ErrorCode.topic_authorization_failed,
        ErrorCode.group_authorization_failed,
        ErrorCode.cluster_authorization_failed,
        ErrorCode.transactional_id_authorization_failed,
    }
)


class ClusterUnreachable(HoldfastError):
    """No broker of the cluster answers, or none takes the credentials."""

    exit_code = 3


class BrokerGone(HoldfastError):
    """A broker of a cluster that has answered before cannot be spoken to."""


class Asker(Protocol):
    """What the collector needs of a cluster."""

    def any(self, api_key: int, fields: Mapping[str, Any], *, lowest: int = 0) -> Any:
        """An answer of whichever broker can be reached."""

    def broker(
        self, broker_id: int, api_key: int, fields: Mapping[str, Any], *, lowest: int = 0, highest: int = 99
    ) -> Any:
        """An answer of one broker."""

    def meet(self, brokers: Mapping[int, Address]) -> None:
        """Where the brokers are."""


class Cluster(AbstractContextManager["Cluster"]):
    """The brokers of one cluster; belongs to one thread."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.settings = parse_settings({**DEFAULTS, **settings})
        self._tls = tls_context(self.settings.tls)
        self._connections: dict[Address, Connection] = {}
        self._brokers: dict[int, Address] = {}
        self._gone: dict[Address, str] = {}
        self._answered = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections.values():
            connection.close()

    def meet(self, brokers: Mapping[int, Address]) -> None:
        self._brokers = dict(brokers)

    def learn(self) -> None:
        """Ask where the brokers are."""
        answer = self.any(METADATA, {"topics": [], "allow_auto_topic_creation": False}, lowest=1)
        self.meet({each.node_id: (each.host, each.port) for each in answer.brokers})

    def any(self, api_key: int, fields: Mapping[str, Any], *, lowest: int = 0) -> Any:
        addresses = dict.fromkeys([*self._brokers.values(), *self.settings.bootstrap_servers])
        reasons = []
        for address in addresses:
            try:
                return self._ask(address, api_key, fields, lowest, 99)
            except BrokerGone as error:
                reasons.append(str(error))
            except UnsupportedBroker as error:
                # Before anybody has answered it is the wrong port, a controller's say; after that it is one question.
                if self._answered:
                    raise
                reasons.append(str(error))
        problem = BrokerGone if self._answered else ClusterUnreachable
        servers = ", ".join(text_of(each) for each in self.settings.bootstrap_servers)
        raise problem(f"no broker of {servers} can be asked: {'; '.join(dict.fromkeys(reasons))}")

    def broker(
        self, broker_id: int, api_key: int, fields: Mapping[str, Any], *, lowest: int = 0, highest: int = 99
    ) -> Any:
        address = self._brokers.get(broker_id)
        if address is None:
            raise BrokerGone(f"broker {broker_id} is not among the brokers of the cluster")
        return self._ask(address, api_key, fields, lowest, highest)

    def _ask(
        self, address: Address, api_key: int, fields: Mapping[str, Any], lowest: int, highest: int
    ) -> Any:
        if address in self._gone:
            raise BrokerGone(self._gone[address])
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = Connection(address, self.settings, self._tls)
        try:
            if not connection.is_open:
                connection.open()
            version = min(connection.version(api_key, lowest), highest)
            sent = connection.send(api_key, version, encode_request(api_key, version, fields))
            answer = decode_response(api_key, version, connection.receive(sent))
        except (Unreachable, NotAuthorised, PeerError) as error:
            connection.close()
            self._gone[address] = str(error)
            raise BrokerGone(str(error)) from error
        self._answered = True
        return answer


def alter_configs(asker: Asker, changes: Sequence[ConfigChange]) -> list[tuple[ConfigChange, str | None]]:
    """Make the changes; for each what the cluster objected, or None. A broker is asked about itself."""
    outcomes: list[tuple[ConfigChange, str | None]] = []
    for change in changes:
        resource = {
            "resource_type": RESOURCE_TYPES[change.resource_type],
            "resource_name": change.resource_name,
            "configs": [{"name": change.setting, "config_operation": SET, "value": change.value}],
        }
        fields = {"resources": [resource], "validate_only": False}
        try:
            if change.resource_type == "broker" and change.resource_name:
                answer = asker.broker(int(change.resource_name), INCREMENTAL_ALTER_CONFIGS, fields)
            else:
                answer = asker.any(INCREMENTAL_ALTER_CONFIGS, fields)
            (result,) = answer.responses
        except (BrokerGone, UnsupportedBroker) as error:
            outcomes.append((change, str(error)))
            continue
        refused = result.error_code is not ErrorCode.none
        said = result.error_message or described(result.error_code)
        outcomes.append((change, said if refused else None))
    return outcomes


def described(code: ErrorCode) -> str:
    return error_table.describe(code)


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    some: list[T] = []
    for item in items:
        some.append(item)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some
