"""For your tests: pytest fixtures, brokers as processes, a disk that forgets what was not flushed, fakes, checkers."""
