"""Checkpoint files, meta.properties, partition.metadata and the clean shutdown marker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.broker.log.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    META_PROPERTIES_FILE,
    PARTITION_METADATA_FILE,
    RECOVERY_POINT_FILE,
    MetaProperties,
    OffsetCheckpoint,
    TopicPartition,
    decode_clean_shutdown,
    decode_meta_properties,
    decode_offsets,
    decode_partition_metadata,
    encode_meta_properties,
    encode_offsets,
    encode_partition_metadata,
    read_clean_shutdown,
    read_meta_properties,
    read_partition_metadata,
    remove_clean_shutdown,
    write_clean_shutdown,
    write_meta_properties,
    write_partition_metadata,
)
from holdfast.errors import CorruptLog, UsageError
from holdfast.testing.disk import PowerLost, SimulatedDisk

PATH = f"/data/{RECOVERY_POINT_FILE}"
TOPIC_ID = bytes(range(100, 116))

topics = st.text("abcXYZ019._-", min_size=1, max_size=20)
offsets = st.dictionaries(st.tuples(topics, st.integers(0, 2**31 - 1)), st.integers(0, 2**63 - 1), max_size=6)
uuids = st.binary(min_size=16, max_size=16)
metas = st.builds(
    MetaProperties,
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=30),
    st.integers(0, 2**31 - 1),
    st.none() | uuids,
)


# ---- offsets


def test_the_offsets_file_is_kafkas() -> None:
    assert encode_offsets({("a", 0): 5, ("b.c", 11): 2**40}) == b"0\n2\na 0 5\nb.c 11 1099511627776\n"


@given(offsets)
def test_offsets_survive_their_file(written: dict[TopicPartition, int]) -> None:
    assert decode_offsets(encode_offsets(written), PATH) == written


def test_offsets_survive_power_loss_once_written(disk: SimulatedDisk) -> None:
    checkpoint = OffsetCheckpoint(disk, PATH)
    assert checkpoint.read() == {}
    checkpoint.write({("a", 0): 5})
    checkpoint.write({("a", 0): 6, ("a", 1): 0})
    disk.crash()
    assert OffsetCheckpoint(disk, PATH).read() == {("a", 0): 6, ("a", 1): 0}


def test_an_empty_file_is_no_offsets_as_kafka_creates_it() -> None:
    assert decode_offsets(b"", PATH) == {}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"1\n0\n", "line 1 '1': version 0"),
        (b"x\n0\n", "line 1"),
        (b"0\n", "no count"),
        (b"0\n1\n", "line 2 '1': 0 entries follow"),
        (b"0\n0\na 0 5\n", "line 2 '0': 1 entries follow"),
        (b"0\n1\na 0 5", "line 3 'a 0 5': the last line is cut off"),
        (b"0\n1\na 0\n", "line 3"),
        (b"0\n1\na 0 5 6\n", "line 3"),
        (b"0\n1\na  0 5\n", "line 3"),
        (b"0\n1\na -1 5\n", "line 3"),
        (b"0\n1\na 0 -1\n", "line 3"),
        (b"0\n1\na 0 +5\n", "line 3"),
        (b"0\n1\na 0 05\n", "line 3"),
        (b"0\n1\na 0 1_0\n", "line 3"),
        ("0\n1\na 0 ٣\n".encode(), "line 3"),
        (b"0\n1\na 0 9223372036854775808\n", "line 3"),
        (b"0\n1\na 2147483648 0\n", "line 3"),
        (b"0\n1\na/b 0 0\n", "line 3"),
        (b"0\n2\na 0 0\na 0 1\n", "line 4"),
        (b"0\r\n0\r\n", "line 1"),
        (b"\xff\n0\n", "byte 0 is not text"),
    ],
)
def test_what_no_one_wrote_is_corrupt_and_the_line_is_named(content: bytes, problem: str) -> None:
    with pytest.raises(CorruptLog) as caught:
        decode_offsets(content, PATH)
    assert str(caught.value).startswith(PATH)
    assert problem in str(caught.value)


@given(offsets, st.data())
def test_any_cut_of_offsets_is_found_but_for_an_empty_file(
    written: dict[TopicPartition, int], data: st.DataObject
) -> None:
    content = encode_offsets(written)
    with pytest.raises(CorruptLog):
        decode_offsets(content[: data.draw(st.integers(1, len(content) - 1))], PATH)


# ---- whose directory


def test_meta_properties_of_kafka_are_read() -> None:
    content = (
        b"#\n#Sun Nov 15 03:31:28 UTC 2026\nnode.id=1\ndirectory.id=IoJ0UjK8SlGMZOGjZzYbJA\n"
        b"version=1\ncluster.id=qV-gMUMRQc2C_PgSaiTLjQ\n"
    )
    meta = decode_meta_properties(content, PATH)
    assert meta == MetaProperties(
        "qV-gMUMRQc2C_PgSaiTLjQ", 1, bytes.fromhex("2282745232bc4a518c64e1a367361b24")
    )
    assert decode_meta_properties(b"version=1\nnode.id=3\ncluster.id=a\\:b\\=c\n", PATH) == ("a:b=c", 3, None)


@given(metas)
@example(MetaProperties("a:b=c#d!e\\f", 0, None))
@example(MetaProperties("\\u0041", 0, None))
def test_meta_properties_survive_their_file(meta: MetaProperties) -> None:
    assert decode_meta_properties(encode_meta_properties(meta), PATH) == meta


def test_a_cluster_id_that_is_not_plain_is_refused() -> None:
    with pytest.raises(UsageError):
        encode_meta_properties(MetaProperties("two words", 1, None))


def test_meta_properties_in_a_directory(disk: SimulatedDisk) -> None:
    assert read_meta_properties(disk, "/data") is None
    meta = MetaProperties("cluster", 7, TOPIC_ID)
    write_meta_properties(disk, "/data", meta)
    disk.crash()
    assert read_meta_properties(disk, "/data") == meta
    assert disk.list("/data") == [META_PROPERTIES_FILE]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "version is missing"),
        (b"version=0\nbroker.id=1\n", "line 1"),
        (b"version=1\nnode.id=1\n", "cluster.id is missing"),
        (b"version=1\ncluster.id=a\n", "node.id is missing"),
        (b"version=1\ncluster.id=\nnode.id=1\n", "line 2"),
        (b"version=1\ncluster.id=a\nnode.id=one\n", "line 3"),
        (b"version=1\ncluster.id=a\nnode.id=-1\n", "line 3"),
        (b"version=1\ncluster.id=a\nnode.id=1\ndirectory.id=short\n", "line 4"),
        (b"version=1\ncluster.id=\\u00zz\nnode.id=1\n", PATH),
    ],
)
def test_meta_properties_that_cannot_be_are_corrupt(content: bytes, problem: str) -> None:
    with pytest.raises(CorruptLog) as caught:
        decode_meta_properties(content, PATH)
    assert PATH in str(caught.value)
    assert problem in str(caught.value)


@given(metas, st.data())
def test_any_cut_of_meta_properties_is_found_or_harmless(meta: MetaProperties, data: st.DataObject) -> None:
    content = encode_meta_properties(meta)
    cut = content[: data.draw(st.integers(0, len(content) - 1))]
    if cut == content[:-1]:
        assert decode_meta_properties(cut, PATH) == meta
    else:
        with pytest.raises(CorruptLog):
            decode_meta_properties(cut, PATH)


# ---- whose partition


def test_partition_metadata_is_kafkas() -> None:
    content = b"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ"
    assert decode_partition_metadata(content, PATH) == bytes(15) + b"\1"
    assert encode_partition_metadata(bytes(15) + b"\1") == content
    assert decode_partition_metadata(content + b"\n", PATH) == bytes(15) + b"\1"


@given(uuids.filter(any), st.data())
def test_partition_metadata_survives_and_any_cut_is_found(topic_id: bytes, data: st.DataObject) -> None:
    content = encode_partition_metadata(topic_id)
    assert decode_partition_metadata(content, PATH) == topic_id
    with pytest.raises(CorruptLog):
        decode_partition_metadata(content[: data.draw(st.integers(0, len(content) - 1))], PATH)


def test_partition_metadata_in_a_directory(disk: SimulatedDisk) -> None:
    assert read_partition_metadata(disk, "/data") is None
    write_partition_metadata(disk, "/data", TOPIC_ID)
    disk.crash()
    assert read_partition_metadata(disk, "/data") == TOPIC_ID
    assert disk.list("/data") == [PARTITION_METADATA_FILE]


@pytest.mark.parametrize(
    "content",
    [
        b"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAA",  # all zero
        b"version: x\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ",
        b"version 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ",
        b"version: 0\ntopic: AAAAAAAAAAAAAAAAAAAAAQ",
        b"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAR",  # bits past the sixteenth byte
        b"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAA?Q",
        b"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ\nmore",
        b"version: 0\ntopic_id: \xc3\xa4AAAAAAAAAAAAAAAAAAAQ",
    ],
)
def test_partition_metadata_that_cannot_be_is_corrupt(content: bytes) -> None:
    with pytest.raises(CorruptLog, match=PATH):
        decode_partition_metadata(content, PATH)


# ---- the clean shutdown marker


def take_clean_shutdown(disk: SimulatedDisk, directory: str) -> int | None:
    found = read_clean_shutdown(disk, directory)
    remove_clean_shutdown(disk, directory)
    return found


def test_the_marker_is_kafkas_and_is_taken_once(disk: SimulatedDisk) -> None:
    assert take_clean_shutdown(disk, "/data") is None
    write_clean_shutdown(disk, "/data", 42)
    path = f"/data/{CLEAN_SHUTDOWN_FILE}"
    assert disk.open(path, "read").pread(100, 0) == b'{"version":0,"brokerEpoch":42}'
    disk.crash()
    assert take_clean_shutdown(disk, "/data") == 42
    assert take_clean_shutdown(disk, "/data") is None


def test_a_marker_that_was_taken_does_not_come_back() -> None:
    for seed in range(50):
        disk = SimulatedDisk(seed)
        disk.prepare("/data")
        write_clean_shutdown(disk, "/data", 42)
        take_clean_shutdown(disk, "/data")
        disk.crash()
        assert take_clean_shutdown(disk, "/data") is None


def test_power_loss_while_taking_leaves_the_marker_or_none() -> None:
    for seed in range(50):
        disk = SimulatedDisk(seed)
        disk.prepare("/data")
        write_clean_shutdown(disk, "/data", 42)
        disk.lose_power_after(1)
        with pytest.raises(PowerLost):
            take_clean_shutdown(disk, "/data")
        disk.crash()
        assert take_clean_shutdown(disk, "/data") in (42, None)


@pytest.mark.parametrize(
    ("content", "epoch"),
    [
        (b'{"version":0,"brokerEpoch":42}', 42),
        (b'{"version":0,"brokerEpoch":42,"more":1}', 42),
        (b'{"version":0}', -1),
        (b'{"version":1,"brokerEpoch":42}', None),
        (b'{"version":0,"brokerEpoch":"x"}', None),
        (b'{"version":0,"brokerEpoch":true}', None),
        (b"[]", None),
        (b"", None),
        (b"\xff\xfe", None),
        (b"[" * 100_000, None),
    ],
)
def test_a_marker_that_cannot_be_read_is_none(content: bytes, epoch: int | None) -> None:
    assert decode_clean_shutdown(content) == epoch


# ---- garbage


@given(
    st.binary(max_size=80) | st.text("01 \nabversion:topic_id=#.\\", max_size=80).map(str.encode),
    st.integers(0, 3),
)
def test_garbage_is_content_or_corrupt_and_never_a_crash(content: bytes, which: int) -> None:
    decoders: list[Callable[[bytes], object]] = [
        lambda data: decode_offsets(data, PATH),
        lambda data: decode_meta_properties(data, PATH),
        lambda data: decode_partition_metadata(data, PATH),
        decode_clean_shutdown,
    ]
    try:
        decoders[which](content)
    except CorruptLog as problem:
        message = str(problem)
        if PATH not in message:
            raise


@given(offsets, metas, uuids, st.data())
def test_a_flipped_bit_is_content_or_corrupt_and_never_a_crash(
    written: dict[TopicPartition, int], meta: MetaProperties, topic_id: bytes, data: st.DataObject
) -> None:
    cases: list[tuple[bytes, Callable[[bytes], object]]] = [
        (encode_offsets(written), lambda content: decode_offsets(content, PATH)),
        (encode_meta_properties(meta), lambda content: decode_meta_properties(content, PATH)),
        (encode_partition_metadata(topic_id), lambda content: decode_partition_metadata(content, PATH)),
    ]
    for content, decode in cases:
        damaged = bytearray(content)
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        try:
            decode(bytes(damaged))
        except CorruptLog:
            continue


def test_what_a_power_failure_leaves_of_partition_metadata_is_none(disk: SimulatedDisk) -> None:
    path = "/data/partition.metadata"
    for content in (b"", bytes(39)):
        disk.open(path, "create").pwritev([content], 0)
        assert read_partition_metadata(disk, "/data") is None
