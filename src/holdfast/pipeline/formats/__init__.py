"""Formats of values and keys: bytes of Kafka records to typed Arrow columns.

    decoder = compile_decoder(decoding, prefix="")
    decoder.arrow_fields, decoder.spark_ddl
    columns, errors = decoder.decode(values)

Nothing here knows Spark: decoders run wherever an Arrow array of bytes is. Each format has a module of its own, loaded
when a definition asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import ConfigError
from holdfast.pipeline.formats.base import Decoded, Decoder, FormatError, Undecodable, check_names
from holdfast.pipeline.formats.decoding import Decoding, Field
from holdfast.pipeline.formats.types import Column, parse_type

__all__ = ["Decoded", "Decoder", "FormatError", "Undecodable", "compile_columns", "compile_decoder"]


def compile_columns(fields: Sequence[Field]) -> list[Column]:
    """The definition's fields with their types read; raises `FormatError` for what cannot be a column."""
    columns: list[Column] = []
    for field in fields:
        try:
            columns.append(Column(field.name, parse_type(field.type), field.required))
        except ConfigError as wrong:
            raise FormatError(f"field {field.name!r}: {wrong}") from None
    check_names(columns)
    return columns


def compile_decoder(decoding: Decoding, *, prefix: str = "") -> Decoder:
    """The decoder of a definition; `prefix` goes before each column's name. Raises `FormatError`."""
    columns = compile_columns(decoding.fields)
    if decoding.format == "json":
        from holdfast.pipeline.formats.json_reference import JsonFast

        if not columns and decoding.unknown != "keep":
            raise FormatError("format json: name its fields, or keep them all by `unknown: keep`")
        return JsonFast(decoding, prefix, columns)
    if decoding.format == "csv":
        from holdfast.pipeline.formats.delimited import Delimited

        return Delimited(decoding, prefix, columns)
    if decoding.format in ("text", "bytes"):
        from holdfast.pipeline.formats.plain import Plain

        return Plain(decoding, prefix, columns)
    if decoding.format == "avro":
        from holdfast.pipeline.formats.avro import avro_decoder

        return avro_decoder(decoding, prefix, columns)
    if decoding.format == "protobuf":
        from holdfast.pipeline.formats.protobuf import protobuf_decoder

        return protobuf_decoder(decoding, prefix, columns)
    raise FormatError(f"format {decoding.format!r}: choose json, avro, protobuf, csv, text or bytes")
