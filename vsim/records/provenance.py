"""Describe a run as JSON: its arguments, model, data, versions, machine and date.

Two runs can be compared if their conditions are equal: all settings except the strategy, the seed, and settings that do
not affect the losses, such as loggers and executors.
"""

from __future__ import annotations

import html
import math
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vsim.cluster.optim import OptimSpec
from vsim.network import Compute, Network
from vsim.version import __version__

# Deeper objects are described only by their class.
_DEPTH = 4
# Most differences that an error names.
_NAMED = 4
# Entries of a configuration that may differ between compared runs: the strategy and the seed, which are compared;
# settings that change losses only by rounding; and settings that only record losses.
_FREE = frozenset(
    {
        *("strategy", "seed", "given", "started", "versions", "machine", "compute", "network"),
        *("executor", "compile", "deterministic", "chunk_size", "device", "devices", "backend"),
        *("num_processes", "threads_per_process", "timeout_seconds"),
        *("minibatch_size", "gradient_accumulation", "max_memory_usage"),
        *("val_interval", "correlation_interval", "metrics", "client_val_dataset", "callbacks"),
        *("train_loss_hook", "eval_loss_hook", "progress", "group"),
        *("logger", "log_interval", "run_name", "wandb_project", "log_x_axis"),
        *("save_dir", "resume", "checkpoint_interval"),
    }
)


def versions() -> dict[str, str]:
    """Return name → version of the software that a run's numbers depend on."""
    return {
        "vsim": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def describe(value: Any, depth: int = _DEPTH) -> Any:
    """Describe `value` in a form that JSON can hold.

    >>> describe(OptimSpec("sgd", lr=0.1))
    {'class': 'SGD', 'lr': 0.1}
    >>> describe((1, math.inf, torch.float32, math.sqrt))
    [1, 'inf', 'torch.float32', 'math.sqrt']
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, np.generic):
        return describe(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, OptimSpec):
        return {"class": value.cls.__name__, **describe(value.arguments, depth)}
    if isinstance(value, Mapping):
        return {str(key): describe(item, depth) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [describe(item, depth) for item in value]
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (torch.Tensor, np.ndarray, nn.Module)):
        return type(value).__qualname__
    if isinstance(value, Path) or not hasattr(value, "__dict__"):
        return str(value)
    if isinstance(value, Network | Compute):
        return {"class": type(value).__qualname__, **describe(value.as_plain(), depth)}
    known: dict[str, Any] = {"class": type(value).__qualname__}
    if depth:
        known |= {name: describe(own, depth - 1) for name, own in vars(value).items() if not name.startswith("_")}
    return known


# Comparing ------------------------------------------------------------------------------------------------------------


def conditions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must be equal in compared runs; not the model's digest, which depends on the seed."""
    own = {name: value for name, value in config.items() if name not in _FREE}
    if isinstance(own.get("model"), Mapping):
        own["model"] = {name: value for name, value in own["model"].items() if name != "digest"}
    return own


def differing(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield the differences of two descriptions in words. An unknown digest equals every digest.

    >>> list(differing({"batch_size": 16, "model": {"class": "MLP"}}, {"batch_size": 8, "model": {"class": "MLP"}}))
    ['batch_size is 16 and 8']
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in dict.fromkeys([*one, *other]):
            yield from differing(one.get(name), other.get(name), f"{path}.{name}" if path else str(name))
    elif one != other and not (path.endswith(".digest") and None in (one, other)):
        yield f"{path} is {_shortened(one)} and {_shortened(other)}"


class Conditions:
    """The conditions that the runs of a comparison share: model, data, nodes, steps and options.

    Args:
        varied: options that may differ, because a sweep varies them.
    """

    def __init__(self, varied: Iterable[str] = ()) -> None:
        self._varied = frozenset(varied)
        self._first: tuple[str, dict[str, Any]] | None = None
        self._weights: dict[int, tuple[str, Any]] = {}  # seed → a run with it, and the digest of its initial weights

    def check(self, name: str, seed: int, config: Mapping[str, Any]) -> None:
        """Add a run; raise a ValueError unless it can be compared with the earlier runs."""
        if not config:
            raise ValueError(
                f"{name}, seed {seed} has no configuration, so that nothing says whether other runs fit it"
            )
        own = {key: value for key, value in conditions(config).items() if key not in self._varied}
        if self._first is None:
            self._first = name, own
        found = list(differing(self._first[1], own))
        known, weights = self._weights.setdefault(seed, (name, config["model"].get("digest")))
        if weights != config["model"].get("digest"):
            found.append(f"the initial weights of seed {seed} are others in {known}")
        if found:
            more = "; and more" if len(found) > _NAMED else ""
            raise ValueError(f"{self._first[0]} and {name} do not fit together: {'; '.join(found[:_NAMED])}{more}")


def check_same_strategy(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise a ValueError if the strategies of two configurations differ."""
    own, theirs = (config.get("strategy", {}) for config in (one, other))
    if own == theirs:
        return
    calls = [str(strategy.get("call")) for strategy in (own, theirs)]
    what = " and ".join(calls) if calls[0] != calls[1] else "; ".join(islice(differing(own, theirs), _NAMED))
    raise ValueError(
        f"two different strategies are called {name!r}: {what}; give one of them another name, as with "
        f"comparison.renamed({{{name!r}: …}})"
    )


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


# Showing --------------------------------------------------------------------------------------------------------------


class Provenance(dict[str, Any]):
    """A description that is displayed as indented text, also in a notebook."""

    def __repr__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def _lines(content: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield f"{'  ' * depth}{name}:"
            yield from _lines(value, depth + 1)
        elif isinstance(value, list) and value and isinstance(value[0], str) and len(str(value)) > 80:
            yield f"{'  ' * depth}{name}:"
            yield from (f"{'  ' * (depth + 1)}{line}" for line in value)
        else:
            yield f"{'  ' * depth}{name}: {value}"


def described(
    strategies: Mapping[str, str],
    seeds: Any,
    calls: Sequence[str],
    configs: Sequence[Mapping[str, Any]],
    computed: Sequence[str],
) -> Provenance:
    """Return a description of compared runs.

    Args:
        strategies: name → the call that makes the strategy. seeds: of the runs, or name → seeds.
        calls: the calls that trained the runs. configs: the configurations of the runs, as far as known.
        computed: the executors of the runs, each with the reason.
    """
    shared: dict[str, Any] = {}
    for config in configs:
        for name, value in config.items():
            if value not in shared.setdefault(name, []):
                shared[name].append(value)
    own = {name: values[0] if len(values) == 1 else values for name, values in shared.items()}
    for name in ("strategy", "seed"):
        own.pop(name, None)
    about = {name: own.pop(name, None) for name in ("model", "train_dataset", "val_dataset", "versions", "machine")}
    if isinstance(about["model"], list):  # of several seeds
        digests = [model["digest"] for model in about["model"]]
        about["model"] = {**about["model"][0], "digest": digests}
    started = shared.get("started", [])
    own["started"] = " to ".join(dict.fromkeys(filter(None, [min(started, default=""), max(started, default="")])))
    given = {name for config in configs for name in (*config.get("given", ()), "num_nodes", "started", "loss_fn")}
    known = {name: own[name] for name in own if name in given} | about
    known = {name: value for name, value in known.items() if value not in (None, "", [])}
    known |= {"computed": list(computed)} if computed else {}
    return Provenance({"strategies": dict(strategies), "seeds": seeds, **known, "calls": list(calls)})
