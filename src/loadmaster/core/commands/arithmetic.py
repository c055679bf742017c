"""``$((32*1024))`` of a shell text, where only numbers stand in it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_EXPANSION = re.compile(r"\$\(\(([\d\s+*/%()-]{1,200}?)\)\)")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: int(left / right),
    ast.Mod: lambda left, right: left - int(left / right) * right,
}
_LARGEST = 1 << 63


def with_arithmetic(text: str) -> str:
    """The text with every such expansion worked out; those that cannot be stay as they are."""
    return _EXPANSION.sub(_worked_out, text)


def _worked_out(match: re.Match[str]) -> str:
    try:
        value = _value(ast.parse(match[1].strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return match[0]
    return str(value)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
        if abs(value) < _LARGEST:
            return value
    raise ValueError("no arithmetic of whole numbers")
