"""What an audit may answer, decided from the program, the damage and the answer alone.

Undamaged, a world is never failed. It is proven or unaltered, but for what is trusted, which the table names and
`docs/what-proven-means.md` allows; accepted by name, nothing else stands in the way of exit code 0. Damaged, exit code
0 is a failure, unless the damaged cells were named as trusted and accepted. An audit that crashes has given no answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.audit.soundness.damages import Damage
from tests.audit.soundness.programs import LETTERS
from tests.audit.soundness.worlds import CRASHED, Outcome, World

OF_RECORD = frozenset({"topic", "partition", "offset", "timestamp", "key", "value", "headers"})
"""Columns of a dead letter in a table that an audit promises to recompute."""


def promised(world: World, outcome: Outcome) -> list[str]:
    """What an undamaged world's audit should have said and did not."""
    is_fine = outcome.exit_code == 0 or (outcome.exit_code == 4 and bool(world.were_reset))
    findings = outcome.report.get("findings", ())
    if outcome.exit_code == 1:  # whoever resets a sink is told so, and told to empty it
        is_fine = bool(findings) and all(
            each["sink"] in world.have_some_twice
            or (each["sink"] in world.have_some_of_nobody and each["fate"] == "extra")
            for each in findings
        )
    wrong = [] if is_fine else [f"a sound world: exit code {outcome.exit_code}: {outcome.why()}"]
    if not outcome.report:
        return wrong
    if world.program.letter_sink is not None:
        wrong += [
            f"a part of the record is not recomputed: {dict(row)}"
            for row in outcome.report["coverage"]
            if row["sink"] == LETTERS and row["column"] in OF_RECORD and row["unaltered"] + row["trusted"]
        ]
    kinds = {sink.name: sink for sink in world.program.sinks}
    origins = world.program.origins()
    for row in outcome.report["coverage"]:
        sink = kinds.get(row["sink"])
        if sink is None or sink.takes or sink.kind not in ("parquet", "delta", "append"):
            continue
        may_be_unaltered = world.has_new_column and not row["trusted"]
        may_be_trusted = sink.name in world.were_reset
        if not origins.get(row["column"]) or may_be_unaltered or may_be_trusted:
            continue
        if row["unaltered"] or row["trusted"]:
            wrong.append(f"a field of the record is not recomputed: {dict(row)}")
    return wrong


def noticed(
    world: World, sound: Outcome, damage: Damage, outcome: Outcome, accepted: Sequence[str]
) -> list[str]:
    """What the audit of a damaged world should have said and did not; `sound` is what it said before."""
    wrong = [f"{damage.what} in {damage.sink or 'the home'}: exit code {outcome.exit_code}: {outcome.why()}"]
    if outcome.exit_code == CRASHED:
        return wrong
    if outcome.exit_code in damage.answers:
        return []
    if sound.exit_code == outcome.exit_code == 4 and damage.sink in world.were_reset:
        return []  # what a sink had before it was reset nobody can vouch for, damaged or not
    if damage.cells and set(damage.cells) <= set(accepted):
        return []
    if damage.is_of_source and not set(damage.cells) & set(sound.recomputed()):
        return []
    return wrong
