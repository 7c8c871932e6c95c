"""What a decoder is made of, as whoever defines a pipeline gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Field(Protocol):
    """One column that a definition names, as it names it."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def required(self) -> bool: ...


class Decoding(Protocol):
    """What a decoder is made of; definitions have such values, and say there what each is."""

    @property
    def format(self) -> str: ...
    @property
    def fields(self) -> Sequence[Field]: ...
    @property
    def unknown(self) -> str: ...
    @property
    def schema(self) -> str | None: ...
    @property
    def message(self) -> str | None: ...
    @property
    def registry(self) -> Mapping[str, str] | None: ...
    @property
    def csv(self) -> Mapping[str, str]: ...
