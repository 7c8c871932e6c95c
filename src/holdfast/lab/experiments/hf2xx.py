"""HF207, HF208: topics that nobody meant, and sizes that do not agree; on one broker of either kind.

HF102, HF201 to HF204 and HF209: copies that are too few, too far behind, or cut off; on three Apache Kafka brokers.

The controller is a process apart. Brokers are killed, cut off, lose their disks and come back; the experiment waits for
what the cluster makes of it (the in-sync set, the leader) before it goes on, so that the order is always the same. A
broker that is cut off runs on, and its clients reach it: see `holdfast.testing.networks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from confluent_kafka import KafkaError, Producer

from holdfast.client import Producer as OurProducer
from holdfast.lab.checking import UNSEEN
from holdfast.lab.experiment import Claim, Experiment, Lab
from holdfast.testing.apache_cluster import CONTROLLER, ApacheCluster
from holdfast.testing.engines import QUIET, NotComeAbout, wait_until
from holdfast.testing.risks import Scene, numbers

# ---------------------------------------------------------------- HF207: a mistyped topic

READ_SECONDS: Final = 120.0
"""The first group of a broker waits until its committed offsets have a place."""
MISTYPED: Final = "the program sends to a topic that is spelt wrong"


def hf207(lab: Lab, *, creates_itself: bool) -> None:
    scene = lab.engines.scene(lab.engine, {"auto.create.topics.enable": str(creates_itself).lower()})
    topic, group = lab.topic(scene=scene), lab.name("readers")
    mistyped = topic.replace("orders", "oders")
    lab.plan(MISTYPED, successes=3)
    values = numbers(0, lab.random.randint(3, 9))
    failed = _send(lab, scene, topic, mistyped, values)
    lab.fault(MISTYPED)
    # Whoever is told corrects the name; whoever is not does not know.
    _send(lab, scene, topic, topic, failed)
    _read_to_the_end(lab, scene, group, topic)
    lab.scan(scene, topic)
    if not failed:
        lab.scan(scene, mistyped, _partitions(scene, mistyped))


def _send(lab: Lab, scene: Scene, meant: str, said: str, values: list[str]) -> list[str]:
    """Send to a topic by the name that was said; returns what was refused."""
    failed: list[str] = []

    def told(error: KafkaError | None, message: Any) -> None:
        lab.report("program")(error, message)
        if error is not None:
            failed.append(message.value().decode())

    producer = Producer(scene.plain({"message.timeout.ms": 5000, "topic.metadata.propagation.max.ms": 2000}))
    for value in values:
        lab.sends("program", meant, [value])
        producer.produce(said, value, on_delivery=told)
    wait_until(lambda: producer.flush(0.2) == 0, "something is said about every message")
    return failed


def _partitions(scene: Scene, topic: str) -> int:
    return len(scene.admin.list_topics(topic, timeout=30).topics[topic].partitions)


def _read_to_the_end(
    lab: Lab, scene: Scene, group: str, topic: str, settings: Any = None, *, patience: int | None = None
) -> bool:
    """A reader of the topic, until it has seen the end.

    With `patience`, until so many polls in a row have brought nothing after something had come: then it never will, and
    false is returned.
    """
    consumer = scene.consumer(group, {"enable.partition.eof": True, **(settings or {})})
    consumer.subscribe([topic])
    has_begun, idle, at_end = False, 0, False

    def read_on() -> bool:
        nonlocal has_begun, idle, at_end
        message: Any = consumer.poll(0.2)
        if message is not None and message.error() is None:
            lab.reads(group, "reader", message)
            consumer.commit(message=message, asynchronous=False)
            has_begun, idle = True, 0
            return False
        idle += has_begun
        at_end = message is not None and message.error().code() == KafkaError._PARTITION_EOF
        return at_end or (patience is not None and idle >= patience)

    try:
        wait_until(read_on, f"the end of {topic}", READ_SECONDS)
    finally:
        consumer.close()
    lab.note("read-end", "reader", group=group, topic=topic)
    return at_end


# ---------------------------------------------------------------- HF208: sizes that do not agree

LARGE: Final = 200_000
SMALL_READER: Final = {
    "fetch.max.bytes": 10_000,
    "message.max.bytes": 10_000,
    "max.partition.fetch.bytes": 10_000,
    "receive.message.max.bytes": 11_000,
}
TOO_LARGE: Final = "a message that the topic takes, and that the reader's limits do not let through"


def hf208(lab: Lab, settings: dict[str, int]) -> None:
    scene = lab.scene
    topic, group = lab.topic(config={"max.message.bytes": str(4 * LARGE)}), lab.name("readers")
    lab.plan(TOO_LARGE, successes=4)
    values = numbers(0, lab.random.randint(4, 9))
    large = lab.random.randrange(1, len(values) - 1)
    for index, value in enumerate(values):
        lab.write(scene, topic, [f"{value} {'x' * LARGE}" if index == large else value])
    lab.fault(TOO_LARGE)
    if not _read_to_the_end(lab, scene, group, topic, settings, patience=20):
        lab.say("the reader asks for it again and again, and never gets past it")
    lab.scan(scene, topic)


LEADER: Final = 2
FOLLOWERS: Final = (1, 3)
ELECTION_SECONDS: Final = 90.0
ALONE_SECONDS: Final = 45.0
"""For a leader that is to be alone: its followers are missed after six seconds, or never."""
DISK_LOST: Final = "the leader is killed and its disk is gone"
ALONE: Final = "the leader is the only one left in sync"
ONE_DOWN: Final = "a follower is killed"
UNCLEAN: Final = "both replicas in sync are killed, and the one that is behind comes back"
CUT_OFF: Final = "the leader is cut off from the others, and they elect another"
PATIENT: Final[dict[str, Any]] = {"message.timeout.ms": 120_000, "log_level": 0}


def plain(cluster: ApacheCluster, settings: dict[str, Any] | None = None) -> Producer:
    return Producer({"bootstrap.servers": cluster.bootstrap_servers, **QUIET, **(settings or {})})


def replicated(
    lab: Lab, settings: dict[str, str], replicas: list[int] | None = None
) -> tuple[ApacheCluster, str]:
    """Three brokers, and a topic that the second leads."""
    cluster = lab.engines.cluster()
    topic = cluster.create_topic(lab.name("orders"), leader=LEADER, replicas=replicas, config=settings)
    return cluster, topic


def send_all(lab: Lab, producer: Producer, topic: str, ids: Iterable[str]) -> None:
    """One by one, each until something is said about it."""
    for message in ids:
        lab.produce(producer, topic, message)
        wait_until(lambda: producer.flush(0.1) == 0, f"something is said about {message}", ELECTION_SECONDS)


def some(lab: Lab) -> list[str]:
    return numbers(0, lab.random.randint(3, 8))


def await_leader(cluster: ApacheCluster, topic: str, among: Iterable[int] = (1, 2, 3)) -> None:
    allowed = set(among)
    wait_until(lambda: cluster.leader(topic) in allowed, f"{topic} has a leader", ELECTION_SECONDS)


def await_in_sync(cluster: ApacheCluster, topic: str, wanted: set[int]) -> None:
    seconds = ELECTION_SECONDS if len(wanted) > 1 else ALONE_SECONDS
    wait_until(lambda: cluster.in_sync(topic) == wanted, f"{sorted(wanted)} in sync", seconds)


def await_copies(cluster: ApacheCluster, topic: str) -> None:
    """Readers get only what every replica in sync has."""
    wait_until(lambda: cluster.engine().read(topic)[0], "the followers have the first message")


def read_back(lab: Lab, cluster: ApacheCluster, topic: str, replicas: set[int] | None = None) -> None:
    """The log, once all replicas agree: before that, a leader that came back shows less than it has."""
    await_in_sync(cluster, topic, replicas or {1, 2, 3})
    await_leader(cluster, topic)
    wait_until(lambda: cluster.is_agreed(topic), "all know the same leader", ELECTION_SECONDS)
    lab.scan(cluster.engine(), topic)


# ---------------------------------------------------------------- HF201: one copy


def hf201(lab: Lab, replicas: list[int]) -> None:
    cluster, topic = replicated(lab, {"min.insync.replicas": "1"}, replicas)
    lab.plan(DISK_LOST, successes=3)
    send_all(lab, plain(cluster, {"acks": "all"}), topic, some(lab))
    cluster.kill(LEADER)
    cluster.destroy_disk(LEADER)
    lab.fault(DISK_LOST)
    if len(replicas) > 1:
        await_leader(cluster, topic, FOLLOWERS)
    cluster.revive(LEADER)
    try:
        read_back(lab, cluster, topic, set(replicas))
    except NotComeAbout:
        if len(replicas) > 1:
            raise
        # Some starts leave it offline, others make it anew and empty; there was no other copy.
        lab.say("the partition stays without a leader")
        lab.note("log-end", "log", topic=topic)


# ---------------------------------------------------------------- HF202: the leader is alone


def hf202(lab: Lab, minimum: int) -> None:
    cluster, topic = replicated(lab, {"min.insync.replicas": str(minimum)})
    lab.plan(ALONE, successes=1)
    lab.plan(DISK_LOST)
    with OurProducer(cluster.bootstrap_servers, config=PATIENT) as producer:
        lab.sends("program", topic, ["before"])
        lab.delivered("program", "before", topic, producer.send(topic, "before"))
        # In order, as for maintenance: one that is killed would not be trusted with what it has afterwards.
        for node in FOLLOWERS:
            cluster.stop(node)
        await_in_sync(cluster, topic, {LEADER})
        lab.fault(ALONE)
        ids = lab.sends("program", topic, some(lab))
        deliveries = producer.send_many(topic, ids)
        producer.flush(5.0)
        told = {message for message, each in zip(ids, deliveries, strict=True) if each.is_acknowledged}
        for message, delivery in zip(ids, deliveries, strict=True):
            if message in told:
                lab.delivered("program", message, topic, delivery)
        cluster.kill(LEADER)
        cluster.destroy_disk(LEADER)
        lab.fault(DISK_LOST)
        cluster.revive(*FOLLOWERS, LEADER)
        await_leader(cluster, topic)
        for message, delivery in zip(ids, deliveries, strict=True):
            if message not in told:
                lab.delivered("program", message, topic, delivery)
    read_back(lab, cluster, topic)


# ---------------------------------------------------------------- HF203: every replica must be up


def hf203(lab: Lab, minimum: int) -> None:
    cluster, topic = replicated(lab, {"min.insync.replicas": str(minimum)})
    lab.plan(ONE_DOWN, successes=1)
    producer = plain(cluster, {"acks": "all", "message.timeout.ms": 4000})
    send_all(lab, producer, topic, ["before"])
    cluster.kill(FOLLOWERS[0])
    await_in_sync(cluster, topic, {LEADER, FOLLOWERS[1]})
    lab.fault(ONE_DOWN)
    ids = some(lab)
    lab.sends("program", topic, ids)
    for message in ids:
        producer.produce(topic, message, on_delivery=lab.report("program"))
    wait_until(lambda: producer.flush(0.1) == 0, "something is said about each", ELECTION_SECONDS)
    told = {event.id for event in lab.recorder.history().of("ack")}
    lab.drops("program", [each for each in ids if each not in told], "it cannot hold what cannot be sent")
    cluster.revive(FOLLOWERS[0])
    read_back(lab, cluster, topic)


# ---------------------------------------------------------------- HF204: unclean election


def hf204(lab: Lab, *, unclean: bool) -> None:
    cluster, topic = replicated(lab, {"unclean.leader.election.enable": str(unclean).lower()})
    lab.plan(UNCLEAN, successes=1)
    producer = plain(cluster, {"acks": "all"})
    send_all(lab, producer, topic, ["before"])
    late, second = FOLLOWERS
    cluster.kill(late)
    await_in_sync(cluster, topic, {LEADER, second})
    send_all(lab, producer, topic, some(lab))
    cluster.kill(LEADER)
    cluster.kill(second)
    cluster.revive(late)
    lab.fault(UNCLEAN)
    if unclean:
        await_leader(cluster, topic, {late})
    cluster.revive(LEADER, second)
    read_back(lab, cluster, topic)


# ---------------------------------------------------------------- HF102: a leader that dies

LEADER_KILLED: Final = "the leader is killed before its followers have it"
OTHERS: Final = (*FOLLOWERS, CONTROLLER)


def hf102_replicated(lab: Lab, acks: str) -> None:
    """The leader is cut off from the others, its clients reach it, and it dies."""
    cluster, topic, producer = cut_off(lab, LEADER_KILLED, acks)
    send_to_a_leader_alone(lab, producer, topic)
    cluster.kill(LEADER)
    lab.fault(LEADER_KILLED)
    cluster.heal()
    await_leader(cluster, topic, FOLLOWERS)
    wait_until(lambda: producer.flush(0.1) == 0, "something is said about each", ELECTION_SECONDS)
    cluster.revive(LEADER)
    read_back(lab, cluster, topic)


def cut_off(lab: Lab, fault: str, acks: str) -> tuple[ApacheCluster, str, Producer]:
    """A leader that only its clients reach, after a first message that all replicas have.

    The producer stays with the leader it knows, as long as that one answers.
    """
    cluster = lab.split_cluster()
    topic = cluster.create_topic(lab.name("orders"), leader=LEADER)
    lab.plan(fault, successes=1)
    settings = {"acks": acks, "enable.idempotence": acks == "all", "message.timeout.ms": 120_000}
    producer = plain(cluster, settings)
    send_all(lab, producer, topic, ["before"])
    await_copies(cluster, topic)
    cluster.partition([LEADER], OTHERS)
    return cluster, topic, producer


def send_to_a_leader_alone(lab: Lab, producer: Producer, topic: str) -> None:
    """One by one; with acks=all nothing is said about them now."""
    for message in numbers(0, 5):
        lab.produce(producer, topic, message)
        producer.flush(0.3)


# ---------------------------------------------------------------- HF209: a leader that is cut off


def hf209(lab: Lab, acks: str) -> None:
    """The others miss the leader and elect another. It does not know, and its producer does not either."""
    cluster, topic, producer = cut_off(lab, CUT_OFF, acks)
    await_leader(cluster, topic, FOLLOWERS)
    lab.fault(CUT_OFF)
    send_to_a_leader_alone(lab, producer, topic)
    cluster.heal()
    wait_until(lambda: producer.flush(0.1) == 0, "something is said about each", ELECTION_SECONDS)
    read_back(lab, cluster, topic)


REPLICATED: Final[dict[str, Any]] = {
    "engines": ("kafka",),
    "needs": frozenset({"java", "three brokers"}),
    "brokers": 3,
    "fast": False,
}
EXPERIMENTS: Final = (
    Experiment(
        "HF201",
        "too few replicas",
        lambda lab: hf201(lab, [LEADER]),
        lambda lab: hf201(lab, [LEADER, *FOLLOWERS]),
        "replication factor 1",
        "replication factor 3",
        **REPLICATED,
    ),
    Experiment(
        "HF202",
        "a leader that is alone acknowledges alone",
        lambda lab: hf202(lab, 1),
        lambda lab: hf202(lab, 2),
        "min.insync.replicas=1",
        "min.insync.replicas=2",
        **REPLICATED,
    ),
    Experiment(
        "HF203",
        "every replica must be up to write",
        lambda lab: hf203(lab, 3),
        lambda lab: hf203(lab, 2),
        "min.insync.replicas=3 of 3 replicas",
        "min.insync.replicas=2 of 3 replicas",
        **REPLICATED,
    ),
    Experiment(
        "HF204",
        "a replica that is behind may lead",
        lambda lab: hf204(lab, unclean=True),
        lambda lab: hf204(lab, unclean=False),
        "unclean.leader.election.enable=true",
        "unclean.leader.election.enable=false",
        **REPLICATED,
    ),
    Experiment(
        "HF209",
        "a leader that is cut off acknowledges",
        lambda lab: hf209(lab, "1"),
        lambda lab: hf209(lab, "all"),
        "acks=1",
        "acks=all with min.insync.replicas=2",
        **REPLICATED,
    ),
    Experiment(
        "HF207",
        "a mistyped topic creates itself",
        lambda lab: hf207(lab, creates_itself=True),
        lambda lab: hf207(lab, creates_itself=False),
        "auto.create.topics.enable=true",
        "auto.create.topics.enable=false: the send is refused, and the name corrected",
        claim=Claim({UNSEEN: 1}),
    ),
    Experiment(
        "HF208",
        "size limits disagree",
        lambda lab: hf208(lab, dict(SMALL_READER)),
        lambda lab: hf208(lab, {}),
        "a reader whose receive.message.max.bytes is below the topic's max.message.bytes",
        "the reader takes whatever the topic takes",
        claim=Claim({UNSEEN: 1}),
    ),
)
