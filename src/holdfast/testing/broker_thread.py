"""A broker on a thread of the test's own process, with a disk and a clock that the test commands."""

from __future__ import annotations

import os
from collections.abc import Mapping

from holdfast.broker.server.embed import Broker
from holdfast.testing.faults import Clock, Disk, Faults, machine_with
from holdfast.testing.topics import Topics


class BrokerThread(Broker, Topics):
    """`holdfast.Broker` with what a test wants of it: quicker to start than a process, and impossible to kill."""

    def __init__(
        self, data_dir: str | os.PathLike[str], *, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(data_dir, settings=settings)
        self._faults = Faults()
        self.machine = machine_with(self._faults)
        self.disk = Disk(self._change)
        self.clock = Clock(self._change)

    def _change(self, fields: Mapping[str, float | None]) -> None:
        self._faults.change(fields)
        if self.server is not None:
            self.server.clock_moved()
