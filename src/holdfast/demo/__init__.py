"""`holdfast demo`: orders go through while processes are killed, and the audit says what became of each."""
