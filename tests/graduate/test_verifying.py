"""What the running Kafka cannot say yet is asked for again, and what it does not say at all is never called lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.admin.brokers import Brokers
from holdfast.admin.settings import parse_settings
from holdfast.graduate.report import Fault, Report
from holdfast.graduate.verifying import _Verification
from holdfast.manifest.model import Manifest, TopicManifest, TransactionManifest

MANIFEST = Manifest(
    "cluster",
    1,
    taken_at_ms=0,
    metadata_end_offset=0,
    metadata_epoch=1,
    next_producer_id=0,
    topics=(TopicManifest("orders", "id", settings={"retention.ms": "1"}, is_compacted=False),),
    transactions=(TransactionManifest("done", 7, 3, status=4),),
)


class Answering(Brokers):
    """Brokers that answer with these errors, one after the other, the last of them for ever."""

    def __init__(self, *codes: ErrorCode) -> None:
        super().__init__(
            parse_settings({"bootstrap.servers": "127.0.0.1:1", "default.api.timeout.ms": "100"})
        )
        self._codes = list(codes)

    def _code(self) -> ErrorCode:
        return self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]

    def back_off(self) -> None:
        """The next answer comes at once."""

    def ask_coordinator(self, *_: Any, **__: Any) -> Any:
        state = SimpleNamespace(error_code=self._code(), producer_id=7, producer_epoch=3)
        return SimpleNamespace(transaction_states=[state])

    def ask_any(self, *_: Any, **__: Any) -> Any:
        configs = [SimpleNamespace(name="retention.ms", value="1")]
        return SimpleNamespace(results=[SimpleNamespace(error_code=self._code(), configs=configs)])


def verification(*codes: ErrorCode) -> _Verification:
    report = Report("subject", "cluster", "127.0.0.1:1", "")
    return _Verification(MANIFEST, "", Answering(*codes), report, frozenset())


@pytest.mark.parametrize(
    ("codes", "fault"),
    [
        ([ErrorCode.coordinator_load_in_progress, ErrorCode.not_coordinator, ErrorCode.none], None),
        ([ErrorCode.coordinator_load_in_progress], Fault.UNPROVEN),
        ([ErrorCode.transactional_id_not_found], Fault.LOST),
        ([ErrorCode.transactional_id_authorization_failed], Fault.UNPROVEN),
    ],
)
def test_a_transaction_is_lost_only_when_its_coordinator_says_so(
    codes: list[ErrorCode], fault: Fault | None
) -> None:
    judged = verification(*codes)
    judged._transactions()
    assert [each.fault for each in judged._report.findings] == ([] if fault is None else [fault])


def test_settings_that_could_not_be_read_are_not_called_altered() -> None:
    judged = verification(ErrorCode.topic_authorization_failed)
    judged._settings()
    assert [each.fault for each in judged._report.findings] == [Fault.UNPROVEN]
