"""What a Python program does with what it consumes: commits before handling, threads, failures that are passed over.

The rules look at loops that read messages: `for message in consumer`, or a loop that calls poll, consume, getone or
getmany. Within one, a name is *of the message* when it is bound to what was read, or to something made from it.
Handling is a call that gets such a name, unless it only decodes or logs.

HF311 is about effects outside Kafka that a program does for each message, and does again when it ends before its
commit. They are known by their text: a request that creates something (`requests.post`) without a key that its receiver
could know it by, and an INSERT that says nothing about a row that is there already. In order are a program that names
an idempotency key, an ON CONFLICT or its like, the offset among the columns, or an error about a row that is there; and
one that keeps its offsets itself and so commits none to Kafka.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from holdfast.doctor.client_defaults import Client
from holdfast.doctor.findings import Finding, Fix, Severity, finding
from holdfast.doctor.python_code import Made, Program, dotted
from holdfast.doctor.python_names import FUNCTIONS, LOOPS, calls_in, is_logging, names_in, only_tells

READS: Final = frozenset({"poll", "consume", "getone", "getmany"})
DECODING: Final = frozenset(
    """loads load decode str repr len int float dict list tuple isinstance get value key headers error topic
    partition offset timestamp items values keys deserialize parse model_validate model_validate_json
    TopicPartition OffsetAndMetadata KafkaException KafkaError from_json code append isEnabledFor""".split()  # noqa: SIM905
)
PARSING: Final = frozenset(
    {"loads", "decode", "deserialize", "parse", "ParseFromString", "model_validate_json"}
)
HANDING_ON: Final = frozenset({"submit", "put", "put_nowait", "apply_async", "create_task", "ensure_future"})
PASSING: Final = frozenset(
    """ValueError TypeError KeyError IndexError AttributeError LookupError AssertionError StopIteration IntegrityError
    UnicodeError KeyboardInterrupt""".split()  # noqa: SIM905
)
"""Errors of handling that come from what is in the message: trying it again gives the same."""
WAITING: Final = frozenset(
    {"result", "wait", "as_completed", "gather", "join", "map", "run_until_complete", "TaskGroup"}
)


@dataclass
class Loop:
    """A loop that reads from a consumer, and the names that are of its messages."""

    node: ast.For | ast.AsyncFor | ast.While
    names: set[str]

    def handles(self, node: ast.AST) -> bool:
        """Whether there is a call that works on the message."""
        return any(self._is_handling(call) for call in calls_in(node))

    def parses(self, node: ast.AST) -> bool:
        """Whether there is a call that makes something of the message's bytes."""
        return any(
            isinstance(call.func, ast.Attribute) and call.func.attr in PARSING and names_in(call) & self.names
            for call in calls_in(node)
        )

    def _is_handling(self, call: ast.Call) -> bool:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)
        if name in DECODING or name in READS or name == "commit" or is_logging(call):
            return False
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        return any(names_in(each) & self.names for each in given)


def check_consumers(program: Program) -> Iterator[Finding]:
    for made in program.made:
        if made.settings.role != "consumer":
            continue
        for loop in _loops(program, made):
            yield from _committed_first(program, made, loop)
            yield from _handed_on(program, made, loop)
            yield from _failure_skipped(program, made, loop)
            yield from check_effects(program, made, loop.node, loop.names, _commits_of(program, made, loop))
        yield from _last_commit(program, made)
        yield from _whatever_comes(program, made)


def _commits_of(program: Program, made: Made, loop: Loop) -> list[ast.Call]:
    commits = set(made.calls(program.names, "commit"))
    return [call for call in calls_in(loop.node) if call in commits]


def _loops(program: Program, made: Made) -> Iterator[Loop]:
    names = program.names
    found: list[ast.AST] = []
    for node in ast.walk(names.tree):
        if isinstance(node, (ast.For, ast.AsyncFor)) and _is_client(program, made, node.iter):
            found.append(node)
            yield Loop(node, _derived(node, names_in(node.target)))
    for call in made.calls(names, *READS):
        loop = next((each for each in names.ancestors(call) if isinstance(each, (*LOOPS, *FUNCTIONS))), None)
        if not isinstance(loop, LOOPS) or loop in found:
            continue
        found.append(loop)
        assigned = next((each for each in names.ancestors(call) if isinstance(each, ast.stmt)), None)
        first: set[str] = set()
        if isinstance(assigned, ast.Assign):
            first = {name for target in assigned.targets for name in names_in(target)}
        for each in ast.walk(loop):
            if isinstance(each, ast.NamedExpr) and call in ast.walk(each.value):
                first |= names_in(each.target)
        yield Loop(loop, _derived(loop, first))


def _is_client(program: Program, made: Made, node: ast.expr) -> bool:
    name = dotted(node)
    if not name or name != made.name:
        return False
    if "." in name:
        return program.names.class_of(node) is program.names.class_of(made.call)
    return program.names.binding_scope(node, name) is program.names.binding_scope(made.call, name)


def _derived(loop: ast.AST, names: set[str]) -> set[str]:
    """The names, and those bound to something made from them."""
    known = set(names)
    while True:
        before = len(known)
        for node in ast.walk(loop):
            match node:
                case ast.Assign(targets=targets, value=value) if names_in(value) & known:
                    known |= {
                        name
                        for target in targets
                        if isinstance(target, (ast.Name, ast.Tuple))
                        for name in names_in(target)
                    }
                case ast.For(target=target, iter=value) if names_in(value) & known:
                    known |= names_in(target)
        if len(known) == before:
            return known


# HF301


def _committed_first(program: Program, made: Made, loop: Loop) -> Iterator[Finding]:
    """A commit with the handling of the message after it, in the same block, and none before it."""
    for block in _blocks(loop.node):
        for index, statement in enumerate(block):
            call = _commit(program, made, statement)
            if call is None:
                continue
            before, after = block[:index], block[index + 1 :]
            if any(loop.handles(each) for each in before) or not any(loop.handles(each) for each in after):
                continue
            yield finding(
                "HF301",
                program.place(call),
                f"{made.name}.commit() stands before the message is handled",
                fix=Fix(f"{made.name}.commit() after the message has been handled", "code"),
            )


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for each in ast.walk(node):
        if each is not node and isinstance(each, FUNCTIONS):
            continue
        for name in ("body", "orelse", "finalbody"):
            block = getattr(each, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _commit(program: Program, made: Made, statement: ast.stmt) -> ast.Call | None:
    if not isinstance(statement, (ast.Expr, ast.Assign)):
        return None
    calls = set(made.calls(program.names, "commit"))
    return next((call for call in calls_in(statement) if call in calls), None)


# HF302


def _handed_on(program: Program, made: Made, loop: Loop) -> Iterator[Finding]:
    """The message goes to a thread or a task, and the committed offset goes on without waiting for it."""
    if any(_name(call) in WAITING for call in calls_in(loop.node)):
        return
    automatic = _commits_by_itself(made)
    if not automatic and not _commits_of(program, made, loop):
        return
    for call in calls_in(loop.node):
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        threaded = _name(call) in HANDING_ON or program.names.meaning(call.func) in (
            "threading.Thread",
            "multiprocessing.Process",
        )
        if threaded and any(names_in(each) & loop.names for each in given):
            how = "offsets are committed by themselves" if automatic else f"{made.name}.commit() follows"
            yield finding(
                "HF302",
                program.place(call),
                f"{_name(call)}() hands the message on, and {how}, whether it has been handled or not",
                fix=Fix(
                    "wait for the work before committing, or commit up to what every worker has finished",
                    "code",
                ),
                related=("HF301", "HF303"),
            )
            return


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)


def _commits_by_itself(made: Made) -> bool:
    settings = made.settings
    if settings.flag("enable.auto.commit") is not True:
        return False
    if settings.client is Client.LIBRDKAFKA:
        return settings.flag("enable.auto.offset.store") is True
    return settings.written("group.id")


# HF303, HF306


def _failure_skipped(program: Program, made: Made, loop: Loop) -> Iterator[Finding]:
    """An error of the handling is mentioned at most, and the committed offset moves on: with this message, or a later
    one."""
    commits = set(made.calls(program.names, "commit", "store_offsets"))
    moving = [call for call in calls_in(loop.node) if call in commits]
    if not moving and not _commits_by_itself(made):
        return
    for attempt in ast.walk(loop.node):
        if not isinstance(attempt, ast.Try) or not any(
            loop.handles(each) or loop.parses(each) for each in attempt.body
        ):
            continue
        if _is_retried(program, loop, attempt):
            continue
        overtaken = _only_after_success(attempt, moving) and not _commits_by_itself(made)
        for handler in attempt.handlers:
            if not all(only_tells(handler.body)):
                continue
            if overtaken and not _is_about_the_message(handler):
                yield finding(
                    "HF303",
                    program.place(handler),
                    "a message whose handling fails is not committed, and the commit of the next one passes over it",
                    fix=Fix(
                        "stop at it, seek back to it, or send it to a dead-letter topic; then go on", "code"
                    ),
                    related=("HF306",),
                )
            elif not overtaken and _is_wide(handler):
                yield finding(
                    "HF306",
                    program.place(handler),
                    "a message whose handling fails is passed over, and the committed offset moves on",
                    severity=Severity.WARNING,
                    fix=Fix("retry a bounded number of times, then send it to a dead-letter topic", "code"),
                    related=("HF303",),
                )


def _is_retried(program: Program, loop: Loop, attempt: ast.Try) -> bool:
    """Within a loop of its own that goes over something else than messages."""
    for each in program.names.ancestors(attempt):
        if each is loop.node:
            return False
        if isinstance(each, ast.While) or (
            isinstance(each, (ast.For, ast.AsyncFor)) and not names_in(each.iter) & loop.names
        ):
            return True
    return False


def _only_after_success(attempt: ast.Try, moving: list[ast.Call]) -> bool:
    """Whether every commit of the loop is one that a failure leaves out: in what is tried, or in its else."""
    fine = {call for statement in (*attempt.body, *attempt.orelse) for call in calls_in(statement)}
    return bool(moving) and all(call in fine for call in moving)


def _is_wide(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or (
        isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    )


def _is_about_the_message(handler: ast.ExceptHandler) -> bool:
    """An error of the message itself, or one that is meant to be passed over: it may well be skipped knowingly."""
    if handler.type is None:
        return False
    words = {each.attr for each in ast.walk(handler.type) if isinstance(each, ast.Attribute)}
    return not PASSING.isdisjoint(words | names_in(handler.type)) or any(
        part in word
        for word in words | names_in(handler.type)
        for part in ("Decode", "Valid", "Skip", "Duplicate")
    )


# HF309


def _last_commit(program: Program, made: Made) -> Iterator[Finding]:
    """confluent-kafka commits in the background unless told to wait."""
    if made.settings.client is not Client.LIBRDKAFKA or made.escapes:
        return
    commits = list(made.calls(program.names, "commit"))
    if not commits or made.settings.flag("enable.auto.commit") is not False:
        return
    for call in commits:
        told = [keyword for keyword in call.keywords if keyword.arg in (None, "asynchronous")]
        if any(each.arg is None or program.names.constant(each.value) is not True for each in told):
            return
        if len(call.args) > 2:
            return
    yield finding(
        "HF309",
        program.place(commits[-1]),
        f"every {made.name}.commit() is asynchronous: the last one may not arrive",
        severity=Severity.NOTE,
        fix=Fix(f"{made.name}.commit(asynchronous=False) before {made.name}.close()", "code"),
    )


# HF304


def _whatever_comes(program: Program, made: Made) -> Iterator[Finding]:
    """Topics by a pattern, from their end: those that are made later are found when they have been written to."""
    if made.settings.text("auto.offset.reset") != "latest":
        return
    for call in made.calls(program.names, "subscribe"):
        keyword = next((each.value for each in call.keywords if each.arg == "pattern"), None)
        listed = call.args[0].elts if call.args and isinstance(call.args[0], ast.List) else []
        pattern = keyword or next((each for each in listed if _is_pattern(program, made, each)), None)
        if pattern is None or program.names.constant(pattern) is None:
            continue
        yield finding(
            "HF304",
            program.place(call),
            f"topics by a pattern with {made.settings.said('auto.offset.reset')}: a topic that is made later is found "
            "minutes after its first messages, which are skipped",
            fix=made.settings.set_to("auto.offset.reset", "earliest"),
            related=("HF305",),
        )


def _is_pattern(program: Program, made: Made, node: ast.expr) -> bool:
    """librdkafka takes a topic's name for a pattern when it begins so."""
    name = program.names.constant(node)
    return made.settings.client is Client.LIBRDKAFKA and isinstance(name, str) and name.startswith("^")


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
    the committed offsets."""
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
                "or offsets in the same database transaction",
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
