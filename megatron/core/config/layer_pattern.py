"""Which layers have a property, as Megatron's flags say it: a number, or a list of zeros and ones."""

from __future__ import annotations

import ast

from megatron.core.config.flags import ConfigError


def read_pattern(text: str | int, length: int, flag: str) -> int | tuple[int, ...]:
    """`4` as a number; `([0]*1+[1]*26)` as a tuple of `length` zeros and ones. `ConfigError` names the flag."""
    try:
        pattern = _evaluate(ast.parse(str(text).strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        raise ConfigError(
            f"{flag} {text} cannot be read; write a number, or a list such as [0]*1+[1]*{length - 1}"
        ) from None
    if isinstance(pattern, int):
        if pattern < 1:
            raise ConfigError(f"{flag} {text}: a number of layers is at least 1")
        return pattern
    if len(pattern) != length or set(pattern) - {0, 1}:
        raise ConfigError(f"{flag} {text} is a list of {len(pattern)}; write {length} zeros and ones, one a layer")
    return tuple(pattern)


def _evaluate(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_evaluate(item) for item in node.elts]
        if len(numbers := [item for item in items if isinstance(item, int)]) == len(items):
            return numbers
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        return _apply_operator(node.op, _evaluate(node.left), _evaluate(node.right))
    raise ValueError("not a pattern")


def _apply_operator(op: ast.operator, left: int | list[int], right: int | list[int]) -> list[int]:
    """Two lists one after the other, or a list so many times."""
    if isinstance(op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(left, int):
        left, right = right, left
    if isinstance(op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
        if 0 <= len(left) * right <= 100_000:
            return left * right
    raise ValueError("not a pattern")
