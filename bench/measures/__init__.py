"""Every measure, in the order of the report: those on the shared brokers come first."""

from __future__ import annotations

from typing import Final

from bench.driver import Measure
from bench.measures.alternatives import Alternatives
from bench.measures.audit import Audit
from bench.measures.bulk import Bulk
from bench.measures.clients16 import Clients16, Clients16Raw
from bench.measures.clients_consumer import ClientConsumer
from bench.measures.clients_database import ClientDatabase
from bench.measures.clients_producer import ClientMemory, ClientProducer
from bench.measures.compaction import Compaction
from bench.measures.cpu import Cpu
from bench.measures.end_to_end import EndToEnd
from bench.measures.graduation import Graduation
from bench.measures.groups import GroupJoin, GroupSuccession
from bench.measures.heartbeats import Heartbeats
from bench.measures.latency import Latency, LatencyRaw
from bench.measures.many import ManyPartitions
from bench.measures.observing import Observing
from bench.measures.partitions100 import Partitions100
from bench.measures.reader import Reader
from bench.measures.recovery import Recovery
from bench.measures.spark_latency import SparkLatency, SparkStart
from bench.measures.spark_pipeline import SparkBatches, SparkPipeline, SparkPostgres, SparkSlope
from bench.measures.spark_serial import SparkSerial
from bench.measures.spark_source import SparkFirstQuery, SparkSource
from bench.measures.spark_state import SparkResume, SparkState, SparkWindows
from bench.measures.startup import Startup
from bench.measures.transactions import Transactions

ALL: Final[tuple[Measure, ...]] = (
    Latency(),
    LatencyRaw(),
    Clients16(),
    Clients16Raw(),
    Partitions100(),
    Alternatives(),
    EndToEnd(),
    Transactions(),
    Bulk(),
    Reader(),
    Cpu(),
    Compaction(),
    Startup(),
    Recovery(),
    ManyPartitions(),
    Observing(),
    Graduation(),
    GroupJoin(),
    GroupSuccession(),
    Heartbeats(),
    ClientProducer(),
    ClientConsumer(),
    ClientDatabase(),
    ClientMemory(),
    SparkSource(),
    SparkFirstQuery(),
    SparkPipeline(),
    SparkBatches(),
    SparkPostgres(),
    SparkSlope(),
    SparkSerial(),
    SparkLatency(),
    SparkStart(),
    SparkWindows(),
    SparkState(),
    SparkResume(),
    Audit(),
)
