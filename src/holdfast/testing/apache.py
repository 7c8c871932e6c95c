"""A real Apache Kafka 4.3 for tests, bench and lab: fetched once, started here, never left behind.

`jars()` gives the directory with the class path: resolved by Maven from `apache_pom/pom.xml`, kept outside
the tree under the user's cache directory, and checked against `apache_pom/SHA256SUMS` (once per process, and
always before a fresh download is moved into place). A lock lets parallel test workers ask at the same time;
once it is there nothing touches the network.

`ApacheKafka` is one combined broker and controller on loopback, with the options kafka-server-start gives
the JVM:

    with ApacheKafka(properties={"num.partitions": "3"}) as kafka:
        Producer({"bootstrap.servers": kafka.bootstrap_servers})

The rules it keeps:

- `start()` returns when the broker has answered a Metadata request that lists it, not before.
- Whatever goes wrong carries the end of the broker's log in its message.
- The process is in a group of its own, is killed at interpreter exit, and, where the kernel can do it, when
  this process dies without reaching its exit handlers.

The Java tools run by `run_tool(TOPICS, "--list", ...)`; their class names stand below.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from holdfast.config.listeners import address_text
from holdfast.errors import HoldfastError
from holdfast.testing.processes import die_with_parent, end, free_ports, wait_until_ready
from holdfast.testing.topics import Topics

KAFKA_VERSION: Final = "4.3.1"
MAVEN_GOAL: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
RESOURCES: Final = Path(__file__).with_name("apache_pom")

# The main classes behind Kafka's scripts of the same name.
STORAGE: Final = "kafka.tools.StorageTool"
TOPICS: Final = "org.apache.kafka.tools.TopicCommand"
CONFIGS: Final = "kafka.admin.ConfigCommand"
CONSOLE_PRODUCER: Final = "org.apache.kafka.tools.ConsoleProducer"
CONSOLE_CONSUMER: Final = "org.apache.kafka.tools.consumer.ConsoleConsumer"
DUMP_LOG: Final = "org.apache.kafka.tools.DumpLogSegments"
GET_OFFSETS: Final = "org.apache.kafka.tools.GetOffsetShell"
CONSUMER_GROUPS: Final = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
METADATA_QUORUM: Final = "org.apache.kafka.tools.MetadataQuorumCommand"
LOG_DIRS: Final = "org.apache.kafka.tools.LogDirsCommand"
DELETE_RECORDS: Final = "org.apache.kafka.tools.DeleteRecordsCommand"
CLUSTER: Final = "org.apache.kafka.tools.ClusterTool"
TRANSACTIONS: Final = "org.apache.kafka.tools.TransactionsCommand"
VERIFIABLE_PRODUCER: Final = "org.apache.kafka.tools.VerifiableProducer"
VERIFIABLE_CONSUMER: Final = "org.apache.kafka.tools.VerifiableConsumer"
MESSAGE_COPIER: Final = "org.apache.kafka.tools.TransactionalMessageCopier"

HEAP_OPTIONS: Final = ("-Xmx1G", "-Xms1G")
"""What kafka-server-start sets."""
SHORT_LIVED_JVM: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UseG1GC")
"""A broker that lives for minutes is faster without the second compiler."""
PERFORMANCE_OPTIONS: Final = (
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
)
"""What kafka-run-class sets."""
JMX_OPTIONS: Final = (
    "-Dcom.sun.management.jmxremote=true",
    "-Dcom.sun.management.jmxremote.authenticate=false",
    "-Dcom.sun.management.jmxremote.ssl=false",
)

START_TIMEOUT_S: Final = 120.0
"""Kafka needs four seconds on a quiet machine; a crowded CI machine is given thirty times that."""
STOP_TIMEOUT_S: Final = 60.0
TOOL_TIMEOUT_S: Final = 120.0
DOWNLOAD_TIMEOUT_S: Final = 900.0
START_ATTEMPTS: Final = 3
"""A port found free may be taken by another process before Kafka binds it."""
LOG_QUOTE_LINES: Final = 30


class ApacheKafkaUnavailable(HoldfastError):
    """Apache Kafka cannot be run on this machine; the message says what is missing."""


class ApacheKafkaFailed(HoldfastError):
    """Apache Kafka or one of its tools ran and failed; the message quotes its log."""


# -------------------------------------------------------------------------------- the class path


def cache_directory() -> Path:
    """Where holdfast keeps what it downloads for tests and bench."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "holdfast"


def java_executable() -> str:
    """The JVM: $JAVA_HOME's, or the one on the PATH."""
    java_home = os.environ.get("JAVA_HOME")
    candidate = os.path.join(java_home, "bin", "java") if java_home else "java"
    found = shutil.which(candidate)
    if found is None:
        raise ApacheKafkaUnavailable(
            f"Apache Kafka {KAFKA_VERSION} needs a Java runtime, 17 or newer: {candidate!r} was not found "
            "(Debian: apt-get install openjdk-17-jre-headless)"
        )
    return found


@functools.cache
def jars() -> Path:
    """The directory with Kafka's class path, downloaded by Maven when it is not there yet."""
    java_executable()
    target = cache_directory() / f"kafka-{KAFKA_VERSION}" / "jars"
    expected = _expected_sums()
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(target.parent / "lock"):
        if target.is_dir():
            problem = _integrity_problem(target, expected)
            if problem is None:
                return target
            shutil.rmtree(target)
        _download(target, expected)
    return target


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold `path` locked against other processes; the file itself stays."""
    with open(path, "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_maven(
    to_fetch: str, unavailable: type[HoldfastError], arguments: Sequence[str], directory: Path
) -> None:
    """Have Maven fetch something, unless there is none or HOLDFAST_OFFLINE forbids to fetch: the error says so."""
    if os.environ.get("HOLDFAST_OFFLINE"):
        raise unavailable(
            f"{to_fetch} is not here, and is not fetched now (HOLDFAST_OFFLINE): run `make setup`"
        )
    maven = shutil.which("mvn")
    if maven is None:
        raise unavailable(
            f"{to_fetch} is not here, and Maven, which fetches it, was not found: "
            "'mvn' is not on the PATH (Debian: apt-get install maven)"
        )
    command = [maven, "-B", "-q", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False, cwd=directory
        )
    except subprocess.TimeoutExpired as error:
        raise unavailable(f"Maven did not fetch {to_fetch} within {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise unavailable(f"Maven could not fetch {to_fetch}:\n{_tail(done.stdout + done.stderr)}")


def _expected_sums() -> dict[str, str]:
    lines = (RESOURCES / "SHA256SUMS").read_text(encoding="ascii").splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def _integrity_problem(directory: Path, expected: Mapping[str, str]) -> str | None:
    """What differs between the jars of `directory` and the committed sums, or None."""
    present = {path.name for path in directory.iterdir()}
    if present != expected.keys():
        missing, surplus = sorted(expected.keys() - present), sorted(present - expected.keys())
        return f"missing {missing}, not expected {surplus}"
    for name, digest in expected.items():
        with open(directory / name, "rb") as jar:
            if hashlib.file_digest(jar, "sha256").hexdigest() != digest:
                return f"{name} has another SHA-256 than the committed one"
    return None


def _download(target: Path, expected: Mapping[str, str]) -> None:
    aside = Path(tempfile.mkdtemp(prefix="download-", dir=target.parent))
    try:
        shutil.copy(RESOURCES / "pom.xml", aside / "pom.xml")
        arguments = ["-f", str(aside / "pom.xml"), MAVEN_GOAL, "-DincludeScope=runtime"]
        arguments.append(f"-DoutputDirectory={aside / 'jars'}")
        run_maven(f"Apache Kafka {KAFKA_VERSION}", ApacheKafkaUnavailable, arguments, aside)
        problem = _integrity_problem(aside / "jars", expected)
        if problem is not None:
            raise ApacheKafkaUnavailable(
                f"the download of Apache Kafka {KAFKA_VERSION} was refused: {problem}"
            )
        os.rename(aside / "jars", target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


# -------------------------------------------------------------------------------- child processes


def new_id() -> str:
    """As Kafka writes its ids; a leading dash would be taken for an option somewhere."""
    return "h" + urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]


def broker_answers(host: str, port: int, timeout_s: float = 2.0) -> bool:
    """Whether a Kafka broker there answers Metadata and lists at least one live broker."""
    client_id = b"holdfast-readiness"
    body = struct.pack(f">hhih{len(client_id)}si", 3, 1, 1, len(client_id), client_id, 0)
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.sendall(struct.pack(">i", len(body)) + body)
            # Size, correlation id, then the length of the array of brokers.
            answer = b""
            while len(answer) < 12:
                received = connection.recv(12 - len(answer))
                if not received:
                    return False
                answer += received
    except OSError:
        return False
    return int(struct.unpack(">iii", answer)[2]) > 0


def _tail(text: str, lines: int = LOG_QUOTE_LINES) -> str:
    return "\n".join(text.splitlines()[-lines:])


# -------------------------------------------------------------------------------- the tools


def run_tool(
    main_class: str,
    *arguments: str,
    input: str | bytes | None = None,  # noqa: A002 - subprocess.run's own word
    timeout_s: float = TOOL_TIMEOUT_S,
    check: bool = True,
    jvm_options: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[bytes]:
    """Run one of Kafka's Java tools to its end; output and errors are bytes.

    A tool that exits with anything but 0 raises `ApacheKafkaFailed` unless `check` is false.
    """
    command = tool_command(main_class, *arguments, jvm_options=jvm_options)
    data = input.encode() if isinstance(input, str) else input
    try:
        done = subprocess.run(
            command,
            input=data,
            stdin=subprocess.DEVNULL if data is None else None,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            preexec_fn=die_with_parent(),
        )
    except subprocess.TimeoutExpired as error:
        said = _tail(((error.stdout or b"") + (error.stderr or b"")).decode(errors="replace"))
        raise ApacheKafkaFailed(
            f"{main_class} {' '.join(arguments)} did not end within {timeout_s:.0f} s:\n{said}"
        ) from error
    if check and done.returncode != 0:
        said = _tail((done.stdout + done.stderr).decode(errors="replace"))
        raise ApacheKafkaFailed(f"{main_class} {' '.join(arguments)} exited with {done.returncode}:\n{said}")
    return done


def tool_command(main_class: str, *arguments: str, jvm_options: tuple[str, ...] = ()) -> list[str]:
    """The command line of one of Kafka's Java tools, for those who start it themselves."""
    command = [java_executable(), "-Xmx512M", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *jvm_options]
    return [
        *command,
        *_log4j_options(level="WARN", stream="ERR"),
        "-cp",
        f"{jars()}/*",
        main_class,
        *arguments,
    ]


def _log4j_options(level: str, stream: str) -> list[str]:
    return [
        f"-Dlog4j2.configurationFile={RESOURCES / 'log4j2.properties'}",
        f"-Dholdfast.log.level={level}",
        f"-Dholdfast.log.stream={stream}",
    ]


# -------------------------------------------------------------------------------- the broker


class ApacheKafka(Topics):
    """One Apache Kafka node, broker and controller in one process, on loopback.

    `directory` holds `data/` (the log directory), `server.properties` and `kafka.log`; without it a
    temporary one is used and removed by `stop()`. `properties` override the ones written here.
    """

    def __init__(
        self,
        properties: Mapping[str, str] | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        heap_options: tuple[str, ...] = HEAP_OPTIONS,
        jvm_options: tuple[str, ...] = (),
        is_detached: bool = False,
    ) -> None:
        """With `is_detached` the process outlives this one, and whoever started it has to end it."""
        self._is_detached = is_detached
        self._owns_directory = directory is None
        self.directory = Path(directory) if directory is not None else Path(tempfile.mkdtemp(prefix="kafka-"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self.data_dir = Path(data_dir) if data_dir is not None else self.directory / "data"
        self.log_file = self.directory / "kafka.log"
        self.properties = dict(properties or {})
        self.heap_options = heap_options
        self.jvm_options = jvm_options
        self.host = "127.0.0.1"
        self.port = 0
        self.controller_port = 0
        self.command_prefix: tuple[str, ...] = ()
        """What starts the JVM where it is to run, such as in a network namespace, by becoming it."""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bootstrap_servers(self) -> str:
        """The address clients are given."""
        return address_text(self.host, self.port)

    @property
    def pid(self) -> int:
        """The process id of the JVM."""
        if self._process is None:
            raise ApacheKafkaFailed("Apache Kafka is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Format the directory when it is new, start, and wait until the broker answers."""
        if self.running:
            raise ApacheKafkaFailed("Apache Kafka is already running")
        self.prepare()
        for attempt in range(1, START_ATTEMPTS + 1):
            self.launch()
            try:
                self.wait_until_ready(timeout_s)
                return
            except ApacheKafkaFailed:
                self.kill()
                if attempt == START_ATTEMPTS or b"Address already in use" not in self.log_file.read_bytes():
                    raise
                self._choose_ports()
                self._write_properties()

    def prepare(self) -> None:
        """Everything a start needs but the process: ports, properties, a formatted directory."""
        jars()
        if self.port == 0:
            self._choose_ports()
        self._write_properties()
        if not (self.data_dir / "meta.properties").exists():
            settings = str(self.directory / "server.properties")
            run_tool(STORAGE, "format", "--standalone", "-t", new_id(), "-c", settings)

    def launch(self) -> None:
        """Start the process and return at once; `wait_until_ready` tells when it serves."""
        command = [*self.command_prefix, java_executable(), *self.heap_options, *PERFORMANCE_OPTIONS]
        command += [
            *self.jvm_options,
            f"-Xlog:gc*:file={self.directory}/gc.log:time,tags:filecount=10,filesize=100M",
            *JMX_OPTIONS,
        ]
        command += [*_log4j_options(level="INFO", stream="OUT"), f"-Dkafka.logs.dir={self.directory}"]
        command += ["-cp", f"{jars()}/*", "kafka.Kafka", str(self.directory / "server.properties")]
        with open(self.log_file, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
                preexec_fn=None if self._is_detached else die_with_parent(),
            )
        if not self._is_detached:
            atexit.register(self.kill)

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return once the broker has answered a Metadata request that lists it."""
        if self._process is None:
            raise ApacheKafkaFailed("Apache Kafka is not running")
        wait_until_ready(
            self._process,
            lambda: broker_answers(self.host, self.port),
            lambda why: ApacheKafkaFailed(f"Apache Kafka {why}; {self._quote()}"),
            timeout_s,
        )

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Shut down cleanly (SIGTERM) and wait for the process to end; the files stay."""
        process = self._process
        if process is None:
            return
        in_time = process.poll() is not None or end(process, signal.SIGTERM, timeout_s)
        self._forget()
        if not in_time:
            raise ApacheKafkaFailed(
                f"Apache Kafka did not stop within {timeout_s:.0f} s and was killed; {self._quote()}"
            )

    def kill(self) -> None:
        """End the process at once (SIGKILL), as a crash would; the files stay."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._forget()

    def restart(self, *, clean: bool = True) -> None:
        """Stop (or, not clean, kill) and start again on the same ports and files."""
        if clean:
            self.stop()
        else:
            self.kill()
        self.start()

    def close(self) -> None:
        """Kill what runs and remove the directory if it is our own temporary one."""
        self.kill()
        if self._owns_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def log_tail(self, lines: int = LOG_QUOTE_LINES) -> str:
        """The end of the broker's log."""
        if not self.log_file.exists():
            return ""
        return _tail(self.log_file.read_text(encoding="utf-8", errors="replace"), lines)

    def _forget(self) -> None:
        self._process = None
        atexit.unregister(self.kill)

    def _quote(self) -> str:
        """The errors before the end: hundreds of lines of shutting down follow the reason for it."""
        text = self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file.exists() else ""
        errors = [line for line in text.splitlines() if " ERROR " in line or " FATAL " in line]
        told = "\n".join(errors[-LOG_QUOTE_LINES:]) or "no error"
        return f"its log {self.log_file} tells of:\n{told}\nand ends:\n{self.log_tail()}"

    def _choose_ports(self) -> None:
        self.port, self.controller_port = free_ports(2)

    def _write_properties(self) -> None:
        listeners = f"PLAINTEXT://{self.host}:{self.port}"
        controller = f"CONTROLLER://{self.host}:{self.controller_port}"
        properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.bootstrap.servers": f"{self.host}:{self.controller_port}",
            "listeners": f"{listeners},{controller}",
            "advertised.listeners": f"{listeners},{controller}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": str(self.data_dir),
            # One node cannot hold three copies.
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            # Tests wait for their groups, not for members that will never come.
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
            **self.properties,
        }
        text = "".join(f"{name}={value}\n" for name, value in properties.items())
        (self.directory / "server.properties").write_text(text, encoding="utf-8")
