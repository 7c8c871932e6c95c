"""`holdfast audit` of what is no pipeline of ours: a foreign Spark job, a copy of a topic, a consumer group, spools.

Which of them is meant shows in the flags: --checkpoint, --group, two --topic with --key, or --topic and --spool.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from holdfast.cli.options import DEFAULT_BOOTSTRAP_SERVER
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.audit.model import Report

CheckpointOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        help="Audit the Structured Streaming job that has its checkpoint here; with --sink and --match.",
    ),
]
GroupOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="GROUP",
        help="Audit what this consumer group has committed, or a DatabaseSink of this group has stored; with --sink.",
    ),
]
TopicsOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="NAME",
        help="With --key, twice: a topic and its copy. With --group: only this topic. Otherwise: the numbers that "
        "spooling producers gave the records in it. May be repeated.",
    ),
]
SpoolsOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--spool",
        metavar="DIR",
        help="Audit the spools of this home: what they say was delivered is in the topics. With a pipeline: the "
        "producers of its source have their spools here. May be repeated.",
    ),
]
SinkOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--sink",
        metavar="SINK",
        help="Where the rows are: parquet:PATH, delta:PATH, postgresql://…?table=NAME, sqlite:PATH?table=NAME or "
        "topic:NAME.",
    ),
]
MatchOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--match",
        metavar="TEXT",
        help="What makes a row a record's own: 'order_id = value.id AND day = substring(value.at, 1, 10)'. Left, "
        "columns of the sink; right, key, value, headers.NAME, topic, partition, offset, timestamp, fields of JSON "
        "and functions.",
    ),
]
WhereOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="TEXT",
        help="Which records have to be there, when the job filters: 'value.amount > 0 AND key IS NOT NULL'.",
    ),
]
DistinctOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--distinct", help="The sink keeps one row for each value of --match, however many records have it."
    ),
]
SourceOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--source", metavar="N", min=0, help="With --checkpoint: only this source of the job, counted from 0."
    ),
]
DeadLettersOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--dead-letters", metavar="TOPIC", help="A topic of dead letters: what is in it is accounted for."
    ),
]
KeyOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="EXPRESSION",
        help="With two --topic: what makes records the same: key, value.id, headers.NAME, topic || key…",
    ),
]
ValuesOption: TypeAlias = Annotated[
    bool, typer.Option("--values", help="With --key: the values have to be the same too.")
]
OrderOption: TypeAlias = Annotated[
    bool, typer.Option("--order", help="With --key: the values of each key stand in the same order.")
]
FinishedOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--finished",
        help="With --key: nothing is under way any more, so what is missing at the end is lost as well.",
    ),
]
ToBootstrapOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--to-bootstrap-server",
        metavar="HOST:PORT,…",
        help="The brokers of the copy, or of a sink that is a topic, if it is in another cluster.",
    ),
]
ToConfigOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--to-command-config", metavar="FILE", help="A properties file for those brokers."),
]


@dataclass(frozen=True)
class Other:
    """What the flags say."""

    checkpoint: str | None = None
    group: str | None = None
    topics: Sequence[str] = ()
    spools: Sequence[str] = ()
    sink: str | None = None
    match: str | None = None
    where: str | None = None
    is_distinct: bool = False
    source: int | None = None
    dead_letters: str | None = None
    key: str | None = None
    with_values: bool = False
    in_order: bool = False
    is_finished: bool = False
    to_bootstrap: str | None = None
    to_config: str | None = None
    start: str | None = None

    @property
    def is_asked_for(self) -> bool:
        """Whether it is something else than a pipeline."""
        return bool(self.checkpoint or self.group or self.topics or self.spools)


def check_flags(other: Other, pipeline: str | None) -> None:
    """Refuse flags that do not go together, before anything is read."""
    if pipeline is not None:
        named = next(
            (flag for flag, value in _given(other).items() if value and flag not in _WITH_PIPELINE), None
        )
        if named is not None:
            raise UsageError(
                f"{named} is about something else than a pipeline: leave out {pipeline!r}, or the flag"
            )
        return
    if not other.is_asked_for:
        raise UsageError(
            "name a pipeline, or what else to audit: --checkpoint DIR, --group GROUP, two --topic with --key, "
            "--topic, or --spool DIR"
        )
    mode = mode_of(other)
    for flag, value in _given(other).items():
        if value and flag not in (mode, *_TAKEN[mode]):
            raise UsageError(f"{flag} means nothing with {mode}; it takes {', '.join(_TAKEN[mode])}")
    if mode in ("--checkpoint", "--group") and other.sink is None:
        raise UsageError(
            f"{mode} needs --sink: parquet:PATH, delta:PATH, postgresql://…?table=NAME, sqlite:PATH?table=NAME or "
            "topic:NAME"
        )
    if mode == "--checkpoint" and other.match is None:
        raise UsageError("--checkpoint needs --match '<sink column> = <expression on the record>'")
    if mode == "--key" and len(other.topics) != 2:
        raise UsageError(
            f"--key compares two topics, a source and its copy: {len(other.topics)} --topic are given"
        )


_WITH_PIPELINE = ("--from", "--spool")
_TAKEN = {
    "--checkpoint": (
        "--sink",
        "--match",
        "--where",
        "--distinct",
        "--source",
        "--dead-letters",
        "--to-bootstrap-server",
        "--to-command-config",
    ),
    "--group": (
        "--sink",
        "--topic",
        "--match",
        "--where",
        "--distinct",
        "--dead-letters",
        "--from",
        "--to-bootstrap-server",
        "--to-command-config",
    ),
    "--key": (
        "--topic",
        "--where",
        "--values",
        "--order",
        "--finished",
        "--to-bootstrap-server",
        "--to-command-config",
    ),
    "--spool": ("--topic",),
}


def mode_of(other: Other) -> str:
    """The flag that says what is audited."""
    if other.checkpoint is not None:
        return "--checkpoint"
    if other.group is not None:
        return "--group"
    return "--key" if other.key is not None else "--spool"


def _given(other: Other) -> dict[str, object]:
    return {
        "--checkpoint": other.checkpoint,
        "--group": other.group,
        "--key": other.key,
        "--topic": other.topics,
        "--spool": other.spools,
        "--sink": other.sink,
        "--match": other.match,
        "--where": other.where,
        "--distinct": other.is_distinct,
        "--source": other.source is not None,
        "--dead-letters": other.dead_letters,
        "--values": other.with_values,
        "--order": other.in_order,
        "--finished": other.is_finished,
        "--to-bootstrap-server": other.to_bootstrap,
        "--to-command-config": other.to_config,
        "--from": other.start,
    }


def audit_other(other: Other, bootstrap: str | None, config: str | None) -> Report:
    """The report of whatever the flags name."""
    from holdfast.admin.errors import ClusterError
    from holdfast.audit.model import AuditError
    from holdfast.cli.client import read_properties

    given = {} if config is None else read_properties(config)
    servers = bootstrap or given.get("bootstrap.servers") or os.environ.get("HOLDFAST_BOOTSTRAP_SERVER")
    settings = {**given, "bootstrap.servers": servers or DEFAULT_BOOTSTRAP_SERVER}
    try:
        return _audit(other, settings)
    except (ClusterError, OSError) as error:
        # The exit code of what failed is that of a failed audit: this one was not made.
        raise AuditError(str(error)) from error


def _audit(other: Other, settings: Mapping[str, str]) -> Report:
    theirs = _their_settings(other, settings)
    match mode_of(other):
        case "--checkpoint":
            from holdfast.audit.checkpoint import audit_checkpoint

            return audit_checkpoint(
                other.checkpoint or "",
                other.sink or "",
                other.match or "",
                settings,
                where=other.where,
                is_distinct=other.is_distinct,
                source=other.source,
                dead_letters=other.dead_letters,
                sink_settings=theirs,
            )
        case "--group":
            return _audit_group(other, settings, theirs)
        case "--key":
            from holdfast.audit.topics import audit_topics

            source, copy = other.topics
            return audit_topics(
                source,
                copy,
                settings,
                key=other.key or "key",
                with_values=other.with_values,
                in_order=other.in_order,
                is_finished=other.is_finished,
                where=other.where,
                copy_settings=theirs,
            )
        case _:
            from holdfast.audit.spool import audit_spools

            return audit_spools(settings, topics=other.topics, spools=other.spools)


def _audit_group(other: Other, settings: Mapping[str, str], theirs: Mapping[str, str]) -> Report:
    from holdfast.audit.group import audit_group
    from holdfast.audit.scope import start_ms

    starts: int | str | None = None if other.start is None else start_ms(other.start)
    if other.start is not None and starts is None:
        starts = "earliest"
    return audit_group(
        other.group or "",
        other.sink or "",
        settings,
        topics=other.topics,
        match=other.match,
        where=other.where,
        is_distinct=other.is_distinct,
        starts=starts,
        dead_letters=other.dead_letters,
        sink_settings=theirs,
    )


def _their_settings(other: Other, settings: Mapping[str, str]) -> dict[str, str]:
    """How the cluster of the copy or of the sink is reached: as the source's where nothing else is said."""
    from holdfast.cli.client import read_properties

    if other.to_bootstrap is None and other.to_config is None:
        return dict(settings)
    given = {} if other.to_config is None else read_properties(other.to_config)
    servers = other.to_bootstrap or given.get("bootstrap.servers") or settings["bootstrap.servers"]
    return {**given, "bootstrap.servers": servers}
