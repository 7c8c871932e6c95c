"""HF102, HF201 to HF204 and HF209: copies that are too few, too far behind, or cut off; on three Apache Kafka brokers.

The controller is a process apart. Brokers are killed, cut off, lose their disks and come back; the experiment waits for
what the cluster makes of it (the in-sync set, the leader) before it goes on, so that the order is always the same. A
broker that is cut off runs on, and its clients reach it: see `holdfast.testing.networks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from confluent_kafka import Producer

from holdfast.client import Producer as OurProducer
from holdfast.lab.checking import LOST
from holdfast.lab.experiment import Claim, Experiment, Lab
from holdfast.testing.apache_cluster import CONTROLLER, ApacheCluster
from holdfast.testing.engines import QUIET, NotComeAbout, wait_until
from holdfast.testing.risks import numbers

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


def send_all(lab: Lab, producer: Producer, topic: str, ids: Iterable[str]) -> None:
    """One by one, each until something is said about it."""
    for message in ids:
        lab.sends("program", topic, [message])
        producer.produce(topic, message, on_delivery=lab.report("program"))
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
    cluster = lab.engines.cluster()
    topic = cluster.create_topic(
        lab.name("orders"), leader=LEADER, replicas=replicas, config={"min.insync.replicas": "1"}
    )
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
    cluster = lab.engines.cluster()
    topic = cluster.create_topic(
        lab.name("orders"), leader=LEADER, config={"min.insync.replicas": str(minimum)}
    )
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
    cluster = lab.engines.cluster()
    topic = cluster.create_topic(
        lab.name("orders"), leader=LEADER, config={"min.insync.replicas": str(minimum)}
    )
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
    cluster = lab.engines.cluster()
    settings = {"unclean.leader.election.enable": str(unclean).lower()}
    topic = cluster.create_topic(lab.name("orders"), leader=LEADER, config=settings)
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
    cluster = lab.split_cluster()
    topic = cluster.create_topic(lab.name("orders"), leader=LEADER)
    lab.plan(LEADER_KILLED, successes=1)
    producer = plain(cluster, reaching(acks))
    send_all(lab, producer, topic, ["before"])
    await_copies(cluster, topic)
    cluster.partition([LEADER], OTHERS)
    send_to_a_leader_alone(lab, producer, topic)
    cluster.kill(LEADER)
    lab.fault(LEADER_KILLED)
    cluster.heal()
    await_leader(cluster, topic, FOLLOWERS)
    wait_until(lambda: producer.flush(0.1) == 0, "something is said about each", ELECTION_SECONDS)
    cluster.revive(LEADER)
    read_back(lab, cluster, topic)


def reaching(acks: str) -> dict[str, Any]:
    """A producer that stays with the leader it knows, as long as that one answers."""
    return {"acks": acks, "enable.idempotence": acks == "all", "message.timeout.ms": 120_000}


def send_to_a_leader_alone(lab: Lab, producer: Producer, topic: str) -> None:
    """One by one; with acks=all nothing is said about them now."""
    for message in numbers(0, 5):
        lab.sends("program", topic, [message])
        producer.produce(topic, message, on_delivery=lab.report("program"))
        producer.flush(0.3)


# ---------------------------------------------------------------- HF209: a leader that is cut off


def hf209(lab: Lab, acks: str) -> None:
    """The others miss the leader and elect another. It does not know, and its producer does not either."""
    cluster = lab.split_cluster()
    topic = cluster.create_topic(lab.name("orders"), leader=LEADER)
    lab.plan(CUT_OFF, successes=1)
    producer = plain(cluster, reaching(acks))
    send_all(lab, producer, topic, ["before"])
    await_copies(cluster, topic)
    cluster.partition([LEADER], OTHERS)
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
        Claim({LOST: 1}),
        "replication factor 1",
        "replication factor 3",
        **REPLICATED,
    ),
    Experiment(
        "HF202",
        "a leader that is alone acknowledges alone",
        lambda lab: hf202(lab, 1),
        lambda lab: hf202(lab, 2),
        Claim({LOST: 1}),
        "min.insync.replicas=1",
        "min.insync.replicas=2",
        **REPLICATED,
    ),
    Experiment(
        "HF203",
        "every replica must be up to write",
        lambda lab: hf203(lab, 3),
        lambda lab: hf203(lab, 2),
        Claim({LOST: 1}),
        "min.insync.replicas=3 of 3 replicas",
        "min.insync.replicas=2 of 3 replicas",
        **REPLICATED,
    ),
    Experiment(
        "HF204",
        "a replica that is behind may lead",
        lambda lab: hf204(lab, unclean=True),
        lambda lab: hf204(lab, unclean=False),
        Claim({LOST: 1}),
        "unclean.leader.election.enable=true",
        "unclean.leader.election.enable=false",
        **REPLICATED,
    ),
    Experiment(
        "HF209",
        "a leader that is cut off acknowledges",
        lambda lab: hf209(lab, "1"),
        lambda lab: hf209(lab, "all"),
        Claim({LOST: 1}),
        "acks=1",
        "acks=all with min.insync.replicas=2",
        **REPLICATED,
    ),
)
