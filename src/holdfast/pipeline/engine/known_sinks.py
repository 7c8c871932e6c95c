"""How far each sink had come, known outside it: a sink that lacks what it had is lost, and not new.

Each sink's ledger is in the sink and is lost with it. So three others know how far it had come:

- the pipeline's home, in `sinks.json`, written after openings and after each batch;
- the metadata of the offsets that the pipeline commits to its group (`engine.monitoring`), after each batch. They
  expire, and others may write to the group: where they say nothing, nothing follows;
- the ledgers of the pipeline's other sinks. Each entry names how far the others had come (`Entry.others`), in the
  transaction of its own rows. There are others always, since every pipeline has a dead letter sink. Unlike a group's
  committed offsets, ledgers do not expire, nobody else writes to them, and they need no right that the pipeline lacks.

A sink counts as lost when it stands behind what any of them says, when its batch of that number is not the one that
was written, or when it misses itself what its ledger speaks of (`Sink.missing`). A sink that nobody ever named is new.
So is one at another place than theirs: a definition may move a sink.

What is meant is said by a new generation: `reset`, `refill` and `run --accept-loss` count it up, and what was known of
earlier ones no longer binds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from holdfast.atomic import read_named, write_atomically
from holdfast.pipeline.core.failures import EnvironmentFails, SinkLost
from holdfast.pipeline.definition.places import places_of, short
from holdfast.pipeline.engine.history import recorded_batches
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.ledger import Entry, Reached
from holdfast.pipeline.positions import Positions, to_text
from holdfast.pipeline.sealing import Head
from holdfast.pipeline.sinks.base import Sink
from holdfast.real import RealFileSystem

NOTE: Final = "sinks.json"
NOTE_VERSION: Final = 1
METADATA: Final = "the metadata of its group's committed offsets"
FORGOTTEN: Final = -1
"""In place of a number: the ledger was forgotten on purpose."""


class Noted(NamedTuple):
    """What the home says of one sink."""

    reached: Reached
    mark: str = ""
    """Of the entry with that number; None where it is not known, and any will do."""
    began: Positions | None = None
    """Where its ledger began; None where it is not known."""
    chain: str = ""
    """The head of its ledger, for audits."""


class KnownSinks:
    """What home and ledgers say of one pipeline's sinks. `canonical` is its definition, secrets as references."""

    def __init__(
        self, home: Home, canonical: Mapping[str, Any], heads: Mapping[str, Head] | None = None
    ) -> None:
        """`heads` are those that the group's committed offsets name."""
        self._home = home
        self._heads = heads or {}
        self.places = places_of(canonical)
        self._path = os.path.join(home.path, NOTE)
        self._noted = self._read()

    @property
    def home_path(self) -> str:
        """The pipeline's own, also for a run of one sink that has a home beside it."""
        return self._home.path

    # -------------------------------------------------------------------- asking

    def lost(self, sinks: Mapping[str, Sink], ledgers: Mapping[str, Entry | None]) -> dict[str, str]:
        """The sinks that no longer have what they had, with what is wrong with each."""
        found = {name: self.behind(name, ledgers) or sinks[name].missing() for name in ledgers}
        return {name: why for name, why in found.items() if why is not None}

    def behind(self, name: str, ledgers: Mapping[str, Entry | None]) -> str | None:
        """What is wrong with the ledger of this sink, as far as others know it; nothing when nobody knows more."""
        entry = ledgers[name]
        reached, witness = self._reached(name, ledgers)
        if reached is None or (entry is None and reached.number == FORGOTTEN):
            return None
        had = f"it had {reached.number + 1} entries in its ledger, as {witness} says"
        if entry is None:
            return f"nothing of this pipeline is there, and {had}: it is lost, or not where it was"
        if (entry.generation, entry.number) < (reached.generation, reached.number):
            return f"its ledger has {entry.number + 1} entries, and {had}: it is an older copy"
        noted, head = self._noted.get(name), self._heads.get(name)
        is_other = f"entry {entry.number} of its ledger is not the one that"
        if noted is not None and noted.reached == self._of(entry) and noted.mark not in ("", _mark(entry)):
            return f"{is_other} {self._path} knows: it is another's"
        if head is not None and head.reached == self._of(entry) and head.chain != entry.chain:
            return f"{is_other} {METADATA} knows: it is another's"
        return None

    def is_behind(self, ledgers: Mapping[str, Entry | None]) -> bool:
        """Whether a ledger has an entry that the home or the group's committed offsets do not know of."""
        for name, entry in ledgers.items():
            outside = (self._noted.get(name), self._heads.get(name)) if entry and entry.chain else ()
            if entry is not None and any(each is None or each.reached != self._of(entry) for each in outside):
                return True
        return False

    def entries(self, name: str, ledgers: Mapping[str, Entry | None]) -> int:
        """How many the ledger of this sink had, by the furthest that anybody outside says."""
        reached, _ = self._reached(name, ledgers)
        return 0 if reached is None else reached.number + 1

    def generation(self, name: str, ledgers: Mapping[str, Entry | None]) -> int:
        """That the next entry of this sink belongs to."""
        entry = ledgers[name]
        reached, _ = self._reached(name, ledgers)
        return max(0 if entry is None else entry.generation, 0 if reached is None else reached.generation)

    def others(self, name: str, ledgers: Mapping[str, Entry | None]) -> dict[str, Reached]:
        """What an entry of this sink says of the others."""
        return {
            other: self._of(entry) for other, entry in ledgers.items() if other != name and entry is not None
        }

    def _reached(self, name: str, ledgers: Mapping[str, Entry | None]) -> tuple[Reached | None, str]:
        """The furthest that anybody outside says of the sink, and who says it."""
        place = self.places.get(name, "")
        noted = self._noted.get(name)
        said = [] if noted is None else [(noted.reached, self._path)]
        said += [
            (entry.others[name], f"the ledger of sink {other!r}")
            for other, entry in ledgers.items()
            if other != name and entry is not None and name in entry.others
        ]
        if name in self._heads:
            said.append((self._heads[name].reached, METADATA))
        here = [(reached, witness) for reached, witness in said if reached.place == place]
        return max(here, key=lambda each: each[0], default=(None, ""))

    def _of(self, entry: Entry) -> Reached:
        return Reached(entry.generation, entry.number, self.places.get(entry.sink, ""))

    # -------------------------------------------------------------------- noting

    def note(self, ledgers: Mapping[str, Entry | None]) -> None:
        """Write down how far the sinks have come."""
        self._write(
            {
                name: Noted(
                    self._of(entry),
                    _mark(entry),
                    self.began(name) if entry.number else entry.positions,
                    entry.chain,
                )
                for name, entry in ledgers.items()
                if entry is not None
            }
        )

    def began(self, name: str) -> Positions | None:
        """Where the ledger of this sink began, as far as the home knows it."""
        noted = self._noted.get(name)
        return None if noted is None or noted.reached.place != self.places.get(name, "") else noted.began

    def begin_anew(self, name: str, ledgers: Mapping[str, Entry | None]) -> None:
        """Write down that this sink may lack what it had: the next generation begins."""
        entry = ledgers.get(name)
        number = FORGOTTEN if entry is None else entry.number
        generation = self.generation(name, {**ledgers, name: entry}) + 1
        self._write({name: Noted(Reached(generation, number, self.places.get(name, "")))})

    def _write(self, more: Mapping[str, Noted]) -> None:
        noted = {**self._noted, **more}
        if noted == self._noted:
            return
        document = {
            "version": NOTE_VERSION,
            "sinks": {name: _as_json(each) for name, each in noted.items()},
        }
        write_atomically(RealFileSystem(), self._path, to_text(document).encode())
        self._noted = noted

    def _read(self) -> dict[str, Noted]:
        try:
            document = json.loads(read_named(self._path))
            return {name: _from_json(each) for name, each in document["sinks"].items()}
        except FileNotFoundError:
            return self._from_log()  # a home from before there was this file, or one that was lost
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EnvironmentFails(
                f"{self._path} says how far each sink had come, and cannot be read ({error}). Bring it back, or remove "
                "it: the sinks' own ledgers then say as much as they know"
            ) from error

    def _from_log(self) -> dict[str, Noted]:
        """Sinks that took part in a batch of the log, where the definition that ran last had them."""
        kept = self._home.kept_definition()
        places = {} if kept is None else places_of(kept)
        took = {name for batch in recorded_batches(self._home.path) for name in batch.sinks}
        return {name: Noted(Reached(0, 0, places[name])) for name in sorted(took & places.keys())}


def _as_json(noted: Noted) -> dict[str, Any]:
    began = None if noted.began is None else noted.began.as_json()
    return {**noted.reached._asdict(), "mark": noted.mark, "began": began, "chain": noted.chain}


def _from_json(document: Mapping[str, Any]) -> Noted:
    reached = Reached(document["generation"], document["number"], document["place"])
    began = document.get("began")
    where = None if began is None else Positions.from_json(began)
    return Noted(reached, document["mark"], where, document.get("chain", ""))


def refuse_lost(lost: Mapping[str, str], *, has_others: bool) -> None:
    """`SinkLost` if there are any, with the ways on."""
    if not lost:
        return
    told = "; ".join(f"sink {name!r}: {why}" for name, why in lost.items())
    goes_on = "go on where the other sinks stand" if has_others else "begin where the definition says"
    flags = " ".join(f"--accept-loss={name}" for name in lost)
    raise SinkLost(
        f"{told}. Nothing was read or written. Restore what is lost and run again; or "
        f"`holdfast pipeline refill FILE {next(iter(lost))}` writes it again from the log; or "
        f"`holdfast pipeline run FILE {flags}` lets it {goes_on}, without what it had"
    )


def _mark(entry: Entry) -> str:
    return short(to_text(entry.as_json()))
