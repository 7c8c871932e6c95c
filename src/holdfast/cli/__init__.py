"""The command line: the composition root.

`__main__` decides what to import: `serve` goes straight to `cli/serve.py` and pays for neither typer, rich
nor confluent-kafka; every other command is loaded by `app` when it is named. The rules all commands keep:

- They speak Kafka's protocol and nothing else, so they work on Apache Kafka as on our own broker: through
  confluent-kafka, or, for the requests it does not have, through `wire`. `dump-log` is the exception: it reads
  files and needs no broker at all.
- Flags have the names of Kafka's own tools. Where ours differ, `docs/CLI.md` says so.
- Results go to standard output, everything about them (errors, warnings, summaries) to standard error.
- Exit codes live in `exits` and nowhere else.
"""
