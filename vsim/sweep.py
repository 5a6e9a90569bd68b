"""A sweep: one strategy over a grid of settings, with several seeds, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from vsim.analysis.comparison import no_comparison
from vsim.analysis.swept import Sweep
from vsim.compare import call_text, compare, train_entries
from vsim.data.batches import Data
from vsim.grid import known_settings, made, points
from vsim.strategy.base import Algorithm
from vsim.training.spec import takes_options

# Arguments of a run that may be settings, besides the strategy's arguments.
OF_THE_RUN = ("num_nodes", "batch_size")


@takes_options("strategies", "tune", of=compare)
def sweep(
    model: nn.Module | Callable[[int], nn.Module],
    train_dataset: Data,
    val_dataset: Data | None = None,
    *,
    strategy: Callable[..., Algorithm],
    settings: Mapping[str, Any],
    num_nodes: int | None = None,
    seeds: Sequence[int] | None = None,
    halving: int | None = None,
    **options: Any,
) -> Sweep:
    """Train with every combination of settings and every seed, under identical conditions.

    Args:
        model, train_dataset, val_dataset, seeds: see `compare`.
        strategy: a class of strategies, or a function that returns one.
        settings: arguments of the strategy by name, and `num_nodes` and `batch_size` if they vary. A list is varied;
            any other value is the same for all. Put a value that is itself a list in a list. See `vsim.grid`.
        num_nodes: K, unless `num_nodes` is one of the settings.
        halving: a factor f from 2 to 10: successive halving [Jamieson and Talwalkar 2016, arXiv:1502.07943]. At each
            rung (after T / f, T / f², … of T steps, none in the first tenth) only the best 1 / f of the settings, by
            their mean loss over the seeds, continue. The runs of stopped settings stay in the result, with
            `stopped_at`. Early rungs favour fast starters. Halving needs one `max_steps` for all settings.
        options: every other argument of `compare`, the same for all; but a `budget` gives each setting its own number
            of steps, and `max_steps` may be a dict of name → steps, with names as in `vsim.grid`.

    Returns:
        A `Sweep`. All settings are set up before the first one trains; errors name the invalid setting.

    Raises:
        TypeError, ValueError: see `grid` and `compare`.

    Example:
        >>> import vsim
        >>> from vsim.data import digits
        >>> from vsim.models import MLP
        >>> from vsim.strategy import DiLoCoStrategy
        >>> train, val = digits()
        >>> result = vsim.sweep(MLP(seed=0), train, val, strategy=DiLoCoStrategy, num_nodes=2, max_steps=20,
        ...     settings={"H": [5, 10], "outer_lr": [0.4, 1.0], "lr": 1e-3}, progress=False)
        >>> result.settings[result.best()]
        {'H': 5, 'outer_lr': 1.0, 'lr': 0.001}
    """
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings must be a dict of argument → value or list of values, got {settings!r}")
    given = {"num_nodes": num_nodes, "batch_size": options.get("batch_size")}
    for key, value in given.items():
        if key in settings and value is not None:
            raise TypeError(f"{key} is given twice: as an argument, and in settings")
    if num_nodes is None and "num_nodes" not in settings:
        raise TypeError("sweep() needs num_nodes, as an argument or in settings")
    known_settings(strategy, settings, OF_THE_RUN)
    found = points(strategy, settings)
    entries: dict[str, dict[str, Any]] = {}
    for name, point in found.items():
        own = {key: value for key, value in point.values.items() if key not in OF_THE_RUN}
        nodes: Any = point.values.get("num_nodes", num_nodes)
        entries[name] = {"strategy": made(strategy, name, own), "num_nodes": nodes}
        if "batch_size" in point.values:
            entries[name]["batch_size"] = point.values["batch_size"]
    extend = options.pop("extend", None)
    if not isinstance(extend, Sweep | None):
        raise no_comparison("extend", extend, Sweep)
    runs = train_entries(
        entries, model, train_dataset, val_dataset, seeds=seeds, halving=halving, extend=extend, **options
    )
    result = Sweep.of_points(runs, found, getattr(strategy, "__name__", "strategy").removesuffix("Strategy"))
    result.calls = [call_text("vsim.sweep", strategy=strategy, settings=settings, seeds=seeds, **options)]
    if extend is None:
        return result
    both = extend | result
    assert isinstance(both, Sweep)
    return both
