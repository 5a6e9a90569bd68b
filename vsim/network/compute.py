"""Compute seconds per step and node, constant or drawn."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import a_list, known_keywords, naming, real_number, whole_number
from vsim.arguments import given as given_value
from vsim.figures.words import size_text
from vsim.network.cluster_file import names_file, read_part
from vsim.network.links import num_bytes, seconds
from vsim.network.pipeline import Pipeline

_PLAIN = (
    *("num_nodes", "layers", "jitter", "factors", "seed", "bucket_bytes", "dollars_per_hour", "memory", "utilization"),
)


class Compute:
    """The compute seconds of a step, on every node.

    Args:
        seconds_per_step: forward, backward and optimizer together, in seconds or as text ("800 ms"): one number, or one
            per node.
        layers: L layers of equal size. The gradient of a layer is ready when the backward pass has reached the layer,
            and the payload is sent in parts, each once it is ready. A step is a chain of 3L − 1 equal pieces: L for the
            forward pass, and 2L − 1 for the backward pass, in turn the gradients of a layer's weights and activations,
            down to the first layer's weights. Default: the whole payload is sent when the step is computed.
        speeds: relative speeds, one per node: a step of node k takes seconds_per_step / speeds[k].
        jitter: σ, at least 0: each step of each node takes exp(σ z − σ²/2) times as long, z drawn from N(0, 1).
        factors: instead of `jitter`, measured variation: each step of each node takes one of these factors times as
            long, drawn with equal probability. They are not scaled: with `seconds_per_step` the median step, they are
            the measured seconds of many steps divided by their median.
        seed: seed of the jitter, or of the factors.
        bucket_bytes: least size of a part. The layers travel in the largest number of equal parts of this size or more;
            default 25e6, as in PyTorch's DDP. 0: one message per layer. Needs `layers`.
        dollars_per_hour: price of a node.
        memory: memory of a node, or of each machine of a node with a `pipeline`, in bytes or as text ("80 GB", in
            powers of ten). `Ladder.decide` leaves out the strategies whose weights, gradients and states need more;
            activations are not counted. A pipeline's machine holds an equal share: of S stages with E machines for
            experts, 1 / (S · E). No time, byte or price depends on the memory.
        pipeline: a `Pipeline`, for a node of several machines. `seconds_per_step` is then the time in which all
            machines of a node compute a step if none waits, and steps take longer, by the waits inside a node.

    Attributes:
        node_seconds: the seconds of a step with the waits inside a node, (1,) if all nodes are alike, else (K,).
        utilization: the share of these seconds in which the machines of a node compute; 1 without a pipeline.
        num_nodes: K; None: usable for any K.

    Raises:
        TypeError, ValueError: a value is not above 0, or arguments have values for different numbers of nodes.
    """

    @known_keywords
    def __init__(
        self,
        seconds_per_step: float | str | Sequence[float | str],
        *,
        layers: int | None = None,
        speeds: Sequence[float] | None = None,
        jitter: float | None = None,
        factors: Sequence[float] | None = None,
        seed: int | None = None,
        bucket_bytes: float | None = None,
        dollars_per_hour: float | None = None,
        memory: float | str | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        per_node = not isinstance(seconds_per_step, str) and bool(np.ndim(seconds_per_step))
        given = _listed(seconds_per_step) if per_node else [seconds_per_step]
        own = np.array([seconds("seconds_per_step", one, above=0) for one in given])
        if speeds is not None:
            if not np.ndim(speeds):
                raise TypeError(f"speeds must be numbers, one per node, got {speeds!r}")
            relative = np.array([real_number("speeds", one, above=0) for one in _listed(speeds)])
            if per_node and len(relative) != len(own):
                raise ValueError(f"seconds_per_step has {len(own)} values, one per node, and speeds {len(relative)}")
            own = own / relative
        if not len(own):
            raise ValueError("seconds_per_step and speeds must have one number per node, and there is none")
        self.node_seconds: NDArray[np.float64] = own
        self.num_nodes = len(own) if per_node or speeds is not None else None
        self.layers = 1 if layers is None else whole_number("layers", layers)
        self.jitter = 0.0 if jitter is None else real_number("jitter", jitter, at_least=0, at_most=10)
        self.factors: list[float] | None = None
        if factors is not None:
            self.factors = [real_number("factors", one, above=0) for one in a_list("factors", factors)]
        if self.jitter and self.factors:
            raise TypeError(f"jitter={jitter} and factors={factors!r:.100} both say how steps vary; give one of them")
        if seed is not None and not self.varies:
            raise TypeError("seed is that of the jitter or the factors, and has no effect without jitter= or factors=")
        self.seed = 42 if seed is None else whole_number("seed", seed, at_least=0)
        self.bucket_bytes = 25e6 if bucket_bytes is None else real_number("bucket_bytes", bucket_bytes, at_least=0)
        if bucket_bytes is not None and layers is None:
            raise TypeError(
                f"bucket_bytes={bucket_bytes:g} has no effect without layers=: everything is sent at once. Give "
                "Compute(…, layers=24), the layers of the model"
            )
        self.dollars_per_hour: float | None = None
        if dollars_per_hour is not None:
            self.dollars_per_hour = real_number("dollars_per_hour", dollars_per_hour, at_least=0)
        self.memory = None if memory is None else num_bytes("memory", memory)
        self.utilization, self.pipeline = 1.0, pipeline
        if not isinstance(pipeline, Pipeline | None):
            raise TypeError(f"pipeline must be a vsim.Pipeline, got {given_value(pipeline)}")
        if pipeline is not None:
            vars(self).update(vars(self.inside(pipeline)))

    def inside(self, pipeline: Pipeline) -> Compute:
        """Return this compute with nodes that are such pipelines; their waits are added once all sizes are known."""
        other = copy.copy(self)
        other.pipeline = pipeline
        if not pipeline.unknown:
            other.node_seconds = pipeline.seconds(self.node_seconds)
            other.utilization = float(self.node_seconds.mean() / other.node_seconds.mean())
        return other

    def of_model(self, sizes: Mapping[str, int]) -> Compute:
        """Return the compute for a model with these sizes, by name, which complete its pipeline; see `Pipeline`."""
        if self.pipeline is None or not self.pipeline.unknown:
            return self
        with naming("pipeline"):
            return self.inside(self.pipeline.of_model(sizes))

    @classmethod
    def from_flops(cls, flops_per_step: float, flops_per_second: float, mfu: float = 1.0, **options: Any) -> Compute:
        """Return a Compute for nodes that reach a share `mfu` of their peak rate.

        >>> Compute.from_flops(6 * 1e9 * 65_536, 989e12, mfu=0.4)
        Compute(0.994 s a step)

        Args:
            flops_per_step: operations of one node; training a transformer takes about 6 · parameters · tokens.
            flops_per_second: the peak of a node. mfu: in (0, 1]. options: see `Compute`.
        """
        step = real_number("flops_per_step", flops_per_step, above=0)
        peak = real_number("flops_per_second", flops_per_second, above=0)
        return cls(step / peak / real_number("mfu", mfu, above=0, at_most=1), **options)

    @property
    def varies(self) -> bool:
        """Whether the seconds of steps are drawn."""
        return bool(self.jitter or self.factors)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **options: Any) -> Compute:
        """Return the compute of a file that `vsim measure` wrote, or that was written by hand.

        The file is JSON. Its field "compute" is the seconds of a step, or an object with arguments of `Compute`;
        `options` are further arguments, and come before those of the file.

        Raises:
            OSError: the file cannot be read. ValueError, TypeError: a field, which the message names, is missing or
                not possible.
        """
        own = read_part(path, "compute")
        with naming(f"{path}: compute"):
            if isinstance(own, int | float | str):
                own = {"seconds_per_step": own}
            if not isinstance(own, dict):
                raise TypeError(f"must be seconds, or an object with seconds_per_step, got {given_value(own)}")
            if own.get("seconds_per_step") is None:
                raise ValueError("seconds_per_step is missing")
            if isinstance(own.get("pipeline"), dict):
                own = own | {"pipeline": Pipeline(**own["pipeline"])}
            return cls(**own | options)

    @classmethod
    def of(cls, given: Compute | float | str | None) -> Compute:
        """Return a Compute: `given` itself, the one that a file holds (see `from_file`; text that ends in ".json" is a
        path), or one with `given`, a number or text, as the seconds of a step.

        Raises:
            TypeError: `given` is None, because a run's record does not hold the nodes' compute seconds.
        """
        if given is None:
            raise TypeError("compute is missing: give Compute(seconds_per_step), or the seconds a step takes")
        if isinstance(given, str) and names_file(given):
            return cls.from_file(given)
        with naming("compute"):
            return given if isinstance(given, Compute) else cls(given)

    def as_plain(self) -> dict[str, Any]:
        """Return the compute as lists and numbers for JSON."""
        inside = None if self.pipeline is None else self.pipeline.as_plain()
        own = {"node_seconds": self.node_seconds.tolist(), "pipeline": inside}
        return {key: getattr(self, key) for key in _PLAIN} | own

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Compute:
        """Make a Compute from the result of `as_plain`."""
        made = cls(plain["node_seconds"])
        vars(made).update({key: plain[key] for key in _PLAIN if key in plain})
        if plain.get("pipeline") is not None:  # whose waits are in node_seconds
            made.pipeline = Pipeline.from_plain(plain["pipeline"])
        return made

    def decides_as(self, other: Compute) -> bool:
        """Return whether every step takes as long as with `other`, so that stragglers and asynchronous runs repeat."""
        own, its = ([c.node_seconds.tolist(), c.jitter, c.factors, c.seed if c.varies else 0] for c in (self, other))
        return own == its

    def drawn(self, draw: int) -> Compute:
        """Return this compute with another seed: that of draw 0, 1, …"""
        other = copy.copy(self)
        other.seed = int(np.random.SeedSequence([self.seed, draw]).generate_state(1)[0])
        return other

    def parts(self, payload_bytes: float) -> int:
        """Return the number of messages in which a payload is sent."""
        full = payload_bytes / self.bucket_bytes if self.bucket_bytes else math.inf
        return int(min(self.layers, max(1.0, full)))

    def steps(self, num_nodes: int) -> ComputedSteps:
        """Return the compute seconds of a run of `num_nodes` nodes, from the first step on."""
        if self.num_nodes not in (None, num_nodes):
            raise ValueError(f"compute has {self.num_nodes} nodes, and the run {num_nodes}")
        if self.pipeline is not None and self.pipeline.unknown:
            lacking = self.pipeline.unknown
            raise TypeError(
                f"pipeline: {' and '.join(lacking)} of the model are not known here. Give "
                f"Pipeline({', '.join(f'{name}=…' for name in lacking)}), or parameters= of 20 million or more, in the "
                "shapes of a GPT, to vsim.price, comparison.at or ladder.decide"
            )
        return ComputedSteps(self, num_nodes)

    def totals(self, num_nodes: int) -> Callable[..., NDArray[np.float64]]:
        """Return a function (first, last) → (K,): the compute seconds of every node in steps first to last (from 1 on).

        The function's third argument (K,) is the number of these steps that each node computes before it rests.
        """
        done, steps = 0, self.steps(num_nodes)

        def seconds(first: int, last: int, local: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
            nonlocal done, steps
            if first <= done:
                done, steps = 0, self.steps(num_nodes)
            steps.next(first - 1 - done)
            done = last
            own = steps.next(last - first + 1)
            if local is not None:
                own = own * (np.arange(len(own))[:, None] < local)
            return np.broadcast_to(own.sum(0), (num_nodes,))

        return seconds

    def __repr__(self) -> str:
        low, high = self.node_seconds.min(), self.node_seconds.max()
        own = f"{low:.3g}" if low == high else f"{low:.3g} … {high:.3g}"
        layers = f", {self.layers} layers" if self.layers > 1 else ""
        varying = f", jitter {self.jitter:g}" if self.jitter else ""
        if self.factors:
            varying = f", × {min(self.factors):.3g} … {max(self.factors):.3g}"
        memory = f", {size_text(self.memory)} of memory" if self.memory else ""
        inside = f", {self.pipeline.machines} machines a node" if self.pipeline else ""
        return f"Compute({own} s a step{layers}{varying}{memory}{inside})"


def _listed(values: Any) -> Any:
    """Turn an array or a tensor into a list."""
    return values.tolist() if hasattr(values, "tolist") else values


class ComputedSteps:
    """Compute seconds in the order of the steps, the same each time that a run is priced."""

    def __init__(self, compute: Compute, num_nodes: int) -> None:
        self.compute, self.num_nodes = compute, num_nodes
        self._generator = np.random.default_rng(compute.seed)

    def next(self, steps: int) -> NDArray[np.float64]:
        """Return the seconds of the next `steps` steps: (steps, K), or (steps, 1) if all nodes are alike."""
        own, jitter, factors = self.compute.node_seconds, self.compute.jitter, self.compute.factors
        if factors:
            return own * np.array(factors)[self._generator.integers(len(factors), size=(steps, self.num_nodes))]
        if not jitter:
            return np.broadcast_to(own, (steps, len(own)))
        z = self._generator.standard_normal((steps, self.num_nodes), dtype=np.float32)
        return np.multiply(own, np.exp(jitter * z - jitter**2 / 2))
