"""Certificates: a schema, a hash each, and a chain that shows what was changed, left out or made anew."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from holdfast.audit import certificate, signatures
from holdfast.audit.certificate import CertificateError
from holdfast.audit.model import FAULTS, Fate, Finding, Kind, Mode, Report, Verdict
from holdfast.errors import UsageError

MakeReport = Callable[..., Report]

SCHEMA: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "certificate.schema.json").read_text(encoding="utf-8")
)


def closed(schema: Any) -> Any:
    """The schema, without leave for fields that it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(value) for name, value in schema.items()}
    if "properties" in schema and "additionalProperties" not in schema and schema.get("type") == "object":
        inner["additionalProperties"] = False
    return inner


def change(path: str, edit: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    edit(document)
    Path(path).write_text(json.dumps(document), encoding="utf-8")


@pytest.fixture
def chain(make_report: MakeReport, tmp_path: Path) -> list[str]:
    """Four certificates in a directory."""
    return [certificate.write(make_report(end=end), str(tmp_path / "c")).path for end in (10, 20, 30, 40)]


@pytest.mark.parametrize("findings", [(), ("lost", "duplicated"), ("altered",)])
def test_a_certificate_fits_the_published_schema_and_has_no_field_it_does_not_name(
    make_report: MakeReport, tmp_path: Path, findings: tuple[Any, ...]
) -> None:
    written = certificate.write(make_report(*findings, unproven=("expired",)), str(tmp_path))
    document = json.loads(Path(written.path).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(document, closed(SCHEMA), cls=jsonschema.Draft202012Validator)
    document["report"]["surprise"] = 1
    jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft202012Validator)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, closed(SCHEMA), cls=jsonschema.Draft202012Validator)


def test_the_schema_knows_every_fate_kind_verdict_and_mode() -> None:
    definitions = SCHEMA["$defs"]
    report = definitions["report"]["properties"]
    assert set(definitions["fates"]["propertyNames"]["enum"]) == {str(each) for each in Fate}
    assert set(definitions["partition"]["properties"]["kinds"]["propertyNames"]["enum"]) == set(
        map(str, Kind)
    )
    assert set(definitions["finding"]["properties"]["fate"]["enum"]) == set(map(str, FAULTS))
    assert set(report["verdict"]["enum"]) == {str(each) for each in Verdict}
    assert set(report["mode"]["enum"]) == set(get_args(Mode))


def test_a_certificate_holds_the_report_and_reads_back(make_report: MakeReport, tmp_path: Path) -> None:
    report = make_report("lost")
    written = certificate.write(report, str(tmp_path / "one.json"))
    assert Report.from_json(certificate.read(written.path).document["report"]) == report
    assert written.verdict == "failed"


def test_each_certificate_names_the_one_before_it(chain: list[str]) -> None:
    read = [certificate.read(path) for path in chain]
    assert [each.number for each in read] == [1, 2, 3, 4]
    assert [each.previous for each in read] == [None, *(each.sha256 for each in read[:-1])]
    (verified,) = certificate.verify([os.path.dirname(chain[0])])
    assert verified.is_whole
    assert len(verified.certificates) == 4


def test_the_hash_does_not_depend_on_how_the_file_is_laid_out(chain: list[str]) -> None:
    document = json.loads(Path(chain[0]).read_text(encoding="utf-8"))
    shuffled = dict(reversed(document.items()))
    Path(chain[0]).write_text(json.dumps(shuffled, indent=7, ensure_ascii=True), encoding="utf-8")
    assert certificate.verify(chain)[0].is_whole


def leaves(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items: Any = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for name, value in items:
        yield from leaves(value, (*at, name))
    if not isinstance(document, dict | list):
        yield at


def test_any_changed_value_breaks_the_certificate_that_holds_it(chain: list[str]) -> None:
    original = Path(chain[1]).read_text(encoding="utf-8")
    places = [at for at in leaves(json.loads(original)) if at[0] == "report"]
    assert len(places) > 50
    for at in places:
        document = json.loads(original)
        inner = document
        for name in at[:-1]:
            inner = inner[name]
        value = inner[at[-1]]
        inner[at[-1]] = (
            (not value) if isinstance(value, bool) else value + 1 if isinstance(value, int) else f"{value}x"
        )
        Path(chain[1]).write_text(json.dumps(document), encoding="utf-8")
        (verified,) = certificate.verify(chain)
        assert "number 2 " in verified.problem, at
        assert "was changed" in verified.problem, at


def test_a_certificate_made_anew_breaks_the_link_behind_it(chain: list[str]) -> None:
    def forge(document: dict[str, Any]) -> None:
        document["report"]["findings"] = []
        document["report"]["took_ms"] = 1
        document["sha256"] = certificate.content_hash(document)

    change(chain[1], forge)
    (verified,) = certificate.verify(chain)
    assert "number 3 " in verified.problem
    assert "made anew" in verified.problem


def test_the_first_broken_link_is_named_not_the_last(chain: list[str]) -> None:
    for path in chain[1:]:
        change(path, lambda document: document["report"].update(took_ms=0))
    assert "number 2 " in certificate.verify(chain)[0].problem


def test_a_missing_certificate_in_the_middle_is_named(chain: list[str]) -> None:
    (verified,) = certificate.verify([chain[0], chain[1], chain[3]])
    assert "3 is missing" in verified.problem


def test_two_certificates_of_one_number_are_a_fork(
    chain: list[str], make_report: MakeReport, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    forked = certificate.certify(make_report(end=99), certificate.read(chain[1]))
    other.write_text(json.dumps(forked.document), encoding="utf-8")
    (verified,) = certificate.verify([*chain, str(other)])
    assert "forks" in verified.problem


def test_a_chain_whose_beginning_is_gone_holds_and_says_so(chain: list[str]) -> None:
    (verified,) = certificate.verify(chain[2:])
    assert verified.is_whole
    assert any("from number 3 on" in note for note in verified.notes)


def test_a_removed_end_shows_only_against_a_hash_kept_elsewhere(chain: list[str]) -> None:
    newest = certificate.read(chain[-1]).sha256
    assert certificate.verify(chain, newest)[0].is_whole
    assert certificate.verify(chain[:-1])[0].is_whole
    (verified,) = certificate.verify(chain[:-1], newest)
    assert "later ones were removed" in verified.problem


def test_chains_of_several_subjects_share_a_directory(make_report: MakeReport, tmp_path: Path) -> None:
    for subject in ("orders", "orders-2", "a/b c", "orders"):
        certificate.write(make_report(subject=subject), str(tmp_path))
    found = {each.subject: len(each.certificates) for each in certificate.verify([str(tmp_path)])}
    assert found == {"orders": 2, "orders-2": 1, "a/b c": 1}


def test_subjects_that_share_a_file_name_keep_chains_of_their_own(
    make_report: MakeReport, tmp_path: Path
) -> None:
    for subject in ("a/b", "a b", "a/b", "a b"):
        certificate.write(make_report(subject=subject), str(tmp_path))
    found = certificate.verify([str(tmp_path)])
    assert {each.subject: [one.number for one in each.certificates] for each in found} == {
        "a/b": [1, 2],
        "a b": [1, 2],
    }
    assert all(each.is_whole for each in found)


def test_audits_that_end_together_take_numbers_one_after_the_other(
    make_report: MakeReport, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda end: certificate.write(make_report(end=end), str(tmp_path)), range(1, 25)))
    (verified,) = certificate.verify([str(tmp_path)])
    assert verified.is_whole
    assert [each.number for each in verified.certificates] == list(range(1, 25))
    assert all(name.endswith(".json") for name in os.listdir(tmp_path))


def test_a_file_is_replaced_and_chained_to_what_it_held(make_report: MakeReport, tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "audit.json")
    first = certificate.write(make_report(), path)
    second = certificate.write(make_report(), path)
    assert second.previous == first.sha256
    assert certificate.read(path).number == 2
    assert os.listdir(tmp_path / "deep") == ["audit.json"]
    with pytest.raises(UsageError, match="holds a certificate of 'orders'"):
        certificate.write(make_report(subject="payments"), path)


# ---------------------------------------------------------------------------- signatures


def keys(directory: Path, name: str) -> tuple[str, str]:
    """Files of a private key and of its public one, as OpenSSL writes them."""
    directory.mkdir(exist_ok=True)
    key = Ed25519PrivateKey.generate()
    private, public = directory / f"{name}.pem", directory / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return str(private), str(public)


@pytest.fixture
def signed(make_report: MakeReport, tmp_path: Path) -> tuple[list[str], str]:
    """Three signed certificates and the file of the public key."""
    private, public = keys(tmp_path / "keys", "audit")
    key = signatures.load_private_key(private)
    return [
        certificate.write(make_report(end=end), str(tmp_path / "c"), key).path for end in (10, 20, 30)
    ], public


def test_a_signed_chain_holds_against_its_key_and_against_no_other(
    signed: tuple[list[str], str], tmp_path: Path
) -> None:
    paths, public = signed
    document = json.loads(Path(paths[0]).read_text(encoding="utf-8"))
    jsonschema.validate(document, closed(SCHEMA), cls=jsonschema.Draft202012Validator)
    assert certificate.verify(paths, key=signatures.load_public_key(public))[0].is_whole
    (unheld,) = certificate.verify(paths)
    assert unheld.is_whole
    assert any("--public-key" in note for note in unheld.notes)
    _, other = keys(tmp_path / "keys", "other")
    (wrong,) = certificate.verify(paths, key=signatures.load_public_key(other))
    assert "number 1 " in wrong.problem
    assert "another key" in wrong.problem


def test_a_whole_chain_made_anew_without_the_private_key_does_not_hold(
    signed: tuple[list[str], str], make_report: MakeReport, tmp_path: Path
) -> None:
    paths, public = signed
    key = signatures.load_public_key(public)
    genuine = [certificate.read(path).document["signature"] for path in paths]
    anew = [certificate.write(make_report(end=end), str(tmp_path / "n")).path for end in (11, 21, 31)]
    assert certificate.verify(anew)[0].is_whole
    assert "is not signed" in certificate.verify(anew, key=key)[0].problem
    stranger = signatures.load_private_key(keys(tmp_path / "keys", "stranger")[0])
    forged = [certificate.write(make_report(end=end), str(tmp_path / "f"), stranger).path for end in (11, 21)]
    assert "another key" in certificate.verify(forged, key=key)[0].problem
    for path, signature in zip(forged, genuine, strict=False):
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        Path(path).write_text(json.dumps({**document, "signature": signature}), encoding="utf-8")
    for held in (key, None):
        assert "not of its hash" in certificate.verify(forged, key=held)[0].problem


@pytest.mark.parametrize("damage", [{}, {"algorithm": "rsa"}, {"public_key": "zz"}, {"signature": "00"}, 7])
def test_a_damaged_signature_breaks_the_chain(signed: tuple[list[str], str], damage: Any) -> None:
    paths, public = signed
    intact = certificate.read(paths[1]).document["signature"]
    broken = {**intact, **damage} if damage and damage != 7 else damage
    change(paths[1], lambda document: document.update(signature=broken))
    for key in (signatures.load_public_key(public), None):
        assert "number 2 " in certificate.verify(paths, key=key)[0].problem


def test_what_is_no_key_is_refused_by_name(tmp_path: Path) -> None:
    private, public = keys(tmp_path, "audit")
    for load, path in (
        (signatures.load_private_key, public),
        (signatures.load_private_key, str(tmp_path / "none")),
        (signatures.load_public_key, private),
    ):
        with pytest.raises(UsageError, match=path):
            load(path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"kind": "other"}',
        '{"kind": "holdfast-audit-certificate", "version": 1}',
        "[" * 100_000,
    ],
)
def test_what_is_no_certificate_is_said_to_be_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "orders-000001.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CertificateError, match="no certificate"):
        certificate.read(str(path))
    (verified,) = certificate.verify([str(path)])
    assert not verified.is_whole


def test_a_damaged_certificate_among_good_ones_breaks_their_chain(chain: list[str]) -> None:
    Path(chain[2]).write_text("{", encoding="utf-8")
    (verified,) = certificate.verify([os.path.dirname(chain[0])])
    assert chain[2] in verified.problem


def test_a_name_that_is_no_unicode_is_kept_and_hashed(make_report: MakeReport, tmp_path: Path) -> None:
    odd = Finding(Fate.EXTRA, "parquet", count=1, detail="part-\udcff\U0001f600.parquet")
    written = certificate.write(make_report(odd), str(tmp_path))
    assert Report.from_json(certificate.read(written.path).document["report"]).findings == (odd,)
    assert certificate.verify([written.path])[0].is_whole


def test_an_older_or_newer_version_is_not_guessed_at(chain: list[str]) -> None:
    change(chain[0], lambda document: document.update(version=3))
    with pytest.raises(CertificateError, match="version 3"):
        certificate.read(chain[0])
