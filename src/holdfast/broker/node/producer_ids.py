"""Producer ids: given once, never again, not even after power loss.

Ids come from blocks. The record that takes a block is in the metadata log before the first id of it is handed
out, and the response with that id waits behind the metadata barrier until the record is durable. A restart
begins with a new block; what was left of the old one is never used.
"""

from __future__ import annotations

from holdfast.broker.metadata import changes
from holdfast.broker.metadata.changes import ProducerIdBlock
from holdfast.broker.node.metadata_log import MetadataLog
from holdfast.seams import Now


class ProducerIdSource:
    def __init__(self, metadata: MetadataLog, node_id: int) -> None:
        self._metadata = metadata
        self._node_id = node_id
        self._block = ProducerIdBlock(0, 0)
        self._next = 0

    def take(self, now: Now) -> int:
        if self._next >= self._block.end:
            block, records = changes.allocate_producer_ids(self._metadata.image, self._node_id)
            self._metadata.append(records, now)
            self._block = block
            self._next = block.first
        producer_id = self._next
        self._next += 1
        return producer_id
