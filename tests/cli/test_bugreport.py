"""A bug report has what is asked for first, and none of the secrets that lie about."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import __version__
from holdfast.audit.certificate import canonical, content_hash

Run = Callable[..., subprocess.CompletedProcess[bytes]]

SECRETS = {
    "jaas": "Tr0ub4dor&3-jaas",
    "key password": "key-password-9431",
    "keystore": "keystore-pass word",
    "unknown name": "who-knows-what-55",
    "literal": "literal-in-yaml-77",
    "folded": "folded secret of two lines",
    "address": "p@ss/word-88",
    "variable": "from-the-environment-66",
    "file": "from-a-file-44",
    "database": "in-the-database-33",
    "log only": "only-in-the-log-22",
    "bearer": "eyJhbGciOi.J9-bearer",
    "private key": "MIIEvQIBADANBgkqhkiG9w0",
    "digest key": "digest-key-of-rows-11",
    "json": 'quote"in-json-99',
}
SEEN_BY_CONTEXT = ("log only", "bearer", "private key")
"""Nobody knows them but by what stands around them."""

SERVER = f"""\
num.io.threads=3
log.dirs=/var/lib/holdfast
ssl.key.password={SECRETS["key password"]}
ssl.keystore.password={SECRETS["keystore"]}
sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required username="me" \
password="{SECRETS["jaas"]}";
my.vault.thing={SECRETS["unknown name"]}
"""
PIPELINE = f"""\
name: orders
digest_key: {SECRETS["digest key"]}
source:
  bootstrap_servers: kafka:9092
  settings:
    sasl.password: {SECRETS["literal"]}
    ssl.key.password: file:secret.txt
    registry.token: >-
      folded secret
      of two lines
sinks:
  - postgres: {{url: "postgresql://me:{SECRETS["address"]}@db/shop", table: orders}}
  - postgres: {{url: "postgresql://me:${{SHOP_PW}}@db/shop", table: more}}
"""


@pytest.fixture
def estate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOP_PW", SECRETS["variable"])
    monkeypatch.setenv("HOLDFAST_DATABASE", f"postgresql://me:{SECRETS['database']}@db/shop")
    Path("server.properties").write_text(SERVER)
    Path("orders.yaml").write_text(PIPELINE)
    Path("client.json").write_text(json.dumps({"sasl.password": SECRETS["json"], "group.id": "billing"}))
    Path("secret.txt").write_text(SECRETS["file"] + "\n")
    lines = [f"line {number}" for number in range(300)]
    lines += [
        f"INFO said {name}: {secret}" for name, secret in SECRETS.items() if name not in SEEN_BY_CONTEXT
    ]
    lines += [
        f'connecting with password="{SECRETS["log only"]}" to db',
        f"dsn host=db password={SECRETS['log only']} user=me",
        f"fetch https://me:{SECRETS['log only']}@registry/subjects?token={SECRETS['log only']}&x=1",
        f'{{"api_key": "{SECRETS["log only"]}", "sasl.password": {json.dumps(SECRETS["json"])}}}',
        f"Authorization: Bearer {SECRETS['bearer']}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRETS['private key']}\n-----END RSA PRIVATE KEY-----",
        "WARN the last line",
    ]
    Path("holdfast.log").write_text("\n".join(lines) + "\n")
    Path("proofs").mkdir()
    document = {
        "kind": "holdfast-audit-certificate",
        "version": 1,
        "chain": {"subject": "orders", "number": 1, "previous": None},
        "report": {"verdict": "failed"},
    }
    document["sha256"] = content_hash(document)
    Path("proofs", "orders-000001.json").write_bytes(canonical(document))
    Path("data", "orders-0").mkdir(parents=True)
    Path("data", "meta.properties").write_text("#\nversion=1\ncluster.id=abc\nnode.id=1\n")
    return tmp_path


def report(run: Run) -> str:
    done = run(
        "bugreport",
        *("server.properties", "orders.yaml", "client.json"),
        *("--log", "holdfast.log", "--data-dir", "data", "--certificate", "proofs"),
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode()


def test_it_has_versions_settings_the_end_of_the_log_and_the_last_verdicts(
    estate: Path, run_here_anywhere: Run
) -> None:
    text = report(run_here_anywhere)
    for expected in (
        f"holdfast {__version__}\ncommit ",
        "confluent-kafka ",
        "num.io.threads = 3",
        "log.dirs = /var/lib/holdfast",
        "source.bootstrap_servers = kafka:9092",
        "group.id = billing",
        "postgresql://me:${SHOP_PW}@db/shop",
        "cluster.id=abc",
        "1 directories of partitions",
        "orders number 1: failed",
        "WARN the last line",
        "HOLDFAST_DATABASE=",
    ):
        assert expected in text
    assert "line 10\n" not in text  # 200 lines of 320
    assert "line 250\n" in text


def test_no_planted_secret_is_in_it(estate: Path, run_here_anywhere: Run) -> None:
    text = report(run_here_anywhere)
    forms = {name: (secret, json.dumps(secret)[1:-1]) for name, secret in SECRETS.items()}
    assert [name for name, found in forms.items() if any(form in text for form in found)] == []


def test_the_report_hides_by_itself_and_not_because_nothing_is_shown(
    estate: Path, run_here_anywhere: Run
) -> None:
    shown = report(run_here_anywhere)
    for line in (
        "ssl.key.password = ***",
        "my.vault.thing = ***",
        "source.settings.sasl.password = ***",
        "digest_key = ***",
        "INFO said jaas: ***",
        "user=me",
        "https://me:***@registry/subjects",
    ):
        assert line in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere.properties",), b"nowhere.properties: cannot be read: No such file"),
        (("--log", "nowhere.log"), b"--log nowhere.log: cannot be read: No such file"),
        (("--data-dir", "nowhere"), b"--data-dir nowhere: there is no such directory"),
    ],
)
def test_what_cannot_be_read_is_named(
    estate: Path, run_here_anywhere: Run, arguments: tuple[str, ...], words: bytes
) -> None:
    done = run_here_anywhere("bugreport", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == b""
