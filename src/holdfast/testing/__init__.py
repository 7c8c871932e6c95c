"""Fakes, simulator, checkers and pytest fixtures; shipped, because users need them too."""
