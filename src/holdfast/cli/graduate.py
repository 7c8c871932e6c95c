"""`holdfast graduate`: hand a data directory over to Apache Kafka in place, take it back, and prove that all is "
"there."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeAlias

from typer.core import TyperGroup
from typer.exceptions import Exit

from holdfast.cli.exits import CommandFailed
from holdfast.cli.options import SERVER, CommandGroup, ServerFlags, examples, flag, option
from holdfast.cli.output import print_json
from holdfast.errors import UsageError
from holdfast.graduate.handing_over import Outcome

RUN: Final = "run"


class _Group(TyperGroup):
    """`holdfast graduate --data-dir …` is `holdfast graduate run --data-dir …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h"):
            args = [RUN, *args]
        return super().parse_args(ctx, args)


app = CommandGroup(
    cls=_Group,
    no_args_is_help=True,
    help="Hand a data directory over to Apache Kafka in place, and prove that everything is there.",
)

DataDirOption: TypeAlias = Annotated[
    str | None, option("DIR,…", "All log directories of the node, as log.dirs has them.")
]
OutputDirOption: TypeAlias = Annotated[
    str,
    option(
        "DIR",
        "Where the manifest, server.properties, the steps and the undo material are; not in a log directory.",
    ),
]


@app.command(
    RUN,
    epilog=examples(
        "holdfast graduate prepare --data-dir /var/lib/holdfast --output /var/lib/handover",
        "holdfast graduate --data-dir /var/lib/holdfast --listen 10.0.0.1:9092 --controller 10.0.0.1:9093 "
        "--output /var/lib/handover",
        "holdfast graduate --undo --output /var/lib/handover",
    ),
)
def run(
    output: OutputDirOption,
    data_dir: DataDirOption = None,
    config: Annotated[
        str | None,
        option("FILE", "The server.properties that holdfast was started with; its settings are translated."),
    ] = None,
    override: Annotated[
        list[str] | None,
        option("NAME=VALUE", "A setting that holdfast was started with, over --config. May be repeated."),
    ] = None,
    listen: Annotated[str | None, option("HOST:PORT", "Where Kafka listens for clients.")] = None,
    advertise: Annotated[
        str | None, option("HOST:PORT", "What clients are told, where that is not --listen.")
    ] = None,
    controller: Annotated[
        str | None,
        option("HOST:PORT", "Where Kafka's controller listens; controllers to come must reach it."),
    ] = None,
    kafka_version: Annotated[str, option("VERSION", "The Apache Kafka that is to start there.")] = "4.3",
    user: Annotated[
        str | None, option("NAME", "Whom Kafka runs as: files are given to that user. Needs root.")
    ] = None,
    dry_run: Annotated[bool, flag("Check everything, take the digests, and change nothing.")] = False,
    undo: Annotated[
        bool, flag("Take everything back, byte for byte. Refused once Kafka or holdfast has run there.")
    ] = False,
    start: Annotated[
        bool,
        flag(
            "Start the Apache Kafka that `holdfast cluster` gets, in the background; `holdfast cluster down "
            "--directory OUTPUT` ends it."
        ),
    ] = False,
) -> None:
    """Hand a stopped node's data directory over to Apache Kafka: check and mend what Kafka would stumble over, take the
    manifest, write server.properties, and print what to do next. Records are neither copied nor changed.

    This is `holdfast graduate` without a command.
    """
    from holdfast.graduate import handing_over
    from holdfast.graduate.properties import address

    if undo:
        if dry_run or start:
            raise UsageError("--undo goes alone with --output")
        journal = handing_over.undo(output)
        print(
            f"taken back: {', '.join(journal.log_dirs)} is as holdfast left it; `holdfast serve` goes on there"
        )
        return
    if start and data_dir is None and config is None:
        _start(output)
        return
    given = _given(config, override or [])
    data_dir = data_dir or given.get("log.dirs") or given.get("log.dir")
    if data_dir is None or listen is None or controller is None:
        raise UsageError(
            "--data-dir, --listen and --controller are needed: where the data is, and where Kafka listens"
        )
    request = handing_over.Request(
        log_dirs=_split(data_dir),
        listen=address(listen, "--listen"),
        controller=address(controller, "--controller"),
        output=output,
        advertised=None if advertise is None else address(advertise, "--advertise"),
        user=user,
        kafka_version=kafka_version,
        given=given,
    )
    outcome = handing_over.graduate(request, is_dry_run=dry_run, say=_say)
    _show(outcome, os.path.abspath(output))
    if start and not dry_run:
        _start(output)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _split(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(",") if each.strip())


def _given(config: str | None, overrides: Sequence[str]) -> dict[str, str]:
    from holdfast.cli.client import read_properties

    given = dict(read_properties(config)) if config is not None else {}
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--override {text!r} is not NAME=VALUE, for example log.retention.hours=24")
        given[name.strip()] = value.strip()
    return given


def _start(output: str) -> None:
    from holdfast.graduate.starting import start_kafka

    kafka = start_kafka(output)
    print(f"Apache Kafka serves on {kafka.bootstrap_servers}, process {kafka.pid}")


def _show(outcome: Outcome, output: str) -> None:
    manifest = outcome.manifest
    partitions = sum(len(topic.partitions) for topic in manifest.topics)
    print(
        f"{manifest.records:,} records in {partitions:,} partitions of {len(manifest.topics):,} topics, "
        f"{manifest.bytes / 1e9:.3f} GB of which {outcome.bytes_known / 1e9:.3f} had been digested ahead; "
        f"{outcome.seconds:.1f} s"
    )
    will = "would be " if outcome.is_dry_run else ""
    for line in outcome.mended:
        print(f"  {will}mended: {line}")
    for line in outcome.notes:
        print(f"  note: {line}")
    for line in outcome.without_counterpart:
        print(f"  without counterpart: {line}")
    for each in outcome.put_off:
        print(
            f"  RETENTION: {each.topic}-{each.partition}: {each.segments} segments, offsets {each.first_offset} to "
            f"{each.end_offset - 1}, {each.bytes / 1e6:.1f} MB, have expired by the wall clock, which holdfast does "
            "not believe; Kafka deletes them half a minute after its start. If the clock is wrong, set it right first; "
            f"to keep them: holdfast configs alter --topic {each.topic} --add-config retention.ms=-1, before the "
            "hand-over"
        )
    if outcome.is_dry_run:
        print("nothing was changed (--dry-run)")
        return
    print(
        f"handed over. Start Kafka with {output}/server.properties; {output}/STEPS.md has the commands that start it, "
        f"prove it and grow it.\nTo take it back before Kafka has run: holdfast graduate --undo --output {output}"
    )


@app.command(
    "prepare",
    epilog=examples("holdfast graduate prepare --data-dir /var/lib/holdfast --output /var/lib/handover"),
)
def prepare(
    data_dir: Annotated[str, option("DIR,…", "All log directories of the node, as log.dirs has them.")],
    output: OutputDirOption,
) -> None:
    """Digest ahead what a running node will not change any more, so that the hand-over has little left to read. It may
    be run again; what is known is not read again."""
    from holdfast.graduate import handing_over

    read = 0

    def progress(count: int) -> None:
        nonlocal read
        read += count

    known = handing_over.prepare(_split(data_dir), output, progress)
    print(f"{known / 1e9:.3f} GB are digested, {read / 1e9:.3f} of it now")


@app.command(
    "verify",
    epilog=examples(
        "holdfast graduate verify --output /var/lib/handover --bootstrap-server 10.0.0.1:9092 --certificate proofs/"
    ),
)
def verify(
    output: OutputDirOption,
    server: ServerFlags = SERVER,
    certificate: Annotated[
        str | None,
        option("PATH", "Write a certificate to a directory or a .json file, chained to the one before it."),
    ] = None,
    sign_key: Annotated[
        str | None, option("FILE", "Sign the certificate with this ed25519 key, in PEM.")
    ] = None,
    json: Annotated[bool, flag("Print the report as JSON.")] = False,
) -> None:
    """Hold a running Kafka against the manifest: every record by digest, last values of compacted topics, committed
    offsets, transactions, producers, settings. Exit code 0: proven; 1: something is lost or altered; 4: something could
    not be looked at."""
    from holdfast.cli.client import read_properties
    from holdfast.graduate import changes
    from holdfast.graduate.handing_over import MANIFEST_FILE
    from holdfast.graduate.report import VERDICTS, lines_of
    from holdfast.graduate.verifying import verify as hold_against
    from holdfast.manifest.model import decode

    if sign_key is not None and certificate is None:
        raise UsageError("--sign-key goes with --certificate")
    key = None
    if sign_key is not None:
        from holdfast.audit.signatures import load_private_key

        key = load_private_key(sign_key)  # before the reading, not after it
    path = f"{output}/{MANIFEST_FILE}"
    try:
        with open(path, "rb") as file:
            manifest = decode(file.read(), path)
    except FileNotFoundError as error:
        raise CommandFailed(f"there is no {path}: `holdfast graduate` writes it") from error
    journal = changes.load(output)
    taken = frozenset(
        (each["resource"], each["name"]) for each in (journal.settings_taken if journal else ())
    )
    given = read_properties(server.command_config) if server.command_config else {}
    report = hold_against(manifest, output, {**given, "bootstrap.servers": server.bootstrap_server}, taken)
    if json:
        print_json(report.as_json())
    else:
        print("\n".join(lines_of(report)))
    if certificate is not None:
        from holdfast.audit.certificate import write

        print(f"certificate {write(report, certificate, key).path}")
    if report.verdict != "proven":
        raise Exit(VERDICTS[report.verdict])
