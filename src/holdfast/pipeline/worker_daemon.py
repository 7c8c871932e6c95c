"""Spark's daemon of Python workers, with what every worker of ours needs loaded before it forks them.

Importing Arrow and the compiled decoder takes a worker more than a second; the daemon does it once, and each worker it
forks has them from its first task on. On a cluster it is started by `cluster.worker_start`, out of the archive that is
shipped with the job.
"""

from __future__ import annotations


def main() -> None:
    import pyarrow.parquet  # noqa: F401
    from pyspark import daemon

    from holdfast.reader import warm

    warm()
    daemon.manager()


if __name__ == "__main__":
    main()
