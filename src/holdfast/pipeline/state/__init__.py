"""What a pipeline remembers between batches: versions of state, and the steps that have one."""
