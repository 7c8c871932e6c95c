"""`holdfast audit`: prove that every record of a source is in the sinks, or accounted for.

It reads and changes nothing. Exit codes: 0 proven, 1 failed, 2 usage, 3 cannot be read, 4 inconclusive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from typer.exceptions import Exit

from holdfast.cli.audit_every import (
    CertificateOption,
    EveryOption,
    FullEveryOption,
    FullOption,
    HtmlOption,
    JunitOption,
    MetricsOption,
    PipelineAuditor,
    StateOption,
    WholeAuditor,
    Wishes,
    give_out,
)
from holdfast.cli.audit_other import (
    CheckpointOption,
    DeadLettersOption,
    DistinctOption,
    FinishedOption,
    GroupOption,
    KeyOption,
    MatchOption,
    OrderOption,
    Other,
    SinkOption,
    SourceOption,
    SpoolsOption,
    ToBootstrapOption,
    ToConfigOption,
    TopicsOption,
    ValuesOption,
    WhereOption,
    audit_other,
    check_flags,
)
from holdfast.cli.exits import CannotConnect, explain
from holdfast.cli.options import CommandConfigOption, CommandGroup, OutputOption, examples
from holdfast.cli.output import Output
from holdfast.cli.pipeline_shared import BootstrapOption, load
from holdfast.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from holdfast.audit.model import Report

app = CommandGroup()

PipelineArgument: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="PIPELINE",
        help="The pipeline: a YAML file, or a Python file that makes a Pipeline. Left out: what the flags name.",
    ),
]
FromOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="PLACE",
        help="Where the audit begins: earliest, for what the source still has, or a time such as "
        "2026-01-31T12:00:00Z. Without it: where the pipeline began.",
    ),
]

SparkOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--spark",
        help="Audit by Spark jobs: rules, filters and queries are evaluated again, and the log may be larger than "
        "memory. Needs holdfast\\[spark] and Java.",
    ),
]


@app.command(
    help="Prove, offset by offset, that every record of a pipeline's source is in its sinks, or accounted for: as a "
    "dead letter, filtered, a duplicate, late, superseded or in a window. Source and sinks are read independently of "
    "the pipeline and never written to. Lost, duplicated and extra records are named by offset and key; what cannot "
    "be proven is listed. With flags instead of a pipeline: a Spark job by its checkpoint, a copy of a topic, a "
    "consumer group, or what spooling producers sent.",
    epilog=examples(
        "holdfast audit orders.yaml",
        "holdfast audit orders.yaml --from earliest --output json",
        "holdfast audit orders.yaml --certificate proofs/ --html audit.html",
        "holdfast audit orders.yaml --every 5m --state orders.proven --metrics-port 9400",
        "holdfast audit --checkpoint /data/job/checkpoint --sink parquet:/data/orders --match 'id = value.id'",
        "holdfast audit --topic orders --topic orders-copy --key key --values",
        "holdfast audit --group billing --sink 'postgresql://db/shop?table=bills'",
        "holdfast audit --topic orders --spool /var/spool/orders",
    )
    + "\n\nExit codes: 0 proven, 1 failed, 2 usage, 3 cannot be read, 4 inconclusive.",
)
def audit(
    pipeline: PipelineArgument = None,
    bootstrap_server: BootstrapOption = None,
    command_config: CommandConfigOption = None,
    start: FromOption = None,
    spark: SparkOption = False,
    certificate: CertificateOption = None,
    html: HtmlOption = None,
    junit: JunitOption = None,
    every: EveryOption = None,
    state: StateOption = None,
    full: FullOption = False,
    full_every: FullEveryOption = None,
    metrics_port: MetricsOption = None,
    output: OutputOption = Output.TABLE,
    checkpoint: CheckpointOption = None,
    group: GroupOption = None,
    topics: TopicsOption = None,
    spools: SpoolsOption = None,
    sink: SinkOption = None,
    match: MatchOption = None,
    where: WhereOption = None,
    distinct: DistinctOption = False,
    source: SourceOption = None,
    dead_letters: DeadLettersOption = None,
    key: KeyOption = None,
    values: ValuesOption = False,
    order: OrderOption = False,
    finished: FinishedOption = False,
    to_bootstrap_server: ToBootstrapOption = None,
    to_command_config: ToConfigOption = None,
) -> None:
    other = Other(
        checkpoint=checkpoint,
        group=group,
        topics=topics or (),
        spools=spools or (),
        sink=sink,
        match=match,
        where=where,
        is_distinct=distinct,
        source=source,
        dead_letters=dead_letters,
        key=key,
        with_values=values,
        in_order=order,
        is_finished=finished,
        to_bootstrap=to_bootstrap_server,
        to_config=to_command_config,
        start=start,
    )
    check_flags(other, pipeline)
    wishes = Wishes(output, certificate, html, junit, every, state, full, full_every, metrics_port)
    if pipeline is None:
        if spark:
            raise UsageError("--spark is for pipelines: name one")
        subject = other.checkpoint or other.group or " and ".join(other.topics or other.spools)
        with no_verdict():
            give_out(
                WholeAuditor(lambda: audit_other(other, bootstrap_server, command_config), subject), wishes
            )
        return
    loaded = load(pipeline)
    from holdfast.audit.pipeline_audit import AuditOptions
    from holdfast.cli.client import read_properties

    settings = {} if command_config is None else read_properties(command_config)
    tell = _tell if sys.stderr.isatty() else None
    options = AuditOptions(start=start, settings=settings, spools=other.spools, tell=tell)
    with no_verdict():
        give_out(PipelineAuditor(loaded, bootstrap_server, options, _auditor(spark), spark), wishes)


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


def _auditor(by_spark: bool) -> Callable[..., Report]:
    if by_spark:
        from holdfast.audit.spark.auditing import audit_with_spark

        return audit_with_spark
    from holdfast.audit.pipeline_audit import audit_pipeline

    return audit_pipeline


def _tell(what: str) -> None:
    print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)
