"""Local paths and a master elsewhere: refused with the reason, unless the file system is shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast.pipeline.cluster.places import (
    MasterUnknown,
    PlaceRefused,
    is_remote,
    master_of,
    require_places,
)
from holdfast.pipeline.definition.model import (
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    SinkDefinition,
    Source,
)
from holdfast.pipeline.engine.running import run_pipeline

MASTER = "spark://elsewhere:7077"


def definition_of(
    *sinks: SinkDefinition, home: str = "home", spark: dict[str, str] | None = None
) -> PipelineDefinition:
    return PipelineDefinition(
        "orders",
        Source(("orders",)),
        sinks=sinks,
        home=home,
        spark=spark or {},
        directory="/work-of-somebody",
    )


@pytest.mark.parametrize("master", [None, "local", "local[2]", "local[*,4]"])
def test_on_this_machine_any_directory_will_do(master: str | None) -> None:
    assert not is_remote(master)
    require_places(definition_of(ParquetSink("out"), DeltaSink("table")), master, shared_filesystem=False)


@pytest.mark.parametrize("master", [MASTER, "spark://a:1,b:2", "yarn", "k8s://https://host:6443"])
def test_every_local_path_is_named_when_tasks_run_elsewhere(master: str) -> None:
    definition = definition_of(ParquetSink("out"), DeltaSink("file:/data/table"), KafkaSink("clean"))
    with pytest.raises(PlaceRefused) as refused:
        require_places(definition, master, shared_filesystem=False)
    told = str(refused.value)
    assert refused.value.exit_code == 2
    assert f"with the master {master}" in told
    assert "the home is /work-of-somebody/home" in told
    assert "the sink 'parquet' is /work-of-somebody/out" in told
    assert "the sink 'delta' is " in told
    assert "--shared-filesystem" in told


def test_a_table_at_an_address_is_no_reason() -> None:
    with pytest.raises(PlaceRefused) as refused:
        require_places(definition_of(DeltaSink("s3a://bucket/table")), MASTER, shared_filesystem=False)
    assert "s3a" not in str(refused.value)


def test_with_a_shared_file_system_local_paths_are_fine() -> None:
    require_places(definition_of(ParquetSink("out")), MASTER, shared_filesystem=True)


@pytest.mark.parametrize("master", ["local[2]", MASTER])
@pytest.mark.parametrize("home", ["s3a://bucket/home", "hdfs://name/home", "abfss://c@a.example/home"])
def test_a_home_at_an_address_is_refused_everywhere_with_the_reason(master: str, home: str) -> None:
    with pytest.raises(PlaceRefused, match="lock that dies with its holder"):
        require_places(definition_of(home=home), master, shared_filesystem=True)


@pytest.mark.parametrize("master", ["sprak://h:7077", "elsewhere", "spark://", "mesos://h:5050"])
def test_a_master_that_spark_does_not_have_is_told_at_once(master: str) -> None:
    with pytest.raises(MasterUnknown, match="is no master of Spark"):
        require_places(definition_of(), master, shared_filesystem=True)


def test_the_callers_master_comes_before_the_definitions() -> None:
    definition = definition_of(spark={"spark.master": MASTER})
    assert master_of(definition, None) == MASTER
    assert master_of(definition, "local[2]") == "local[2]"
    assert master_of(definition_of(), None) is None


def test_a_run_that_is_refused_has_created_nothing(tmp_path: Path) -> None:
    definition = PipelineDefinition("orders", Source(("orders",)), directory=str(tmp_path))
    with pytest.raises(HoldfastError, match="--shared-filesystem"):
        run_pipeline(definition, master=MASTER)
    assert list(tmp_path.iterdir()) == []
