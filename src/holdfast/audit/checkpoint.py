"""The audit of a Structured Streaming job that we did not write: its checkpoint says what it did, the sink shows it.

    report = audit_checkpoint("/data/checkpoint", "parquet:/data/out", "id = value.id", settings)

The scope is what the query's own log can tell (`spark_log`): from the oldest entry kept to the last batch committed. A
batch that was planned and not committed is pending: its rows may be there, and may be there twice when it was tried
again, which is told.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.audit.asides import read_dead_letters
from holdfast.audit.foreign_tables import open_table
from holdfast.audit.matched import Question, audit_matched
from holdfast.audit.matching import parse_condition
from holdfast.audit.model import Report, Unproven
from holdfast.audit.spark_log import QueryLog, read_query_log
from holdfast.reader import Cluster


def audit_checkpoint(
    directory: str,
    sink: str,
    match: str,
    settings: Mapping[str, str],
    *,
    where: str | None = None,
    is_distinct: bool = False,
    source: int | None = None,
    dead_letters: str | None = None,
    sink_settings: Mapping[str, str] | None = None,
) -> Report:
    """Whether the sink holds what the query with this checkpoint has read, once each.

    `settings` reach the cluster of the source, `sink_settings` that of a sink that is a topic, if it is another one.
    """
    table = open_table(sink, match, sink_settings or settings)
    conditions = () if where is None else parse_condition(where)
    log = read_query_log(directory, source)
    unproven = [
        *_wrong_topics(log, settings),
        *(
            Unproven(each, "no source of Kafka: what it read was not looked at", is_gap=True)
            for each in log.left_out
        ),
    ]
    if not log.batch_ids:
        why = (
            "no batch is committed"
            if log.committed < 0
            else "its only entry says where the next batch begins"
        )
        unproven.append(Unproven(f"anything of {directory}", why, is_gap=True))
    if not log.topic_ids:
        unproven.append(
            Unproven(
                "that the topics are still those that the query read",
                "Spark writes their names down, not their ids",
            )
        )
    return audit_matched(
        Question(
            subject=f"query {log.query_id or directory}",
            mode="checkpoint",
            settings=settings,
            scopes=log.scopes,
            begins=_begins(log),
            ends=f"the last batch committed, {log.committed}" if log.batch_ids else "no batch committed",
            table=table,
            conditions=conditions,
            is_distinct=is_distinct,
            dead_letters=read_dead_letters(dead_letters, settings),
            unproven=unproven,
            notes=_notes(log),
        )
    )


def _begins(log: QueryLog) -> str:
    if log.is_whole:
        return "the query's first batch"
    return f"the oldest entry kept, the end of batch {log.first - 1}; what came before it is not known"


def _notes(log: QueryLog) -> list[str]:
    if log.planned <= log.committed:
        return []
    count = log.planned - max(log.committed, log.first - 1)
    parts = [
        f"{place.topic}-{place.partition} {log.ends.get(place, 0)} to {end - 1}"
        for place, end in sorted(log.planned_ends.items())
        if end > log.ends.get(place, 0)
    ]
    listed = f": {', '.join(parts[:5])}" if parts else ""
    return [f"{count} batch{'es' if count > 1 else ''} planned and not committed, pending{listed}"]


def _wrong_topics(log: QueryLog, settings: Mapping[str, str]) -> list[Unproven]:
    """Topics that were made anew since the query read them."""
    if not log.topic_ids:
        return []
    with Cluster(settings) as cluster:
        now = cluster.topics(sorted(log.topic_ids))
    return [
        Unproven(
            f"all of topic {topic!r}",
            f"it was deleted and created again: the query read id {expected}, now it is {now[topic].topic_id}",
            is_gap=True,
        )
        for topic, expected in sorted(log.topic_ids.items())
        if now[topic].topic_id != expected
    ]
