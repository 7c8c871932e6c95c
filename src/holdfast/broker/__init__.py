"""The embedded broker: pure machines for logs, groups, transactions and metadata, a node of them, and a server."""
