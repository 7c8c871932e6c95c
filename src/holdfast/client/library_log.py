"""What librdkafka has to say, as lines of Python's log under `holdfast.client.librdkafka`.

It warns at every start of a producer that a setting the spool rests on is experimental; that is the spool's business
and not its user's, so this one line is left out.
"""

from __future__ import annotations

import logging
from typing import Any

from confluent_kafka import Producer

from holdfast.client.settings import Settings

LOG = logging.getLogger("holdfast.client.librdkafka")
LOG.addFilter(
    lambda line: not ("CONFWARN" in line.getMessage() and "enable.gapless.guarantee" in line.getMessage())
)


def logged_producer(settings: Settings) -> Any:
    """A producer of confluent-kafka's that logs there; lines come when it is polled."""
    return Producer(settings, logger=LOG)
