"""Make a strategy from the text of the call that made it; files keep this text."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Mapping
from typing import Any

from vsim import strategy
from vsim.cluster.optim import OPTIMIZERS
from vsim.core.algorithm import Algorithm
from vsim.reading import opening_nothing

# The names that a call may use: vsim's own classes, and the functions of averages.
_NO_CALLS = {"algorithm", "state"}
_OWN = {name: own for name in strategy.__all__ if callable(own := getattr(strategy, name)) and name not in _NO_CALLS}
# The parts of vsim 0.2.0's compositions: class → the class that took its place, and renamed arguments.
_PARTS: dict[str, tuple[str, dict[str, str]]] = {
    "AveragingCommunicator": ("FedAvgStrategy", {"every": "H"}),
    "ControlVariates": ("ScaffoldStrategy", {}),
    "DiLoCoCommunicator": ("DiLoCoStrategy", {}),
    "DynamicRegularizer": ("FedDynStrategy", {}),
    "EDiTCommunicator": ("EDiTStrategy", {}),
    "EagerDiLoCoCommunicator": ("EagerDiLoCoStrategy", {}),
    "GossipCommunicator": ("GossipStrategy", {}),
    "GradientAverage": ("SimpleReduceStrategy", {}),
    "LocalNorms": ("FedBNStrategy", {}),
    "NormalizedAverage": ("FedNovaStrategy", {}),
    "PairCommunicator": ("NoLoCoStrategy", {}),
    "PersonalAverage": ("FedPerStrategy", {}),
    "PrivateAverage": ("DPFedAvgStrategy", {}),
    "ServerStep": ("FedOptStrategy", {}),
    "SlowMomentum": ("SlowMoStrategy", {}),
    "SparseCommunicator": ("SPARTAStrategy", {"sparsification_rate": "p_sparta", "every": "sparta_interval"}),
    "StreamingDiLoCoCommunicator": ("StreamingDiLoCoStrategy", {}),
}
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
            tree = _normal(call)
            made = _value(tree.body)
    except Exception:  # a file may hold any text
        return None
    return made if isinstance(made, Algorithm) and ast.dump(_normal(repr(made))) == ast.dump(tree) else None


def _normal(call: str) -> ast.Expression:
    """Parse a call of any version: with present names, and arguments in the order of their names."""
    tree = ast.parse(call, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in _PARTS:
                node.func.id, renamed = _PARTS[node.func.id]
                for argument in node.keywords:
                    argument.arg = renamed.get(str(argument.arg), argument.arg)
            node.keywords.sort(key=lambda one: str(one.arg))
    return tree


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


def in_present_names(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a strategy's description, if vsim 0.2.0 made it, with the names that its attributes have now.

    In 0.2.0 a strategy had communication modules; their attributes are its own now, or those of its parts.
    """
    modules = about.get("communication_modules")
    if not isinstance(modules, list) or not all(isinstance(module, Mapping) for module in modules):
        return dict(about)
    parts = [{**own, "class": _PARTS.get(str(own.get("class")), (own.get("class"), {}))[0]} for own in modules]
    kind = about.get("class")
    if kind in ("Strategy", "CommunicateOptimizeStrategy"):
        return {**about, "communication_modules": parts}
    if kind in ("DESLOCStrategy", "HierarchicalStrategy", "SPARTADiLoCoStrategy"):
        return {**about, "composed": parts}
    return {name: value for own in (*parts, about) for name, value in own.items()}
