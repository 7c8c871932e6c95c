"""What can be known about a Python module without running it: what names mean, which values are plain.

Everything here errs on the side of not knowing. A name that is assigned twice, a dictionary that is filled by a
function, a value from the environment: each is UNKNOWN, and rules stay silent about it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from holdfast.doctor.client_settings import UNKNOWN

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)


class ModuleNames:
    """A parsed module with its parents, imports and assignments."""

    def __init__(self, tree: ast.Module, file: str) -> None:
        self.tree = tree
        self.file = file
        self.parents: dict[ast.AST, ast.AST] = {}
        self._imports: dict[tuple[Scope, str], str] = {}
        """What an imported name means, by where it is imported: two functions may import two things by one name."""
        self._assigned: defaultdict[tuple[Scope, str], list[ast.expr | None]] = defaultdict(list)
        self._filled: defaultdict[tuple[Scope, str], list[ast.AST]] = defaultdict(list)
        self._resolving: set[ast.expr] = set()
        """Dictionaries that are being read: one that holds itself is not read for ever."""
        self._elsewhere: set[tuple[Scope, str]] = set()
        """Names that a function declares to be its module's, or those of a function around it."""
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        for node in ast.walk(tree):
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                self._elsewhere.update((self.scope_of(node), name) for name in node.names)
        for node in ast.walk(tree):
            self._note(node)

    # -------------------------------------------------------------------- gathering

    def _note(self, node: ast.AST) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self._imports[self.scope_of(node), name] = alias.name if alias.asname else name
            case ast.ImportFrom(module=str(module)):
                for alias in node.names:
                    self._imports[self.scope_of(node), alias.asname or alias.name] = f"{module}.{alias.name}"
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, node.value if isinstance(target, ast.Name) else None)
            case ast.AnnAssign(value=value) if value is not None:
                self._bind(node.target, value)
            case ast.AugAssign():
                self._bind(node.target, None)
            case ast.NamedExpr():
                self._bind(node.target, node.value)
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._bind(node.target, None)
            case ast.withitem(optional_vars=ast.expr() as target):
                self._bind(target, node.context_expr if isinstance(target, ast.Name) else None)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                arguments = node.args
                every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                every += [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
                for argument in every:
                    self._assigned[node, argument.arg].append(None)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update" | "setdefault" | "pop")):
                self._filled[self.binding_scope(node, name), name].append(node)

    def _bind(self, target: ast.AST, value: ast.expr | None) -> None:
        match target:
            case ast.Name(id=name):
                scope = self.scope_of(target)
                if (scope, name) in self._elsewhere:
                    scope = self.binding_scope(target, name)
                self._assigned[scope, name].append(value)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for element in elements:
                    self._bind(element, None)
            case ast.Starred(value=inner):
                self._bind(inner, None)
            case ast.Subscript(value=ast.Name(id=name)):
                statement = self.parents.get(target)
                if statement is not None:
                    self._filled[self.binding_scope(target, name), name].append(statement)

    # -------------------------------------------------------------------- looking up

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def scope_of(self, node: ast.AST) -> Scope:
        """The function, class or module that a name at this node would be bound in."""
        kinds = (ast.Module, ast.ClassDef, *FUNCTIONS)
        return next((each for each in self.ancestors(node) if isinstance(each, kinds)), self.tree)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        return next((each for each in self.ancestors(node) if isinstance(each, ast.ClassDef)), None)

    def scopes_seen_from(self, node: ast.AST) -> Iterator[Scope]:
        """From the inside out; classes are not seen from their functions."""
        yield (inner := self.scope_of(node))
        yield from (each for each in self.ancestors(inner) if isinstance(each, (ast.Module, *FUNCTIONS)))

    def binding_scope(self, node: ast.AST, name: str) -> Scope:
        """The scope whose name this is."""
        for scope in self.scopes_seen_from(node):
            if (scope, name) in self._assigned and (scope, name) not in self._elsewhere:
                return scope
        return self.tree

    def assigned(self, node: ast.AST, name: str) -> ast.expr | None:
        """The one expression a name stands for; nothing when there are several, or it is an argument."""
        values = self._assigned.get((self.binding_scope(node, name), name), [])
        return values[0] if len(values) == 1 else None

    def meaning(self, node: ast.AST) -> str:
        """The full name of what an expression names, through imports; empty when it is no name."""
        match node:
            case ast.Name(id=name):
                seen = ((scope, name) for scope in self.scopes_seen_from(node))
                return next((self._imports[each] for each in seen if each in self._imports), name)
            case ast.Attribute(value=base, attr=attribute):
                inner = self.meaning(base)
                return f"{inner}.{attribute}" if inner else ""
        return ""

    def imports_from(self, package: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for name in self._imports.values())

    def constant(self, node: ast.expr) -> Any:
        """A plain value, or UNKNOWN."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.BinOp(op=ast.Mult(), left=left, right=right):
                one, other = self.constant(left), self.constant(right)
                if isinstance(one, int) and isinstance(other, int) and abs(one) < 2**40 > abs(other):
                    return one * other
            case ast.Name(id=name):
                stands_for = self.assigned(node, name)
                if isinstance(stands_for, (ast.Constant, ast.UnaryOp, ast.BinOp)):
                    return self.constant(stands_for)
        return UNKNOWN

    def dictionary(self, node: ast.expr, depth: int = 0) -> tuple[list[tuple[str, Any, int]], bool]:
        """Names, values and lines of a dictionary, in order, and whether there may be more than is seen."""
        if depth > 8:
            return [], True
        match node:
            case ast.Dict(keys=keys, values=values):
                return self._literal(keys, values, depth)
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
                return self.keywords(keywords, depth)
            case ast.Call(func=ast.Name(id="dict"), args=[inner], keywords=keywords):
                first, first_open = self.dictionary(inner, depth + 1)
                more, more_open = self.keywords(keywords, depth)
                return first + more, first_open or more_open
            case ast.BinOp(op=ast.BitOr(), left=left, right=right):
                first, first_open = self.dictionary(left, depth + 1)
                more, more_open = self.dictionary(right, depth + 1)
                return first + more, first_open or more_open
            case ast.Name(id=name):
                return self._named_dictionary(node, name, depth)
        return [], True

    def _named_dictionary(
        self, node: ast.expr, name: str, depth: int
    ) -> tuple[list[tuple[str, Any, int]], bool]:
        value = self.assigned(node, name)
        if value is None or value in self._resolving:
            return [], True
        self._resolving.add(value)
        items, is_open = self.dictionary(value, depth + 1)
        # Statements that change the dictionary of this name.
        for change in self._filled.get((self.binding_scope(node, name), name), []):
            more, more_open = self._filling(change, depth + 1)
            items, is_open = items + more, is_open or more_open
        self._resolving.discard(value)
        return items, is_open

    def _literal(
        self, keys: list[ast.expr | None], values: list[ast.expr], depth: int
    ) -> tuple[list[tuple[str, Any, int]], bool]:
        items: list[tuple[str, Any, int]] = []
        is_open = False
        for key, value in zip(keys, values, strict=True):
            if key is None:
                more, more_open = self.dictionary(value, depth + 1)
                items, is_open = items + more, is_open or more_open
                continue
            name = self.constant(key)
            if name == "default.topic.config":
                more, more_open = self.dictionary(value, depth + 1)
                items, is_open = items + more, is_open or more_open
            elif isinstance(name, str):
                items.append((name, self.constant(value), key.lineno))
            else:
                is_open = True
        return items, is_open

    def keywords(
        self, keywords: list[ast.keyword], depth: int = 0
    ) -> tuple[list[tuple[str, Any, int]], bool]:
        items: list[tuple[str, Any, int]] = []
        is_open = False
        for keyword in keywords:
            if keyword.arg is None:
                more, more_open = self.dictionary(keyword.value, depth + 1)
                items, is_open = items + more, is_open or more_open
            else:
                items.append((keyword.arg, self.constant(keyword.value), keyword.value.lineno))
        return items, is_open

    def _filling(self, change: ast.AST, depth: int) -> tuple[list[tuple[str, Any, int]], bool]:
        match change:
            case ast.Assign(targets=[ast.Subscript(slice=key)], value=value):
                name = self.constant(key)
                if isinstance(name, str):
                    return [(name, self.constant(value), change.lineno)], False
            case ast.Call(func=ast.Attribute(attr="update"), args=[inner], keywords=[]):
                return self.dictionary(inner, depth + 1)
            case ast.Call(func=ast.Attribute(attr="update"), args=[], keywords=keywords):
                return self.keywords(keywords, depth)
        return [], True


def mentions_streams(names: ModuleNames) -> bool:
    """Whether Spark's streams or Kafka source are used, with an import or without (as in notebooks)."""
    kafka_formats = (
        each
        for each in calls_in(names.tree)
        if isinstance(each.func, ast.Attribute) and each.func.attr == "format" and each.args
    )
    return any(names.constant(each.args[0]) == "kafka" for each in kafka_formats) or any(
        isinstance(node, ast.Attribute) and node.attr in ("readStream", "writeStream")
        for node in ast.walk(names.tree)
    )


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Call))


def names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


LOGGING: Final = frozenset({"debug", "info", "warning", "warn", "error", "exception", "critical", "log"})


def is_logging(call: ast.Call) -> bool:
    """Whether a call only says something: print, a logger's methods, a counter's inc."""
    match call.func:
        case ast.Name(id=name):
            return name in ("print", "log")
        case ast.Attribute(value=base, attr=method):
            base_names = {name.lower() for name in names_in(base)}
            attributes = {each.attr.lower() for each in ast.walk(base) if isinstance(each, ast.Attribute)}
            return method in LOGGING and any("log" in name for name in base_names | attributes)
    return False


def only_tells(body: list[ast.stmt]) -> Iterator[bool]:
    """For each statement, whether it does nothing about an error but perhaps mention it."""
    for statement in body:
        match statement:
            case ast.Pass() | ast.Continue() | ast.Expr(value=ast.Constant()):
                yield True
            case ast.Expr(value=ast.Call() as call):
                yield is_logging(call)
            case _:
                yield False
