"""The administrator: the one client that changes topics, one request at a time.

A change whose answer never came is settled by reading the metadata before the next one, so that the history
knows at any time which topics may exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kio.schema.errors import ErrorCode
from tests.support.simulator.link import Link

from holdfast.testing import history

if TYPE_CHECKING:
    from tests.support.simulator.world import KnownTopic, World

Trait: TypeAlias = Literal["expires", "unflushed", "compacted"]

METADATA = 3
CREATE_TOPICS = 19
DELETE_TOPICS = 20
DELETE_RECORDS = 21
INIT_PRODUCER_ID = 22
DESCRIBE_CONFIGS = 32
CREATE_PARTITIONS = 37
INCREMENTAL_ALTER_CONFIGS = 44
TOPIC_RESOURCE = 2
SET = 0
TOPICS_MAX = 4
PARTITIONS_MAX = 4
_NOT_NOW = frozenset(
    {
        ErrorCode.request_timed_out,
        ErrorCode.not_controller,
        ErrorCode.not_leader_or_follower,
        ErrorCode.leader_not_available,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
    }
)
_NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")
_KINDS: tuple[tuple[Trait | None, tuple[tuple[str, str], ...]], ...] = (
    (None, ()),
    (None, ()),
    (None, ()),
    ("expires", (("retention.ms", "3000"), ("retention.bytes", "20000"), ("segment.ms", "500"))),
    ("unflushed", (("holdfast.flush", "os"),)),
    (
        "compacted",
        (
            ("cleanup.policy", "compact"),
            ("segment.ms", "300"),
            ("min.cleanable.dirty.ratio", "0.01"),
            ("delete.retention.ms", "400"),
            ("index.interval.bytes", "512"),
        ),
    ),
)
"""What a topic promises less than others, and the settings that make it so."""
_SETTINGS = (
    ("internal.segment.bytes", ("8000", "60000")),
    ("segment.ms", ("200", "5000", "604800000")),
    ("index.interval.bytes", ("0", "512", "4096")),
    ("flush.messages", ("1", "9223372036854775807")),
    ("holdfast.write.ahead.bytes", ("0", "20000", "1048576")),
)


class Administrator:
    def __init__(
        self, world: World, name: str, lasting: tuple[str, ...] = (), *, likes_compacted: bool = False
    ) -> None:
        self.world = world
        self.name = name
        self.link = Link(world, name)
        self._lasting = lasting
        """Topics that are made first, keep everything, and are never deleted."""
        self._likes_compacted = likes_compacted
        self._waiting = False
        self._unsettled = True
        """Some change's outcome is unknown: the next request must be for metadata."""

    @property
    def is_settled(self) -> bool:
        return not self._waiting and not self._unsettled

    def settle(self) -> None:
        """Learn how the last change went."""
        if not self.is_settled:
            self.act(may_change=False)

    def act(self, may_change: bool = True) -> bool:
        if self._waiting:
            return False
        if self._unsettled or not may_change:
            self.read_metadata()
            return True
        rng = self.world.rng
        live = list(self.world.topics.values())
        for name in self._lasting:
            if name not in self.world.topics:
                self._create(name)
                return True
        if len(live) < 2 or (len(live) < TOPICS_MAX and rng.random() < 0.15):
            self._create()
            return True
        choices: list[Callable[[], bool]] = [
            self._delete_records,
            self._delete_records,
            self._alter_config,
            self._describe_config,
            self._take_producer_id,
            self._take_producer_id,
            self._add_partitions,
            self._delete,
            self.read_metadata,
        ]
        return rng.choice(choices)()

    def _ask(
        self, kind: str, api_key: int, version: int, fields: dict[str, Any], then: Callable[[Any], str | None]
    ) -> None:
        """`then` takes the answer and says how it went; None leaves a change unsettled."""
        self._waiting = True

        def answered(response: Any | None) -> None:
            self._waiting = False
            outcome = "unknown" if response is None else then(response)
            if response is None or outcome is None:
                self._unsettled = True
            self.world.say(f"{self.name}: {kind}: {outcome}")
            self.world.count(kind, outcome or "storage error")

        self.link.request(api_key, version, fields, answered)

    def _outcome(self, kind: str, error: ErrorCode) -> str | None:
        if error == ErrorCode.kafka_storage_error:
            self.world.storage_error(f"{self.name}: {kind}")
            return None
        if error in _NOT_NOW:
            return None
        self.world.unexpected(f"{self.name}: {kind} was answered {error.name}")
        return error.name

    def read_metadata(self) -> bool:
        self.world.observe(history.MetadataBegun(self.name))
        fields = {
            "topics": None,
            "allow_auto_topic_creation": False,
            "include_topic_authorized_operations": False,
        }
        self._ask("metadata", METADATA, self.world.rng.choice((12, 13)), fields, self._metadata_read)
        return True

    def _metadata_read(self, response: Any) -> str:
        topics: dict[str, history.TopicSeen] = {}
        for topic in response.topics:
            if topic.name.startswith("__"):
                continue
            epochs: list[int] = [-1] * len(topic.partitions)
            for partition in topic.partitions:
                epochs[partition.partition_index] = (
                    partition.leader_epoch if partition.error_code == ErrorCode.none else -1
                )
            topics[topic.name] = history.TopicSeen(topic.topic_id.hex, tuple(epochs))
        self.world.observe(history.MetadataRead(self.name, topics))
        self.world.set_topics(
            {name: (seen.topic_id, len(seen.leader_epochs)) for name, seen in topics.items()}
        )
        self._unsettled = False
        return "ok"

    def _create(self, lasting: str | None = None) -> None:
        rng = self.world.rng
        name = lasting or rng.choice([name for name in _NAMES if name not in self.world.topics])
        count = rng.choice((1, 2, 3))
        self.world.observe(history.TopicCreationRequested(name, count))
        self.world.say(f"{self.name}: create {name} of {count}")
        configs = [
            {"name": key, "value": rng.choice(values)} for key, values in _SETTINGS if rng.random() < 0.4
        ]
        trait, settings = (None, ()) if lasting else rng.choice(_KINDS)
        if self._likes_compacted and not lasting and rng.random() < 0.5:
            trait, settings = _KINDS[-1]
        self.world.traits[name] = trait
        if trait is not None:
            configs = [{"name": key, "value": value} for key, value in settings]
        topic = {
            "name": name,
            "num_partitions": count,
            "replication_factor": rng.choice((1, -1)),
            "assignments": [],
            "configs": configs,
        }
        fields = {"topics": [topic], "timeout": 30_000, "validate_only": False}

        def then(response: Any) -> str | None:
            result = response.topics[0]
            if result.error_code != ErrorCode.none:
                return self._outcome(f"create {name}", result.error_code)
            self.world.observe(history.TopicCreated(name, result.topic_id.hex, count))
            self.world.add_topic(name, result.topic_id.hex, count)
            return "ok"

        self._ask("create topic", CREATE_TOPICS, 7, fields, then)

    def _delete(self) -> bool:
        topic = self.world.rng.choice(list(self.world.topics.values()))
        if len(self.world.topics) < 2 or topic.name in self._lasting or self.world.rng.random() < 0.3:
            return False
        self.world.observe(history.TopicDeletionRequested(topic.name))
        self.world.say(f"{self.name}: delete {topic.name}")
        self.world.remove_topic(topic.name)
        by_id = self.world.rng.random() < 0.5
        state = {"name": None if by_id else topic.name, "topic_id": topic.uuid if by_id else None}

        def then(response: Any) -> str | None:
            error = response.responses[0].error_code
            if error != ErrorCode.none:
                return self._outcome(f"delete {topic.name}", error)
            self.world.observe(history.TopicDeleted(topic.name))
            return "ok"

        self._ask("delete topic", DELETE_TOPICS, 6, {"topics": [state], "timeout": 30_000}, then)
        return True

    def _add_partitions(self) -> bool:
        topic = self._some_topic()
        if topic.partitions >= PARTITIONS_MAX:
            return False
        count = topic.partitions + 1
        self.world.observe(history.PartitionsRequested(topic.name, count))
        self.world.say(f"{self.name}: {topic.name} shall have {count} partitions")
        fields = {
            "topics": [{"name": topic.name, "count": count, "assignments": None}],
            "timeout": 30_000,
            "validate_only": False,
        }

        def then(response: Any) -> str | None:
            error = response.results[0].error_code
            if error != ErrorCode.none:
                return self._outcome(f"partitions of {topic.name}", error)
            self.world.observe(history.PartitionsCreated(topic.name, count))
            topic.partitions = count
            return "ok"

        self._ask("create partitions", CREATE_PARTITIONS, 3, fields, then)
        return True

    def _some_topic(self) -> KnownTopic:
        return self.world.rng.choice(list(self.world.topics.values()))

    def _alter_config(self) -> bool:
        topic = self._some_topic()
        if topic.is_compacted:
            return False
        key, values = self.world.rng.choice(_SETTINGS)
        value = self.world.rng.choice(values)
        self.world.observe(history.ConfigRequested(topic.name, key, value))
        self.world.say(f"{self.name}: {key} of {topic.name} shall be {value}")
        resource = {
            "resource_type": TOPIC_RESOURCE,
            "resource_name": topic.name,
            "configs": [{"name": key, "config_operation": SET, "value": value}],
        }

        def then(response: Any) -> str | None:
            error = ErrorCode(response.responses[0].error_code)
            if error != ErrorCode.none:
                return self._outcome(f"{key} of {topic.name}", error)
            self.world.observe(history.ConfigAltered(topic.name, key, value))
            return "ok"

        fields = {"resources": [resource], "validate_only": False}
        self._ask("alter configs", INCREMENTAL_ALTER_CONFIGS, 1, fields, then)
        return True

    def _describe_config(self) -> bool:
        topic = self._some_topic()
        keys = [key for key, _ in _SETTINGS]
        resource = {"resource_type": TOPIC_RESOURCE, "resource_name": topic.name, "configuration_keys": keys}

        def then(response: Any) -> str | None:
            result = response.results[0]
            error = ErrorCode(result.error_code)
            if error != ErrorCode.none:
                return self._outcome(f"configs of {topic.name}", error)
            for config in result.configs:
                self.world.observe(history.ConfigRead(topic.name, config.name, config.value))
            return "ok"

        fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
        self._ask("describe configs", DESCRIBE_CONFIGS, 4, fields, then)
        return True

    def _delete_records(self) -> bool:
        chosen = self.world.some_partitions(1)
        if not chosen:
            return False
        known = chosen[0]
        if known.topic.is_compacted or known.topic.name in self._lasting:
            return False
        end = self.world.checkers.records.end_floor(known.partition)
        before = self.world.rng.randrange(end + 1)
        self.world.observe(history.DeletionRequested(known.partition, before))
        self.world.say(f"{self.name}: delete records of {known} before {before}")
        partition = {"partition_index": known.index, "offset": before}
        fields = {"topics": [{"name": known.topic.name, "partitions": [partition]}], "timeout": 30_000}

        def then(response: Any) -> str | None:
            result = response.topics[0].partitions[0]
            if result.error_code == ErrorCode.offset_out_of_range:
                return "behind the log start"
            if result.error_code != ErrorCode.none:
                return self._outcome(f"delete records of {known}", result.error_code)
            self.world.observe(history.DeletionAcknowledged(known.partition, result.low_watermark))
            return "ok"

        self._ask("delete records", DELETE_RECORDS, 2, fields, then)
        return True

    def _take_producer_id(self) -> bool:
        fields = {"transactional_id": None, "transaction_timeout": 0, "producer_id": -1, "producer_epoch": -1}

        def then(response: Any) -> str | None:
            if response.error_code != ErrorCode.none:
                return self._outcome("init producer id", response.error_code)
            self.world.observe(history.ProducerIdGiven(response.producer_id, response.producer_epoch))
            return "ok"

        self._ask("init producer id", INIT_PRODUCER_ID, 5, fields, then)
        return True
