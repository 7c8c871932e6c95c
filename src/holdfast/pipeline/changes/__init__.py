"""What a changed definition means for sinks and state: each change has a level, and the worst is refused."""
