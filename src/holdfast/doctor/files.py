"""One examination of everything that stands in files: clients, code, pipelines, broker settings, and all together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.doctor.client_defaults import Client
from holdfast.doctor.combinations import across_clients, against_topics
from holdfast.doctor.connect import refused_overrides
from holdfast.doctor.examined import FilesExamined
from holdfast.doctor.findings import Examination, Finding
from holdfast.doctor.pipelines import examine_pipeline
from holdfast.doctor.python_code import examine_code
from holdfast.doctor.recognising import AskedAs, examine_file, examine_path


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
