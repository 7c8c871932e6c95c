"""Kafka's wire format: frames, record batches, API versions, error table. Pure."""
