"""Options that several commands share: one name, one help text, one default."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from holdfast.cli.output import Output

if TYPE_CHECKING:
    from holdfast.cli.client import Connection

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_BOOTSTRAP_SERVER = "127.0.0.1:9092"
DEFAULT_CONNECT_TIMEOUT_MS = 10_000


def option(metavar: str, text: str, *names: str, **settings: Any) -> Any:
    """An option with a value. It is called as its parameter, unless it is given other names."""
    return typer.Option(*names, metavar=metavar, help=text, **settings)


def choice(text: str, *names: str) -> Any:
    """An option whose values are those of an enumeration, in upper or lower case."""
    return typer.Option(*names, case_sensitive=False, help=text)


def flag(text: str, *names: str) -> Any:
    """An option without a value, and without a form that takes it back."""
    return typer.Option(*names, help=text)


CommandConfigOption: TypeAlias = Annotated[
    str | None, option("FILE", "A properties file for the client (security, time-outs…).")
]
ConnectTimeoutOption: TypeAlias = Annotated[
    int, option("MS", "Give up, with exit code 3, when no broker has answered after this long.", min=1)
]
OutputOption: TypeAlias = Annotated[Output, choice("For people (table) or for programs (json).", "--output")]


@dataclass(frozen=True)
class ServerFlags:
    """Which cluster a command asks, and how it connects."""

    bootstrap_server: Annotated[
        str, option("HOST:PORT,…", "The broker or brokers to ask first.", envvar="HOLDFAST_BOOTSTRAP_SERVER")
    ] = DEFAULT_BOOTSTRAP_SERVER
    command_config: CommandConfigOption = None
    connect_timeout_ms: ConnectTimeoutOption = DEFAULT_CONNECT_TIMEOUT_MS

    def connect(self, properties: Mapping[str, str] | None = None) -> Connection:
        """`properties` are settings of the client that win over the file's."""
        from holdfast.cli.client import Connection, read_properties, translate

        given = read_properties(self.command_config) if self.command_config else {}
        given |= properties or {}
        given.pop("bootstrap.servers", None)
        return Connection(self.bootstrap_server, self.connect_timeout_ms, translate(given))


SERVER: Final = ServerFlags()


class CommandGroup(typer.Typer):
    """Commands whose help is their docstring and whose options may stand together.

    A parameter that is a dataclass has its fields for options.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(add_completion=False, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        def add(function: F) -> F:
            # rich would keep the line breaks of a docstring.
            paragraphs = (inspect.getdoc(function) or "").split("\n\n")
            help_text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
            register = super(CommandGroup, self).command(name, **{"help": help_text, **settings})
            register(_with_single_options(function))
            return function

        return add


def _named(name: str, annotation: Any) -> Any:
    """The annotation of a parameter, whose option is called as the parameter unless it has a name."""
    kind, *metadata = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    for place, info in enumerate(metadata):
        if isinstance(info, OptionInfo) and info.default is ... and not info.param_decls:
            metadata[place] = named = copy(info)
            named.param_decls = (f"--{name.replace('_', '-')}",)
    return operator.getitem(Annotated, (kind, *metadata)) if metadata else kind


def _with_single_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as typer takes it: one parameter for each option."""
    signature = inspect.signature(function, eval_str=True)
    single: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if not (isinstance(kind, type) and is_dataclass(kind)):
            single.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(kind, include_extras=True)
        groups[parameter.name] = (kind, [each.name for each in fields(kind)])
        single += [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name]
            )
            for each in fields(kind)
        ]

    @wraps(function)
    def call(**given: Any) -> Any:
        for name, (kind, names) in groups.items():
            given[name] = kind(**{each: given.pop(each) for each in names})
        return function(**given)

    single = [each.replace(annotation=_named(each.name, each.annotation)) for each in single]
    call.__signature__ = signature.replace(parameters=single)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in single}
    return call


def examples(*lines: str) -> str:
    """The end of a --help text; rich keeps a line break only where there is an empty line."""
    return "\n\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in lines)])


class OptionalValues(TyperCommand):
    """A command some of whose options may stand without a value, which is then empty.

    Kafka's tools take `--state` as well as `--state Stable,Empty`; typer's options always have a value or never.
    """

    flags: Sequence[str] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        completed: list[str] = []
        for index, argument in enumerate(args):
            completed.append(argument)
            if argument in self.flags and (index + 1 == len(args) or args[index + 1].startswith("-")):
                completed.append("")
        return super().parse_args(ctx, completed)
