"""Run the generator the specification on standard input names."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Final

GENERATORS: Final = {
    "audit": "bench.load.audit:audit",
    "audit_fill": "bench.load.audit:fill",
    "closed_loop": "bench.load.closed_loop:run",
    "counted_produce": "bench.load.counted_produce:run",
    "raw_closed_loop": "bench.load.raw_closed_loop:run",
    "bulk_produce": "bench.load.bulk:produce",
    "bulk_consume": "bench.load.bulk:consume",
    "end_to_end": "bench.load.end_to_end:run",
    "group_join": "bench.load.group_member:join",
    "group_client_join": "bench.load.group_member:client_join",
    "group_succeed": "bench.load.group_member:succeed",
    "group_heartbeats": "bench.load.group_heartbeats:run",
    "clients_producer": "bench.load.clients_producer:run",
    "clients_memory": "bench.load.clients_producer:memory",
    "clients_consumer": "bench.load.clients_consumer:ours",
    "clients_consumer_bare": "bench.load.clients_consumer:bare",
    "clients_database": "bench.load.clients_database:run",
    "reader_read": "bench.load.reader:read",
    "reader_first": "bench.load.reader:first",
    "reader_export": "bench.load.reader:export",
    "transactions": "bench.load.transactions:run",
    "redis": "bench.load.redis_streams:run",
    "nats": "bench.load.nats_jetstream:run",
}


def main() -> None:
    """Load only what the generator needs: imports are not what is measured."""
    spec = json.loads(sys.stdin.readline())
    module, function = GENERATORS[spec["kind"]].split(":")
    found = getattr(importlib.import_module(module), function)(spec)
    json.dump(found, sys.stdout)
    sys.stdout.flush()
    # Not by the usual way: a thread may still wait for another line of standard input.
    os._exit(0)


if __name__ == "__main__":
    main()
