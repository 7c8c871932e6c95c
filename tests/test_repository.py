"""Habits of the repository that a machine can keep: nothing unfinished, nothing too long, maps that are true."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "holdfast"
MODULE_LINES_MAX = 600
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".cfg", ".yml", ".yaml", ".svg", ".json", ".sh", ""}
NOT_OURS = {
    ".git",
    ".venv",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
    ".import_linter_cache",
    "__pycache__",
    ".work",
    "dist",
    "site",
}
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK|NotImpl" r"ementedError)\b")
REGISTRIES = re.compile(
    r"py"
    r"pi\.org|python"
    r"hosted|repo1\.ma"
    r"ven|maven\.apa"
    r"che|proxy\.go"
    r"lang|registry\.np"
    r"mjs|crates\.i"
    r"o\b",
    re.IGNORECASE,
)


READS_ALL = pytest.mark.check
"""`make test` does without the tests that read every file, as it does without the linters."""


def files() -> Iterator[Path]:
    """Every text file that belongs to the repository."""
    pending = [ROOT]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            if path.name in NOT_OURS or path.name.startswith(".venv") or path.name.endswith(".egg-info"):
                continue
            if path.is_dir():
                pending.append(path)
            elif path.suffix in TEXT_SUFFIXES:
                yield path


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def found(pattern: re.Pattern[str], paths: Iterator[Path] | list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


@READS_ALL
def test_nothing_is_left_unfinished() -> None:
    ours = [path for path in files() if path != Path(__file__).resolve()]
    assert len(ours) > 200
    assert found(UNFINISHED, ours) == []


def test_no_module_is_too_long_to_hold_one_idea() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in modules()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MODULE_LINES_MAX
    }
    assert long == {}


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in modules()
        if path.read_text(encoding="utf-8").strip()
        and not path.read_text(encoding="utf-8").lstrip().startswith('"""')
    ]
    assert silent == []


CODE_LINES_MAX = 126_759
"""Lines of code in src and tests/support. A commit that raises the figure says what users get for it."""


@cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """The syntax tree of a module, node by node; several tests go through all of them."""
    return tuple(ast.walk(ast.parse(text)))


def code_lines(text: str) -> int:
    """Lines that are neither blank nor comments nor part of a docstring."""
    documentation = {
        number
        for node in nodes_of(text)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in documentation
        for number, line in enumerate(text.splitlines(), start=1)
    )


def test_code_lines_are_counted_without_blanks_comments_and_docstrings() -> None:
    assert code_lines('"""One\ntwo."""\n\n# why\nx = 1  # one\ny = """a\nb"""\n') == 3


@READS_ALL
@pytest.mark.xdist_group("syntax")
def test_the_code_does_not_grow_unsaid() -> None:
    support = sorted((ROOT / "tests" / "support").rglob("*.py"))
    lines = sum(code_lines(path.read_text(encoding="utf-8")) for path in [*modules(), *support])
    assert lines <= CODE_LINES_MAX


FIELDS_MAX = 25


def fields_of(definition: ast.ClassDef) -> set[str]:
    annotated = {
        each.target.id
        for each in definition.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return annotated | {
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@READS_ALL
@pytest.mark.xdist_group("syntax")
def test_no_class_holds_more_fields_than_one_idea_needs() -> None:
    """The tables of settings in `config` excepted."""
    large = {
        f"{path.relative_to(ROOT)}: {node.name}": count
        for path in modules()
        if "src/holdfast/config" not in str(path)
        for node in nodes_of(path.read_text(encoding="utf-8"))
        if isinstance(node, ast.ClassDef) and (count := len(fields_of(node))) > FIELDS_MAX
    }
    assert large == {}


PROGRAMS = {
    "audit/text.py": "print_report writes to the stream that it is given",
    "broker/server/worker_main.py": "a process of its own",
    "client/exit_guard.py": "a process that lost messages ends with an exit code that is not 0",
    "client/process.py": "the end of a forked child; what clients say where nobody has set logging up",
    "config/descriptions.py": "a program: the tables of CONFIGURATION.md",
    "pipeline/class_archive.py": "a program: an archive of Java classes",
    "pipeline/cluster/worker_start.py": "the start of a Spark worker",
    "pipeline/java.py": "a program: finds or installs Java",
}
"""Modules that print or end the process, and why they may."""


@READS_ALL
@pytest.mark.xdist_group("syntax")
def test_only_the_command_line_prints_and_ends_the_process() -> None:
    speaking = set()
    for path in modules():
        package, _, name = str(path.relative_to(ROOT)).removeprefix("src/holdfast/").partition("/")
        if not path.is_relative_to(ROOT / "src/holdfast") or package in ("cli", "demo", "testing"):
            continue
        for node in nodes_of(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "print",
                "sys.exit",
                "os._exit",
                "exit",
            ):
                speaking.add(f"{package}/{name}".rstrip("/"))
    assert speaking == PROGRAMS.keys()


@READS_ALL
def test_no_registry_stands_in_any_file() -> None:
    assert found(REGISTRIES, files()) == []


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_requirements_are_pinned_with_hashes_and_name_no_index(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for line in text.splitlines():
        assert not re.match(
            r"\s*(-i|-f|--index-url|--extra-index-url|--find-links|--trusted-host)\b", line
        ), line
        assert "://" not in line, line
        if line and not line[0].isspace() and not line.startswith("#"):
            assert re.match(r"^[a-zA-Z0-9._-]+(\[[a-z,]+\])?==\S+", line), line
    requirements = re.split(r"\n(?=[a-zA-Z0-9])", text)[1:]
    assert requirements
    assert all("--hash=sha256:" in requirement for requirement in requirements)


# docs/ARCHITECTURE.md


def test_the_table_of_packages_names_every_package_and_no_other() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("## Packages")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([^`]+)/`", row)]
    packages = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py")} - {"."}
    assert sorted(named) == sorted(packages)


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text)
    assert len(named) > 5
    assert [name for name in named if not (PACKAGE / name).exists()] == []


# The documents


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        assert place.exists(), f"{path.name} links to {target}"
        if anchor and place.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", place.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{path.name} links to {target}"


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_tests_that_documents_name_exist(path: Path) -> None:
    for name in re.findall(r"`(tests/[^`\s]*)`", path.read_text(encoding="utf-8")):
        assert list(ROOT.glob(name.partition("::")[0].rstrip("/"))), f"{path.name} names {name}"


def slug(heading: str) -> str:
    """The anchor a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_decisions_are_numbered_and_tell_context_choice_and_consequences() -> None:
    decisions = sorted((ROOT / "docs" / "adr").iterdir())
    numbers = [int(path.name[:4]) for path in decisions]
    assert numbers[0] == 1
    assert numbers == sorted(set(numbers)), "a number is given once"
    for number, path in zip(numbers, decisions, strict=True):
        assert re.fullmatch(rf"{number:04d}-[a-z0-9]+(-[a-z0-9]+)*\.md", path.name), path.name
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {number}. "), path.name
        parts = ["**Context.**", "**Choice.**", "**Consequences.**"]
        places = [text.find(part) for part in parts]
        assert -1 not in places, path.name
        assert places == sorted(places), path.name
        assert len(text.splitlines()) < 60, f"{path.name} is longer than a page"
