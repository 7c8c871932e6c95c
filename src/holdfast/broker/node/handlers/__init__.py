"""Requests by family: a function answers each API (`dispatch.HANDLERS`), and begins with the versions it speaks."""
