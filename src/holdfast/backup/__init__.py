"""Backups of a running node, and directories restored from them."""
