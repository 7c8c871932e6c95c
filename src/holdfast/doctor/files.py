"""One examination of everything that stands in files: clients, code, pipelines, broker settings, and all together.

What a file is shows by what stands in it: the first kind that knows it examines it, and what no kind knows is a gap.

A file that was named is always accounted for: examined, or not examined with the reason. Below a directory, files that
have nothing of Kafka in them are passed over; those that have and are not understood are named.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from holdfast.doctor.broker_files import BROKER_NAMES, TOPIC_NAMES, plain_broker
from holdfast.doctor.client_defaults import Client, Role, is_known, known_names
from holdfast.doctor.client_settings import check_names
from holdfast.doctor.combinations import across_clients, against_topics
from holdfast.doctor.connect import examine_program, program_of, refused_overrides
from holdfast.doctor.containers import (
    compose_containers,
    examine_containers,
    examine_resources,
    is_compose,
    is_resource,
)
from holdfast.doctor.examined import FilesExamined
from holdfast.doctor.findings import Examination, Finding, Location
from holdfast.doctor.pipelines import examine_pipeline, is_pipeline
from holdfast.doctor.properties_files import (
    Documents,
    UnreadableFile,
    branch,
    parse_documents,
    plain_client,
    read_text,
    settings_of,
    tree_of,
)
from holdfast.doctor.python_code import examine_code, examine_program_file, files_below
from holdfast.doctor.spring_files import examine_spring, is_spring


@dataclass(frozen=True)
class Asked:
    """What to look at; paths as they were given, since findings repeat them."""

    producers: Sequence[str] = ()
    consumers: Sequence[str] = ()
    pipelines: Sequence[str] = ()
    code: Sequence[str] = ()
    brokers: Sequence[str] = ()
    client: Client | None = None
    paths: Sequence[str] = ()
    """Files and directories of which the doctor finds out for itself what they are."""

    @property
    def anything(self) -> bool:
        return any((self.producers, self.consumers, self.pipelines, self.code, self.brokers, self.paths))

    def settings_files(self) -> Iterator[tuple[str, AskedAs]]:
        yield from ((path, "producer") for path in self.producers)
        yield from ((path, "consumer") for path in self.consumers)
        yield from ((path, "broker") for path in self.brokers)


def examine_files(asked: Asked) -> FilesExamined:
    """Each file by itself, then all of them together; a file that cannot be read is a gap, and the rest goes on."""
    result = FilesExamined()
    for path in asked.paths:
        examine_path(path, asked.client, result)
    for path, asked_as in asked.settings_files():
        examine_file(path, asked_as, asked.client, result)
    for path in asked.code:
        examine_code(path, result)
    for path in asked.pipelines:
        examine_pipeline(path, result.examination)
    result.examination.add(across_clients(result.clients))
    result.examination.add(refused_overrides(result))
    add_combined(result.examination, against_topics(result.clients, result.topics))
    return result


def add_combined(examination: Examination, combined: Iterable[Finding]) -> None:
    """Findings of two things together: of the same risk at the same place only the worse one stays."""
    for found in combined:
        same = [each for each in examination.findings if (each.id, each.place) == (found.id, found.place)]
        if all(each.severity.rank < found.severity.rank for each in same):
            examination.findings = [each for each in examination.findings if each not in same]
            examination.add([found])


AskedAs = Role | Literal["broker"]
ROLES: Final[tuple[Role, ...]] = ("producer", "consumer")
SETTINGS_FILES: Final = (".properties", ".yml", ".yaml", ".json", ".conf")
OTHER_LANGUAGES: Final = (".java", ".kt", ".scala", ".go", ".js", ".ts", ".rs", ".cs", ".rb", ".php")
CLUES: Final = re.compile(
    r"""kafka\.strimzi\.io|\b(KAFKA|CONNECT)_[A-Z]|image:.*kafka|spring[.:](?s:.*)kafka|(?m:^pipeline:)
    |(connector\.class|bootstrap[._-]servers|\backs|\bgroup[._]id|auto[._-]offset[._-]reset|failOnDataLoss
    |log\.dirs|replication\.factor|min\.insync\.replicas)["']?[ ]*[:=]|checkpointLocation""",
    re.VERBOSE,
)
"""What a file of settings that is about Kafka has in it."""


def _other(role: Role) -> Role:
    return "consumer" if role == "producer" else "producer"


_KNOWN: Final = {role: frozenset().union(*(known_names(each, role) for each in Client)) for role in ROLES}
OWN: Final = {role: _KNOWN[role] - _KNOWN[_other(role)] for role in ROLES}
"""Names that clients of one role have, and those of the other have not."""
NO_KAFKA: Final = "no container or resource of Kafka that the doctor knows"


@dataclass(frozen=True)
class File:
    path: str
    documents: Documents
    named: str
    """The name that tells how it is written: its own, or that of the file within a ConfigMap."""
    asked_as: AskedAs | None = None
    client: Client | None = None

    @property
    def spelling(self) -> str:
        """How a setting is written in it."""
        if self.named.endswith(".json"):
            return '"{}": "{}"'
        return "{}: {}" if self.named.endswith((".yml", ".yaml")) else "{}={}"


def examine_path(path: str, client: Client | None, result: FilesExamined) -> None:
    """A file, or every file below a directory that has something of Kafka in it."""
    if not os.path.isdir(path):
        examine_file(path, None, client, result)
        return
    before = result.accounted_for
    unread: Counter[str] = Counter()
    for file in files_below(path, (".py", *SETTINGS_FILES, *OTHER_LANGUAGES), result.examination):
        ending = os.path.splitext(file)[1]
        try:
            text = read_text(file)
        except UnreadableFile as error:
            result.unreadable(file, error)
            continue
        if ending == ".py" and re.search("kafka|readStream|writeStream|faust|holdfast", text):
            examine_program_file(file, result)
        elif ending in SETTINGS_FILES and CLUES.search(text):
            examine_file(file, None, client, result)
        elif ending in OTHER_LANGUAGES and "kafka" in text.lower():
            unread[ending] += 1
    for ending, count in unread.items():
        what = f"{count} {ending} file{'s' * (count > 1)} with Kafka in them"
        result.unsupported(path, f"{what}: the doctor reads Python code only")
    if result.accounted_for == before:
        result.unsupported(path, "nothing in it that the doctor knows")


def examine_file(path: str, asked_as: AskedAs | None, client: Client | None, result: FilesExamined) -> None:
    if path.endswith(".py"):
        examine_code(path, result)
        return
    try:
        file = File(path, parse_documents(path, read_text(path)), path, asked_as, client)
        before = result.accounted_for
        why_not = _examine(file, result)
        if why_not or result.accounted_for == before:
            result.unsupported(path, why_not or NO_KAFKA)
    except UnreadableFile as error:
        result.unreadable(path, error)


def examine_text(path: str, name: str, text: str, line: int, result: FilesExamined) -> int:
    """A file that stands within another, after a line of it; how many were examined."""
    if not name.endswith(SETTINGS_FILES) or not CLUES.search(text):
        return 0
    try:
        file = File(path, parse_documents(path, "\n" * line + text, name), name)
        if why_not := _examine(file, result):
            result.unsupported(f"{path}:{line}", f"{name}: {why_not}")
    except UnreadableFile as error:
        result.unreadable(path, error)
    return 1


def _examine(file: File, result: FilesExamined) -> str:
    """Let the kind of file that knows it examine it; returns why it was not examined, if so."""
    trees = [tree_of(document) for document in file.documents]
    settings = settings_of(branch(trees[0], "config") or trees[0], file.path)
    if any(map(is_resource, trees)):
        return "" if examine_resources(file.path, trees, result) else NO_KAFKA
    if is_compose(trees[0]):
        return "" if examine_containers(compose_containers(file.path, trees[0]), result) else NO_KAFKA
    if (program := program_of(settings)) is not None:
        examine_program(settings, Location(file.path), result, file.spelling, *program)
    elif is_spring(file.documents):
        examine_spring(file.path, file.documents, file.asked_as, result)
    elif is_pipeline(file.documents[0]):
        examine_pipeline(file.path, result.examination)
    elif not _plain(file, result):
        if file.asked_as is None:
            return "no kind of file that the doctor knows; --producer, --consumer or --broker says what it is"
        return f"none of its {len(settings)} values is a setting of a {file.asked_as} that the doctor knows"
    return ""


def _plain(file: File, result: FilesExamined) -> bool:
    """Settings of a client or a broker and nothing else."""
    names = {".".join(entry.path) for document in file.documents for entry in document}
    guessed = _guessed(names, os.path.basename(file.named))
    wanted = list(guessed) if file.asked_as is None else [file.asked_as]
    for each in wanted:
        if each == "broker":
            if not (BROKER_NAMES | TOPIC_NAMES) & names:
                return False
            result.broker(plain_broker(file.path, file.documents))
            continue
        made = plain_client(file.path, file.documents, each, file.client, file.named)
        if len(wanted) > 1:  # one file for both: each looks at its own
            own = {name: it for name, it in made.settings.items() if it.name not in OWN[_other(each)]}
            made = replace(made, settings=own)
        if file.asked_as is None and each == "consumer" and not made.written("group.id"):
            made = replace(made, open_ended=True)  # its group, and perhaps more, comes from elsewhere
        known = any(is_known(made.client, role, it.name) for it in made.settings.values() for role in ROLES)
        if not known and (made.client is not Client.JAVA or not any(check_names(made))):
            return False
        result.client(made)
    return bool(wanted)


def _guessed(names: set[str], file_name: str) -> Iterator[AskedAs]:
    """What settings are of, by names that only one kind has, or else by the name of the file."""
    topic = {"topic", "replication.factor"}
    if {"broker.id", "node.id", "process.roles", "log.dirs", "zookeeper.connect"} & names or topic <= names:
        yield "broker"
        return
    is_client = not {"bootstrap.servers", "bootstrap_servers", "metadata.broker.list"}.isdisjoint(names)
    found = [
        role
        for role in ROLES
        if any(name.startswith(f"{role}.") for name in names)
        or any((is_client or "." in name) and name in OWN[role] for name in names)
    ]
    yield from found or [role for role in ROLES if is_client and role in file_name.lower()]
