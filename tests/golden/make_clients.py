"""Making the golden files of our clients: the state of a processor, a database of results, retries that still wait."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Final
from unittest import mock

from confluent_kafka.admin import AdminClient, NewTopic
from tests.golden import clients
from tests.golden.opening import broker_at
from tests.golden.pipeline_inputs import START_MS

from holdfast.client.database.store import open_database
from holdfast.real import RealClock

BOOT_ID: Final = "11111111-2222-4333-8444-555555555555"
SETTINGS: Final = {
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "log.retention.ms": "-1",
    "offsets.retention.minutes": "2147483647",
}


def run(name: str, directory: Path, notes: Path) -> None:
    """In a process of its own."""
    directory.mkdir()
    broker = broker_at(RealClock(), str(directory / "data"), boot_id=BOOT_ID, seed=1, settings=SETTINGS)
    with broker as running:
        bootstrap = running.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": bootstrap})
        new = [NewTopic(topic, clients.PARTITIONS, 1) for topic in clients.TOPICS]
        for future in admin.create_topics(new).values():
            future.result(30)
        for topic in (clients.READINGS, clients.BOOKINGS, clients.MAIL):
            clients.fill(bootstrap, topic, 1)
        clients.process(bootstrap, directory, clients.PER_PART)
        database = open_database(f"sqlite:///{directory / 'bookings.sqlite'}")
        database.connect()
        database.migrate()
        database.run("create table results (number integer)", {})
        database.close()
        clients.store(bootstrap, directory, clients.PER_PART)
        mailer = clients.Mailer(is_away=True)
        # A dead letter tells where in the code the handler failed: no two machines have that in the same place.
        with mock.patch.object(traceback, "format_exception", traceback.format_exception_only):
            clients.consume(bootstrap, mailer, clients.PER_PART)
    expected = {
        "boot_id": BOOT_ID,
        "clock_ms": START_MS,
        "settings": SETTINGS,
        "log_dirs": ["data"],
        "parts": 1,
        "mailed": sorted(number for number, _ in mailer.sent),
    }
    notes.write_text(json.dumps(expected) + "\n", "utf-8")
