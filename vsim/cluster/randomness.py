"""Derive many independent random streams from one seed, and leave the process's global random state unchanged.

numpy's SeedSequence derives every stream from the run's seed and a key. Streams do not overlap, and an additional node
or consumer does not change the numbers of other nodes or consumers.
"""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vsim.private_torch import default_mps_generator

# The first element of a stream's key names the consumer.
NODE, SHARED, GLOBAL, EVALUATION, LOADER, PARTICIPATION = range(6)
_CPU = torch.device("cpu")
# The global generators belong to the whole process, so only one thread at a time may seed and restore them: two calls
# of fit in two threads train one after the other.
_LOCK = threading.RLock()


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    """Return a NumPy generator's state; raise a ValueError if a position would make NumPy read outside its memory."""
    for where, name, length in ((state.get("state"), "pos", 624), (state, "buffer_pos", 4)):
        if isinstance(where, dict) and name in where and not 0 <= where[name] <= length:
            raise ValueError(f"{name} of {state.get('bit_generator')} must be from 0 to {length}, got {where[name]}")
    return state


# Class of random generators → functions that read and restore their state.
GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    np.random.Generator: (
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", _checked(state)),
    ),
    np.random.RandomState: (lambda g: g.get_state(legacy=False), lambda g, state: g.set_state(_checked(state))),
    random.Random: (random.Random.getstate, random.Random.setstate),
}


def derive_seed(seed: int, *key: int) -> int:
    """Return a 63-bit seed for the stream that `key` names under the run's `seed`.

    >>> derive_seed(42, NODE, 0) == derive_seed(42, NODE, 0) != derive_seed(42, NODE, 1)
    True
    """
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def generator(seed: int, *key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new torch.Generator on `device` for the stream that `key` names under `seed`."""
    stream = torch.Generator(device)
    stream.manual_seed(derive_seed(seed, *key))
    return stream


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operations on `device` draw from by default."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    if device.type == "mps":
        return default_mps_generator()
    backend = torch.get_device_module(device)  # torch.cuda, torch.xpu
    backend.init()
    index = backend.current_device() if device.index is None else device.index
    default: torch.Generator = backend.default_generators[index]
    return default


@contextmanager
def drawing_from(stream: torch.Generator) -> Iterator[Tensor]:
    """Make operations that draw from the default generator of `stream`'s device draw from `stream` instead.

    At the end, the state of the default generator is restored, and `stream` has advanced by the draws. Yields the state
    of `stream` before the draws.
    """
    with _LOCK:
        default, before = default_generator(stream.device), stream.get_state()
        kept = default.get_state()
        default.set_state(before)
        try:
            yield before
        finally:
            stream.set_state(default.get_state())
            default.set_state(kept)


def global_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators of torch (CPU and `device`), numpy and Python."""
    return {
        "torch": default_generator(_CPU).get_state(),
        "device": default_generator(device).get_state(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
        "python": random.getstate(),
    }


def set_global_states(states: dict[str, Any], device: torch.device) -> None:
    """Set the global generators to `states`, a result of `global_states`."""
    default_generator(_CPU).set_state(states["torch"])
    default_generator(device).set_state(states["device"])
    np.random.set_state(_checked(states["numpy"]))  # noqa: NPY002
    random.setstate(states["python"])


def fingerprints(device: torch.device) -> dict[str, bytes]:
    """Return name → state of the global generators of torch (CPU and `device`), numpy and Python, for comparisons.

    In a thread that is not the main one, only those of torch: a pool's worker, such as dask's, draws from Python's
    generator in its other threads at any time.
    """
    states = global_states(device)
    torchs = {"torch.cpu": states["torch"], f"torch.{device.type}": states["device"]}
    found = {name: state.numpy().tobytes() for name, state in torchs.items()}
    if threading.current_thread() is threading.main_thread():
        found |= {"random": pickle.dumps(states["python"]), "numpy.random": pickle.dumps(states["numpy"])}
    return found


class DataStates:
    """States of the global random generators for one run's data, which the draws of other runs do not change.

    Args:
        seed: seeds the generators, as in `isolated`. device: the device whose default generator is included.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        with isolated(seed, device):
            self.states = global_states(device)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Set the process's global generators to these states within this context; draws advance the states."""
        with preserved(self.device):
            set_global_states(self.states, self.device)
            try:
                yield
            finally:
                self.states = global_states(self.device)


@contextmanager
def preserved(device: torch.device = _CPU) -> Iterator[None]:
    """Restore the global generators of torch (on the CPU and `device`), numpy and Python at the end of a block."""
    with _LOCK:
        before = global_states(device)
        try:
            yield
        finally:
            set_global_states(before, device)


@contextmanager
def isolated(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python from `seed` for a block, then restore them.

    Within the block, draws of a user's dataset, model or hook depend only on `seed`. vsim itself draws from separate
    streams.
    """
    with preserved(device):
        for g in (default_generator(_CPU), default_generator(device)):
            g.manual_seed(derive_seed(seed, GLOBAL, 0))
        np.random.seed(derive_seed(seed, GLOBAL, 1) % 2**32)  # noqa: NPY002
        random.seed(derive_seed(seed, GLOBAL, 2))
        yield
