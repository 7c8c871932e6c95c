"""docs/METRICS.md names exactly the families there are; a series of a community board exists, or is listed there."""

from __future__ import annotations

from pathlib import Path

from holdfast.broker.node.metrics import FAMILIES
from holdfast.cli.metric_tables import COMPONENTS, reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "METRICS.md"

BOARDS_TEXT = """
kafka_broker_info kafka_brokers kafka_cluster_partition_atminisr kafka_cluster_partition_replicascount
kafka_cluster_partition_underminisr kafka_consumergroup_current_offset kafka_consumergroup_current_offset_sum
kafka_consumergroup_lag kafka_consumergroup_lag_sum kafka_consumergroup_members
kafka_consumergroupzookeeper_lag_zookeeper kafka_controller_controllerstats_uncleanleaderelections_total
kafka_controller_kafkacontroller_activecontrollercount kafka_controller_kafkacontroller_offlinepartitionscount
kafka_log_log_size kafka_log_logmanager_offlinelogdirectorycount
kafka_network_socketserver_networkprocessoravgidle_percent kafka_server_brokertopicmetrics_bytesin_total
kafka_server_brokertopicmetrics_bytesout_total kafka_server_brokertopicmetrics_failedfetchrequests_total
kafka_server_brokertopicmetrics_failedproducerequests_total kafka_server_brokertopicmetrics_messagesin_total
kafka_server_brokertopicmetrics_totalfetchrequests_total kafka_server_brokertopicmetrics_totalproducerequests_total
kafka_server_kafkarequesthandlerpool_requesthandleravgidle_percent kafka_server_kafkaserver_linux_disk_read_bytes
kafka_server_kafkaserver_linux_disk_write_bytes kafka_server_raftchannelmetrics_incoming_byte_total
kafka_server_raftchannelmetrics_outgoing_byte_total kafka_server_raftchannelmetrics_request_total
kafka_server_raftchannelmetrics_response_total kafka_server_raftmetrics_append_records_rate
kafka_server_raftmetrics_commit_latency_avg kafka_server_raftmetrics_current_epoch
kafka_server_raftmetrics_current_leader kafka_server_raftmetrics_current_state kafka_server_raftmetrics_current_vote
kafka_server_raftmetrics_fetch_records_rate kafka_server_raftmetrics_high_watermark
kafka_server_raftmetrics_log_end_offset kafka_server_replicamanager_leadercount
kafka_server_replicamanager_partitioncount kafka_server_replicamanager_underminisrpartitioncount
kafka_server_replicamanager_underreplicatedpartitions kafka_server_socket_server_metrics_connection_count
kafka_topic_partition_current_offset kafka_topic_partition_in_sync_replica kafka_topic_partition_leader
kafka_topic_partition_leader_is_preferred kafka_topic_partition_oldest_offset kafka_topic_partition_replicas
kafka_topic_partition_under_replicated_partition kafka_topic_partitions process_open_fds jvm_memory_used_bytes
jvm_threads_current jvm_gc_collection_seconds_count jvm_gc_collection_seconds_sum container_cpu_usage_seconds_total
container_memory_usage_bytes container_last_seen kubelet_volume_stats_available_bytes
kubelet_volume_stats_capacity_bytes
"""
BOARDS = BOARDS_TEXT.split()
"""By name, of the boards for kafka_exporter and Strimzi's for Kafka, KRaft and its exporter, and Strimzi's rules."""


def test_the_document_ends_with_the_tables_of_the_families() -> None:
    assert DOCUMENT.read_text(encoding="utf-8").endswith(reference()), (
        "run: python -m holdfast.cli.metric_tables"
    )


def test_what_boards_use_exists_or_is_listed_as_absent() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    absent = text.partition("that are absent\n")[2].partition("\n## ")[0]
    assert {name for name in BOARDS if f"`{name}`" in absent} == set(BOARDS) - set(FAMILIES)


def test_a_name_belongs_to_one_component_unless_it_means_the_same() -> None:
    kinds: dict[str, set[str]] = {}
    for families in COMPONENTS.values():
        for family in families.values():
            kinds.setdefault(family.name, set()).add(family.kind)
    assert [name for name, found in kinds.items() if len(found) > 1] == []
