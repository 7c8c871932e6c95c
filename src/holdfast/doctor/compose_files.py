"""docker-compose files: the environment and the volumes of each service, as containers."""

from __future__ import annotations

import os
from collections.abc import Iterator

from holdfast.doctor.client_settings import UNKNOWN, Setting
from holdfast.doctor.containers import Container
from holdfast.doctor.findings import Place
from holdfast.doctor.properties_files import UnreadableFile, read_text
from holdfast.doctor.trees import Tree, branch, branches, first_line, leaf, settings_of, text, texts


def is_compose(document: Tree) -> bool:
    return any(
        {"image", "build", "environment", "extends"} & each.keys()
        for _, each in branches(document, "services")
    )


def compose_containers(path: str, document: Tree) -> Iterator[Container]:
    for name, service in branches(document, "services"):
        place = Place(path, first_line(service), f"service {name}")
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
        yield Setting(name.strip(), value if equals else UNKNOWN, Place(path, line))
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
                Setting(name.strip(), value.strip().strip("\"'"), Place(path, number))
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
