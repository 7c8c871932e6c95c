from __future__ import annotations

import pytest

from holdfast.testing.transaction_world import TransactionWorld


@pytest.fixture
def world() -> TransactionWorld:
    return TransactionWorld()
