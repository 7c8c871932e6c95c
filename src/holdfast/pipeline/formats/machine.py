"""The machine code of the formats: made once and kept on disk, as the reader's is (`holdfast.reader.kernel`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final, NamedTuple

from holdfast.reader.kernel import Function, load_functions

_HERE: Final = os.path.dirname(os.path.abspath(__file__))
_SOURCES: Final = (
    "kernel_source.py",
    "layout.py",
    *(
        os.path.join(_HERE, each)
        for each in (
            "json_kernel.py",
            "json_scalars_kernel.py",
            "json_layout.py",
            "flat_kernel.py",
            "flat_layout.py",
            "delimited_kernel.py",
        )
    ),
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
    from holdfast.pipeline.formats import delimited_kernel, flat_kernel, json_kernel, json_scalars_kernel

    modules = (delimited_kernel, flat_kernel, json_kernel, json_scalars_kernel)
    return {name: value for module in modules for name, value in vars(module).items()}
