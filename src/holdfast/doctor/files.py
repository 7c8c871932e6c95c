"""One examination of everything that stands in files: clients, code, pipelines, broker settings, and all together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.doctor.broker_files import check_broker, facts, read_broker
from holdfast.doctor.client_defaults import Client, Role
from holdfast.doctor.client_settings import ClientSettings
from holdfast.doctor.combinations import TopicFacts, across_clients, against_topics
from holdfast.doctor.findings import Examination, Finding
from holdfast.doctor.pipelines import examine_pipeline
from holdfast.doctor.properties_files import UnreadableFile, read_clients
from holdfast.doctor.python_code import examine_code
from holdfast.doctor.rules import check_settings


@dataclass(frozen=True)
class Asked:
    """What to look at; paths as they were given, since findings repeat them."""

    producers: Sequence[str] = ()
    consumers: Sequence[str] = ()
    pipelines: Sequence[str] = ()
    code: Sequence[str] = ()
    brokers: Sequence[str] = ()
    client: Client | None = None

    @property
    def anything(self) -> bool:
        return any((self.producers, self.consumers, self.pipelines, self.code, self.brokers))

    def client_files(self) -> Iterator[tuple[str, Role]]:
        yield from ((path, "producer") for path in self.producers)
        yield from ((path, "consumer") for path in self.consumers)


@dataclass
class FilesExamined:
    examination: Examination
    clients: list[ClientSettings] = field(default_factory=list)
    """For rules that hold them against a live cluster."""
    topics: list[TopicFacts] = field(default_factory=list)


def examine_files(asked: Asked) -> FilesExamined:
    """Each file by itself, then all of them together; a file that cannot be read is a gap, and the rest goes on."""
    examination = Examination()
    result = FilesExamined(examination)
    for path, role in asked.client_files():
        try:
            clients = read_clients(path, role, asked.client)
        except UnreadableFile as error:
            examination.missed(path, str(error).removeprefix(f"{path}: "))
            continue
        for client in clients:
            examination.examined.append(f"{path} as a {role} of {client.client.words}")
            examination.add(check_settings(client))
        result.clients.extend(clients[-1:])
    for path in asked.brokers:
        try:
            broker = read_broker(path)
        except UnreadableFile as error:
            examination.missed(path, str(error).removeprefix(f"{path}: "))
            continue
        examination.examined.append(f"{path} as settings of {'a topic' if broker.is_topic else 'a broker'}")
        examination.add(check_broker(broker))
        result.topics.append(facts(broker))
    for path in asked.code:
        result.clients.extend(examine_code(path, examination))
    for path in asked.pipelines:
        examine_pipeline(path, examination)
    examination.add(across_clients(result.clients))
    add_combined(examination, against_topics(result.clients, result.topics))
    return result


def add_combined(examination: Examination, combined: Iterable[Finding]) -> None:
    """Findings of two things together: of the same risk at the same place only the worse one stays."""
    for found in combined:
        same = [each for each in examination.findings if (each.id, each.place) == (found.id, found.place)]
        if all(each.severity.rank < found.severity.rank for each in same):
            examination.findings = [each for each in examination.findings if each not in same]
            examination.add([found])
