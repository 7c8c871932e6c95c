"""From the bare wheel every command does what it can; for what it cannot do, one line says which extra to install."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.support.wheels import ROOT, Installed

from holdfast.cli.exits import EXTRAS

pytestmark = [pytest.mark.check, pytest.mark.xdist_group("wheel")]

Install = Callable[..., Installed]
MODULES = {"attrs": "attr", "googleapis-common-protos": "google", "protobuf": "google"}
"""Where a distribution has another name than what is imported."""
SCRIPT = """\
import sys
import typer
from holdfast.cli import exits
from holdfast.cli.app import COMMANDS, LazyGroup, root, run_command
group = typer.main.get_command(root)
for name in COMMANDS:
    group.get_command(None, name)
for line in sys.stdin.read().splitlines():
    code = exits.run(lambda: run_command(line.split()))
    print(f"== {line} == {code}", flush=True)
    print(f"== {line} ==", file=sys.stderr, flush=True)
"""
WORK = (
    "lab list",
    "pipeline init mine",
    "pipeline schema",
    "sink migrate --database it.sqlite",
    "generate orders --to - --count 1",
    "version",
    "man",
    "bugreport mine/orders.yaml",
)
INCOMPLETE = "doctor mine/orders.yaml"
LACK = {
    "audit topics a b": "reader",
    "audit spool spool --topic a": "reader",
    "audit group g --sink parquet:out --match id=value.id": "reader",
    "audit pipeline mine/orders.yaml": "spark",
    "demo": "spark",
    "export orders --output o.parquet": "reader",
    "lab run HF401": "spark",
    "pipeline check mine/orders.yaml": "spark",
    "pipeline run mine/orders.yaml": "spark",
    "pipeline state show mine/orders.yaml": "spark",
    "pipeline status mine/orders.yaml": "spark",
    "sink migrate --database postgresql://127.0.0.1:1/none": "postgres",
    "audit verify . --public-key key.pem": "sign",
    "trace a:0@0": "reader",
    "trace a:0@0 mine/orders.yaml": "spark",
}
PROGRAMS = {
    "from holdfast import reader; reader.read('127.0.0.1:1', 'orders')": "reader",
    "from holdfast.pipeline import Pipeline; Pipeline('orders').run()": "spark",
    "from holdfast.client import Tracing; Tracing()": "otel",
    "from holdfast.client.database import postgres": "postgres",
}


def test_the_bare_wheel(install: Install, tmp_path: Path) -> None:
    bare = install()
    done = subprocess.run(
        [bare.python, "-c", SCRIPT],
        cwd=tmp_path,
        env=bare.environment(),
        input="\n".join((*WORK, INCOMPLETE, *LACK)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    ended = dict(re.findall(r"^== (.*) == (\d+)$", done.stdout, re.MULTILINE))
    expected = {**dict.fromkeys(WORK, "0"), INCOMPLETE: "4", **dict.fromkeys(LACK, "3")}
    assert ended == expected, done.stderr
    assert re.search(r"commit ([0-9a-f]{40}\+?|unknown), holdfast-\S+-py3-none-any\.whl\)", done.stdout)
    said = {line: text for text, line in re.findall(r"((?:(?!== ).*\n)*)== (.*) ==\n", done.stderr)}
    for line, extra in LACK.items():
        assert re.fullmatch(rf"holdfast: .*: pip install 'holdfast\[{extra}\]'\n", said[line]), said[line]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_with_the_bare_wheel_is_told_too(install: Install, program: str) -> None:
    bare = install()
    done = subprocess.run(
        [bare.python, "-c", program], env=bare.environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.endswith(f"pip install 'holdfast[{PROGRAMS[program]}]'"), done.stderr


def test_what_a_definition_alone_asks_for_has_the_name_of_what_is_installed(
    install: Install, tmp_path: Path
) -> None:
    source = "{topics: orders, value: {format: protobuf, schema_file: order.proto}}"
    (tmp_path / "order.proto").write_text('syntax = "proto3"; message Order { int64 id = 1; }')
    (tmp_path / "orders.yaml").write_text(
        f"pipeline: orders\nsource: {source}\nsinks: [parquet: {{path: out}}]\n"
    )
    reader = install("reader")
    done = subprocess.run(
        [reader.bin / "holdfast", "pipeline", "check", "--no-spark", "orders.yaml"],
        cwd=tmp_path,
        env=reader.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    expected = "holdfast: this needs protobuf, which is not installed: pip install 'holdfast[spark]'\n"
    assert done.stderr == expected


def test_every_extra_is_known_by_what_it_brings() -> None:
    """So that whatever is missing is named with the extra that brings it."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought: dict[str, set[str]] = {}
    for extra in set(EXTRAS.values()):
        for line in declared[extra]:
            name = Requirement(line).name
            if name != "holdfast":
                brought.setdefault(MODULES.get(name, name), set()).add(extra)
    assert EXTRAS.keys() == brought.keys()
    assert all(extra in brought[module] for module, extra in EXTRAS.items())


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "guides").glob("*.md")), ids=lambda each: each.name)
def test_a_guide_names_the_extras_of_its_programs(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"holdfast\[(\w+)\]", text))
    if "spark" in named:
        named |= {"reader", "postgres"}  # they come with it
    for program in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for module in imported(program):
            extra = "registry" if "schema_registry" in module else EXTRAS.get(module.partition(".")[0])
            extra = "spark" if module.startswith(("holdfast.pipeline", "holdfast.audit.pipeline")) else extra
            assert extra is None or extra in named, (
                f"{module} needs holdfast[{extra}], which {page.name} does not say"
            )


def imported(program: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
    return found
