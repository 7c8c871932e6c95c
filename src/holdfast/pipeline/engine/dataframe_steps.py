"""Python steps of mode `spark`: a function from a DataFrame to a DataFrame, held to what a step may do by its plan.

The function runs on the driver and says what is to be computed; it computes nothing. Spark then says what it asked
for. The analysed plan of the returned frame is walked from its top down to the plan of the frame that was handed out:

- Every node on the way maps rows to rows by themselves (`ROW_BY_ROW`). What shuffles, samples, limits, joins or reads
  anything else is refused with its line of the plan. So is a frame whose way does not end at the input.
- No expression on the way gives another value when the batch is replayed, and none holds a query of its own.
- `_hf` is followed through each projection: it is the input's own column, renamed by nobody and made by nobody.

The function is called twice, and may start no job meanwhile: a plan that differs, or one that needs an answer from the
rows, depends on more than the row. The walk is repeated for each batch, since a function may change its mind.

How many rows come out is not a matter of the plan: the engine counts them, as it does behind a query.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.core.failures import StepError, spark_message
from holdfast.pipeline.core.frames import by_value, raised_at
from holdfast.pipeline.core.inspection import CHANGING, PlanShape
from holdfast.pipeline.core.sql import LINEAGE
from holdfast.pipeline.definition.functions import load_function
from holdfast.pipeline.definition.model import Python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NAMING: Final = frozenset({"SubqueryAlias", "View"})
ROW_BY_ROW: Final = frozenset({"Project", "Filter", "Generate", *NAMING})
"""Nodes of a plan that look at one row at a time."""
WIDE: Final = {
    "Aggregate": "aggregates rows",
    "Deduplicate": "removes duplicates: that is a `dedupe` step",
    "Distinct": "removes duplicates: that is a `dedupe` step",
    "Except": "subtracts frames",
    "Intersect": "intersects frames",
    "GlobalLimit": "limits the number of rows",
    "LocalLimit": "limits the number of rows",
    "Tail": "limits the number of rows",
    "Offset": "leaves out the first rows",
    "Join": "joins: that is a `lookup` or `join` step",
    "Pivot": "pivots",
    "Repartition": "shuffles rows",
    "RepartitionByExpression": "shuffles rows",
    "RebalancePartitions": "shuffles rows",
    "Sample": "takes a sample",
    "Sort": "sorts rows, which sinks do not keep",
    "Union": "unites frames",
    "Window": "looks at other rows: that is a `window` or `keyed` step",
    "MapInArrow": "maps batches: that is a step of mode arrow",
    "MapInPandas": "maps batches: that is a step of mode pandas",
}
"""What other nodes do, where a word helps."""
FIELDS_MAX: Final = 25
"""Columns of a plan's line that a message shows."""
ROW_SHOWN: Final = 300
"""Characters of a row that a message shows."""
REPLAYED: Final[ContextVar[bool]] = ContextVar("replayed", default=False)
"""Set while a pipeline is tested: every batch of such a step is computed twice, the second time with its rows mixed."""
_NUMBERED: Final = re.compile(r"(_\d+)?#\d+L?")
"""What is new in each plan: the numbers of columns, and of the arguments of lambdas."""


def apply_dataframe(frame: DataFrame, step: Python, directory: str) -> tuple[DataFrame, PlanShape]:
    """What the function makes of the frame, not computed yet, and what its plan says; `StepError` where it may not."""
    function = load_function(step, directory)
    with _without_jobs(frame, step), by_value(function):
        returned, again = (_called(function, frame, step) for _ in range(2))
    nodes = list(_way(returned, frame, step))
    for node in nodes:
        _check_expressions(node, step)
    _check_lineage(returned, frame, nodes, step)
    _check_repeats(nodes, list(_way(again, frame, step)), step)
    kinds = {_kind(node) for node in nodes}
    return returned, PlanShape(
        keeps_every_row=not kinds & {"Filter", "Generate"},
        is_cheap="Generate" not in kinds and not any("PythonUDF" in _classes(node) for node in nodes),
    )


def _called(function: Callable[..., Any], frame: DataFrame, step: Python) -> DataFrame:
    from pyspark.sql import DataFrame

    try:
        returned = function(frame)
    except Exception as error:
        where = raised_at(error)
        raise StepError(step.name, spark_message(error) + (f" ({where})" if where else "")) from error
    if not isinstance(returned, DataFrame):
        raise StepError(step.name, f"the function returned {type(returned).__name__}, not a Spark DataFrame")
    return returned


@contextmanager
def _without_jobs(frame: DataFrame, step: Python) -> Iterator[None]:
    """Refuse a function that has rows computed: what it then does depends on what else is in the batch."""
    context = frame.sparkSession.sparkContext
    tag = f"holdfast-{uuid.uuid4().hex}"
    context.addJobTag(tag)
    try:
        yield
    finally:
        context.removeJobTag(tag)
    if list(context._jsc.sc().statusTracker().getJobIdsForTag(tag)):
        raise StepError(
            step.name,
            "the function runs a job (count, collect, first, checkpoint…): it may say what is to be made of each row, "
            "and not look at the rows of a batch, which are others when it is cut differently",
        )


def replay(frame: DataFrame, step: Python, directory: str) -> None:
    """Run the step on the rows as they come and on the same rows mixed; `StepError` where that makes a difference.

    What a plan cannot show is found so: a function of the rows (`udf`) that remembers, or goes by its neighbours.
    """
    mixed = frame.repartition(2, f"{LINEAGE}.offset").sortWithinPartitions(
        f"{LINEAGE}.offset", ascending=False
    )
    one, other = (
        apply_dataframe(each, step, directory)[0].selectExpr("to_json(struct(*)) AS row")
        for each in (frame, mixed)
    )
    example = one.exceptAll(other).first()
    if example is not None or other.exceptAll(one).first() is not None:
        raise StepError(
            step.name,
            "it gives other rows when the same rows come in another order or in other batches"
            + (f", for instance {example['row'][:ROW_SHOWN]}" if example is not None else "")
            + ": what it makes of a row must follow from that row",
        )


# ---------------------------------------------------------------------------- plans


def _plan(frame: DataFrame) -> Any:
    return frame._jdf.queryExecution().analyzed()


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _way(returned: DataFrame, frame: DataFrame, step: Python) -> Iterator[Any]:
    """The nodes from what was returned down to what was handed out."""
    node, end = _plan(returned), _plan(frame)
    while not node.fastEquals(end):
        kind, children = _kind(node), node.children()
        if kind not in ROW_BY_ROW:
            reads = "reads something else than the frame it was given" if children.isEmpty() else ""
            does = WIDE.get(kind) or reads or "does not map rows to rows by themselves"
            raise StepError(
                step.name,
                f"the function {does}: a step maps each row by itself, so that each record is accounted for. "
                f"The plan has: {node.simpleString(FIELDS_MAX)}",
            )
        yield node
        node = children.head()


def _items(sequence: Any) -> Iterator[Any]:
    return (sequence.apply(at) for at in range(sequence.size()))


def _classes(node: Any) -> list[str]:
    """The expressions of one node, by class."""
    found: list[str] = []
    for expression in _items(node.expressions()):
        found += [part["class"].rsplit(".", 1)[-1] for part in json.loads(expression.toJSON())]
    return found


def _check_expressions(node: Any, step: Python) -> None:
    classes = _classes(node)
    changing = next((CHANGING[name] for name in classes if name in CHANGING), None)
    is_query = any(name.endswith("Subquery") or name in ("Exists", "ListQuery") for name in classes)
    fixed = all(bool(each.deterministic()) for each in _items(node.expressions()))
    if is_query:
        what = "it holds a query of its own, which looks at other rows"
    elif changing is not None or not fixed:
        what = f"{changing or 'it calls what'}{'()' if changing else ''} gives another value when the batch is replayed"
        what += "; take the time from `_batch_time`, and identifiers from `_hf` (topic, partition, offset)"
    else:
        return
    raise StepError(step.name, f"{what}. The plan has: {node.simpleString(FIELDS_MAX)}")


def _check_repeats(nodes: list[Any], again: list[Any], step: Python) -> None:
    """A function that is called once more asks for the same; names of views and aliases may be new."""
    nodes, again = ([each for each in way if _kind(each) not in NAMING] for way in (nodes, again))
    one, other = ([_NUMBERED.sub("#", each.simpleString(1 << 20)) for each in way] for way in (nodes, again))
    if one != other:
        at = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
        raise StepError(
            step.name,
            "the function asks for something else each time it is called: keep time and chance out of it, so that a "
            f"replayed batch comes out the same (`_batch_time` is fixed). The plan has: "
            f"{(nodes or again)[at].simpleString(FIELDS_MAX)}",
        )


def _check_lineage(returned: DataFrame, frame: DataFrame, nodes: list[Any], step: Python) -> None:
    """`_hf` of the result is that of the input: each projection on the way passes it on."""
    if returned.columns.count(LINEAGE) != 1:
        lost = LINEAGE not in returned.columns
        what = "does not keep" if lost else "gives twice"
        raise StepError(
            step.name,
            f"the function {what} `{LINEAGE}`, the lineage of its rows: select it once, as withColumn and where do",
        )
    lowered = [name.lower() for name in returned.columns]
    twice = next((name for name in lowered if lowered.count(name) > 1), None)
    if twice is not None:
        raise StepError(step.name, f"the function gives two columns the name {twice!r}: rename one")
    number = _number_of(_plan(returned).output())
    for node in nodes:
        if _kind(node) != "Project":
            continue
        made = next(each for each in _items(node.projectList()) if each.exprId().equals(number))
        if _kind(made) == "Alias" and _kind(made.child()) == "AttributeReference":
            made = made.child()
        if _kind(made) != "AttributeReference":
            raise StepError(
                step.name,
                f"the function makes `{LINEAGE}` anew: it must be the input's own, unchanged. The plan has: "
                f"{node.simpleString(FIELDS_MAX)}",
            )
        number = made.exprId()
    if not number.equals(_number_of(_plan(frame).output())):
        raise StepError(step.name, f"`{LINEAGE}` must be the input's own, unchanged")


def _number_of(output: Any) -> Any:
    return next(each.exprId() for each in _items(output) if each.name() == LINEAGE)
