"""The table of errors is whole and agrees with the Java client."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from holdfast.wire.error_table import BY_CODE, describe, is_retriable

# Codes whose exception in Kafka 4.3.1's Java client is a RetriableException.
RETRIABLE_IN_JAVA = {
    2,
    3,
    5,
    6,
    7,
    9,
    13,
    14,
    15,
    16,
    19,
    20,
    41,
    51,
    56,
    70,
    71,
    72,
    74,
    75,
    78,
    80,
    83,
    84,
    88,
    89,
    100,
    103,
    106,
    122,
    123,
    133,
}


def test_every_error_of_the_protocol_is_in_the_table_once() -> None:
    assert list(BY_CODE) == [code.value for code in ErrorCode]
    assert BY_CODE[6].name == "NOT_LEADER_OR_FOLLOWER"


def test_retriable_means_what_it_means_to_java_clients() -> None:
    assert {error.code for error in BY_CODE.values() if error.retriable} == RETRIABLE_IN_JAVA


def test_every_meaning_is_told_and_told_once() -> None:
    meanings = [error.meaning for error in BY_CODE.values()]
    assert all(meanings)
    assert len(set(meanings)) == len(meanings)


@pytest.mark.parametrize("code", [ErrorCode.not_leader_or_follower, 6])
def test_codes_are_looked_up_as_numbers_and_as_names(code: int) -> None:
    assert is_retriable(code)
    assert describe(code).startswith("NOT_LEADER_OR_FOLLOWER: ")


def test_an_unknown_code_is_final_and_says_so() -> None:
    assert not is_retriable(9999)
    assert describe(9999) == "unknown error code 9999"
