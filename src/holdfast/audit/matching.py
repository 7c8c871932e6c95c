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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn, TypeVar

from holdfast.errors import UsageError

FIELDS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
FUNCTIONS: Final = dict.fromkeys(
    ("string", "int", "lower", "upper", "trim", "hex", "md5", "sha256"), (1, 1)
) | {
    "concat": (1, 20),
    "coalesce": (1, 20),
    "substring": (2, 3),
    "replace": (3, 3),
    "split_part": (3, 3),
}
"""How many arguments each takes, at least and at most."""


def _counts_from(least: int) -> Callable[[str | int], bool]:
    return lambda value: isinstance(value, int) and value >= least


def _is_text(value: str | int) -> bool:
    return isinstance(value, str)


def _is_some_text(value: str | int) -> bool:
    return isinstance(value, str) and value != ""


LITERAL_ARGUMENTS: Final = {
    "substring": ("(text, from, length) counts characters from 1", (_counts_from(1), _counts_from(0))),
    "replace": (
        "(text, 'old', 'new') takes two texts, the first of them not empty",
        (_is_some_text, _is_text),
    ),
    "split_part": ("(text, 'separator', number) counts parts from 1", (_is_some_text, _counts_from(1))),
}
"""Functions of which the arguments behind the first have to stand there as they are, and what each has to be."""
CASTS: Final = dict.fromkeys(("string", "text", "varchar"), "string") | dict.fromkeys(
    ("int", "integer", "long", "bigint"), "int"
)
COMPARISONS: Final = ("=", "!=", "<=", ">=", "<", ">")
DEPTH_MAX: Final = 20

_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<text>'(?:[^']|'')*')
      | (?P<quoted>"(?:[^"]|"")*"|`(?:[^`]|``)*`)
      | (?P<number>-?\d+(?![\w.]))
      | (?P<word>[^\W\d][\w$-]*)
      | (?P<sign>\|\||!=|<>|<=|>=|[=<>().,\[\]])
      | (?P<wrong>\S)
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
    pairs = parser.all_of(lambda: parser.pair(is_topic))
    columns = [pair.column for pair in pairs]
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        parser.refuse(f"{twice!r} stands twice")
    return Match(pairs)


def parse_condition(text: str) -> tuple[Condition, ...]:
    """The comparisons of `--where`, all of which must hold."""
    parser = _Parser(text, "--where")
    return parser.all_of(parser.condition)


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


_Sentence = TypeVar("_Sentence")


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Parser:
    """Recursive descent, one token ahead."""

    def __init__(self, text: str, flag: str) -> None:
        self._text = text
        self._flag = flag
        found = [(str(each.lastgroup), each) for each in _TOKEN.finditer(text)]
        self._tokens = [_Token(kind, each[kind], each.start(kind)) for kind, each in found]
        self._tokens.append(_Token("end", "", len(text)))
        self._at = 0
        self._depth = 0
        for kind, wrong, at in self._tokens:
            if kind == "wrong":
                why = "a quote that is not closed" if wrong in "'\"`" else f"{wrong!r} means nothing here"
                self.refuse(f"{why}, at character {at + 1}")

    # Tokens

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def take(self, *wanted: str) -> str | None:
        """The next token, if it is one of these signs or words."""
        token = self._next
        if token.kind not in ("sign", "word") or token.text.lower() not in wanted:
            return None
        self._at += 1
        return token.text.lower()

    def expect(self, sign: str, what: str) -> None:
        if self.take(sign) is None:
            self.fail(f"{sign!r} ({what})")

    def refuse(self, why: str) -> NoReturn:
        raise MatchError(f"{self._flag} {self._text!r}: {why}")

    def fail(self, expected: str, *, back: int = 0) -> NoReturn:
        """Something else should stand here, or so many tokens before."""
        token = self._tokens[self._at - back]
        found = "it ends" if token.kind == "end" else f"{token.text!r} stands"
        self.refuse(f"expected {expected}, but {found} at character {token.at + 1}")

    def end(self) -> None:
        if self._next.kind != "end":
            self.fail("AND, or the end")

    # Sentences

    def all_of(self, sentence: Callable[[], _Sentence]) -> tuple[_Sentence, ...]:
        """Sentences with AND between them, up to the end."""
        found = [sentence()]
        while self.take("and"):
            found.append(sentence())
        self.end()
        return tuple(found)

    def pair(self, is_topic: bool) -> Pair:
        left = self.expression() if is_topic else None
        path = self._column() if left is None else ()
        column = ".".join(map(_shown, path)) if left is None else str(left)
        self.expect("=", "a match is `<sink column> = <expression on the record>`")
        return Pair(column, path, left, self.expression())

    def condition(self) -> Condition:
        left = self.expression()
        if self.take("is"):
            negation = "not " if self.take("not") else ""
            if not self.take("null"):
                self.fail("IS NULL or IS NOT NULL")
            return Condition(left, f"is {negation}null")
        comparison = self.take(*COMPARISONS, "<>")
        if comparison is None:
            self.fail(f"a comparison ({' '.join(COMPARISONS)}, IS NULL)")
        return Condition(left, comparison.replace("<>", "!="), self.expression())

    def _column(self) -> tuple[str, ...]:
        parts = [self._name("a column of the sink")]
        while self.take("."):
            parts.append(self._name("a field of the column"))
        return tuple(parts)

    def _name(self, what: str) -> str:
        kind, text, _ = self._next
        if kind not in ("word", "quoted"):
            self.fail(what)
        self._at += 1
        return text if kind == "word" else text[1:-1].replace(text[0] * 2, text[0])

    def expression(self) -> Expression:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self.fail(f"an expression nested at most {DEPTH_MAX} deep")
        parts = [self._single()]
        while self.take("||"):
            parts.append(self._single())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else Call("concat", tuple(parts))

    def _single(self) -> Expression:
        if self.take("("):
            inner = self.expression()
            self.expect(")", "the end of what is in brackets")
            return inner
        kind, text, _ = self._next
        if kind not in ("text", "number", "word"):
            self.fail(f"an expression on the record: {', '.join(FIELDS)}, a function, 'text' or a number")
        self._at += 1
        if kind == "word":
            return self._call(text.lower()) if self.take("(") else self._field(text)
        return Constant(int(text) if kind == "number" else text[1:-1].replace("''", "'"))

    def _field(self, name: str) -> Field:
        if name not in FIELDS:
            known = ", ".join(FIELDS)
            self.fail(f"something of the record ({known}; for a field of JSON write value.NAME)", back=1)
        path: list[str | int] = []
        while sign := self.take(".", "["):
            if sign == ".":
                path.append(self._name("a name behind the dot"))
                continue
            kind, text, _ = self._next
            if kind != "number" or int(text) < 0:
                self.fail("the number of an element, from 0 on")
            self._at += 1
            path.append(int(text))
            self.expect("]", "behind an element's number")
        if path and name not in ("key", "value", "headers"):
            self.fail(f"nothing behind {name!r}: only key, value and headers have something in them", back=1)
        if name == "headers" and len(path) != 1:
            self.fail("one header's name: headers.NAME")
        return Field(name, tuple(path))

    def _call(self, name: str) -> Call:
        if name == "cast":
            return self._cast()
        if name not in FUNCTIONS:
            self.fail(f"a function that there is: {', '.join([*FUNCTIONS, 'cast'])}", back=2)
        arguments: list[Expression] = []
        while not self.take(")"):
            if arguments:
                self.expect(",", "between arguments")
            arguments.append(self.expression())
        least, most = FUNCTIONS[name]
        if not least <= len(arguments) <= most:
            count = str(least) if least == most else f"{least} to {most}"
            self.refuse(f"{name} takes {count} arguments, not {len(arguments)}")
        usage, checks = LITERAL_ARGUMENTS.get(name, ("", ()))
        for number, (argument, is_right) in enumerate(zip(arguments[1:], checks, strict=False), 2):
            if not isinstance(argument, Constant):
                self.refuse(f"argument {number} of {name} has to be a text or a number")
            if not is_right(argument.value):
                self.refuse(name + usage)
        return Call(name, tuple(arguments))

    def _cast(self) -> Call:
        inner = self.expression()
        if not self.take("as"):
            self.fail("AS and a type")
        type_ = self.take(*CASTS)
        if type_ is None:
            self.fail(f"a type: {', '.join(CASTS)}")
        self.expect(")", "the end of the cast")
        return Call(CASTS[type_], (inner,))
