"""A Jinja sandbox whose templates end, within bounds of steps, time and text.

A template comes with a published tokenizer, so it is data, and must not hold the process that renders it. A step is a pass
of a loop or a call of a macro; joined text (~, +, *, and what a template writes) is measured before it is made.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_STEPS = 500_000
MOST_SECONDS = 60.0
MOST_CHARACTERS = 2**26
MOST_BITS = 2**16  # of a power


class RenderLimitError(SecurityError):
    """A template does not end within the bounds."""


class _RenderBudget:
    """What is left of a rendering's steps and time."""

    def __init__(self) -> None:
        self.steps, self.end = MOST_STEPS, time.monotonic() + MOST_SECONDS

    def count_step(self) -> None:
        """Count one step. `RenderLimitError` after MOST_STEPS steps or (checked every 64 steps) MOST_SECONDS seconds."""
        self.steps -= 1
        if self.steps < 0:
            raise RenderLimitError(f"it takes more than {MOST_STEPS} steps; does a loop in it not end?")
        if self.steps % 64 == 0 and time.monotonic() > self.end:
            raise RenderLimitError(f"it takes more than {MOST_SECONDS:.0f} seconds; does a loop in it not end?")


_LEFT: ContextVar[_RenderBudget] = ContextVar("what is left of a rendering")


@contextmanager
def render_limits() -> Iterator[None]:
    """Give what is rendered inside a fresh budget of steps and time; `RenderLimitError` when it is exhausted."""
    token = _LEFT.set(_RenderBudget())
    try:
        yield
    finally:
        _LEFT.reset(token)


def _check_text_size(size: int) -> None:
    """Raise `RenderLimitError` for a text of more than MOST_CHARACTERS characters."""
    if size > MOST_CHARACTERS:
        raise RenderLimitError(f"it makes a text of {size} characters; at most {MOST_CHARACTERS} are taken")


def _join_within_size_limit(parts: Iterable[str]) -> str:
    """Concatenate texts. `RenderLimitError` if the result is too long."""
    result, size = [], 0
    for part in parts:
        size += len(part)
        _check_text_size(size)
        result.append(part)
    return "".join(result)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Templates that are rendered inside `render_limits` end."""

    intercepted_binops = frozenset({"+", "*", "**"})
    concat = staticmethod(_join_within_size_limit)

    def __init__(self, extensions: Iterable[Any]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[*extensions, _JinjaStepCounter])

    def compile_template(self, text: str) -> jinja2.Template:
        """A template that counts its steps."""
        counted = _StepCountingTransformer(self.extensions[_JinjaStepCounter.identifier]).visit(self.parse(text))
        return self.from_string(counted.set_environment(self))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate `left operator right` (+, *, **). `RenderLimitError` if a power, text or list would be too large."""
        sizes = [
            len(value) if hasattr(value, "__len__") else value if isinstance(value, int) else 0
            for value in (left, right)
        ]
        if (
            operator == "**"
            and isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * right > MOST_BITS
        ):
            raise RenderLimitError(f"{left} ** {right} is too large")
        if hasattr(left, "__len__") or hasattr(right, "__len__"):
            _check_text_size(sizes[0] + sizes[1] if operator == "+" else sizes[0] * sizes[1])
        return super().call_binop(context, operator, left, right)


class _JinjaStepCounter(Extension):
    """Jinja extension with the methods that `_StepCountingTransformer` makes templates call."""

    def step(self) -> bool:
        """Count a step. Returns true, so that it can stand before the condition of a loop."""
        _LEFT.get().count_step()
        return True

    def joined(self, *parts: Any) -> str:
        """Concatenate the operands of `~`. `RenderLimitError` if the result is too long."""
        return _join_within_size_limit(map(str, parts))


class _StepCountingTransformer(NodeTransformer):
    """Puts a step before the body of every loop, macro and call block, and before the condition of a loop."""

    def __init__(self, steps: Extension) -> None:
        self.steps = steps

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Called by Jinja."""
        if node.test is not None:
            step = self.steps.call_method("step", lineno=node.lineno)
            node.test = nodes.And(step, node.test).set_lineno(node.lineno)
        return self._insert_step_into_body(node)

    def visit_Concat(self, node: nodes.Concat) -> Any:
        """Called by Jinja."""
        self.generic_visit(node)
        return self.steps.call_method("joined", node.nodes, lineno=node.lineno)

    def _insert_step_into_body(self, node: Any) -> Any:
        """Insert a counted step at the start of the node's body."""
        self.generic_visit(node)
        step = self.steps.call_method("step", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno))
        return node

    visit_Macro = visit_CallBlock = _insert_step_into_body  # called by Jinja
