"""Make a strategy from the text of the call that made it; files keep this text."""

from __future__ import annotations

import ast
import math
import warnings
from typing import Any

from vsim import strategy
from vsim.cluster.optim import OPTIMIZERS
from vsim.reading import opening_nothing
from vsim.strategy.base import Algorithm

# The names that a call may use: vsim's own classes, and the functions of averages.
_OWN = {name: own for name in strategy.__all__ if callable(own := getattr(strategy, name))}
_LONGEST = 10_000  # the most characters of a call that is parsed


def remade(call: str) -> Algorithm | None:
    """Return the strategy that a call makes; None if the call uses anything but vsim's classes and plain values.

    The text is parsed, not evaluated, and no file that the text names is opened.

    >>> remade("DiLoCoStrategy(inner_optim=OptimSpec(AdamW, weight_decay=0.1), H=10, average=mean(by='examples'))")
    DiLoCoStrategy(inner_optim=OptimSpec(AdamW, weight_decay=0.1), H=10, average=mean(by='examples'))
    >>> remade("DiLoCoStrategy(H=print(10))"), remade("MyStrategy(H=10)"), remade("DiLoCoStrategy")
    (None, None, None)
    """
    if len(call) > _LONGEST:
        return None
    try:
        with warnings.catch_warnings(), opening_nothing():
            warnings.simplefilter("ignore")
            made = _value(ast.parse(call, mode="eval").body)
    except Exception:  # a file may hold any text
        return None
    return made if isinstance(made, Algorithm) and _sorted(repr(made)) == _sorted(call) else None


def _sorted(call: str) -> str:
    """Return a call with its arguments sorted by name, since older files may have another order."""
    tree = ast.parse(call, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.keywords.sort(key=lambda one: str(one.arg))
    return ast.unparse(tree)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        own = [_value(one) for one in node.elts]
        return own if isinstance(node, ast.List) else tuple(own)
    if isinstance(node, ast.Dict):
        return {_value(key): _value(one) for key, one in zip(node.keys, node.values, strict=True) if key is not None}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Name):
        return math.inf if node.id == "inf" else OPTIMIZERS[node.id.lower()]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _value(node.left) | _value(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        given = {str(one.arg): _value(one.value) for one in node.keywords}
        return _OWN[node.func.id](*map(_value, node.args), **given)
    raise ValueError(f"{ast.dump(node)} is not a plain value")
