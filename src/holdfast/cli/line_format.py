"""How one line of input becomes a message: the reader properties of kafka-console-producer.

    headers <headers.delimiter> key <key.separator> value        headers: k:v,k:v

Bytes stay bytes: what is not UTF-8 goes through unchanged. Separators are plain text; Kafka takes
`headers.separator` for a regular expression.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from holdfast.errors import ConfigError, HoldfastError

Headers = list[tuple[str, str | bytes | None]]


class MalformedLine(HoldfastError):
    """A line that does not have the parts the reader properties promise."""


class ParsedLine(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(frozen=True)
class LineFormat:
    parse_key: bool = False
    parse_headers: bool = False
    ignore_error: bool = False
    key_separator: bytes = b"\t"
    headers_delimiter: bytes = b"\t"
    headers_separator: bytes = b","
    headers_key_separator: bytes = b":"
    null_marker: bytes | None = None

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> LineFormat:
        arguments: dict[str, bool | bytes] = {}
        for name, value in properties.items():
            if name in FLAGS:
                arguments[name.replace(".", "_")] = value.strip().lower() == "true"
            elif name in TEXTS:
                arguments[name.replace(".", "_")] = value.encode()
            else:
                known = ", ".join((*FLAGS, *TEXTS))
                raise ConfigError(f"--reader-property {name} is not known; there are {known}")
        made = cls(**arguments)  # type: ignore[arg-type]
        made._check_separators()
        return made

    def _check_separators(self) -> None:
        """Two marks that are equal would make a line ambiguous; key and headers may share theirs."""
        marks = {
            "headers.delimiter": self.headers_delimiter,
            "headers.separator": self.headers_separator,
            "headers.key.separator": self.headers_key_separator,
            "null.marker": self.null_marker,
        }
        pairs = [*combinations(marks, 2)]
        for first, second in pairs:
            if marks[first] == marks[second]:
                raise ConfigError(f"{first} and {second} must differ")
        if self.null_marker == self.key_separator:
            raise ConfigError("null.marker and key.separator must differ")
        if b"" in (self.key_separator, *(mark for mark in marks.values() if mark is not None)):
            raise ConfigError("a separator cannot be empty")

    def parse(self, line: bytes) -> ParsedLine:
        headers: Headers = []
        key = None
        rest = line
        if self.parse_headers:
            part, rest = self._split(rest, self.headers_delimiter, "headers.delimiter")
            if part is not None and part != self.null_marker:
                headers = self._parse_headers(part)
        if self.parse_key:
            key, rest = self._split(rest, self.key_separator, "key.separator")
        return ParsedLine(self._or_null(key), self._or_null(rest), headers)

    def _split(self, line: bytes, mark: bytes, name: str) -> tuple[bytes | None, bytes]:
        before, found, after = line.partition(mark)
        if found:
            return before, after
        if self.ignore_error:
            return None, line
        raise MalformedLine(f"there is no {name} {mark.decode()!r} in it")

    def _parse_headers(self, part: bytes) -> Headers:
        headers: Headers = []
        for pair in part.split(self.headers_separator):
            name, found, value = pair.partition(self.headers_key_separator)
            if not found and not self.ignore_error:
                mark = self.headers_key_separator.decode()
                raise MalformedLine(f"header {pair!r} has no headers.key.separator {mark!r}")
            if name == self.null_marker:
                raise MalformedLine("a header's name cannot be the null.marker")
            headers.append((_text(name), self._or_null(value) if found else None))
        return headers

    def _or_null(self, part: bytes | None) -> bytes | None:
        return None if part == self.null_marker else part


FLAGS = ("parse.key", "parse.headers", "ignore.error")
TEXTS = ("key.separator", "headers.delimiter", "headers.separator", "headers.key.separator", "null.marker")


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise MalformedLine(f"header name {name!r} is not UTF-8") from None
