"""Which layers have a property, as Megatron's flags say it: a number, or a list of zeros and ones."""

from __future__ import annotations

import ast

from megatron.core.config.flags.declare import ConfigError


def parse_layer_frequency(text: str | int, length: int, flag: str) -> int | tuple[int, ...]:
    """Parse a layer pattern: `4` to the number 4, `([0]*1+[1]*26)` to a tuple of `length` zeros and ones.

    Raises `ConfigError`, naming `flag`, if it cannot be parsed or has another length.
    """
    try:
        pattern = _evaluate_pattern(ast.parse(str(text).strip(), mode="eval").body)
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


def _evaluate_pattern(node: ast.expr) -> int | list[int]:
    """Return the integer or list that an expression of +, * and literals stands for; `ValueError` for any other."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_evaluate_pattern(item) for item in node.elts]
        if len(numbers := [item for item in items if isinstance(item, int)]) == len(items):
            return numbers
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        return _evaluate_list_operator(node.op, _evaluate_pattern(node.left), _evaluate_pattern(node.right))
    raise ValueError("not a pattern")


def _evaluate_list_operator(op: ast.operator, left: int | list[int], right: int | list[int]) -> list[int]:
    """Concatenate two lists, or repeat a list (up to 100,000 elements); `ValueError` for other operands."""
    if isinstance(op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(left, int):
        left, right = right, left
    if isinstance(op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
        if 0 <= len(left) * right <= 100_000:
            return left * right
    raise ValueError("not a pattern")
