"""A sample of the records is decoded by the plain decoders too, and a difference is a finding."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from unittest.mock import patch
from uuid import UUID

import fastavro
import pyarrow as pa
import pytest

from holdfast.audit.decoding import SAMPLE_ROWS, PlainSample, SourceDecoder
from holdfast.audit.model import Examined
from holdfast.pipeline.definition.model import Decoding, Field, Source
from holdfast.pipeline.formats import Decoded, Decoder, compile_decoder
from holdfast.pipeline.positions import Place

PLACE = Place("orders", UUID(int=1), 0)
FIELDS = (Field("id", "long"), Field("who", "string", required=False))
SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "who", "type": ["null", "string"]}],
}


def avro(number: int) -> bytes:
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, fastavro.parse_schema(SCHEMA), {"id": number, "who": f"w{number}"})
    return sink.getvalue()


CASES: Mapping[str, tuple[Decoding, Callable[[int], bytes]]] = {
    "json": (
        Decoding("json", FIELDS),
        lambda number: json.dumps({"id": number, "who": f"w{number}"}).encode(),
    ),
    "csv": (Decoding("csv", FIELDS), lambda number: f"{number},w{number}".encode()),
    "avro": (Decoding("avro", schema=json.dumps(SCHEMA)), avro),
    "text": (Decoding("text"), lambda number: f"w{number}".encode()),
}


def sampled(decoding: Decoding, values: list[bytes]) -> Examined:
    decoder = SourceDecoder(Source(("orders",), value=decoding))
    sample = PlainSample(decoder)
    batch = pa.record_batch(
        {
            "offset": pa.array(range(100, 100 + len(values)), pa.int64()),
            "value": pa.array(values, pa.binary()),
        }
    )
    sample.take(PLACE, batch, decoder.once("orders", batch))
    return sample.examine()


@pytest.mark.parametrize("form", CASES)
def test_the_plain_decoders_agree_and_that_is_noted(form: str) -> None:
    decoding, written = CASES[form]
    found = sampled(decoding, [*(written(number) for number in range(50)), b"\xff\xfe{"])
    assert not found.findings
    assert found.notes == (f"{SAMPLE_ROWS} records were decoded a second time, by the plain decoders",)


@pytest.mark.parametrize("form", ["json", "csv", "avro"])
def test_a_value_that_the_plain_decoder_reads_otherwise_is_found(form: str) -> None:
    decoding, written = CASES[form]
    kind = type(compile_decoder(decoding))
    honest = kind.decode

    def wrong(self: Decoder, values: pa.Array) -> Decoded:
        columns, errors = honest(self, values)
        ids = columns[0].to_pylist()
        return Decoded([pa.array([*ids[:-1], 7], columns[0].type), *columns[1:]], errors)

    with patch.object(kind, "decode", wrong):
        (finding,) = sampled(decoding, [written(number) for number in range(40)]).findings
    assert (finding.place, finding.ranges, finding.count) == (PLACE, ((139, 139),), 1)
    assert "the plain decoder makes something else" in finding.detail
