"""`holdfast audit`: prove that what a topic held is where it belongs, or accounted for.

`pipeline` is for pipelines of ours; `checkpoint`, `topics`, `group` and `spool` for a foreign Spark job, a copy of a
topic, a consumer group and spooling producers; `verify` checks certificates. They read and change nothing. Exit codes:
0 proven, or unaltered since written, or accepted by name; 1 failed, 2 usage, 3 cannot be read, 4 inconclusive.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer
from typer.exceptions import Exit

from holdfast.cli.audit_every import (
    FURTHER,
    ONCE,
    Further,
    PipelineAuditor,
    WholeAuditor,
    Wishes,
    give_out,
)
from holdfast.cli.exits import CannotConnect, explain
from holdfast.cli.options import (
    DEFAULT_BOOTSTRAP_SERVER,
    CommandConfigOption,
    CommandGroup,
    OutputOption,
    examples,
    flag,
    option,
)
from holdfast.cli.output import Output, print_json, print_table
from holdfast.cli.pipeline_shared import BootstrapOption, load
from holdfast.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from holdfast.audit.model import Report

EXIT_CODES: Final = "\n\nExit codes: 0 proven, 1 failed, 2 usage, 3 cannot be read, 4 inconclusive."

app = CommandGroup(
    no_args_is_help=True,
    help="Prove that every record is where it belongs, or accounted for: in the sinks of a pipeline, in the table of a "
    "foreign Spark job or a consumer group, in a topic's copy, or on its way in a spool. Everything is read "
    "independently and nothing is written to." + EXIT_CODES,
)

FromOption: TypeAlias = Annotated[
    str | None,
    option(
        "PLACE",
        "Where the audit begins: earliest, for what the source still has, or a time such as 2026-01-31T12:00:00Z. "
        "Without it: where the pipeline began; for a group, the log's start.",
        "--from",
    ),
]
SinkOption: TypeAlias = Annotated[
    str,
    option(
        "SINK",
        "Where the rows are: parquet:PATH, delta:PATH, postgresql://…?table=NAME, sqlite:PATH?table=NAME or "
        "topic:NAME.",
    ),
]
MATCH: Final = option(
    "TEXT",
    "What makes a row a record's own: 'order_id = value.id AND day = substring(value.at, 1, 10)'. Left, columns of the "
    "sink; right, key, value, headers.NAME, topic, partition, offset, timestamp, fields of JSON and functions.",
)
WhereOption: TypeAlias = Annotated[
    str | None,
    option(
        "TEXT",
        "Which records have to be there, when the job filters: 'value.amount > 0 AND key IS NOT NULL'.",
    ),
]
DistinctOption: TypeAlias = Annotated[
    bool,
    flag("The sink keeps one row for each value of --match, however many records have it."),
]
DeadLettersOption: TypeAlias = Annotated[
    str | None, option("TOPIC", "A topic of dead letters: what is in it is accounted for.")
]


@dataclass(frozen=True)
class Cluster:
    """How the brokers of the source are reached."""

    bootstrap_server: BootstrapOption = None
    command_config: CommandConfigOption = None

    def properties(self) -> dict[str, str]:
        return _properties(self.command_config)

    def settings(self) -> dict[str, str]:
        given = self.properties()
        servers = self.bootstrap_server or given.get("bootstrap.servers")
        servers = servers or os.environ.get("HOLDFAST_BOOTSTRAP_SERVER") or DEFAULT_BOOTSTRAP_SERVER
        return {**given, "bootstrap.servers": servers}


@dataclass(frozen=True)
class OtherCluster:
    """How the cluster of a copy or of a sink is reached: as the source's where nothing else is said."""

    to_bootstrap_server: Annotated[
        str | None,
        option(
            "HOST:PORT,…",
            "The brokers of the copy, or of a sink that is a topic, if it is in another cluster.",
        ),
    ] = None
    to_command_config: Annotated[str | None, option("FILE", "A properties file for those brokers.")] = None

    def settings(self, source: dict[str, str]) -> dict[str, str]:
        if self.to_bootstrap_server is None and self.to_command_config is None:
            return source
        given = _properties(self.to_command_config)
        servers = self.to_bootstrap_server or given.get("bootstrap.servers") or source["bootstrap.servers"]
        return {**given, "bootstrap.servers": servers}


def _properties(path: str | None) -> dict[str, str]:
    from holdfast.cli.client import read_properties

    return {} if path is None else read_properties(path)


CLUSTER: Final = Cluster()
OTHER_CLUSTER: Final = OtherCluster()


@app.callback()
def audit() -> None:
    """The group itself does nothing: its commands do."""


@app.command(
    "pipeline",
    epilog=examples(
        "holdfast audit pipeline orders.yaml",
        "holdfast audit pipeline orders.yaml --from earliest --output json",
        "holdfast audit pipeline orders.yaml --certificate proofs/ --html audit.html",
        "holdfast audit pipeline orders.yaml --every 5m --state orders.proven --metrics-port 9400",
    )
    + EXIT_CODES,
)
def audit_pipeline(
    pipeline: Annotated[
        str,
        typer.Argument(
            metavar="PIPELINE", help="The pipeline: a YAML file, or a Python file that makes a Pipeline."
        ),
    ],
    cluster: Cluster = CLUSTER,
    start: FromOption = None,
    spools: Annotated[
        list[str] | None,
        option(
            "DIR",
            "The producers of the pipeline's source have their spools here. May be repeated.",
            "--spool",
        ),
    ] = None,
    spark: Annotated[
        bool,
        flag(
            "Evaluate rules, filters and queries again, by Spark, and compare what they compute. Needs "
            "holdfast\\[spark] and Java."
        ),
    ] = False,
    wishes: Wishes = ONCE,
    further: Further = FURTHER,
) -> None:
    """Prove, offset by offset, that every record of a pipeline's source is in its sinks, or accounted for: as a dead
    letter, filtered, a duplicate, late, superseded or in a window. Lost, duplicated and extra records are named by
    offset and key; what cannot be proven is listed."""
    loaded = load(pipeline)
    from holdfast.audit.pipeline_audit import AuditOptions

    tell = _tell if sys.stderr.isatty() else None
    options = AuditOptions(
        start=start,
        settings=cluster.properties(),
        spools=spools or (),
        tell=tell,
        accepted=tuple(further.accept or ()),
    )
    with no_verdict():
        auditor = PipelineAuditor(loaded, cluster.bootstrap_server, options, _auditor(spark), spark)
        give_out(auditor, wishes, further)


@app.command(
    "checkpoint",
    epilog=examples(
        "holdfast audit checkpoint /data/job/checkpoint --sink parquet:/data/orders --match 'id = value.id'"
    )
    + EXIT_CODES,
)
def audit_checkpoint(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The job's checkpoint.")],
    sink: SinkOption,
    match: Annotated[str, MATCH],
    cluster: Cluster = CLUSTER,
    where: WhereOption = None,
    distinct: DistinctOption = False,
    source: Annotated[int | None, option("N", "Only this source of the job, counted from 0.", min=0)] = None,
    dead_letters: DeadLettersOption = None,
    other: OtherCluster = OTHER_CLUSTER,
    wishes: Wishes = ONCE,
) -> None:
    """Prove that the sink of a Structured Streaming job holds what the job's checkpoint says it has read, once each."""

    def once() -> Report:
        from holdfast.audit.checkpoint import audit_checkpoint

        settings = cluster.settings()
        return audit_checkpoint(
            directory,
            sink,
            match,
            settings,
            where=where,
            is_distinct=distinct,
            source=source,
            dead_letters=dead_letters,
            sink_settings=other.settings(settings),
        )

    _give_out_whole(once, directory, wishes)


@app.command(
    "topics",
    epilog=examples(
        "holdfast audit topics orders orders-copy --values",
        "holdfast audit topics orders orders --key value.id --to-bootstrap-server new:9092 --finished",
    )
    + EXIT_CODES,
)
def audit_topics(
    source: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")],
    copy: Annotated[str, typer.Argument(metavar="COPY", help="The topic that should hold the same.")],
    cluster: Cluster = CLUSTER,
    key: Annotated[
        str, option("EXPRESSION", "What makes records the same: key, value.id, headers.NAME, topic || key…")
    ] = "key",
    values: Annotated[bool, flag("The values have to be the same too.")] = False,
    order: Annotated[bool, flag("The values of each key stand in the same order.")] = False,
    finished: Annotated[
        bool,
        flag("Nothing is under way any more, so what is missing at the end is lost as well."),
    ] = False,
    where: WhereOption = None,
    other: OtherCluster = OTHER_CLUSTER,
    wishes: Wishes = ONCE,
) -> None:
    """Prove that a topic's copy holds what the topic does: of a mirror, a copy job, a migration."""

    def once() -> Report:
        from holdfast.audit.topics import audit_topics

        settings = cluster.settings()
        return audit_topics(
            source,
            copy,
            settings,
            key=key,
            with_values=values,
            in_order=order,
            is_finished=finished,
            where=where,
            copy_settings=other.settings(settings),
        )

    _give_out_whole(once, f"{source} and {copy}", wishes)


@app.command(
    "group",
    epilog=examples(
        "holdfast audit group billing --sink 'postgresql://db/shop?table=bills'",
        "holdfast audit group billing --sink sqlite:bills.db?table=bills --match 'order_id = value.id'",
    )
    + EXIT_CODES,
)
def audit_group(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")],
    sink: SinkOption,
    cluster: Cluster = CLUSTER,
    topics: Annotated[
        list[str] | None, option("NAME", "Only this topic. May be repeated.", "--topic")
    ] = None,
    match: Annotated[str | None, MATCH] = None,
    where: WhereOption = None,
    distinct: DistinctOption = False,
    start: FromOption = None,
    dead_letters: DeadLettersOption = None,
    other: OtherCluster = OTHER_CLUSTER,
    wishes: Wishes = ONCE,
) -> None:
    """Prove that a sink holds what a consumer group has committed, or a DatabaseSink of the group has stored."""

    def once() -> Report:
        from holdfast.audit.group import audit_group
        from holdfast.audit.scope import start_ms

        settings = cluster.settings()
        since_ms = None if start is None else start_ms(start)
        return audit_group(
            group,
            sink,
            settings,
            topics=topics or (),
            match=match,
            where=where,
            is_distinct=distinct,
            starts="earliest" if start is not None and since_ms is None else since_ms,
            dead_letters=dead_letters,
            sink_settings=other.settings(settings),
        )

    _give_out_whole(once, group, wishes)


@app.command(
    "spool",
    epilog=examples(
        "holdfast audit spool /var/spool/orders --topic orders",
        "holdfast audit spool --topic orders",
    )
    + EXIT_CODES,
)
def audit_spool(
    spools: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIR]…",
            help="Homes of spools: what they say was delivered is in the topics.",
        ),
    ] = None,
    cluster: Cluster = CLUSTER,
    topics: Annotated[
        list[str] | None,
        option(
            "NAME", "The topics to look in (default: those that the spools name). May be repeated.", "--topic"
        ),
    ] = None,
    wishes: Wishes = ONCE,
) -> None:
    """Prove that what spooling producers sent reached the topics, by the numbers they gave their messages."""
    if not spools and not topics:
        raise UsageError("name homes of spools, or topics that spooling producers sent to: --topic NAME")

    def once() -> Report:
        from holdfast.audit.spool import audit_spools

        return audit_spools(cluster.settings(), topics=topics or (), spools=spools or ())

    _give_out_whole(once, " and ".join(topics or spools or ()), wishes)


@app.command(
    "verify",
    epilog=examples(
        "holdfast audit verify proofs/",
        "holdfast audit verify proofs/orders-000001.json proofs/orders-000002.json",
        "holdfast audit verify proofs/ --expect 9f86d081884c7d65…",
        "holdfast audit verify proofs/ --public-key audit.pub",
    ),
)
def verify(
    paths: Annotated[
        list[str], typer.Argument(metavar="FILE…", help="Certificates, or directories of them, in any order.")
    ],
    expect: Annotated[
        str | None,
        option(
            "SHA256",
            "The hash of the newest certificate, kept elsewhere: then its end cannot be cut off or made anew.",
        ),
    ] = None,
    public_key: Annotated[
        str | None,
        option("FILE", "Each certificate has to be signed by this ed25519 key. Needs holdfast\\[sign]."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check certificates of audits: that each has the content its hash is of, and that each names the one before. The
    first link that is broken is named. Nothing but the files is needed."""
    from holdfast.audit.certificate import verify as verify_chains
    from holdfast.audit.signatures import load_public_key
    from holdfast.audit.text import plain

    results = verify_chains(paths, expect, None if public_key is None else load_public_key(public_key))
    if output is Output.JSON:
        print_json([each.as_json() for each in results])
    else:
        rows = [
            (
                plain(each.subject),
                f"{len(each.certificates):,}",
                each.certificates[-1].verdict if each.certificates else "-",
                each.certificates[-1].sha256 if each.certificates else "-",
                "whole" if each.is_whole else "BROKEN",
            )
            for each in results
        ]
        print_table(("SUBJECT", "CERTIFICATES", "NEWEST VERDICT", "NEWEST SHA-256", "CHAIN"), rows)
        for each in results:
            for note in each.notes if each.is_whole else ():
                print(plain(f"{each.subject}: {note}"))
            if not each.is_whole:
                print(plain(f"broken: {each.problem}"))
    if not all(each.is_whole for each in results):
        raise Exit(ExitCode.FINDINGS)


@contextmanager
def no_verdict() -> Iterator[None]:
    """What keeps an audit from being made ends with 3: 1 would say that it was made, and failed."""
    try:
        yield
    except (Exit, BrokenPipeError):
        raise
    except Exception as error:
        message, code = explain(error)
        if code is not ExitCode.FINDINGS:
            raise
        raise CannotConnect(message) from error


def _give_out_whole(once: Callable[[], Report], subject: str, wishes: Wishes) -> None:
    with no_verdict():
        give_out(WholeAuditor(once, subject), wishes)


def _auditor(by_spark: bool) -> Callable[..., Report]:
    if by_spark:
        from holdfast.audit.spark.auditing import audit_with_spark

        return audit_with_spark
    from holdfast.audit.pipeline_audit import audit_pipeline

    return audit_pipeline


def _tell(what: str) -> None:
    print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)
