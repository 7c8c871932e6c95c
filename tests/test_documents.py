"""Documents that state facts are held against what they speak of: docs/OWNERS.md names owner and test of each.

`python -m tests.test_documents` prints the tables of docs/ERRORS.md.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.errors import ExitCode

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "holdfast"
README_LINES_MAX = 120

# README.md


def test_readme_is_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_figures_of_readme_are_those_of_the_results() -> None:
    measured = {row[0]: row[1:4] for row in rows((ROOT / "bench" / "RESULTS.md").read_text())}
    section = (ROOT / "README.md").read_text().partition("## How fast")[2].partition("\n## ")[0]
    _, _, *shown = rows(section)
    for measure, *figures in shown:
        assert measured[measure] == figures, measure
    won = [float(ratio.rstrip("×")) > 1 for *_, ratio in shown]
    assert won == [True, False], "one row where we win, and one where we lose; more is better in both"


# docs/ERRORS.md

AREAS = {
    "": "Everywhere",
    "client": "Clients",
    "admin": "Asking brokers",
    "reader": "Reading topics",
    "broker": "The broker",
    "config": "Settings",
    "pipeline": "Pipelines",
    "audit": "Audits",
    "doctor": "The doctor",
    "graduate": "The hand-over to Apache Kafka",
    "manifest": "Manifests",
    "backup": "Backups",
    "lab": "The lab",
    "demo": "The demo",
    "cli": "Commands",
    "testing": "Brokers and fakes for tests",
}
"""Parts of the package with a heading each, in the order of the page."""


CODES = {**ExitCode.__members__, "ENVIRONMENT": ExitCode.CANNOT_CONNECT}
"""By the names that classes give them."""


CLASS = re.compile(r"^class (\w+)\(([\w., ]+)\)", re.MULTILINE)
ROOT_ERROR = "holdfast.errors.HoldfastError"


class ErrorClass(NamedTuple):
    bases: list[str]
    """With their modules, where they are ours."""
    meaning: str
    exit_code: int | None


@cache
def error_classes() -> dict[str, ErrorClass]:
    """Every exception below `HoldfastError` with its module, read from the sources: nothing is imported, so no extra is
    needed. Some names are given twice, so that a base is looked up as its module sees it."""
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    maybe = {"HoldfastError"}
    classes = [found for text in texts.values() for found in CLASS.findall(text)]
    while more := {name for name, above in classes if maybe & set(re.findall(r"\w+", above))} - maybe:
        maybe |= more
    found: dict[str, ErrorClass] = {}
    for path, text in texts.items():
        if maybe.isdisjoint(name for name, _ in CLASS.findall(text)):
            continue  # most files: reading them as Python takes seconds
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(text)
        seen = {
            each.asname or each.name: f"{node.module}.{each.name}"
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }
        definitions = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        seen |= {node.name: f"{module}.{node.name}" for node in definitions}
        for node in definitions:
            bases = [seen.get(name := ast.unparse(base), name) for base in node.bases]
            meaning = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            found[seen[node.name]] = ErrorClass(bases, meaning, own_exit_code(node))
    return {
        name: each
        for name, each in found.items()
        if ROOT_ERROR in ancestors(name, found) and "._" not in name
    }


def own_exit_code(node: ast.ClassDef) -> int | None:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "exit_code":
            value = ast.unparse(statement.value).removeprefix("ExitCode.")
            return int(value) if value.isdecimal() else CODES[value]
    return None


def exit_code(name: str, classes: dict[str, ErrorClass]) -> int:
    """As `holdfast.cli.exits.explain` has it."""
    lineage = list(ancestors(name, classes))
    own = next((code for each in lineage if (code := classes[each].exit_code) is not None), None)
    if own is not None:
        return own
    return ExitCode.USAGE if "holdfast.errors.UsageError" in lineage else ExitCode.FINDINGS


def ancestors(name: str, classes: dict[str, ErrorClass]) -> Iterator[str]:
    """The class and what it is made of, each base before its own bases."""
    pending = [name]
    while pending:
        each = pending.pop(0)
        if each in classes:
            yield each
            pending += classes[each].bases


def error_tables() -> str:
    classes = error_classes()
    by_area: dict[str, list[str]] = defaultdict(list)
    for name in classes:
        by_area[name.split(".")[1].replace("errors", "")].append(name)
    assert by_area.keys() <= AREAS.keys(), by_area.keys() - AREAS.keys()
    lines = []
    for area, title in AREAS.items():
        if not by_area[area]:
            continue
        lines += [f"## {title}", "", "| exception | is a | exit code | meaning |", "|---|---|---|---|"]
        for name in sorted(by_area[area], key=lambda each: each.rpartition(".")[2]):
            bases = ", ".join(f"`{base.rpartition('.')[2]}`" for base in classes[name].bases)
            meaning = classes[name].meaning.replace("|", "\\|")
            lines.append(f"| `{name}` | {bases} | {exit_code(name, classes):d} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def test_the_reference_of_errors_names_every_exception() -> None:
    document = (ROOT / "docs" / "ERRORS.md").read_text()
    assert document.endswith(error_tables()), "run: python -m tests.test_documents"


def test_the_program_of_the_reference_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "ERRORS.md").read_text(), re.DOTALL | re.M
    )
    exec(program, {})
    assert "unsafe=('acks',)" in capsys.readouterr().out


def test_every_exception_says_what_it_means() -> None:
    assert [name for name, each in error_classes().items() if not each.meaning] == []


def test_exit_codes_of_the_reference_are_those_of_the_command_line() -> None:
    from holdfast.cli.exits import CannotConnect, CommandFailed, explain
    from holdfast.errors import ConfigError, CorruptLog, NotInstalled
    from holdfast.pipeline.core.failures import DefinitionWrong, SinkLost

    classes = error_classes()
    for kind in (
        CannotConnect,
        CommandFailed,
        ConfigError,
        CorruptLog,
        NotInstalled,
        DefinitionWrong,
        SinkLost,
    ):
        assert exit_code(f"{kind.__module__}.{kind.__name__}", classes) == explain(kind("why"))[1], kind


# every page


def pages() -> list[Path]:
    """Decisions and the log of changes speak of what was."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(page for page in found if page.parent.name != "adr")]


def test_settings_metrics_files_and_modules_of_ours_that_a_page_names_exist() -> None:
    """Whatever begins with `holdfast` or `kafka_` is a setting, a metric, a module, or a word of the code's own."""
    from holdfast.config.catalog import BROKER

    words = {word.strip(".") for word in re.findall(r"\b(?:holdfast|kafka)[\w.]+", sources())}
    metrics = rows((ROOT / "docs" / "METRICS.md").read_text())  # which another test holds against the code
    families = {row[0].strip("`") for row in metrics if len(row) == 4}
    for page in pages():
        text = page.read_text()
        if page.name == "METRICS.md":  # names what other exporters have
            continue
        named = set(
            re.findall(r"`(holdfast\.[a-z][a-z._]+[a-z]|(?:holdfast|kafka)_[a-z_]+)(?:\{[^`]*)?`", text)
        )
        wrong = [
            name
            for name in named - families - BROKER.keys()
            if not is_module(name)
            and name not in words
            and re.sub("_(?:bucket|count|sum)$", "", name) not in families
        ]
        assert wrong == [], f"{page.name} names {wrong}"


def is_module(name: str) -> bool:
    """A module of ours, or what one defines."""
    path = PACKAGE.parent / name.replace(".", "/")
    outer, _, inner = name.rpartition(".")
    files = (PACKAGE.parent / f"{outer.replace('.', '/')}{end}" for end in (".py", "/__init__.py"))
    defined = re.compile(rf"\b{inner}\b")
    return (
        path.is_dir()
        or path.with_suffix(".py").exists()
        or any(file.exists() and defined.search(file.read_text()) is not None for file in files)
    )


def test_exit_codes_and_variables_that_a_page_names_exist() -> None:
    from holdfast.client.exit_guard import EXIT_UNDELIVERED

    code = sources() + "".join(path.read_text() for path in (ROOT / "tests" / "audit").rglob("*.py"))
    for page in pages():
        text = page.read_text()
        codes = {
            int(number)
            for number in re.findall(r"\bexit(?:s with)?(?: codes?)? `?(\d+)\b", text, re.IGNORECASE)
        }
        assert codes <= {EXIT_UNDELIVERED, *map(int, ExitCode)}, (
            f"{page.name} names an exit code that nothing ends with"
        )
        for name in set(re.findall(r"\bHOLDFAST_[A-Z_]+[A-Z]\b", text)):
            assert name in code, f"{page.name} names {name}"


# docs/FORMAT.md, docs/INVARIANTS.md, docs/what-proven-means.md, docs/concepts.md


@cache
def sources() -> str:
    return "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))


def test_files_on_disk_that_the_formats_name_are_known_to_the_code() -> None:
    code = sources()
    table = rows((ROOT / "docs" / "FORMAT.md").read_text())
    names = [
        name for row in table for name in re.findall("`([^`]+)`", row[0]) if "." in name and "--" not in name
    ]
    assert len(names) > 30
    for name in names:
        for part in re.split(r"<[^>]*>|[*/…]|topic-N", name):
            assert not re.search("[a-z]{3}", part) or part.strip(".-") in code, f"nothing writes {name}"


def test_code_that_keeps_an_invariant_exists() -> None:
    rules = [row for row in rows((ROOT / "docs" / "INVARIANTS.md").read_text()) if row[0].isdecimal()]
    assert len(rules) > 90
    files = [f"/{path.relative_to(ROOT)}" for path in PACKAGE.rglob("*.py")]
    for number, _, keepers, *_ in rules:
        for name in re.findall(r"`([a-z_/]+\.py)`", keepers):
            assert any(file.endswith(f"/{name}") for file in files), f"rule {number} names {name}"


def test_verdicts_and_their_exit_codes_are_those_of_the_audit() -> None:
    from holdfast.audit.model import Verdict

    text = (ROOT / "docs" / "what-proven-means.md").read_text()
    told = re.findall(r"\*\*(\w+)(?: since written)?\*\* \((?:exit )?(\d)", text)
    assert {word.lower(): int(code) for word, code in told} == {
        each.value: each.exit_code for each in Verdict
    }
    concepts = (ROOT / "docs" / "concepts.md").read_text()
    assert all(f"*{each.value}*" in concepts for each in Verdict)


def test_pictures_name_files_that_exist_and_fetch_nothing() -> None:
    pictures = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    concepts = (ROOT / "docs" / "concepts.md").read_text()
    assert pictures
    for picture in pictures:
        text = picture.read_text()
        assert f"(pictures/{picture.name})" in concepts
        names = re.findall(r"[a-z_]+/[a-z_/]+\.py", text)
        assert names
        assert [name for name in names if not (PACKAGE / name).exists()] == []
        assert re.findall(r"(?:href|src|url)\W+http|<script|<style", text) == []


# docs/OWNERS.md


def owned() -> list[tuple[str, list[str], list[str]]]:
    """Pages, which may be a pattern, with their owners and tests."""
    _, _, *table = rows((ROOT / "docs" / "OWNERS.md").read_text())
    return [
        (page.strip("`"), re.findall("`([^`]+)`", owners), re.findall("`([^`]+)`", tests))
        for page, _, owners, tests in table
    ]


def test_every_page_has_an_owner_in_the_tree_and_a_test_that_reads_it() -> None:
    table = owned()
    pages = [
        str(each.relative_to(ROOT)) for each in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    ]
    unowned = [page for page in pages if not any(fnmatch(page, pattern) for pattern, _, _ in table)]
    assert unowned == []
    for pattern, owners, tests in table:
        assert [page for page in pages if fnmatch(page, pattern)], f"there is no page {pattern}"
        assert owners, pattern
        assert [each for each in owners if not list(ROOT.glob(each))] == [], pattern
        assert tests, pattern
        name = pattern.removeprefix("docs/").partition("*")[0].rstrip("/").rpartition("/")[2]
        for test in tests:
            read = (ROOT / test).read_text()
            assert name in read or name.removesuffix(".md") in read, f"{test} does not speak of {name}"


if __name__ == "__main__":
    print(error_tables(), end="")
