"""`holdfast man`: the manual page, made of the same help texts that `--help` shows and docs/CLI.md is held against."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from rich.markup import render

from holdfast import __version__
from holdfast.cli import exits
from holdfast.cli.app import COMMANDS, root
from holdfast.cli.options import CommandGroup
from holdfast.cli.serve import SUMMARY, build_parser

app = CommandGroup()


@app.command()
def man() -> None:
    """Print the manual page: `holdfast man | man -l -` shows it."""
    typer.echo(page(), nl=False)


def leaves(title: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The commands below this one, or itself."""
    inner = getattr(command, "commands", None)
    if not inner:
        yield title, command
        return
    for name, part in inner.items():
        yield from leaves(f"{title} {name}", part)


def page() -> str:
    group: Any = typer.main.get_command(root)
    lines = [f'.TH HOLDFAST 1 "" "holdfast {__version__}" "User Commands"', ".SH NAME"]
    lines += [r"holdfast \- move data through Kafka without losing a message", ".SH SYNOPSIS"]
    lines += [".B holdfast", ".I COMMAND", r"[\-\-help] [OPTIONS]", ".SH DESCRIPTION", *_prose(group.help)]
    for task in dict.fromkeys(place.task for place in COMMANDS.values()):
        lines.append(f".SH {_plain(task).upper()}")
        for name, place in COMMANDS.items():
            if place.task == task:
                lines += _serve() if name == "serve" else _command(name, group.get_command(None, name))
    lines.append(".SH EXIT STATUS")
    for code, meaning in re.findall(r"^    (\d+) +(.+)$", exits.__doc__ or "", re.MULTILINE):
        lines += [".TP", f".B {code}", _plain(meaning)]
    return "\n".join(lines) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    for title, each in leaves(f"holdfast {name}", command):
        yield f".SS {_plain(title)}"
        yield from _prose(each.help)
        for parameter in each.params:
            flags = parameter.opts if parameter.opts[0].startswith("-") else []
            value = parameter.metavar or ("" if flags else parameter.name.upper())
            yield from _flag(flags, value, parameter.help or "")
        yield from _prose(each.epilog)


def _serve() -> Iterator[str]:
    parser = build_parser()
    yield ".SS holdfast serve"
    yield from _prose(SUMMARY)
    for action in parser._actions:
        yield from _flag(action.option_strings, str(action.metavar or ""), action.help or "")
    yield from (".nf", *map(_plain, (parser.epilog or "").strip().splitlines()), ".fi")


def _flag(flags: Sequence[str], value: str, text: str) -> Iterator[str]:
    yield ".TP"
    yield " ".join(filter(None, (r"\fB" + _plain(", ".join(flags)) + r"\fR" if flags else "", _plain(value))))
    yield from _prose(text)


def _prose(text: str | None) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", render(text or "").plain.strip())):
        if number:
            yield ".PP"
        yield _plain(" ".join(paragraph.split()))


def _plain(text: str) -> str:
    """As roff reads it back: no backslash, hyphen or first character means more than itself."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    escaped = re.sub(r"[^\x00-\x7f]", lambda match: rf"\[u{ord(match[0]):04X}]", escaped)
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped
