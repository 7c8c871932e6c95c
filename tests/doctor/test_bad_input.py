"""Files that cannot be read, are not what they say, or mean harm: told by name, and the rest goes on."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.doctor.client_defaults import Client
from holdfast.doctor.files import Asked, examine_files
from holdfast.doctor.findings import DoctorError, Examination
from holdfast.doctor.properties_files import UnreadableFile, client_named, read_entries
from holdfast.doctor.python_code import check_program, parse_program
from holdfast.doctor.rules import check_settings

BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} {{{', '.join(f'k{k}: *a{n - 1}' for k in range(9))}}}\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.yaml", b"acks: [1", "not YAML"),
        ("p.yaml", b"- acks\n- 1\n", "not a dictionary"),
        ("p.json", b'{"acks": 1,}', "p.json:1: not JSON"),
        ("p.json", b"[1, 2]", "not a dictionary"),
        ("p.json", b"[" * 100_000, "nested too deeply"),
        ("p.properties", b"acks=\\u12", "four hexadecimal digits"),
        ("p.properties", b"PK\0\0\0", "not a text file"),
        ("p.yaml", BOMB.encode(), "more than"),
        ("p.yaml", b"a: &a\n  b: *a\n", "no settings in it"),
    ],
)
def test_a_broken_file_is_told_with_its_reason(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UnreadableFile, match=said):
        read_entries(str(path))


def test_the_rest_is_examined_and_the_gap_is_named(tmp_path: Path) -> None:
    good, bad, code = tmp_path / "p.properties", tmp_path / "c.yaml", tmp_path / "broken.py"
    good.write_text("acks=0\n")
    bad.write_text("a: [")
    code.write_text("def (:\n")
    examination = examine_files(
        Asked([str(good)], [str(bad), str(tmp_path / "missing")], ["nowhere.yaml"], [str(code)])
    ).examination
    assert [found.id for found in examination.findings] == ["HF102"]
    assert [gap.what for gap in examination.gaps] == [
        f"{bad}:1",
        str(tmp_path / "missing"),
        str(code),
        "nowhere.yaml",
    ]
    assert "line 1" in examination.gaps[2].why
    assert not examination.complete


def test_an_unknown_client_is_refused_with_those_known() -> None:
    assert client_named("Librdkafka") is Client.LIBRDKAFKA
    with pytest.raises(DoctorError, match="unknown client 'sarama'; known are java, librdkafka"):
        client_named("sarama")


def test_a_definition_that_is_wrong_is_a_gap_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "orders.yaml"
    path.write_text("pipeline: orders\nsource: {topics: [a]}\nsinks:\n  - parquet: {pat: x}\n")
    examination = examine_files(Asked(pipelines=[str(path)])).examination
    assert examination.findings == []
    assert any("line 4" in gap.why for gap in examination.gaps)


def test_a_pipeline_in_python_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.py"
    path.write_text("raise SystemExit('run')\n")
    examination = examine_files(Asked(pipelines=[str(path)], code=[str(path)])).examination
    assert [gap.why for gap in examination.gaps] == [
        "no Kafka client in Python that the doctor knows",
        "a pipeline in Python is not run by the doctor; name it with --code",
    ]


def test_a_directory_without_python_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / ".hidden.d").mkdir()
    (tmp_path / ".hidden.d" / "x.py").write_text("x = 1\n")
    assert [gap.why for gap in examine_files(Asked(code=[str(tmp_path)])).examination.gaps] == [
        "no Kafka client in Python that the doctor knows"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "1*" * 3000 + "1\nfrom confluent_kafka import Producer\nProducer({'acks': x})\n",
        "from confluent_kafka import Producer\nc = {**c, **c, **c}\nc.update(c)\nProducer(c)\n",
        "from confluent_kafka import Producer\na = b\nb = a\nProducer({'acks': a})\n",
        "spark" + ".option('a', 'b')" * 500 + ".load()\n",
    ],
)
def test_a_program_that_is_meant_to_confuse_ends(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(text)
    examination = examine_files(Asked(code=[str(path)])).examination
    assert examination.complete or examination.gaps[0].what == str(path)


PIECES = st.sampled_from(
    [
        "from confluent_kafka import Producer, Consumer",
        "from kafka import KafkaProducer",
        "p = Producer({'acks': 1, **q})",
        "self.p = Producer(conf)",
        "while True:\n    p.produce('t', b'x')",
        "c = Consumer({'group.id': 'g'})",
        "for m in c:\n    c.commit()\n    handle(m)",
        "try:\n    p.produce('t')\nexcept Exception:\n    pass",
        "with Producer() as p:\n    pass",
        "global p",
        "conf['x'] = 1",
        "a.readStream.format('kafka').load()",
        "def f(p, c):\n    return p.send(c)",
        "k = KafkaProducer(*a, **b)\nk.send('t')",
        "async def g():\n    await k.send('t')",
        "lambda p: p.flush",
        "class A:\n    p = Producer({})",
    ]
)


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(PIECES, max_size=8))
def test_any_program_is_examined_to_its_end(pieces: list[str]) -> None:
    program = parse_program("\n".join(pieces) + "\n", "x.py")
    for found in check_program(program):
        assert 0 < found.place.line <= sum(piece.count("\n") + 1 for piece in pieces)


NAMES = st.sampled_from(
    ["acks", "retries", "linger.ms", "enable.idempotence", "delivery.timeout.ms", "auto.offset.reset", "x"]
)
VALUES = st.one_of(
    st.sampled_from(["0", "1", "all", "true", "latest", "${A}", "-1", ""]), st.text(max_size=5)
)


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.tuples(NAMES, VALUES)), st.sampled_from(list(Client)), st.booleans())
def test_any_settings_are_judged_without_an_error(
    pairs: list[tuple[str, str]], client: Client, producer: bool
) -> None:
    from holdfast.doctor.client_settings import Setting, make_settings
    from holdfast.doctor.findings import Location

    written = [Setting(name, value, Location("f", line)) for line, (name, value) in enumerate(pairs, 1)]
    made = make_settings("producer" if producer else "consumer", client, Location("f"), written)
    examination = Examination()
    examination.add(check_settings(made))
    for found in examination.findings:
        assert found.place.file == "f"
        assert found.found


KEYS = st.sampled_from(
    """apiVersion kind spec metadata name kafka config services image environment env value volumes storage type
    containers template data connector.class spring cloud stream binder acks replicas 0 server.properties""".split()  # noqa: SIM905
)
WORDS = """v1 Kafka KafkaTopic KafkaConnect ConfigMap List Deployment kafka.strimzi.io/v1 apache/kafka KAFKA_NODE_ID=1
    ephemeral ${X} all""".split()  # noqa: SIM905
LEAVES: st.SearchStrategy[object] = st.sampled_from([*WORDS, None, True, 0, 1, "", "acks=1\n", {}, []])
TREES = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=5))
)


@settings(deadline=None, max_examples=examples(50))
@given(st.dictionaries(KEYS, TREES, max_size=6), st.sampled_from([None, "producer", "broker"]))
def test_any_document_is_examined_or_named_as_not_examined(
    document: dict[str, object], asked_as: str | None
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name in ("x.json", "x.yaml"):
            path = Path(directory, name)
            path.write_text(json.dumps(document))
            asked = Asked(producers=[str(path)]) if asked_as == "producer" else Asked(paths=[str(path)])
            result = examine_files(asked)
            assert result.accounted_for
            assert all(found.place.file == str(path) for found in result.examination.findings)
