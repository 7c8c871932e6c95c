"""Java's `.properties` files: what `server.properties` is written in.

A natural line ends with \\n, \\r or \\r\\n. One that is blank, or begins with `#` or `!` after white space,
says nothing. A line that ends with an odd number of backslashes goes on in the next, whose leading white
space is dropped. The key ends at the first `=`, `:` or white space that no backslash precedes; one separator
and the white space around it are skipped; the rest is the value, trailing white space included. Backslash
makes \\t, \\n, \\r, \\f and \\uXXXX; before anything else it vanishes. Of a key given twice the last value
counts. Java makes an empty pair of a lone backslash at the end of the file; here it says nothing.

Every pair remembers the line it began on, so that an error can say where it stands.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.errors import ConfigError

_WHITESPACE = " \t\f"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_HEX = frozenset("0123456789abcdefABCDEF")


class Properties(dict[str, str]):
    """The pairs of one file, with the line each began on."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.lines: dict[str, int] = {}
        self.repeated: list[tuple[str, int, int]] = []
        """Keys that were given more than once: the key, the line that lost, the line that won."""

    def where(self, name: str) -> str:
        return f"{self.source}:{self.lines[name]}" if name in self.lines else self.source


def parse_properties(text: str | bytes, source: str = "server.properties") -> Properties:
    """The pairs of a file; ConfigError with the line number for a \\u that lacks its four digits.

    Bytes are UTF-8, or Latin-1 (Java's own choice) when they cannot be.
    """
    properties = Properties(source)
    for number, line in _logical_lines(text if isinstance(text, str) else _decode(text)):
        raw_key, raw_value = _split(line)
        key = _unescape(raw_key, source, number)
        value = _unescape(raw_value, source, number)
        if key in properties:
            properties.repeated.append((key, properties.lines[key], number))
        properties[key] = value
        properties.lines[key] = number
    return properties


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    pending = ""
    pending_number = 0
    natural_lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for number, natural in enumerate(natural_lines, 1):
        line = natural.lstrip(_WHITESPACE)
        if not pending:
            # A line that held nothing but its backslash has not begun a pair: the next may be a comment.
            if not line or line[0] in "#!":
                continue
            pending_number = number
        trailing = len(line) - len(line.rstrip("\\"))
        goes_on = trailing % 2 == 1
        pending += line[:-1] if goes_on else line
        if not goes_on:
            if pending:
                yield pending_number, pending
            pending = ""
    if pending:
        yield pending_number, pending


def _split(line: str) -> tuple[str, str]:
    """Key and value of a logical line, escapes still in them."""
    end = len(line)
    position = 0
    while position < end and line[position] not in "=:" + _WHITESPACE:
        position += 2 if line[position] == "\\" else 1
    key_end = min(position, end)
    while position < end and line[position] in _WHITESPACE:
        position += 1
    if position < end and line[position] in "=:":
        position += 1
        while position < end and line[position] in _WHITESPACE:
            position += 1
    return line[:key_end], line[position:]


def _unescape(text: str, source: str, number: int) -> str:
    if "\\" not in text:
        return text
    parts: list[str] = []
    position = 0
    while position < len(text):
        character = text[position]
        position += 1
        if character != "\\" or position == len(text):
            # A backslash at the very end can only be the file's last byte: Java drops it.
            parts.append("" if character == "\\" else character)
            continue
        escaped = text[position]
        position += 1
        if escaped == "u":
            digits = text[position : position + 4]
            if len(digits) != 4 or not set(digits) <= _HEX:
                raise ConfigError(f"{source}:{number}: \\u{digits} is not \\u and four hexadecimal digits")
            parts.append(chr(int(digits, 16)))
            position += 4
        else:
            parts.append(_ESCAPES.get(escaped, escaped))
    return "".join(parts)
