"""What the files of one examination have told so far: kinds of files add their settings, and the rules judge them.

A setting that a rule looks at and whose value only the running program knows is a gap: that rule was not applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.doctor.broker_files import JUDGED, BrokerSettings, check_broker, facts
from holdfast.doctor.client_defaults import KINDS
from holdfast.doctor.client_settings import ClientSettings, Setting
from holdfast.doctor.combinations import TopicFacts
from holdfast.doctor.findings import Examination, Location
from holdfast.doctor.rules import check_settings


@dataclass
class FilesExamined:
    examination: Examination = field(default_factory=Examination)
    clients: list[ClientSettings] = field(default_factory=list)
    """For rules that hold them against each other, and against a live cluster."""
    topics: list[TopicFacts] = field(default_factory=list)

    policies: list[Setting] = field(default_factory=list)
    """What Connect's workers say about settings that connectors override, and these settings."""
    overrides: list[Setting] = field(default_factory=list)

    def client(self, client: ClientSettings, *, combined: bool = True) -> None:
        """Judge a client; `combined` says whether it is also held against the others."""
        self.examination.examined.append(f"{client.place} as a {client.role} of {client.client.words}")
        self.examination.add(check_settings(client))
        self.unknown(setting for name, setting in client.settings.items() if name in KINDS)
        if combined:
            self.clients.append(client)

    def broker(self, broker: BrokerSettings) -> None:
        what = "a topic" if broker.is_topic else "a broker"
        self.examination.examined.append(f"{broker.place} as settings of {what}")
        self.examination.add(check_broker(broker))
        self.unknown(setting for name, setting in broker.settings.items() if name in JUDGED)
        self.topics.append(facts(broker))

    def unsupported(self, where: Location | str, why: str) -> None:
        """Something that the doctor does not know how to examine."""
        self.examination.missed(str(where), why, "unsupported")

    def unreadable(self, path: str, error: Exception) -> None:
        """The file, with the line where the error names one, and the reason."""
        place, _, why = str(error).partition(": ")
        self.examination.missed(place if place.startswith(path) else path, why)

    @property
    def accounted_for(self) -> int:
        """How much was examined, or named as not examined."""
        return len(self.examination.examined) + len(self.examination.gaps)

    def unknown(self, settings: Iterable[Setting]) -> None:
        for setting in settings:
            if not setting.is_known:
                self.unsupported(setting.place, f"{setting}: the value is filled in elsewhere")
