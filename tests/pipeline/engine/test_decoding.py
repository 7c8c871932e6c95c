"""From the reader's batches to columns: topics with decodings of their own, and event time."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from holdfast.pipeline.core.failures import DefinitionWrong
from holdfast.pipeline.definition.model import Decoding, EventTime, Field, Source
from holdfast.pipeline.engine.decoding import RecordDecoder, decoded_ddl

CLICKS = Decoding("csv", (Field("id", "long"), Field("at", "timestamp", required=False)))
HOUR_US = 3_600_000_000


def batch(values: list[bytes | None], timestamps_us: list[int] | None = None) -> pa.RecordBatch:
    times = timestamps_us or [HOUR_US] * len(values)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(values, pa.binary()),
            pa.array([None] * len(values), pa.binary()),
            pa.array(times, pa.timestamp("us", tz="UTC")),
        ],
        names=["value", "key", "timestamp"],
    )


def decoder(event: EventTime | None = None, **source: Any) -> RecordDecoder:
    given: dict[str, Any] = {"topics": ("clicks",), "value": CLICKS, "event_time": event, **source}
    return RecordDecoder(Source(**given))


def decoded(
    each: RecordDecoder, values: pa.RecordBatch, topic: str = "clicks", piece: int = 0
) -> dict[str, list[Any]]:
    columns, _ = each.decode(values, topic, 0, piece)
    found: dict[str, list[Any]] = {}
    for name, column in zip(each.names, columns, strict=True):
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.int64())
        found[name] = column.to_pylist()
    return found


def at(seconds: float) -> bytes:
    return f"1,1970-01-01T00:00:{seconds:09.6f}Z".encode()


class TestEventTime:
    def test_a_source_without_has_no_column_of_it(self) -> None:
        assert decoder().names == ["id", "at"]

    def test_each_row_has_the_greatest_before_it_across_batches(self) -> None:
        each = decoder(EventTime("at"))
        first = decoded(each, batch([at(5), at(3.0015), b"broken", at(9), b"1,"]), piece=4)
        assert first["_event_time"] == [5_000_000, 3_001_500, None, 9_000_000, None]
        assert first["_seen"] == [None, 5_000, 5_000, 5_000, 9_000]
        assert first["_piece"] == [4] * 5
        assert decoded(each, batch([at(1)]), piece=4)["_seen"] == [9_000]
        assert each.greatest_ms("clicks", 0) == 9_000
        assert each.greatest_ms("clicks", 1) is None

    def test_whole_milliseconds_are_seen_and_no_more(self) -> None:
        each = decoder(EventTime("at"))
        assert decoded(each, batch([at(0.001999), at(0)]))["_seen"] == [None, 1]

    def test_a_clock_far_ahead_of_its_record_moves_nothing(self) -> None:
        each = decoder(EventTime("at", ahead="2s"))
        found = decoded(each, batch([at(12), at(13), at(1)], [10_000_000] * 3))
        assert found["_seen"] == [None, 12_000, 12_000]
        assert found["_event_time"][1] == 13_000_000

    def test_a_record_without_a_time_moves_event_time_by_its_event(self) -> None:
        each = decoder(EventTime("at", ahead="2s"))
        found = decoded(each, batch([at(12), at(30), at(1)], [10_000_000, -1_000, -1_000]))
        assert found["_seen"] == [None, 12_000, 30_000]

    def test_the_record_s_own_time(self) -> None:
        each = decoder(EventTime("_timestamp"))
        found = decoded(each, batch([at(0), b"broken", at(0), at(0)], [5_000, 9_000, -1_000, 7_000]))
        assert found["_event_time"] == [5_000, None, None, 7_000]
        assert found["_seen"] == [None, 5, 5, 5]


class TestTopics:
    def test_each_has_the_columns_of_all(self) -> None:
        refunds = Decoding("csv", (Field("reason", "string"), Field("id", "long")))
        each = decoder(topics=("clicks", "refunds"), values={"refunds": refunds})
        assert each.names == ["id", "at", "reason"]
        assert decoded(each, batch([b"late,7"]), "refunds") == {"id": [7], "at": [None], "reason": ["late"]}
        assert decoded(each, batch([at(1)]))["reason"] == [None]

    def test_the_common_decoding_is_left_out_where_every_topic_has_its_own(self) -> None:
        source = Source(topics=("clicks",), values={"clicks": CLICKS})
        assert decoded_ddl(source) == ["`id` bigint, `at` timestamp"]

    def test_one_name_has_one_type(self) -> None:
        refunds = Decoding("csv", (Field("id", "string"),))
        with pytest.raises(
            DefinitionWrong, match=r"'refunds' has 'id' as string.* as long: columns of one name"
        ):
            decoder(topics=("clicks", "refunds"), values={"refunds": refunds})

    def test_names_that_differ_in_case_only_are_refused(self) -> None:
        refunds = Decoding("csv", (Field("ID", "long"),))
        with pytest.raises(DefinitionWrong, match="'ID'"):
            decoder(topics=("clicks", "refunds"), values={"refunds": refunds})
