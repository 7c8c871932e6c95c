"""How `serve` stands in `holdfast --help`; the command itself is `cli/serve.py`, reached without typer."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.exceptions import Exit

from holdfast.cli.options import CommandGroup
from holdfast.cli.serve import SUMMARY, build_parser, serve_command

app = CommandGroup()


class ServeCommand(TyperCommand):
    """Its flags are argparse's; a shell is told of them as if they were typer's."""

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        return _with_flags().shell_complete(ctx, incomplete)


def _with_flags() -> Any:
    def serve(**_: Any) -> None: ...

    flags = [
        inspect.Parameter(
            action.dest,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option(*action.option_strings, help=action.help)],
        )
        for action in build_parser()._actions
        if action.dest != "help"
    ]
    serve.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    serve.__annotations__ = {each.name: each.annotation for each in flags}
    same = typer.Typer(add_completion=False)
    same.command()(serve)
    return typer.main.get_command(same)


@app.command(
    cls=ServeCommand,
    help=SUMMARY,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def serve(context: typer.Context) -> None:
    raise Exit(serve_command(context.args) or 0)
