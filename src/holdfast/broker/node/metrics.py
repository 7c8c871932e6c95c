"""The broker's metrics: every family by name, and how a scrape gathers them.

The names are those that boards and alert rules already use: kafka_exporter's for topics and groups, Strimzi's for what
Apache Kafka tells over JMX, and `holdfast_*` for what is ours alone. `docs/METRICS.md` is written from `FAMILIES`.

A scrape runs on the broker's own thread, so `scrape` is a generator that stops every `STRIDE` partitions or committed
offsets: the shell goes on with it when nothing else is due. What it gathers is not of one moment, but of the few
milliseconds the scrape takes.

The number of series is bounded. Topics and groups are named by clients, so at most `PARTITIONS_MAX` partitions and
`COMMITTED_MAX` committed offsets are shown; `holdfast_metrics_left_out` tells how many were not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from holdfast.broker.node.meter import BOUNDS, TopicTraffic, api_name
from holdfast.broker.node.troubles import Kind
from holdfast.broker.transactions.model import TransactionState
from holdfast.exposition import KAFKA_EXPORTER, Families, Family, Histogram, Sheet, escaped, quantile, table
from holdfast.seams import Now

if TYPE_CHECKING:
    from holdfast.broker.node.node import Node

STRIDE: Final = 20
"""Partitions or committed offsets gathered at a time: a fifth of a millisecond."""
PARTITIONS_MAX: Final = 10_000
COMMITTED_MAX: Final = 20_000
QUANTILES: Final = ("0.50", "0.75", "0.95", "0.98", "0.99", "0.999")
"""As Kafka's JMX beans have them."""

_PLACE: Final = ("topic", "partition")
_TOPIC: Final = ("topic",)
_REQUEST: Final = ("request",)


def _traffic(name: str, meaning: str) -> Family:
    name = f"kafka_server_brokertopicmetrics_{name}_total"
    return Family(name, "counter", f"{meaning}, by topic, and without a topic for all.", _TOPIC)


FAMILIES: Final[Families] = table(
    *KAFKA_EXPORTER.values(),
    # Strimzi's names for what Apache Kafka tells over JMX
    _traffic("messagesin", "Messages written"),
    _traffic("bytesin", "Bytes of batches written"),
    _traffic("bytesout", "Bytes of batches read"),
    _traffic("totalproducerequests", "Batches stored"),
    _traffic("totalfetchrequests", "Partitions read by fetches"),
    _traffic("failedproducerequests", "Batches refused"),
    _traffic("failedfetchrequests", "Partitions that a fetch was refused"),
    Family("kafka_server_replicamanager_partitioncount", "gauge", "Partitions with a replica here."),
    Family("kafka_server_replicamanager_leadercount", "gauge", "Partitions led here."),
    Family(
        "kafka_server_replicamanager_underreplicatedpartitions", "gauge", "Partitions with replicas missing."
    ),
    Family(
        "kafka_server_replicamanager_underminisrpartitioncount",
        "gauge",
        "Partitions with fewer replicas in sync than min.insync.replicas.",
    ),
    Family(
        "kafka_server_replicamanager_atminisrpartitioncount",
        "gauge",
        "Partitions with as many replicas in sync as min.insync.replicas.",
    ),
    Family("kafka_server_replicamanager_offlinereplicacount", "gauge", "Replicas here that are offline."),
    Family("kafka_server_replicamanager_isrshrinks_total", "counter", "Replicas that fell out of sync."),
    Family("kafka_server_replicamanager_isrexpands_total", "counter", "Replicas that came in sync."),
    Family("kafka_cluster_partition_replicascount", "gauge", "Replicas of a partition.", _PLACE),
    Family("kafka_cluster_partition_atminisr", "gauge", "1: as few in sync as is allowed.", _PLACE),
    Family("kafka_cluster_partition_underminisr", "gauge", "1: fewer in sync than is allowed.", _PLACE),
    Family("kafka_controller_kafkacontroller_activecontrollercount", "gauge", "1: this is the controller."),
    Family("kafka_controller_kafkacontroller_offlinepartitionscount", "gauge", "Partitions without a leader."),
    Family("kafka_controller_kafkacontroller_globaltopiccount", "gauge", "Topics of the cluster."),
    Family("kafka_controller_kafkacontroller_globalpartitioncount", "gauge", "Partitions of the cluster."),
    Family("kafka_controller_kafkacontroller_activebrokercount", "gauge", "Brokers that are up."),
    Family("kafka_controller_kafkacontroller_fencedbrokercount", "gauge", "Brokers that are registered and down."),
    Family(
        "kafka_controller_kafkacontroller_preferredreplicaimbalancecount",
        "gauge",
        "Partitions that another than the preferred replica leads.",
    ),
    Family(
        "kafka_controller_controllerstats_uncleanleaderelections_total",
        "counter",
        "Leaders chosen from replicas that were not in sync.",
    ),
    Family("kafka_server_raftmetrics_current_leader", "gauge", "The id of the metadata log's leader."),
    Family("kafka_server_raftmetrics_current_epoch", "gauge", "The leader epoch of the metadata log."),
    Family("kafka_server_raftmetrics_high_watermark", "gauge", "Where the metadata log is durable."),
    Family("kafka_server_raftmetrics_log_end_offset", "gauge", "Where the metadata log ends."),
    Family("kafka_log_log_size", "gauge", "Bytes of a partition's segments.", _PLACE),
    Family("kafka_log_logmanager_offlinelogdirectorycount", "gauge", "Log directories that are offline."),
    Family(
        "kafka_network_requestmetrics_requests_total",
        "counter",
        "Requests answered.",
        ("request", "version"),
    ),
    Family(
        "kafka_network_requestmetrics_errors_total",
        "counter",
        "Errors that responses told.",
        ("request", "error"),
    ),
    Family(
        "kafka_network_requestmetrics_totaltimems",
        "gauge",
        "Milliseconds from a request's last byte to its response, of the last minute or two.",
        ("request", "quantile"),
    ),
    Family("kafka_network_requestmetrics_totaltimems_count", "counter", "Requests answered.", _REQUEST),
    Family(
        "kafka_server_socket_server_metrics_connection_count", "gauge", "Open connections.", ("listener",)
    ),
    Family("kafka_server_kafkaserver_linux_disk_read_bytes", "gauge", "Bytes this process had read from disks."),
    Family("kafka_server_kafkaserver_linux_disk_write_bytes", "gauge", "Bytes this process had written to disks."),
    # The process, by the names of Prometheus' own clients
    Family("process_cpu_seconds_total", "counter", "Processor time of this process."),
    Family("process_resident_memory_bytes", "gauge", "Memory this process holds."),
    Family("process_open_fds", "gauge", "Open descriptors."),
    Family("process_max_fds", "gauge", "Descriptors that may be open."),
    Family("process_start_time_seconds", "gauge", "When the broker's process began."),
    # Ours
    Family("holdfast_build_info", "gauge", "1, by what runs.", ("version", "python")),
    Family("holdfast_ready", "gauge", "1 while /readyz says so."),
    Family("holdfast_flush_seconds", "histogram", "How long flushes took that somebody waited for."),
    Family("holdfast_flush_messages", "histogram", "Messages that one flush of a partition made durable."),
    Family("holdfast_flush_oldest_seconds", "gauge", "How long the oldest flush has been under way."),
    Family(
        "holdfast_partition_durable_end_offset", "gauge", "Everything below is on disk.", _PLACE
    ),
    Family(
        "holdfast_partition_last_stable_offset",
        "gauge",
        "Where read_committed ends: at the first open transaction.",
        _PLACE,
    ),
    Family("holdfast_requests_waiting", "gauge", "Requests that are not answered yet.", _REQUEST),
    Family("holdfast_request_seconds", "histogram", "From a request's last byte to its response.", _REQUEST),
    Family(
        "holdfast_request_part_seconds_total",
        "counter",
        "Where the time of requests went: queue, append, flush, wait.",
        ("request", "part"),
    ),
    Family("holdfast_refusals_total", "counter", "Errors that responses told, by reason.", ("request", "error")),
    Family("holdfast_open_transactions", "gauge", "Transactions that are not decided, or not told everywhere."),
    Family("holdfast_open_transaction_oldest_seconds", "gauge", "How long the oldest of them has been open."),
    Family("holdfast_troubles", "gauge", "What is wrong now, by kind.", ("kind",)),
    Family("holdfast_troubles_total", "counter", "How often each kind of trouble has shown.", ("kind",)),
    Family("holdfast_log_directory_online", "gauge", "1: in service. 0: until restart.", ("directory",)),
    Family("holdfast_log_directory_free_bytes", "gauge", "Room where a log directory is.", ("directory",)),
    Family("holdfast_cut_bytes", "gauge", "Bytes that the last start cut off damaged tails of logs."),
    Family("holdfast_scrub_passes_total", "counter", "Times that the scrub has read every log."),
    Family("holdfast_damaged_segments", "gauge", "Segments that the scrub found damaged."),
    Family("holdfast_clock_jumps_total", "counter", "Times that the wall clock jumped ahead."),
    Family("holdfast_event_loop_delay_seconds", "histogram", "How late the broker's loop came to its timers."),
    Family("holdfast_metrics_left_out", "gauge", "What a scrape did not show for want of room.", ("what",)),
)  # fmt: skip


def scrape(node: Node, now: Now, shell: Callable[[Sheet], None]) -> Iterator[str]:
    """The text of one scrape, in pieces; many of the first are empty, and are there for the shell to breathe.

    `shell` puts what only the shell knows: sockets, the process, how long flushes take.
    """
    sheet = Sheet(FAMILIES)
    shell(sheet)
    _put_cluster(sheet, node)
    for _ in _look_at_logs(node):
        yield ""
    _put_requests(sheet, node)
    _put_troubles(sheet, node)
    yield ""
    _put_transactions(sheet, node, now)
    yield ""
    for _ in _put_partitions(sheet, node):
        yield ""
    for _ in _put_groups(sheet, node):
        yield ""
    yield from sheet.pieces()


def _put_cluster(sheet: Sheet, node: Node) -> None:
    put = sheet.put
    image = node.metadata.image
    me = node.identity.node_id
    put("kafka_brokers", len(image.brokers))
    for endpoint in node.identity.endpoints.values():
        put("kafka_broker_info", me, id=str(me), address=f"{endpoint.host}:{endpoint.port}")
    put("kafka_controller_kafkacontroller_activecontrollercount", 1)
    put("kafka_controller_kafkacontroller_globaltopiccount", len(image.topics))
    partitions = sum(len(topic.partitions) for topic in image.topics.values())
    put("kafka_controller_kafkacontroller_globalpartitioncount", partitions)
    put("kafka_controller_kafkacontroller_activebrokercount", 1)
    put("kafka_controller_kafkacontroller_fencedbrokercount", max(0, len(image.brokers) - 1))
    # One node alone has no followers to fall behind and nobody else to lead.
    for name in (
        "kafka_controller_controllerstats_uncleanleaderelections_total",
        "kafka_server_replicamanager_isrshrinks_total",
        "kafka_server_replicamanager_isrexpands_total",
    ):
        put(name, 0)
    metadata = node.metadata.hosted
    put("kafka_server_raftmetrics_current_leader", me)
    put("kafka_server_raftmetrics_current_epoch", metadata.leader_epoch)
    put("kafka_server_raftmetrics_high_watermark", metadata.offsets.high_watermark.offset)
    put("kafka_server_raftmetrics_log_end_offset", metadata.log.end_offset)


_TRAFFIC: Final = {
    "messagesin": "messages_in",
    "bytesin": "bytes_in",
    "bytesout": "bytes_out",
    "totalproducerequests": "produces",
    "totalfetchrequests": "fetches",
    "failedproducerequests": "failed_produces",
    "failedfetchrequests": "failed_fetches",
}


def _look_at_logs(node: Node) -> Iterator[None]:
    """What topics took since the broker started is in their logs."""
    for traffic in node.meter.topics.values():
        traffic.messages_in = traffic.bytes_in = 0
    for number, hosted in enumerate(list(node.partitions)):
        hosted.traffic.messages_in += hosted.log.appended_messages
        hosted.traffic.bytes_in += hosted.log.appended_bytes
        if number % (10 * STRIDE) == 0:
            yield


def _put_requests(sheet: Sheet, node: Node) -> None:
    put = sheet.put
    meter = node.meter
    meter.add_up()
    everything = TopicTraffic()
    for traffic in (meter.elsewhere, *meter.topics.values()):
        everything.add(traffic)
    topics = list(islice(meter.topics.items(), PARTITIONS_MAX))
    for name, attribute in _TRAFFIC.items():
        name = f"kafka_server_brokertopicmetrics_{name}_total"
        put(name, getattr(everything, attribute))
        sheet.lines(name).extend(
            f'{name}{{topic="{escaped(topic)}"}} {getattr(traffic, attribute)}' for topic, traffic in topics
        )
    by_api = {api_name(api): versions for api, versions in sorted(meter.by_api().items())}
    counts: dict[str, list[int]] = {}
    for request, versions in by_api.items():
        together = Histogram(BOUNDS)
        for version, stats in versions:
            answered = stats.answered
            put(
                "kafka_network_requestmetrics_requests_total", answered, request=request, version=str(version)
            )
            together.counts = [
                one + more for one, more in zip(together.counts, stats.histogram_counts(), strict=True)
            ]
            together.total += stats.total_ns / 1e9
        counts[request] = together.counts
        put("kafka_network_requestmetrics_totaltimems_count", sum(together.counts), request=request)
        sheet.put_histogram("holdfast_request_seconds", together, request=request)
        for part in ("queue", "append", "flush", "wait"):
            seconds = sum(getattr(stats, f"{part}_ns") for _, stats in versions) / 1e9
            put("holdfast_request_part_seconds_total", seconds, request=request, part=part)
    for request, recent in meter.recent_counts(counts).items():
        for share in QUANTILES:
            milliseconds = 1000 * quantile(BOUNDS, recent, float(share))
            name = "kafka_network_requestmetrics_totaltimems"
            put(name, round(milliseconds, 3), request=request, quantile=share)
    for (api, code), count in meter.refusals.items():
        labels = {"request": api_name(api), "error": code.name.upper()}
        put("kafka_network_requestmetrics_errors_total", count, **labels)
        put("holdfast_refusals_total", count, **labels)
    sheet.put_histogram("holdfast_flush_messages", meter.flush_messages)
    put("holdfast_scrub_passes_total", meter.scrub_passes)


def _put_troubles(sheet: Sheet, node: Node) -> None:
    put = sheet.put
    troubles = node.troubles
    for kind in Kind:
        put("holdfast_troubles", len(troubles.lasting(kind)), kind=kind)
        put("holdfast_troubles_total", troubles.counts[kind], kind=kind)
    put("holdfast_clock_jumps_total", troubles.counts[Kind.CLOCK_AHEAD])
    put("holdfast_damaged_segments", len(troubles.lasting(Kind.DAMAGED)))
    put("holdfast_flush_oldest_seconds", node.commit.oldest_flush_seconds)
    offline = 0
    for directory in node.directories:
        offline += directory.offline
        put("holdfast_log_directory_online", not directory.offline, directory=directory.path)
        try:
            free_bytes = node.seams.fs.free_bytes(directory.path)
        except OSError:
            continue  # it has gone, which the other family tells
        put("holdfast_log_directory_free_bytes", free_bytes, directory=directory.path)
    put("kafka_log_logmanager_offlinelogdirectorycount", offline)


def _put_transactions(sheet: Sheet, node: Node, now: Now) -> None:
    is_open = (TransactionState.ONGOING, TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)
    starts = [
        metadata.start_ms
        for coordinator in node.transactions
        for _, metadata in coordinator.machine
        if metadata.state in is_open
    ]
    sheet.put("holdfast_open_transactions", len(starts))
    age_ms = max(0, now.wall_ms - min(starts)) if starts else 0
    sheet.put("holdfast_open_transaction_oldest_seconds", age_ms / 1000)


def _put_partitions(sheet: Sheet, node: Node) -> Iterator[None]:
    lines = sheet.lines
    current = lines("kafka_topic_partition_current_offset")
    oldest = lines("kafka_topic_partition_oldest_offset")
    in_sync = lines("kafka_topic_partition_in_sync_replica")
    leader = lines("kafka_topic_partition_leader")
    preferred = lines("kafka_topic_partition_leader_is_preferred")
    replicas = lines("kafka_topic_partition_replicas")
    under = lines("kafka_topic_partition_under_replicated_partition")
    count = lines("kafka_cluster_partition_replicascount")
    at_minimum = lines("kafka_cluster_partition_atminisr")
    under_minimum = lines("kafka_cluster_partition_underminisr")
    size = lines("kafka_log_log_size")
    durable = lines("holdfast_partition_durable_end_offset")
    stable = lines("holdfast_partition_last_stable_offset")
    offline = led = missing = below = at = imbalanced = cut_bytes = shown = left_out = 0
    for topic in list(node.metadata.image.topics.values()):
        name = escaped(topic.name)
        lines("kafka_topic_partitions").append(
            f'kafka_topic_partitions{{topic="{name}"}} {len(topic.partitions)}'
        )
        minimum = node.settings.topic(topic.name).min_insync_replicas
        for partition in topic.partitions:
            hosted = node.partitions.get(topic.name, partition.index)
            is_online = hosted is not None and not hosted.offline
            offline += not is_online
            led += is_online
            have, want = len(partition.isr), len(partition.replicas)
            missing += have < want
            below += have < minimum
            at += have == minimum
            imbalanced += partition.leader != partition.replicas[0]
            if hosted is not None:
                cut_bytes += hosted.log.growth.cut_bytes
            if (shown + left_out) % STRIDE == 0:
                yield
            if shown >= PARTITIONS_MAX:
                left_out += 1
                continue
            shown += 1
            labels = f'{{topic="{name}",partition="{partition.index}"}}'
            in_sync.append(f"kafka_topic_partition_in_sync_replica{labels} {have if is_online else 0}")
            leader.append(f"kafka_topic_partition_leader{labels} {partition.leader if is_online else -1}")
            preferred.append(
                f"kafka_topic_partition_leader_is_preferred{labels} {int(partition.leader == partition.replicas[0])}"
            )
            replicas.append(f"kafka_topic_partition_replicas{labels} {want}")
            under.append(f"kafka_topic_partition_under_replicated_partition{labels} {int(have < want)}")
            count.append(f"kafka_cluster_partition_replicascount{labels} {want}")
            at_minimum.append(f"kafka_cluster_partition_atminisr{labels} {int(have == minimum)}")
            under_minimum.append(f"kafka_cluster_partition_underminisr{labels} {int(have < minimum)}")
            if hosted is not None:
                log, offsets = hosted.log, hosted.offsets
                current.append(
                    f"kafka_topic_partition_current_offset{labels} {offsets.high_watermark.offset}"
                )
                oldest.append(f"kafka_topic_partition_oldest_offset{labels} {log.start_offset}")
                size.append(f"kafka_log_log_size{labels} {log.size}")
                durable.append(f"holdfast_partition_durable_end_offset{labels} {offsets.durable_end.offset}")
                stable.append(f"holdfast_partition_last_stable_offset{labels} {offsets.last_stable_offset}")
    put = sheet.put
    put("kafka_server_replicamanager_partitioncount", led + offline)
    put("kafka_server_replicamanager_leadercount", led)
    put("kafka_server_replicamanager_underreplicatedpartitions", missing)
    put("kafka_server_replicamanager_underminisrpartitioncount", below)
    put("kafka_server_replicamanager_atminisrpartitioncount", at)
    put("kafka_server_replicamanager_offlinereplicacount", offline)
    put("kafka_controller_kafkacontroller_offlinepartitionscount", offline)
    put("kafka_controller_kafkacontroller_preferredreplicaimbalancecount", imbalanced)
    put("holdfast_cut_bytes", cut_bytes)
    put("holdfast_metrics_left_out", left_out, what="partitions")
    yield


def _put_groups(sheet: Sheet, node: Node) -> Iterator[None]:
    offset_lines = sheet.lines("kafka_consumergroup_current_offset")
    lag_lines = sheet.lines("kafka_consumergroup_lag")
    shown = left_out = steps = 0
    for coordinator in node.groups:
        machine = coordinator.machine
        for group_id in list({**machine.groups, **dict.fromkeys(machine.offsets.groups())}):
            steps += 1
            if steps % STRIDE == 0:
                yield
            if steps > COMMITTED_MAX:
                left_out += 1
                continue
            group = machine.groups.get(group_id)
            sheet.put(
                "kafka_consumergroup_members",
                len(group.members) if group is not None else 0,
                consumergroup=group_id,
            )
            name = escaped(group_id)
            sums: dict[str, tuple[int, int]] = {}
            for (topic, index), committed in list(machine.offsets.of_group(group_id).items()):
                steps += 1
                if steps % STRIDE == 0:
                    yield
                hosted = node.partitions.get(topic, index)
                if hosted is None:
                    continue
                lag = max(0, hosted.offsets.high_watermark.offset - committed.offset)
                before = sums.get(topic, (0, 0))
                sums[topic] = (before[0] + committed.offset, before[1] + lag)
                if shown >= COMMITTED_MAX:
                    left_out += 1
                    continue
                shown += 1
                labels = f'{{consumergroup="{name}",topic="{escaped(topic)}",partition="{index}"}}'
                offset_lines.append(f"kafka_consumergroup_current_offset{labels} {committed.offset}")
                lag_lines.append(f"kafka_consumergroup_lag{labels} {lag}")
            for topic, (offset, lag) in sums.items():
                labels_of = {"consumergroup": group_id, "topic": topic}
                sheet.put("kafka_consumergroup_current_offset_sum", offset, **labels_of)
                sheet.put("kafka_consumergroup_lag_sum", lag, **labels_of)
    sheet.put("holdfast_metrics_left_out", left_out, what="committed offsets")
    yield
