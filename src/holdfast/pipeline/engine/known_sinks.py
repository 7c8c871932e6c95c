"""How far each sink had come, known outside it: a sink that lacks what it had is lost, and not new.

Each sink's ledger is in the sink and is lost with it. So two others know how far it had come:

- the pipeline's home, in `sinks.json`, written after openings and after each batch;
- the ledgers of the pipeline's other sinks. Each entry names how far the others had come (`Entry.others`), in the
  transaction of its own rows. There are others always, since every pipeline has a dead letter sink. Unlike a group's
  committed offsets, ledgers do not expire, nobody else writes to them, and they need no right that the pipeline lacks.

A sink counts as lost when it stands behind what either of them says, when its batch of that number is not the one that
was written, or when it misses itself what its ledger speaks of (`Sink.missing`). A sink that nobody ever named is new.
So is one at another place than theirs: a definition may move a sink.

What is meant is said by a new generation: `reset`, `refill` and `run --accept-loss` count it up, and what was known of
earlier ones no longer binds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from holdfast.atomic import read_named, write_atomically
from holdfast.pipeline.changes.sink_changes import place_of
from holdfast.pipeline.core.failures import EnvironmentFails, SinkLost
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME
from holdfast.pipeline.engine.history import recorded_batches
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.ledger import Entry, Reached
from holdfast.pipeline.positions import Positions, to_text
from holdfast.pipeline.sinks.base import Sink
from holdfast.real import RealFileSystem

NOTE: Final = "sinks.json"
NOTE_VERSION: Final = 1
FORGOTTEN: Final = -1
"""In place of a number: the ledger was forgotten on purpose."""


class Noted(NamedTuple):
    """What the home says of one sink."""

    reached: Reached
    mark: str = ""
    """Of the entry with that number; nothing: it is not known, and any will do."""
    began: Positions | None = None
    """Where its ledger began; nothing: it is not known."""


class KnownSinks:
    """What home and ledgers say of one pipeline's sinks. `canonical` is its definition, secrets as references."""

    def __init__(self, home: Home, canonical: Mapping[str, Any]) -> None:
        self._home = home
        self._places = _places(canonical)
        self._path = os.path.join(home.path, NOTE)
        self._noted = self._read()

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
        noted = self._noted.get(name)
        if noted is None or noted.reached != self._of(entry) or noted.mark in ("", _mark(entry)):
            return None
        return f"entry {entry.number} of its ledger is not the one that {self._path} knows: it is another's"

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
        place = self._places.get(name, "")
        noted = self._noted.get(name)
        said = [] if noted is None else [(noted.reached, self._path)]
        said += [
            (entry.others[name], f"the ledger of sink {other!r}")
            for other, entry in ledgers.items()
            if other != name and entry is not None and name in entry.others
        ]
        here = [(reached, witness) for reached, witness in said if reached.place == place]
        return max(here, key=lambda each: each[0], default=(None, ""))

    def _of(self, entry: Entry) -> Reached:
        return Reached(entry.generation, entry.number, self._places.get(entry.sink, ""))

    # -------------------------------------------------------------------- noting

    def note(self, ledgers: Mapping[str, Entry | None]) -> None:
        """Write down how far the sinks have come."""
        self._write(
            {
                name: Noted(
                    self._of(entry), _mark(entry), self.began(name) if entry.number else entry.positions
                )
                for name, entry in ledgers.items()
                if entry is not None
            }
        )

    def began(self, name: str) -> Positions | None:
        """Where the ledger of this sink began, as far as the home knows it."""
        noted = self._noted.get(name)
        return None if noted is None or noted.reached.place != self._places.get(name, "") else noted.began

    def begin_anew(self, name: str, ledgers: Mapping[str, Entry | None]) -> None:
        """Write down that this sink may lack what it had: the next generation begins."""
        entry = ledgers.get(name)
        number = FORGOTTEN if entry is None else entry.number
        generation = self.generation(name, {**ledgers, name: entry}) + 1
        self._write({name: Noted(Reached(generation, number, self._places.get(name, "")))})

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
        places = {} if kept is None else _places(kept)
        took = {name for batch in recorded_batches(self._home.path) for name in batch.sinks}
        return {name: Noted(Reached(0, 0, places[name])) for name in sorted(took & places.keys())}


def _as_json(noted: Noted) -> dict[str, Any]:
    began = None if noted.began is None else noted.began.as_json()
    return {**noted.reached._asdict(), "mark": noted.mark, "began": began}


def _from_json(document: Mapping[str, Any]) -> Noted:
    reached = Reached(document["generation"], document["number"], document["place"])
    began = document.get("began")
    return Noted(reached, document["mark"], None if began is None else Positions.from_json(began))


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


def _places(canonical: Mapping[str, Any]) -> dict[str, str]:
    """By sink, which place the definition names for it, in short."""
    dead_letter = {"kind": "kafka", **(canonical.get("dead_letter") or {})}
    found = {DEAD_LETTER_NAME: place_of(dead_letter)}
    found |= {sink["name"]: place_of(sink) for sink in canonical.get("sinks") or []}
    return {name: _short("\n".join(place)) for name, place in found.items()}


def _mark(entry: Entry) -> str:
    return _short(to_text(entry.as_json()))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
