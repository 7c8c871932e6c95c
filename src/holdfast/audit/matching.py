"""The little language of `--match`, `--where` and `--key`: what of a record makes a row of a sink its own.

    match       column = expression [AND column = expression …]
    condition   expression = expression [AND …]     also != <> < <= > >= , IS NULL, IS NOT NULL
    expression  key | value | topic | partition | offset | timestamp | headers.NAME | value.a.b[0].c | key.a
                | 'text' | 17 | function(expression, …) | CAST(expression AS type) | expression || expression

`value.…` and `key.…` look into JSON. A column or a step of a path that is no plain word stands in double quotes or back
ticks: `"order id"`, `headers."a b"`; a plain word may hold dashes behind its first letter. For a sink that is a topic,
the left side is an expression too, on the sink's record.

Everything here is text to values: `evaluating` computes them. An error names what was expected and where.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn

from holdfast.errors import UsageError

FIELDS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
FUNCTIONS: Final[dict[str, tuple[int, int]]] = {
    "string": (1, 1),
    "int": (1, 1),
    "lower": (1, 1),
    "upper": (1, 1),
    "trim": (1, 1),
    "hex": (1, 1),
    "md5": (1, 1),
    "sha256": (1, 1),
    "concat": (1, 20),
    "coalesce": (1, 20),
    "substring": (2, 3),
    "replace": (3, 3),
    "split_part": (3, 3),
}
"""How many arguments each takes, at least and at most."""
LITERAL_ARGUMENTS: Final = {"substring": (1, 2), "replace": (1, 2), "split_part": (1, 2)}
"""Which of them, counted from 0, have to stand there as they are."""
CASTS: Final = {
    "string": "string",
    "text": "string",
    "varchar": "string",
    "int": "int",
    "integer": "int",
    "long": "int",
    "bigint": "int",
}
COMPARISONS: Final = ("=", "!=", "<=", ">=", "<", ">")
DEPTH_MAX: Final = 20

_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<text>'(?:[^']|'')*')
      | (?P<quoted>"(?:[^"]|"")*"|`(?:[^`]|``)*`)
      | (?P<number>-?\d+(?![\w.]))
      | (?P<word>[^\W\d][\w$-]*)
      | (?P<sign>\|\||!=|<>|<=|>=|[=<>().,\[\]])
    )""",
    re.VERBOSE,
)


class MatchError(UsageError):
    """An expression that means nothing here."""


@dataclass(frozen=True)
class Field:
    """Something of the record."""

    name: str
    path: tuple[str | int, ...] = ()
    """Into its JSON; of headers, the header's name."""

    def __str__(self) -> str:
        text = self.name
        for step in self.path:
            text += f"[{step}]" if isinstance(step, int) else f".{_shown(step)}"
        return text


@dataclass(frozen=True)
class Constant:
    value: str | int

    def __str__(self) -> str:
        return str(self.value) if isinstance(self.value, int) else "'" + self.value.replace("'", "''") + "'"


@dataclass(frozen=True)
class Call:
    function: str
    arguments: tuple[Expression, ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(map(str, self.arguments))})"


Expression = Field | Constant | Call


@dataclass(frozen=True)
class Pair:
    """One column of the sink, and what it has to be."""

    column: str
    """A column's name, with those of the fields in it that lead to the value; or the left expression."""
    path: tuple[str, ...]
    """The same, step by step; nothing for an expression."""
    left: Expression | None
    """Of a sink that is a topic."""
    right: Expression

    def __str__(self) -> str:
        return f"{self.column} = {self.right}"


@dataclass(frozen=True)
class Condition:
    left: Expression
    comparison: str
    """One of `COMPARISONS`, `is null` or `is not null`."""
    right: Expression | None = None

    def __str__(self) -> str:
        return f"{self.left} {self.comparison}" + (f" {self.right}" if self.right is not None else "")


@dataclass(frozen=True)
class Match:
    """All of these pairs together."""

    pairs: tuple[Pair, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(pair.column for pair in self.pairs)

    @property
    def expressions(self) -> tuple[Expression, ...]:
        return tuple(pair.right for pair in self.pairs)

    def __str__(self) -> str:
        return " AND ".join(map(str, self.pairs))


def parse_match(text: str, *, is_topic: bool = False) -> Match:
    """The pairs of `--match`; `is_topic` when the sink is one, whose columns are expressions too."""
    parser = _Parser(text, "--match")
    pairs: list[Pair] = []
    while True:
        left = parser.expression() if is_topic else None
        path = parser.column() if left is None else ()
        column = ".".join(map(_shown, path)) if left is None else str(left)
        parser.expect("=", "a match is `<sink column> = <expression on the record>`")
        pairs.append(Pair(column, path, left, parser.expression()))
        if not parser.take_word("and"):
            break
    parser.end()
    columns = [pair.column for pair in pairs]
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise MatchError(f"--match {text!r}: {twice!r} stands twice")
    return Match(tuple(pairs))


def parse_condition(text: str) -> tuple[Condition, ...]:
    """The comparisons of `--where`, all of which must hold."""
    parser = _Parser(text, "--where")
    found: list[Condition] = []
    while True:
        left = parser.expression()
        if parser.take_word("is"):
            negation = "not " if parser.take_word("not") else ""
            if not parser.take_word("null"):
                parser.fail("IS NULL or IS NOT NULL")
            found.append(Condition(left, f"is {negation}null"))
        else:
            comparison = parser.take_sign(*COMPARISONS, "<>")
            if comparison is None:
                parser.fail(f"a comparison ({' '.join(COMPARISONS)}, IS NULL)")
            found.append(Condition(left, comparison.replace("<>", "!="), parser.expression()))
        if not parser.take_word("and"):
            break
    parser.end()
    return tuple(found)


def parse_expression(text: str, flag: str = "--key") -> Expression:
    parser = _Parser(text, flag)
    expression = parser.expression()
    parser.end()
    return expression


def fields_of(expressions: Sequence[Expression]) -> Iterator[Field]:
    """Every field that the expressions read."""
    for each in expressions:
        if isinstance(each, Field):
            yield each
        elif isinstance(each, Call):
            yield from fields_of(each.arguments)


def quoted(name: str) -> str:
    """A column's name as `parse_match` reads it; the parts of a path stay parts."""
    return ".".join(map(_shown, name.split(".")))


def _shown(word: str) -> str:
    return word if re.fullmatch(r"[^\W\d][\w$-]*", word) else '"' + word.replace('"', '""') + '"'


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Parser:
    """Recursive descent, one token ahead."""

    def __init__(self, text: str, flag: str) -> None:
        self._text = text
        self._flag = flag
        self._tokens = list(self._split())
        self._at = 0
        self._depth = 0

    def _split(self) -> Iterator[_Token]:
        at = 0
        while self._text[at:].strip():
            found = _TOKEN.match(self._text, at)
            if found is None or found.lastgroup is None:
                start = at + len(self._text[at:]) - len(self._text[at:].lstrip())
                wrong = self._text[start : start + 1]
                why = "a quote that is not closed" if wrong in "'\"`" else f"{wrong!r} means nothing here"
                raise MatchError(f"{self._flag} {self._text!r}: {why}, at character {start + 1}")
            yield _Token(found.lastgroup, found[found.lastgroup], found.start(found.lastgroup))
            at = found.end()

    # Tokens

    def _next(self) -> _Token:
        if self._at < len(self._tokens):
            return self._tokens[self._at]
        return _Token("end", "", len(self._text))

    def _take(self) -> _Token:
        token = self._next()
        self._at += 1
        return token

    def take_sign(self, *signs: str) -> str | None:
        token = self._next()
        if token.kind == "sign" and token.text in signs:
            self._at += 1
            return token.text
        return None

    def take_word(self, word: str) -> bool:
        token = self._next()
        if token.kind == "word" and token.text.lower() == word:
            self._at += 1
            return True
        return False

    def expect(self, sign: str, what: str) -> None:
        if self.take_sign(sign) is None:
            self.fail(f"{sign!r} ({what})")

    def fail(self, expected: str) -> NoReturn:
        token = self._next()
        found = "it ends" if token.kind == "end" else f"{token.text!r} stands"
        raise MatchError(
            f"{self._flag} {self._text!r}: expected {expected}, but {found} at character {token.at + 1}"
        )

    def end(self) -> None:
        if self._next().kind != "end":
            self.fail("AND, or the end")

    # Sentences

    def column(self) -> tuple[str, ...]:
        parts = [self._name("a column of the sink")]
        while self.take_sign("."):
            parts.append(self._name("a field of the column"))
        return tuple(parts)

    def _name(self, what: str) -> str:
        token = self._next()
        if token.kind not in ("word", "quoted"):
            self.fail(what)
        self._at += 1
        if token.kind == "word":
            return token.text
        mark = token.text[0]
        return token.text[1:-1].replace(mark * 2, mark)

    def expression(self) -> Expression:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self.fail(f"an expression nested at most {DEPTH_MAX} deep")
        parts = [self._single()]
        while self.take_sign("||"):
            parts.append(self._single())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else Call("concat", tuple(parts))

    def _single(self) -> Expression:
        token = self._next()
        if token.kind == "text":
            self._at += 1
            return Constant(token.text[1:-1].replace("''", "'"))
        if token.kind == "number":
            self._at += 1
            return Constant(int(token.text))
        if self.take_sign("("):
            inner = self.expression()
            self.expect(")", "the end of what is in brackets")
            return inner
        if token.kind != "word":
            self.fail(
                "an expression on the record: " + ", ".join(FIELDS) + ", a function, 'text' or a number"
            )
        self._at += 1
        if self._next().text == "(":
            return self._call(token)
        return self._field(token)

    def _field(self, token: _Token) -> Field:
        if token.text not in FIELDS:
            self._at -= 1
            self.fail(f"something of the record ({', '.join(FIELDS)}; for a field of JSON write value.NAME)")
        path: list[str | int] = []
        while True:
            if self.take_sign("."):
                path.append(self._name("a name behind the dot"))
            elif self.take_sign("["):
                number = self._take()
                if number.kind != "number" or int(number.text) < 0:
                    self._at -= 1
                    self.fail("the number of an element, from 0 on")
                path.append(int(number.text))
                self.expect("]", "behind an element's number")
            else:
                break
        if path and token.text not in ("key", "value", "headers"):
            self._at -= 1
            self.fail(f"nothing behind {token.text!r}: only key, value and headers have something in them")
        if token.text == "headers" and len(path) != 1:
            self.fail("one header's name: headers.NAME")
        return Field(token.text, tuple(path))

    def _call(self, token: _Token) -> Expression:
        name = token.text.lower()
        self.expect("(", "the arguments")
        if name == "cast":
            return self._cast()
        if name not in FUNCTIONS:
            self._at -= 2
            self.fail(f"a function that there is: {', '.join([*FUNCTIONS, 'cast'])}")
        arguments: list[Expression] = []
        while self.take_sign(")") is None:
            if arguments:
                self.expect(",", "between arguments")
            arguments.append(self.expression())
        least, most = FUNCTIONS[name]
        if not least <= len(arguments) <= most:
            count = str(least) if least == most else f"{least} to {most}"
            raise MatchError(
                f"{self._flag} {self._text!r}: {name} takes {count} arguments, not {len(arguments)}"
            )
        for place in LITERAL_ARGUMENTS.get(name, ()):
            if place < len(arguments) and not isinstance(arguments[place], Constant):
                raise MatchError(
                    f"{self._flag} {self._text!r}: argument {place + 1} of {name} has to be a text or a number"
                )
        _check_literals(name, arguments, f"{self._flag} {self._text!r}")
        return Call(name, tuple(arguments))

    def _cast(self) -> Call:
        inner = self.expression()
        if not self.take_word("as"):
            self.fail("AS and a type")
        token = self._next()
        function = CASTS.get(token.text.lower()) if token.kind == "word" else None
        if function is None:
            self.fail(f"a type: {', '.join(CASTS)}")
        self._at += 1
        self.expect(")", "the end of the cast")
        return Call(function, (inner,))


def _check_literals(name: str, arguments: Sequence[Expression], where: str) -> None:
    values = [each.value if isinstance(each, Constant) else None for each in arguments]
    if name == "substring" and not all(isinstance(value, int) for value in values[1:]):
        raise MatchError(f"{where}: substring(text, from, length) counts characters from 1")
    if name == "substring" and (int(values[1] or 0) < 1 or (len(values) > 2 and int(values[2] or 0) < 0)):
        raise MatchError(f"{where}: substring(text, from, length) counts characters from 1")
    if name == "replace" and (
        not isinstance(values[1], str) or not isinstance(values[2], str) or not values[1]
    ):
        raise MatchError(f"{where}: replace(text, 'old', 'new') takes two texts, the first of them not empty")
    if name == "split_part":
        separator, part = values[1], values[2]
        if not isinstance(separator, str) or not separator or not isinstance(part, int) or part < 1:
            raise MatchError(f"{where}: split_part(text, 'separator', number) counts parts from 1")
