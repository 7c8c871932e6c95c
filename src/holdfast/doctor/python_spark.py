"""Spark's readers and writers, FastStream's subscribers and Faust's applications in Python code.

A reader or writer is judged when it is written as one chain, from `readStream` to `load` or from `writeStream` to
`start`: only then is it known that an option is missing. An option that is there is judged wherever it stands.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from holdfast.doctor.client_settings import Setting
from holdfast.doctor.connect import Bad, judge
from holdfast.doctor.findings import Finding, Fix, Location, Severity, finding
from holdfast.doctor.python_names import ModuleNames, mentions_streams
from holdfast.doctor.spark_options import Option, Options, check_source, is_temporary

Direction = Literal["readStream", "read", "writeStream", "write"]
ENDS: Final = frozenset({"load", "start", "toTable", "save", "table"})
WITHOUT_POSITIONS: Final = frozenset({"memory", "console", "noop", "rate"})
"""Sinks for looking at: nobody expects them to go on where they were."""


@dataclass
class Chain:
    direction: Direction
    end: ast.Call
    format: Any = None
    options: Options = field(default_factory=dict)
    open_ended: bool = False
    batch_function: ast.expr | None = None


def check_frameworks(names: ModuleNames) -> Iterator[Finding]:
    if names.imports_from("pyspark") or mentions_streams(names):
        yield from _check_spark(names)
    if names.imports_from("faststream"):
        yield from _check_faststream(names)
    if names.imports_from("faust"):
        yield from _check_faust(names)


def _check_spark(names: ModuleNames) -> Iterator[Finding]:
    chains = [
        chain for node in ast.walk(names.tree) if isinstance(node, ast.Call) for chain in _chain(names, node)
    ]
    yield from _single_options(names, chains)
    for chain in chains:
        if chain.direction in ("readStream", "read") and chain.format == "kafka":
            yield from check_source(
                chain.options,
                Location(names.file, chain.end.lineno),
                streaming=chain.direction == "readStream",
                open_ended=chain.open_ended,
            )
        if chain.direction == "writeStream":
            yield from _writer(names, chain)
    yield from _shared_checkpoints(names, chains)


def _chain(names: ModuleNames, end: ast.Call) -> Iterator[Chain]:
    """The chain that ends in this call, when it is a whole one."""
    if not isinstance(end.func, ast.Attribute) or end.func.attr not in ENDS:
        return
    links: list[ast.Call] = []
    node: ast.expr = end
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            links.append(node)
            node = node.func.value
        elif isinstance(node, ast.Attribute) and node.attr in ("readStream", "read", "writeStream", "write"):
            direction: Any = node.attr
            chain = Chain(direction, end)
            for link in reversed(links):
                _add_link(names, chain, link)
            yield chain
            return
        else:
            return


def _add_link(names: ModuleNames, chain: Chain, call: ast.Call) -> None:
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    line = call.func.end_lineno or call.lineno
    match method, call.args:
        case "format", [name]:
            chain.format = names.constant(name)
        case "option", [name, value]:
            known = names.constant(name)
            if isinstance(known, str):
                plain = _path_value(names, value)
                chain.options[known.lower()] = Option(known, plain, Location(names.file, line))
            else:
                chain.open_ended = True
        case "options", _:
            items, is_open = names.keywords(call.keywords)
            chain.open_ended = chain.open_ended or is_open
            for known, value, at in items:
                chain.options[known.lower()] = Option(known, value, Location(names.file, at))
        case "foreachBatch", [function]:
            chain.batch_function = function
    if method in ("load", "start", "save", "toTable"):
        items, is_open = names.keywords(call.keywords)
        chain.open_ended = chain.open_ended or is_open
        for known, value, at in items:
            if known == "format":
                chain.format = value
            else:
                chain.options[known.lower()] = Option(known, value, Location(names.file, at))


def _path_value(names: ModuleNames, node: ast.expr) -> Any:
    """A constant; a temporary directory of the tempfile module counts as one."""
    if isinstance(node, ast.Call) and names.meaning(node.func) in ("tempfile.mkdtemp", "tempfile.gettempdir"):
        return "/tmp/made-by-tempfile"
    if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
        return str(node.values[0].value) + "…"
    return names.constant(node)


def _single_options(names: ModuleNames, chains: list[Chain]) -> Iterator[Finding]:
    """failOnDataLoss=false outside of a whole chain."""
    seen = {option.place.line for chain in chains for option in chain.options.values()}
    for node in ast.walk(names.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        line = node.func.end_lineno or node.lineno
        if node.func.attr != "option" or len(node.args) != 2 or line in seen:
            continue
        name, value = names.constant(node.args[0]), names.constant(node.args[1])
        if isinstance(name, str) and name.lower() == "failondataloss":
            options = {"failondataloss": Option(name, value, Location(names.file, line))}
            yield from check_source(options, Location(names.file, line), streaming=True, open_ended=True)


def _writer(names: ModuleNames, chain: Chain) -> Iterator[Finding]:
    place = Location(names.file, chain.end.lineno)
    checkpoint = chain.options.get("checkpointlocation")
    if chain.format in WITHOUT_POSITIONS:
        return
    if checkpoint is None:
        if not chain.open_ended and not _session_has_checkpoints(names):
            yield finding(
                "HF403",
                place,
                "a streaming query without checkpointLocation: it forgets where it was",
                fix=Fix('.option("checkpointLocation", "<a durable directory of its own>")', "code"),
            )
    elif isinstance(checkpoint.value, str) and is_temporary(checkpoint.value):
        yield finding(
            "HF403",
            checkpoint.place,
            f"checkpointLocation {checkpoint.value.rstrip('…')} is temporary storage: a restart empties it",
            fix=Fix('.option("checkpointLocation", "<a durable directory of its own>")', "code"),
        )
    if chain.format == "kafka":
        yield finding(
            "HF405",
            place,
            "Spark's Kafka sink sends the records of a repeated task or batch again",
            severity=Severity.NOTE,
            fix=Fix("readers that drop duplicates by a key, or a transactional sink", "advice"),
        )
    if chain.batch_function is not None:
        yield from _batch_function(names, chain.batch_function)


def _session_has_checkpoints(names: ModuleNames) -> bool:
    return any(
        isinstance(node, ast.Constant) and node.value == "spark.sql.streaming.checkpointLocation"
        for node in ast.walk(names.tree)
    )


def _batch_function(names: ModuleNames, function: ast.expr) -> Iterator[Finding]:
    """A batch that is appended without its number stands twice after a replay."""
    if not isinstance(function, ast.Name):
        return
    made = [
        node
        for node in ast.walk(names.tree)
        if isinstance(node, ast.FunctionDef) and node.name == function.id and len(node.args.args) == 2
    ]
    if len(made) != 1:
        return
    number = made[0].args.args[1].arg
    if any(isinstance(node, ast.Name) and node.id == number for node in ast.walk(made[0])):
        return
    for node in ast.walk(made[0]):
        match node:
            case ast.Call(func=ast.Attribute(attr="mode"), args=[ast.Constant(value="append")]):
                yield finding(
                    "HF404",
                    Location(names.file, node.func.end_lineno or node.lineno),
                    f"{made[0].name}() appends a batch without looking at its number {number}: "
                    "a batch that is replayed stands twice",
                    fix=Fix(f"write with {number} as a key, or skip a batch that is there already", "code"),
                )
                return


def _shared_checkpoints(names: ModuleNames, chains: list[Chain]) -> Iterator[Finding]:
    places: defaultdict[str, list[Option]] = defaultdict(list)
    for chain in chains:
        checkpoint = chain.options.get("checkpointlocation")
        if chain.direction != "writeStream" or checkpoint is None:
            continue
        if isinstance(checkpoint.value, str) and not checkpoint.value.endswith("…"):
            places[checkpoint.value].append(checkpoint)
    for path, options in places.items():
        for option in options[1:]:
            yield finding(
                "HF403",
                option.place,
                f"checkpointLocation {path} is also that of the query at {options[0].place}",
                loses="the offsets of both queries: each overwrites the other's",
                fix=Fix("a checkpointLocation of its own for each query", "code"),
            )


def _check_faststream(names: ModuleNames) -> Iterator[Finding]:
    for node in ast.walk(names.tree):
        if not isinstance(node, ast.Call):
            continue
        for keyword in node.keywords:
            meaning = names.meaning(keyword.value)
            first = keyword.arg == "ack_policy" and meaning.endswith("AckPolicy.ACK_FIRST")
            automatic = (
                keyword.arg == "auto_commit"
                and names.constant(keyword.value) is True
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "subscriber"
            )
            if first or automatic:
                yield finding(
                    "HF301",
                    Location(names.file, keyword.value.lineno),
                    f"{'ack_policy=AckPolicy.ACK_FIRST' if first else 'auto_commit=True'}: "
                    "the offset is committed before the handler has run",
                    fix=Fix(
                        "ack_policy=AckPolicy.NACK_ON_ERROR, or REJECT_ON_ERROR with a dead-letter topic",
                        "code",
                    ),
                )


FAUST: Final = {
    "producer_acks": Bad("0|1", "HF102", "not every replica is waited for", "-1", Severity.ERROR),
    "consumer_auto_offset_reset": Bad(
        "latest",
        "HF305",
        "where there is no valid committed offset, what is in the topic is skipped",
        '"earliest"',
    ),
    "topic_replication_factor": Bad("1|2", "HF201", "of the topics that Faust makes", "3"),
}


def _check_faust(names: ModuleNames) -> Iterator[Finding]:
    has_agents = any(
        isinstance(node, ast.Attribute) and node.attr == "agent" for node in ast.walk(names.tree)
    )
    for call in ast.walk(names.tree):
        if not isinstance(call, ast.Call) or names.meaning(call.func) not in ("faust.App", "faust.app.App"):
            continue
        items, _ = names.keywords(call.keywords)
        yield from judge(
            {n: Setting(n, v, Location(names.file, line)) for n, v, line in items}, FAUST, "{}={}"
        )
        if has_agents:
            yield finding(
                "HF306",
                Location(names.file, call.lineno),
                "Faust acknowledges an event whose agent raises: it is not given again",
                severity=Severity.NOTE,
                fix=Fix("catch errors in the agent, and send the event to a dead-letter topic", "code"),
            )
