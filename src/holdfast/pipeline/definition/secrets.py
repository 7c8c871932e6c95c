"""Secrets: written as references, expanded when a run begins, and taken out of every text that leaves it.

- `${VAR}` is the environment's variable, `${VAR:-default}` has a default, `$${` is a plain `${`.
- `file:PATH` as a whole value is the content of that file without its last line end. It is understood where secrets
  belong: client settings, a registry's settings, a database's address. A relative path starts in the definition's
  directory.

A definition as loaded never holds an expanded value: it can be printed, hashed and kept. `expand_definition` makes the
one that a run uses, and the `Redactor` that knows what must not be seen; an error names the variable and the place,
never a value.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import quote, quote_plus

from holdfast.pipeline.definition.errors import DefinitionError, Finding, Path
from holdfast.pipeline.definition.model import (
    DeadLetter,
    Decoding,
    DeltaSink,
    KafkaSink,
    Lookup,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
    Step,
)
from holdfast.pipeline.definition.naming import kind_of_sink

REFERENCE: Final = re.compile(r"\$\$\{|\$\{(?P<inside>[^}]*)(?P<end>\}?)")
VARIABLE: Final = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?", re.DOTALL)
FILE_PREFIX: Final = "file:"
SHORT: Final = 4
"""Values shorter than this are taken out only where they stand alone: `1` must not eat every digit of a log."""
SECRET_BYTES_MAX: Final = 1 << 20
SECRET_NAME: Final = re.compile(
    r"(?!.*\.(?:url|location|type|algorithm|mechanisms?)\Z)"
    r".*(?:password|secret|token|jaas|user\.info|credential|key\.pem|keystore\.key)",
    re.IGNORECASE,
)
"""Settings whose values are nobody's business, by name."""


class SecretMissing(DefinitionError):
    """A reference that leads nowhere."""

    def __reduce__(self) -> tuple[object, ...]:
        return SecretMissing, (self.findings,)


class Redactor:
    """Puts the reference back wherever an expanded value shows up in a text."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._references: dict[str, str] = {}
        for value, reference in (values or {}).items():
            self.add(value, reference)

    def add(self, value: str, reference: str) -> None:
        """`value` is shown as `reference` from now on, in the forms in which texts carry it."""
        forms = {value, value.strip(), quote(value, safe=""), quote_plus(value), json.dumps(value)[1:-1]}
        for form in forms:
            if form:
                self._references.setdefault(form, reference)
        self._pattern = self._compile()

    def _compile(self) -> re.Pattern[str]:
        forms = sorted(self._references, key=len, reverse=True)
        return re.compile(
            "|".join(
                re.escape(form) if len(form) >= SHORT else rf"(?<!\w){re.escape(form)}(?!\w)"
                for form in forms
            )
        )

    def redact(self, text: str) -> str:
        if not self._references:
            return text
        return self._pattern.sub(lambda match: self._references[match[0]], text)


def check_references(text: str) -> str | None:
    """What is wrong with the references of a text; they are not followed."""
    for match in REFERENCE.finditer(text):
        inside = match["inside"]
        if inside is None:
            continue
        if not match["end"]:
            return "a '${' is not closed by '}'; write '$${' for a plain one"
        if VARIABLE.fullmatch(inside) is None:
            return f"'${{{inside}}}' names no variable; write ${{NAME}} or ${{NAME:-default}}"
    return None


def is_reference(text: str) -> bool:
    """Whether the text holds something that is expanded."""
    return text.startswith(FILE_PREFIX) or any(
        match["inside"] is not None for match in REFERENCE.finditer(text)
    )


def expand(
    text: str,
    environment: Mapping[str, str],
    *,
    where: Path = (),
    redactor: Redactor | None = None,
) -> str:
    """The text with its variables' values; `SecretMissing` names a variable that is not set, and where it is used."""
    wrong = check_references(text)
    if wrong is not None:
        raise SecretMissing([Finding(where, wrong)])

    def value_of(match: re.Match[str]) -> str:
        if match["inside"] is None:
            return "${"
        variable = VARIABLE.fullmatch(match["inside"])
        assert variable is not None
        name, default = variable["name"], variable["default"]
        value = environment.get(name) or default
        if value is None:
            raise SecretMissing(
                [
                    Finding(
                        where,
                        f"the environment has no variable {name} (or it is empty); "
                        f"set it, or write ${{{name}:-default}}",
                    )
                ]
            )
        if redactor is not None and value != default:
            redactor.add(value, f"${{{name}}}")
        return value

    return REFERENCE.sub(value_of, text)


class _Expansion:
    """One pass over a definition; all references that lead nowhere are found before anything is said."""

    def __init__(self, environment: Mapping[str, str], directory: str) -> None:
        self.environment = environment
        self.directory = directory
        self.redactor = Redactor()
        self.missing: list[Finding] = []

    def text(self, text: str, where: Path) -> str:
        try:
            return expand(text, self.environment, where=where, redactor=self.redactor)
        except SecretMissing as error:
            self.missing.extend(error.findings)
            return text

    def optional(self, text: str | None, where: Path) -> str | None:
        return None if text is None else self.text(text, where)

    def secret(self, text: str, where: Path) -> str:
        """A text in which `file:` is understood."""
        expanded = self.text(text, where)
        if not text.startswith(FILE_PREFIX):
            return expanded
        file = expanded.removeprefix(FILE_PREFIX).removeprefix("//")
        try:
            with open(os.path.join(self.directory, os.path.expanduser(file)), encoding="utf-8") as opened:
                content = opened.read(SECRET_BYTES_MAX).removesuffix("\n").removesuffix("\r")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            self.missing.append(Finding(where, f"the secret's file {file!r} cannot be read: {reason}"))
            return text
        if not content:
            self.missing.append(Finding(where, f"the secret's file {file!r} is empty"))
            return text
        self.redactor.add(content, text)
        return content

    def settings(self, settings: Mapping[str, str], where: Path) -> dict[str, str]:
        expanded = {name: self.secret(value, (*where, name)) for name, value in settings.items()}
        for name, value in expanded.items():
            if SECRET_NAME.match(name) and value == settings[name]:
                self.redactor.add(value, "***")  # written in the file itself; no reason to show it to others
        return expanded


def expand_definition(
    definition: PipelineDefinition, environment: Mapping[str, str] = os.environ
) -> tuple[PipelineDefinition, Redactor]:
    """The definition a run uses, and what keeps its secrets out of texts. SQL and code are left as they are."""
    work = _Expansion(environment, definition.directory)
    source = definition.source
    at: Callable[..., Path] = lambda *parts: ("source", *parts)  # noqa: E731
    expanded = replace(
        definition,
        source=replace(
            source,
            topics=tuple(work.text(topic, at("topics", index)) for index, topic in enumerate(source.topics)),
            pattern=work.optional(source.pattern, at("pattern")),
            bootstrap=work.optional(source.bootstrap, at("bootstrap")),
            settings=work.settings(source.settings, at("settings")),
            value=_decoding(work, source.value, at("value")),
            key=_decoding(work, source.key, at("key")),
            values={
                work.text(topic, at("values", topic)): _decoding(work, decoding, at("values", topic))
                for topic, decoding in source.values.items()
            },
            starting=work.text(source.starting, at("starting")),
        ),
        steps=tuple(_step(work, index, step) for index, step in enumerate(definition.steps)),
        sinks=tuple(_sink(work, index, sink) for index, sink in enumerate(definition.sinks)),
        dead_letter=None if definition.dead_letter is None else _dead_letter(work, definition.dead_letter),
        home=work.text(definition.home, ("home",)),
        monitoring_group=work.optional(definition.monitoring_group, ("monitoring_group",)),
        spark=work.settings(definition.spark, ("spark",)),
    )
    if work.missing:
        raise SecretMissing(work.missing)
    return expanded, work.redactor


def _decoding(work: _Expansion, decoding: Decoding, where: Path) -> Decoding:
    if decoding.registry is None:
        return decoding
    return replace(decoding, registry=work.settings(decoding.registry, (*where, "registry")))


def _step(work: _Expansion, index: int, step: Step) -> Step:
    """Of steps, a lookup's table alone can need a secret: a database's address, where there is a query for it."""
    if not isinstance(step, Lookup):
        return step
    expand_table = work.text if step.query is None else work.secret
    return replace(step, table=expand_table(step.table, ("steps", index, "lookup", "table")))


def _sink(work: _Expansion, index: int, sink: SinkDefinition) -> SinkDefinition:
    where: Path = ("sinks", index, kind_of_sink(sink))
    match sink:
        case ParquetSink() | DeltaSink():
            return replace(sink, path=work.text(sink.path, (*where, "path")))
        case PostgresSink():
            return replace(
                sink,
                url=work.secret(sink.url, (*where, "url")),
                table=work.text(sink.table, (*where, "table")),
                schema_name=work.text(sink.schema_name, (*where, "schema_name")),
            )
        case KafkaSink():
            return replace(
                sink,
                topic=work.text(sink.topic, (*where, "topic")),
                bootstrap=work.optional(sink.bootstrap, (*where, "bootstrap")),
                settings=work.settings(sink.settings, (*where, "settings")),
            )


def _dead_letter(work: _Expansion, dead_letter: DeadLetter) -> DeadLetter:
    where: Path = ("dead_letter",)
    return replace(
        dead_letter,
        topic=work.text(dead_letter.topic, (*where, "topic")),
        bootstrap=work.optional(dead_letter.bootstrap, (*where, "bootstrap")),
        settings=work.settings(dead_letter.settings, (*where, "settings")),
    )
