"""Kubernetes resources: containers of pods, ConfigMaps with files in them, and Strimzi's resources.

Strimzi's `Kafka` and `KafkaTopic` are settings of a broker and of a topic, `KafkaConnect` and `KafkaConnector` those
of a worker and a connector. Resources that have nothing to do with Kafka are passed over; one that has and is not known
is a gap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from holdfast.doctor.broker_files import BrokerSettings
from holdfast.doctor.client_settings import UNKNOWN, Setting
from holdfast.doctor.connect import examine_program
from holdfast.doctor.containers import Container, examine_containers
from holdfast.doctor.examined import FilesExamined
from holdfast.doctor.findings import Finding, Fix, Place, finding
from holdfast.doctor.properties_files import Entry
from holdfast.doctor.trees import Tree, branch, branches, first_line, leaf, settings_of, text

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
    return sum(_examine(path, each, maps, result) for each in resources)


def _examine(path: str, resource: Tree, maps: Maps, result: FilesExamined) -> int:
    kind, version = text(resource, "kind"), text(resource, "apiVersion")
    place = Place(path, first_line(resource), f"{kind} {text(resource, 'metadata', 'name')}".strip())
    if version.startswith(STRIMZI):
        return _strimzi(place, kind, resource, result)
    if kind == "ConfigMap":
        return _files_within(place, resource, result)
    if "kafka" in f"{version} {kind}".lower() and kind not in WITHOUT_SETTINGS:
        result.unsupported(place, f"{version} is not known to the doctor")
        return 1
    return examine_containers(_containers(path, place.resource, resource, maps), result)


def _files_within(place: Place, resource: Tree, result: FilesExamined) -> int:
    from holdfast.doctor.recognising import examine_text

    return sum(
        examine_text(place.file, name, each.value, each.line, result)
        for name, each in branch(resource, "data").items()
        if isinstance(each, Entry) and isinstance(each.value, str) and "\n" in each.value
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
    place = Place(path, first_line(tree), owner)
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
        container.environment.append(Setting(text(each, "name"), value, Place(path, first_line(each))))
    for _, mount in branches(tree, "volumeMounts"):
        if text(mount, "name") not in gone:
            container.kept.append(text(mount, "mountPath"))
    return container


# Strimzi


def _strimzi(place: Place, kind: str, resource: Tree, result: FilesExamined) -> int:
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
                at = Place(place.file, replicas.line)
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
                settings["connector.class"] = Setting("class", named.value, Place(place.file, named.line))
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


def _nodes(place: Place, spec: Tree) -> Iterator[Finding]:
    """How many brokers there are, and whether their disks stay."""
    replicas, roles = leaf(spec, "replicas"), leaf(spec, "roles")
    if replicas is not None and replicas.value in (1, 2) and (roles is None or "broker" in roles.value):
        yield finding(
            "HF201",
            Place(place.file, replicas.line, place.resource),
            f"replicas: {replicas.value}: no topic can have more copies than there are brokers",
            fix=Fix("replicas: 3", "settings"),
        )
    for each in (branch(spec, "storage"), *(volume for _, volume in branches(spec, "storage", "volumes"))):
        if (kind := leaf(each, "type")) is not None and kind.value == "ephemeral":
            yield finding(
                "HF212",
                Place(place.file, kind.line, place.resource),
                "storage of type ephemeral: a pod that is replaced begins with an empty disk",
                fix=Fix("type: persistent-claim, with a size", "settings"),
            )
