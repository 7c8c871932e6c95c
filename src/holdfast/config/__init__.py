"""Names, types, defaults and scopes of Kafka's settings and ours. Pure."""
