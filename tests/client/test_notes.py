"""What is stored beside a position is read as it was written, and what others stored there is left alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.consuming.commits import Note

SEEN = st.just("") | st.from_regex(r"hf1:[0-9]+:[A-Za-z0-9+/=]*", fullmatch=True)
VALUES = st.text("0123456789abcdef-@", max_size=40)


@given(st.booleans(), VALUES, VALUES, SEEN)
def test_a_note_is_read_as_it_was_written(remembered: bool, topic_id: str, changelog: str, seen: str) -> None:
    note = Note(remembered, topic_id, changelog, seen)
    assert Note.decode(note.encode()) == note


def test_notes_of_earlier_versions_are_read() -> None:
    assert Note.decode("hfk;hf1:7:AAAA") == Note(is_remembered=True, seen="hf1:7:AAAA")
    assert Note.decode("hf1:7:AAAA") == Note(seen="hf1:7:AAAA")


@given(st.none() | st.text().filter(lambda text: not text.startswith("hf")))
def test_what_others_stored_says_nothing(metadata: str | None) -> None:
    assert Note.decode(metadata)[:3] == Note()[:3]
