"""The parts of a consumer that decide what may be committed, and when."""
