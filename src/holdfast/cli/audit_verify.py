"""`holdfast audit verify`: whether a chain of certificates is still as it was written."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.exceptions import Exit

from holdfast.cli.options import CommandGroup, OutputOption, examples
from holdfast.cli.output import Output, print_json, print_table
from holdfast.errors import ExitCode

app = CommandGroup()


@app.command(
    help="Check certificates of audits: that each has the content its hash is of, and that each names the one before. "
    "The first link that is broken is named. Nothing but the files is needed.",
    epilog=examples(
        "holdfast audit verify proofs/",
        "holdfast audit verify proofs/orders-000001.json proofs/orders-000002.json",
        "holdfast audit verify proofs/ --expect 9f86d081884c7d65…",
    ),
)
def verify(
    paths: Annotated[
        list[str], typer.Argument(metavar="FILE…", help="Certificates, or directories of them, in any order.")
    ],
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="SHA256",
            help="The hash of the newest certificate, kept elsewhere: then its end cannot be cut off or made anew.",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    from holdfast.audit.certificate import verify as verify_chains
    from holdfast.audit.text import plain

    results = verify_chains(paths, expect)
    if output is Output.JSON:
        print_json([each.as_json() for each in results])
    else:
        rows = [
            (
                plain(each.subject),
                f"{len(each.certificates):,}",
                each.certificates[-1].verdict if each.certificates else "-",
                each.certificates[-1].sha256 if each.certificates else "-",
                "whole" if each.is_whole else "BROKEN",
            )
            for each in results
        ]
        print_table(("SUBJECT", "CERTIFICATES", "NEWEST VERDICT", "NEWEST SHA-256", "CHAIN"), rows)
        for each in results:
            for note in each.notes if each.is_whole else ():
                print(plain(f"{each.subject}: {note}"))
            if not each.is_whole:
                print(plain(f"broken: {each.problem}"))
    if not all(each.is_whole for each in results):
        raise Exit(ExitCode.FINDINGS)
