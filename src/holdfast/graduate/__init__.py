"""A data directory handed over to Apache Kafka in place: `holdfast graduate`."""
