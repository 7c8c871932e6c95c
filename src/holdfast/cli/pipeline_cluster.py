"""`holdfast pipeline package`: the archive of Python parts that a cluster's workers run a pipeline with."""

from __future__ import annotations

import sys
from typing import Annotated

from holdfast.cli.options import CommandGroup, OutputOption, examples, option
from holdfast.cli.output import Output, print_json
from holdfast.cli.pipeline_shared import require_extra

app = CommandGroup()


@app.command(
    epilog=examples(
        "holdfast pipeline package", "holdfast pipeline package --to parts.tar.gz --with scikit-learn"
    )
)
def package(
    to: Annotated[str | None, option("FILE", "Where to put it, a .tar.gz (default: only the cache).")] = None,
    more: Annotated[
        list[str] | None,
        option(
            "NAME",
            "An installed distribution that Python steps use, with what it requires; may be repeated.",
            "--with",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Pack the Python parts that workers of a cluster need into one archive: holdfast, its libraries with their
    native code, and the compiled decoders. `run --master` does it by itself. It is made for this Python's minor
    version and this kind of system, kept, and made again only when something changed.
    """
    from holdfast.pipeline.cluster.packaging import cache_directory, make_package, place_package
    from holdfast.pipeline.session import require_spark

    require_extra()
    require_spark()
    made = make_package(cache_directory(), more=more or (), progress=_show if sys.stderr.isatty() else None)
    path = made.path if to is None else place_package(made, to)
    if output is Output.JSON:
        print_json(
            {"path": path, "bytes": made.bytes, "unpacked_bytes": made.unpacked_bytes, **made.manifest}
        )
        return
    made_for = made.manifest["made_for"]
    print(
        f"{path}: {made.bytes / 1e6:,.0f} MB ({made.unpacked_bytes / 1e6:,.0f} MB unpacked, {made.files:,} files), "
        f"for {made_for['implementation']} {made_for['python']} on {made_for['system']}-{made_for['machine']}"
        f"{'' if made.is_new else ', from the cache'}"
    )


def _show(done: int, total: int) -> None:
    end = "\r" if done < total else "\n"
    print(f"packing {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", end=end, file=sys.stderr, flush=True)
