"""What marks and traces see of tables in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest
from tests.support.audit_sinks import Ledger, PostgresBuilder, rows_of
from tests.support.audit_world_writer import WorldWriter
from tests.support.audit_worlds import Told, make_plan
from tests.support.fake_cluster import FakeCluster

from holdfast.audit.proven import changes, take
from holdfast.audit.tracing import Tracer
from holdfast.pipeline.definition.model import PipelineDefinition, PostgresSink, Source
from holdfast.pipeline.definition.naming import client_settings
from holdfast.pipeline.positions import Place
from holdfast.reader import Cluster
from holdfast.testing.postgres import PostgresServer

PLACE = Place("orders", UUID(int=7), 0)
DEFINITION = PipelineDefinition("growing", Source(("orders",)))


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer(settings=("fsync=off", "autovacuum=off")) as server:
        yield server


def test_changes_to_proven_rows_of_a_table_are_noticed(server: PostgresServer) -> None:
    import psycopg

    sink = PostgresSink(server.url, "orders", "table")
    builder = PostgresBuilder(sink, "growing")
    ledger = Ledger("growing", "table")
    empty = rows_of([], {"id": pa.array([], pa.int64())})
    builder.commit(ledger.opening({PLACE: 0}), empty)
    rows = rows_of([("orders", 0, offset, 0) for offset in range(6)], {"id": list(range(6))})
    builder.commit(ledger.entry({PLACE: (0, 6)}, rows=6), rows)
    definition, proven = DEFINITION, {PLACE: 6}

    def marks() -> dict[str, str]:
        seen = take(definition, sink, {}, proven)
        assert not seen.unseen
        return dict(seen.marks)

    stood = marks()
    assert changes(stood, marks()) == []
    with psycopg.connect(server.url, autocommit=True) as connection:

        def run(statement: str) -> None:
            connection.execute(statement)
            connection.execute("SELECT pg_stat_force_next_flush()")
            connection.execute("SELECT 1")

        run(
            "INSERT INTO orders (_hf_topic, _hf_partition, _hf_offset, _hf_index, id) VALUES ('orders', 0, 6, 0, 6)"
        )
        assert changes(stood, marks()) == []
        run(
            "INSERT INTO orders (_hf_topic, _hf_partition, _hf_offset, _hf_index, id) VALUES ('orders', 0, 5, 0, 5)"
        )
        assert changes(stood, marks()) == ["rows below orders-0@6"]
        stood = marks()
        connection.execute("UPDATE orders SET id = 9 WHERE id = 2")
        assert "rows below orders-0@6" in changes(stood, marks()), "the server's count may come seconds late"
        run("SELECT 1")
        assert "changed" in changes(stood, marks())
        stood = marks()
        run(
            "WITH gone AS (DELETE FROM orders WHERE id = 3 RETURNING *) INSERT INTO orders SELECT * FROM gone"
        )
        assert "deleted" in changes(stood, marks())
        stood = marks()
        run("TRUNCATE orders")
        assert {"storage", "rows below orders-0@6"} <= set(changes(stood, marks()))
        connection.execute("DROP TABLE orders")
    assert changes(stood, marks())


def test_a_table_that_is_upserted_is_unseen(server: PostgresServer) -> None:
    sink = PostgresSink(server.url, "none", "table", "upsert", ("id",))
    assert "one row for each key" in take(DEFINITION, sink, {}, {}).unseen


def test_a_server_that_does_not_answer_is_unseen() -> None:
    sink = PostgresSink("postgresql://127.0.0.1:1/none", "orders", "table")
    assert take(DEFINITION, sink, {}, {}).unseen


# Traces


def test_a_record_that_was_replaced_names_the_row_that_stands(server: PostgresServer, tmp_path: Path) -> None:
    with FakeCluster() as cluster, WorldWriter(cluster, str(tmp_path), server.url) as writer:
        plan = make_plan(12, kinds=("upsert",), has_spool=False)
        world = writer.write(plan)
        settings = client_settings(world.definition)
        last: dict[str, Told] = {}
        written: list[Told] = []
        for rows in plan.sinks["upsert-sink"].batches:
            for row in sorted(rows, key=lambda each: each.lineage):
                told = plan.at(row.lineage[1], row.lineage[2])
                written.append(told)
                last[row.values["customer"]] = told
        assert len(last) < len(written)
        with Tracer(Cluster(settings), world.definition, settings) as tracer:
            for told in written:
                assert told.row is not None
                stands = last[told.row["customer"]]
                life = tracer.trace(world.places[told.partition], told.offset)
                if told is stands:
                    assert life.fate == "output"
                    continue
                assert life.fate == "superseded", life.conclusion
                name = f"customer={told.row['customer']}, made of orders:{stands.partition}@{stands.offset}"
                assert name in life.conclusion
        customer, told = next(iter(last.items()))
        table = f'"world_{plan.seed}".upsert_sink'
        writer.run(f"DELETE FROM {table} WHERE customer = '{customer}'")
        with Tracer(Cluster(settings), world.definition, settings) as tracer:
            life = tracer.trace(world.places[told.partition], told.offset)
        assert life.fate == "unknown"
        assert f"has no row of customer={customer}" in life.conclusion
