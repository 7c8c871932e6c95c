"""`holdfast serve`: settings in, a broker until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from holdfast.broker.node.loggers import Levels
from holdfast.broker.server.log_output import (
    LibraryLines,
    LogOutput,
    occupy_standard_descriptors,
    write_json_to_standard_error,
    write_to_standard_error,
)
from holdfast.broker.server.server import Machine, Server
from holdfast.config.broker import BrokerConfig
from holdfast.config.listeners import address_text, listeners_for
from holdfast.config.properties import parse_properties
from holdfast.errors import ConfigError
from holdfast.real import keep_freed_memory
from holdfast.saying import Level, error
from holdfast.supervisor import Supervisor

GC_THRESHOLD = 50_000
"""Requests leave little garbage in cycles; looking for it rarely keeps pauses out of the tail."""


class Options(Protocol):
    @property
    def data_dir(self) -> str | None: ...
    @property
    def listen(self) -> Sequence[str]: ...
    @property
    def config_path(self) -> str | None: ...
    @property
    def overrides(self) -> Mapping[str, str]: ...
    @property
    def log_level(self) -> Level: ...
    @property
    def log_format(self) -> str: ...
    @property
    def accept_loss(self) -> Sequence[str]: ...
    @property
    def serve_unenforced(self) -> Sequence[str]: ...


def load_config(options: Options) -> tuple[BrokerConfig, list[str]]:
    properties: Mapping[str, str] = {}
    if options.config_path is not None:
        try:
            with open(options.config_path, encoding="utf-8") as file:
                properties = parse_properties(file.read(), options.config_path)
        except OSError as error:
            raise ConfigError(f"cannot read {options.config_path}: {error.strerror}") from error
    overrides = dict(options.overrides)
    if options.data_dir is not None:
        overrides["log.dirs"] = options.data_dir
    if options.listen:
        overrides["listeners"] = ",".join(map(listeners_for, options.listen))
    return BrokerConfig.load(properties, overrides)


def serve(
    options: Options, *, on_ready: Callable[[Server], None] | None = None, machine: Machine | None = None
) -> int:
    occupy_standard_descriptors()
    write = write_json_to_standard_error if options.log_format == "json" else write_to_standard_error
    say = LogOutput(write, Levels(options.log_level))
    logging.basicConfig(handlers=[LibraryLines(say)], force=True)
    logging.captureWarnings(True)
    loop = new_event_loop()
    try:
        config, notices = load_config(options)
        for notice in notices:
            say(notice)
        keep_freed_memory()
        return loop.run_until_complete(_serve(config, say, options, on_ready, machine))
    finally:
        loop.close()
        say.close()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it installs; asyncio's own does the same, slower."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _serve(
    config: BrokerConfig,
    say: LogOutput,
    options: Options,
    on_ready: Callable[[Server], None] | None,
    machine: Machine | None,
) -> int:
    server = Server(config, say, options.accept_loss, options.serve_unenforced, say.levels, machine)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server.node.failures.on_fatal = stop.set
    supervisor = Supervisor()
    supervisor.starting("opening the data; after a crash that takes as long as recovery does")
    started = time.monotonic()
    await server.start()
    told = [address_text(endpoint.host, endpoint.port) for endpoint in server.endpoints]
    where = ", ".join(
        own if own == address else f"{own} (advertised as {address})"
        for own, address in zip(server.addresses, told, strict=True)
    )
    say(
        f"ready on {where} in {(time.monotonic() - started) * 1000:.0f} ms: cluster {server.node.identity.cluster_id}, "
        f"{len(server.node.partitions)} partitions, data in {', '.join(config.log_dirs)}"
    )
    if server.metrics is not None:
        say(f"metrics at http://{server.metrics.address}/metrics, health at /livez and /readyz")
    if server.node.identity.is_new_cluster:
        say(
            f"a new cluster begins here; with --cluster-id={server.node.identity.cluster_id} later starts refuse "
            "a directory that is empty or another cluster's"
        )
    # What has been made so far lives as long as the broker: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    if on_ready is not None:
        on_ready(server)
    supervisor.ready(f"serving on {where}")
    keeping = loop.create_task(tell_alive(supervisor))
    await stop.wait()
    keeping.cancel()
    say("stopping")
    supervisor.stopping()
    await server.stop()
    if server.node.failures.fatal is not None:
        say(error(f"stopped because {server.node.failures.fatal}"))
        return 1
    say("stopped cleanly" if server.node.failures.is_left_clean else "stopped")
    return 0


async def tell_alive(supervisor: Supervisor) -> None:
    """From the loop that serves clients: while something holds it up, the supervisor hears nothing."""
    while supervisor.alive_every_s:
        supervisor.alive()
        await asyncio.sleep(supervisor.alive_every_s)
