"""Options and settings of the test suite as a whole."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.forked import open_process
from holdfast.testing.kafka_fixtures import XDIST_GROUP

# Hundreds of processes start here, and none compiles again what another has compiled.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Nor do the brokers among them import again what another has imported.
BrokerProcess.open_process = staticmethod(open_process)

# A shared machine is slow at times; a property does not fail for that.
settings.register_profile(
    "holdfast", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("holdfast")

# A Spark that lives for minutes is sooner done without the second compiler and with one collector's thread. That the
# options speak of sharing keeps runs from having an archive of classes made when they are over.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto")

BESIDE_APACHE_KAFKA = (
    "tests/cli/test_consume_groups.py",
    "tests/cli/test_groups.py",
    "tests/cli/test_transactions.py",
    "tests/differential/",
    "tests/doctor/test_live_permissions.py",
    "tests/interop/",
)
"""These share one JVM and what it takes seconds to prepare, so one worker runs them all."""

BESIDE_THREE_BROKERS = "tests/client/risks/test_replicated.py"
"""These go through one outage of a cluster."""

TOGETHER = (
    "tests/client/test_serializers_registry.py",
    "tests/endings/",
    "tests/examples/",
    "tests/golden/test_broker.py",
    "tests/wheel/",
)
"""Each of these starts something of its own, a JVM that takes seconds or a broker on old files: one worker each."""

BESIDE_SPARK = ("tests/pipeline/",)
WITHOUT_SPARK = (
    "tests/pipeline/definition/",
    "tests/pipeline/formats/",
    "tests/pipeline/state/test_keyed_turns.py",
    "tests/pipeline/state/test_merging.py",
    "tests/pipeline/state/test_power_loss.py",
    "tests/pipeline/state/test_store.py",
    "tests/pipeline/state/test_watermarks.py",
    "tests/pipeline/changes/test_multisets.py",
)
WITH_SPARK_AFTER_ALL = ("tests/pipeline/definition/test_checking.py",)
"""The same for tests of the pipeline and their Spark session, but for those that need none."""
SPARK_OF_MEMORY = (
    "tests/pipeline/changes/",
    "tests/pipeline/risks/",
    "tests/pipeline/state/",
    "tests/pipeline/test_memory_guide.py",
)
"""Half of them: two sessions, or the one would be at work when all else is long done."""


LONG = (
    "tests/audit/foreign/test_checkpoint.py::test_any_flipped_byte_of_a_file_is_survived",
    "tests/client/test_serializers_registry.py::test_a_real_registry_makes_no_difference",
    "tests/client/test_spool_kill.py::test_everything_reported_stored_arrives_in_order_and_once[at-least-once]",
    "tests/crash/test_client_chaos.py::test_a_sink_into_postgresql_stores_every_message_once[False]",
    "tests/crash/test_client_chaos.py::test_every_message_is_handled_and_no_position_is_ahead_of_finished_work[range",
    "tests/crash/test_client_chaos.py::test_a_processor_copies_every_message_once[cooperative-sticky]",
    "tests/endings/test_endings.py::test_every_combination",
    "tests/interop/test_groups_java.py",
    "tests/interop/test_java_tools.py::test_settings_of_topics_and_brokers",
    "tests/interop/test_transactions_java.py::test_the_tool_for_transactions",
    "tests/interop/test_written_ahead.py::test_apache_kafka_cuts",
    "tests/lab/test_split_networks.py",
    "tests/broker/node/test_defects_in_timers.py::test_a_defect_everywhere",
    "tests/pipeline/changes/test_backfilling.py::test_a_backfill_stopped",
    "tests/pipeline/changes/test_rebuilding.py::test_the_state_is_the_one",
    "tests/pipeline/engine/test_aside.py::test_a_batch_that_is_repeated",
    "tests/pipeline/engine/test_aside.py::test_duplicates_and_late_rows",
    "tests/pipeline/engine/test_memory_audited.py",
    "tests/pipeline/risks/test_experiments.py::test_the_claim_holds[HF406]",
    "tests/pipeline/risks/test_experiments.py::test_the_claim_holds[HF407]",
    "tests/pipeline/risks/test_experiments.py::test_the_claim_holds[HF408]",
    "tests/pipeline/sinks/test_kafka_apache.py",
    "tests/pipeline/state/test_dedupe.py::test_a_memory_that",
    "tests/pipeline/state/test_dedupe.py::test_telling_log",
    "tests/pipeline/state/test_joins.py::test_telling_log",
    "tests/pipeline/state/test_window_model.py::test_aggregates_that_need_the_rows",
    "tests/pipeline/state/test_window_model.py::test_windows_are_those_of_one_query_over_everything[session-c",
    "tests/pipeline/state/test_window_model.py::test_windows_are_those_of_one_query_over_everything[tumbling-c",
    "tests/pipeline/test_audit_spark.py::test_an_undamaged_world",
    "tests/pipeline/test_demo.py::test_three_kills",
    "tests/pipeline/test_golden.py::test_a_database",
    "tests/pipeline/test_golden.py::test_duplicates",
    "tests/pipeline/test_golden.py::test_files",
    "tests/pipeline/test_golden.py::test_joins",
    "tests/pipeline/test_memory_guide.py",
    "tests/simulator/test_absences.py::test_many_more",
    "tests/simulator/test_ageing.py::test_many_more",
    "tests/wheel/test_as_typed.py::test_the_examples_page",
)
"""Minutes of processor time together: `make long` runs them, and `make test` what is like them and shorter."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests are objects for good: the collector of garbage need not look through them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        for item in items:
            if item.nodeid.startswith(LONG):
                item.add_marker(pytest.mark.skip(reason="takes long: `make long` runs it"))


def pytest_configure(config: pytest.Config) -> None:
    """A shell that starts this in the background has it ignore Ctrl-C, which the programs under test would inherit."""
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        and threading.current_thread() is threading.main_thread()
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        compile_once(config)


def compile_once(config: pytest.Config) -> None:
    """Every worker collects every test: where most were never compiled, one process does that before they start."""
    tests = list(Path(__file__).parent.rglob("test_*.py"))
    compiled = {each.name.partition(".")[0] for each in Path(__file__).parent.rglob("test_*-pytest-*.pyc")}
    if sum(each.stem not in compiled for each in tests) > len(tests) // 2:
        command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", *config.args]
        subprocess.run(command, stdout=subprocess.DEVNULL, cwd=config.rootpath, check=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("holdfast")
    group.addoption(
        "--crash-rounds", type=int, default=20, help="how often the crash tests kill the broker (default: 20)"
    )
    group.addoption(
        "--chaos-seconds",
        type=float,
        default=3.0,
        help="how long each storm over a group rages (default: 3)",
    )
    group.addoption(
        "--chaos-kills",
        type=int,
        default=3,
        help="how many processes of our clients each of their storms kills (default: 3)",
    )
    group.addoption(
        "--pipeline-kills",
        type=int,
        default=0,
        help="how often the pipeline into each sink is killed, 0: not run (default: 0)",
    )
    group.addoption(
        "--engine",
        choices=("both", "apache", "holdfast"),
        default="both",
        help="which broker the scenarios of tests/interop run on (default: both, and compare)",
    )
    group.addoption("--long", action="store_true", help="run the tests that take long as well")
    group.addoption("--crash-seed", type=int, default=None, help="repeat the choices of a crash test's seed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Group by directory: the marks of `xdist_group` get lost between xdist 3.8 and pytest 9.2."""
    from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

    if config.getvalue("dist") != "loadgroup":
        return None
    scheduler = LoadGroupScheduling(config, log)
    own_group = scheduler._split_scope

    def group(nodeid: str) -> Any:
        if nodeid.startswith(BESIDE_APACHE_KAFKA):
            return XDIST_GROUP
        if nodeid.startswith(WITH_SPARK_AFTER_ALL) or (
            nodeid.startswith(BESIDE_SPARK) and not nodeid.startswith(WITHOUT_SPARK)
        ):
            return "spark-memory" if nodeid.startswith(SPARK_OF_MEMORY) else "spark"
        if nodeid.endswith("]") and "apache" in nodeid[nodeid.rindex("[") :]:
            return "apache-kafka-alike"
        for alone in (BESIDE_THREE_BROKERS, *TOGETHER):
            if nodeid.startswith(alone):
                return alone
        return own_group(nodeid)

    scheduler._split_scope = group
    return scheduler
