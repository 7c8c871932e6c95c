"""A whole broker, its clients, its disk and its clock in one thread, driven by one seed.

A seed decides everything: which client acts when, which flush returns first, where the power fails, which
pages survive. The broker is the real one, over `holdfast.testing.disk`; clients speak the wire protocol; the
checkers of `tests.support.checkers` watch every answer. `run_seed` runs one seed and raises `SeedFailed`
with a readable trace when a rule is broken.

    world       the scheduler: one step at a time, deliver, flush, tick, or let a client act
    broker      the broker as the simulator sees it, and its flusher in two phases
    link        a client's connection: frames out, answers in, in order
    producers, consumers, members, transactional, operators     the clients
    faults      what goes wrong, and how often it really did
    mutants     planted bugs that the checkers must catch
    many        many seeds over several processes, each failure explained
"""

from __future__ import annotations

from tests.support.simulator.world import Report, SeedFailed, run_seed

__all__ = ["Report", "SeedFailed", "run_seed"]
