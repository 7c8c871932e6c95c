"""What a schema registry knows: subjects, their versions, and schemas that have one number wherever they appear.

The rules are those of Confluent's registry, as far as its clients can see them:

- A schema has one id, whatever subjects it is registered under; registering it again changes nothing.
- Versions of a subject count from 1 and are never given twice, not even after a deletion.
- A deletion hides a version; asked for `permanent`, one that is hidden goes for good. Schemas keep their ids.
- A new version must be compatible with the latest one, or with all of them (`*_TRANSITIVE`), under the level of its
  subject, or of the registry. That is checked for Avro, by the rules of the `avro` package, when that is installed;
  schemas of the other types are taken, and a change of type is refused.
- A schema is given back as it was registered: one of Protobuf that came as a serialized descriptor, as confluent-kafka
  sends it, comes back as one, in whatever format it is asked for.

A refusal is a `Refused` with the status and the error code that the real one answers with.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.errors import HoldfastError

TYPES: Final = ("AVRO", "JSON", "PROTOBUF")
LEVELS: Final = (
    "NONE",
    "BACKWARD",
    "BACKWARD_TRANSITIVE",
    "FORWARD",
    "FORWARD_TRANSITIVE",
    "FULL",
    "FULL_TRANSITIVE",
)
DEFAULT_LEVEL: Final = "BACKWARD"


class Refused(HoldfastError):
    """A request the registry does not carry out: the status of the answer, the code in it, and why."""

    def __init__(self, status: int, code: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.code = code


class Reference(NamedTuple):
    """Another schema that one imports, under the name it imports it by."""

    name: str
    subject: str
    version: int


class Schema(NamedTuple):
    text: str
    kind: str = "AVRO"
    references: tuple[Reference, ...] = ()

    @property
    def identity(self) -> object:
        """The same for schemas that differ in spaces and in the order of names alone."""
        text = self.text
        if self.kind != "PROTOBUF":
            text = json.dumps(json.loads(text), sort_keys=True)
        return self.kind, text, self.references


class Version(NamedTuple):
    subject: str
    number: int
    schema_id: int
    schema: Schema


Readable: TypeAlias = Callable[[Schema, Schema], bool]
"""Whether data written with the second schema can be read with the first."""


def avro_can_read(reader: Schema, writer: Schema) -> bool:
    """By Avro's rules of resolution; always, when the `avro` package is missing or the schemas refer to others."""
    if reader.kind != "AVRO" or reader.references or writer.references:
        return True
    try:
        from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
        from avro.schema import parse
    except ImportError:
        return True
    checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
    found = checker.get_compatibility(parse(reader.text), parse(writer.text))
    return bool(found.compatibility == SchemaCompatibilityType.compatible)


@dataclass(slots=True)
class _Subject:
    versions: dict[int, int] = field(default_factory=dict)
    """Ids of schemas by number of version."""
    hidden: set[int] = field(default_factory=set)
    last: int = 0

    def visible(self, *, deleted: bool = False) -> list[int]:
        return [number for number in self.versions if deleted or number not in self.hidden]


class Subjects:
    """Everything registered. Not thread-safe: one caller at a time."""

    def __init__(self, can_read: Readable = avro_can_read) -> None:
        self._can_read = can_read
        self._schemas: dict[int, Schema] = {}
        self._ids: dict[object, int] = {}
        self._subjects: dict[str, _Subject] = {}
        self._levels: dict[str, str] = {}
        self.level = DEFAULT_LEVEL

    # Registering

    def register(self, subject: str, schema: Schema) -> Version:
        """The schema's version under this subject, a new one unless it is there already."""
        self._check(schema)
        entry = self._subjects.get(subject) or _Subject()
        schema_id = self._ids.get(schema.identity)
        for number in entry.visible():
            if entry.versions[number] == schema_id:
                return self._version(subject, entry, number)
        if reasons := self._incompatibilities(subject, schema, entry.visible()):
            raise Refused(409, 409, f"incompatible with an earlier schema of {subject}: {'; '.join(reasons)}")
        if schema_id is None:
            schema_id = len(self._schemas) + 1
            self._schemas[schema_id] = schema
            self._ids[schema.identity] = schema_id
        entry.last += 1
        entry.versions[entry.last] = schema_id
        self._subjects[subject] = entry
        return self._version(subject, entry, entry.last)

    def incompatibilities(self, subject: str, schema: Schema, version: int | str | None) -> list[str]:
        """Why a schema could not follow a version of a subject, or with none given those its level names."""
        self._check(schema)
        if version is None:
            entry = self._subjects.get(subject)
            return self._incompatibilities(subject, schema, entry.visible() if entry else [])
        number = self.version(subject, version).number
        return self._incompatibilities(subject, schema, [number])

    def _incompatibilities(self, subject: str, schema: Schema, numbers: Sequence[int]) -> list[str]:
        level = self._levels.get(subject, self.level)
        if level == "NONE":
            return []
        reasons: list[str] = []
        for number in numbers if level.endswith("_TRANSITIVE") else numbers[-1:]:
            earlier = self._schemas[self._subjects[subject].versions[number]]
            if earlier.kind != schema.kind:
                reasons.append(f"version {number} is {earlier.kind}, this is {schema.kind}")
                continue
            if not level.startswith("FORWARD") and not self._can_read(schema, earlier):
                reasons.append(f"it cannot read what version {number} wrote")
            if not level.startswith("BACKWARD") and not self._can_read(earlier, schema):
                reasons.append(f"version {number} cannot read what it writes")
        return reasons

    def _check(self, schema: Schema) -> None:
        if schema.kind not in TYPES:
            raise Refused(422, 42201, f"{schema.kind} is no type of schema: there are {', '.join(TYPES)}")
        try:
            _parse(schema)
        except (ValueError, LookupError, TypeError) as error:
            raise Refused(422, 42201, f"no {schema.kind} schema: {error}") from error
        for name, subject, version in schema.references:
            try:
                self.version(subject, version)
            except Refused as missing:
                raise Refused(422, 42201, f"the reference {name}: {missing}") from missing

    # Asking

    def subjects(self, *, deleted: bool = False) -> list[str]:
        return sorted(name for name, entry in self._subjects.items() if entry.visible(deleted=deleted))

    def versions(self, subject: str, *, deleted: bool = False) -> list[int]:
        entry = self._subjects.get(subject)
        numbers = entry.visible(deleted=deleted) if entry else []
        if not numbers:
            raise Refused(404, 40401, f"subject {subject!r} not found")
        return numbers

    def version(self, subject: str, version: int | str, *, deleted: bool = False) -> Version:
        """A version by its number, or the latest: "latest" or -1."""
        numbers = self.versions(subject, deleted=deleted)
        number = numbers[-1] if version in ("latest", "-1", -1) else _as_number(version)
        if number not in numbers:
            raise Refused(404, 40402, f"version {number} of {subject!r} not found")
        return self._version(subject, self._subjects[subject], number)

    def lookup(self, subject: str, schema: Schema, *, deleted: bool = False) -> Version:
        """The version of a subject that a schema is."""
        self._check(schema)
        schema_id = self._ids.get(schema.identity)
        for number in self.versions(subject, deleted=deleted):
            if self._subjects[subject].versions[number] == schema_id:
                return self._version(subject, self._subjects[subject], number)
        raise Refused(404, 40403, f"{subject!r} has no such schema")

    def schema(self, schema_id: int) -> Schema:
        found = self._schemas.get(schema_id)
        if found is None:
            raise Refused(404, 40403, f"schema {schema_id} not found")
        return found

    def places(self, schema_id: int, *, deleted: bool = False) -> list[Version]:
        """Everywhere a schema is registered."""
        self.schema(schema_id)
        return [
            self._version(name, entry, number)
            for name, entry in sorted(self._subjects.items())
            for number in entry.visible(deleted=deleted)
            if entry.versions[number] == schema_id
        ]

    def referrers(self, subject: str, version: int | str) -> list[int]:
        """The ids of the schemas that refer to a version."""
        number = self.version(subject, version).number
        used = {schema_id for entry in self._subjects.values() for schema_id in entry.versions.values()}
        return [
            schema_id
            for schema_id in sorted(used)
            if any(
                (each.subject, each.version) == (subject, number)
                for each in self._schemas[schema_id].references
            )
        ]

    def _version(self, subject: str, entry: _Subject, number: int) -> Version:
        schema_id = entry.versions[number]
        return Version(subject, number, schema_id, self._schemas[schema_id])

    # Deleting

    def delete(self, subject: str, version: int | str, *, permanent: bool = False) -> int:
        found = self.version(subject, version, deleted=permanent)
        entry = self._subjects[subject]
        if not permanent:
            if self.referrers(subject, found.number):
                raise Refused(422, 42206, f"other schemas refer to version {found.number} of {subject!r}")
            entry.hidden.add(found.number)
        elif found.number not in entry.hidden:
            raise Refused(404, 40407, f"version {found.number} of {subject!r} was not deleted before")
        else:
            entry.hidden.discard(found.number)
            del entry.versions[found.number]
        return found.number

    def delete_subject(self, subject: str, *, permanent: bool = False) -> list[int]:
        numbers = self.versions(subject, deleted=permanent)
        if permanent and self._subjects[subject].visible():
            raise Refused(404, 40405, f"subject {subject!r} was not deleted before")
        return [self.delete(subject, number, permanent=permanent) for number in numbers]

    # Levels of compatibility

    def level_of(self, subject: str, *, default: bool = False) -> str:
        level = self._levels.get(subject, self.level if default else None)
        if level is None:
            raise Refused(404, 40408, f"subject {subject!r} has no level of compatibility of its own")
        return level

    def set_level(self, level: str, subject: str | None = None) -> None:
        if level not in LEVELS:
            raise Refused(422, 42203, f"{level} is no level of compatibility: there are {', '.join(LEVELS)}")
        if subject is None:
            self.level = level
        else:
            self._levels[subject] = level

    def forget_level(self, subject: str | None = None) -> str:
        """Back to the default; returns what it was."""
        if subject is None:
            before, self.level = self.level, DEFAULT_LEVEL
            return before
        before = self.level_of(subject)
        del self._levels[subject]
        return before


def schema_of(body: Mapping[str, Any]) -> Schema:
    """The schema in the body of a request."""
    try:
        references = tuple(
            Reference(str(each["name"]), str(each["subject"]), int(each["version"]))
            for each in body.get("references") or ()
        )
    except (TypeError, KeyError, ValueError) as error:
        raise Refused(422, 42201, f"a reference has a name, a subject and a version: {error!r}") from error
    text, kind = body.get("schema"), body.get("schemaType") or "AVRO"
    if not isinstance(text, str) or not isinstance(kind, str):
        raise Refused(422, 42201, "the request holds no schema")
    return Schema(text, kind, references)


def _parse(schema: Schema) -> None:
    """Raise unless this is a schema, as far as can be told without the libraries of its type."""
    if schema.kind == "PROTOBUF":
        if "message" not in schema.text and "enum" not in schema.text and "syntax" not in schema.text:
            _check_descriptor(schema.text)
        return
    parsed = json.loads(schema.text)
    if schema.kind == "JSON":
        if not isinstance(parsed, dict | bool):
            raise TypeError(f"{parsed!r} is neither an object nor a boolean")
        return
    try:
        from fastavro import parse_schema
    except ImportError:
        return
    if not schema.references:
        from fastavro.schema import SchemaParseException, UnknownType

        try:
            parse_schema(parsed)
        except (SchemaParseException, UnknownType) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def _check_descriptor(text: str) -> None:
    try:
        base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("neither the text of a .proto file nor a serialized descriptor") from error


def _as_number(version: int | str) -> int:
    try:
        number = int(version)
    except ValueError:
        number = 0
    if number < 1:
        raise Refused(422, 42202, f"{version!r} is no version: they count from 1, and the last is 'latest'")
    return number
