"""Processes of ours that start at once: forked from one that has done the imports.

Most of what a short command or a broker under test costs is the start of an interpreter and its imports. The nursery
is a process that has done both and waits. Asked for `python -m MODULE …`, it forks, and the child goes on as that
command would, with the descriptors, the environment and the directory it was given, to its end: threads are joined,
exit functions run, streams flushed. Only the taking apart of a hundred modules, of which nobody sees anything, is left
to the kernel.

What comes of it is the asker's own child, and a `subprocess.Popen` to whoever waits for it, kills or signals it.
For that the nursery forks twice, and the asker adopts the orphan, being a subreaper (prctl(2)) for that moment.

Rules kept: the nursery has one thread and no connection, so that a child inherits neither; it runs no command itself;
it ends when the socket to its asker closes, however that dies. A test whose point is the start itself, or what an
interpreter makes of its environment, starts a process of its own. Other systems than Linux start every process anew.

Once it was asked a few times, the nursery spends its idle time on the schemas of Kafka's messages, one by one, which
every broker would load for itself otherwise: together they take a second.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from holdfast.testing.processes import ask_to_die

REQUEST_BYTES_MAX: Final = 128 << 10
"""A command line and an environment in one datagram; what comes to more is started the usual way."""
_PR_SET_CHILD_SUBREAPER: Final = 36
_STREAMS: Final = 3
_ADOPTION_SECONDS_MAX: Final = 10.0
_READ_AT_START: Final = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_")
"""What is read by an interpreter that starts: a command for which these differ gets a start of its own."""
_NURSE: Final = f"""import sys
for module in ("hypothesis", "hypothesis.strategies"):
    sys.modules[module] = None
from {__name__} import nurse
nurse()
"""
"""As in the command's own start: kio is quicker where it finds no hypothesis."""
_WORTH_LOADING_FROM: Final = 4
"""With this order the schemas begin to pay: a session with fewer brokers is sooner over without them."""
_IDLE_MS: Final = 20
"""How long nobody asks before the nursery loads one more schema."""


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(f"prctl({option}, {value}) failed")


class Order(NamedTuple):
    """One process to fork."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    dies_with_parent: bool


def _can_be_forked(command: Sequence[str], options: Mapping[str, Any]) -> bool:
    environment, preexec = options.get("env") or os.environ, options.get("preexec_fn")
    return (
        sys.platform == "linux"
        and list(command[:2]) == [sys.executable, "-m"]
        and command[2].startswith(("holdfast.", "tests.support."))
        and options.keys() <= {"stdin", "stdout", "stderr", "env", "cwd", "preexec_fn"}
        and (preexec is None or getattr(preexec, "func", None) is ask_to_die)
        and _read_at_start(environment) == _read_at_start(os.environ)
        and sum(map(len, command)) + sum(len(name) + len(value) for name, value in environment.items())
        < REQUEST_BYTES_MAX // 2
    )


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


class ForkedProcess(subprocess.Popen[bytes]):
    """A child that the nursery forked.

    It is a `Popen` by its public attributes and methods, which stand here as far as they need more than the number of
    a child: what `Popen` does inside itself is neither called nor replaced.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        preexec_fn: Callable[[], object] | None = None,
        nursery: Nursery,
    ) -> None:
        self.args = args
        self.returncode = None
        self._reaping = threading.Lock()
        order = Order(
            module=args[2],
            arguments=list(args[3:]),
            environment=dict(os.environ if env is None else env),
            directory=os.fspath(cwd or os.getcwd()),
            dies_with_parent=preexec_fn is not None,
        )
        with ExitStack() as theirs:
            inner, self.stdin = _stream(theirs, stdin, 0)
            outer, self.stdout = _stream(theirs, stdout, 1)
            error, self.stderr = (outer, None) if stderr == subprocess.STDOUT else _stream(theirs, stderr, 2)
            self.pid = nursery.fork(order, [inner, outer, error])

    def poll(self) -> int | None:
        if self._reaping.acquire(blocking=False):
            try:
                self._reap(os.WNOHANG)
            finally:
                self._reaping.release()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and self.returncode is None:
            ended = select.poll()
            descriptor = os.pidfd_open(self.pid)
            try:
                ended.register(descriptor, select.POLLIN)
                if not ended.poll(max(0.0, timeout) * 1000):
                    raise subprocess.TimeoutExpired(self.args, timeout)
            finally:
                os.close(descriptor)
        with self._reaping:
            self._reap(0)
        assert self.returncode is not None
        return self.returncode

    def _reap(self, options: int) -> None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)

    def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002
        deadline = None if timeout is None else time.monotonic() + timeout
        read: dict[int, bytes] = {}
        work: list[Callable[[], None]] = []
        if self.stdin is not None and not self.stdin.closed:
            work.append(partial(_write, self.stdin, input or b""))
        for number, stream in enumerate((self.stdout, self.stderr)):
            if stream is not None and not stream.closed:
                work.append(partial(_read, stream, read, number))
        threads = [threading.Thread(target=each, daemon=True) for each in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return (
            None if self.stdout is None else read.get(0, b""),
            None if self.stderr is None else read.get(1, b""),
        )

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr, self.stdin):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self.wait()


def _stream(theirs: ExitStack, given: Any, number: int) -> tuple[int, IO[bytes] | None]:
    """What the child gets for one of its streams, closed here when it has it; and our end of a pipe."""
    if given is None:
        return number, None
    if given == subprocess.DEVNULL:
        descriptor = os.open(os.devnull, os.O_RDWR)
        theirs.callback(os.close, descriptor)
        return descriptor, None
    if given != subprocess.PIPE:
        return given if isinstance(given, int) else given.fileno(), None
    reading, writing = os.pipe()
    inner, outer, mode = (reading, writing, "wb") if number == 0 else (writing, reading, "rb")
    theirs.callback(os.close, inner)
    return inner, open(outer, mode)


def _write(stream: IO[bytes], data: bytes) -> None:
    with suppress(BrokenPipeError), stream:
        stream.write(data)


def _read(stream: IO[bytes], read: dict[int, bytes], number: int) -> None:
    with stream:
        read[number] = stream.read()


class Nursery:
    """The asker's side: started by the first order, and anew in a process that was forked from its owner."""

    def __init__(self, preloaded: str, directory: Path) -> None:
        """`preloaded` is a module whose import does the imports; `directory` is where it is found."""
        self._preloaded = preloaded
        self._directory = directory
        self._lock = threading.Lock()
        self._owner_pid = 0
        self._process: subprocess.Popen[bytes]
        self._socket: socket.socket

    def open_process(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """`subprocess.Popen` of `python -m holdfast…`, forked where that makes no difference to the command."""
        if _can_be_forked(command, options):
            return ForkedProcess(command, nursery=self, **options)
        return subprocess.Popen(command, **options)

    def fork(self, order: Order, streams: Sequence[int]) -> int:
        with self._lock:
            if self._owner_pid != os.getpid():
                self._start()
            request = json.dumps(order).encode()
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [request], list(streams))
                answer = self._socket.recv(64)
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)
            if not answer:
                self._owner_pid = 0  # the next order gets another one
                raise OSError("the nursery of processes has died; what it said is above")
        return int(answer)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _NURSE, str(theirs.fileno()), self._preloaded],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=self._directory,  # wherever a test has gone
            )
        self._socket = ours
        self._owner_pid = os.getpid()


NURSERY: Final = Nursery("holdfast.testing.faulty_serve", Path(__file__).parents[2])
"""For the brokers of the pytest plugin."""


# The nursery's side.


def _wait_for_order(asker: socket.socket) -> Order | None:
    """Fork whatever is asked for; returns an order in the process that is to carry it out, and None at the end."""
    from holdfast.broker.server.preload import preload_one_by_one  # here: the asker's side needs none of it

    owner_pid = os.getppid()
    unloaded = preload_one_by_one()
    asked = select.poll()
    asked.register(asker, select.POLLIN)
    for number in count(1):
        while number >= _WORTH_LOADING_FROM and not asked.poll(_IDLE_MS) and next(unloaded, None):
            pass
        request, streams, _, _ = socket.recv_fds(asker, REQUEST_BYTES_MAX, _STREAMS)
        if not request:
            return None
        order = Order(*json.loads(request))
        _load_for(order.module)
        told, telling = os.pipe()
        middle = os.fork()
        if middle == 0:
            child = os.fork()
            if child != 0:
                os.write(telling, str(child).encode())
                os._exit(0)
            asker.close()
            os.close(told)
            os.close(telling)
            _become(order, streams, owner_pid)
            return order
        os.waitpid(middle, 0)
        # Only now is the child an orphan, and its asker its parent.
        asker.send(os.read(told, 64))
        for descriptor in (told, telling, *streams):
            os.close(descriptor)
    raise AssertionError("there is always another order, or the end")


def _load_for(module: str) -> None:
    """What a module of the tests needs stays for the next of its kind; it itself runs anew in every child."""
    if module.startswith(("holdfast.testing.", "tests.support.")) and module not in _loaded_for:
        importlib.import_module(module)
        del sys.modules[module]
        _loaded_for.add(module)


_loaded_for: set[str] = set()


def _become(order: Order, streams: Sequence[int], parent_pid: int) -> None:
    deadline = time.monotonic() + _ADOPTION_SECONDS_MAX
    while os.getppid() != parent_pid:  # the process in between ends at once, unless the asker did before
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0)
    if order.dies_with_parent:
        ask_to_die(parent_pid, signal.SIGKILL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order.environment)
    time.tzset()
    os.chdir(order.directory)


def nurse() -> None:
    """The nursery's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the asker, whose end is the nursery's
    importlib.import_module(sys.argv[2])
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as asker:
        order = _wait_for_order(asker)
    if order is not None:
        sys.argv = [order.module, *order.arguments]
        _end(_code_of(order.module))


def _code_of(module: str) -> int:
    """Run it; whatever it raises but an exit with a code is for the interpreter to tell."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        return end.code or 0
    return 0


def _end(code: int) -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)  # the interpreter's own end knows what to say of a stream that is gone
    os._exit(code & 0xFF)
