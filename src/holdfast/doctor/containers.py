"""Containers of compose files and Kubernetes resources: which Kafka program each runs, with which settings.

The images of Kafka's programs turn variables into settings: `KAFKA_MIN_INSYNC_REPLICAS` into min.insync.replicas (one
underscore is a dot, two are an underscore, three a hyphen), bitnami's with `KAFKA_CFG_` before it. A container is known
by its image or by variables that only such a program has. Of others, a variable that looks like a setting of a client
is a gap: what the program makes of it is not known.

Of docker-compose files, the environment and the volumes of each service are read as containers. Of Kubernetes
resources: containers of pods, ConfigMaps with files in them, and Strimzi's resources.

Strimzi's `Kafka` and `KafkaTopic` are settings of a broker and of a topic, `KafkaConnect` and `KafkaConnector` those
of a worker and a connector. Resources that have nothing to do with Kafka are passed over; one that has and is not known
is a gap.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from holdfast.doctor.broker_files import DEFAULTS, BrokerSettings
from holdfast.doctor.client_defaults import KINDS
from holdfast.doctor.client_settings import UNKNOWN, Setting
from holdfast.doctor.connect import examine_program
from holdfast.doctor.examined import FilesExamined
from holdfast.doctor.findings import Finding, Fix, Location, finding
from holdfast.doctor.properties_files import (
    PropertyEntry,
    Tree,
    UnreadableFile,
    branch,
    branches,
    first_line,
    leaf,
    read_text,
    settings_of,
    text,
    texts,
)

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
    place: Location
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


def is_compose(document: Tree) -> bool:
    return any(
        {"image", "build", "environment", "extends"} & each.keys()
        for _, each in branches(document, "services")
    )


def compose_containers(path: str, document: Tree) -> Iterator[Container]:
    for name, service in branches(document, "services"):
        place = Location(path, first_line(service), f"service {name}")
        container = Container(f"service {name}", text(service, "image"), place)
        container.runs_something_else = "command" in service or "entrypoint" in service
        for file, required in _env_files(service):
            _read_env_file(os.path.join(os.path.dirname(path), file), container, required)
        container.environment += _environment(path, service)
        container.kept += [target for target in _volumes(service) if target]
        if "extends" in service:
            base = text(service, "extends", "service") or text(service, "extends")
            container.unseen.append(f"service {base}, which it extends")
        yield container


def _environment(path: str, service: Tree) -> Iterator[Setting]:
    for item, line in texts(service, "environment"):
        name, equals, value = item.partition("=")
        yield Setting(name.strip(), value if equals else UNKNOWN, Location(path, line))
    for name, setting in settings_of(branch(service, "environment"), path).items():
        yield Setting(name, UNKNOWN if setting.value is None else setting.value, setting.place)


def _env_files(service: Tree) -> Iterator[tuple[str, bool]]:
    yield from ((file, True) for file, _ in texts(service, "env_file"))
    for _, each in branches(service, "env_file"):
        yield text(each, "path"), text(each, "required") != "false"


def _read_env_file(path: str, container: Container, required: bool) -> None:
    try:
        lines = read_text(path).splitlines()
    except UnreadableFile:
        if required:
            container.unseen.append(f"{path}, which cannot be read")
        return
    for number, line in enumerate(lines, 1):
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and not name.startswith("#"):
            container.environment.append(
                Setting(name.strip(), value.strip().strip("\"'"), Location(path, number))
            )


def _volumes(service: Tree) -> Iterator[str]:
    """The directories on volumes; those of tmpfs are gone with the container."""
    for volume, _ in texts(service, "volumes"):
        parts = volume.split(":")
        yield parts[1] if len(parts) > 1 else parts[0]
    for _, volume_branch in branches(service, "volumes"):
        if text(volume_branch, "type") != "tmpfs":
            yield text(volume_branch, "target")
    if leaf(service, "volumes_from") is not None:
        yield "/"


Maps = Mapping[str, Mapping[str, Setting]]
"""ConfigMaps by their names, with what is in them."""
STRIMZI: Final = "kafka.strimzi.io/"
TEMPORARY: Final = frozenset({"emptyDir", "secret", "configMap", "projected", "downwardAPI"})
"""Volumes that keep nothing of a broker's."""
WITHOUT_SETTINGS: Final = frozenset({"KafkaUser", "KafkaRebalance", "KafkaAccess"})
"""Strimzi's resources that say nothing about what is kept."""


def is_resource(document: Tree) -> bool:
    return bool(text(document, "apiVersion") and text(document, "kind"))


def examine_resources(path: str, documents: Sequence[Tree], result: FilesExamined) -> int:
    """How many of them were examined."""
    lists = [each for document in documents for _, each in branches(document, "items")]
    resources = [*(each for each in documents if text(each, "kind") != "List"), *lists]
    maps = {
        text(each, "metadata", "name"): settings_of(branch(each, "data"), path)
        for each in resources
        if text(each, "kind") == "ConfigMap"
    }
    return sum(_examine_resource(path, each, maps, result) for each in resources)


def _examine_resource(path: str, resource: Tree, maps: Maps, result: FilesExamined) -> int:
    kind, version = text(resource, "kind"), text(resource, "apiVersion")
    place = Location(path, first_line(resource), f"{kind} {text(resource, 'metadata', 'name')}".strip())
    if version.startswith(STRIMZI):
        return _strimzi(place, kind, resource, result)
    if kind == "ConfigMap":
        return _files_within(place, resource, result)
    if "kafka" in f"{version} {kind}".lower() and kind not in WITHOUT_SETTINGS:
        result.unsupported(place, f"{version} is not known to the doctor")
        return 1
    return examine_containers(_containers(path, place.resource, resource, maps), result)


def _files_within(place: Location, resource: Tree, result: FilesExamined) -> int:
    from holdfast.doctor.files import examine_text

    return sum(
        examine_text(place.file, name, each.value, each.line, result)
        for name, each in branch(resource, "data").items()
        if isinstance(each, PropertyEntry) and isinstance(each.value, str) and "\n" in each.value
    )


# Pods


def _containers(
    path: str, owner: str, tree: Tree, maps: Maps, claims: tuple[str, ...] = ()
) -> Iterator[Container]:
    """Those of every pod below a branch, wherever the kind of resource has it."""
    claims += tuple(text(each, "metadata", "name") for _, each in branches(tree, "volumeClaimTemplates"))
    for name, below in branches(tree):
        if name != "containers":
            yield from _containers(path, owner, below, maps, claims)
            continue
        gone = {
            text(volume, "name")
            for _, volume in branches(tree, "volumes")
            if TEMPORARY & volume.keys() and text(volume, "name") not in claims
        }
        for _, each in branches(below):
            yield _container(path, owner, each, maps, gone)


def _container(path: str, owner: str, tree: Tree, maps: Maps, gone: set[str]) -> Container:
    place = Location(path, first_line(tree), owner)
    container = Container(f"{owner}, container {text(tree, 'name')}", text(tree, "image"), place)
    container.runs_something_else = "command" in tree or "args" in tree
    for _, source in branches(tree, "envFrom"):
        name = text(source, "configMapRef", "name")  # secrets hold passwords, not settings
        if name in maps:
            container.environment += maps[name].values()
        elif name:
            container.unseen.append(f"ConfigMap {name}, which is not in this file")
    for _, each in branches(tree, "env"):
        entry = leaf(each, "value")
        reference = branch(each, "valueFrom", "configMapKeyRef")
        known = maps.get(text(reference, "name"), {}).get(text(reference, "key"))
        value = entry.value if entry is not None else known.value if known is not None else UNKNOWN
        container.environment.append(Setting(text(each, "name"), value, Location(path, first_line(each))))
    for _, mount in branches(tree, "volumeMounts"):
        if text(mount, "name") not in gone:
            container.kept.append(text(mount, "mountPath"))
    return container


# Strimzi


def _strimzi(place: Location, kind: str, resource: Tree, result: FilesExamined) -> int:
    spec = branch(resource, "spec")
    spelling = "{}: {}"
    match kind:
        case "Kafka":
            config = branch(spec, "kafka", "config")
            result.broker(BrokerSettings(place, settings_of(config, place.file), spelling=spelling))
            result.examination.add(_nodes(place, branch(spec, "kafka")))
        case "KafkaNodePool":
            result.examination.examined.append(f"{place} as a pool of brokers")
            result.examination.add(_nodes(place, spec))
        case "KafkaTopic":
            settings = settings_of(branch(spec, "config"), place.file)
            if (replicas := leaf(spec, "replicas")) is not None:
                at = Location(place.file, replicas.line)
                settings["replication.factor"] = Setting("replication.factor", replicas.value, at, "replicas")
            name = text(spec, "topicName") or text(resource, "metadata", "name")
            result.broker(BrokerSettings(place, settings, is_topic=True, name=name, spelling=spelling))
        case "KafkaConnect" | "KafkaMirrorMaker2":
            for config in list(_configs(spec)) or [Tree()]:
                examine_program(settings_of(config, place.file), place, result, spelling, kind)
        case "KafkaBridge":
            settings = {
                name.replace(".config.", "."): each for name, each in settings_of(spec, place.file).items()
            }
            examine_program(settings, place, result, spelling, "a REST proxy")
        case "KafkaConnector":
            settings = settings_of(branch(spec, "config"), place.file)
            if (named := leaf(spec, "class")) is not None:
                settings["connector.class"] = Setting("class", named.value, Location(place.file, named.line))
            examine_program(settings, place, result, spelling, "a connector", "{}.override.")
        case _ if kind in WITHOUT_SETTINGS:
            return 0
        case _:
            result.unsupported(place, f"{kind} is not known to the doctor")
    return 1


def _configs(tree: Tree) -> Iterator[Tree]:
    """Every branch of settings, wherever the resource has it."""
    for name, below in branches(tree):
        yield from [below] if name == "config" else _configs(below)


def _nodes(place: Location, spec: Tree) -> Iterator[Finding]:
    """How many brokers there are, and whether their disks stay."""
    replicas, roles = leaf(spec, "replicas"), leaf(spec, "roles")
    if replicas is not None and replicas.value in (1, 2) and (roles is None or "broker" in roles.value):
        yield finding(
            "HF201",
            Location(place.file, replicas.line, place.resource),
            f"replicas: {replicas.value}: no topic can have more copies than there are brokers",
            fix=Fix("replicas: 3", "settings"),
        )
    for each in (branch(spec, "storage"), *(volume for _, volume in branches(spec, "storage", "volumes"))):
        if (kind := leaf(each, "type")) is not None and kind.value == "ephemeral":
            yield finding(
                "HF212",
                Location(place.file, kind.line, place.resource),
                "storage of type ephemeral: a pod that is replaced begins with an empty disk",
                fix=Fix("type: persistent-claim, with a size", "settings"),
            )
