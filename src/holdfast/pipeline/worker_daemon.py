"""Spark's daemon of Python workers, with what every worker of ours needs loaded before it forks them.

Importing Arrow and the compiled decoder takes a worker more than a second; the daemon does it once, and each worker it
forks has them from its first task on. After each task Spark's loop has a worker look for garbage: 30 ms as long as that
goes through these modules, whose objects are therefore frozen, and in the first round a copy of every page they are on.
On a cluster the daemon is started by `cluster.worker_start`, out of the archive that is shipped with the job.
"""

from __future__ import annotations


def main() -> None:
    import gc

    import pyarrow.parquet  # noqa: F401
    from pyspark import daemon

    from holdfast.reader import warm

    warm()
    gc.collect()  # What is garbage now would be kept for ever.
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
