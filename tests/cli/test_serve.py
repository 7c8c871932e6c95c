from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from holdfast.cli.serve import ServeOptions, parse_options
from holdfast.errors import ConfigError

Run = Callable[..., subprocess.CompletedProcess[bytes]]


def test_the_command_line_becomes_options() -> None:
    assert parse_options([]) == ServeOptions(None, [], None, {})
    line = "--data-dir d --listen 127.0.0.1:0 --listen [::1]:0 --config server.properties"
    assert parse_options([*line.split(), "--override", "a.b=c=d", "--override", "e="]) == ServeOptions(
        "d", ["127.0.0.1:0", "[::1]:0"], "server.properties", {"a.b": "c=d", "e": ""}
    )
    given = parse_options(["--cluster-id=-x", "--accept-loss=-dir", "--accept-loss", "t-0"])
    assert given == ServeOptions(overrides={"holdfast.cluster.id": "-x"}, accept_loss=["-dir", "t-0"])
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parse_options(["--override", "nonsense"])


def test_serving_pays_for_neither_typer_nor_rich_nor_the_client() -> None:
    program = (
        "import sys\n"
        "from holdfast.cli.__main__ import main\n"
        "sys.argv = ['holdfast', 'serve', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "import holdfast.broker.server.run\n"
        "heavy = {'typer', 'rich', 'click', 'confluent_kafka', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "--data-dir" in result.stdout


def test_serve_stands_among_the_commands(run_anywhere: Run) -> None:
    listed = run_anywhere("--help").stdout.decode()
    for command in ("serve", "topics", "configs", "produce", "consume", "dump-log", "version"):
        assert f" {command} " in listed
    assert "Exit codes" in listed


def test_the_version_is_told(run_anywhere: Run) -> None:
    from holdfast import __version__

    assert run_anywhere("--version").stdout.decode() == f"holdfast {__version__}\n"
    assert run_anywhere("version").stdout.decode().startswith(f"holdfast {__version__} (Python ")
