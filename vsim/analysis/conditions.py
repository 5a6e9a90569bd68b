"""What runs must have in common to be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from vsim.history.agreement import NAMED, differences

# Entries of a configuration that may differ between compared runs: the strategy and the seed, which comparisons vary;
# settings that change losses only by rounding; and settings that only record losses.
_FREE = frozenset(
    {
        *("strategy", "seed", "given", "started", "versions", "machine", "compute", "network"),
        *("executor", "compile", "deterministic", "chunk_size", "device", "devices", "backend"),
        *("num_processes", "threads_per_process", "timeout_seconds"),
        *("minibatch_size", "gradient_accumulation", "max_memory_usage"),
        *("val_interval", "val_nodes", "correlation_interval", "metrics", "callbacks"),
        *("client_val_dataset", "client_val_steps"),
        *("train_loss_hook", "eval_loss_hook", "progress", "group"),
        *("logger", "log_interval", "run_name", "wandb_project", "log_x_axis"),
        *("save_dir", "resume", "checkpoint_interval"),
    }
)
# The entry "budget" of runs whose `max_steps` were given by the strategy's name.
BY_NAME = {"max_steps": "by name"}


class Conditions:
    """Checks that runs share model, data, nodes, steps and options, and that each name stands for one strategy.

    Runs within one budget, or with `max_steps` given by strategy, may have different numbers of steps.

    Args:
        varied: options that may differ, because a sweep varies them.
    """

    def __init__(self, varied: Iterable[str] = ()) -> None:
        self._free = _FREE.union(varied)
        self._first: tuple[str, dict[str, Any]] | None = None
        self._weights: dict[int, tuple[str, Any]] = {}  # seed → name of a run, digest of its initial weights
        self._strategies: dict[str, Any] = {}
        self._steps: dict[str, tuple[str, Any]] = {}  # name, or "" for all runs of one length → a run, and max_steps

    def check(self, name: str, seed: int, config: Mapping[str, Any]) -> None:
        """Add a run; raise a ValueError unless it can be compared with the earlier runs."""
        if not config:
            raise ValueError(
                f"{name}, seed {seed} has no configuration, so that nothing says whether other runs fit it"
            )
        own = {key: value for key, value in config.items() if key not in self._free}
        own["model"] = {**own["model"], "digest": None}  # the digest depends on the seed
        for data in ("train_dataset", "val_dataset"):  # equal data may have different names
            if isinstance(own.get(data), Mapping):
                own[data] = {key: value for key, value in own[data].items() if key != "name"}
        steps, within, epochs = own.pop("max_steps", None), own.get("budget"), own.pop("num_epochs", None)
        if steps is None and within is None:  # else the epochs do not end the run
            own["num_epochs"] = epochs or 1
        if within == BY_NAME:  # the run may be compared with runs of other lengths
            del own["budget"]
        self._first = self._first or (name, own)
        found = list(differences(self._first[1], own))
        if within is None or within == BY_NAME:
            other, known_steps = self._steps.setdefault("" if within is None else name, (name, steps))
            if known_steps != steps:
                hint = "" if other == name else "; max_steps may be a dict of name → steps"
                found.append(f"max_steps is {known_steps} and {steps}{hint}")
        known, weights = self._weights.setdefault(seed, (name, config["model"].get("digest")))
        if weights != config["model"].get("digest"):
            found.append(f"the initial weights of seed {seed} are others in {known}")
        if found:
            more = "; and more" if len(found) > NAMED else ""
            raise ValueError(f"{self._first[0]} and {name} do not fit together: {'; '.join(found[:NAMED])}{more}")
        both = self._strategies.setdefault(name, config.get("strategy", {})), config.get("strategy", {})
        if both[0] != both[1] and not _are_same_calls(*(strategy.get("call") for strategy in both)):
            calls = [str(strategy.get("call")) for strategy in both]
            what = " and ".join(calls) if calls[0] != calls[1] else "; ".join(islice(differences(*both), NAMED))
            raise ValueError(
                f"two different strategies are called {name!r}: {what}; give one of them another name, as with "
                f"comparison.renamed({{{name!r}: …}})"
            )


def _are_same_calls(*calls: Any) -> bool:
    """Return whether two calls make the same strategy of vsim, whose attributes other versions call otherwise."""
    from vsim.strategy.remade import remade  # loads all algorithms, and few comparisons need them

    made = [remade(call) if isinstance(call, str) else None for call in calls]
    return None not in made and len({repr(strategy) for strategy in made}) == 1
