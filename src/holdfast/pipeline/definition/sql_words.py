"""Just enough of SQL to find words in it: literals, quoted names and comments are passed over.

It serves checks that need no Spark. What it finds are calls whose answer changes from one run to the next: a batch that
is recomputed after a crash must come out as it was.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

CHANGING: Final = frozenset(
    {
        "uuid",
        "rand",
        "randn",
        "random",
        "randstr",
        "uniform",
        "shuffle",
        "monotonically_increasing_id",
        "spark_partition_id",
        "input_file_name",
        "input_file_block_start",
        "input_file_block_length",
    }
)
"""Functions whose answer is another one in the next run, beside those that tell the time."""
BARE: Final = frozenset({"current_timestamp", "current_date", "current_time", "localtimestamp"})
"""Those that SQL calls without parentheses."""
TIMES: Final = BARE | {"curdate", "now", "unix_timestamp", "to_unix_timestamp"}
_TOKEN: Final = re.compile(
    r"""(?P<comment>--[^\n]*|/\*.*?(?:\*/|\Z))
      | (?P<literal>'(?:[^'\\]|\\.|'')*(?:'|\Z)|"(?:[^"\\]|\\.|"")*(?:"|\Z))
      | (?P<quoted>`(?:[^`]|``)*(?:`|\Z))
      | (?P<word>[A-Za-z_]\w*)
      | (?P<number>[0-9][A-Za-z0-9_.]*)
      | (?P<mark>\S)""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    kind: str
    text: str

    @property
    def word(self) -> str:
        return self.text.lower() if self.kind == "word" else ""


def tokens(sql: str) -> list[Token]:
    return [
        Token(match.lastgroup or "", match[0])
        for match in _TOKEN.finditer(sql)
        if match.lastgroup != "comment"
    ]


def problems_of_expression(sql: str) -> Iterator[str]:
    """What is wrong with an expression, or with a query's expressions, on the face of it."""
    found = tokens(sql)
    yield from _unbalanced(found)
    if any(token.text == ";" for token in found):
        yield "there is a ';' in it; write one expression"
    for name in _calls(found):
        yield _refusal(name)


def problems_of_query(sql: str) -> Iterator[str]:
    found = tokens(sql.rstrip().removesuffix(";"))
    words = {token.word for token in found}
    names = words | {token.text.strip("`").lower() for token in found if token.kind == "quoted"}
    yield from problems_of_expression(sql.rstrip().removesuffix(";"))
    if not found or (found[0].word not in ("select", "with", "from", "values") and found[0].text != "("):
        yield "a step's query begins with SELECT (or WITH)"
        return
    if "input" not in names:
        yield "it does not read from input, the rows of the step before; write … FROM input"
    has_star = any(token.text == "*" for token in found)
    if "_hf" not in names and not has_star:
        yield (
            "it loses _hf, the place each row comes from; select it (SELECT _hf, …), "
            "or rows could not be accounted for"
        )
    for token, behind in itertools.pairwise(found):
        if (token.word, behind.kind) == ("limit", "number") or (token.word, behind.text) == (
            "tablesample",
            "(",
        ):
            yield f"{token.text} keeps other rows when the batch is recomputed; use WHERE or a filter step"


def _unbalanced(found: list[Token]) -> Iterator[str]:
    depth = 0
    for token in found:
        depth += {"(": 1, ")": -1}.get(token.text, 0) if token.kind == "mark" else 0
        if depth < 0:
            break
    if depth != 0:
        yield "its parentheses do not match"
    for token in found:
        if token.kind in ("literal", "quoted") and (len(token.text) < 2 or token.text[-1] != token.text[0]):
            yield f"the quote before {token.text[1:20]!r} is not closed"


def _calls(found: list[Token]) -> list[str]:
    names: list[str] = []
    for index, token in enumerate(found):
        behind = found[index + 1].text if index + 1 < len(found) else ""
        before = found[index - 1] if index else Token("", "")
        if before.text == "." or before.word == "as":
            continue
        name = token.word
        empty = behind == "(" and index + 2 < len(found) and found[index + 2].text == ")"
        is_of_arguments = name in ("unix_timestamp", "to_unix_timestamp") and not empty
        called = name in CHANGING | TIMES and behind == "(" and not is_of_arguments
        if (called or (name in BARE and behind not in ("(", "."))) and name not in names:
            names.append(name)
    return names


def _refusal(name: str) -> str:
    if name in TIMES:
        return (
            f"{name}() changes when a batch is recomputed after a crash; "
            "use _batch_time, the time that is fixed with the batch"
        )
    instead = {
        "uuid": "; derive an id from _hf, such as concat_ws('-', _hf.topic, _hf.partition, _hf.offset)",
        "monotonically_increasing_id": "; use _hf.offset, which is the same each time",
    }.get(
        name,
        "; hash a column, such as xxhash64(_hf.topic, _hf.partition, _hf.offset), where chance is wanted",
    )
    return f"{name}() changes when a batch is recomputed after a crash{instead}"
