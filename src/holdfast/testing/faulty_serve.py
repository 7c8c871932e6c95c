"""The process of a broker under test: `holdfast serve` on a disk and a clock that its test commands.

Standard input is a socket to the test. Each line that comes is a JSON object with fields of `Faults`, answered by an
empty line once it holds. When the socket closes the test is over, however it ended, and so is the broker.

    python -m holdfast.testing.faulty_serve '{"data_dir": "data", "listen": ["127.0.0.1:0"]}' '{"free_bytes": 0}'
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.broker.server.run import serve
from holdfast.broker.server.server import Server
from holdfast.errors import HoldfastError
from holdfast.saying import Level
from holdfast.testing.faults import Faults, machine_with

COMMAND_BYTES_MAX = 4096
"""A command is a few numbers, and the next one is sent after the answer to it."""


@dataclass(frozen=True)
class ServeOptions:
    data_dir: str
    listen: list[str]
    overrides: Mapping[str, str] = field(default_factory=dict)
    config_path: None = None
    log_level: Level = Level.INFO
    log_format: str = "text"
    accept_loss: tuple[str, ...] = ()
    serve_unenforced: tuple[str, ...] = ()


def obey(server: Server, faults: Faults, test: socket.socket) -> None:
    """Take what a test says from now on; its end is the broker's."""

    def hear() -> None:
        command = test.recv(COMMAND_BYTES_MAX)
        if not command:
            os.kill(os.getpid(), signal.SIGKILL)
        faults.change(json.loads(command))
        server.clock_moved()
        test.sendall(b"\n")

    server.loop.add_reader(test.fileno(), hear)


def main() -> int:
    options = ServeOptions(**json.loads(sys.argv[1]))
    faults = Faults(**json.loads(sys.argv[2]))
    with socket.socket(fileno=sys.stdin.fileno()) as test:
        try:
            return serve(
                options,
                on_ready=lambda server: obey(server, faults, test),
                machine=machine_with(faults),
            )
        except HoldfastError as error:
            print(f"error: {error}", file=sys.stderr)
            return getattr(error, "exit_code", 2)


if __name__ == "__main__":
    sys.exit(main())
