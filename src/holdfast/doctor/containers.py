"""Containers of compose files and Kubernetes resources: which Kafka program each runs, with which settings.

The images of Kafka's programs turn variables into settings: `KAFKA_MIN_INSYNC_REPLICAS` into min.insync.replicas (one
underscore is a dot, two are an underscore, three a hyphen), bitnami's with `KAFKA_CFG_` before it. A container is known
by its image or by variables that only such a program has. Of others, a variable that looks like a setting of a client
is a gap: what the program makes of it is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from holdfast.doctor.broker_files import DEFAULTS, BrokerSettings
from holdfast.doctor.client_defaults import KINDS
from holdfast.doctor.client_settings import Setting
from holdfast.doctor.connect import examine_program
from holdfast.doctor.examined import FilesExamined
from holdfast.doctor.findings import Place

Kind = Literal["broker", "program", "unsupported"]


@dataclass(frozen=True)
class Image:
    pattern: str
    kind: Kind
    what: str
    prefixes: tuple[str, ...] = ()
    """Of variables; the first is that of fixes."""
    data: str = ""
    """Where a broker stores its log when nothing is said; empty when not known."""
    frame: str = "{}."


IMAGES: Final = (
    Image(r"cp-(kafka|server)|confluent-local", "broker", "a broker", ("KAFKA_",), "/var/lib/kafka/data"),
    Image(r"bitnami\w*/kafka", "broker", "a broker", ("KAFKA_CFG_", "KAFKA_"), "/bitnami/kafka/data"),
    Image(r"apache/kafka(-native)?", "broker", "a broker", ("KAFKA_",), "/tmp/kraft-combined-logs"),
    Image(r"(wurstmeister|bashj79|ubuntu|spotify|debezium|strimzi)/kafka", "broker", "a broker", ("KAFKA_",)),
    Image(r"[\w-]*connect[\w-]*", "program", "a Connect worker", ("CONNECT_",)),
    Image(r"[\w-]*schema-registry", "program", "a schema registry", ("SCHEMA_REGISTRY_",)),
    Image(r"cp-kafka-rest", "program", "a REST proxy", ("KAFKA_REST_",)),
    Image(r"(cp-)?ksqldb?-server", "program", "ksqlDB", ("KSQL_",), frame="ksql.streams.{}."),
    Image(r"redpanda", "unsupported", "Redpanda"),
)
BROKER_VARIABLES: Final = re.compile(
    r"KAFKA_(CFG_)?(BROKER_ID|NODE_ID|PROCESS_ROLES|ZOOKEEPER_CONNECT|ADVERTISED_LISTENERS|ADVERTISED_HOST_NAME)"
)
OF_FILE: Final = ("offsets.topic.replication.factor", "transaction.state.log.replication.factor")
"""Bitnami's image starts from a server.properties of its own, which has these."""
CLIENT_ENDINGS: Final = re.compile(
    "(?i).*(" + "|".join(name.replace(".", "_") for name in KINDS if "." in name or name == "acks") + ")"
)


@dataclass
class Container:
    name: str
    image: str
    place: Place
    environment: list[Setting] = field(default_factory=list)
    """Variables: the name, its value and where it stands."""
    kept: list[str] = field(default_factory=list)
    """Directories that outlive the container."""
    runs_something_else: bool = False
    """A command of its own: the image's program may not be what it runs."""
    unseen: list[str] = field(default_factory=list)
    """Where more variables come from that were not read."""


def examine_containers(containers: Iterable[Container], result: FilesExamined) -> int:
    """How many of them run a program of Kafka."""
    return sum(_examine(container, result) for container in containers)


def _examine(container: Container, result: FilesExamined) -> bool:
    image = _program(container)
    if image is None:
        for variable in container.environment:
            if CLIENT_ENDINGS.fullmatch(variable.name) and "KAFKA" in variable.name.upper():
                why = f"{variable}: what the program of {container.name} makes of it is not known"
                result.unsupported(variable.place, why)
        return False
    if image.kind == "unsupported":
        result.unsupported(container.place, f"it runs {image.what}, which the doctor does not know")
        return True
    for where in container.unseen:
        result.unsupported(container.place, f"more of its settings are in {where}")
    settings = _settings(container.environment, image.prefixes)
    spelling = f"{image.prefixes[0]}{{}}: {{}}"
    if image.kind == "program":
        examine_program(settings, container.place, result, spelling, image.what, image.frame)
        return True
    defaults = {**DEFAULTS, "log.dirs": image.data} if image.data else DEFAULTS
    if image.prefixes[0] == "KAFKA_CFG_":
        defaults = {name: value for name, value in defaults.items() if name not in OF_FILE}
    kept = tuple(container.kept)
    result.broker(BrokerSettings(container.place, settings, spelling=spelling, defaults=defaults, kept=kept))
    return True


def _program(container: Container) -> Image | None:
    names = [variable.name for variable in container.environment]
    # Helpers that only borrow the image's tools set what it asks for to `ignored`.
    runs_broker = any(
        BROKER_VARIABLES.fullmatch(variable.name) and variable.value != "ignored"
        for variable in container.environment
    )
    for image in IMAGES:
        if re.search(rf"(^|/)(?:{image.pattern})(:|@|$)", container.image):
            if image.kind == "broker" and container.runs_something_else and not runs_broker:
                return None  # the image's tools, such as kafka-topics
            return image
    if runs_broker:
        bitnami = any(name.startswith("KAFKA_CFG_") for name in names)
        return Image("", "broker", "a broker", ("KAFKA_CFG_", "KAFKA_") if bitnami else ("KAFKA_",))
    if "CONNECT_BOOTSTRAP_SERVERS" in names or {"OFFSET_STORAGE_TOPIC", "CONFIG_STORAGE_TOPIC"} <= set(names):
        return next(image for image in IMAGES if image.what == "a Connect worker")
    return None


def _settings(variables: Sequence[Setting], prefixes: Sequence[str]) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for variable in variables:
        prefix = next((each for each in prefixes if variable.name.startswith(each)), None)
        if prefix is not None:
            name = setting_name(variable.name.removeprefix(prefix))
            settings[name] = Setting(name, variable.value, variable.place, variable.name)
    return settings


def setting_name(variable: str) -> str:
    """`MIN_INSYNC_REPLICAS` as min.insync.replicas; `__` is an underscore, `___` a hyphen."""
    marks = {"_": ".", "__": "_", "___": "-"}
    return re.sub(r"_+", lambda match: marks.get(match[0], match[0]), variable.lower())
