"""The machine code of the formats: made once and kept on disk, as the reader's is (`holdfast.reader.kernel`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Final, NamedTuple

from holdfast.reader.kernel import Function, load_functions

_HERE: Final = os.path.dirname(os.path.abspath(__file__))
_KERNELS: Final = ("json_kernel", "json_scalars_kernel", "flat_kernel", "delimited_kernel")
_SOURCES: Final = (
    "kernel_source.py",
    "layout.py",
    *(os.path.join(_HERE, f"{each}.py") for each in (*_KERNELS, "json_layout", "flat_layout")),
)


class Machine(NamedTuple):
    """The functions of the modules whose names end in `_kernel`."""

    scan: Function
    count_elements: Function
    list_elements: Function
    read_integers: Function
    read_numbers: Function
    read_dates: Function
    read_instants: Function
    measure_strings: Function
    gather_strings: Function
    measure_base64: Function
    gather_base64: Function
    scan_flat: Function
    check_avro: Function
    scan_delimited: Function
    measure_unknown: Function
    gather_unknown: Function


@cache
def load() -> Machine:
    return Machine(*load_functions("formats", Machine._fields, _SOURCES, _functions))


def _functions() -> Mapping[str, Callable[..., int]]:
    modules = [import_module(f"{__package__}.{each}") for each in _KERNELS]
    return {name: value for module in modules for name, value in vars(module).items()}
