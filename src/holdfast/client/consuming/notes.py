"""What a member stores beside a position, in the metadata of the committed offset: in one record with it, and fenced
like it.

Fields come first, each `name` or `name:value`, with a semicolon behind it; what follows them is what deduplication
remembers (see `dedupe`). A position that somebody else has set has no such fields, and is taken as it is.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

REMEMBERED: Final = "hfk"
TOPIC_ID: Final = "hft"
CHANGELOG: Final = "hfc"
_FIELD = re.compile(rf"({REMEMBERED}|{TOPIC_ID}|{CHANGELOG})(?::([^;]*))?;")


class Note(NamedTuple):
    is_remembered: bool = False
    """Whether the group's mark for the partition is written; see `memory`."""
    topic_id: str = ""
    """Which topic the position is of: another one of the same name begins anew. Empty: not known."""
    changelog: str = ""
    """Which state belongs to the position; see `changelog`. Empty: none."""
    seen: str = ""

    def encode(self) -> str:
        return (
            (f"{REMEMBERED};" if self.is_remembered else "")
            + (f"{TOPIC_ID}:{self.topic_id};" if self.topic_id else "")
            + (f"{CHANGELOG}:{self.changelog};" if self.changelog else "")
            + self.seen
        )

    @classmethod
    def decode(cls, metadata: str | None) -> Note:
        rest = metadata or ""
        fields: dict[str, str] = {}
        while (found := _FIELD.match(rest)) is not None:
            fields[found[1]] = found[2] or ""
            rest = rest[found.end() :]
        return cls(REMEMBERED in fields, fields.get(TOPIC_ID, ""), fields.get(CHANGELOG, ""), rest)
