"""Producer ids and transactions. Pure."""
