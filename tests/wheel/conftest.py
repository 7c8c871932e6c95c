"""One wheel for all tests here, and an environment for each set of extras that one of them names."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from tests.support.wheels import Installed, build

Install = Callable[..., Installed]


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """An environment with the wheel and these extras, made when it is first asked for."""
    wheel = build(tmp_path_factory.mktemp("wheel"))

    @functools.cache
    def made(*extras: str, beside: tuple[str, ...] = ()) -> Installed:
        return Installed(wheel, tmp_path_factory.mktemp("installed"), extras, beside)

    return made
