"""A broker inside your program: `with holdfast.Broker() as broker: ...`."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from holdfast.broker.node.loggers import Levels
from holdfast.broker.server.log_output import LogOutput, log_with_logging, logged_level
from holdfast.broker.server.run import new_event_loop
from holdfast.broker.server.server import Machine, Server
from holdfast.config.broker import BrokerConfig
from holdfast.config.listeners import EVERY_ADDRESS, address_text
from holdfast.errors import StorageError, UsageError
from holdfast.saying import Say

START_SECONDS_MAX = 600.0
"""Recovery of a large data directory takes time; a start that takes longer is reported as failed."""

CREATE_SECONDS_MAX = 30.0


def create_topic(
    bootstrap_servers: str, name: str, partitions: int, settings: Mapping[str, str] | None
) -> None:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    new = NewTopic(name, partitions, config=dict(settings or {}))
    try:
        admin.create_topics([new], request_timeout=CREATE_SECONDS_MAX)[name].result()
    except KafkaException as error:
        raise UsageError(f"topic {name!r} was not created: {error.args[0].str()}") from error


class Broker:
    """One broker on a thread of this process.

    Without `data_dir` it lives in a temporary directory that is removed with it. `listen` is HOST:PORT; port 0
    takes a free one. `settings` are Kafka's property names. `accept_loss` names what is given up if it is missing, as
    `--accept-loss` of `holdfast serve` does.

    `say` gets each line of the broker's log, a string that has a `level` of Python's `logging`. It runs on a thread of
    its own: a `say` that is slow or raises holds nobody up. Without `say`, the lines go to the loggers of Python
    whose names begin with `holdfast.broker`; a program that does not set up logging sees none of them.

    A broker whose metadata cannot be written any more ends at once, as `holdfast serve` does: its clients are cut off,
    nobody is served by half a broker. `stop`, `restart` and leaving the `with` block then raise `StorageError` with the
    reason; an exception that leaves the block anyway passes, with the reason as a note. After that it may be started
    again; where its directory was temporary, with nothing in it.
    """

    machine: Machine | None = None
    """What it runs on if not on this machine's disk and clock; `holdfast.testing` has one with faults."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        listen: str = "127.0.0.1:0",
        settings: Mapping[str, str] | None = None,
        say: Say | None = None,
        accept_loss: Sequence[str] = (),
    ) -> None:
        self._is_temporary = data_dir is None
        self._data_dir = None if data_dir is None else os.fspath(data_dir)
        self._has_directory = not self._is_temporary
        self._settings = dict(settings or {})
        self._listen = listen
        self._user_says = say
        self._accept_loss = accept_loss
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self.server: Server | None = None

    @property
    def data_dir(self) -> str:
        if self._data_dir is None:
            raise UsageError("the broker makes its temporary directory when it starts")
        return self._data_dir

    @property
    def bootstrap_servers(self) -> str:
        """Where it listens, as HOST:PORT; the advertised address where that is every one of the machine."""
        if self.server is None:
            raise UsageError("the broker is not running; use it inside `with Broker() as broker:`")
        endpoint, own = self.server.endpoints[0], self.server.addresses[0]
        is_everywhere = own.startswith((f"{EVERY_ADDRESS}:", "[::]:"))
        return address_text(endpoint.host, endpoint.port) if is_everywhere else own

    def create_topic(self, name: str, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        """Create a topic, with settings by Kafka's names. Raises `UsageError` when it exists."""
        create_topic(self.bootstrap_servers, name, partitions, settings)

    def start(self) -> Self:
        if self._thread is not None:
            raise UsageError("the broker is already running")
        self._ready.clear()
        self._failure = None
        is_made = not self._has_directory  # before the first start, and after `stop`, which has removed it
        if is_made:
            self._data_dir = tempfile.mkdtemp(prefix="holdfast-")
            self._has_directory = True
        self._thread = threading.Thread(target=self._run, name="holdfast-broker", daemon=True)
        self._thread.start()
        self._ready.wait(START_SECONDS_MAX)
        try:
            self._raise_failure()
        except BaseException:
            if is_made:
                self._forget_temporary()
            raise
        if self.server is None:
            raise UsageError(f"the broker was not ready within {START_SECONDS_MAX:.0f} seconds")
        # A restart comes back where clients know it.
        self._listen = self.bootstrap_servers
        return self

    def stop(self) -> None:
        """Stop cleanly and wait; the data stays, unless it was temporary. Raises what ended the broker before."""
        try:
            self._halt()
        finally:
            self._forget_temporary()

    def _forget_temporary(self) -> None:
        if self._is_temporary and self._has_directory:
            shutil.rmtree(self.data_dir, ignore_errors=True)
            self._has_directory = False

    def restart(self) -> None:
        self._halt()
        self.start()

    def _halt(self) -> None:
        if self._thread is None or self._loop is None or self._stop is None:
            return
        with suppress(RuntimeError):  # its loop is closed: the broker has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._thread = None
        self.server = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Pass on what ended the broker's thread, on the thread of whoever uses it."""
        failure, self._failure = self._failure, None
        if failure is not None:
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            raise failure

    def _run(self) -> None:
        loop = self._loop = new_event_loop()
        if (user_says := self._user_says) is not None:
            log = LogOutput(lambda at, line: user_says(line))
        else:
            log = LogOutput(log_with_logging, Levels(logged_level()))
        try:
            loop.run_until_complete(self._serve(log))
        except BaseException as error:  # noqa: BLE001 - carried to the thread that started us
            self._failure = error
        finally:
            self._ready.set()
            loop.close()
            log.close()

    async def _serve(self, log: LogOutput) -> None:
        config, notices = BrokerConfig.load(
            {}, {**self._settings, "log.dirs": self.data_dir, "listeners": f"PLAINTEXT://{self._listen}"}
        )
        for notice in notices:
            log(notice)
        self._stop = asyncio.Event()
        server = Server(config, log, self._accept_loss, levels=log.levels, machine=self.machine)
        # What was given up is given up once: a restart that misses something again says so.
        self._accept_loss = ()
        server.node.failures.on_fatal = self._stop.set
        await server.start()
        self.server = server
        self._ready.set()
        await self._stop.wait()
        await server.stop()
        if server.node.failures.fatal is not None:
            raise StorageError(f"the broker stopped because {server.node.failures.fatal}")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except StorageError as error:
            if value is None:
                raise
            value.add_note(str(error))
