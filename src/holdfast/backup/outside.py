"""Positions outside a restored cluster that are beyond what was restored.

Messages that were written after the backup are gone. Who has counted them somewhere else must be told, or it will skip
as many new ones, or believe that they are stored:

- Groups, whose committed offsets are in the backup itself. They were noted in one moment with the logs, so none should
  be beyond; one that is names an offset that nobody has yet.
- Pipelines, by the ledgers in their sinks (`ledgers`).
- Spools, by how many of their messages brokers have confirmed. A spool forgets those; the restored log has the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

from holdfast.backup.repository import FS, Backup, Repository, StoredPartition
from holdfast.broker.log.scan import read_batches
from holdfast.client.messages import ID_HEADER
from holdfast.client.spool.home import is_spool_id
from holdfast.client.spool.marks import parse_mark
from holdfast.client.spool.peek import SpoolPeek
from holdfast.errors import UsageError
from holdfast.wire.batch import parse_records, records_bytes


class Beyond(NamedTuple):
    """Something outside that has come further than what was restored."""

    what: str
    partition: str
    position: int
    """What it has come to: an offset, or how many messages of a spool."""
    restored: int
    """How far the restored log goes, in the same count."""
    advice: str


class NotExamined(NamedTuple):
    what: str
    reason: str


def ends_of(backup: Backup) -> dict[tuple[str, int], int]:
    return {(each.topic, each.index): each.end_offset for each in backup.partitions}


def groups_beyond(backup: Backup) -> list[Beyond]:
    ends = ends_of(backup)
    return [
        Beyond(
            f"group {group.group}",
            f"{each.topic}-{each.partition}",
            each.offset,
            ends.get((each.topic, each.partition), 0),
            f"holdfast groups reset-offsets --group {group.group} --topic {each.topic}:{each.partition} --to-latest "
            "--execute",
        )
        for group in backup.groups
        for each in group.offsets
        if each.offset > ends.get((each.topic, each.partition), 0)
    ]


def spools_beyond(
    repository: Repository, backup: Backup, homes: Iterable[str]
) -> Iterator[Beyond | NotExamined]:
    stored = {(each.topic, each.index): each for each in backup.partitions}
    for home in homes:
        if not FS.is_directory(home):
            raise UsageError(f"--spool {home}: there is no such directory")
        for spool in filter(is_spool_id, FS.list(home)):
            state = SpoolPeek(FS, f"{home}/{spool}").state(spool, is_in_use=False)
            if state.cluster_id != backup.cluster_id:
                reason = (
                    f"it is for cluster {state.cluster_id}" if state.cluster_id else "it has sent nothing yet"
                )
                yield NotExamined(f"spool {spool} in {home}", reason)
                continue
            for each in state.partitions:
                if each.partition < 0 or not each.confirmed:
                    continue
                partition = stored.get((each.topic, each.partition))
                found = _sequences_of(repository, partition, spool) if partition is not None else 0
                if each.confirmed > found:
                    yield Beyond(
                        f"spool {spool} in {home}",
                        f"{each.topic}-{each.partition}",
                        each.confirmed,
                        found,
                        f"its messages {found} to {each.confirmed - 1} were delivered and are lost; if whoever made "
                        "them can, let them be sent again",
                    )


def _sequences_of(repository: Repository, partition: StoredPartition, spool: str) -> int:
    """How many messages of a spool the partition has had: one more than the last sequence in it.

    A spool sends in the order of its sequences, so the newest segment that has any tells.
    """
    for segment in reversed(partition.segments):
        last = -1
        with closing(FS.open(repository.file(segment.file), "read")) as file:
            for batch in read_batches(file, segment.bytes):
                if batch.header.is_control:
                    continue
                for record in parse_records(records_bytes(batch.data, batch.header)):
                    for name, value in record.headers:
                        found = parse_mark(value) if name == ID_HEADER else None
                        if found is not None and found.spool == spool and not found.is_undecided:
                            last = max(last, found.sequence)
        if last >= 0:
            return last + 1
    return 0


def beyond_restored(
    repository: Repository,
    backup: Backup,
    pipelines: Sequence[str],
    spools: Sequence[str],
    goes_on_at: Mapping[tuple[str, int], int] | None = None,
) -> tuple[list[Beyond], list[NotExamined]]:
    """`goes_on_at` is the first offset that each restored partition gives out, where that is not its end."""
    found: list[Beyond | NotExamined] = [*groups_beyond(backup), *spools_beyond(repository, backup, spools)]
    if pipelines:
        # This brings the libraries of all sinks with it.
        from holdfast.backup.ledgers import pipelines_beyond

        found += pipelines_beyond(repository, backup, pipelines, goes_on_at or ends_of(backup))
    return (
        [each for each in found if isinstance(each, Beyond)],
        [each for each in found if isinstance(each, NotExamined)],
    )
