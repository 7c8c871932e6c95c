"""Requests by family: a function answers each API (`dispatch.FAMILIES`), and begins with the versions it speaks.

What an answer leaves out has the default of Kafka's schema: nobody is throttled, for one.
"""
