"""A header whose name is not UTF-8, as other clients write them: its message is neither lost nor in the way."""

from __future__ import annotations

import struct
from uuid import uuid4

from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.consumer import Consumer
from holdfast.client.messages import UNREADABLE_HEADER, Message
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.wire_client import WireClient
from holdfast.wire.batch import Record, batch_crc, build_batch


def with_foreign_header(values: list[bytes]) -> bytes:
    headers = (("zz", b"1"), ("known", b"2"))
    records = [Record(at, 0, None, value, headers if at == 1 else ()) for at, value in enumerate(values)]
    batch = bytearray(build_batch(records, base_timestamp=1_700_000_000_000))
    at = batch.index(b"zz")
    batch[at : at + 2] = b"\xff\xfe"
    batch[17:21] = struct.pack(">I", batch_crc(bytes(batch)))
    return bytes(batch)


def test_a_message_with_a_header_that_is_no_text_is_handed_out(holdfast_broker: BrokerProcess) -> None:
    topic = f"foreign-{uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": holdfast_broker.bootstrap_servers})
    admin.create_topics([NewTopic(topic, 1)])[topic].result()
    values = [b"0", b"1", b"2"]
    with WireClient(holdfast_broker.bootstrap_servers) as client:
        data = [{"name": topic, "partition_data": [{"index": 0, "records": with_foreign_header(values)}]}]
        client.ask(0, 9, {"transactional_id": None, "acks": -1, "timeout": 30_000, "topic_data": data})
    consumer = Consumer(holdfast_broker.bootstrap_servers, group=topic, topics=[topic])
    handled: list[Message] = []

    def handle(message: Message) -> None:
        handled.append(message)
        if len(handled) == len(values):
            consumer.stop()

    consumer.run(handle)
    assert [each.value for each in handled] == values
    assert handled[1].header(UNREADABLE_HEADER) is not None
    assert handled[0].headers == handled[2].headers == ()
