"""A connection to the database that is made again when it is lost, and when nothing can be stored over it now.

The pause before the next attempt grows until something was stored, and everything may pass: the next connection may
reach another server. Only at the very first one it shows whether the address, the password and the tables are right:
what waiting cannot mend is raised then, and a database that is away or starting is waited for.
"""

from __future__ import annotations

import time
from typing import Final

from holdfast.client.database.store import Database, DatabaseUnreachable, Trouble
from holdfast.client.signals import say

BACK_OFF_SECONDS: Final = (0.1, 10.0)
"""The first and the longest pause between attempts to connect."""


class Reconnecting:
    def __init__(self, database: Database) -> None:
        self._database = database
        self.is_up = False
        self._is_checked = False
        """Whether we were connected once and found our tables."""
        self._connect_at = 0.0
        self._back_off = BACK_OFF_SECONDS[0]

    def connect(self) -> None:
        """Try it, if it is time."""
        if time.monotonic() < self._connect_at:
            return
        try:
            self._database.connect()
            if not self._is_checked:
                self._database.check_schema()
        except DatabaseUnreachable as error:
            if not self._is_checked and not error.may_pass:
                raise
            self._later(str(error))
        except self._database.errors as error:
            if self._database.judge(error) is Trouble.FAILED:
                raise
            self._later(f"{self._database.name}: {str(error).strip()}")
        else:
            self.is_up = self._is_checked = True

    def lost(self, problem: str) -> None:
        self.is_up = False
        self._later(f"{self._database.name}: {problem}")

    def stored(self) -> None:
        self._back_off = BACK_OFF_SECONDS[0]

    def _later(self, problem: str) -> None:
        say(f"{problem}; trying again in {self._back_off:.1f} s")
        self._connect_at = time.monotonic() + self._back_off
        self._back_off = min(self._back_off * 2, BACK_OFF_SECONDS[1])
