"""`holdfast serve`: parse the command line into `ServeOptions` and hand it to the server.

argparse, not typer: this module is on the path of a broker's start, where every import counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.errors import ConfigError
from holdfast.saying import Level

SUMMARY = "Start the broker: one durable node in this process."
EXAMPLES = """examples:
  holdfast serve --data-dir /var/lib/holdfast
  holdfast serve --config server.properties --override log.retention.hours=24
  holdfast serve --data-dir ./data --listen 127.0.0.1:0
  holdfast serve --data-dir /var/lib/holdfast --metrics 9404
"""


@dataclass(frozen=True)
class ServeOptions:
    """What `holdfast serve` was asked for, still in Kafka's own words."""

    data_dir: str | None = None
    listen: list[str] = field(default_factory=list)
    config_path: str | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    log_level: Level = Level.INFO
    log_format: str = "text"
    accept_loss: list[str] = field(default_factory=list)
    serve_unenforced: list[str] = field(default_factory=list)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="holdfast serve",
        description=SUMMARY,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="where the log directories live; the same as log.dirs in --config (default: ./holdfast-data)",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="address to listen on; may be repeated; port 0 takes a free one (default: loopback, port 9092)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a server.properties file with Kafka's property names"
    )
    parser.add_argument(
        "--override",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set one property, over --config; may be repeated",
    )
    parser.add_argument(
        "--log-level",
        type=str.upper,
        metavar="LEVEL",
        choices=[level.name for level in Level],
        default=Level.INFO.name,
        help="the least of what standard error gets: DEBUG, INFO, WARN or ERROR (default: INFO)",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="how standard error gets it: text, or json, an object a line (default: text)",
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="show metrics and health to Prometheus and supervisors there; a port alone is for this machine only, "
        "0 takes a free one (default: nowhere)",
    )
    parser.add_argument(
        "--cluster-id",
        metavar="ID",
        help="the cluster that the directories must belong to: an empty or foreign one is refused "
        "(default: an empty directory becomes a new cluster)",
    )
    parser.add_argument(
        "--accept-loss",
        metavar="NAME",
        action="append",
        default=[],
        help="give up what is missing: a log directory by its id, a partition as topic-N; may be repeated. "
        "A start that misses something says which name; give it once",
    )
    parser.add_argument(
        "--serve-unenforced",
        metavar="KIND",
        action="append",
        default=[],
        choices=("acls", "scram", "quotas", "tokens"),
        help="serve a directory of Apache Kafka's although nobody enforces its acls, scram credentials, quotas or "
        "tokens here; may be repeated (default: such a directory is refused)",
    )
    return parser


def parse_options(arguments: Sequence[str]) -> ServeOptions:
    given = build_parser().parse_args(arguments)
    overrides: dict[str, str] = {}
    for text in given.override:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--override {text!r} is not NAME=VALUE, for example log.retention.hours=24")
        overrides[name.strip()] = value.strip()
    if given.metrics is not None:
        overrides["holdfast.metrics.listener"] = given.metrics
    if given.cluster_id is not None:
        overrides["holdfast.cluster.id"] = given.cluster_id
    return ServeOptions(
        data_dir=given.data_dir,
        listen=given.listen,
        config_path=given.config,
        overrides=overrides,
        log_level=Level[given.log_level],
        log_format=given.log_format,
        accept_loss=given.accept_loss,
        serve_unenforced=given.serve_unenforced,
    )


def serve_command(arguments: Sequence[str]) -> int | None:
    options = parse_options(arguments)
    from holdfast.broker.server.run import serve

    code: int | None = serve(options)
    return code
