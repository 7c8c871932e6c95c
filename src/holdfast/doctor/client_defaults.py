"""What each client does when nothing is said: names, defaults and what it makes of a name it does not know.

Defaults differ between clients and decide. The facts are those of the Java client 4.3, librdkafka 2.16 (which
confluent-kafka is), kafka-python 3.0 and aiokafka 0.14; a test compares the Python ones with the installed packages.
Kafka's dotted names are the common language: `canonical` turns a client's own name into it, `own_name` back.

Two defaults are not constants. The Java client and kafka-python are idempotent unless acks, retries or
max.in.flight forbid it, and then stop being so without an error. aiokafka waits for the leader alone (acks=1) unless
idempotence is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal

Role = Literal["producer", "consumer"]
Kind = Literal["int", "bool", "acks", "reset", "isolation", "text"]


class Client(StrEnum):
    JAVA = "java"
    LIBRDKAFKA = "librdkafka"
    KAFKA_PYTHON = "kafka-python"
    AIOKAFKA = "aiokafka"

    @property
    def words(self) -> str:
        return "the Java client" if self is Client.JAVA else self.value


INFINITE: Final = 2**31 - 1


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OWN: Final[Mapping[tuple[Client, Role], frozenset[str]]] = {
    (Client.JAVA, "producer"): _names(
        """acks batch.size buffer.memory compression.gzip.level compression.lz4.level compression.type
    compression.zstd.level delivery.timeout.ms enable.idempotence key.serializer linger.ms max.block.ms
    max.in.flight.requests.per.connection max.request.size metadata.max.idle.ms
    partitioner.adaptive.partitioning.enable partitioner.availability.timeout.ms partitioner.class
    partitioner.ignore.keys retries transaction.timeout.ms transaction.two.phase.commit.enable transactional.id
    value.serializer"""
    ),
    (Client.JAVA, "consumer"): _names(
        """allow.auto.create.topics auto.commit.interval.ms auto.offset.reset check.crcs client.rack
    default.api.timeout.ms enable.auto.commit exclude.internal.topics fetch.max.bytes fetch.max.wait.ms
    fetch.min.bytes group.id group.instance.id group.protocol group.remote.assignor heartbeat.interval.ms
    isolation.level key.deserializer max.partition.fetch.bytes max.poll.interval.ms max.poll.records
    partition.assignment.strategy session.timeout.ms share.acknowledgement.mode share.acquire.mode
    value.deserializer"""
    ),
    (Client.LIBRDKAFKA, "producer"): _names(
        """transactional.id transaction.timeout.ms enable.idempotence enable.gapless.guarantee
    queue.buffering.max.messages queue.buffering.max.kbytes queue.buffering.max.ms linger.ms
    message.send.max.retries retries queue.buffering.backpressure.threshold compression.codec compression.type
    batch.num.messages batch.size delivery.report.only.error dr_cb dr_msg_cb on_delivery
    sticky.partitioning.linger.ms request.required.acks acks request.timeout.ms message.timeout.ms
    delivery.timeout.ms queuing.strategy produce.offset.report partitioner partitioner_cb msg_order_cmp
    compression.level key.serializer value.serializer"""
    ),
    (Client.LIBRDKAFKA, "consumer"): _names(
        """group.id group.instance.id partition.assignment.strategy session.timeout.ms heartbeat.interval.ms
    group.protocol.type group.protocol group.remote.assignor coordinator.query.interval.ms max.poll.interval.ms
    enable.auto.commit auto.commit.enable auto.commit.interval.ms enable.auto.offset.store queued.min.messages
    queued.max.messages.kbytes fetch.wait.max.ms fetch.queue.backoff.ms fetch.message.max.bytes
    max.partition.fetch.bytes fetch.max.bytes fetch.min.bytes fetch.error.backoff.ms offset.store.method
    isolation.level consume_cb rebalance_cb offset_commit_cb on_commit enable.partition.eof check.crcs
    auto.offset.reset offset.store.path offset.store.sync.interval.ms consume.callback.max.messages
    max.poll.records share.acknowledgement.mode key.deserializer value.deserializer"""
    ),
    (Client.KAFKA_PYTHON, "producer"): _names(
        """key_serializer value_serializer enable_idempotence transactional_id transaction_timeout_ms
    delivery_timeout_ms acks compression_type retries batch_size linger_ms partitioner max_block_ms
    max_request_size buffer_memory"""
    ),
    (Client.KAFKA_PYTHON, "consumer"): _names(
        """client_rack group_id group_instance_id key_deserializer value_deserializer
    enable_incremental_fetch_sessions fetch_max_wait_ms fetch_min_bytes fetch_max_bytes
    max_partition_fetch_bytes auto_offset_reset enable_auto_commit auto_commit_interval_ms
    default_offset_commit_callback check_crcs isolation_level partition_assignment_strategy max_poll_records
    max_poll_interval_ms session_timeout_ms heartbeat_interval_ms consumer_timeout_ms exclude_internal_topics
    metric_group_prefix leave_group_on_close"""
    ),
    (Client.AIOKAFKA, "producer"): _names(
        """acks key_serializer value_serializer compression_type max_batch_size partitioner max_request_size linger_ms
    enable_idempotence transactional_id transaction_timeout_ms"""
    ),
    (Client.AIOKAFKA, "consumer"): _names(
        """group_id group_instance_id key_deserializer value_deserializer fetch_max_wait_ms fetch_max_bytes
    fetch_min_bytes max_partition_fetch_bytes auto_offset_reset enable_auto_commit auto_commit_interval_ms
    check_crcs partition_assignment_strategy max_poll_interval_ms rebalance_timeout_ms session_timeout_ms
    heartbeat_interval_ms consumer_timeout_ms max_poll_records exclude_internal_topics isolation_level
    client_rack"""
    ),
}
_BOTH: Final[Mapping[Client, frozenset[str]]] = {
    Client.JAVA: _names(
        """bootstrap.servers client.dns.lookup client.id config.providers connections.max.idle.ms enable.metrics.push
    interceptor.classes metadata.max.age.ms metadata.recovery.rebootstrap.trigger.ms metadata.recovery.strategy
    metric.reporters metrics.num.samples metrics.recording.level metrics.sample.window.ms receive.buffer.bytes
    reconnect.backoff.max.ms reconnect.backoff.ms request.timeout.ms retry.backoff.max.ms retry.backoff.ms
    security.protocol security.providers send.buffer.bytes socket.connection.setup.timeout.max.ms
    socket.connection.setup.timeout.ms auto.include.jmx.reporter"""
    ),
    Client.LIBRDKAFKA: _names(
        """builtin.features client.id metadata.broker.list bootstrap.servers message.max.bytes message.copy.max.bytes
    receive.message.max.bytes max.in.flight.requests.per.connection max.in.flight metadata.recovery.strategy
    metadata.recovery.rebootstrap.trigger.ms topic.metadata.refresh.interval.ms metadata.max.age.ms
    topic.metadata.refresh.fast.interval.ms topic.metadata.refresh.fast.cnt topic.metadata.refresh.sparse
    topic.metadata.propagation.max.ms topic.blacklist debug socket.timeout.ms socket.blocking.max.ms
    socket.send.buffer.bytes socket.receive.buffer.bytes socket.keepalive.enable socket.nagle.disable
    socket.max.fails broker.address.ttl broker.address.family socket.connection.setup.timeout.ms
    connections.max.idle.ms reconnect.backoff.jitter.ms reconnect.backoff.ms reconnect.backoff.max.ms
    statistics.interval.ms enabled_events error_cb throttle_cb stats_cb log_cb log_level log.queue
    log.thread.name enable.random.seed log.connection.close background_event_cb socket_cb connect_cb
    closesocket_cb open_cb resolve_cb opaque default_topic_conf default.topic.config
    internal.termination.signal api.version.request api.version.request.timeout.ms api.version.fallback.ms
    broker.version.fallback allow.auto.create.topics security.protocol enable.ssl.certificate.verification
    plugin.library.paths interceptors client.rack client.dns.lookup enable.metrics.push retry.backoff.ms
    retry.backoff.max.ms oauth_cb oauthbearer_token_refresh_cb enable.sasl.oauthbearer.unsecure.jwt logger
    https.ca.location https.ca.pem"""
    ),
    Client.KAFKA_PYTHON: _names(
        """bootstrap_servers client_id connections_max_idle_ms metadata_max_age_ms retry_backoff_ms request_timeout_ms
    receive_buffer_bytes receive_message_max_bytes send_buffer_bytes socket_options reconnect_backoff_ms
    reconnect_backoff_max_ms max_in_flight_requests_per_connection security_protocol ssl_context
    ssl_check_hostname ssl_cafile ssl_certfile ssl_keyfile ssl_crlfile ssl_password ssl_ciphers api_version
    api_version_auto_timeout_ms bootstrap_timeout_ms metric_reporters metrics_enabled metrics_num_samples
    metrics_sample_window_ms selector sasl_mechanism sasl_plain_username sasl_plain_password
    sasl_kerberos_name sasl_kerberos_service_name sasl_kerberos_domain_name sasl_oauth_token_provider proxy_url
    socks5_proxy kafka_client client_dns_lookup allow_auto_create_topics"""
    ),
    Client.AIOKAFKA: _names(
        """loop bootstrap_servers client_id metadata_max_age_ms request_timeout_ms api_version retry_backoff_ms
    security_protocol ssl_context connections_max_idle_ms sasl_mechanism sasl_plain_password
    sasl_plain_username sasl_kerberos_service_name sasl_kerberos_domain_name
    sasl_oauth_token_provider"""
    ),
}
SECURITY_PREFIXES: Final = ("ssl.", "sasl.", "ssl_", "sasl_")
"""Names below these are the business of security; whether they are spelt right shows when the client connects."""


def known_names(client: Client, role: Role) -> frozenset[str]:
    """What a client of this role understands, in the client's own spelling."""
    return _BOTH[client] | _OWN[client, role]


def is_known(client: Client, role: Role, name: str) -> bool:
    return name in known_names(client, role) or name.startswith(SECURITY_PREFIXES)


_ALIASES: Final[Mapping[Client, Mapping[str, str]]] = {
    Client.JAVA: {},
    Client.LIBRDKAFKA: {
        "metadata.broker.list": "bootstrap.servers",
        "request.required.acks": "acks",
        "message.timeout.ms": "delivery.timeout.ms",
        "message.send.max.retries": "retries",
        "max.in.flight": "max.in.flight.requests.per.connection",
        "queue.buffering.max.ms": "linger.ms",
        "auto.commit.enable": "enable.auto.commit",
        "message.max.bytes": "max.request.size",
        "fetch.wait.max.ms": "fetch.max.wait.ms",
        "fetch.message.max.bytes": "max.partition.fetch.bytes",
        "compression.codec": "compression.type",
    },
    Client.KAFKA_PYTHON: {},
    Client.AIOKAFKA: {"max_batch_size": "batch.size"},
}
"""A client's own name to Kafka's, where they are not the same letters."""

_PREFERRED: Final[Mapping[Client, Mapping[str, str]]] = {
    Client.LIBRDKAFKA: {
        "max.request.size": "message.max.bytes",
        "delivery.timeout.ms": "message.timeout.ms",
        "fetch.max.wait.ms": "fetch.wait.max.ms",
    },
    Client.AIOKAFKA: {"batch.size": "max_batch_size", "delivery.timeout.ms": "request_timeout_ms"},
}

COUNTERPARTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "buffer.memory": "queue.buffering.max.kbytes",
        "fetch.max.wait.ms": "fetch.wait.max.ms",
        "max.request.size": "message.max.bytes",
        "partitioner.class": "partitioner",
        "interceptor.classes": "interceptors",
        "receive.buffer.bytes": "socket.receive.buffer.bytes",
        "send.buffer.bytes": "socket.send.buffer.bytes",
        "default.api.timeout.ms": "socket.timeout.ms",
        "default.offset.reset": "auto.offset.reset",
    }
)
"""The Java client's name to librdkafka's, where one asks for the other's."""


def canonical(client: Client, name: str) -> str:
    """Kafka's name of a client's setting."""
    alias = _ALIASES[client].get(name)
    if alias is not None:
        return alias
    return name.replace("_", ".") if client in (Client.KAFKA_PYTHON, Client.AIOKAFKA) else name


def own_name(client: Client, name: str) -> str:
    """A client's own name of Kafka's setting."""
    preferred = _PREFERRED.get(client, {}).get(name, name)
    return preferred.replace(".", "_") if client in (Client.KAFKA_PYTHON, Client.AIOKAFKA) else preferred


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "acks": "acks",
        "auto.offset.reset": "reset",
        "isolation.level": "isolation",
        **dict.fromkeys(
            ("enable.auto.commit", "enable.idempotence", "enable.auto.offset.store", "check.crcs"), "bool"
        ),
        **dict.fromkeys(
            _names(
                """auto.commit.interval.ms batch.size buffer.memory delivery.timeout.ms fetch.max.bytes
            heartbeat.interval.ms linger.ms max.block.ms max.in.flight.requests.per.connection
            max.partition.fetch.bytes max.poll.interval.ms max.poll.records max.request.size
            queue.buffering.max.messages queue.buffering.max.kbytes receive.message.max.bytes request.timeout.ms
            retries session.timeout.ms transaction.timeout.ms"""
            ),
            "int",
        ),
    }
)
"""Settings the rules look at, and how their values are read; everything else is text."""

_Values = Mapping[str, str | int | bool | None]

_PRODUCER: Final[_Values] = {
    "acks": "all",
    "enable.idempotence": True,
    "retries": INFINITE,
    "request.timeout.ms": 30_000,
    "linger.ms": 0,
    "batch.size": 16_384,
    "max.request.size": 1_048_576,
    "transaction.timeout.ms": 60_000,
    "partitioner": "murmur2",
}
_BOUNDED_PRODUCER: Final[_Values] = {
    **_PRODUCER,
    "delivery.timeout.ms": 120_000,
    "max.in.flight.requests.per.connection": 5,
    "max.block.ms": 60_000,
}
_CONSUMER: Final[_Values] = {
    "enable.auto.commit": True,
    "auto.commit.interval.ms": 5_000,
    "auto.offset.reset": "latest",
    "isolation.level": "read_uncommitted",
    "session.timeout.ms": 45_000,
    "heartbeat.interval.ms": 3_000,
    "max.poll.interval.ms": 300_000,
    "fetch.max.bytes": 52_428_800,
    "max.partition.fetch.bytes": 1_048_576,
}
DEFAULTS: Final[Mapping[tuple[Client, Role], _Values]] = {
    (Client.JAVA, "producer"): {**_BOUNDED_PRODUCER, "linger.ms": 5, "buffer.memory": 33_554_432},
    (Client.JAVA, "consumer"): {**_CONSUMER, "max.poll.records": 500},
    (Client.LIBRDKAFKA, "producer"): {
        **_PRODUCER,
        "enable.idempotence": False,
        "delivery.timeout.ms": 300_000,
        "max.in.flight.requests.per.connection": 1_000_000,
        "linger.ms": 5,
        "batch.size": 1_000_000,
        "queue.buffering.max.messages": 100_000,
        "queue.buffering.max.kbytes": 1_048_576,
        "max.request.size": 1_000_000,
        "partitioner": "consistent_random",
    },
    (Client.LIBRDKAFKA, "consumer"): {
        **_CONSUMER,
        "enable.auto.offset.store": True,
        "isolation.level": "read_committed",
        "receive.message.max.bytes": 100_000_000,
    },
    (Client.KAFKA_PYTHON, "producer"): _BOUNDED_PRODUCER,
    (Client.KAFKA_PYTHON, "consumer"): {**_CONSUMER, "max.poll.records": 500},
    (Client.AIOKAFKA, "producer"): {
        **_PRODUCER,
        "acks": "1",
        "enable.idempotence": False,
        "request.timeout.ms": 40_000,
    },
    (Client.AIOKAFKA, "consumer"): {**_CONSUMER, "session.timeout.ms": 10_000},
}
"""What a client does where nothing is said; what they have in common stands above."""
