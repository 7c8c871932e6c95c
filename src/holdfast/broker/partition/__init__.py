"""The offsets of one partition: durable end, high watermark, last stable offset, parked requests. Pure."""
