"""The example that `holdfast pipeline init` writes: it runs against `holdfast serve` as it stands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from holdfast.errors import UsageError

DEFINITION: Final = """\
# Orders of a topic to Parquet files and a second topic, each exactly once.
#   holdfast pipeline check orders.yaml
#   holdfast pipeline test orders.test.yaml
#   holdfast pipeline run orders.yaml
pipeline: orders

source:
  topics: [orders]
  bootstrap: ${KAFKA:-127.0.0.1:9092}
  value:
    format: json
    unknown: reject            # a field that is not listed makes a dead letter; or keep, ignore
    fields:
      id: long
      customer: string
      amount: double
      at: timestamp
      note: string?            # a '?' makes it optional

steps:
  - expect:
      name: positive-amount
      that: amount > 0
      else: quarantine         # to the dead letter topic, orders-dlt; or warn, drop, fail
  - filter:
      name: no-tests
      where: customer <> 'test'
  - sql:
      name: with-day
      query: SELECT *, to_date(at) AS day FROM input
  - python:
      name: with-tax
      file: steps.py
      function: with_tax
      schema:                  # the columns that it returns
        id: long
        customer: string
        amount: double
        at: timestamp
        note: string
        day: date
        tax: double

sinks:
  - parquet:
      path: out/orders
      partition_by: [day]
  - kafka:
      topic: orders-clean
      key: customer

trigger: available-now         # ends when all is done; 10s goes on
"""

STEPS: Final = '''\
"""Functions of the pipeline in orders.yaml."""

import pyarrow as pa
import pyarrow.compute as pc


def with_tax(rows: pa.RecordBatch) -> pa.RecordBatch:
    """One batch of rows in, one out; `_hf`, the place each row comes from, goes through."""
    return rows.append_column("tax", pc.multiply(rows["amount"], 0.19))
'''

README: Final = (
    "1. `holdfast serve --data-dir data &`, then the topics: "
    "`for t in orders orders-clean orders-dlt; do holdfast topics create --topic $t; done`\n"
    '2. An order: `echo \'{"id":1,"customer":"ada","amount":9.5,"at":"2026-01-31T12:00:00Z"}\' '
    "| holdfast produce --topic orders`\n"
    "3. `holdfast pipeline run orders.yaml`: rows are in `out/orders` and `orders-clean`; "
    "`holdfast dlq list` shows what was not taken.\n"
)

CASES: Final = """\
# holdfast pipeline test orders.test.yaml
pipeline: orders.yaml
cases:
  - name: a good order gets its day and its tax
    records:
      - value: {id: 1, customer: ada, amount: 100.0, at: 2026-01-31T12:00:00Z}
    expect:
      parquet:
        - {id: 1, day: 2026-01-31, tax: 19.0}
      kafka:
        - {key: ada}
      dead_letters: []

  - name: what is wrong becomes a dead letter, and tests are left out
    records:
      - value: not json
      - value: {id: 2, customer: bob, amount: -1.0, at: 2026-01-31T12:00:00Z}
      - value: {id: 3, customer: test, amount: 1.0, at: 2026-01-31T12:00:00Z}
    expect:
      parquet: []
      dead_letters:
        - {reason: parse}
        - {reason: positive-amount}
"""

FILES: Final = {"orders.yaml": DEFINITION, "steps.py": STEPS, "orders.test.yaml": CASES, "README.md": README}


def write_files(directory: str, files: Mapping[str, str] = FILES) -> list[str]:
    """Write the example's files, or these; nothing at all when one of them is there already."""
    taken = [name for name in files if os.path.lexists(os.path.join(directory, name))]
    if taken:
        raise UsageError(
            f"{', '.join(os.path.join(directory, name) for name in taken)}: there already, and not overwritten; "
            "name another directory"
        )
    os.makedirs(directory, exist_ok=True)
    written = []
    for name, text in files.items():
        path = os.path.join(directory, name)
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
        written.append(path)
    return written
