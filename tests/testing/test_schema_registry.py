"""The registry for tests, through confluent-kafka's own client and bare requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from confluent_kafka.schema_registry import Schema as ClientSchema
from confluent_kafka.schema_registry import SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.testing.schema_registry import SchemaRegistry, respond
from holdfast.testing.schema_subjects import Refused, Schema, Subjects


def avro(*fields: str, extra: str = "") -> str:
    named = ",".join(f'{{"name":"{name}","type":"long"}}' for name in fields)
    return f'{{"type":"record","name":"Order","fields":[{named}{extra}]}}'


OPTIONAL = ',{"name":"note","type":"string","default":""}'


@pytest.fixture
def client(holdfast_schema_registry: SchemaRegistry) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": holdfast_schema_registry.url}) as client:
        yield client


def code_of(error: pytest.ExceptionInfo[SchemaRegistryError]) -> tuple[int, int]:
    return error.value.http_status_code, error.value.error_code


def test_a_schema_has_one_id_in_all_subjects(client: SchemaRegistryClient) -> None:
    first = client.register_schema("orders-value", ClientSchema(avro("id"), "AVRO"))
    assert client.register_schema("returns-value", ClientSchema(avro("id"), "AVRO")) == first
    assert client.get_subjects() == ["orders-value", "returns-value"]
    assert client.get_subjects_by_schema_id(first) == ["orders-value", "returns-value"]
    assert json.loads(client.get_schema(first).schema_str or "") == json.loads(avro("id"))


def test_a_schema_registered_again_in_another_layout_is_no_new_version(client: SchemaRegistryClient) -> None:
    first = client.register_schema("orders-value", ClientSchema(avro("id"), "AVRO"))
    spaced = json.dumps(json.loads(avro("id")), indent=4, sort_keys=True)
    assert client.register_schema("orders-value", ClientSchema(spaced, "AVRO")) == first
    assert client.get_versions("orders-value") == [1]


def test_versions_are_found_by_number_as_the_latest_and_by_their_schema(client: SchemaRegistryClient) -> None:
    client.register_schema("orders-value", ClientSchema(avro("id"), "AVRO"))
    second = client.register_schema("orders-value", ClientSchema(avro("id", extra=OPTIONAL), "AVRO"))
    latest = client.get_latest_version("orders-value")
    assert (latest.version, latest.schema_id) == (2, second)
    assert client.get_version("orders-value", 1).schema_id != second
    assert client.lookup_schema("orders-value", ClientSchema(avro("id"), "AVRO")).version == 1


def test_an_incompatible_schema_is_refused_and_says_why(client: SchemaRegistryClient) -> None:
    client.register_schema("orders-value", ClientSchema(avro("id"), "AVRO"))
    stricter = ClientSchema(avro("id", "amount"), "AVRO")
    assert client.test_compatibility("orders-value", stricter) is False
    with pytest.raises(SchemaRegistryError, match="cannot read what version 1 wrote") as refused:
        client.register_schema("orders-value", stricter)
    assert code_of(refused) == (409, 409)
    assert client.get_versions("orders-value") == [1]


def test_the_level_of_a_subject_comes_before_that_of_the_registry(client: SchemaRegistryClient) -> None:
    client.register_schema("orders-value", ClientSchema(avro("id"), "AVRO"))
    assert client.get_compatibility() == "BACKWARD"
    with pytest.raises(SchemaRegistryError) as none:
        client.get_compatibility("orders-value")
    assert code_of(none) == (404, 40408)
    client.set_compatibility("orders-value", "FORWARD")
    client.register_schema("orders-value", ClientSchema(avro("id", "amount"), "AVRO"))
    client.set_compatibility(level="NONE")
    assert (client.get_compatibility(), client.get_compatibility("orders-value")) == ("NONE", "FORWARD")
    with pytest.raises(SchemaRegistryError) as wrong:
        client.set_compatibility(level="SIDEWAYS")
    assert code_of(wrong) == (422, 42203)


def test_transitive_levels_look_at_every_version() -> None:
    subjects = Subjects()
    subjects.register("s", Schema(avro("a")))
    # Backward in steps: a goes, comes back with a default, and then without one.
    subjects.register("s", Schema(avro()))
    subjects.register("s", Schema(avro(extra='{"name":"a","type":"string","default":""}')))
    with pytest.raises(Refused):
        subjects.set_level("BACKWARD_TRANSITIVE", "s")
        subjects.register("s", Schema(avro(extra='{"name":"a","type":["null","string"],"default":null}')))
    subjects.set_level("BACKWARD", "s")
    assert (
        subjects.register(
            "s", Schema(avro(extra='{"name":"a","type":["null","string"],"default":null}'))
        ).number
        == 4
    )


def test_a_subject_does_not_change_its_type(client: SchemaRegistryClient) -> None:
    client.register_schema("orders-value", ClientSchema(avro("id"), "AVRO"))
    with pytest.raises(SchemaRegistryError, match="version 1 is AVRO, this is JSON"):
        client.register_schema("orders-value", ClientSchema('{"type":"object"}', "JSON"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("AVRO", "{"),
        ("AVRO", '{"type":"recard","name":"x","fields":[]}'),
        ("JSON", "7"),
        ("PROTOBUF", "!"),
        ("XML", "<a/>"),
    ],
)
def test_what_is_no_schema_is_refused(client: SchemaRegistryClient, kind: str, text: str) -> None:
    with pytest.raises(SchemaRegistryError) as refused:
        client.register_schema("orders-value", ClientSchema(text, kind))
    assert code_of(refused) == (422, 42201)
    assert client.get_subjects() == []


def test_deleted_versions_are_hidden_their_numbers_and_ids_stay(client: SchemaRegistryClient) -> None:
    first = client.register_schema("orders-value", ClientSchema(avro("id"), "AVRO"))
    client.register_schema("orders-value", ClientSchema(avro("id", extra=OPTIONAL), "AVRO"))
    assert client.delete_version("orders-value", 2) == 2
    assert client.get_versions("orders-value") == [1]
    assert client.delete_subject("orders-value") == [1]
    with pytest.raises(SchemaRegistryError) as gone:
        client.get_versions("orders-value")
    assert code_of(gone) == (404, 40401)
    assert client.get_subjects(deleted=True) == ["orders-value"]
    client.clear_caches()  # type: ignore[no-untyped-call]
    assert client.get_schema(first).schema_str == avro("id")
    assert client.register_schema("orders-value", ClientSchema(avro("id"), "AVRO")) == first
    assert client.get_versions("orders-value") == [3]


def test_only_what_was_deleted_before_goes_for_good() -> None:
    subjects = Subjects()
    subjects.register("s", Schema(avro("id")))
    with pytest.raises(Refused, match="was not deleted before"):
        subjects.delete("s", 1, permanent=True)
    subjects.delete("s", 1)
    assert subjects.delete("s", 1, permanent=True) == 1
    assert subjects.subjects(deleted=True) == []


def test_references_must_exist_and_hold_what_they_name(client: SchemaRegistryClient) -> None:
    reference = SchemaReference("Order", "orders-value", 1)
    line = ClientSchema(
        '{"type":"record","name":"L","fields":[{"name":"o","type":"Order"}]}', "AVRO", [reference]
    )
    with pytest.raises(SchemaRegistryError, match="the reference Order") as missing:
        client.register_schema("lines-value", line)
    assert code_of(missing) == (422, 42201)
    client.register_schema("orders-value", ClientSchema(avro("id"), "AVRO"))
    schema_id = client.register_schema("lines-value", line)
    client.clear_caches()  # type: ignore[no-untyped-call]
    assert client.get_schema(schema_id).references == [reference]
    assert client.get_referenced_by("orders-value", 1) == [schema_id]
    with pytest.raises(SchemaRegistryError) as referred:
        client.delete_version("orders-value", 1)
    assert code_of(referred) == (422, 42206)


def test_a_name_with_a_slash_is_one_name(client: SchemaRegistryClient) -> None:
    client.register_schema("a/b c-value", ClientSchema(avro("id"), "AVRO"))
    assert client.get_subjects() == ["a/b c-value"]
    assert client.get_versions("a/b c-value") == [1]


def test_a_registry_that_was_away_comes_back_at_its_port_with_its_schemas() -> None:
    with SchemaRegistry() as registry:
        url = registry.url
        registry.subjects.register("orders-value", Schema(avro("id")))
        registry.stop()
        with pytest.raises(URLError):
            urlopen(f"{url}/subjects", timeout=5)
        registry.start()
        assert registry.url == url
        with urlopen(f"{url}/subjects", timeout=5) as answer:
            assert json.load(answer) == ["orders-value"]


def test_a_schema_asked_for_by_itself_comes_as_it_is(holdfast_schema_registry: SchemaRegistry) -> None:
    holdfast_schema_registry.subjects.register("orders-value", Schema(avro("id")))
    for path in ("schemas/ids/1/schema", "subjects/orders-value/versions/latest/schema"):
        with urlopen(f"{holdfast_schema_registry.url}/{path}", timeout=5) as answer:
            assert answer.read().decode() == avro("id")


def test_a_body_that_is_not_json_is_the_clients_fault(holdfast_schema_registry: SchemaRegistry) -> None:
    request = Request(f"{holdfast_schema_registry.url}/subjects/s/versions", b"{", method="POST")
    with pytest.raises(HTTPError) as refused:
        urlopen(request, timeout=5)
    with refused.value as answer:
        assert (answer.code, json.load(answer)["error_code"]) == (400, 400)


@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
    st.lists(
        st.sampled_from(["subjects", "versions", "schemas", "ids", "config", "s", "1", "latest", "é", "%2F"])
    ),
    st.one_of(
        st.binary(max_size=20),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["schema", "schemaType", "references", "compatibility", "name"]), inner
                )
            ),
            max_leaves=5,
        ).map(lambda content: json.dumps(content).encode()),
    ),
)
@example("POST", ["subjects", "s", "versions"], b'{"schema":"{}","references":[1]}')
@example("POST", ["subjects", "s", "versions"], b'{"schema":"{}","schemaType":[1]}')
@example("POST", ["subjects", "s", "versions"], b'{"schema":"[]"}')
def test_any_request_is_answered(method: str, names: list[str], body: bytes) -> None:
    status, content = respond(Subjects(), method, "/" + "/".join(names), body)
    assert status in (200, 400, 404, 422)
    json.dumps(content)
