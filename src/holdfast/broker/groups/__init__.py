"""Consumer groups. Pure; empty until groups are served."""
