"""Rules that several parts of a definition keep: settings, columns, expressions, topics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from holdfast.pipeline.definition.errors import Finding, Path
from holdfast.pipeline.definition.naming import TOPIC
from holdfast.pipeline.definition.secrets import SECRET_NAME, is_reference
from holdfast.pipeline.definition.sql_words import problems_of_expression

OURS: Final = {
    "bootstrap.servers": "it has a key of its own, 'bootstrap'",
    "group.id": "a pipeline joins no group; its positions are in the sinks' ledgers",
    "enable.auto.commit": "a pipeline's positions are in the sinks' ledgers",
    "auto.offset.reset": "the key 'starting' says where it begins; later on a lost position is an error",
    "isolation.level": "a pipeline reads committed records only",
    "transactional.id": "it is made of the pipeline's and the sink's names, which is what fences a second copy",
    "enable.idempotence": "it is always on",
    "acks": "it is always 'all'",
}
"""Client settings that the guarantees rest on."""


def check_settings(settings: Mapping[str, str], path: Path) -> Iterator[Finding]:
    for name, value in settings.items():
        if name in OURS:
            yield Finding((*path, name), f"{name} cannot be set: {OURS[name]}")
        elif SECRET_NAME.match(name) and not is_reference(value):
            yield Finding(
                (*path, name),
                f"{name} is written in the definition for everybody to read; use ${{VARIABLE}} or file:/path",
                "warning",
            )


def check_columns(columns: Sequence[str], path: Path) -> Iterator[Finding]:
    for index, column in enumerate(columns):
        if column.startswith("_"):
            yield Finding((*path, index), f"{column!r} is a column of holdfast's own; choose another")
        elif column.lower() in {other.lower() for other in columns[:index]}:
            yield Finding((*path, index), f"{column!r} is listed twice")


def check_expressions(texts: Mapping[str, str | None], path: Path) -> Iterator[Finding]:
    for name, text in texts.items():
        for problem in problems_of_expression(text or ""):
            yield Finding((*path, name), problem)


def check_topic(topic: str, path: Path) -> Iterator[Finding]:
    if not is_reference(topic) and TOPIC.fullmatch(topic) is None:
        yield Finding(path, f"{topic!r} cannot be a topic's name")


def check_password(address: str, path: Path) -> Iterator[Finding]:
    if re.search(r"://[^/@]*:(?!\$\{)[^/@$]+@", address):
        yield Finding(
            path,
            "the password is written in the definition for everybody to read; use ${VARIABLE}",
            "warning",
        )
