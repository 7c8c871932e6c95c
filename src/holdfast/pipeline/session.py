"""The Spark session a pipeline runs in.

Settings that a pipeline's guarantees rest on are fixed here and cannot be overridden by a definition: no speculative
copies of tasks (two copies of a writer), the session's time zone (a replay on another machine must compute the same),
and the Python that runs the workers. Everything else is a default.

Spark talks a lot: its log and the JVM's standard error go to `spark.log` in the pipeline's home, from the first line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.pipeline.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SUPPORTED_SPARK = "4.3"
FIXED = {
    "spark.speculation": "false",
    "spark.sql.session.timeZone": "UTC",
}
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
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
    "spark.python.daemon.module": "holdfast.pipeline.worker_daemon",
}
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
    """A definition changes a Spark setting that its guarantees rest on."""

    exit_code = 2


def spark_session(
    name: str, home: str, *, master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """A session for the pipeline of this name, whose noise goes to `<home>/spark.log`."""
    os.environ["JAVA_HOME"] = find_java()
    require_spark()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    home = os.path.abspath(home)
    os.makedirs(home, exist_ok=True)
    master = master or "local[*]"
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    chosen = session_settings(home, master, settings or {})

    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(f"holdfast {name}").master(master)
    for key, value in chosen.items():
        builder = builder.config(key, value)
    with standard_error_to(os.path.join(home, "spark.log")):
        return builder.getOrCreate()


def session_settings(home: str, master: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Every setting of the session; those of the definition win over defaults, and cannot change what is fixed."""
    for key, value in FIXED.items():
        if settings.get(key, value).lower() != value.lower():
            raise SettingFixed(
                f"the pipeline's definition sets {key} to {settings[key]!r}; "
                f"exactly-once output rests on {value!r}, so it cannot be changed"
            )
    local = LOCAL_DEFAULTS if master.startswith("local") else {}
    ours = {
        **DEFAULTS,
        **local,
        "spark.sql.warehouse.dir": os.path.join(home, "warehouse"),
        **settings,
        **FIXED,
    }
    java_options = f"-Dlog4j2.configurationFile={_log_settings(home)} -XX:+IgnoreUnrecognizedVMOptions"
    ours["spark.driver.extraJavaOptions"] = " ".join(
        part for part in (java_options, settings.get("spark.driver.extraJavaOptions")) if part
    )
    return ours


def require_spark() -> None:
    """Spark is there, in the version whose behaviour was tested."""
    if importlib.util.find_spec("pyspark") is None:
        raise SparkUnusable(
            "pyspark is not installed; install holdfast with its extra: pip install 'holdfast[spark]'"
        )
    import pyspark

    if not pyspark.__version__.startswith(SUPPORTED_SPARK + "."):
        raise SparkUnusable(
            f"pyspark {pyspark.__version__} is installed; pipelines are made for {SUPPORTED_SPARK} "
            f"(pip install 'pyspark~={SUPPORTED_SPARK}.0')"
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
