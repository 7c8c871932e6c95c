"""The settings of one client, as its author wrote them and as the client takes them.

- A value is what was written; what was not written is the client's default. A value that only the running program
  knows (`${ENV}`, an expression) is `UNKNOWN`: no rule fires on it, and it is not taken for the default either.
- Names are kept in the client's spelling, since findings and fixes speak it; rules ask by Kafka's names.
- Reading a value never raises: one that cannot be is a finding of `check_values`, and unknown to the rules.
"""

from __future__ import annotations

import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from holdfast.doctor.client_defaults import (
    COUNTERPARTS,
    DEFAULTS,
    KINDS,
    Client,
    Role,
    canonical,
    is_known,
    known_names,
    own_name,
)
from holdfast.doctor.findings import Finding, Fix, Location, Severity, finding


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = _Unknown()
"""A value that cannot be known without running the program."""

_PLACEHOLDER = re.compile(r"\$\{|\$\(|\{\{|^<.*>$|^%\(|^@.*@$|^\$\w")
_LONG_NAMES_ALIKE = 0.86
"""How alike two names must be to be taken for a slip, where a name of one's own would be legitimate."""
_NAMES_ALIKE = 0.6


@dataclass(frozen=True)
class Setting:
    name: str
    """In the client's own spelling."""
    value: Any
    place: Location
    written: str = ""
    """As it stands in the file, where something stands around it: `producer.acks`, `CONNECT_PRODUCER_ACKS`."""

    @property
    def is_known(self) -> bool:
        """Whether the value stands there, and is not filled in later from elsewhere."""
        return not (
            self.value is UNKNOWN or (isinstance(self.value, str) and _PLACEHOLDER.search(self.value))
        )

    def __str__(self) -> str:
        return f"{self.written or self.name}={shown(self.value)}"


def spelled(spelling: str, name: str, value: str) -> str:
    """A setting in a file that writes `producer.{}={}` or `KAFKA_{}: {}`; names of the environment are upper case."""
    if spelling.format("", "").isupper():
        name = name.upper().replace("_", "__").replace(".", "_")
    return spelling.format(name, value)


Style = Literal["properties", "yaml", "json", "python", "spring"]


class WrittenSettings(ABC):
    """Settings of a client or a broker that stand somewhere: rules judge one at a time."""

    place: Location
    """The file, the container, the resource or the line of the code, as a whole."""
    settings: Mapping[str, Setting]
    """By Kafka's names."""

    def place_of(self, *names: str) -> Location:
        """Where the first of these that was written stands, or the whole."""
        return next((self.settings[name].place for name in names if name in self.settings), self.place)

    @abstractmethod
    def said(self, name: str) -> str:
        """A setting as it is written, or its default with whose that is."""

    @abstractmethod
    def set_to(self, name: str, value: str) -> Fix:
        """The line that sets it."""

    def finding(
        self,
        risk_id: str,
        name: str,
        why: str,
        to: str | None = None,
        *,
        at: Sequence[str] = (),
        severity: Severity | None = None,
        loses: str | None = None,
        fix: Fix | None = None,
        related: Iterable[str] = (),
    ) -> Finding:
        """What one setting does: `why` follows on what it says, `to` is its better value, and it stands where the first
        of `at` does, or it itself."""
        return finding(
            risk_id,
            self.place_of(*(at or (name,))),
            self.said(name) + why,
            severity=severity,
            loses=loses,
            fix=fix if to is None else self.set_to(name, to),
            related=related,
        )


@dataclass(frozen=True)
class ClientSettings(WrittenSettings):
    role: Role
    client: Client
    place: Location
    settings: Mapping[str, Setting] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a framework sets where nothing is said, over the client's own."""
    style: Style = "properties"
    open_ended: bool = False
    """Some of it is not seen (`**more`, an expression): a name that is absent may have been set."""
    also: tuple[Setting, ...] = ()
    """Settings that another name for the same thing overrode."""
    spelling: str = ""
    """How a setting is written where the style does not tell: `producer.{}={}`."""

    def written(self, name: str) -> bool:
        return name in self.settings

    def value(self, name: str) -> Any:
        """As the client takes it: typed, the default when nothing was said, UNKNOWN when nobody can say."""
        if name in self.settings:
            return read_value(name, self.settings[name].value)
        if self.open_ended:
            return UNKNOWN
        if name in self.defaults:
            return self.defaults[name]
        return DEFAULTS[self.client, self.role].get(name)

    def number(self, name: str) -> int | None:
        value = self.value(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def flag(self, name: str) -> bool | None:
        value = self.value(name)
        return value if isinstance(value, bool) else None

    def text(self, name: str) -> str | None:
        value = self.value(name)
        return value if isinstance(value, str) else None

    def said(self, name: str) -> str:
        """`acks=1` as it is written, or `acks=1, the default of aiokafka`."""
        if name in self.settings:
            return str(self.settings[name])
        value = self.value(name)
        whose = "of the framework" if name in self.defaults else f"of {self.client.words}"
        return f"{own_name(self.client, name)}={shown(value)} (the default {whose})"

    def line(self, name: str, value: str) -> str:
        """A setting as it is written in a file of this style."""
        own = own_name(self.client, name)
        if self.spelling:
            return spelled(self.spelling, own, value)
        if self.style == "properties":
            return f"{own}={value}"
        if self.style == "spring":
            kebab = name.replace(".", "-") if name in _SPRING_OWN else f"properties.{name}"
            return f"spring.kafka.{self.role}.{kebab}: {value}"
        literal = value if value in ("true", "false") or value.lstrip("-").isdecimal() else f'"{value}"'
        if self.style == "python":
            literal = literal.capitalize() if value in ("true", "false") else literal
            return f"{own}={literal}" if "_" in own or self.client in _KEYWORDS else f'"{own}": {literal}'
        return f"{own}: {literal}" if self.style == "yaml" else f'"{own}": {literal}'

    def set_to(self, name: str, value: str) -> Fix:
        return Fix(self.line(name, value), "code" if self.style == "python" else "settings")


_KEYWORDS: Final = frozenset({Client.KAFKA_PYTHON, Client.AIOKAFKA})
_SPRING_OWN: Final = frozenset(
    {"acks", "retries", "enable.auto.commit", "auto.offset.reset", "isolation.level", "max.poll.records"}
)


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "?" if value is UNKNOWN else str(value)


def read_value(name: str, value: Any) -> Any:
    """A written value as the rules compare it; UNKNOWN when it is no value of this setting."""
    if not Setting(name, value, Location()).is_known:
        return UNKNOWN
    kind = KINDS.get(name, "text")
    text = shown(value).strip()
    lower = text.lower()
    match kind:
        case "bool":
            return {"true": True, "false": False}.get(lower, UNKNOWN)
        case "int":
            if lower in ("inf", "infinity"):
                return 2**31 - 1
            return int(text) if re.fullmatch(r"[+-]?\d+", text) else UNKNOWN
        case "acks":
            return {"all": "all", "-1": "all", "0": "0", "1": "1"}.get(lower, UNKNOWN)
        case "reset":
            return _RESETS.get(lower, "by_duration" if lower.startswith("by_duration:") else UNKNOWN)
        case "isolation":
            level = lower.replace("-", "_")
            return level if level in ("read_committed", "read_uncommitted") else UNKNOWN
        case _:
            return None if value is None else text


_RESETS: Final = {
    **dict.fromkeys(("earliest", "smallest", "beginning"), "earliest"),
    **dict.fromkeys(("latest", "largest", "end"), "latest"),
    **dict.fromkeys(("none", "error"), "none"),
}
_EXPECTED: Final = {
    "bool": "true or false",
    "int": "a whole number",
    "acks": "all, 1 or 0",
    "reset": "earliest, latest or none",
    "isolation": "read_committed or read_uncommitted",
}


def make_settings(
    role: Role,
    client: Client,
    place: Location,
    written: Iterator[Setting] | list[Setting],
    *,
    style: Style = "properties",
    defaults: Mapping[str, Any] | None = None,
    open_ended: bool = False,
    spelling: str = "",
) -> ClientSettings:
    """Settings by Kafka's names; of two names for one thing the last counts, and the other is remembered."""
    by_name: dict[str, Setting] = {}
    overridden: list[Setting] = []
    for setting in written:
        name = canonical(client, setting.name)
        if name in by_name:
            overridden.append(by_name[name])
        by_name[name] = setting
    return ClientSettings(
        role, client, place, by_name, defaults or {}, style, open_ended, tuple(overridden), spelling
    )


def check_names(client: ClientSettings) -> Iterator[Finding]:
    """Names the client does not know: a slip, another client's name, or a setting of the other role."""
    for setting in (*client.settings.values(), *client.also):
        if not is_known(client.client, client.role, setting.name):
            yield from _unknown_name(client, setting)


def _unknown_name(client: ClientSettings, setting: Setting) -> Iterator[Finding]:
    other: Role = "consumer" if client.role == "producer" else "producer"
    name = setting.name
    if is_known(client.client, other, name):
        yield finding(
            "HF000",
            setting.place,
            f"{name} is a setting of a {other}; this {client.role} does not look at it",
            severity=Severity.NOTE,
        )
        return
    meant = _meant(client, name)
    if meant is None and client.client is Client.JAVA:
        return  # handed on to serialisers and interceptors, which have settings of their own
    refuses = client.client is not Client.JAVA
    what = "refuses to start with it" if refuses else "ignores it"
    guess = f"; did you mean {meant}?" if meant else ""
    yield finding(
        "HF000",
        setting.place,
        f"{client.client.words} has no {client.role} setting {name}, and {what}{guess}",
        severity=Severity.ERROR if refuses else Severity.WARNING,
        fix=Fix(f"{meant} instead of {name}", "advice") if meant else None,
    )


def _meant(client: ClientSettings, name: str) -> str | None:
    known = known_names(client.client, client.role)
    translated = own_name(client.client, canonical(Client.LIBRDKAFKA, name.replace("_", ".")))
    if translated in known and translated != name:
        return translated
    counterpart = COUNTERPARTS.get(name)
    if counterpart in known:
        return counterpart
    cutoff = _LONG_NAMES_ALIKE if client.client is Client.JAVA else _NAMES_ALIKE
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def check_values(client: ClientSettings) -> Iterator[Finding]:
    """Values that no client takes, and the same thing said twice in two ways."""
    for name, setting in client.settings.items():
        kind = KINDS.get(name, "text")
        if kind == "text" or setting.value is None or not setting.is_known:
            continue
        if read_value(name, setting.value) is UNKNOWN:
            yield finding(
                "HF000",
                setting.place,
                f"{setting} is not {_EXPECTED[kind]}",
                severity=Severity.ERROR,
            )
    for lost in client.also:
        name = canonical(client.client, lost.name)
        won = client.settings[name]
        if lost.name == won.name and shown(lost.value) == shown(won.value):
            continue
        if read_value(name, lost.value) == read_value(name, won.value):
            continue
        yield finding(
            "HF000",
            won.place,
            f"{won} contradicts {lost} at {lost.place}; the last one counts",
        )
