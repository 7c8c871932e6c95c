"""An experiment: a loss made to happen by an unsafe setting, and not by the safe one, as the checker sees it.

Both halves go through the same situation. Each writes a history; what was lost is counted by `checking.judge` and never
by the experiment itself. The claim says what must be found in the unsafe half (at least so many of a kind); in the safe
half nothing may be found but what the claim tolerates, which is what its page says it costs.

    HELD      the unsafe half shows it, the safe one does not
    NOT HELD  the loss did not show, or it showed with the safe setting too
    VOID      a fault did not fire, too few successes, or the run broke: nothing was proved
"""

from __future__ import annotations

import copy
import random
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from holdfast.errors import UsageError
from holdfast.lab.checking import LOST, RULES, Judgement, judge
from holdfast.lab.engines import EngineName, Engines, EngineUnavailable
from holdfast.lab.history import History, Recorder
from holdfast.lab.watching import Watching
from holdfast.testing.risks import Scene

if TYPE_CHECKING:
    from holdfast.testing.apache_cluster import ApacheCluster

HalfName = Literal["unsafe", "safe"]
HALVES: Final[tuple[HalfName, HalfName]] = ("unsafe", "safe")


class Outcome(StrEnum):
    HELD = "HELD"
    NOT_HELD = "NOT HELD"
    VOID = "VOID"


class Lab(Watching):
    """What one half of an experiment works with: brokers, a seed, a directory, and the history it writes."""

    def __init__(
        self,
        engines: Engines,
        engine: EngineName,
        directory: Path,
        *,
        experiment: str,
        half: HalfName,
        seed: int,
        recorder: Recorder,
    ) -> None:
        super().__init__(recorder)
        self.engines = engines
        self.engine = engine
        self.half = half
        self.seed = seed
        self.directory = directory
        self.random = random.Random(f"{experiment} {seed}")
        """The same for both halves, so that they go through the same."""
        self._prefix = f"{experiment.lower()}-{half}-{seed}-{time.monotonic_ns() % 10**9:x}"

    def unwatched(self) -> Lab:
        """The same, for what is done beside the experiment: its events go nowhere."""
        beside = copy.copy(self)
        beside.recorder = Recorder()
        beside._prefix = f"{self._prefix}-beside"
        return beside

    @property
    def scene(self) -> Scene:
        """The broker that experiments share; what it is told to break is mended after this half."""
        return self.engines.scene(self.engine)

    def split_cluster(self) -> ApacheCluster:
        """Three brokers whose network can be split, and their controller."""
        cluster = self.engines.cluster()
        assert cluster.network is not None
        self.engines.networks_used.add(cluster.network.kind)
        return cluster

    def name(self, what: str) -> str:
        """A name for a topic or a group that no other half has."""
        return f"{self._prefix}-{what}"

    def topic(
        self,
        what: str = "orders",
        partitions: int = 1,
        config: Mapping[str, str] | None = None,
        *,
        scene: Scene | None = None,
    ) -> str:
        return (scene or self.scene).create_topic(self.name(what), partitions, config)

    def plan(self, fault: str | None = None, successes: int | None = None) -> None:
        """What must come about, or this half is void."""
        self.note("plan", "lab", fault=fault, successes=successes)

    def fault(self, what: str) -> None:
        """It has fired."""
        self.note("fault", "lab", what=what)

    def say(self, what: str) -> None:
        self.note("note", "lab", what=what)


@dataclass(frozen=True)
class Claim:
    shows: Mapping[str, int]
    """What must be found in the unsafe half: at least so many of each kind."""
    tolerates: frozenset[str] = frozenset()
    """Kinds that may be found in the safe half."""


LOSES: Final = Claim({LOST: 1})
Half = Callable[[Lab], None]


@dataclass(frozen=True)
class Experiment:
    id: str
    title: str
    unsafe: Half
    safe: Half
    unsafe_setting: str
    """What the first half does, in a few words."""
    safe_setting: str
    claim: Claim = LOSES
    engines: tuple[EngineName, ...] = ("holdfast", "kafka")
    needs: frozenset[str] = frozenset()
    """What the machine must have beside Python: "java", "spark", "three brokers"."""
    brokers: int = 1
    fast: bool = True
    """Takes seconds on the embedded broker, and is in the test suite."""
    in_process: bool = False
    """Runs without a process of its own, on a simulated disk and clock: a seed costs milliseconds."""

    def half(self, name: HalfName) -> Half:
        return self.unsafe if name == "unsafe" else self.safe


@dataclass(frozen=True)
class HalfResult:
    judgement: Judgement
    seconds: float
    history: History = field(default_factory=lambda: History(()), compare=False)

    def as_json(self) -> dict[str, Any]:
        return {"seconds": round(self.seconds, 2), "judgement": self.judgement.as_json()}


@dataclass(frozen=True)
class Result:
    id: str
    title: str
    engine: EngineName
    seed: int
    outcome: Outcome
    reasons: tuple[str, ...]
    """Why it is not HELD."""
    unsafe: HalfResult
    safe: HalfResult
    safe_seeds: int = 1
    """With how many seeds the safe half was run; the first is shown."""
    network: str | None = None
    """What the network was that failed: `namespaces` or `proxy`; None when it was whole."""

    def half(self, name: HalfName) -> HalfResult:
        return self.unsafe if name == "unsafe" else self.safe

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "title": self.title,
            "engine": self.engine,
            "seed": self.seed,
            "outcome": self.outcome.value,
            "reasons": list(self.reasons),
            "safe_seeds": self.safe_seeds,
            "network": self.network,
            "unsafe": self.unsafe.as_json(),
            "safe": self.safe.as_json(),
        }


def run_half(
    experiment: Experiment,
    half: HalfName,
    engines: Engines,
    engine: EngineName,
    *,
    seed: int = 1,
    recorder: Recorder | None = None,
) -> HalfResult:
    """One half and its judgement; what breaks it makes it void."""
    recorder = recorder or Recorder()
    directory = engines.directory / f"{experiment.id}-{half}-{seed}-{time.monotonic_ns()}"
    directory.mkdir(parents=True)
    lab = Lab(engines, engine, directory, experiment=experiment.id, half=half, seed=seed, recorder=recorder)
    started = time.monotonic()
    broke: tuple[str, ...] = ()
    try:
        experiment.half(half)(lab)
    except EngineUnavailable:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it was, the half proves nothing, and says so
        where = traceback.extract_tb(error.__traceback__)[-1]
        recorder.add("note", "lab", what=f"broke: {error}")
        broke = (
            f"the run broke: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})",
        )
    finally:
        engines.restore()
    history = recorder.history()
    judged = judge(history)
    if broke:
        judged = Judgement(judged.counts, judged.violations, (*judged.void, *broke), judged.partial)
    return HalfResult(judged, time.monotonic() - started, history)


def conclude(claim: Claim, unsafe: Judgement, safe: Judgement) -> tuple[Outcome, tuple[str, ...]]:
    """What two judgements say about a claim."""
    void = [f"{name}: {why}" for name, each in zip(HALVES, (unsafe, safe), strict=True) for why in each.void]
    if void:
        return Outcome.VOID, tuple(void)
    reasons = [
        f"unsafe: {unsafe.count(kind)} {kind}, and {least} or more were expected"
        for kind, least in claim.shows.items()
        if unsafe.count(kind) < least
    ]
    reasons += [
        f"safe: {each.kind}: {each.id}: {each.why}"
        for each in safe.violations
        if each.kind not in claim.tolerates
    ]
    reasons += [
        f"safe: {safe.count(kind)} {kind}"
        for kind in claim.shows
        if kind not in RULES and kind not in claim.tolerates and safe.count(kind)
    ]
    return (Outcome.NOT_HELD, tuple(reasons)) if reasons else (Outcome.HELD, ())


def run_experiment(
    experiment: Experiment,
    engines: Engines,
    engine: EngineName,
    *,
    seed: int = 1,
    safe_seeds: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """Both halves with one seed; then the safe half with further ones, each of which must hold."""
    name = f"{experiment.id} on {engine}"
    engines.networks_used.clear()
    progress(f"{name}: unsafe")
    unsafe = run_half(experiment, "unsafe", engines, engine, seed=seed)
    progress(f"{name}: safe")
    safe = run_half(experiment, "safe", engines, engine, seed=seed)
    outcome, reasons = conclude(experiment.claim, unsafe.judgement, safe.judgement)
    for further in range(seed + 1, seed + safe_seeds):
        progress(f"{name}: safe, seed {further}")
        again = run_half(experiment, "safe", engines, engine, seed=further)
        one_outcome, one_reasons = conclude(experiment.claim, unsafe.judgement, again.judgement)
        reasons += tuple(f"seed {further}: {reason}" for reason in one_reasons)
        outcome = max(outcome, one_outcome, key=_WORST.index)
    return Result(
        experiment.id,
        experiment.title,
        engine,
        seed,
        outcome,
        reasons,
        unsafe,
        safe,
        max(safe_seeds, 1),
        ", ".join(sorted(engines.networks_used)) or None,
    )


_WORST: Final = (Outcome.HELD, Outcome.VOID, Outcome.NOT_HELD)


def check_claim(experiment: Experiment) -> None:
    """A claim that could never fail is none."""
    known = {*RULES, "failed", "dropped"}
    if not experiment.claim.shows or not set(experiment.claim.shows) <= known:
        raise UsageError(f"{experiment.id} claims nothing that the checker counts")
    if not all(least >= 1 for least in experiment.claim.shows.values()):
        raise UsageError(f"{experiment.id} claims what is always so")


def by_id(experiments: Iterable[Experiment]) -> dict[str, Experiment]:
    found: dict[str, Experiment] = {}
    for each in experiments:
        check_claim(each)
        if each.id in found:
            raise UsageError(f"{each.id} is there twice")
        found[each.id] = each
    return dict(sorted(found.items()))
