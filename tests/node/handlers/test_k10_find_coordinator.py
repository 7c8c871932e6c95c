"""FindCoordinator: offered, and honest that there is none."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode

FIND_COORDINATOR = 10


@pytest.mark.parametrize("version", range(7))
def test_there_is_no_coordinator_yet(desk: Any, version: int) -> None:
    if version >= 4:
        answer = desk.ask(FIND_COORDINATOR, version, key_type=0, coordinator_keys=["a", "b"])
        assert [(c.key, c.error_code) for c in answer.coordinators] == [
            ("a", ErrorCode.coordinator_not_available),
            ("b", ErrorCode.coordinator_not_available),
        ]
    else:
        answer = desk.ask(FIND_COORDINATOR, version, key="a", **({"key_type": 0} if version else {}))
        assert answer.error_code == ErrorCode.coordinator_not_available
        assert answer.node_id == -1
