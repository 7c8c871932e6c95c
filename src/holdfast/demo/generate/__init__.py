"""Sample data: seeded, of any size, with what results must come to."""
