"""Whether the records that left because they could not be decoded cannot be, and all others can.

Decoding is a function of the record's bytes and the definition, so the auditor decodes for itself while it walks the
log: what stands among the dead letters as `parse` must fail, and what does not stand there must not. Only batches that
the definition of today has made are judged; another one may have decoded otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.audit.compare import Holding, finding
from holdfast.audit.decoding import Decode
from holdfast.audit.model import Examined, Fate, Finding
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place

Mask = npt.NDArray[np.bool_]


class DecodingWatch:
    """Looks on while the source is walked (an `Observer`)."""

    def __init__(self, spans: Mapping[Place, tuple[int, int]], batches: Iterable[Entry], mark: str) -> None:
        self._spans = spans
        self._failed: dict[Place, Mask] = {}
        self._judged: dict[Place, Mask] = {}
        for place, (start, end) in spans.items():
            self._failed[place] = np.zeros(max(0, end - start), np.bool_)
            self._judged[place] = np.zeros(max(0, end - start), np.bool_)
        for entry in batches:
            if entry.fingerprint != mark:
                continue
            for place, span in entry.range.spans.items():
                if place in spans:
                    start = spans[place][0]
                    self._judged[place][max(0, span.start - start) : max(0, span.end - start)] = True

    def take(self, place: Place, batch: pa.RecordBatch, decoded: Decode) -> None:
        at = batch.column("offset").to_numpy() - self._spans[place][0]
        if not self._judged[place][at].any():
            return
        errors = decoded().errors
        if errors.null_count < len(errors):
            self._failed[place][at[errors.is_valid().to_numpy(zero_copy_only=False)]] = True

    def examine(
        self, dead: Holding, unparsed: Holding, others: Sequence[Holding], records: Mapping[Place, Mask]
    ) -> Examined:
        """`unparsed` are the dead letters that say they could not be decoded; `others` everything that has rows."""
        found: list[Finding] = []
        for place, (start, _) in sorted(self._spans.items()):
            judged = self._judged[place] & records[place]
            failed, sent = self._failed[place], unparsed.counts[place] > 0
            elsewhere = np.zeros_like(failed)
            for holding in others:
                elsewhere |= holding.counts[place] > 0
            for mask, sink, detail in (
                (
                    judged & sent & ~failed,
                    dead.name,
                    "there because they could not be decoded, and they can be",
                ),
                (
                    judged & failed & ~sent & elsewhere,
                    "",
                    "they cannot be decoded, and did not leave for that",
                ),
            ):
                if mask.any():
                    offsets = np.flatnonzero(mask).astype(np.int64) + start
                    found.append(finding(Fate.ALTERED, sink, place, offsets, detail))
        return Examined(tuple(found))
