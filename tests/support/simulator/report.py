"""What a run of seeds did: operations by kind and outcome, and how often each fault hit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

EFFECTS = ("page lost", "page torn", "directory change lost")
"""What power loss did to the disk: counted beside the faults, and no faults of their own."""


class SeedFailed(Exception):
    """A seed broke a rule; carries what is needed to see why, and to run it again."""

    def __init__(self, seed: int, mutant: str | None, rule: str, message: str, trace: Iterable[str]) -> None:
        self.seed = seed
        self.mutant = mutant
        self.rule = rule
        self.trace = list(trace)
        super().__init__(f"seed {seed}{f' with mutant {mutant}' if mutant else ''}: {message}")

    def explain(self, lines_max: int = 60) -> str:
        """The end of the trace, the rule that broke, and how to run it again."""
        tail = self.trace[-lines_max:]
        left_out = len(self.trace) - len(tail)
        head = [f"... {left_out} earlier lines ..."] if left_out else []
        again = f"python -m tests.support.simulator --first {self.seed} --seeds 1"
        if self.mutant:
            again += f" --mutant {self.mutant}"
        return "\n".join([*head, *tail, str(self), f"run it again: {again}"])


class Report:
    """Counts over one or many seeds."""

    def __init__(self) -> None:
        self.seeds = 0
        self.operations: Counter[tuple[str, str]] = Counter()
        """By kind and outcome; a produce to several partitions has one outcome for each."""
        self.operations_sent = 0
        """Requests that clients sent on their own account, retries and readings at the end not counted."""
        self.faults: Counter[str] = Counter()
        self.records_acknowledged = 0
        self.records_read = 0
        self.restarts = 0

    def add(self, other: Report) -> None:
        self.seeds += other.seeds
        self.operations.update(other.operations)
        self.operations_sent += other.operations_sent
        self.faults.update(other.faults)
        self.records_acknowledged += other.records_acknowledged
        self.records_read += other.records_read
        self.restarts += other.restarts

    @property
    def faults_struck(self) -> int:
        return sum(count for name, count in self.faults.items() if name not in EFFECTS)

    def table(self) -> str:
        lines = [
            f"{self.seeds:,} seeds, {self.operations_sent:,} client operations, "
            f"{self.records_acknowledged:,} records acknowledged, {self.records_read:,} read, "
            f"{self.restarts:,} starts",
            "",
            f"{'fault':<34}{'hits':>10}{'per seed':>10}",
        ]
        for name, count in sorted(self.faults.items()):
            lines.append(f"{name:<34}{count:>10,}{count / max(1, self.seeds):>10.2f}")
        lines += ["", f"{'operation':<34}{'outcome':<22}{'count':>10}"]
        for (kind, outcome), count in sorted(self.operations.items()):
            lines.append(f"{kind:<34}{outcome:<22}{count:>10,}")
        return "\n".join(lines)
