"""A schema registry for tests, in this process: Confluent's REST interface, as far as clients use it.

    with SchemaRegistry() as registry:
        client = SchemaRegistryClient({"url": registry.url})    # confluent-kafka's, or any other
        ...
        registry.stop()     # away: connections are refused
        registry.start()    # the same schemas, the same port

It keeps everything in memory and serves the loopback interface only. What it keeps and refuses is told in
`schema_subjects`. Left out: contexts, modes other than READWRITE, rules, metadata, associations of topics.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple, Self, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

from holdfast.testing.schema_subjects import (
    TYPES,
    Readable,
    Refused,
    Schema,
    Subjects,
    Version,
    avro_can_read,
    schema_of,
)

CONTENT_TYPE: Final = "application/vnd.schemaregistry.v1+json"
BODY_BYTES_MAX: Final = 16 << 20
STOP_POLL_SECONDS: Final = 0.02


class Request(NamedTuple):
    """What was asked: the names in the path, the query, and the body."""

    names: Mapping[str, str]
    query: Mapping[str, str]
    body: Mapping[str, Any]

    def is_set(self, name: str) -> bool:
        return self.query.get(name, "false").lower() == "true"

    @property
    def subject(self) -> str:
        return self.names["subject"]

    @property
    def version(self) -> str:
        return self.names["version"]

    @property
    def schema_id(self) -> int:
        return int(self.names["id"])


Answer: TypeAlias = Callable[[Subjects, Request], Any]


def _as_schema(schema: Schema) -> dict[str, Any]:
    """As the real one does, without what is the default."""
    fields: dict[str, Any] = {"schema": schema.text}
    if schema.kind != "AVRO":
        fields["schemaType"] = schema.kind
    if schema.references:
        fields["references"] = [each._asdict() for each in schema.references]
    return fields


def _as_version(version: Version) -> dict[str, Any]:
    place = {"subject": version.subject, "version": version.number, "id": version.schema_id}
    return {**place, **_as_schema(version.schema)}


def _compatibility(subjects: Subjects, asked: Request) -> dict[str, Any]:
    reasons = subjects.incompatibilities(asked.subject, schema_of(asked.body), asked.names.get("version"))
    answer: dict[str, Any] = {"is_compatible": not reasons}
    return {**answer, "messages": reasons} if asked.is_set("verbose") else answer


def _set_level(subjects: Subjects, asked: Request) -> dict[str, str]:
    level = str(asked.body.get("compatibility", "")).upper()
    subjects.set_level(level, asked.names.get("subject"))
    return {"compatibility": level}


def _level(subjects: Subjects, asked: Request) -> dict[str, str]:
    level = subjects.level_of(asked.subject, default=asked.is_set("defaultToGlobal"))
    return {"compatibilityLevel": level}


_SUBJECT: Final = r"/subjects/(?P<subject>[^/]+)"
_VERSION: Final = rf"{_SUBJECT}/versions/(?P<version>[^/]+)"
_ID: Final = r"/schemas/ids/(?P<id>\d+)"

ROUTES: Final[tuple[tuple[str, str, Answer], ...]] = (
    ("GET", "/", lambda subjects, asked: {}),
    ("GET", "/subjects", lambda subjects, asked: subjects.subjects(deleted=asked.is_set("deleted"))),
    (
        "POST",
        _SUBJECT,
        lambda subjects, asked: _as_version(
            subjects.lookup(asked.subject, schema_of(asked.body), deleted=asked.is_set("deleted"))
        ),
    ),
    (
        "DELETE",
        _SUBJECT,
        lambda subjects, asked: subjects.delete_subject(asked.subject, permanent=asked.is_set("permanent")),
    ),
    (
        "GET",
        rf"{_SUBJECT}/versions",
        lambda subjects, asked: subjects.versions(asked.subject, deleted=asked.is_set("deleted")),
    ),
    (
        "POST",
        rf"{_SUBJECT}/versions",
        lambda subjects, asked: _as_version(subjects.register(asked.subject, schema_of(asked.body))),
    ),
    (
        "GET",
        _VERSION,
        lambda subjects, asked: _as_version(
            subjects.version(asked.subject, asked.version, deleted=asked.is_set("deleted"))
        ),
    ),
    (
        "GET",
        rf"{_VERSION}/schema",
        lambda subjects, asked: subjects.version(asked.subject, asked.version).schema.text,
    ),
    (
        "GET",
        rf"{_VERSION}/referencedby",
        lambda subjects, asked: subjects.referrers(asked.subject, asked.version),
    ),
    (
        "DELETE",
        _VERSION,
        lambda subjects, asked: subjects.delete(
            asked.subject, asked.version, permanent=asked.is_set("permanent")
        ),
    ),
    ("GET", "/schemas/types", lambda subjects, asked: list(TYPES)),
    ("GET", _ID, lambda subjects, asked: _as_schema(subjects.schema(asked.schema_id))),
    ("GET", rf"{_ID}/schema", lambda subjects, asked: subjects.schema(asked.schema_id).text),
    (
        "GET",
        rf"{_ID}/subjects",
        lambda subjects, asked: sorted({each.subject for each in subjects.places(asked.schema_id)}),
    ),
    (
        "GET",
        rf"{_ID}/versions",
        lambda subjects, asked: [
            {"subject": each.subject, "version": each.number} for each in subjects.places(asked.schema_id)
        ],
    ),
    ("POST", rf"/compatibility{_VERSION}", _compatibility),
    ("POST", rf"/compatibility{_SUBJECT}/versions", _compatibility),
    ("GET", "/config", lambda subjects, asked: {"compatibilityLevel": subjects.level}),
    ("PUT", "/config", _set_level),
    ("DELETE", "/config", lambda subjects, asked: {"compatibilityLevel": subjects.forget_level()}),
    ("GET", r"/config/(?P<subject>[^/]+)", _level),
    ("PUT", r"/config/(?P<subject>[^/]+)", _set_level),
    (
        "DELETE",
        r"/config/(?P<subject>[^/]+)",
        lambda subjects, asked: {"compatibilityLevel": subjects.forget_level(asked.subject)},
    ),
    ("GET", r"/mode(/(?P<subject>[^/]+))?", lambda subjects, asked: {"mode": "READWRITE"}),
)
_COMPILED: Final = tuple((method, re.compile(path), answer) for method, path, answer in ROUTES)


def respond(subjects: Subjects, method: str, target: str, body: bytes) -> tuple[int, Any]:
    """Status and content of the answer to a request."""
    asked_for = urlsplit(target)
    path = asked_for.path.rstrip("/") or "/"
    try:
        for known_method, pattern, answer in _COMPILED:
            match = pattern.fullmatch(path)
            if match is not None and known_method == method:
                names = {key: unquote(name) for key, name in match.groupdict().items() if name is not None}
                query = {name: values[-1] for name, values in parse_qs(asked_for.query).items()}
                return 200, answer(subjects, Request(names, query, _parse_body(body)))
        raise Refused(404, 404, f"there is no {method} {path} here")
    except Refused as refused:
        return refused.status, {"error_code": refused.code, "message": str(refused)}


def _parse_body(body: bytes) -> Mapping[str, Any]:
    if not body:
        return {}
    try:
        parsed = json.loads(body)
    except ValueError as error:
        raise Refused(400, 400, f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise Refused(400, 400, "the body is no JSON object")
    return parsed


class SchemaRegistry:
    def __init__(self, *, can_read: Readable = avro_can_read) -> None:
        """`can_read` decides what is compatible."""
        self.subjects = Subjects(can_read)
        """What is registered, for tests to look at and to fill beforehand, while nobody asks over the network."""
        self.requests: list[tuple[str, str]] = []
        """Method and path of every request so far."""
        self._lock = threading.Lock()
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The address of a registry that was started."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> Self:
        """Serve, at the port of the last time."""
        if self._server is None:
            self._server = _Server(("127.0.0.1", self._port), _handler(self))
            self._port = self._server.server_port
            self._thread = threading.Thread(
                target=self._server.serve_forever,
                args=(STOP_POLL_SECONDS,),
                name="schema-registry",
                daemon=True,
            )
            self._thread.start()
        return self

    def stop(self) -> None:
        """Serve no more; what is registered stays."""
        server, self._server = self._server, None
        if server is not None:
            assert self._thread is not None
            server.shutdown()
            server.server_close()
            self._thread.join()

    def respond(self, method: str, target: str, body: bytes) -> tuple[int, Any]:
        with self._lock:
            self.requests.append((method, urlsplit(target).path))
            return respond(self.subjects, method, target, body)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    """Connections that clients keep open do not hold up the end."""


def _handler(registry: SchemaRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if length > BODY_BYTES_MAX:
                self.close_connection = True
                return self._send(413, {"error_code": 413, "message": "the body is too large"})
            if registry._server is not self.server:
                # Stopped while this connection was open.
                self.close_connection = True
                return None
            return self._send(*registry.respond(self.command, self.path, self.rfile.read(length)))

        def _send(self, status: int, content: Any) -> None:
            # A schema asked for by itself comes as it is.
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Tests read answers, not logs."""

    return Handler
