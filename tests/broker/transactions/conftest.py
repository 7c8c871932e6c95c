from __future__ import annotations

import pytest
from tests.support.coordinator_worlds import TransactionWorld


@pytest.fixture
def world() -> TransactionWorld:
    return TransactionWorld()
