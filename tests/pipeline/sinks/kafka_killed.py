"""Runs a pipeline whose tasks send to Kafka, and kills: a worker between the commits of two writers of the first batch,
and between those of the second batch the driver itself.  Arguments: the definition's file, and a directory for notes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.sinks import kafka

honest_send = kafka.send_by_tasks  # type: ignore[attr-defined]
notes = sys.argv[2]
driver = os.getpid()


def send(spark: Any, holding: Any, topic: str, envelope: Any, sendings: Any) -> None:
    number = json.loads(sendings[0].value)["entry"]["number"]
    victim = {1: 0, 2: driver}.get(number)

    class Killing:
        """In a worker: the second of the writers to commit does not."""

        def messages(self, batch: Any) -> Any:
            from holdfast.pipeline.sinks.kafka_writer import Writer

            if not hasattr(Writer, "honest"):
                Writer.honest = Writer._commit  # type: ignore[attr-defined]
            Writer._commit = commit  # type: ignore[method-assign, assignment]
            return envelope.messages(batch)

    def note(name: str) -> bool:
        try:
            os.close(os.open(os.path.join(notes, f"{number}-{name}"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def commit(writer: Any) -> None:
        if note("first"):
            writer.honest()
            note("committed")
            return
        while not os.path.exists(os.path.join(notes, f"{number}-committed")):
            time.sleep(0.01)
        if victim is not None and note("killed"):
            writer._producer.flush(10)
            os.kill(victim or os.getpid(), signal.SIGKILL)
            time.sleep(60)  # with a transaction open
        writer.honest()

    honest_send(spark, holding, topic, Killing(), sendings)


setattr(kafka, "send_by_tasks", send)  # noqa: B010 - the module's own name for it, and its constant
setattr(kafka, "TASK_ROWS", 10)  # noqa: B010
run_pipeline(load_pipeline(sys.argv[1]).definition, master="local[2,2]")
