"""A definition where it runs: with its secrets, on its cluster, in its home. What every command on a pipeline opens."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.errors import HoldfastError
from holdfast.pipeline.core.failures import DefinitionWrong
from holdfast.pipeline.definition.fingerprint import canonical, fingerprint
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME, client_settings, home_of, own_topics
from holdfast.pipeline.definition.secrets import Redactor, expand_definition
from holdfast.pipeline.engine.failures import explain_failure
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.engine.known_sinks import KnownSinks
from holdfast.pipeline.engine.source_view import SourceView
from holdfast.pipeline.sinks.base import Sink, SinkContext

if TYPE_CHECKING:
    from holdfast.reader.cluster import Cluster

Build: TypeAlias = Callable[[PipelineDefinition], dict[str, Sink]]


@dataclass(frozen=True)
class Deployment:
    """One definition, ready to be opened."""

    plain: PipelineDefinition
    """Secrets as references."""
    definition: PipelineDefinition
    """With its secrets."""
    redactor: Redactor
    settings: dict[str, str]
    """Of clients of the source's cluster."""

    @classmethod
    def of(cls, definition: PipelineDefinition, bootstrap: str | None = None) -> Deployment:
        expanded, redactor = expand_definition(definition)
        return cls(definition, expanded, redactor, client_settings(expanded, bootstrap))

    @cached_property
    def canonical(self) -> Mapping[str, Any]:
        """The definition as it is kept and compared, secrets as references."""
        return canonical(self.plain)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.plain)

    @property
    def home_path(self) -> str:
        return home_of(self.definition)

    def home(self) -> Home:
        return Home(self.home_path, self.definition.name)

    def known_sinks(self) -> KnownSinks:
        return KnownSinks(self.home(), self.canonical)

    def source(self, cluster: Cluster) -> SourceView:
        return SourceView(
            cluster, self.definition.source, own_topics(self.definition), self.definition.directory
        )

    def sink_context(self) -> SinkContext:
        return SinkContext(self.definition.name, self.home_path, self.settings, uuid.uuid4().hex[:12])

    @contextlib.contextmanager
    def sinks(self, build: Build | None = None) -> Iterator[dict[str, Sink]]:
        """All sinks, open for their ledgers only."""
        context = self.sink_context()
        with contextlib.ExitStack() as stack:
            sinks = (build or build_sinks)(self.definition)
            for sink in sinks.values():
                stack.callback(sink.close)
                sink.open(context, None)
            yield sinks


@contextlib.contextmanager
def explained(redactor: Redactor, home: str = "<home>") -> Iterator[None]:
    """Whatever goes wrong inside is a `HoldfastError` whose text says what to do and holds no secret."""
    try:
        yield
    except Exception as error:
        told = redacted(explain_failure(error, home), redactor)
        if told is error:
            raise
        raise told from error


def redacted(error: HoldfastError, redactor: Redactor) -> HoldfastError:
    """The same error without any secret in its text."""
    error.args = tuple(redactor.redact(part) if isinstance(part, str) else part for part in error.args)
    return error


def build_sinks(definition: PipelineDefinition) -> dict[str, Sink]:
    """By name, the dead letter first; of a definition with its secrets expanded."""
    from holdfast.pipeline.sinks.building import build_dead_letter, build_sink

    sinks: dict[str, Sink] = {DEAD_LETTER_NAME: build_dead_letter(definition)}
    for each in definition.sinks:
        if each.name in sinks:
            raise DefinitionWrong(
                f"two sinks have the name {each.name!r}: ledgers are kept by name, so rename one"
            )
        sinks[each.name] = build_sink(definition, each)
    return sinks
