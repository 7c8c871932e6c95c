"""`holdfast restore`: log directories from a backup, and what outside is ahead of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import Exit

from holdfast.cli.options import CommandGroup, OutputOption, examples, flag, option
from holdfast.cli.output import Output, print_json
from holdfast.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from holdfast.backup.repository import Repository

app = CommandGroup()


@app.command(
    epilog=examples(
        "holdfast restore /mnt/backups/orders /var/lib/holdfast --pipeline orders.yaml --spool ./spool"
    )
)
def restore(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The directory that holds the backups.")],
    data_dir: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR",
            help="Where to: empty, or not there yet; as many as were backed up, with commas between.",
        ),
    ] = None,
    backup: Annotated[int | None, option("N", "Which backup. Default: the newest.")] = None,
    skip_offsets: Annotated[
        int,
        option(
            "N",
            "Leave out so many offsets behind the restored end of each partition: none is given twice.",
            min=0,
            max=2_000_000_000,
        ),
    ] = 0,
    pipeline: Annotated[
        list[str] | None, option("FILE", "A pipeline whose sinks may be ahead; may be repeated.")
    ] = None,
    spool: Annotated[
        list[str] | None, option("DIR", "A producer's spool that may be ahead; may be repeated.")
    ] = None,
    list_: Annotated[bool, flag("List the backups, and restore nothing.", "--list")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make data directories from a backup, every byte verified.

    Exit code 1 when something outside is ahead of what was restored: it is named, with what to do.
    """
    from holdfast.backup.outside import beyond_restored
    from holdfast.backup.repository import Repository
    from holdfast.backup.restoring import Restorer

    repository = Repository(source)
    if list_:
        _list(repository, output)
        return
    if data_dir is None:
        raise UsageError("name the directory to restore to, or --list")
    chosen = repository.load(backup)
    restorer = Restorer(
        repository, chosen, [each for each in data_dir.split(",") if each], skip_offsets, typer.echo
    )
    # Before anything is copied: what was named may not be there, or not readable here.
    beyond, not_examined = beyond_restored(
        repository, chosen, pipeline or [], spool or [], restorer.goes_on_at()
    )
    restorer.restore()
    if output is Output.JSON:
        print_json(
            {
                "backup": chosen.number,
                "taken_at_ms": chosen.taken_at_ms,
                "partitions": len(chosen.partitions),
                "bytes": chosen.bytes,
                "beyond": [each._asdict() for each in beyond],
                "not_examined": [each._asdict() for each in not_examined],
            }
        )
    else:
        print(
            f"restored backup {chosen.number} of {_moment(chosen.taken_at_ms)} to {data_dir}: "
            f"{len(chosen.partitions)} partitions, {chosen.bytes:,} bytes, verified"
        )
        print(
            "what was written after that moment is gone; clients that have seen it find the cut by the leader epochs"
        )
        for each in beyond:
            print(
                f"{each.what}: {each.partition} is at {each.position}, and the restored log at {each.restored}"
            )
            print(f"  {each.advice}")
        for other in not_examined:
            print(f"{other.what}: not examined: {other.reason}")
        print(f"start it: holdfast serve --data-dir {data_dir} --cluster-id={chosen.cluster_id}")
    if beyond:
        raise Exit(ExitCode.FINDINGS)


def _list(repository: Repository, output: Output) -> None:
    backups = [repository.load(number) for number in repository.numbers()]
    if output is Output.JSON:
        print_json(
            [
                {"backup": each.number, "taken_at_ms": each.taken_at_ms, "bytes": each.bytes}
                for each in backups
            ]
        )
        return
    for each in backups:
        print(
            f"{each.number}  {_moment(each.taken_at_ms)}  {len(each.partitions)} partitions  {each.bytes:,} bytes"
        )


def _moment(wall_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_ms / 1000))
