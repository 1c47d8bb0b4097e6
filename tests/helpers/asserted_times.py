"""A rule of tests/test_architecture.py: no test asserts a time that the machine decides. Read from the syntax trees, as the others are.

A value comes from a clock if a clock is called in it, or a name stands in it that was given such a value. The largest number beside
it is its limit: of a minute or more it only keeps a test from hanging.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from tests.helpers.architecture import Function, Offences, Tree, dotted

CLOCKS = {"time.time", "time.monotonic", "time.perf_counter", "time.process_time", "perf_counter", "monotonic"}
GENEROUS = 60  # seconds from which a limit only keeps a test from hanging


def no_test_asserts_a_time(tree: Tree) -> Offences:
    """No test asserts a time that the machine decides (benchmarks measure it); a minute or more that ends a hang may stand."""
    for source in tree.values():
        for function in (
            source.nodes(ast.FunctionDef, ast.AsyncFunctionDef)
            if source.is_test and not source.at("benchmarks/")
            else ()
        ):
            known = _numbers_of(source.syntax.body) | _defaults_of(function)
            clocked: dict[str, float] = {}  # names whose values come from a clock -> the largest number on their way
            for target, value in _assigned(function):
                if (bound := _clock_bound(value, clocked, known)) is not None:
                    clocked |= {name.id: bound for name in ast.walk(target) if isinstance(name, ast.Name)}
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Assert)
                    and (bound := _clock_bound(node.test, clocked, known)) is not None
                    and bound < GENEROUS
                ):
                    yield source.path, node.lineno, "a time of this machine is asserted; measure it in benchmarks"


def _assigned(function: Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(what is set, its value) of a function, in the order of the text; a tuple of both by its parts."""
    for node in sorted(
        (node for node in ast.walk(function) if isinstance(node, ast.Assign)), key=lambda node: node.lineno
    ):
        for target in node.targets:
            if (
                isinstance(target, ast.Tuple)
                and isinstance(node.value, ast.Tuple)
                and len(target.elts) == len(node.value.elts)
            ):
                yield from zip(target.elts, node.value.elts)
            else:
                yield target, node.value


def _clock_bound(value: ast.expr, clocked: Mapping[str, float], known: Mapping[str, float]) -> float | None:
    """The largest number that stands beside a clock in an expression, 0 if none does; None where there is no clock."""
    names = [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]
    if not any(name in clocked for name in names) and not any(
        isinstance(node, ast.Call) and dotted(node.func) in CLOCKS for node in ast.walk(value)
    ):
        return None
    numbers = [
        float(node.value)
        for node in ast.walk(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
    ]
    return max([0.0, *numbers, *(found[name] for found in (clocked, known) for name in names if name in found)])


def _numbers_of(body: list[ast.stmt]) -> dict[str, float]:
    """Names that are given a number by these statements."""
    return {
        target.id: float(node.value.value)
        for node in body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, (int, float))
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _defaults_of(function: Function) -> dict[str, float]:
    """Parameters whose default is a number."""
    given = function.args.args[len(function.args.args) - len(function.args.defaults) :]
    pairs = [*zip(given, function.args.defaults), *zip(function.args.kwonlyargs, function.args.kw_defaults)]
    return {
        name.arg: float(value.value)
        for name, value in pairs
        if isinstance(value, ast.Constant) and isinstance(value.value, (int, float))
    }
