"""What a controller with several brokers records of one, and this broker only reads."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.image import ClusterImage
from holdfast.errors import ApiError
from holdfast.wire.metadata_records import BrokerRegistrationChange, MetadataRecord


def change_registration(
    image: ClusterImage, broker_id: int, *, fenced: bool | None = None, log_dirs: Sequence[UUID] = ()
) -> list[MetadataRecord]:
    """Fence or unfence a broker, or say which of its directories still work."""
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise ApiError(ErrorCode.broker_id_not_registered, f"broker {broker_id} is not registered")
    return [
        BrokerRegistrationChange(
            broker_id=broker_id,
            broker_epoch=broker.broker_epoch,
            fenced=0 if fenced is None else 1 if fenced else -1,
            log_dirs=tuple(log_dirs),
        )
    ]
