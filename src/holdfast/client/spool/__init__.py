"""The disk spool of a producer: what is stored here reaches the broker, whatever happens in between."""
