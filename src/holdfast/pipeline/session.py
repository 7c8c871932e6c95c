"""The Spark session a pipeline runs in.

Settings that a pipeline's guarantees and its results rest on are fixed (`core.spark_settings`): no speculative copies
of tasks (two copies of a writer), errors instead of wrapped numbers, no file of state that Spark passes over, and one
meaning of an expression on every machine. A definition that sets one of them otherwise is refused, and so is a
session that the user brings. The Python that runs the workers is ours too. Everything else is a default.

With a master elsewhere the Python parts are sent along (`cluster.packaging`): executors unpack them in their working
directory, a bare Python of the driver's minor version finds them on its path, and workers start from them.

Spark talks a lot: its log and the JVM's standard error go to `spark.log` in the pipeline's home, from the first line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from holdfast.errors import HoldfastError
from holdfast.pipeline.class_archive import ClassArchive
from holdfast.pipeline.cluster.places import is_remote
from holdfast.pipeline.core.spark_settings import FIXED, LOCAL_CORES, changed
from holdfast.pipeline.java import find_java
from holdfast.pipeline.worker_python import quick_python

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

SUPPORTED_SPARK = ("4.0", "4.1", "4.2", "4.3")
DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "true",
    "spark.driver.memory": "1g",
}
LOCAL_DEFAULTS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.python.daemon.module": "holdfast.pipeline.worker_daemon",
}
SHUFFLE = "spark.sql.shuffle.partitions"
TRUSTED_ARROW = "-Darrow.enable_unsafe_memory_access=true"
"""Arrow for Java compares each access with its buffer's bounds: a seventh of what a record costs on its way from a
worker to a row. Arrays reach the JVM from our decoders, whose bounds are proven as they are made, and from Python
steps, whose results are validated in the worker; Spark reads strings without that comparison anyway."""
PARTS = "holdfast_parts"
"""The directory, in that of an executor, which the package is unpacked to."""
WORKER_PYTHON = "spark.pyspark.python"
PACKAGE_WITH = "spark.holdfast.package.with"
"""Distributions that the functions of a definition use, with commas between: they are shipped too."""
LOG_SETTINGS = """\
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = {file}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yyyy-MM-dd HH:mm:ss}} %p %c{{1}}: %m%n%ex
"""


class SparkUnusable(HoldfastError):
    """Spark is not installed, or is not the version this was made for."""

    exit_code = 3


class SettingFixed(HoldfastError):
    """A definition, or the session it is to run in, changes a Spark setting that its guarantees rest on."""

    exit_code = 2


def spark_session(
    name: str,
    home: str,
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    tell: Callable[[str], None] | None = None,
    archive: ClassArchive | None = None,
) -> SparkSession:
    """A session for the pipeline of this name, whose noise goes to `<home>/spark.log`; `tell` is told of long work.

    With an `archive` a driver of tasks on this machine starts from it, or notes what it is to be made of.
    """
    os.environ["JAVA_HOME"] = find_java()
    require_spark()
    settings = settings or {}
    home = os.path.abspath(home)
    os.makedirs(home, exist_ok=True)
    master = master or settings.get("spark.master") or "local[*]"
    sharing = [] if archive is None or is_remote(master) else archive.java_options()
    chosen = session_settings(home, master, settings, sharing)
    python = sys.executable
    if is_remote(master):
        python = worker_python(settings)
        address = Path(shipped_package(home, settings, tell)).as_uri()
        chosen = {**chosen, **shipping(address, chosen)}
        if tell is not None:
            tell(f"asking {master} for executors")
    elif master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        python = quick_python(home)

    chosen = {"spark.app.name": f"holdfast {name}", **chosen, "spark.master": master}
    from pyspark.errors import PySparkRuntimeError

    with _python_of_workers(python), standard_error_to(os.path.join(home, "spark.log")):
        try:
            session = _started(chosen)
        except PySparkRuntimeError as error:
            if archive is None or not sharing or error.getCondition() != "JAVA_GATEWAY_EXITED":
                raise
            archive.discard()
            chosen["spark.driver.extraJavaOptions"] = java_options(home, master, settings)
            session = _started(chosen)
    refuse_session(session)  # A session that was there before keeps what it was started with.
    return session


def _started(settings: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


@contextlib.contextmanager
def _python_of_workers(python: str) -> Iterator[None]:
    """Spark takes it from the environment when a session starts."""
    names = {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": sys.executable}
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


# ---------------------------------------------------------------------------- a cluster


def worker_python(settings: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> str:
    """The Python on the machines of a cluster: as the definition or Spark's variable says, else by its usual name."""
    named = settings.get(WORKER_PYTHON) or environment.get("PYSPARK_PYTHON")
    return named or f"python{sys.version_info.major}.{sys.version_info.minor}"


def shipped_package(home: str, settings: Mapping[str, str], tell: Callable[[str], None] | None = None) -> str:
    """The archive that goes to the executors, in the home."""
    from holdfast.pipeline.cluster.packaging import cache_directory, make_package, serve_from_home

    told = -1

    def progress(done: int, total: int) -> None:
        nonlocal told
        tenth = 10 * done // max(1, total)
        if tell is not None and tenth > told:
            told = tenth
            tell(f"packing the Python parts for the cluster: {done >> 20} of {total >> 20} MB")

    more = [name.strip() for name in settings.get(PACKAGE_WITH, "").split(",") if name.strip()]
    package = make_package(cache_directory(home), more=more, progress=progress)
    if tell is not None:
        tell(f"Python parts for the cluster: {package.bytes >> 20} MB in {package.path}")
    return serve_from_home(package, home)


def shipping(address: str, settings: Mapping[str, str]) -> dict[str, str]:
    """The settings by which executors get the archive and their workers start from it, beside what is set already."""
    from holdfast.pipeline.cluster.packaging import START

    path_name = "spark.executorEnv.PYTHONPATH"
    archives = [f"{address}#{PARTS}", settings.get("spark.archives", "")]
    paths = [f"./{PARTS}", settings.get(path_name, "")]
    return {
        "spark.archives": ",".join(filter(None, archives)),
        path_name: ":".join(filter(None, paths)),
        "spark.python.daemon.module": START,
    }


_sent: WeakKeyDictionary[SparkContext, set[str]] = WeakKeyDictionary()
"""The packages that sessions of users have, by what goes in beside our parts. Finding out what a package would hold
reads every file of ours, and this process goes on with the parts that it has loaded, whatever is installed since."""


@contextlib.contextmanager
def workers_with_parts(
    spark: SparkSession, home: str, settings: Mapping[str, str], tell: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Inside, workers of a session that the user brings find our parts: on this machine they run the driver's own
    Python; on others they get the package, which stays with the session."""
    context = spark.sparkContext
    python, environment = context.pythonExec, dict(context.environment)
    if is_remote(context.master):
        more, has = settings.get(PACKAGE_WITH, ""), _sent.setdefault(context, set())
        if more not in has:
            package = shipped_package(home, settings, tell)
            # Named by its content: the session may have been started with it.
            if not any(os.path.basename(package) in sent for sent in context.listArchives):
                context.addArchive(f"{package}#{PARTS}")
            has.add(more)
        paths = (f"./{PARTS}", environment.get("PYTHONPATH", ""))
        context.environment["PYTHONPATH"] = ":".join(filter(None, paths))
    else:
        context.pythonExec = sys.executable
    try:
        yield
    finally:
        context.pythonExec = python
        context.environment.clear()
        context.environment.update(environment)


def refuse_fixed(settings: Mapping[str, str]) -> None:
    for name, wanted in changed(settings):
        raise SettingFixed(
            f"the pipeline's definition sets {name} to {settings[name]!r}; its guarantees and results rest on "
            f"{wanted}, so it cannot be changed: leave it out"
        )


def refuse_changed(spark: SparkSession, known: str) -> str:
    """The same of a session that was looked at before: only what was set since matters. `known` is what this gave then:
    while it says the same, one question to the JVM is enough."""
    told = _settings_text(spark)
    if told != known:
        refuse_session(spark, is_known=True)
    return told


def refuse_session(spark: SparkSession, *, is_known: bool = False) -> None:
    """A session is refused when it would compute something else than one of ours; one that `is_known` was looked at
    before, and only what was set since matters."""
    settings = dict(each.partition(" -> ")[::2] for each in _settings_text(spark).split("\0"))
    if not is_known:
        # What nobody has set follows from the machine: its time zone, or a variable of the environment.
        settings |= {name: spark.conf.get(name) or "" for name in FIXED if name.startswith("spark.sql.")}
    for name, wanted in changed(settings):
        raise SettingFixed(
            f"{name} is {settings[name]!r} in the Spark session; the guarantees and results of a pipeline rest on "
            f"{wanted}: set it so (spark.conf.set, or where the session starts), or leave the session to "
            "holdfast"
        )


def _settings_text(spark: SparkSession) -> str:
    """What was set, by one question to the JVM: `spark.conf.getAll` asks three for each setting."""
    return str(spark._jsparkSession.conf().getAll().mkString("\0"))


def session_settings(
    home: str, master: str, settings: Mapping[str, str], sharing: Sequence[str] = ()
) -> dict[str, str]:
    """Every setting of the session; those of the definition win over defaults, and cannot change what is fixed."""
    refuse_fixed(settings)
    local: dict[str, str] = {}
    if master.startswith("local"):
        cores = str(local_cores(master))
        local = {**LOCAL_DEFAULTS, SHUFFLE: cores, f"spark.executorEnv.{LOCAL_CORES}": cores}
    ours = {
        **DEFAULTS,
        **local,
        "spark.sql.warehouse.dir": os.path.join(home, "warehouse"),
        **settings,
        **FIXED,
    }
    ours["spark.driver.extraJavaOptions"] = java_options(home, master, settings, sharing)
    return ours


def local_cores(master: str) -> int:
    """How many tasks run at a time on this machine: `local[4]`, `local[*]`, `local`, `local-cluster[2,4,1024]`."""
    given = re.findall(r"\d+", master)
    if master.startswith("local-cluster"):
        return int(given[0]) * int(given[1])
    return int(given[0]) if given else (os.cpu_count() or 2) if "*" in master else 1


def fit_to_cluster(spark: SparkSession, settings: Mapping[str, str]) -> None:
    """Shuffles have as many partitions as the cluster's executors, which are there by now, have cores, where that is
    more than Spark's own 200. Small partitions are joined by adaptive execution."""
    cores = spark.sparkContext.defaultParallelism
    if SHUFFLE not in settings and cores > int(spark.conf.get(SHUFFLE) or 0):
        spark.conf.set(SHUFFLE, str(cores))


def java_options(home: str, master: str, settings: Mapping[str, str], sharing: Sequence[str] = ()) -> str:
    """Of the driver's JVM; `sharing` are those that concern an archive of classes."""
    options = [f"-Dlog4j2.configurationFile={_log_settings(home)}", "-XX:+IgnoreUnrecognizedVMOptions"]
    if master.startswith("local"):
        options.append(TRUSTED_ARROW)
    options += sharing
    # Of two that contradict each other Java takes the later one, which is the definition's.
    options.append(settings.get("spark.driver.extraJavaOptions", ""))
    return " ".join(filter(None, options))


def require_spark() -> None:
    """Spark is there, in the version whose behaviour was tested."""
    if importlib.util.find_spec("pyspark") is None:
        raise SparkUnusable(
            "pyspark is not installed; install holdfast with its extra: pip install 'holdfast[spark]'"
        )
    import pyspark

    if ".".join(pyspark.__version__.split(".")[:2]) not in SUPPORTED_SPARK:
        raise SparkUnusable(
            f"pyspark {pyspark.__version__} is installed; pipelines are made for {', '.join(SUPPORTED_SPARK)} "
            "(pip install 'holdfast[spark]')"
        )


def _log_settings(home: str) -> str:
    path = os.path.join(home, "spark-log4j2.properties")
    with open(path, "w", encoding="utf-8") as file:
        file.write(LOG_SETTINGS.format(file=os.path.join(home, "spark.log")))
    return path


@contextlib.contextmanager
def standard_error_to(path: str) -> Iterator[None]:
    """Processes started inside write their standard error to this file: the JVM complains before it reads its log's
    settings, and Python workers inherit what the JVM has."""
    sys.stderr.flush()
    kept = os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.dup2(file, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(file)
