"""Values with a schema registry's header: a zero byte, four bytes of schema id, then the payload.

The registry is asked once for each id, through confluent-kafka's client, whose settings the definition takes as they
are. An id that the registry does not know is the record's fault; a registry that does not answer is nobody's: it stops
the batch, which is tried again later, and no record is called bad for it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.pipeline.formats.base import FormatError, Undecodable, shown_bytes

HEADER_BYTES: Final = 5
REFERENCES_MAX: Final = 100
"""Schemas that one schema may pull in; a cycle of references ends here."""
NUMBERS: Final = frozenset(
    {
        "timeout",
        "cache.capacity",
        "cache.latest.ttl.sec",
        "max.retries",
        "retries.wait.ms",
        "retries.max.wait.ms",
    }
)


class RegistryUnavailable(HoldfastError):
    """The schema registry cannot be asked: not reachable, or it refuses to answer."""


class Registered(NamedTuple):
    """A schema as the registry keeps it, with the texts of those it refers to, what is needed first standing first."""

    kind: str
    text: str
    references: tuple[tuple[str, str], ...]
    """Names by which the text refers to them (a type's in Avro, an import in Protobuf), and their texts."""


def split_header(value: bytes) -> tuple[int, bytes]:
    """The schema's id and the payload; raises `Undecodable`."""
    if not value:
        raise Undecodable("empty value")
    if len(value) < HEADER_BYTES or value[0] != 0:
        raise Undecodable(
            f"no schema registry header: expected a zero byte and an id, found {shown_bytes(value, 20)}"
        )
    return struct.unpack(">I", value[1:HEADER_BYTES])[0], value[HEADER_BYTES:]


class Registry:
    def __init__(self, settings: Mapping[str, str]) -> None:
        self._settings = dict(settings)
        self._found: dict[int, Registered | str] = {}
        self._client: Any = None
        if not self._settings.get("url"):
            raise FormatError("registry: its `url` is missing, such as http://127.0.0.1:8081")

    def _connect(self) -> Any:
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as missing:
            raise FormatError(
                f"registry: {missing.name} is not installed; install holdfast[registry] where the pipeline runs"
            ) from None
        try:
            settings = {
                name: float(value) if name in NUMBERS else value for name, value in self._settings.items()
            }
            return SchemaRegistryClient(settings)
        except (ValueError, TypeError) as wrong:
            raise FormatError(f"registry: {wrong}") from None

    def get(self, schema_id: int) -> Registered:
        """The schema of that id. Raises `Undecodable` when there is none, `RegistryUnavailable` when nobody says."""
        found = self._found.get(schema_id)
        if found is None:
            if self._client is None:
                self._client = self._connect()
            found = self._found[schema_id] = self._fetch(schema_id)
        if isinstance(found, str):
            raise Undecodable(found)
        return found

    def _fetch(self, schema_id: int) -> Registered | str:
        schema = self._ask(f"schema {schema_id}", "get_schema", schema_id)
        if schema is None:
            return f"schema id {schema_id}: the registry does not know it"
        references: dict[str, str] = {}
        if not self._follow(schema, references):
            return f"schema id {schema_id}: it refers to schemas that are not in the registry, or to itself"
        return Registered(schema.schema_type or "AVRO", schema.schema_str, tuple(references.items()))

    def _follow(self, schema: Any, references: dict[str, str], depth: int = 0) -> bool:
        for each in schema.references or ():
            if each.name in references:
                continue
            if len(references) >= REFERENCES_MAX or depth >= REFERENCES_MAX:
                return False
            found = self._ask(
                f"{each.subject} version {each.version}", "get_version", each.subject, each.version
            )
            if found is None or not self._follow(found.schema, references, depth + 1):
                return False
            references[each.name] = found.schema.schema_str
        return True

    def _ask(self, what: str, method: str, *arguments: Any) -> Any:
        """What the registry has, nothing when it says that there is no such thing."""
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            return getattr(self._client, method)(*arguments)
        except SchemaRegistryError as refused:
            # Its own codes tell a missing schema, subject or version from a wrong address, which is a plain 404.
            if refused.http_status_code == 404 and refused.error_code in (40401, 40402, 40403):
                return None
            raise RegistryUnavailable(
                f"the schema registry refuses {what} with status {refused.http_status_code}: check the registry's "
                "url and credentials"
            ) from refused
        except Exception as failed:
            raise RegistryUnavailable(
                f"the schema registry does not answer for {what} ({type(failed).__name__}): check that it runs at the "
                "registry's url"
            ) from failed
