"""How the doctor asks brokers: few requests, each about many things, and a broker that is gone is asked once.

The rules kept here:

- A broker that cannot be spoken to raises, then and at once whenever it is asked again: a cluster that dies half-way
  costs one time-out, not one for each question.
- Nothing here changes a cluster but `alter_configs`.

`hidden_topics` finds what brokers leave out without a word, since whoever asks may not see it. A list of topics, groups
or transactions holds what the asker may describe, and does not say that there is more. Two things tell. The cluster
says what may be done with it: who may not describe it is told only of groups that may be described each by itself. And
who may describe it may ask each broker what its log directories hold, which leaves nothing out: a name that no list had
is then asked for by itself, and the refusal tells it from a topic that has just been made or deleted.

Who may do what brokers do among themselves (CLUSTER_ACTION: a broker, a super user, anybody where nothing is
authorised) sees everything, and the directories are not asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from kio.schema.errors import ErrorCode

from holdfast.admin.brokers import ANY_VERSION, Brokers
from holdfast.admin.connection import Address
from holdfast.admin.errors import ClusterError, NotAuthorised, Unreachable, UnsupportedBroker
from holdfast.admin.settings import parse_settings
from holdfast.doctor.findings import ConfigChange
from holdfast.wire import error_table
from holdfast.wire.api_keys import DESCRIBE_LOG_DIRS, INCREMENTAL_ALTER_CONFIGS

T = TypeVar("T")

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


class Asker(Protocol):
    """What the collector needs of a cluster; whatever cannot be asked raises `ClusterError`."""

    def metadata(self, topics: Iterable[str] | None, *, lowest: int = 1) -> Any:
        """What the cluster says of itself and its topics."""

    def ask_any(self, api_key: int, fields: Mapping[str, Any], *, lowest: int = 0) -> Any:
        """An answer of whichever broker can be reached."""

    def ask_broker(
        self,
        broker_id: int,
        api_key: int,
        fields: Mapping[str, Any],
        *,
        lowest: int = 0,
        highest: int = ANY_VERSION,
    ) -> Any:
        """An answer of one broker."""


class Cluster(Brokers):
    """The brokers of one cluster, each of which is gone once it could not be spoken to."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(parse_settings({**DEFAULTS, **settings}))
        self._gone: dict[Address, str] = {}

    def _ask(
        self, address: Address, api_key: int, fields: Mapping[str, Any], lowest: int, highest: int
    ) -> Any:
        if address in self._gone:
            raise Unreachable(self._gone[address])
        try:
            return super()._ask(address, api_key, fields, lowest, highest)
        except (Unreachable, NotAuthorised) as error:
            self._gone[address] = str(error)
            raise Unreachable(str(error)) from error
        except UnsupportedBroker as error:
            # Before anybody has answered it is the wrong port, a controller's say; after that it is one question.
            if self._last_good is not None:
                raise
            raise Unreachable(str(error)) from error


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
                answer = asker.ask_broker(int(change.resource_name), INCREMENTAL_ALTER_CONFIGS, fields)
            else:
                answer = asker.ask_any(INCREMENTAL_ALTER_CONFIGS, fields)
            (result,) = answer.responses
        except ClusterError as error:
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


DESCRIBE_BIT: Final = 1 << 8
CLUSTER_ACTION_BIT: Final = 1 << 9
NAMES_PER_REQUEST: Final = 500
UNSEEN: Final = "those that may not be seen"
WITHOUT_DESCRIBE: Final = (
    "without DESCRIBE on the cluster, brokers list only what may be described one by one"
)


def may_describe(operations: int) -> bool:
    return bool(operations & DESCRIBE_BIT)


def hidden_topics(
    asker: Asker, operations: int, brokers: Iterable[int], known: Collection[str]
) -> Iterator[tuple[str, ErrorCode]]:
    """Topics that the list of topics left out, and why; for one who may describe the cluster."""
    if not may_describe(operations) or operations & CLUSTER_ACTION_BIT:
        return
    names: set[str] = set()
    for broker_id in brokers:
        try:
            answer = asker.ask_broker(broker_id, DESCRIBE_LOG_DIRS, {"topics": None})
        except ClusterError:
            continue  # what it does not tell now is missed by the questions that follow
        names.update(topic.name for result in answer.results for topic in result.topics)
    for some in chunks(sorted(names.difference(known)), NAMES_PER_REQUEST):
        try:
            answer = asker.metadata(some, lowest=4)
        except ClusterError:
            return
        yield from ((str(each.name), each.error_code) for each in answer.topics if each.error_code in DENIED)
