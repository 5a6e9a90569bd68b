"""What a run that resumes must have in common with the saved one, and how descriptions of runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vsim.cluster.replicas import Replicas, kept_in_evaluation
from vsim.history.describe import WIDTH, describe, digest_of, sized, versions

# The most differences that an error names.
NAMED = 4


def differences(one: Any, other: Any, words: str = "{} is {} and {}", path: str = "") -> Iterator[str]:
    """Yield the differences of two descriptions in words. An unknown digest equals every digest.

    For objects of different classes, only the classes are named.

    >>> list(differences({"batch_size": 16, "model": {"class": "MLP"}}, {"batch_size": 8, "model": {"class": "MLP"}}))
    ['batch_size is 16 and 8']
    """
    both = one, other
    if all(isinstance(side, Mapping) for side in both) and (not path or one.get("class") == other.get("class")):
        for name in dict.fromkeys([*one, *other]):
            yield from differences(one.get(name), other.get(name), words, f"{path}.{name}" if path else str(name))
    elif all(isinstance(side, list) for side in both) and len(one) == len(other) and not all(map(_is_short, both)):
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, words, f"{path}[{i}]")
    elif one != other and not (path.endswith(".digest") and None in both):
        yield words.format(path, *map(_shown, both))


def _is_short(items: list[Any]) -> bool:
    return len(str(items)) <= WIDTH and not any(isinstance(item, Mapping) for item in items)


def _shown(value: Any) -> str:
    text = "absent" if value is None else str(value.get("class", value) if isinstance(value, Mapping) else value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}…"


_ARGUMENTS = (
    *("num_nodes", "batch_size", "minibatch_size", "seed", "shuffle", "autocast", "deterministic", "compile"),
    *("compute", "network", "loss_fn", "participation"),
)
# Names of settings that a run compares by special rules when it resumes.
HORIZON = "steps of the learning-rate schedule"
VERSIONS = "versions"
# How `differences` between the saved run and the run that resumes are worded.
CHANGED = "{} was {} and is {}"


def settings_of_run(run: Any) -> dict[str, Any]:
    """Return argument → description for everything that determines a run, except its number of steps.

    Args:
        run: a `vsim.training.tracked.TrackedRun`.
    """
    spec, replicas, kwargs = run.spec, run.cluster.replicas, run.spec.dataloader_kwargs
    found = {name: describe(getattr(spec, name), seen=set()) for name in _ARGUMENTS}
    if found["participation"] is not None:
        found["participation"].pop("store", None)
    weights = [*spec.model.parameters(), *spec.model.buffers()]
    data = zip(run.presence.batches.lengths, run.presence.batches.of_datasets(digest_of), strict=True)
    return {
        **found,
        "train_dataset": [sized(*own) for own in data],
        "drop_last": bool(kwargs.get("drop_last", False)),
        "collate_fn": describe(kwargs.get("collate_fn"), seen=set()),
        "device": replicas.weights.device.type,
        HORIZON: run.strategy.schedule.horizon(run.max_steps),
        VERSIONS: {name: version for name, version in versions().items() if name in ("torch", "numpy")},
        **layout_of(replicas),
        **{f"frozen {name}": describe(p, seen=set()) for name, p in replicas.frozen.items()},
        **{f"mode of {path}": "evaluation" for path in kept_in_evaluation(spec.model)},
        "strategy": run.strategy.settings,
        "module": describe(spec.model, seen=set(map(id, weights))),
    }


def settings_of(strategy: Any) -> dict[str, Any]:
    """Describe a strategy's arguments. A run's copy of a strategy holds the description made before its setup."""
    return vars(strategy).get("settings") or describe(strategy, seen=set())


def layout_of(replicas: Replicas) -> dict[str, Any]:
    """Return the shapes and dtypes of a model's weights and buffers; a fork must have the same."""
    return {
        **{f"parameter {c.name}": [list(c.shape), str(replicas.weights.dtype)] for c in replicas.layout},
        **{f"buffer {name}": [list(b.shape[1:]), str(b.dtype)] for name, b in replicas.buffers.items()},
        "parameters": [c.name for c in replicas.layout],
        "buffers": list(replicas.buffers),
    }
