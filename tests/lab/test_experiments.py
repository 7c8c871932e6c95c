"""Every experiment: the loss shows with the unsafe setting, and not with the safe one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.doctor.risks import RISKS
from holdfast.errors import UsageError
from holdfast.lab.checking import DUPLICATED, LOST, Judgement, Violation
from holdfast.lab.engines import Engines
from holdfast.lab.experiment import (
    Claim,
    Experiment,
    Lab,
    Outcome,
    check_claim,
    conclude,
    run_experiment,
    run_half,
)
from holdfast.lab.experiments import EXPERIMENTS
from holdfast.lab.report import row_of

FAST = [each.id for each in EXPERIMENTS.values() if each.fast]
IN_PROCESS = [each.id for each in EXPERIMENTS.values() if each.in_process]
SEEDS = 20


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Engines(tmp_path_factory.mktemp("lab")) as made:
        yield made


@pytest.mark.check
@pytest.mark.parametrize("risk", FAST)
def test_the_claim_of_a_fast_experiment_holds(risk: str, engines: Engines) -> None:
    result = run_experiment(EXPERIMENTS[risk], engines, "holdfast")
    assert (result.outcome, result.reasons) == (Outcome.HELD, ())


@pytest.mark.check
@pytest.mark.parametrize("risk", IN_PROCESS)
def test_the_safe_half_holds_with_every_seed(risk: str, engines: Engines) -> None:
    result = run_experiment(EXPERIMENTS[risk], engines, "holdfast", safe_seeds=SEEDS)
    assert (result.outcome, result.reasons, result.safe_seeds) == (Outcome.HELD, (), SEEDS)


def test_one_seed_that_does_not_hold_breaks_the_claim(engines: Engines) -> None:
    def safe(lab: Lab) -> None:
        lab.sends("p", "t", ["a"])
        lab.note("ack", "p", id="a", topic="t")
        if lab.seed != 3:
            lab.note("stored", "log", id="a", topic="t", partition=0, offset=0)
        lab.note("log-end", "log", topic="t")

    def unsafe(lab: Lab) -> None:
        lab.note("ack", "p", id="a", topic="t")
        lab.note("log-end", "log", topic="t")

    made = Experiment(
        "HF999",
        "none",
        unsafe,
        safe,
        "x",
        "y",
        claim=CLAIM,
    )
    assert run_experiment(made, engines, "holdfast", safe_seeds=2).outcome is Outcome.HELD
    broken = run_experiment(made, engines, "holdfast", safe_seeds=5)
    assert broken.outcome is Outcome.NOT_HELD
    assert broken.reasons == ("seed 3: safe: lost: a: it was acknowledged, and is not in the log",)


def test_a_seed_repeats_a_half(engines: Engines) -> None:
    first, again, other = (
        run_half(EXPERIMENTS["HF205"], "unsafe", engines, "holdfast", seed=seed).judgement
        for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other


def test_a_result_says_by_what_the_network_failed(engines: Engines) -> None:
    made = Experiment(
        "HF999",
        "none",
        lambda lab: None,
        lambda lab: None,
        "x",
        "y",
        claim=CLAIM,
    )
    assert run_experiment(made, engines, "holdfast").network is None

    def loses_answers(lab: Lab) -> None:
        lab.engines.behind_a_link("holdfast")

    cut = Experiment(
        "HF999",
        "none",
        loses_answers,
        lambda lab: None,
        "x",
        "y",
        claim=CLAIM,
    )
    result = run_experiment(cut, engines, "holdfast")
    assert result.network == "proxy"
    assert row_of(result)[1] == "holdfast, network by proxy"
    assert run_experiment(made, engines, "holdfast").network is None


def test_every_risk_has_its_experiment_and_its_words() -> None:
    assert set(EXPERIMENTS) == set(RISKS) - {"HF000"}
    for each in EXPERIMENTS.values():
        assert each.title
        assert each.unsafe_setting
        assert each.safe_setting
        assert each.engines


def test_what_is_replicated_is_on_three_brokers() -> None:
    replicated = {each.id for each in EXPERIMENTS.values() if each.brokers == 3}
    assert replicated == {"HF201", "HF202", "HF203", "HF204", "HF209"}
    assert all(EXPERIMENTS[each].engines == ("kafka",) for each in replicated)


# ---------------------------------------------------------------- what two judgements say of a claim

NOTHING = Judgement({"sent": 1, "failed": 0}, ())
LOSES = Judgement({"sent": 1, "failed": 0}, (Violation(LOST, "a", "it is gone"),))
REPEATS = Judgement({"sent": 1, "failed": 0}, (Violation(DUPLICATED, "a", "twice"),))
VOID = Judgement({"sent": 1, "failed": 0}, (), void=("too few successes: 0 of 1",))
CLAIM = Claim({LOST: 1})


def test_a_claim_holds_when_only_the_unsafe_half_shows_it() -> None:
    assert conclude(CLAIM, LOSES, NOTHING) == (Outcome.HELD, ())


def test_a_claim_does_not_hold_when_nothing_was_lost() -> None:
    outcome, reasons = conclude(CLAIM, NOTHING, NOTHING)
    assert outcome is Outcome.NOT_HELD
    assert reasons == ("unsafe: 0 lost, and 1 or more were expected",)


def test_a_claim_does_not_hold_when_the_safe_half_loses_too() -> None:
    outcome, reasons = conclude(CLAIM, LOSES, LOSES)
    assert outcome is Outcome.NOT_HELD
    assert reasons == ("safe: lost: a: it is gone",)


def test_another_violation_in_the_safe_half_breaks_the_claim_unless_it_is_tolerated() -> None:
    assert conclude(CLAIM, LOSES, REPEATS)[0] is Outcome.NOT_HELD
    tolerant = Claim({LOST: 1}, tolerates=frozenset({DUPLICATED}))
    assert conclude(tolerant, LOSES, REPEATS)[0] is Outcome.HELD


def test_a_void_half_proves_nothing_whatever_the_other_shows() -> None:
    assert conclude(CLAIM, VOID, NOTHING)[0] is Outcome.VOID
    assert conclude(CLAIM, LOSES, VOID) == (Outcome.VOID, ("safe: too few successes: 0 of 1",))


def test_a_half_that_breaks_is_void_and_says_where(engines: Engines) -> None:
    def breaks(lab: Lab) -> None:
        lab.note("send", "p", id="a", topic="t")
        raise RuntimeError("no luck")

    broken = Experiment(
        "HF999",
        "none",
        breaks,
        breaks,
        "x",
        "y",
        claim=CLAIM,
    )
    found = run_half(broken, "safe", engines, "holdfast")
    assert found.judgement.verdict == "void"
    assert "RuntimeError: no luck (test_experiments.py:" in found.judgement.void[-1]
    assert [event.kind for event in found.history] == ["send", "note"]


@pytest.mark.parametrize("shows", [{}, {"lost": 0}, {"bad luck": 1}])
def test_a_claim_that_could_not_fail_is_refused(shows: dict[str, int]) -> None:
    def nothing(_: Lab) -> None:
        return

    with pytest.raises(UsageError, match="HF999"):
        check_claim(
            Experiment(
                "HF999",
                "none",
                nothing,
                nothing,
                "x",
                "y",
                claim=Claim(shows),
            )
        )


def test_results_are_kept_and_read_again(engines: Engines, tmp_path: Path) -> None:
    from holdfast.lab.report import load_results, save_result

    made = run_experiment(EXPERIMENTS["HF205"], engines, "holdfast", seed=3)
    save_result(made, tmp_path)
    (again,) = load_results(tmp_path)
    assert again.as_json() == made.as_json()
    assert again.unsafe.history == made.unsafe.history
