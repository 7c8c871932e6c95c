"""What an operator does with a pipeline beside running it: rebuild, backfill, refill, compare."""
