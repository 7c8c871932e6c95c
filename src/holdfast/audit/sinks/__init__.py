"""What the sinks hold, read without the code that wrote it."""
