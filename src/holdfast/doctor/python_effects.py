"""Effects outside Kafka that a program does for each message, and does again when it ends before its commit. (HF311)

Known by their text: a request that creates something (`requests.post`) without a key that its receiver could know it
by, and an INSERT that says nothing about a row that is there already. In order are a program that names an idempotency
key, an ON CONFLICT or its like, the offset among the columns, or an error about a row that is there; and one that keeps
its positions itself and so commits none to Kafka.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from holdfast.doctor.findings import Finding, Fix, Severity, finding
from holdfast.doctor.python_code import Made, Program
from holdfast.doctor.python_names import calls_in, names_in

REQUESTS: Final = frozenset(f"{library}.post" for library in ("requests", "httpx"))
STATEMENTS: Final = frozenset({"execute", "executemany", "execute_values"})
KEYED: Final = re.compile(r"idempoten|dedup|request.?id|client.?token", re.IGNORECASE)
BEARING: Final = re.compile(
    r"\bconflict\b|\bduplicate key\b|\bignore\b|\breplace\b|\bnot exists\b|offset", re.IGNORECASE
)
INSERT: Final = re.compile(r"\s*insert\s+into\b", re.IGNORECASE)
THERE_ALREADY: Final = ("Integrity", "Unique", "Duplicate", "Conflict")


def check_effects(
    program: Program, made: Made, loop: ast.AST, of_message: set[str], commits: list[ast.Call]
) -> Iterator[Finding]:
    """One finding for a loop, at its first effect: `commits` are those of the loop, none means that others keep
    the positions."""
    if not commits or _bears_repetition(loop):
        return
    for call in calls_in(loop):
        what = _effect(program, call)
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if what is None or not any(names_in(each) & of_message for each in given):
            continue
        yield finding(
            "HF311",
            program.place(call),
            f"{what}, and {made.name}.commit() is apart from it: it is done twice when the program ends in between",
            severity=Severity.NOTE,
            fix=Fix(
                "topic, partition and offset as an idempotency key or a unique column with ON CONFLICT DO NOTHING; "
                "or positions in the same database transaction",
                "code",
            ),
        )
        return


def _effect(program: Program, call: ast.Call) -> str | None:
    if program.names.meaning(call.func) in REQUESTS:
        return "a request that creates something without a key to know it by"
    if isinstance(call.func, ast.Attribute) and call.func.attr in STATEMENTS and call.args:
        texts = [each.value for each in ast.walk(call.args[0]) if isinstance(each, ast.Constant)]
        statement = program.names.constant(call.args[0])
        text = statement if isinstance(statement, str) else " ".join(map(str, texts))
        if INSERT.match(text) and not BEARING.search(text):
            return "an INSERT that does not say what to do about a row that is there"
    return None


def _bears_repetition(loop: ast.AST) -> bool:
    """Whether a key is named, or an error about something that is there already is awaited."""
    for node in ast.walk(loop):
        match node:
            case ast.Constant(value=str(text)) if KEYED.search(text):
                return True
            case ast.keyword(arg=str(text)) | ast.Name(id=text) | ast.Attribute(attr=text) if KEYED.search(
                text
            ):
                return True
            case ast.ExceptHandler(type=ast.expr() as kind):
                words = names_in(kind) | {e.attr for e in ast.walk(kind) if isinstance(e, ast.Attribute)}
                if any(part in word for word in words for part in THERE_ALREADY):
                    return True
    return False
