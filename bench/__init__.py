"""How fast holdfast is, measured beside Apache Kafka, Redis Streams and NATS JetStream on the same machine.

`make bench` runs all of it and writes `bench/RESULTS.md`; `bench/README.md` tells how the figures are taken.
"""
