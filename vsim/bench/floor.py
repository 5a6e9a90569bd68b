"""The floor of a step: the operations that it cannot do without, each timed alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from vsim.private_torch import TorchDispatchMode
from vsim.training.run import Ensemble

# What a step cannot do without. What only moves data, adds or allocates is not counted.
_FLOOR = frozenset(
    {
        *("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward"),
        *(f"_scaled_dot_product_flash_attention{on}{to}" for on in ("", "_for_cpu") for to in ("", "_backward")),
        *(f"_scaled_dot_product_efficient_attention{to}" for to in ("", "_backward")),
        *("gelu", "gelu_backward", "native_layer_norm", "native_layer_norm_backward"),
        *("native_batch_norm", "native_batch_norm_backward"),
        *("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "_fused_adamw_"),
    }
)


class _Calls(TorchDispatchMode):
    """Counts the operations of a step that belong to its floor, and keeps the arguments of one call of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()
        self.samples: dict[Any, Callable[[], Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _FLOOR:
            leaves, spec = tree_flatten((args, kwargs))
            kinds = [(t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else repr(t) for t in leaves]
            key = (func, tuple(kinds), str(spec))
            self.counts[key] += 1
            self.samples.setdefault(key, partial(func, *args, **kwargs))
        return func(*args, **kwargs)


class Floor:
    """What a step cannot do without, to be timed: every operation by itself, as often as the step calls it."""

    def __init__(self, ensemble: Ensemble) -> None:
        run, stack = ensemble.only
        with _Calls() as calls:
            stack.executor.losses_and_grads(next(stack.batches))
            run.strategy.take_step()
        self.calls = [(calls.samples[kind], count) for kind, count in calls.counts.items()]

    @torch.no_grad()
    def __call__(self) -> float:
        """Return its seconds."""
        seconds = 0.0
        for call, count in self.calls:
            call()  # what it reads is in the caches
            started = time.perf_counter()
            for _ in range(count):
                call()
            seconds += time.perf_counter() - started
        return seconds
