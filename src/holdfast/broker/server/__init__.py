"""The asyncio shell around a node: sockets, flusher, the real seams, embedding."""
