"""What a file is, by what stands in it: the first kind that knows it examines it, and what no kind knows is a gap.

A file that was named is always accounted for: examined, or not examined with the reason. Below a directory, files that
have nothing of Kafka in them are passed over; those that have and are not understood are named.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from holdfast.doctor.broker_files import BROKER_NAMES, TOPIC_NAMES, plain_broker
from holdfast.doctor.client_defaults import Client, Role, is_known, known_names
from holdfast.doctor.client_settings import check_names
from holdfast.doctor.compose_files import compose_containers, is_compose
from holdfast.doctor.connect import examine_program, is_connector, is_worker
from holdfast.doctor.containers import examine_containers
from holdfast.doctor.examined import FilesExamined
from holdfast.doctor.findings import Place
from holdfast.doctor.kubernetes_files import examine_resources, is_resource
from holdfast.doctor.pipelines import SPARK_WORDS, examine_pipeline, option_name
from holdfast.doctor.properties_files import (
    Documents,
    UnreadableFile,
    parse_documents,
    plain_client,
    read_text,
)
from holdfast.doctor.python_code import SKIPPED_DIRECTORIES, examine_code
from holdfast.doctor.spring_files import is_spring, spring_clients, spring_roles
from holdfast.doctor.trees import branch, settings_of, tree_of

AskedAs = Role | Literal["broker"]
ROLES: Final[tuple[Role, ...]] = ("producer", "consumer")
SETTINGS_FILES: Final = (".properties", ".yml", ".yaml", ".json", ".conf")
OTHER_LANGUAGES: Final = (".java", ".kt", ".scala", ".go", ".js", ".ts", ".rs", ".cs", ".rb", ".php")
CLUES: Final = re.compile(
    r"kafka\.strimzi\.io|spring[.:]|connector\.class|bootstrap[._-]servers|\b(KAFKA|CONNECT)_[A-Z]|image:.*kafka"
    r"|\backs\b|\bgroup[._]id\b|auto[._-]offset[._-]reset|failOnDataLoss|checkpointLocation|log\.dirs|pipeline:"
    r"|replication\.factor|min\.insync"
)
"""What a file of settings that is about Kafka has in it."""
FILES_MAX: Final = 20_000
"""More files under one path means that a whole disk was named."""


def examine_path(path: str, client: Client | None, result: FilesExamined) -> None:
    """A file, or every file below a directory that has something of Kafka in it."""
    if not os.path.isdir(path):
        examine_file(path, None, client, result)
        return
    before = len(result.examination.examined) + len(result.examination.gaps)
    unread: Counter[str] = Counter()
    for file in _files(path, result):
        ending = os.path.splitext(file)[1]
        try:
            text = read_text(file)
        except UnreadableFile:
            if ending in SETTINGS_FILES:
                examine_file(file, None, client, result)
            continue
        if ending == ".py" and re.search("kafka|readStream|faust", text):
            examine_code(file, result)
        elif ending in SETTINGS_FILES and CLUES.search(text):
            examine_file(file, None, client, result)
        elif ending in OTHER_LANGUAGES and "kafka" in text.lower():
            unread[ending] += 1
    for ending, count in unread.items():
        why = (
            f"{count} {ending} file{'s' * (count > 1)} with Kafka in them: the doctor reads Python code only"
        )
        result.examination.missed(path, why, "unsupported")
    if len(result.examination.examined) + len(result.examination.gaps) == before:
        result.examination.missed(path, "nothing in it that the doctor knows", "unsupported")


def _files(path: str, result: FilesExamined) -> Iterator[str]:
    count = 0
    refused: list[OSError] = []
    for directory, below, files in os.walk(path, onerror=refused.append):
        below[:] = sorted(
            each for each in below if each not in SKIPPED_DIRECTORIES and not each.startswith(".")
        )
        for file in sorted(files):
            if file.endswith((".py", *SETTINGS_FILES, *OTHER_LANGUAGES)):
                count += 1
                if count > FILES_MAX:
                    result.examination.missed(path, f"more than {FILES_MAX} files; name fewer")
                    return
                yield os.path.join(directory, file)
    for error in refused:
        result.examination.missed(str(error.filename), str(error.strerror), "permission")


def examine_file(path: str, asked_as: AskedAs | None, client: Client | None, result: FilesExamined) -> None:
    if path.endswith(".py"):
        examine_code(path, result)
        return
    try:
        documents = parse_documents(path, read_text(path))
        if not _examine(path, documents, path, asked_as, client, result):
            result.examination.missed(path, _not_known(documents, asked_as), "unsupported")
    except UnreadableFile as error:
        result.examination.missed(path, str(error).removeprefix(f"{path}: "))


def examine_text(file: str, name: str, text: str, line: int, result: FilesExamined) -> int:
    """A file that stands within another, after a line of it; how many were examined."""
    if not name.endswith(SETTINGS_FILES) or not CLUES.search(text):
        return 0
    try:
        documents = parse_documents(file, "\n" * line + text, name)
        if not _examine(file, documents, name, None, None, result):
            result.examination.missed(
                f"{file}:{line}", f"{name}: {_not_known(documents, None)}", "unsupported"
            )
    except UnreadableFile as error:
        result.examination.missed(f"{file}:{line}", f"{name}: {str(error).removeprefix(f'{file}: ')}")
    return 1


def _not_known(documents: Documents, asked_as: AskedAs | None) -> str:
    count = sum(map(len, documents))
    if asked_as is not None:
        return f"none of its {count} values is a setting of a {asked_as} that the doctor knows"
    return "no kind of file that the doctor knows; --producer, --consumer or --broker says what it is"


def _examine(
    path: str,
    documents: Documents,
    named: str,
    asked_as: AskedAs | None,
    client: Client | None,
    result: FilesExamined,
) -> bool:
    """Whether some kind of file knew it. `named` is the name that tells how it is written."""
    trees = [tree_of(document) for document in documents]
    if any(map(is_resource, trees)):
        return examine_resources(path, trees, result) > 0
    if is_compose(trees[0]):
        return examine_containers(compose_containers(path, trees[0]), result) > 0
    settings = settings_of(branch(trees[0], "config") or trees[0], path)
    spelling = (
        '"{}": "{}"' if named.endswith(".json") else "{}={}" if named.endswith(".properties") else "{}: {}"
    )
    if is_connector(settings):
        examine_program(settings, Place(path), result, spelling, "a connector", "{}.override.")
    elif is_worker(settings):
        examine_program(settings, Place(path), result, spelling, "a Connect worker")
    elif is_spring(documents):
        for role in spring_roles(documents) if asked_as not in ROLES else [asked_as]:
            *others, last = spring_clients(path, documents, role)
            for each in others:
                result.client(each, combined=False)
            result.client(last)
    elif any(entry.path[0] in ("pipeline", "spark") for entry in documents[0]) or SPARK_WORDS & set(
        map(option_name, documents[0])
    ):
        examine_pipeline(path, result.examination)
    else:
        return _plain(path, documents, named, asked_as, client, result)
    return True


def _plain(
    path: str,
    documents: Documents,
    named: str,
    asked_as: AskedAs | None,
    client: Client | None,
    result: FilesExamined,
) -> bool:
    """Settings of a client or a broker and nothing else."""
    names = {".".join(entry.path) for document in documents for entry in document}
    wanted: Sequence[AskedAs] = [asked_as] if asked_as is not None else list(_guessed(names))
    for each in wanted:
        if each == "broker":
            if not (BROKER_NAMES | TOPIC_NAMES) & names:
                return False
            result.broker(plain_broker(path, documents))
        else:
            made = plain_client(path, documents, each, client, named)
            written = [setting.name for setting in made.settings.values()]
            known = any(is_known(made.client, role, name) for name in written for role in ROLES)
            if not known and (made.client is not Client.JAVA or not any(check_names(made))):
                return False
            result.client(made)
    return bool(wanted)


def _guessed(names: set[str]) -> Iterator[AskedAs]:
    """What settings are of, by names that only one kind has."""
    roles = {role: known_names(Client.JAVA, role) | known_names(Client.LIBRDKAFKA, role) for role in ROLES}
    both = roles["producer"] & roles["consumer"]
    is_python = "bootstrap_servers" in names
    if {"broker.id", "node.id", "process.roles", "log.dirs", "zookeeper.connect"} & names or {
        "topic",
        "replication.factor",
    } <= names:
        yield "broker"
        return
    for role in ROLES:
        own = {name for name in roles[role] - both if "." in name or "bootstrap.servers" in names}
        if is_python:
            own |= {each for each in known_names(Client.AIOKAFKA, role) if "_" in each}
            own -= known_names(Client.AIOKAFKA, "consumer" if role == "producer" else "producer")
        if own & names or any(name.startswith(f"{role}.") for name in names):
            yield role
