"""Protobuf's `.proto` language, as far as records need it: a text becomes a `FileDescriptorProto`.

Read: proto3 and proto2 files with messages, enums, nested ones, scalars, repeated, optional, required, oneof, map,
reserved, options (of which `allow_alias` counts, the rest is passed over: packed or not, both are read, and a field
that is absent is null, whatever its default), services (passed over), imports of Protobuf's own well-known files and of
files that a registry gives along. Refused with a clear text: other imports, editions, groups, extensions. A
`FileDescriptorSet` of protoc has no such bounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as F

from holdfast.pipeline.formats.schema_rows import Mismatch

SCALARS: Final = {
    name: getattr(F, f"TYPE_{name.upper()}")
    for name in (
        *("double", "float", "bool", "string", "bytes"),
        *("int32", "sint32", "uint32", "fixed32", "sfixed32"),
        *("int64", "sint64", "uint64", "fixed64", "sfixed64"),
    )
}
DEPTH_MAX: Final = 32
TOKEN: Final = re.compile(
    r"""\s+|//[^\n]*|/\*.*?\*/
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<number>[0-9][0-9A-Za-z_.+]*(?:(?<=[eE])[+-][0-9]+)?)
    |(?P<mark>[{}\[\]()<>;=,.:+\-/])""",
    re.VERBOSE | re.DOTALL,
)


class Reading:
    """The tokens of a file, from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._tokens())
        self.place = 0

    def _tokens(self) -> Iterator[tuple[str, int]]:
        position = 0
        while position < len(self.text):
            match = TOKEN.match(self.text, position)
            if match is None:
                raise self.wrong(f"unexpected {self.text[position]!r}", position)
            if match.lastgroup is not None:
                yield match[0], position
            position = match.end()

    def wrong(self, what: str, position: int | None = None) -> Mismatch:
        if position is None:
            position = self.tokens[min(self.place, len(self.tokens) - 1)][1] if self.tokens else 0
        return Mismatch(f"line {self.text.count(chr(10), 0, position) + 1} of the .proto text: {what}")

    @property
    def next(self) -> str:
        return self.tokens[self.place][0] if self.place < len(self.tokens) else ""

    @property
    def after_next(self) -> str:
        return self.tokens[self.place + 1][0] if self.place + 1 < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        found = self.next
        if not found:
            raise self.wrong("it ends too early")
        if expected and found != expected:
            raise self.wrong(f"expected {expected!r} where {found!r} stands")
        self.place += 1
        return found

    def taken(self, mark: str) -> bool:
        if self.next != mark:
            return False
        self.place += 1
        return True

    def word(self) -> str:
        if not re.fullmatch(r"[A-Za-z_]\w*", self.next):
            raise self.wrong(f"expected a name where {self.next!r} stands")
        return self.take()

    def dotted(self) -> str:
        found = "." if self.taken(".") else ""
        found += self.word()
        while self.taken("."):
            found += "." + self.word()
        return found

    def number(self) -> int:
        sign = -1 if self.taken("-") else 1
        try:
            number = int(self.next, 0) if not re.fullmatch(r"0[0-7]+", self.next) else int(self.next, 8)
        except ValueError:
            raise self.wrong(f"expected a number where {self.next!r} stands") from None
        self.take()
        return sign * number

    def literal(self) -> str:
        found = self.take()
        if found[0] not in "\"'":
            raise self.wrong(f"expected a text in quotes where {found!r} stands")
        return found[1:-1]

    def skip_statement(self) -> None:
        """Past a `;` or a block in braces, whatever stands in it."""
        depth = 0
        while True:
            found = self.take()
            depth += {"{": 1, "}": -1}.get(found, 0)
            if depth == 0 and found in (";", "}"):
                return

    def skip_options(self) -> None:
        """Past options in brackets, if there are any."""
        depth = 0
        while depth > 0 or self.next == "[":
            depth += {"[": 1, "]": -1}.get(self.take(), 0)


class ProtoFile:
    """One file being read into its descriptor."""

    def __init__(self, text: str, name: str) -> None:
        self.reading = Reading(text)
        self.file = FileDescriptorProto(name=name, syntax="proto2")
        self._is_proto3 = False
        self._read()

    def _read(self) -> None:
        reading = self.reading
        while reading.next:
            found = reading.take()
            if found == "syntax":
                reading.take("=")
                self.file.syntax = reading.literal()
                self._is_proto3 = self.file.syntax == "proto3"
                if self.file.syntax not in ("proto2", "proto3"):
                    raise reading.wrong(f"syntax {self.file.syntax!r} is neither proto2 nor proto3")
                reading.take(";")
            elif found == "package":
                self.file.package = reading.dotted()
                reading.take(";")
            elif found == "import":
                if reading.next in ("public", "weak"):
                    reading.take()
                self.file.dependency.append(reading.literal())
                reading.take(";")
            elif found == "message":
                self._message(self.file.message_type.add(), 0)
            elif found == "enum":
                self._enum(self.file.enum_type.add())
            elif found in ("option", "service"):
                reading.skip_statement()
            elif found != ";":
                raise reading.wrong(
                    f"{found!r} is not handled: give protoc's FileDescriptorSet instead of the text"
                )

    def _message(self, message: DescriptorProto, depth: int) -> None:
        reading = self.reading
        if depth > DEPTH_MAX:
            raise reading.wrong(f"messages nested deeper than {DEPTH_MAX} levels")
        message.name = reading.word()
        reading.take("{")
        while not reading.taken("}"):
            found = reading.next
            if found in ("option", "reserved", "extensions") and not self._is_field():
                reading.skip_statement()
            elif found == "message" and not self._is_field():
                reading.take()
                self._message(message.nested_type.add(), depth + 1)
            elif found == "enum" and not self._is_field():
                reading.take()
                self._enum(message.enum_type.add())
            elif found == "oneof" and not self._is_field():
                self._oneof(message)
            elif found in ("extend", "group"):
                raise reading.wrong(
                    f"{found!r} is not handled: give protoc's FileDescriptorSet instead of the text"
                )
            elif not reading.taken(";"):
                self._field(message, None)
        self._optionals(message)

    def _is_field(self) -> bool:
        """Whether a word that opens a statement is a type's name instead: `message = 1` has no such form, `.` has."""
        return self.reading.after_next == "."

    def _oneof(self, message: DescriptorProto) -> None:
        reading = self.reading
        reading.take("oneof")
        message.oneof_decl.add(name=reading.word())
        place = len(message.oneof_decl) - 1
        reading.take("{")
        while not reading.taken("}"):
            if reading.next == "option":
                reading.skip_statement()
            elif not reading.taken(";"):
                self._field(message, place)

    def _field(self, message: DescriptorProto, oneof: int | None) -> None:
        reading = self.reading
        field = message.field.add(label=F.LABEL_OPTIONAL)
        label = reading.next
        if label in ("repeated", "optional", "required") and oneof is None:
            reading.take()
            field.label = {"repeated": F.LABEL_REPEATED, "required": F.LABEL_REQUIRED}.get(
                label, F.LABEL_OPTIONAL
            )
            field.proto3_optional = label == "optional" and self._is_proto3
        elif oneof is None and not self._is_proto3 and label != "map":
            raise reading.wrong("a field of proto2 needs required, optional or repeated")
        if oneof is not None:
            field.oneof_index = oneof
        entry = None
        if reading.next == "map" and reading.after_next == "<":
            entry = self._map(message, field)
        else:
            self._type(field, reading.dotted())
        field.name = reading.word()
        if entry is not None:
            entry.name = "".join(part[:1].upper() + part[1:] for part in field.name.split("_")) + "Entry"
            field.type_name = entry.name
        reading.take("=")
        field.number = reading.number()
        reading.skip_options()
        reading.take(";")

    def _map(self, message: DescriptorProto, field: F) -> DescriptorProto:
        reading = self.reading
        reading.take()
        reading.take("<")
        entry = message.nested_type.add()
        entry.options.map_entry = True
        self._type(entry.field.add(name="key", number=1, label=F.LABEL_OPTIONAL), reading.word())
        reading.take(",")
        self._type(entry.field.add(name="value", number=2, label=F.LABEL_OPTIONAL), reading.dotted())
        reading.take(">")
        field.label = F.LABEL_REPEATED
        field.type = F.TYPE_MESSAGE
        return entry

    def _type(self, field: F, name: str) -> None:
        if name in SCALARS:
            field.type = SCALARS[name]
        else:
            field.type_name = name

    def _enum(self, enum: EnumDescriptorProto) -> None:
        reading = self.reading
        enum.name = reading.word()
        reading.take("{")
        while not reading.taken("}"):
            if reading.next == "option":
                alias = reading.tokens[reading.place + 1 : reading.place + 4]
                if [each for each, _ in alias] == ["allow_alias", "=", "true"]:
                    enum.options.allow_alias = True
                reading.skip_statement()
            elif reading.next == "reserved":
                reading.skip_statement()
            elif not reading.taken(";"):
                value = enum.value.add(name=reading.word())
                reading.take("=")
                value.number = reading.number()
                reading.skip_options()
                reading.take(";")

    def _optionals(self, message: DescriptorProto) -> None:
        """Each `optional` of proto3 stands in a oneof of its own, behind the real ones."""
        for field in message.field:
            if field.proto3_optional:
                message.oneof_decl.add(name=f"_{field.name}")
                field.oneof_index = len(message.oneof_decl) - 1


def parse_proto(text: str, name: str = "schema.proto") -> FileDescriptorProto:
    """The descriptor of a file, its references to other types not yet resolved; raises `Mismatch`."""
    return ProtoFile(text, name).file


def declared(file: FileDescriptorProto) -> Mapping[str, int]:
    """Full names of a file's messages and enums, with what kind of field each makes."""
    found: dict[str, int] = {}

    def walk(messages: Iterator[DescriptorProto], scope: str) -> None:
        for message in messages:
            name = f"{scope}.{message.name}"
            found[name] = F.TYPE_MESSAGE
            found.update({f"{name}.{each.name}": F.TYPE_ENUM for each in message.enum_type})
            walk(iter(message.nested_type), name)

    scope = f".{file.package}" if file.package else ""
    found.update({f"{scope}.{each.name}": F.TYPE_ENUM for each in file.enum_type})
    walk(iter(file.message_type), scope)
    return found


def resolve(file: FileDescriptorProto, known: Mapping[str, int]) -> None:
    """Give every field that names a type its full name, looked for from the innermost scope outwards."""

    def walk(message: DescriptorProto, scope: str) -> None:
        for field in message.field:
            if field.type_name and not field.type_name.startswith("."):
                field.type_name = lookup(field.type_name, scope)
            if field.type_name:
                if field.type_name not in known:
                    raise Mismatch(
                        f"field {message.name}.{field.name}: there is no type {field.type_name[1:]}"
                    )
                field.type = known[field.type_name]
        for each in message.nested_type:
            walk(each, f"{scope}.{each.name}")

    def lookup(name: str, scope: str) -> str:
        while True:
            if f"{scope}.{name}" in known:
                return f"{scope}.{name}"
            if not scope:
                raise Mismatch(f"there is no type {name}: is its import missing?")
            scope = scope.rpartition(".")[0]

    for message in file.message_type:
        walk(message, (f".{file.package}" if file.package else "") + f".{message.name}")
