"""Options and settings of the test suite as a whole, and what the marks on tests mean.

A test is in one of three tiers, by the nearest mark: `quick` (what `make test` runs; a test without a mark is quick),
`check` (from `make check` on) or `long` (`make long` alone). A test beside Apache Kafka or Spark is in `check` unless
it says otherwise, and one worker runs all that share such a JVM: whoever uses the fixture has the mark.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any, Final

import pytest
from tests.support import tiers
from tests.support.forked import open_process

from holdfast.pipeline.cluster.packaging import machine_code
from holdfast.pipeline.java import JavaMissing, find_java
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.kafka_fixtures import XDIST_GROUP, unavailable

# Hundreds of processes start here, and none compiles again what another has compiled.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What tests need was fetched by `make setup`, or is named at the end as missing.
os.environ["HOLDFAST_OFFLINE"] = "1"

# Nor do the brokers among them import again what another has imported.
BrokerProcess.open_process = staticmethod(open_process)

# A Spark that lives for minutes is sooner done without the second compiler and with one collector's thread. That the
# options speak of sharing keeps runs from having an archive of classes made when they are over.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto")

MARK_OF_FIXTURE: Final = {
    "apache_kafka": "apache_kafka",
    "compare": "apache_kafka",
    "on_both": "apache_kafka",
    "spark": "spark",
    "outage": "apache_cluster",
}
"""A test that uses one of these shares its JVM with all others that do."""
GROUP_OF_MARK: Final = {"apache_kafka": XDIST_GROUP, "apache_cluster": "apache-cluster", "spark": "spark"}
STDERR: Final = 2
NOISE: Final = pytest.StashKey[IO[bytes]]()
NOISE_SHOWN_BYTES: Final = 4000
PASSED: Final = pytest.StashKey[int]()
PASSED_PER_DOT: Final = 25
MODULE_OF_LATER_TIER: Final = re.compile(
    r"^pytestmark = [^\]\n]*(?:\[[^\]]*)?mark\.(?:check|long)\b", re.MULTILINE
)
MARKS_WITH_JAVA: Final = (*GROUP_OF_MARK, "java")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests are objects for good: the collector of garbage need not look through them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` does not import modules whose mark says that nothing in them is for it."""
    if chosen_tier(config) != "quick" or not collection_path.match("test_*.py") or names_tests(config):
        return None
    text = collection_path.read_text("utf-8")
    return True if MODULE_OF_LATER_TIER.search(text) and "mark.quick" not in text else None


@pytest.hookimpl(wrapper=True)  # around the others, since xdist must see the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if " at 0x" in item.nodeid:  # another one in every worker, which xdist takes for another test
            raise pytest.UsageError(f"{item.nodeid}: the id of a test holds an address; give it `ids`")
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in MARK_OF_FIXTURE:
                item.add_marker(MARK_OF_FIXTURE[fixture])
        for mark, group in GROUP_OF_MARK.items():
            if item.get_closest_marker(mark) and not item.get_closest_marker("xdist_group"):
                item.add_marker(pytest.mark.xdist_group(group))
    if not names_tests(config):
        tier = chosen_tier(config)
        beyond = {item for item in items if tiers.TIERS.index(tier_of(item)) > tiers.TIERS.index(tier)}
        config.hook.pytest_deselected(items=list(beyond))
        items[:] = [item for item in items if item not in beyond]
    # One worker goes through all that share a JVM: begun last, they would keep the others waiting.
    items.sort(key=lambda item: not any(item.get_closest_marker(mark) for mark in GROUP_OF_MARK))
    yield


def names_tests(config: pytest.Config) -> bool:
    """A test that is called by its name runs, whatever its tier."""
    return any("::" in argument for argument in config.args)


def tier_of(item: pytest.Item) -> str:
    for mark in item.iter_markers():
        if mark.name in tiers.TIERS:
            return mark.name
    return "check" if any(item.get_closest_marker(mark) for mark in MARKS_WITH_JAVA) else "quick"


def chosen_tier(config: pytest.Config) -> str:
    return "long" if config.getoption("--long") else "quick" if config.getoption("--quick") else "check"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("spark") or item.get_closest_marker("java"):
        try:
            find_java()
        except JavaMissing as missing:
            unavailable(str(missing))


def pytest_configure(config: pytest.Config) -> None:
    """A shell that starts this in the background has it ignore Ctrl-C, which the programs under test would inherit."""
    tiers.choose(chosen_tier(config))
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        and threading.current_thread() is threading.main_thread()
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        machine_code()  # once, before there are workers that would each compile it


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Clients of a test that is over go on writing to their worker's stderr: it is shown when a worker dies."""
    noise, shown = tempfile.TemporaryFile("w+b"), os.dup(STDERR)  # noqa: SIM115
    config.stash[NOISE] = noise
    os.dup2(noise.fileno(), STDERR)

    def put_back() -> None:
        os.dup2(shown, STDERR)
        os.close(shown)
        noise.close()

    config.add_cleanup(put_back)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if error:
        noise = node.config.stash[NOISE]
        noise.seek(max(0, noise.seek(0, os.SEEK_END) - NOISE_SHOWN_BYTES))
        print(noise.read().decode(errors="replace"))


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> Any:
    """Where many workers run them: one dot for many tests that passed, and at once the name of one that failed."""
    if not config.getoption("numprocesses", None):
        return None
    if report.failed:
        category = "failed" if report.when == "call" else "error"
        crash = getattr(report.longrepr, "reprcrash", None)
        return category, f"\nFAILED {report.nodeid} {crash.message[:200] if crash else ''}\n", "FAILED"
    if report.passed and report.when == "call":
        config.stash[PASSED] = config.stash.get(PASSED, 0) + 1
        return "passed", "." if config.stash[PASSED] % PASSED_PER_DOT == 0 else "", "PASSED"
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what could not run on this machine, and why: a skipped test is not a passed one."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"not run: {count} {'test' if count == 1 else 'tests'}: {reason}")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("holdfast")
    group.addoption(
        "--crash-rounds", type=int, default=0, help="how often the crash tests kill the broker (default: 20)"
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
    group.addoption(
        "--quick", action="store_true", help="only the tests without a mark `check` or `long`: make test"
    )
    group.addoption("--long", action="store_true", help="the tests marked `long` as well: make long")
    group.addoption("--crash-seed", type=int, default=None, help="repeat the choices of a crash test's seed")
