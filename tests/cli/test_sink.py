"""`holdfast sink migrate` makes the tables of a sink, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from holdfast.client.database.store import open_database


def migrate(url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli", "sink", "migrate", "--database", url]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_tables_are_made_and_found_again(tmp_path: Path) -> None:
    path = str(tmp_path / "orders.sqlite")
    first, second = migrate(path), migrate(path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "now at version 1" in first.stdout
    assert "version 1 already" in second.stdout
    database = open_database(path)
    database.connect()
    database.check_schema()
    database.close()


def test_a_database_that_does_not_answer_is_named_without_its_password() -> None:
    done = migrate("postgresql://app:secret@127.0.0.1:1/orders")
    assert done.returncode == 3
    assert "app:***@127.0.0.1:1/orders" in done.stderr
    assert "secret" not in done.stderr


def test_another_kind_of_database_is_refused() -> None:
    done = migrate("mysql://app:secret@127.0.0.1/orders")
    assert (done.returncode, "secret" in done.stderr) == (2, False)
    assert "postgresql://" in done.stderr
