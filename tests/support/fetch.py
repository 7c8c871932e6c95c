"""`python -m tests.support.fetch`: all that tests need and pip does not bring, so that no test fetches or compiles it.

Whatever cannot be had here is named in one line, and the tests that need it name it again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.support import apicurio

from holdfast.errors import HoldfastError
from holdfast.pipeline.cluster.packaging import machine_code
from holdfast.pipeline.java import install_java
from holdfast.testing.apache import jars
from holdfast.testing.spark_connector import connector_jars

NEEDED: tuple[Callable[[], object], ...] = (
    machine_code,
    install_java,
    jars,
    connector_jars,
    apicurio.application,
)


def main() -> int:
    missing = 0
    for fetch in NEEDED:
        try:
            fetch()
        except HoldfastError as error:
            print(error, file=sys.stderr)
            missing += 1
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
