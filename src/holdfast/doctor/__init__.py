"""The doctor: what in a cluster, its clients and its pipelines can lose a message, found before it happens.

It reads and asks, and changes nothing. `risks` is the table of what can go wrong, `findings` what an examination says.
"""
