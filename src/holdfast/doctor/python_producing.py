"""What a Python program does with its producers: results nobody looks at, buffers nobody flushes, errors swallowed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from holdfast.doctor.client_defaults import Client
from holdfast.doctor.findings import Finding, Fix, Severity, finding
from holdfast.doctor.python_code import Made, Program, dotted
from holdfast.doctor.python_names import FUNCTIONS, ModuleNames, calls_in, only_tells

CALLBACKS: Final = frozenset({"callback", "on_delivery"})
CALLBACK_SETTINGS: Final = frozenset({"on_delivery", "dr_cb", "dr_msg_cb"})
CALLBACK_POSITION: Final = 4
"""produce(topic, value, key, partition, callback, …)"""
SENDS: Final = ("produce", "send", "send_and_wait", "produce_batch")
ENDINGS: Final = {
    Client.LIBRDKAFKA: ("flush", "commit_transaction", "close"),
    Client.KAFKA_PYTHON: ("flush", "close", "commit_transaction"),
    Client.AIOKAFKA: ("flush", "stop", "transaction"),
}


def check_producers(program: Program) -> Iterator[Finding]:
    for made in program.made:
        if made.settings.role != "producer":
            continue
        match made.settings.client:
            case Client.LIBRDKAFKA:
                yield from _reports_ignored(program, made)
                yield from _reports_never_served(program, made)
            case Client.KAFKA_PYTHON:
                yield from _futures_ignored(program, made)
            case Client.AIOKAFKA:
                yield from _not_awaited(program, made)
        yield from _never_flushed(program, made)
        yield from _errors_swallowed(program, made)


# HF101


def _reports_ignored(program: Program, made: Made) -> Iterator[Finding]:
    settings = made.settings
    if settings.open_ended or CALLBACK_SETTINGS & settings.settings.keys():
        return
    if settings.written("transactional.id"):
        return  # committing fails when a message of the transaction did
    for call in made.calls(program.names, "produce"):
        names = {keyword.arg for keyword in call.keywords}
        starred = any(isinstance(each, ast.Starred) for each in call.args)
        if names & CALLBACKS or None in names or starred or len(call.args) > CALLBACK_POSITION:
            continue
        yield finding(
            "HF101",
            program.place(call),
            f"{made.name}.produce() without a delivery callback: its failure is never heard of",
            fix=Fix(f"{made.name}.produce(…, on_delivery=report), where report looks at its error", "code"),
        )


def _reports_never_served(program: Program, made: Made) -> Iterator[Finding]:
    """A loop without end that produces, and in which nobody polls: reports pile up until the queue is full."""
    if made.escapes or made.mentions("poll", "flush"):
        return
    for call in made.calls(program.names, "produce"):
        loop = next((each for each in program.names.ancestors(call) if isinstance(each, ast.While)), None)
        if loop is not None and isinstance(loop.test, ast.Constant) and loop.test.value:
            yield finding(
                "HF101",
                program.place(call),
                f"{made.name}.produce() in a loop without end, and {made.name}.poll() is never called: delivery "
                "reports are not served, and the queue fills up",
                fix=Fix(f"{made.name}.poll(0) after each produce()", "code"),
                related=("HF105",),
            )


def _futures_ignored(program: Program, made: Made) -> Iterator[Finding]:
    for call in made.calls(program.names, "send"):
        if _is_ignored(program.names, call):
            yield finding(
                "HF101",
                program.place(call),
                f"the future of {made.name}.send() is not looked at: its failure is never heard of",
                fix=Fix(f"{made.name}.send(…).get(timeout=60), or .add_errback(on_error)", "code"),
            )


def _is_ignored(names: ModuleNames, call: ast.expr) -> bool:
    """Whether what an expression gives is dropped: a statement by itself, or a name that is never read."""
    parent = names.parents.get(call)
    match parent:
        case ast.Expr():
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name == "_" or not _is_read(names, parent, name)
        case ast.Attribute(attr=method):
            chained = names.parents.get(parent)
            if method == "add_callback" and isinstance(chained, ast.Call):
                return _is_ignored(names, chained)
    return False


def _is_read(names: ModuleNames, assignment: ast.Assign, name: str) -> bool:
    scope = names.binding_scope(assignment.targets[0], name)
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(scope)
    )


def _not_awaited(program: Program, made: Made) -> Iterator[Finding]:
    names = program.names
    for call in made.calls(names, "send", "send_and_wait"):
        method = call.func.attr if isinstance(call.func, ast.Attribute) else "send"
        if _is_ignored(names, call):
            yield finding(
                "HF101",
                program.place(call),
                f"{made.name}.{method}() is not awaited: the message is never handed to the client",
                loses="every message sent here",
                fix=Fix(f"await {made.name}.send_and_wait(…)", "code"),
            )
            continue
        awaited = names.parents.get(call)
        in_transaction = made.settings.written("transactional.id")
        if method == "send" and isinstance(awaited, ast.Await) and _is_ignored(names, awaited):
            if in_transaction:
                continue  # committing fails when a message of the transaction did
            yield finding(
                "HF101",
                program.place(call),
                f"the future of {made.name}.send() is not looked at: its failure is never heard of",
                fix=Fix(f"await {made.name}.send_and_wait(…), or await the future", "code"),
            )


# HF104


def _never_flushed(program: Program, made: Made) -> Iterator[Finding]:
    endings = ENDINGS[made.settings.client]
    if made.escapes or made.managed or made.mentions(*endings):
        return
    if not any(made.calls(program.names, *SENDS)):
        return
    if "." in made.name and _ended_by_others(program, made.name.partition(".")[2], endings):
        return
    if made.settings.client is Client.LIBRDKAFKA and _polls_until(program, made):
        return
    if made.settings.client is not Client.LIBRDKAFKA and _every_send_waited(program, made):
        return
    within = isinstance(program.names.scope_of(made.call), FUNCTIONS) and "." not in made.name
    ending = "stop" if made.settings.client is Client.AIOKAFKA else "flush"
    yield finding(
        "HF104",
        program.place(made.call),
        f"{made.name} is never flushed: what it still holds when the program ends is gone",
        severity=Severity.ERROR if within else Severity.WARNING,
        fix=Fix(f"{'await ' * (ending == 'stop')}{made.name}.{ending}() before the program ends", "code"),
    )


def _ended_by_others(program: Program, attribute: str, endings: tuple[str, ...]) -> bool:
    """A subclass, or whoever holds the object, flushes it by the same attribute."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in endings
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == attribute
        for node in ast.walk(program.names.tree)
    )


def _polls_until(program: Program, made: Made) -> bool:
    """A loop that polls until something has come about, such as every report."""
    sends = set(made.calls(program.names, *SENDS))
    for call in made.calls(program.names, "poll"):
        for loop in program.names.ancestors(call):
            if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant):
                return not sends & set(calls_in(loop))
    return False


def _every_send_waited(program: Program, made: Made) -> bool:
    """send(…).get() and await send_and_wait(…) leave nothing in the buffer."""
    names = program.names
    for call in made.calls(names, "send", "send_and_wait"):
        parent = names.parents.get(call)
        waits_itself = isinstance(call.func, ast.Attribute) and call.func.attr == "send_and_wait"
        if waits_itself and isinstance(parent, ast.Await):
            continue
        if isinstance(parent, ast.Attribute) and parent.attr in ("get", "result"):
            continue
        if isinstance(parent, ast.Assign) and _is_waited_for(names, parent.targets[0]):
            continue
        return False
    return True


def _is_waited_for(names: ModuleNames, future: ast.expr) -> bool:
    name = dotted(future)
    waits = (node for node in ast.walk(names.scope_of(future)) if isinstance(node, ast.Attribute))
    return any(node.attr in ("get", "result") and name and dotted(node.value) == name for node in waits)


# HF105, HF107


def _errors_swallowed(program: Program, made: Made) -> Iterator[Finding]:
    names = program.names
    told: set[ast.ExceptHandler] = set()
    for call in made.calls(names, *SENDS):
        for attempt in _tries_around(names, call):
            for handler in attempt.handlers:
                caught = _caught(handler)
                if handler in told or caught is None or not all(only_tells(handler.body)):
                    continue
                told.add(handler)
                logged = any(calls_in(handler))
                full = caught == "BufferError"
                yield finding(
                    "HF105" if full else "HF107",
                    program.place(handler),
                    f"{'except ' + caught if caught else 'except'} around {made.name}.{_method(call)}() "
                    + ("mentions the error and goes on" if logged else "passes over the error")
                    + ": the message is dropped",
                    severity=Severity.WARNING if logged or full else Severity.ERROR,
                    fix=Fix(
                        f"{made.name}.poll(1) and produce() again, with a deadline"
                        if full
                        else "raise, or keep the message aside (a file, a dead-letter topic)",
                        "code",
                    ),
                )


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _tries_around(names: ModuleNames, node: ast.AST) -> Iterator[ast.Try]:
    """The innermost try whose body holds the node, within its function."""
    child = node
    for parent in names.ancestors(node):
        if isinstance(parent, FUNCTIONS):
            return
        if isinstance(parent, ast.Try) and child in parent.body:
            yield parent
            return
        child = parent


WIDE: Final = (
    "Exception",
    "BaseException",
    "KafkaException",
    "KafkaError",
    "KafkaTimeoutError",
    "BufferError",
)


def _caught(handler: ast.ExceptHandler) -> str | None:
    """The error caught, empty for all of them; None when it is one that has nothing to do with sending."""
    if handler.type is None:
        return ""
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    for each in types:
        name = each.attr if isinstance(each, ast.Attribute) else each.id if isinstance(each, ast.Name) else ""
        if name in WIDE:
            return name
    return None
