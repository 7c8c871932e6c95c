"""`holdfast pipeline package` and `deploy`: what a cluster is given to run a pipeline."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import OutputOption, examples
from holdfast.cli.output import Output, print_json
from holdfast.cli.pipeline_shared import load, require_extra
from holdfast.errors import UsageError
from holdfast.pipeline.cluster.deploying import PLACEHOLDER_IMAGE, Target

if TYPE_CHECKING:
    from holdfast.pipeline.definition.model import PipelineDefinition

app = typer.Typer(add_completion=False)


@app.command(
    help="Pack the Python parts that workers of a cluster need into one archive: holdfast, its libraries with their "
    "native code, and the compiled decoders. `run --master` does it by itself. It is made for this Python's minor "
    "version and this kind of system, kept, and made again only when something changed.",
    epilog=examples(
        "holdfast pipeline package", "holdfast pipeline package --to parts.tar.gz --with scikit-learn"
    ),
)
def package(
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="FILE", help="Where to put it, a .tar.gz (default: only the cache)."),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="NAME",
            help="An installed distribution that Python steps use, with what it requires; may be repeated.",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    from holdfast.pipeline.cluster.packaging import cache_directory, make_package, place_package
    from holdfast.pipeline.session import require_spark

    require_extra()
    require_spark()
    made = make_package(cache_directory(), more=more or (), progress=_show if sys.stderr.isatty() else None)
    path = made.path if to is None else place_package(made, to)
    if output is Output.JSON:
        print_json(
            {"path": path, "bytes": made.bytes, "unpacked_bytes": made.unpacked_bytes, **made.manifest}
        )
        return
    made_for = made.manifest["made_for"]
    print(
        f"{path}: {made.bytes / 1e6:,.0f} MB ({made.unpacked_bytes / 1e6:,.0f} MB unpacked, {made.files:,} files), "
        f"for {made_for['implementation']} {made_for['python']} on {made_for['system']}-{made_for['machine']}"
        f"{'' if made.is_new else ', from the cache'}"
    )


def _show(done: int, total: int) -> None:
    end = "\r" if done < total else "\n"
    print(f"packing {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", end=end, file=sys.stderr, flush=True)


@app.command(
    help="Print what a cluster is to be given: the arguments of spark-submit, or a manifest for Kubernetes. It sends "
    "nothing; --dry-run says that you know. What it prints for Kubernetes and YARN has not been tried out there.",
    epilog=examples(
        "holdfast pipeline deploy orders.yaml --to yarn --dry-run",
        "holdfast pipeline deploy orders.yaml --to k8s --image my/spark:1 --dry-run > orders.k8s.yaml",
    ),
)
def deploy(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The pipeline: a YAML file, or a Python file that makes one."),
    ],
    to: Annotated[Target, typer.Option("--to", case_sensitive=False, help="The kind of cluster.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print, and send nothing.")] = False,
    master: Annotated[
        str | None,
        typer.Option("--master", metavar="URL", help="Spark's master (default: the usual one of that kind)."),
    ] = None,
    archive: Annotated[
        str,
        typer.Option(
            "--package", metavar="FILE", help="Where the archive of `package` is, for spark-submit."
        ),
    ] = "holdfast-package.tar.gz",
    image: Annotated[
        str, typer.Option("--image", metavar="NAME", help="Kubernetes: the container image.")
    ] = PLACEHOLDER_IMAGE,
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="NAME", help="Kubernetes: where the objects go.")
    ] = "default",
    output: OutputOption = Output.TABLE,
) -> None:
    from holdfast.pipeline.cluster import deploying

    if not dry_run:
        raise UsageError(
            "deploy only prints what a cluster is to be given, and sends nothing: add --dry-run, look at it, and give "
            "it to kubectl or spark-submit yourself"
        )
    definition = load(file).definition
    deployment = deploying.Deployment(
        definition,
        os.path.abspath(file),
        to,
        master or deploying.DEFAULT_MASTERS[to],
        os.path.abspath(archive),
        image,
        namespace,
    )
    if to is Target.K8S:
        files = _files(file, definition)
        if output is Output.JSON:
            print_json(deploying.manifest(deployment, files))
        else:
            sys.stdout.write(deploying.as_yaml(deployment, files))
    elif output is Output.JSON:
        print_json({"arguments": deploying.submit_arguments(deployment)})
    else:
        sys.stdout.write(deploying.as_script(deployment))


def _files(file: str, definition: PipelineDefinition) -> dict[str, str]:
    """The definition and the files of its Python steps, by their names."""
    from holdfast.pipeline.definition.model import Keyed, Python

    steps = [step for step in definition.steps if isinstance(step, Python | Keyed) and step.file]
    paths = [file, *(os.path.join(definition.directory, step.file or "") for step in steps)]
    found = {}
    for path in paths:
        with open(path, encoding="utf-8") as handle:
            found[os.path.basename(path)] = handle.read()
    return found
