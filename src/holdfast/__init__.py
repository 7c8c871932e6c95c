"""holdfast: move data through Kafka without losing a message."""

__version__ = "0.1.0"
