"""A document's entries as the tree they came from: what compose files and Kubernetes resources are looked up in.

A list is a branch whose names are its numbers; a list of scalars is one leaf. Looking up what is not there gives an
empty branch or None, never an error: a file may have anything anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Union

from holdfast.doctor.client_settings import Setting, shown
from holdfast.doctor.findings import Place
from holdfast.doctor.properties_files import Entry

Tree = dict[str, Union["Tree", Entry]]


def tree_of(entries: Sequence[Entry]) -> Tree:
    root: Tree = {}
    for entry in entries:
        here = root
        for name in entry.path[:-1]:
            below = here.get(name)
            if not isinstance(below, dict):
                below = here[name] = {}
            here = below
        here[entry.path[-1]] = entry
    return root


def branch(tree: Tree, *names: str) -> Tree:
    for name in names:
        below = tree.get(name)
        tree = below if isinstance(below, dict) else {}
    return tree


def branches(tree: Tree, *names: str) -> Iterator[tuple[str, Tree]]:
    """The branches below one, with their names."""
    return ((name, each) for name, each in branch(tree, *names).items() if isinstance(each, dict))


def leaf(tree: Tree, *names: str) -> Entry | None:
    below = branch(tree, *names[:-1]).get(names[-1])
    return below if isinstance(below, Entry) else None


def text(tree: Tree, *names: str) -> str:
    found = leaf(tree, *names)
    return "" if found is None or found.value in ({}, None) else shown(found.value)


def texts(tree: Tree, *names: str) -> Iterator[tuple[str, int]]:
    """The items of a list of scalars, or the one scalar there is, with their lines."""
    found = leaf(tree, *names)
    if found is not None and isinstance(found.value, list):
        yield from zip(map(shown, found.value), found.lines, strict=True)
    elif found is not None and found.value not in ({}, None):
        yield shown(found.value), found.line


def first_line(tree: Tree) -> int:
    """The line before which a branch begins, as near as its leaves tell."""
    lines = [each.line if isinstance(each, Entry) else first_line(each) for each in tree.values()]
    return min((line for line in lines if line), default=0)


def settings_of(tree: Tree, file: str) -> dict[str, Setting]:
    """The leaves below a branch, by their dotted names."""
    settings: dict[str, Setting] = {}
    for name, each in tree.items():
        if isinstance(each, Entry):
            settings[name] = Setting(name, each.value, Place(file, each.line))
        else:
            settings |= {
                f"{name}.{rest}": Setting(f"{name}.{rest}", inner.value, inner.place)
                for rest, inner in settings_of(each, file).items()
            }
    return settings
