"""Places where a test makes a running pipeline fail.

The engine calls its `faults` with the name of each point it passes:

    opened:<sink>      after the opening entry of a sink
    planned            the plan of a batch is on the disk
    staged             the range is read and staged
    routed             rows are counted by route; the first sink may have its rows aside by then
    state-written      the segments of the next version of the state are flushed, and no version names them
    state-published    the version is durable; no sink has the batch
    prepared:<sink>    one sink has written its rows aside
    balanced           all counts agree; nothing is committed yet
    aside-written      the places of rows that left the chain are flushed; nothing is committed yet
    committed:<sink>   one sink has the batch
    monitored          positions went to the monitoring group
    done               the plan is marked as done

What a hook raises goes up like any other failure; a hook may as well end the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Faults: TypeAlias = Callable[[str], None]


def no_faults(point: str) -> None:
    """Nothing fails."""
