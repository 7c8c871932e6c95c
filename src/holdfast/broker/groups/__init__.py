"""Consumer groups, classic and of the consumer protocol, and their committed offsets. Pure."""
