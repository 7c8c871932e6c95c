"""`holdfast lab`: make a loss happen, prevent it, and have the checker count."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import Exit

from holdfast.cli.exits import complain
from holdfast.cli.options import CommandGroup, OutputOption, choice, examples, flag, option
from holdfast.cli.output import Output, print_json, print_result
from holdfast.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from holdfast.lab.engines import EngineName, Engines
    from holdfast.lab.experiment import Experiment, Result

app = CommandGroup(
    no_args_is_help=True,
    help="Every way to lose a message: made to happen, and prevented, with the checker counting.",
)


class EngineChoice(StrEnum):
    HOLDFAST = "holdfast"
    HOLDFAST_FUSE = "holdfast-fuse"
    KAFKA = "kafka"


class NetworkOption(StrEnum):
    AUTO = "auto"
    NAMESPACES = "namespaces"
    PROXY = "proxy"


class LabError(UsageError):
    """An experiment that is not there, or does not run on that engine."""


EngineOption = Annotated[
    EngineChoice | None,
    choice(
        "The embedded broker (holdfast), the same on a file system that forgets what was not flushed "
        "(holdfast-fuse), or Apache Kafka (kafka); by default the first that the experiment runs on."
    ),
]


@app.command("list")
def list_experiments(output: OutputOption = Output.TABLE) -> None:
    """The experiments: what each shows, and on which engines."""
    from holdfast.lab.experiments import EXPERIMENTS

    print_result(
        output,
        [_described(each) for each in EXPERIMENTS.values()],
        ("id", "shows", "unsafe", "safe", "engines", "needs"),
        [
            (
                each.id,
                each.title,
                each.unsafe_setting,
                each.safe_setting,
                ", ".join(each.engines),
                ", ".join(sorted(each.needs)),
            )
            for each in EXPERIMENTS.values()
        ],
    )


def _described(each: Experiment) -> dict[str, object]:
    return {
        "id": each.id,
        "title": each.title,
        "unsafe": each.unsafe_setting,
        "safe": each.safe_setting,
        "shows": dict(each.claim.shows),
        "tolerates": sorted(each.claim.tolerates),
        "engines": list(each.engines),
        "needs": sorted(each.needs),
        "fast": each.fast,
    }


@app.command(
    epilog=examples(
        "holdfast lab run HF301",
        "holdfast lab run HF102 --engine kafka --seed 7 --page hf102.html",
        "holdfast lab run --all --results results",
    )
)
def run(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[HFnnn]...", help="Which.")] = None,
    everything: Annotated[bool, flag("All of them, each on every engine it has.", "--all")] = False,
    fast: Annotated[bool, flag("With --all: only those that take seconds, on the embedded broker.")] = False,
    engine: EngineOption = None,
    brokers: Annotated[int | None, option("N", "Only experiments that use so many brokers: 1 or 3.")] = None,
    network: Annotated[
        NetworkOption,
        choice(
            "How three brokers are cut off from each other: each in a network namespace of its own (Linux, "
            "root), or behind proxies; by default namespaces where they are allowed."
        ),
    ] = NetworkOption.AUTO,
    seed: Annotated[int, option("S", "Decides what chance decides.")] = 1,
    seeds: Annotated[int, option("N", "Run with N seeds, from --seed on.", min=1)] = 1,
    safe_seeds: Annotated[int, option("N", "Run the safe half with N seeds; all must hold.", min=1)] = 1,
    results: Annotated[str | None, option("DIR", "Keep results and histories here.")] = None,
    page: Annotated[str | None, option("FILE", "Write a page with timelines here.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run experiments: the unsafe half, the safe half, and what the checker says of both.

    Each experiment starts its own brokers on the loopback interface, in a temporary directory. Exit codes: 0
    every claim held, 1 one did not, 2 usage, 3 the machine lacks something, 4 void: nothing was proved.
    """
    from holdfast.lab.engines import Engines
    from holdfast.lab.experiments import EXPERIMENTS
    from holdfast.lab.report import as_document, save_result
    from holdfast.lab.report import page as page_of

    chosen = _chosen(ids or [], everything, fast, engine, brokers)
    found: list[Result] = []
    missing: list[str] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-lab-") as directory:
        engines = Engines(Path(directory), network=network.value)
        for result in _results(chosen, engines, range(seed, seed + seeds), safe_seeds, missing):
            found.append(result)
            if results is not None:
                save_result(result, Path(results))
            if output is Output.TABLE:
                _tell(result)
    if page is not None:
        Path(page).write_text(page_of(found, EXPERIMENTS), encoding="utf-8")
    if output is Output.JSON:
        print_json(as_document(found))
    raise Exit(_code(found, missing, everything))


def _chosen(
    ids: list[str], everything: bool, fast: bool, engine: EngineChoice | None, brokers: int | None
) -> list[tuple[Experiment, EngineName]]:
    from holdfast.lab.experiments import EXPERIMENTS

    if bool(ids) == everything:
        raise LabError("name experiments, or say --all (`holdfast lab list` shows them)")
    wanted = [each.upper() for each in ids] or list(EXPERIMENTS)
    if unknown := [each for each in wanted if each not in EXPERIMENTS]:
        raise LabError(f"no experiment {', '.join(unknown)} (`holdfast lab list` shows them)")
    chosen: list[tuple[Experiment, EngineName]] = []
    for each in (EXPERIMENTS[one] for one in wanted):
        if (fast and not each.fast) or brokers not in (None, each.brokers):
            continue
        engines = (
            each.engines if engine is None else tuple(one for one in each.engines if one == engine.value)
        )
        if not engines and ids:
            raise LabError(f"{each.id} does not run on {engine}: only on {', '.join(each.engines)}")
        if fast:
            engines = tuple(one for one in engines if one == "holdfast")
        chosen += [(each, one) for one in (engines if everything else engines[:1])]
    if not chosen:
        raise LabError("no experiment is like that")
    # One engine after the other, so that no two clusters compete for the machine.
    return sorted(chosen, key=lambda pair: (pair[1], "spark" in pair[0].needs, pair[0].brokers, pair[0].id))


def _results(
    chosen: list[tuple[Experiment, EngineName]],
    brings: Engines,
    seeds: range,
    safe_seeds: int,
    missing: list[str],
) -> Iterator[Result]:
    from holdfast.lab.engines import EngineUnavailable, NotOnThisMachine
    from holdfast.lab.experiment import run_experiment

    with brings as engines:
        for experiment, engine in chosen:
            for seed in seeds:
                try:
                    result = run_experiment(
                        experiment, engines, engine, seed=seed, safe_seeds=safe_seeds, progress=_progress
                    )
                    for remark in engines.remarks():
                        complain(remark)
                    yield result
                except EngineUnavailable as error:
                    what = f"{experiment.id} on {engine}: {error}"
                    complain(what)
                    if len(chosen) == 1 or not isinstance(error, NotOnThisMachine):
                        missing.append(what)
                    break


def _progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{what} …", end="", file=sys.stderr, flush=True)


def _tell(result: Result) -> None:
    from holdfast.lab.report import summary_of

    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    seconds = result.unsafe.seconds + result.safe.seconds
    seeds = f"seed {result.seed}" + (f", safe with {result.safe_seeds}" if result.safe_seeds > 1 else "")
    network = f", network by {result.network}" if result.network else ""
    where = f"{result.engine}{network}, {seeds}, {seconds:.1f} s"
    print(f"{result.id} {result.outcome.value:8} {result.title} ({where})")
    print(f"    unsafe: {summary_of(result.unsafe.judgement)}")
    print(f"    safe:   {summary_of(result.safe.judgement)}")
    for reason in result.reasons:
        print(f"    {reason}")
    sys.stdout.flush()


def _code(found: list[Result], missing: list[str], everything: bool) -> ExitCode:
    from holdfast.lab.experiment import Outcome

    outcomes = {result.outcome for result in found}
    if Outcome.NOT_HELD in outcomes:
        return ExitCode.FINDINGS
    if Outcome.VOID in outcomes:
        return ExitCode.INCONCLUSIVE
    if missing and (everything or not found):
        return ExitCode.CANNOT_CONNECT
    return ExitCode.FINE


@app.command()
def report(
    results: Annotated[str, option("DIR", "What `lab run --results` kept.")],
    output: Annotated[str, option("DIR", "Where README.md and the pictures go.")],
    page: Annotated[str | None, option("FILE", "Write everything on one page here too.")] = None,
) -> None:
    """Write a table and a picture for each experiment from kept results."""
    from holdfast.lab.experiments import EXPERIMENTS
    from holdfast.lab.report import headline, load_results, write_report
    from holdfast.lab.report import page as page_of

    found = load_results(Path(results))
    write_report(Path(output), found, EXPERIMENTS)
    if page is not None:
        Path(page).write_text(page_of(found, EXPERIMENTS), encoding="utf-8")
    print(f"{headline(found)}; written to {output}")
