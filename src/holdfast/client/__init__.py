"""Clients that do not lose a message by accident, for the embedded broker and Apache Kafka alike."""
