"""An interrupt, as a signal handler raises it, at a chosen place of a call."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Any

SIGNALS = frozenset(dis.opmap[name] for name in ("CALL", "RESUME", "JUMP_BACKWARD"))
"""Behind these instructions Python looks for signals; `with lock` is safe in its own other places."""


def interrupted_at(point: int, call: Callable[[], Any], codes: Collection[CodeType]) -> bool:
    """Call, with a signal at so many places of `codes` where one may arrive; false when there are fewer."""
    left = point
    before = -1

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left, before
        if event == "opcode":
            left -= before in SIGNALS
            before = frame.f_code.co_code[frame.f_lasti]
            if not left:
                raise KeyboardInterrupt
        return count

    def begin(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal before
        if frame.f_code not in codes:
            return None
        before = dis.opmap["RESUME"]
        frame.f_trace = count  # from Python 3.13 on it comes before the next line
        frame.f_trace_opcodes = True
        return count

    traced = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at the beginning whether any frame has it
    sys.settrace(begin)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(traced)
    return False
