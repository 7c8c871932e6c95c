"""`holdfast trace`: the life of one record, from its sender to the row that holds it, or to where it went.

It reads and changes nothing. Exit codes: 0 found or explained, 1 lost, duplicated or extra, 4 nobody can tell.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer
from typer.exceptions import Exit

from holdfast.cli.exits import complain
from holdfast.cli.options import (
    DEFAULT_BOOTSTRAP_SERVER,
    CommandConfigOption,
    CommandGroup,
    OutputOption,
    examples,
    option,
)
from holdfast.cli.output import Output, print_json, print_table
from holdfast.cli.pipeline_shared import BootstrapOption, load, located
from holdfast.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from holdfast.audit.lives import Life
    from holdfast.audit.tracing import Tracer
    from holdfast.pipeline.definition.model import PipelineDefinition
    from holdfast.pipeline.positions import Place

app = CommandGroup()

RECORD: Final = re.compile(r"(?P<topic>.+):(?P<partition>\d+)@(?P<offset>\d+)")
RECORDS_DEFAULT: Final = 10

RecordArgument: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TOPIC:PARTITION@OFFSET] [PIPELINE]",
        help="The record, unless --key says which; and a pipeline's YAML or Python file, to follow it into the sinks.",
    ),
]


@app.command(
    epilog=examples(
        "holdfast trace orders:3@4711",
        "holdfast trace orders:3@4711 orders.yaml",
        "holdfast trace --key c-118 --topic orders",
        "holdfast trace --key c-118 orders.yaml --output json",
    )
    + "\n\nExit codes: 0 found or explained, 1 lost, duplicated or extra, 2 usage, 3 cannot be read, 4 not to be told."
)
def trace(
    arguments: RecordArgument = None,
    key: Annotated[
        str | None, option("KEY", "Records with this key, as text; 0x… are bytes in hexadecimal digits.")
    ] = None,
    topic: Annotated[
        list[str] | None,
        option(
            "NAME", "With --key: where to look; may be repeated. Without it: the pipeline's topics, or all."
        ),
    ] = None,
    max_records: Annotated[
        int, option("N", "With --key: the newest so many, oldest first.", min=1)
    ] = RECORDS_DEFAULT,
    bootstrap_server: BootstrapOption = None,
    command_config: CommandConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the life of one record, from its producer to the sink that holds it, or why it is gone.

    That is: when it was sent and by which spool, how the log holds it and how its transaction ended. With a
    pipeline: which batch took it, and at which step it left or which file, row, record or window holds it. The
    command reads only.
    """
    record, pipeline = _split(arguments or [], key, topic)
    own = _properties(command_config)
    if pipeline is None:
        bootstrap = (
            bootstrap_server or os.environ.get("HOLDFAST_BOOTSTRAP_SERVER") or DEFAULT_BOOTSTRAP_SERVER
        )
        lives = _lives(None, {"bootstrap.servers": bootstrap, **own}, record, key, topic, max_records)
    else:
        loaded = load(pipeline)
        from holdfast.pipeline.definition.naming import client_settings
        from holdfast.pipeline.definition.secrets import expand_definition

        with located(loaded):
            definition, redactor = expand_definition(loaded.definition)
            settings = {**client_settings(definition, bootstrap_server), **own}
            lives = _lives(definition, settings, record, key, topic, max_records, redactor.redact)
    _show(lives, output)
    raise Exit(_exit_code(lives))


def _split(
    arguments: list[str], key: str | None, topics: list[str] | None
) -> tuple[re.Match[str] | None, str | None]:
    """The record and the pipeline among the arguments."""
    rest = list(arguments)
    record = None
    if key is None:
        if topics:
            raise UsageError(
                "--topic goes with --key; a record has its topic in front: TOPIC:PARTITION@OFFSET"
            )
        if not rest:
            raise UsageError("which record? Name it as TOPIC:PARTITION@OFFSET, or by --key")
        record = RECORD.fullmatch(rest[0])
        if record is None:
            raise UsageError(f"{rest[0]!r} is no record; write TOPIC:PARTITION@OFFSET, such as orders:3@4711")
        del rest[0]
    if len(rest) > 1:
        raise UsageError(f"only one pipeline can be followed; {rest[1]!r} is too many")
    if rest and key is not None and RECORD.fullmatch(rest[0]) and not os.path.exists(rest[0]):
        raise UsageError("a record is named by its place or by --key, not by both")
    return record, rest[0] if rest else None


def _properties(command_config: str | None) -> dict[str, str]:
    from holdfast.cli.client import read_properties

    return {} if command_config is None else read_properties(command_config)


def _lives(
    definition: PipelineDefinition | None,
    settings: Mapping[str, str],
    record: re.Match[str] | None,
    key: str | None,
    topics: list[str] | None,
    max_records: int,
    redact: Callable[[str], str] = str,
) -> list[Life]:
    from holdfast.audit.stored import place_of
    from holdfast.audit.tracing import Tracer
    from holdfast.reader import Cluster

    with Cluster(settings) as cluster, Tracer(cluster, definition, settings, redact) as tracer:
        if record is not None:
            place = place_of(cluster, record["topic"], int(record["partition"]))
            return [tracer.trace(place, int(record["offset"]))]
        assert key is not None
        found = _by_key(tracer, _key_bytes(key), topics or _topics(tracer), max_records)
        return [tracer.trace(place, offset) for place, offset in found]


def _topics(tracer: Tracer) -> list[str]:
    """Where to look for a key when nobody says."""
    if tracer.definition is None:
        return sorted(tracer.cluster.topics())
    source = tracer.definition.source
    return list(source.topics) or sorted(tracer.cluster.topics(pattern=source.pattern))


def _by_key(tracer: Tracer, key: bytes, topics: list[str], max_records: int) -> list[tuple[Place, int]]:
    from holdfast.audit.stored import offsets_of_key

    found: list[tuple[Place, int]] = []
    count = 0
    for topic in topics:
        offsets, in_all = offsets_of_key(tracer.cluster, topic, key, most=max_records)
        found += offsets
        count += in_all
    if not found:
        complain(f"no committed record with this key is in {', '.join(topics) or 'any topic'}")
        raise Exit(ExitCode.FINDINGS)
    if count > len(found):
        complain(f"{count:,} records have this key; shown are the newest {len(found):,} (--max-records)")
    return found


def _key_bytes(text: str) -> bytes:
    if text.startswith("0x"):
        try:
            return bytes.fromhex(text[2:])
        except ValueError:
            pass  # a text that only looks like digits
    return text.encode("utf-8", "surrogateescape")


def _show(lives: list[Life], output: Output) -> None:
    if output is Output.JSON:
        print_json([life.as_json() for life in lives] if len(lives) != 1 else lives[0].as_json())
        return
    from holdfast.audit.lives import events
    from holdfast.audit.text import plain

    for number, life in enumerate(lives):
        if number:
            print()
        rows = [tuple(plain(cell) for cell in event) for event in events(life)]
        print_table(("TIME", "WHERE", "WHAT"), rows, title=f"record {plain(life.stored.name)}")
        print(plain(f"{life.fate.replace('_', ' ')}: {life.conclusion}"))


def _exit_code(lives: list[Any]) -> ExitCode:
    if any(life.is_fault for life in lives):
        return ExitCode.FINDINGS
    if any(life.fate == "unknown" for life in lives):
        return ExitCode.INCONCLUSIVE
    return ExitCode.FINE
