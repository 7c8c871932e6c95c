"""Lookups: tables in one form, versions that stay what they were, rows that are neither lost nor multiplied."""

from __future__ import annotations

import datetime
import decimal
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.definition.model import Expect, Filter, Lookup
from holdfast.pipeline.sinks.files import Disk
from holdfast.pipeline.state import lookups, tables
from holdfast.pipeline.state.lookups import LookupGone, pin
from holdfast.pipeline.state.tables import LookupUnavailable
from holdfast.testing.postgres import PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOUR_MS = 3_600_000


@pytest.fixture
def home(tmp_path: Path) -> str:
    return str(tmp_path / "home")


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "countries.csv"
    path.write_text("code,name,people\nDE,Germany,83\nFR,France,68\n")
    return path


def countries(table: object, **settings: Any) -> Lookup:
    return Lookup("countries", str(table), {"country": "code"}, ("name",), **settings)


def held(home: str, version: str, step: str = "countries") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(f"{home}/lookups/{step}/{version}.parquet").to_pylist()
    return found


def snapshots(home: str, step: str = "countries") -> set[str]:
    return {
        name.removesuffix(".parquet")
        for name in os.listdir(f"{home}/lookups/{step}")
        if name.endswith(".parquet")
    }


# ---------------------------------------------------------------------------- versions


def test_a_snapshot_has_the_columns_asked_for_sorted_by_key(home: str, csv: Path) -> None:
    csv.write_text('code,name,people\nFR,"",68\n,Nowhere,0\nDE,"Ger\nmany",83\nAT,,9\n')
    assert held(home, pin(countries(csv), 0, home)) == [
        {"code": "AT", "name": None},
        {"code": "DE", "name": "Ger\nmany"},
        {"code": "FR", "name": ""},
    ]


def test_a_table_is_looked_at_again_when_its_time_has_come(home: str, csv: Path) -> None:
    step = countries(csv, refresh="1h")
    first = pin(step, 0, home)
    csv.write_text("code,name\nDE,Deutschland\n")
    assert pin(step, HOUR_MS - 1, home) == first
    second = pin(step, HOUR_MS, home)
    assert second != first
    assert held(home, second) == [{"code": "DE", "name": "Deutschland"}]
    assert held(home, first) == [{"code": "DE", "name": "Germany"}, {"code": "FR", "name": "France"}]


def test_a_table_that_was_emptied_is_not_believed(home: str, csv: Path) -> None:
    step = countries(csv, refresh="1h")
    first = pin(step, 0, home)
    csv.write_text("code,name\n")
    with pytest.raises(LookupUnavailable, match=r"has no rows any more, and had some.*pinned\.json"):
        pin(step, HOUR_MS, home)
    assert snapshots(home) == {first}
    os.unlink(f"{home}/lookups/countries/pinned.json")  # it is meant
    assert held(home, pin(step, HOUR_MS, home)) == []
    csv.write_text("code,name\nDE,Germany\n")
    assert held(home, pin(step, 2 * HOUR_MS, home)) == [{"code": "DE", "name": "Germany"}]


def test_the_same_content_is_the_same_version_in_whatever_order_and_file(home: str, csv: Path) -> None:
    first = pin(countries(csv), 0, home)
    csv.write_text("people,name,code\n68,France,FR\n99,Germany,DE\n")
    assert pin(countries(csv), HOUR_MS, home) == first
    assert snapshots(home) == {first}


def test_a_table_that_was_not_touched_is_not_read_again(
    home: str, csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pin(countries(csv), 0, home)
    monkeypatch.delattr(tables.Table, "read")
    assert pin(countries(csv), HOUR_MS, home) == first


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_file_that_was_replaced_by_one_of_its_size_and_time_is_read(
    home: str, tmp_path: Path, is_directory: bool
) -> None:
    directory = tmp_path / "table"
    directory.mkdir()
    file = directory / "part.parquet"
    step = countries(directory if is_directory else file)
    names = []
    for number, name in enumerate(["old", "new"]):
        pq.write_table(pa.table({"code": ["DE"], "name": [name]}), file)
        os.utime(file, ns=(7, 7))
        names.append(held(home, pin(step, number * HOUR_MS, home))[0]["name"])
    assert names == ["old", "new"]


def test_a_clock_that_went_back_means_another_look(home: str, csv: Path) -> None:
    first = pin(countries(csv), 10 * HOUR_MS, home)
    csv.write_text("code,name\nDE,Deutschland\n")
    assert pin(countries(csv), HOUR_MS, home) != first


def test_a_step_that_asks_for_other_columns_gets_another_version(home: str, csv: Path) -> None:
    first = pin(countries(csv), 0, home)
    second = pin(replace(countries(csv), columns=("people",)), 1, home)
    assert second != first
    assert held(home, second)[0] == {"code": "DE", "people": "83"}


def test_snapshots_stay_while_they_are_named_and_the_newest_always(home: str, csv: Path) -> None:
    versions = []
    for number in range(4):
        csv.write_text(f"code,name\nDE,name {number}\n")
        versions.append(pin(countries(csv), number * HOUR_MS, home))
    Path(home, "lookups", "countries", "left.parquet.new").touch()
    lookups.forget(home, "countries", {versions[1]})
    assert snapshots(home) == {versions[1], versions[3]}
    assert len(os.listdir(f"{home}/lookups/countries")) == 3
    lookups.forget(home, "nobody", ())


def test_a_pinned_version_that_is_gone_is_named(home: str, csv: Path) -> None:
    with pytest.raises(
        LookupGone, match=r"'countries': version feed .* cannot be found in .*home/lookups/countries"
    ):
        lookups._snapshot(countries(csv), "feed", home)


def test_what_was_pinned_and_cannot_be_read_is_read_from_the_table_again(home: str, csv: Path) -> None:
    first = pin(countries(csv), 0, home)
    Path(home, "lookups", "countries", "pinned.json").write_text("{")
    assert pin(countries(csv), 1, home) == first
    os.unlink(f"{home}/lookups/countries/{first}.parquet")
    assert pin(countries(csv), 2, home) == first
    assert snapshots(home) == {first}


def test_a_snapshot_is_flushed_before_it_is_pinned(home: str, csv: Path) -> None:
    class Noting(Disk):
        def __init__(self) -> None:
            self.done: list[str] = []

        def flush_file(self, path: str) -> None:
            super().flush_file(path)
            self.done.append(f"flush {os.path.basename(path)}")

        def flush_directory(self, path: str) -> None:
            super().flush_directory(path)
            self.done.append(f"flush {os.path.basename(path)}/")

        def rename(self, old: str, new: str) -> None:
            super().rename(old, new)
            self.done.append(f"rename {os.path.basename(new)}")

    disk = Noting()
    version = pin(countries(csv), 0, home, disk=disk)
    assert disk.done[-6:] == [
        f"flush {version}.parquet.new",
        f"rename {version}.parquet",
        "flush countries/",
        "flush pinned.json.new",
        "rename pinned.json",
        "flush countries/",
    ]
    assert f"flush {os.path.basename(home)}/" in disk.done, "the directories it made are durable too"


# ---------------------------------------------------------------------------- tables


def test_two_rows_for_a_key_are_refused_by_its_name(home: str, csv: Path) -> None:
    csv.write_text("code,name\nDE,Germany\nFR,France\nDE,Deutschland\n")
    with pytest.raises(
        StepError, match=r"step 'countries': .* 2 rows for code = 'DE'.* must not multiply rows"
    ):
        pin(countries(csv), 0, home)
    assert not os.path.exists(home)


def test_a_key_of_two_columns_is_unique_as_a_pair(home: str, csv: Path) -> None:
    csv.write_text("a,b,c\n1,1,x\n1,2,y\n2,1,z\n")
    step = Lookup("pairs", str(csv), {"one": "a", "two": "b"}, ("c",))
    assert [row["c"] for row in held(home, pin(step, 0, home), "pairs")] == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"columns": ("nam",)}, "has no column 'nam'; its columns are code, name, people"),
        ({"on": {"country": "iso"}}, "has no column 'iso'"),
        ({"table": "nowhere.csv"}, "there is no table nowhere.csv"),
        ({"table": "nowhere"}, "there is no table nowhere"),
    ],
)
def test_what_a_table_lacks_is_said(home: str, csv: Path, settings: dict[str, Any], words: str) -> None:
    step = replace(countries(csv), **settings)
    with pytest.raises(StepError, match=words):
        pin(step, 0, home, directory=str(csv.parent))
    with pytest.raises(StepError, match=words):
        tables.Table(step, str(csv.parent)).schema()


def test_a_file_that_is_not_what_its_name_says_is_an_error_of_the_step(home: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(StepError, match="cannot be read"):
        pin(countries(path), 0, home)


def test_a_file_that_changes_while_it_is_read_is_not_trusted(
    home: str, csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = iter(range(100))
    monkeypatch.setattr(tables.Table, "mark", lambda self: tables.Mark(str(next(marks))))
    with pytest.raises(LookupUnavailable, match="changes while it is read"):
        pin(countries(csv), 0, home)


def test_a_table_too_large_for_every_task_is_refused(
    home: str, csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "TABLE_BYTES_MAX", 10)
    with pytest.raises(StepError, match="10 at most"):
        pin(countries(csv), 0, home)


def test_a_parquet_directory_is_read_whole_in_types_that_spark_has(home: str, tmp_path: Path) -> None:
    directory = tmp_path / "table"
    for part, ids in (("a", [3, 1]), ("b", [2])):
        where = directory / f"part={part}"
        where.mkdir(parents=True)
        rows = {
            "id": pa.array(ids, pa.uint32()),
            "tag": pa.array(["x"] * len(ids)).dictionary_encode(),
            "at": pa.array([datetime.datetime(2026, 1, 1)] * len(ids), pa.timestamp("ns", "Europe/Berlin")),
        }
        pq.write_table(pa.table(rows), where / "0.parquet")
    step = Lookup("ids", str(directory), {"id": "id"}, ("tag", "at", "part"))
    version = pin(step, 0, home)
    schema = pq.read_schema(f"{home}/lookups/ids/{version}.parquet")
    assert [str(kind) for kind in schema.types] == ["int64", "string", "timestamp[us, tz=UTC]", "string"]
    assert [(row["id"], row["part"]) for row in held(home, version, "ids")] == [(1, "a"), (2, "b"), (3, "a")]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([1.5]), "that is no key"),
        (pa.array([[1]]), "that is no key"),
        (pa.array([datetime.time(1)], pa.time64("us")), "which Spark lacks"),
    ],
)
def test_types_that_cannot_be_joined_are_refused(
    home: str, tmp_path: Path, column: pa.Array, words: str
) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"code": column, "name": ["x"]}), path)
    with pytest.raises(StepError, match=words):
        pin(countries(path), 0, home)


def test_a_delta_table_has_its_own_versions(home: str, tmp_path: Path) -> None:
    path = str(tmp_path / "delta")
    write_deltalake(path, pa.table({"code": ["DE"], "name": ["Germany"]}))
    first = pin(countries(path), 0, home)
    assert first.startswith("0-")
    assert pin(countries(path), HOUR_MS, home) == first
    write_deltalake(path, pa.table({"code": ["FR"], "name": ["France"]}), mode="append")
    second = pin(countries(path), 2 * HOUR_MS, home)
    assert second.startswith("1-")
    assert (len(held(home, first)), len(held(home, second))) == (1, 2)


def test_a_delta_table_made_anew_is_not_taken_for_the_old_one(home: str, tmp_path: Path) -> None:
    versions = []
    for number, name in enumerate(("old", "new")):
        path = str(tmp_path / name)
        write_deltalake(path, pa.table({"code": ["DE"], "name": [name]}))
        if os.path.lexists(tmp_path / "delta"):
            os.unlink(tmp_path / "delta")
        os.symlink(path, tmp_path / "delta")
        versions.append(pin(countries(tmp_path / "delta"), number * HOUR_MS, home))
    assert versions[0] != versions[1]
    assert [held(home, version)[0]["name"] for version in versions] == ["old", "new"]


# ---------------------------------------------------------------------------- PostgreSQL


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


def test_a_query_is_read_in_types_of_its_own(server: PostgresServer, home: str) -> None:
    query = (
        "SELECT 'DE'::char(5) AS code, 'x '::varchar(5) AS name, 1.50::numeric(5,2) AS price, true AS yes, "
        "'{\"b\": 1.10, \"a\": [2]}'::jsonb AS doc, '2026-01-01 12:00+02'::timestamptz AS at, "
        "'00000000-0000-0000-0000-000000000007'::uuid AS uid, NULL::date AS day, '[1,2]'::int4range AS unused"
    )
    step = Lookup(
        "pg", server.url, {"id": "code"}, ("name", "price", "yes", "doc", "at", "uid", "day"), query
    )
    version = pin(step, 0, home)
    (row,) = held(home, version, "pg")
    assert row == {
        "code": "DE",
        "name": "x ",
        "price": decimal.Decimal("1.50"),
        "yes": True,
        "doc": '{"a": [2], "b": 1.10}',
        "at": datetime.datetime(2026, 1, 1, 10, tzinfo=datetime.UTC),
        "uid": "00000000-0000-0000-0000-000000000007",
        "day": None,
    }
    assert tables.Table(step).schema().equals(pq.read_schema(f"{home}/lookups/pg/{version}.parquet"))


def test_rows_of_a_query_are_one_version_in_any_order(server: PostgresServer, home: str) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS many")
        connection.execute(
            "CREATE TABLE many AS SELECT n, 'name ' || n AS name FROM generate_series(1, 25000) n"
        )
        step = Lookup("many", server.url, {"id": "n"}, ("name",), "SELECT * FROM many ORDER BY n")
        first = pin(step, 0, home)
        backwards = replace(step, query="SELECT * FROM many ORDER BY n DESC")
        assert pin(backwards, HOUR_MS, home) == first
        assert len(held(home, first, "many")) == 25_000
        connection.execute("UPDATE many SET name = 'other' WHERE n = 7")
        assert pin(step, 2 * HOUR_MS, home) != first


def test_a_query_is_read_to_its_end_or_refused(
    server: PostgresServer, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROWS_AT_ONCE", 10)
    monkeypatch.setattr(tables, "TABLE_BYTES_MAX", 10_000)
    query = "SELECT n AS code, 'x' AS name, repeat('long', 1000) AS more FROM generate_series(1, 50) n"
    step = countries(server.url, query=query)
    assert len(held(home, pin(step, 0, home))) == 50  # What the step does not use counts for nothing.
    with pytest.raises(StepError, match="10,000 at most"):
        pin(replace(step, columns=("more",)), HOUR_MS, home)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (None, "needs a `query`"),
        ("SELEC 1", "syntax error"),
        ("SELECT 1.5::numeric AS code, 'x' AS name", "'code' of the query is numeric: cast it"),
        ("SELECT 1 AS code, '[1,2]'::int4range AS name", "'name' of the query is int4range: cast it"),
        ("DELETE FROM pg_class RETURNING 1 AS code, 'x' AS name", "syntax error"),
    ],
)
def test_a_query_that_gives_no_table_is_an_error_of_the_step(
    server: PostgresServer, home: str, query: str | None, words: str
) -> None:
    with pytest.raises(StepError, match=words):
        pin(countries(server.url, query=query), 0, home)


def test_a_server_that_is_away_may_be_asked_again_and_its_password_is_not_shown(home: str) -> None:
    step = countries("postgresql://me:secret@127.0.0.1:1/db", query="SELECT 1")
    with pytest.raises(LookupUnavailable, match="does not answer") as caught:
        pin(step, 0, home)
    assert "secret" not in str(caught.value)


# ---------------------------------------------------------------------------- rows


def test_what_becomes_of_rows_without_an_answer_is_a_rule(csv: Path) -> None:
    assert lookups.rule_of(countries(csv)) is None
    flag = "`_found_countries`"
    assert lookups.rule_of(countries(csv, missing="filter")) == Filter("countries", flag)
    assert lookups.rule_of(countries(csv, missing="quarantine")) == Expect("countries", flag, "quarantine")
    assert lookups.rule_of(countries(csv, missing="fail")) == Expect("countries", flag, "fail")


def test_every_row_stays_once_with_what_the_table_has_for_it(
    spark: SparkSession, home: str, csv: Path
) -> None:
    step = countries(csv)
    version = pin(step, 0, home)
    rows = spark.createDataFrame([(1, "DE"), (2, "XX"), (3, None), (4, "DE")], "id int, country string")
    joined = lookups.join(rows, step, version, home, expected=lookups.added_columns(step))
    assert joined.columns == ["id", "country", "name"]
    found = {row["id"]: row["name"] for row in joined.collect()}
    assert found == {1: "Germany", 2: None, 3: None, 4: "Germany"}
    flagged = lookups.join(rows, replace(step, missing="filter"), version, home)
    assert {row["id"]: row["_found_countries"] for row in flagged.collect()} == {
        1: True,
        2: False,
        3: False,
        4: True,
    }


@pytest.mark.parametrize(
    ("kind", "values", "keys"),
    [
        ("bigint", [1, 10, None], ["1", "10", "01"]),
        ("string", ["1", "01", " 1"], pa.array([1, 10], pa.int32())),
        ("tinyint", [1, 2, None], pa.array([1, 10], pa.int64())),
        ("binary", [b"1", b"10", b"\xff"], ["1", "10"]),
    ],
)
def test_keys_of_other_types_are_equal_when_nothing_is_lost(
    spark: SparkSession, home: str, tmp_path: Path, kind: str, values: list[Any], keys: Any
) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"code": keys, "name": [f"name {key}" for key in keys]}), path)
    version = pin(countries(path), 0, home)
    rows = spark.createDataFrame([(value,) for value in values], f"country {kind}")
    joined = lookups.join(rows, countries(path), version, home).collect()
    expected = {value: f"name {text}" for value, text in _texts(values).items() if text in ("1", "10")}
    assert len(joined) == len(values)
    assert {_plain(row["country"]): row["name"] for row in joined if row["name"] is not None} == expected


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, bytearray) else value


def _texts(values: list[Any]) -> dict[Any, str]:
    return {value: value.decode("latin-1") if isinstance(value, bytes) else str(value) for value in values}


def test_rows_that_cannot_be_joined_are_refused(spark: SparkSession, home: str, csv: Path) -> None:
    step = countries(csv)
    version = pin(step, 0, home)

    def refused(columns: str, step: Lookup = step, **settings: Any) -> str:
        with pytest.raises(StepError) as caught:
            lookups.join(spark.createDataFrame([], columns), step, version, home, **settings)
        return str(caught.value)

    assert "have a column 'name' already" in refused("country string, NAME int")
    assert "have no column 'country'" in refused("land string")
    assert "is double and the table's 'code' is string: cast" in refused("country double")
    expected = spark.createDataFrame([], "name bigint").schema
    assert "were struct<name:bigint> when the pipeline started" in refused(
        "country string", expected=expected
    )
    with pytest.raises(LookupGone):
        lookups.join(spark.createDataFrame([], "country string"), step, "feed", home)
