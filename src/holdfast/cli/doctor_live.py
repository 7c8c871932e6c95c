"""The flags of `holdfast doctor` that are about a live cluster, and what they do.

Looking changes nothing. `--apply` makes the changes of settings that findings propose, after showing them as commands
and asking; what is accepted by a suppression is left alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from holdfast.cli.client_settings import read_properties
from holdfast.cli.exits import complain
from holdfast.cli.options import flag, option
from holdfast.doctor.findings import DoctorError

if TYPE_CHECKING:
    from holdfast.doctor.client_settings import ClientSettings
    from holdfast.doctor.findings import ConfigChange, Examination
    from holdfast.doctor.live_snapshot import Look

LOOKS_KEPT = 100
"""How far back a watch compares: bounds its memory."""

LiveServerOption: TypeAlias = Annotated[
    str | None, option("HOST:PORT,…", "Look at this cluster as well.", "--bootstrap-server")
]
GroupOption: TypeAlias = Annotated[
    list[str] | None, option("NAME", "Look at this group only; may be repeated. All by default.", "--group")
]
WatchOption: TypeAlias = Annotated[
    float | None,
    option(
        "SECONDS",
        "Look again after so many seconds, until Ctrl-C, and judge groups by their rates.",
        "--watch",
        min=0.1,
    ),
]
HistoryOption: TypeAlias = Annotated[
    str | None,
    option(
        "FILE",
        "Earlier looks, one JSON document a line: groups are judged by their rates since. This look is added.",
        "--history",
    ),
]
ApplyOption: TypeAlias = Annotated[
    bool, flag("Make the changes of settings that findings propose, after asking.", "--apply")
]
YesOption: TypeAlias = Annotated[bool, flag("Do it without asking.", "--yes")]


@dataclass
class LiveFlags:
    """What was asked of a live cluster."""

    bootstrap_server: str | None
    command_config: str | None
    connect_timeout_ms: int
    groups: Sequence[str]
    watch_s: float | None
    history: str | None
    apply: bool
    yes: bool
    looks: list[Look] = field(default_factory=list)
    """Of this watch."""

    def __post_init__(self) -> None:
        if self.yes and not self.apply:
            raise DoctorError("--yes answers what --apply asks: pass both")
        if self.apply and self.watch_s is not None:
            raise DoctorError("--apply changes settings once: leave out --watch")
        if self.bootstrap_server is not None:
            return
        needing = {
            "--command-config": self.command_config,
            "--group": self.groups,
            "--watch": self.watch_s,
            "--history": self.history,
            "--apply": self.apply,
        }
        if given := [flag for flag, value in needing.items() if value]:
            raise DoctorError(f"{given[0]} is about a live cluster: pass --bootstrap-server as well")

    def settings(self) -> dict[str, str]:
        given = {} if self.command_config is None else read_properties(self.command_config)
        timeout = {"socket.connection.setup.timeout.ms": str(self.connect_timeout_ms)}
        return {**timeout, **given, "bootstrap.servers": self.bootstrap_server or ""}

    def command_flags(self) -> str:
        """What a command needs to reach the same cluster."""
        config = "" if self.command_config is None else f" --command-config {self.command_config}"
        return f"--bootstrap-server {self.bootstrap_server}{config}"

    def examine(self, clients: Sequence[ClientSettings]) -> Examination:
        from holdfast.admin.errors import Unreachable
        from holdfast.doctor.findings import Examination
        from holdfast.doctor.live import examine_cluster

        del self.looks[:-LOOKS_KEPT]
        try:
            return examine_cluster(
                self.settings(),
                groups=self.groups,
                history=self.history,
                looks=self.looks,
                clients=clients,
                command_flags=self.command_flags(),
            )
        except Unreachable as error:
            if not self.looks:
                raise
            # A watch outlasts the restart of a cluster that it has seen.
            examination = Examination()
            examination.missed("the cluster", str(error), "connection")
            return examination

    def again(self) -> bool:
        """Whether there is another look, after its time."""
        if self.watch_s is None:
            return False
        sys.stdout.flush()
        time.sleep(self.watch_s)
        return True


def apply_after_asking(flags: LiveFlags, examination: Examination) -> bool:
    """Make the changes that findings propose; False when the cluster refused one."""
    from holdfast.doctor.live import apply_fixes, changes_of

    changes = changes_of(examination.in_order())
    if not changes:
        complain("nothing to apply: no finding proposes a change of settings")
        return True
    print("These settings would be changed:", file=sys.stderr)
    for change in changes:
        print(f"  {_words(change)}", file=sys.stderr)
    if not flags.yes and not _agreed(f"Change {len(changes)} on {flags.bootstrap_server}?"):
        complain("nothing was changed")
        return True
    fine = True
    for change, refused in apply_fixes(flags.settings(), changes):
        if refused is None:
            print(f"changed {_words(change)}", file=sys.stderr)
        else:
            complain(f"not changed: {_words(change)}: {refused}")
            fine = False
    return fine


def _agreed(question: str) -> bool:
    """Nobody to ask is a no."""
    try:
        return typer.confirm(question, default=False, err=True)
    except typer.Abort:
        return False


def _words(change: ConfigChange) -> str:
    what = (
        f"{change.resource_type} {change.resource_name}"
        if change.resource_name
        else "the default of all brokers"
    )
    return f"{change.setting}={change.value} of {what}"
