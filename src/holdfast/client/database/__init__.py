"""Exactly once into a database: results and committed offsets in one transaction.

`sink` consumes and hands batches to a handler; `store` is what it asks of a database, `postgres` and `sqlite` are the
two there are, `migrations` the tables they need, made by `holdfast sink migrate`.
"""
