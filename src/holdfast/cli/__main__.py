"""The entry point: `holdfast …` and `python -m holdfast.cli …`."""

from __future__ import annotations

import signal
import sys

from holdfast.platforms import refusal


def main() -> None:
    if why := refusal():
        print(f"holdfast: {why}", file=sys.stderr)
        sys.exit(2)  # as for whatever must be mended before another start
    arguments = sys.argv[1:]
    # kio must not find hypothesis, with which it registers its types wherever that is installed: it takes long.
    for module in ("hypothesis", "hypothesis.strategies"):
        sys.modules.setdefault(module, None)  # type: ignore[arg-type]
    from holdfast.cli import exits

    exits.take_standard_streams()
    if arguments[:1] == ["serve"]:
        # The broker must be ready in a fraction of a second: nothing here imports typer or rich.
        from holdfast.cli.serve import serve_command

        sys.exit(exits.run(lambda: serve_command(arguments[1:])))
    # A command that is ended says so by its exit code, as it does when Ctrl-C ends it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from holdfast.cli.app import run_command

    sys.exit(exits.run(lambda: run_command(arguments)))


if __name__ == "__main__":
    main()
