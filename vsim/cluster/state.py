"""State that lasts from step to step, is declared when it is created, and is saved with the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import getattr_static, isdatadescriptor
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class CheckpointError(ValueError):
    """A run cannot be saved, or a checkpoint cannot be used."""


class Stateful:
    """Base of strategies, modules, selectors and compressors with state that lasts from step to step and is saved.

    Declare state when creating it, in the setup:

        self.keep_shared(outer_weights=cluster.weights[0].clone())  # equal on all nodes
        self.keep_stacked(residual=torch.zeros_like(cluster.weights))  # a row for each node held here

    Both methods set the attributes, which may be set again later. `keep_client` is `keep_stacked` for rows that belong
    to clients of a population. A value is a tensor, a number, a text, a random generator (of torch, NumPy or Python),
    an optimizer, a torch module, another object with `state_dict()` and `load_state_dict(state)`, or a list, tuple,
    dict or set of these values. A stacked value may also be a list with an item for each node held here. When a run
    moves between the simulator and processes, stacked values are cut or joined, and shared values must be equal.

    Tensors and containers may be made at any time. Generators, optimizers and objects must be made in the setup,
    because resuming a run first sets it up, and then restores their states. Other attributes are settings: a run whose
    settings change cannot be saved; see `vsim.checkpoint.undeclared`.

    Attributes:
        derived: names of attributes that are computed from other attributes, and are not saved.
        carried: names of the shared attributes that a forked run takes over.
    """

    derived: ClassVar[tuple[str, ...]] = ()
    carried: ClassVar[tuple[str, ...]] = ()

    def keep_shared(self, **values: Any) -> None:
        """Set attributes that last from step to step, and are equal on all nodes."""
        self._keep("shared", values)

    def keep_stacked(self, **values: Any) -> None:
        """Set attributes that last from step to step, with a row or a list item for each node held here.

        Raises:
            ValueError: a tensor has no dimension for the nodes.
        """
        for name, value in values.items():
            if any(isinstance(leaf, Tensor) and not leaf.dim() for leaf in tree_leaves(value)):
                raise ValueError(f"keep_stacked({name}=…): a scalar tensor has no row for each node; keep_shared has")
        self._keep("stacked", values)

    def keep_client(self, **tensors: Tensor) -> None:
        """Set stacked tensors whose rows belong to the clients that the nodes currently serve.

        If nodes serve a population, a client's row is kept until the next round in which the client takes part. The
        given tensors are the initial state of every client.
        """
        self.keep_stacked(**tensors)
        vars(self).setdefault("_of_clients", set()).update(tensors)

    def _keep(self, placement: str, values: dict[str, Any]) -> None:
        for name in values:
            if isdatadescriptor(getattr_static(type(self), name, None)):  # which would hide the value
                raise TypeError(
                    f"keep_{placement}({name}=…): {type(self).__name__} has its own {name}; rename the state"
                )
        vars(self).setdefault("_placements", {}).update(dict.fromkeys(values, placement))
        vars(self).update(values)


Values = Mapping[str, Any]


def _nothing() -> Values:
    return {}


@dataclass(frozen=True)
class Lasting:
    """The state that one owner declares on a run; names are those in files.

    Attributes:
        stacked: returns name → value with a row, or a list item, for each node that is held here.
        shared: returns name → value that is equal on all nodes.
        restore: called with name → value after values are filled from a file or from other rows; other names of the
            same call belong to other owners. Not needed where values are filled in place.
        may_be_new: whether a file may lack the state, which then stays as it is.
    """

    stacked: Callable[[], Values] = _nothing
    shared: Callable[[], Values] = _nothing
    restore: Callable[[Values], None] = lambda filled: None
    may_be_new: bool = False


def placements_of(value: Any) -> dict[str, str]:
    """Return name → "stacked" or "shared" for the declared attributes of an object."""
    declared: dict[str, str] = vars(value).get("_placements", {}) if isinstance(value, Stateful) else {}
    return declared


def check_rows(value: Any, weights: Tensor) -> None:
    """Raise a ValueError if a stacked tensor does not have a row for each node, or a shared tensor does.

    Args:
        weights: stacked (R, P).
    """
    for name, placement in placements_of(value).items():
        tensor, rows = vars(value).get(name), len(weights)
        if not isinstance(tensor, Tensor):
            continue
        right = len(tensor) == rows if placement == "stacked" else rows == 1 or tensor.shape != weights.shape
        if not right:
            raise ValueError(
                f"{type(value).__name__}: keep_{placement}({name}=…) got a tensor {list(tensor.shape)} for the {rows} "
                "nodes here; keep_stacked takes a row for each node, and keep_shared what is equal on all nodes"
            )


def of_clients(value: Any) -> frozenset[str]:
    """Return the names of an object's attributes whose rows belong to clients; see `Stateful.keep_client`."""
    return frozenset(vars(value).get("_of_clients", ())) if isinstance(value, Stateful) else frozenset()


def owners(strategy: Any) -> dict[str, Stateful]:
    """Return name → part: the strategy and all its parts that declare state, including parts in lists and tuples.

    A name is the part's class name; from the second part of a class on, with a number.
    """
    found: dict[str, Stateful] = {}
    counts: Counter[str] = Counter()
    coming = [strategy]
    while coming:
        part = coming.pop()
        if isinstance(part, list | tuple):
            coming += reversed(part)
        elif isinstance(part, Stateful) and not any(part is known for known in found.values()):
            name = type(part).__name__
            counts[name] += 1
            found[name if counts[name] == 1 else f"{name} {counts[name]}"] = part
            coming += reversed(vars(part).values())
    return found


def with_extra_state(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of the submodules that define `get_extra_state`."""
    base = nn.Module.get_extra_state
    return [(path, own) for path, own in module.named_modules() if type(own).get_extra_state is not base]


def name_of(cls: type) -> str:
    """Return the full name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}" if cls.__module__ != "builtins" else cls.__qualname__


def described(value: Any) -> str:
    """Describe a function, class or other constant, identically in every process."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return f"{getattr(value, '__module__', None) or ''}.{name}".lstrip(".") if name else str(value)
