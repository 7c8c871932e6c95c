"""A pipeline's life after its first run: changing its definition, making its state anew, filling in, comparing."""
