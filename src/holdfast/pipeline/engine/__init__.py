"""The driver's loop: ranges cut from the sinks' ledgers, staged, routed, balanced and committed."""
