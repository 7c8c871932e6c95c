"""`holdfast backup`: copy a running node's directories to a repository of backups."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.options import CommandGroup, OutputOption, examples, option
from holdfast.cli.output import Output, print_json
from holdfast.errors import UsageError

app = CommandGroup()


@app.command(epilog=examples("holdfast backup /var/lib/holdfast /mnt/backups/orders --keep 7"))
def backup(
    data_dir: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="The node's data directory; several, as in log.dirs, with commas between."
        ),
    ],
    to: Annotated[str, typer.Argument(metavar="TO", help="The directory that holds this node's backups.")],
    keep: Annotated[
        int | None, option("N", "Remove all but the newest N backups afterwards. Default: keep all.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Back up a node, running or stopped, to a directory: everything that is flushed.

    Sealed segments are copied once; a backup that was interrupted goes on where it was.
    """
    from holdfast.backup.copying import Copier
    from holdfast.backup.repository import Repository

    if keep is not None and keep < 1:
        raise UsageError(f"--keep {keep}: at least one backup must stay")
    repository = Repository(to)
    done, copied_bytes = Copier(repository, typer.echo).back_up(
        [each for each in data_dir.split(",") if each]
    )
    gone: list[int] = []
    if keep is not None:
        with repository.locked():
            gone = repository.remove(keep)
    if output is Output.JSON:
        print_json(
            {
                "backup": done.number,
                "partitions": len(done.partitions),
                "bytes": done.bytes,
                "copied_bytes": copied_bytes,
                "removed": gone,
            }
        )
        return
    print(
        f"backup {done.number} in {to}: {len(done.partitions)} partitions, {done.bytes:,} bytes, of which "
        f"{copied_bytes:,} were copied now"
    )
    if gone:
        print(f"removed backups {', '.join(map(str, gone))}")
