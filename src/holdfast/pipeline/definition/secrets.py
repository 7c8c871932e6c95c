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
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from types import UnionType
from typing import Any, Final, get_args, get_type_hints
from urllib.parse import quote, quote_plus

from holdfast.pipeline.definition.errors import DefinitionError, Finding, Path
from holdfast.pipeline.definition.model import Lookup, PipelineDefinition, Setting, SinkDefinition, Step
from holdfast.pipeline.definition.naming import kind_of_sink, kind_of_step
from holdfast.pipeline.definition.shapes import Expansion

REFERENCE: Final = re.compile(r"\$\$\{|\$\{(?P<inside>[^}]*)(?P<end>\}?)")
VARIABLE: Final = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?", re.DOTALL)
FILE_PREFIX: Final = "file:"
SHORT: Final = 4
"""Values shorter than this are taken out only where something is set to them: `e` must not eat a directory `/e/`, nor
`1` every digit of a log."""
SECRET_BYTES_MAX: Final = 1 << 20
SECRET_NAME: Final = re.compile(
    r"(?!.*\.(?:url|location|type|algorithm|mechanisms?)\Z)"
    r".*(?:password|secret|token|jaas|user\.info|credential|key\.pem|keystore\.key)",
    re.IGNORECASE,
)
"""Settings whose values are nobody's business, by name."""


class SecretMissing(DefinitionError):
    """A reference that leads nowhere."""


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
                re.escape(form) if len(form) >= SHORT else rf"(?<=[=:\"']){re.escape(form)}(?=[@&;,\s\"']|\Z)"
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


class _References:
    """One pass over the texts of a definition that may hold references; those that are not whole are found."""

    def __init__(self) -> None:
        self.found: list[Finding] = []

    def text(self, text: str, where: Path) -> str:
        if (wrong := check_references(text)) is not None:
            self.found.append(Finding(where, wrong))
        return text

    def secret(self, text: str, where: Path) -> str:
        return self.text(text, where)

    def walk(self, value: Any, hint: Any, where: Path) -> Any:
        """The value, with what `text` and `secret` make of every text that the model marks as one to expand."""
        marks = getattr(hint, "__metadata__", ())
        inner = get_args(hint)
        if isinstance(value, str):
            if Expansion.SECRET in marks:
                return self.secret(value, where)
            return self.text(value, where) if Expansion.VARIABLES in marks else value
        if is_dataclass(value):
            return self._parts(value, where)
        if value is not None and (marks or isinstance(hint, UnionType)):
            return self.walk(value, inner[0], where)
        if isinstance(value, Mapping):
            return {
                self.walk(key, inner[0], (*where, key)): self.walk(each, inner[1], (*where, key))
                for key, each in value.items()
            }
        if isinstance(value, tuple):
            return tuple(self.walk(each, inner[0], (*where, index)) for index, each in enumerate(value))
        return value

    def _parts(self, value: Any, where: Path) -> Any:
        hints = _hints(type(value))
        if isinstance(value, Step):
            where = (*where, kind_of_step(value))
        elif isinstance(value, SinkDefinition):
            where = (*where, kind_of_sink(value))
        if isinstance(value, Lookup) and value.query is not None:
            hints["table"] = Setting  # the address of a database
        return replace(
            value,
            **{name: self.walk(getattr(value, name), hint, (*where, name)) for name, hint in hints.items()},
        )


_KNOWN: Final[dict[type, dict[str, Any]]] = {}


def _hints(model: type) -> dict[str, Any]:
    """Read once: that takes longer than all the rest."""
    if model not in _KNOWN:
        _KNOWN[model] = get_type_hints(model, include_extras=True)
    return dict(_KNOWN[model])


def incomplete_references(definition: PipelineDefinition) -> list[Finding]:
    """References must be whole; whether they lead anywhere shows when a run begins."""
    work = _References()
    work.walk(definition, PipelineDefinition, ())
    return work.found


class _Expansion(_References):
    """Expands; all references that lead nowhere are found before anything is said."""

    def __init__(self, environment: Mapping[str, str], directory: str) -> None:
        super().__init__()
        self.environment = environment
        self.directory = directory
        self.redactor = Redactor()

    def text(self, text: str, where: Path) -> str:
        try:
            return expand(text, self.environment, where=where, redactor=self.redactor)
        except SecretMissing as error:
            self.found.extend(error.findings)
            return text

    def secret(self, text: str, where: Path) -> str:
        """A text in which `file:` is understood."""
        expanded = self.text(text, where)
        if text.startswith(FILE_PREFIX):
            return self._content(text, expanded.removeprefix(FILE_PREFIX).removeprefix("//"), where)
        if expanded == text and SECRET_NAME.match(str(where[-1])):
            self.redactor.add(text, "***")  # written in the file itself; no reason to show it to others
        return expanded

    def _content(self, text: str, file: str, where: Path) -> str:
        try:
            with open(os.path.join(self.directory, os.path.expanduser(file)), encoding="utf-8") as opened:
                content = opened.read(SECRET_BYTES_MAX).removesuffix("\n").removesuffix("\r")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            self.found.append(Finding(where, f"the secret's file {file!r} cannot be read: {reason}"))
            return text
        if not content:
            self.found.append(Finding(where, f"the secret's file {file!r} is empty"))
            return text
        self.redactor.add(content, text)
        return content


def expand_definition(
    definition: PipelineDefinition, environment: Mapping[str, str] = os.environ
) -> tuple[PipelineDefinition, Redactor]:
    """The definition a run uses, and what keeps its secrets out of texts. SQL and code are left as they are."""
    work = _Expansion(environment, definition.directory)
    expanded = work.walk(definition, PipelineDefinition, ())
    if work.found:
        raise SecretMissing(work.found)
    return expanded, work.redactor
