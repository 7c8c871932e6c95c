"""The decoder's machine code: made once by numba, kept on disk, loaded in milliseconds without it.

Every process that reads pays for this start, and a Spark job starts many. numba takes a quarter of a second to import
and seconds to compile, so the object code it makes is kept in a file and later linked by LLVM alone. The file's name
holds a digest of everything the code depends on: the sources, LLVM's version, and the processor with its features. Its
first bytes are a digest of the rest, so that a file cut short is rebuilt and not run.

Code is loaded from places that nobody but us, root or the package's owner can write to: beside the package, in the
user's cache directory, or in a private directory under the temporary one. `HOLDFAST_CACHE_DIR` names another. Where
none can be written to, the code is compiled anew in each process, which works and is slow.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np

from holdfast.errors import from_extra

CACHE_DIRECTORY: Final = "HOLDFAST_CACHE_DIR"
_HERE: Final = os.path.dirname(os.path.abspath(__file__))
_SOURCES: Final = ("kernel_source.py", "layout.py")
_DIGEST_BYTES: Final = 32


class Kernel(NamedTuple):
    """The functions of `kernel_source` as machine code; each takes integers of 64 bits and returns a status."""

    survey: Function
    parse: Function
    gather: Function
    fill_headers: Function


class Function:
    """One function of the machine code. The interpreter's lock is free while it runs."""

    __slots__ = ("_address", "_name")

    def __init__(self, name: str, address: int) -> None:
        self._name = name
        self._address = address

    def __call__(self, *parameters: int) -> int:
        left = np.zeros(2, np.int64)
        address = left.ctypes.data
        call = _prototype(len(parameters))(self._address)
        if call(address, address + 8, *map(int, parameters)):
            raise RuntimeError(f"the machine code of {self._name} failed")
        return int(left[0])


@cache
def _prototype(parameters: int) -> Any:
    """Before its parameters, the code is told where to leave its status, and an error that it never raises."""
    return ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * (2 + parameters))


@cache
def load() -> Kernel:
    """The reader's machine code."""
    return Kernel(*load_functions("kernel", Kernel._fields, _SOURCES, _reader_functions))


def _reader_functions() -> Mapping[str, Callable[..., int]]:
    from holdfast.reader import kernel_source

    return vars(kernel_source)


def load_functions(
    label: str,
    names: Sequence[str],
    sources: Sequence[str],
    functions: Callable[[], Mapping[str, Callable[..., int]]],
) -> list[Function]:
    """Machine code of the functions so named: from disk where it was kept, else made now and kept where that works.

    `sources` are the files that the code depends on (absolute, or beside this one); `functions` is called only when it
    has to be made, and imports numba.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name = f"{label}-{_fingerprint(sources)}.o"
    code = _kept(name)
    if code is None:
        with from_extra("reader", "making machine code"):
            found = functions()
        code = compile_object({each: found[each] for each in names})
        _keep(name, code)
    _loaded[name] = code
    engine = _engine(code)
    return [Function(each, engine.get_function_address(_symbol(each))) for each in names]


_loaded: dict[str, bytes] = {}
"""What this process runs, by the name of its file."""


def kept_files() -> dict[str, bytes]:
    """The files of the machine code loaded so far, by name: whoever finds them beside this module need not make it."""
    return {name: _content(code) for name, code in _loaded.items()}


@cache
def _engine(code: bytes) -> Any:
    """Links the code; kept for ever, as the functions live in it."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _target_machine() -> Any:
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=_features(), opt=3, reloc="pic", codemodel="jitdefault"
    )


def _features() -> str:
    try:
        return str(llvm.get_host_cpu_features().flatten())
    except RuntimeError:  # LLVM cannot tell on every processor
        return ""


def _symbol(name: str) -> str:
    return f"holdfast_reader_{name}"


def compile_object(functions: Mapping[str, Callable[..., int]]) -> bytes:
    """The object code of every function, made by numba."""
    from inspect import signature

    from numba import cfunc, types

    module = None
    for name, function in functions.items():
        parameters = [types.int64] * len(signature(function).parameters)
        compiled: Any = cfunc(types.int64(*parameters))(function)
        text = _standing_alone(str(compiled._library.get_llvm_str()), compiled.native_name, _symbol(name))
        part = llvm.parse_assembly(text)
        if module is None:
            module = part
        else:
            module.link_in(part)
    assert module is not None
    module.verify()
    return bytes(_target_machine().emit_object(module))


def _standing_alone(text: str, native_name: str, symbol: str) -> str:
    """The function itself under our name, without the wrapper that turns errors into Python's: it raises none."""
    text = re.sub(r"^define [^\n]*@cfunc\.[^\n]*\n.*?^\}\n", "", text, flags=re.M | re.S)
    text = text.replace("@" + native_name.removeprefix("cfunc."), "@" + symbol)
    # Helpers and constants of different functions may share names when they are linked into one module.
    return re.sub(r"^define linkonce_odr ", "define internal ", text, flags=re.M)


# ------------------------------------------------------------------------ where it is kept


def _fingerprint(sources: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        with open(os.path.join(_HERE, source), "rb") as file:
            digest.update(file.read())
    machine = (llvm.get_process_triple(), llvm.get_host_cpu_name(), _features())
    digest.update(repr((llvm.llvm_version_info, *machine)).encode())
    return digest.hexdigest()[:32]


def _directories() -> Iterator[str]:
    chosen = os.environ.get(CACHE_DIRECTORY)
    if chosen:
        yield chosen
        return
    yield os.path.join(_HERE, "__pycache__")
    home = os.path.expanduser("~")
    caches = os.environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if home != "~" else "")
    if caches:
        yield os.path.join(caches, "holdfast")
    yield os.path.join(tempfile.gettempdir(), f"holdfast-{os.getuid()}")


def _kept(name: str) -> bytes | None:
    for directory in _directories():
        try:
            with open(os.path.join(directory, name), "rb") as file:
                if not _is_ours(os.fstat(file.fileno())) or not _is_ours(os.stat(directory)):
                    continue
                content = file.read()
        except OSError:
            continue
        code = content[_DIGEST_BYTES:]
        if hashlib.sha256(code).digest() == content[:_DIGEST_BYTES]:
            return code
    return None


def _is_ours(status: os.stat_result) -> bool:
    """Whether only we, root or whoever installed this package can have written it."""
    owners = (os.getuid(), 0, os.stat(_HERE).st_uid)
    return status.st_uid in owners and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _content(code: bytes) -> bytes:
    return hashlib.sha256(code).digest() + code


def _keep(name: str, code: bytes) -> None:
    content = _content(code)
    for directory in _directories():
        try:
            os.makedirs(directory, mode=0o755, exist_ok=True)
            if not _is_ours(os.stat(directory)):
                continue
            descriptor, aside = tempfile.mkstemp(dir=directory, prefix=name)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.chmod(aside, 0o644)
            os.replace(aside, os.path.join(directory, name))
        except OSError:
            continue
        return
