"""Python programs that use Kafka, read and never run: which clients they make, with which settings, and what they do.

A finding needs evidence in the text. Where a client is handed to code that is not seen, or its settings come from
elsewhere, rules about what is missing say nothing: a program in order is never reported, one that is not may be missed.
"""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from holdfast.doctor.client_defaults import Client, Role
from holdfast.doctor.client_settings import ClientSettings, Setting, make_settings
from holdfast.doctor.examined import FilesExamined
from holdfast.doctor.findings import Examination, Finding, Location
from holdfast.doctor.properties_files import UnreadableFile, read_text
from holdfast.doctor.python_names import ModuleNames, mentions_streams
from holdfast.doctor.rules import check_settings

CLASSES: Final[dict[tuple[str, str], tuple[Client, Role]]] = {
    ("confluent_kafka", "Producer"): (Client.LIBRDKAFKA, "producer"),
    ("confluent_kafka", "SerializingProducer"): (Client.LIBRDKAFKA, "producer"),
    ("confluent_kafka", "Consumer"): (Client.LIBRDKAFKA, "consumer"),
    ("confluent_kafka", "DeserializingConsumer"): (Client.LIBRDKAFKA, "consumer"),
    ("kafka", "KafkaProducer"): (Client.KAFKA_PYTHON, "producer"),
    ("kafka", "KafkaConsumer"): (Client.KAFKA_PYTHON, "consumer"),
    ("aiokafka", "AIOKafkaProducer"): (Client.AIOKAFKA, "producer"),
    ("aiokafka", "AIOKafkaConsumer"): (Client.AIOKAFKA, "consumer"),
}
"""By package and class: a class may be imported from any module of its package."""
LIBRARIES: Final = ("confluent_kafka", "kafka", "aiokafka", "faust", "faststream", "pyspark", "holdfast")
UNKNOWN_LIBRARIES: Final = (
    "pykafka",
    "quixstreams",
    "bytewax",
    "pyflink",
    "apache_beam.io.kafka",
    "asynckafka",
)
SKIPPED_DIRECTORIES: Final = frozenset(
    {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}
)
FILES_MAX: Final = 20_000
"""More files under one path means that a whole disk was named."""


@dataclass
class Made:
    """A client that the program makes, and every place it is used by its name."""

    settings: ClientSettings
    call: ast.Call
    name: str
    """`producer` or `self.producer`; empty when it is bound to nothing."""
    uses: list[ast.Attribute] = field(default_factory=list)
    """`producer.flush`, called or not."""
    escapes: bool = False
    """Handed to code that may do anything with it."""
    managed: bool = False
    """Made by `with`: closed at its end."""

    def calls(self, names: ModuleNames, *methods: str) -> Iterator[ast.Call]:
        for use in self.uses:
            parent = names.parents.get(use)
            if use.attr in methods and isinstance(parent, ast.Call) and parent.func is use:
                yield parent

    def mentions(self, *methods: str) -> bool:
        return any(use.attr in methods for use in self.uses)


@dataclass
class Program:
    names: ModuleNames
    made: list[Made]

    def place(self, node: ast.AST) -> Location:
        return Location(self.names.file, getattr(node, "lineno", 0))


def examine_code(path: str, result: FilesExamined) -> None:
    """A file, or every Python file below a directory; those without a Kafka client are passed over."""
    before = result.accounted_for
    if os.path.isdir(path):
        for file in files_below(path, (".py",), result.examination):
            examine_program_file(file, result)
    elif os.path.exists(path):
        examine_program_file(path, result)
    else:
        result.examination.missed(path, "no such file or directory")
    if result.accounted_for == before:
        result.unsupported(path, "no Kafka client in Python that the doctor knows")


def examine_program_file(file: str, result: FilesExamined) -> None:
    """One file of Python; nothing is said about one that has nothing of Kafka in it."""
    examination = result.examination
    try:
        program = read_program(file)
        found = list(check_program(program))
    except UnreadableFile as error:
        result.unreadable(file, error)
        return
    except RecursionError:
        examination.missed(file, "nested too deeply to be examined")
        return
    for library in filter(program.names.imports_from, UNKNOWN_LIBRARIES):
        result.unsupported(file, f"uses {library}, which the doctor does not know")
    if program.made or mentions_streams(program.names) or any(map(program.names.imports_from, LIBRARIES)):
        examination.examined.append(f"{file} as Python code")
    examination.add(found)
    result.clients.extend(made.settings for made in program.made if not made.settings.open_ended)


def files_below(path: str, endings: tuple[str, ...], examination: Examination) -> Iterator[str]:
    """Files with these endings, in order; hidden directories and those of installed packages are left out."""
    count = 0
    refused: list[OSError] = []
    for directory, below, files in os.walk(path, onerror=refused.append):
        below[:] = sorted(
            each for each in below if each not in SKIPPED_DIRECTORIES and not each.startswith(".")
        )
        for file in sorted(files):
            if file.endswith(endings):
                count += 1
                if count > FILES_MAX:
                    examination.missed(path, f"more than {FILES_MAX} files; name fewer")
                    return
                yield os.path.join(directory, file)
    for error in refused:
        examination.missed(str(error.filename), str(error.strerror), "permission")


def read_program(file: str) -> Program:
    return parse_program(read_text(file), file)


def parse_program(text: str, file: str) -> Program:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a compiler thinks of somebody else's strings
            tree = ast.parse(text)
        names = ModuleNames(tree, file)
    except SyntaxError as error:
        raise UnreadableFile(f"{file}: not Python, line {error.lineno}: {error.msg}") from error
    except (RecursionError, ValueError, MemoryError) as error:
        raise UnreadableFile(f"{file}: cannot be parsed: {error}") from error
    made = list(_clients(names))
    _follow(names, made)
    return Program(names, made)


def check_program(program: Program) -> Iterator[Finding]:
    """Everything that is found in one file."""
    from holdfast.doctor.python_consuming import check_consumers
    from holdfast.doctor.python_producing import check_producers
    from holdfast.doctor.python_spark import check_frameworks

    for made in program.made:
        for found in check_settings(made.settings):
            if _standalone(made) and found.id in ("HF301", "HF305"):
                continue
            # A consumer that is told where to begin, partition by partition.
            places_itself = not made.escapes and made.mentions("assign") and not made.mentions("subscribe")
            if places_itself and found.id == "HF305":
                continue
            yield found
    yield from check_producers(program)
    yield from check_consumers(program)
    yield from check_frameworks(program.names)


def _standalone(made: Made) -> bool:
    """No offsets to commit or to miss: without a group, or a consumer that is only asked about the topic."""
    settings = made.settings
    if settings.role == "producer" or settings.open_ended:
        return False
    if settings.client is Client.LIBRDKAFKA:
        return not made.escapes and not made.mentions("subscribe", "poll", "consume")
    group = settings.settings.get("group.id")
    return group is None or group.value is None


def _clients(names: ModuleNames) -> Iterator[Made]:
    for node in ast.walk(names.tree):
        if isinstance(node, ast.Call):
            package, _, rest = names.meaning(node.func).partition(".")
            if known := CLASSES.get((package, rest.rpartition(".")[2])):
                yield _made(names, node, *known)


def _made(names: ModuleNames, call: ast.Call, client: Client, role: Role) -> Made:
    if client is Client.LIBRDKAFKA and call.args:
        items, is_open = names.dictionary(call.args[0])
        more, more_open = names.keywords(call.keywords)
        items, is_open = items + more, is_open or more_open
    else:
        items, is_open = names.keywords(call.keywords)
    if client is Client.LIBRDKAFKA:  # elsewhere, what has no name is a topic
        is_open = is_open or any(isinstance(each, ast.Starred) for each in call.args)
    written = [Setting(name, value, Location(names.file, line)) for name, value, line in items]
    place = Location(names.file, call.lineno)
    settings = make_settings(role, client, place, written, style="python", open_ended=is_open)
    name, managed = _bound_to(names, call)
    return Made(settings, call, name, escapes=not name, managed=managed)


def _bound_to(names: ModuleNames, call: ast.Call) -> tuple[str, bool]:
    parent = names.parents.get(call)
    while isinstance(parent, (ast.Await, ast.IfExp, ast.BoolOp)):
        parent = names.parents.get(parent)
    match parent:
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target) | ast.NamedExpr(target=target):
            return dotted(target), False
        case ast.withitem(optional_vars=ast.expr() as target):
            return dotted(target), True
    return "", False


def dotted(node: ast.AST) -> str:
    """`producer`, `self.producer`; empty for anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=("self" | "cls") as owner), attr=attribute):
            return f"{owner}.{attribute}"
    return ""


def _follow(names: ModuleNames, made: list[Made]) -> None:
    """Give every client its uses, and see which are handed away."""
    known = {each.name for each in made if each.name}
    for node in ast.walk(names.tree):
        if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
            continue
        name = dotted(node)
        owner = _owner(names, made, node, name) if name in known else None
        if owner is None:
            continue
        parent = names.parents.get(node)
        if isinstance(parent, ast.Attribute):
            owner.uses.append(parent)
        elif isinstance(parent, ast.withitem):
            owner.managed = True
        elif not _harmless(parent, node):
            owner.escapes = True


def _harmless(parent: ast.AST | None, node: ast.AST) -> bool:
    """Read from, compared or tested: nobody else gets hold of it."""
    match parent:
        case ast.For(iter=iterated) | ast.AsyncFor(iter=iterated) | ast.comprehension(iter=iterated):
            return iterated is node
        case ast.Compare() | ast.If() | ast.While() | ast.UnaryOp() | ast.BoolOp() | ast.Assert():
            return True
        case ast.Call(func=ast.Name(id="next" | "iter" | "anext" | "aiter")):
            return True
    return False


def _owner(names: ModuleNames, made: list[Made], node: ast.AST, name: str) -> Made | None:
    """The client a name means at this place; None when it means something else, or one of several."""
    if "." in name:
        candidates = [
            each
            for each in made
            if each.name == name and names.class_of(each.call) is names.class_of(node) is not None
        ]
    else:
        scope = names.binding_scope(node, name)
        candidates = [
            each for each in made if each.name == name and names.binding_scope(each.call, name) is scope
        ]
    if len(candidates) > 1:
        for each in candidates:
            each.escapes = True  # which of them is used here is for the running program to decide
        return None
    return candidates[0] if candidates else None
