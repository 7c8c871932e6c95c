"""The demo from its beginning to its end: the storm, the audit, the count, and with `--unsafe` the plain side of it.

Every figure is measured in this run: those of the picture while it runs are read from what the processes leave behind,
those of the verdict from the topic and the outputs, when all is over.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console, RenderableType
from rich.text import Text

from holdfast.demo import proof as demo_proof
from holdfast.demo.count import Tally, count, ids_in_parquet, numbers_in_topic
from holdfast.demo.orders import DEAD_LETTERS, SOURCE, Orders
from holdfast.demo.processes import DEFINITION_FILE, EMBEDDED, Engine, Job, PipelineJob, PlainJob, Sender
from holdfast.demo.proof import Proof
from holdfast.demo.screen import Screen
from holdfast.demo.sender import Errand
from holdfast.demo.storm import Storm
from holdfast.errors import ExitCode

T = TypeVar("T")
RATE: Final = 1_500.0
"""Orders a second: the default number of them takes as long as Spark needs to start, die and start again."""
BATCHES: Final = 6
"""A batch takes no more than this part of the orders: there are some before, while and after the job is killed."""
BATCH_RECORDS_MIN: Final = 2_000
DAY_MS: Final = 86_400_000
PICTURE_WIDTH: Final = 118


class Show:
    def __init__(
        self,
        console: Console,
        directory: Path,
        certificates: Path,
        engine: str,
        orders: int,
        seed: int,
        *,
        is_kept: bool,
    ) -> None:
        self._console = console
        self._directory = directory
        self._certificates = certificates
        self._engine = engine
        # Events of yesterday, so that none is in the future.
        self._orders = Orders(orders, int(time.time() * 1000) - DAY_MS, seed)
        self._batch_records = max(BATCH_RECORDS_MIN, orders // BATCHES)
        self._is_kept = is_kept
        self._address = ""
        self._shown: list[RenderableType] = []
        """For the picture: what stays on the screen."""

    def run(self, *, beside_plain: bool) -> ExitCode:
        proof = self._holdfast()
        self._tell(proof)
        if beside_plain:
            self._print(Text(""))
            plain = self._plain()
            self._print(Text(""))
            self._print(demo_proof.beside(proof.tally, plain))
        return proof.exit_code

    def draw(self, file: str) -> None:
        """What stays on the screen, as SVG."""
        recorder = Console(record=True, width=PICTURE_WIDTH, file=io.StringIO(), force_terminal=True)
        for each in self._shown:
            recorder.print(each, highlight=False)
        recorder.save_svg(file, title="holdfast demo")

    # The two sides

    def _holdfast(self) -> Proof:
        directory = self._directory
        spool = directory / "spool"
        job = PipelineJob(directory, self._batch_records)

        def prove(bootstrap: str, screen: Screen) -> Proof:
            tally = count(
                self._orders,
                numbers_in_topic(bootstrap, SOURCE),
                ids_in_parquet(directory / "out" / "orders", directory / "out" / "late"),
                numbers_in_topic(bootstrap, DEAD_LETTERS),
            )
            report = demo_proof.audit(job.file, bootstrap)
            for name, value in demo_proof.figures(report).items():
                screen.set(name, value)
            return Proof(report, demo_proof.audit_spool(spool, bootstrap), tally)

        return self._weather("holdfast", directory, self._sender(directory, str(spool)), job, prove)

    def _plain(self) -> Tally:
        directory = self._directory / "plain"
        directory.mkdir()
        sender = self._sender(directory, None)
        job = PlainJob(directory, self._batch_records)

        def prove(bootstrap: str, screen: Screen) -> Tally:
            return count(
                self._orders,
                numbers_in_topic(bootstrap, SOURCE),
                ids_in_parquet(directory / "out" / "orders"),
                (),
            )

        return self._weather("plain clients and plain Spark", directory, sender, job, prove)

    def _weather(
        self, side: str, directory: Path, sender: Sender, job: Job, prove: Callable[[str, Screen], T]
    ) -> T:
        engine = Engine.in_directory(self._engine, directory)
        title = f"{side}: {self._orders.count:,} orders through {engine.name}, and three kills"
        screen = Screen(self._console, title)
        with Storm(screen, self._orders, engine, sender, job) as storm:
            with screen:
                storm.run()
                screen.say("reading the topic and the outputs")
                self._address = engine.machine.bootstrap_servers
                found = prove(engine.machine.bootstrap_servers, screen)
            self._shown.append(screen.picture())
            return found

    def _sender(self, directory: Path, spool: str | None) -> Sender:
        errand = Errand("", self._orders.count, self._orders.start_ms, self._orders.seed, 0, RATE, spool)
        return Sender(directory / "sender.log", errand)

    # What is said at the end

    def _tell(self, proof: Proof) -> None:
        self._print(Text(""))
        self._print(demo_proof.audited(proof.pipeline))
        self._print(demo_proof.numbered(proof.spool))
        self._print(demo_proof.counted(proof.tally))
        self._print(demo_proof.verdict(proof.pipeline))
        certified = demo_proof.certify(proof.pipeline, self._certificates)
        trusted = sum(not each.is_gap for each in proof.pipeline.unproven)
        things = "1 thing" if trusted == 1 else f"{trusted} things"
        names = f", which names {things} that it takes on trust" if trusted else ""
        self._console.print(f"The certificate: {certified}{names}", highlight=False, soft_wrap=True)
        if self._is_kept:
            for line in self._advice():
                self._console.print(line, highlight=False, soft_wrap=True)

    def _advice(self) -> Iterator[str]:
        """What can be done with what was kept."""
        definition = self._directory / DEFINITION_FILE
        yield f"Everything is in {self._directory}."
        if self._engine == EMBEDDED:
            yield f"  holdfast serve --data-dir {self._directory / 'data'} --listen {self._address}"
            yield f"  holdfast audit pipeline {definition}"
            yield f"  holdfast trace {SOURCE}:0@1000 {definition}"

    def _print(self, what: RenderableType) -> None:
        self._shown.append(what)
        self._console.print(what, highlight=False)
