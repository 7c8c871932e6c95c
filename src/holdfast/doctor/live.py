"""The doctor at a live cluster, ours or Apache Kafka's: ask once, judge, and say what could not be seen.

    examination = examine_cluster({"bootstrap.servers": "127.0.0.1:9092"}, history="looks.jsonl")

Nothing is changed: `apply_fixes` does that, when it is called. What it takes to look: DESCRIBE on topics, groups,
transactional ids and the cluster, DESCRIBE_CONFIGS on topics and the cluster, READ where a transaction is held open.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from holdfast.doctor.client_settings import ClientSettings
from holdfast.doctor.combinations import against_topics
from holdfast.doctor.findings import ConfigChange, Examination, Finding, Severity
from holdfast.doctor.live_ask import Cluster, alter_configs
from holdfast.doctor.live_cluster_rules import cluster_findings
from holdfast.doctor.live_collect import collect
from holdfast.doctor.live_group_rules import group_findings, new_partitions, transaction_findings
from holdfast.doctor.live_snapshot import Look, Snapshot, append_looks, read_looks

__all__ = ["apply_fixes", "changes_of", "examine_cluster", "judge"]


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def examine_cluster(
    settings: Mapping[str, str],
    *,
    groups: Collection[str] = (),
    history: str | None = None,
    looks: list[Look] | None = None,
    clients: Sequence[ClientSettings] = (),
    command_flags: str = "",
    now_ms: Callable[[], int] = _wall_ms,
) -> Examination:
    """Look at a cluster once.

    `settings` are a client's, with bootstrap.servers; `groups` the ones to look at, all by default. Earlier looks come
    from the file `history`, which this look is added to, and from `looks`, which it is appended to: a caller that
    watches passes the same list again. `command_flags` are added to the commands that findings propose.
    Raises `holdfast.admin.errors.Unreachable` when nobody answers.
    """
    earlier, gaps = ([], []) if history is None else read_looks(history)
    with Cluster(settings) as cluster:
        snapshot = collect(cluster, groups, now_ms)
    snapshot.gaps.extend(gaps)
    examination = judge(snapshot, [*earlier, *(looks or ())], clients)
    if command_flags:
        examination.findings = [_reaching(found, command_flags) for found in examination.findings]
    if history is not None:
        append_looks(history, [snapshot.look()])
    if looks is not None:
        looks.append(snapshot.look())
    return examination


def judge(
    snapshot: Snapshot, looks: Sequence[Look] = (), clients: Sequence[ClientSettings] = ()
) -> Examination:
    """What the rules say about a snapshot."""
    examination = Examination()
    examination.add(cluster_findings(snapshot))
    ordered = sorted({look.time_ms: look for look in looks}.values(), key=lambda look: look.time_ms)
    examination.add(group_findings(snapshot, ordered))
    examination.add(new_partitions(snapshot, _from_the_start(clients)))
    examination.add(transaction_findings(snapshot))
    known = {(found.id, found.place) for found in examination.findings}
    for found in against_topics(clients, snapshot.topic_facts()):
        # A client that is wrong for a thousand topics is wrong once.
        if (found.id, found.place) not in known:
            known.add((found.id, found.place))
            examination.add([found])
    examination.gaps.extend(snapshot.gaps)
    partitions = sum(len(topic.partitions) for topic in snapshot.topics.values())
    words = (
        f"a cluster of {_count(len(snapshot.brokers), 'broker')}: {_count(len(snapshot.topics), 'topic')}, "
        f"{_count(partitions, 'partition')}, {_count(len(snapshot.groups), 'group')}"
    )
    if ordered:
        words += f", compared with {_count(len(ordered), 'earlier look')}"
    examination.examined.append(words + (", in part" if snapshot.gaps else ""))
    return examination


def _from_the_start(clients: Sequence[ClientSettings]) -> set[str]:
    """Groups whose consumers are all known to begin at the earliest message."""
    resets: defaultdict[str, set[str | None]] = defaultdict(set)
    for client in clients:
        if client.role == "consumer" and (group := client.text("group.id")):
            resets[group].add(client.text("auto.offset.reset"))
    return {group for group, some in resets.items() if some == {"earliest"}}


def _reaching(found: Finding, flags: str) -> Finding:
    """The finding with a command that finds its cluster."""
    if found.fix is None or found.fix.kind != "command":
        return found
    command, hash_sign, remark = found.fix.text.partition("  #")
    return replace(found, fix=replace(found.fix, text=f"{command} {flags}{hash_sign}{remark}"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def changes_of(findings: Iterable[Finding]) -> list[ConfigChange]:
    """The changes a program can make, each setting once: the first finding in order decides, the longest retention.

    A note proposes nothing: what it is about may well be meant.
    """
    changes: dict[tuple[str, str, str], ConfigChange] = {}
    for found in findings:
        change = None if found.fix is None or found.severity is Severity.NOTE else found.fix.change
        if change is None:
            continue
        key = (change.resource_type, change.resource_name, change.setting)
        known = changes.setdefault(key, change)
        if change.setting == "retention.ms" and int(change.value) > int(known.value):
            changes[key] = change
    return list(changes.values())


def apply_fixes(
    settings: Mapping[str, str], changes: Sequence[ConfigChange]
) -> list[tuple[ConfigChange, str | None]]:
    """Make changes of settings; for each, what the cluster objected, or None."""
    with Cluster(settings) as cluster:
        return alter_configs(cluster, changes)
