"""A session that a user brings computes what one of ours computes, or is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.pipeline.core.spark_settings import FIXED
from holdfast.pipeline.session import SettingFixed, refuse_changed, refuse_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_every_setting_we_hold_is_one_of_spark(spark: SparkSession) -> None:
    names = [name for name in FIXED if name.startswith("spark.sql.")]
    assert [name for name in names if not spark.conf.isModifiable(name)] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.sql.ansi.enabled", "false"),
        ("spark.sql.files.ignoreCorruptFiles", "true"),
        ("spark.sql.session.timeZone", "Asia/Tokyo"),
        ("spark.sql.legacy.timeParserPolicy", "LEGACY"),
    ],
)
def test_a_session_that_computes_otherwise_is_refused(spark: SparkSession, name: str, value: str) -> None:
    brought = spark.newSession()
    refuse_session(brought)
    brought.conf.set(name, value)
    with pytest.raises(SettingFixed, match=f"{name} is '{value}' in the Spark session"):
        refuse_session(brought)
    with pytest.raises(SettingFixed, match=name):
        refuse_session(brought, is_known=True)


def test_what_is_set_while_a_run_lasts_is_noticed(spark: SparkSession) -> None:
    brought = spark.newSession()
    known = refuse_changed(brought, "")
    assert refuse_changed(brought, known) == known
    brought.conf.set("spark.sql.shuffle.partitions", "3")
    known = refuse_changed(brought, known)
    brought.conf.set("spark.sql.ansi.enabled", "false")
    for _ in range(2):
        with pytest.raises(SettingFixed, match=r"spark\.sql\.ansi\.enabled is 'false'"):
            refuse_changed(brought, known)


def test_a_run_looks_at_the_session_it_is_given(spark: SparkSession) -> None:
    from holdfast.pipeline.definition.model import PipelineDefinition, Source
    from holdfast.pipeline.engine.home import Home
    from holdfast.pipeline.engine.running import open_session

    brought = spark.newSession()
    brought.conf.set("spark.sql.ansi.enabled", "false")
    definition = PipelineDefinition("held", Source(("t",)))
    with pytest.raises(SettingFixed), open_session(definition, Home("unused", "held"), None, brought):
        pytest.fail("the session was taken")
