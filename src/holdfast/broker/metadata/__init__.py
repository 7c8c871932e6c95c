"""The cluster's image, built from a log of changes. Pure."""
