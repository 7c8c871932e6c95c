"""Pipelines on a cluster: the Python parts that are shipped to workers, and the places that all machines must see."""
