"""The process of one node, with a model, optimizer, sampler and loader as in any PyTorch script."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# Import this module before a process group exists, because its functions keep the current group as a default argument.
# If an optimizer imported it in the first step, gloo's threads would outlive the group, and a process that exits while
# one of these threads frees a tensor aborts.
import torch.distributed.nn.functional
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from vsim.arguments import is_factory
from vsim.cluster.collectives import Collectives
from vsim.cluster.randomness import LOADER, drawing_from, generator
from vsim.data.batches import OfNode, check_tensors, loader_options, resolve
from vsim.data.order import Order
from vsim.engine import Executor
from vsim.engine.executor import check_depends, write_or_add
from vsim.engine.objective import keep_assigned
from vsim.processes.ranges import run_one
from vsim.runs.interrupt import Interrupt
from vsim.runs.race import Messages
from vsim.runs.spec import RunSpec


def run_node(spec: RunSpec, device: torch.device, send: Messages, interrupt: Interrupt | None = None) -> None:
    """Train this process's node as a rank of the default process group; send: see `run_ranges`."""
    run_one(spec, device, send, interrupt, NodeBatches, EagerExecutor)


class EagerExecutor(Executor):
    """Computes one node as an ordinary module, by forward and `loss.backward()`. Parameters are views of the row."""

    name = "eager"
    has_given_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        r = self.replicas
        self.grads = list(r.views(r.grads[0]).values())
        self.buffers = {name: b[0] for name, b in r.buffers.items()}
        own = dict(r.module.named_parameters())
        self.parameters = [own[c.name] for c in r.layout]
        self.leaves = {name: self._leaf(w)[0] for name, w in r.views(r.weights).items()}
        names = {id(b): name for name, b in r.module.named_buffers()}
        self.places = [  # all places of every buffer in the module; tied buffers have several
            (r.module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], names[id(b)])
            for path, b in r.module.named_buffers(remove_duplicate=False)
        ]
        self._attach()

    def _attach(self) -> None:
        """Attach the module's parameters and buffers to this executor's row; other executors may share the module."""
        for p, leaf in zip(self.parameters, self.leaves.values(), strict=True):
            p.data = leaf
        for module, attribute, name in self.places:
            setattr(module, attribute, self.buffers[name])

    def _keep_assigned(self) -> None:
        """Copy back buffers and weights that the model has replaced by new tensors."""
        for module, attribute, name in self.places:
            now = getattr(module, attribute)
            if now is not self.buffers[name]:
                keep_assigned(name, self.buffers[name], now)
                setattr(module, attribute, self.buffers[name])
        for p, own in zip(self.parameters, self.leaves.values(), strict=True):
            if p.data_ptr() != own.data_ptr():
                own.copy_(p.detach())
                p.data = own

    def _trains(self, parameter: Tensor) -> bool:
        return any(parameter is p for p in self.parameters)

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        self._attach()
        for p in self.parameters:
            p.grad = None
        with self._moved_up_to_date(), drawing_from(self.generators[0]) as before:
            self.settings.undrawn.setdefault(self.generators[0], before)
            with self._precision():
                loss = self._loss(self.objective, tree_map(lambda t: t[0], batch))
            if share != 1.0:
                loss = loss * share
            check_depends(loss)
            loss.backward()
            self._keep_assigned()
        self._warn_of_frozen(dict(zip(self.leaves, self.parameters, strict=True)))
        new = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        write_or_add(self.grads, new, first)
        return loss.detach()[None]


class NodeBatches:
    """The batches of one node: DistributedSampler and DataLoader, epoch after epoch."""

    def __init__(self, spec: RunSpec, collectives: Collectives) -> None:
        self._spec, everyone, rank = spec, spec.population, collectives.rank
        self._options, drop_last = loader_options(spec.dataloader_kwargs)
        # With participation, a process may compute for any node.
        self._all_here = spec.participation is not None
        whose = range(everyone) if self._all_here else range(rank, rank + 1)
        self.datasets = resolve(spec.train_dataset, everyone, whose, True, "train_dataset")
        self._dataset, self._own = self.datasets[0], is_factory(spec.train_dataset)
        self._collectives = collectives
        lengths = self.of_datasets(len)  # type: ignore[arg-type]
        order = Order(lengths, everyone, spec.batch_size, spec.shuffle, spec.seed, drop_last)
        order.check()
        self.steps_per_epoch, self.epoch_steps = order.steps_per_epoch, order.epoch_steps
        self.lengths, self.shard_sizes = order.lengths, order.shard_sizes
        self._node, self._missed, self._drop_last = rank, 0, drop_last

    num_rows = 1

    def of_datasets(self, number: Callable[[Dataset[Any]], int]) -> list[int]:
        """See `Batches`. All processes must call this at the same time."""
        own = [number(dataset) for dataset in self.datasets]
        if self._all_here:
            return own
        with self._collectives.unbilled():
            numbers: list[int] = self._collectives.all_gather(torch.tensor(own)).tolist()
        return numbers if self._own else numbers[:1]

    def attended(self, nodes: Sequence[int], missed: Sequence[int]) -> NodeBatches:
        """See `Batches`; here `nodes` must hold one node."""
        own = copy.copy(self)
        ((own._node, own._missed),) = zip(nodes, missed, strict=True)
        own._dataset = self.datasets[own._node if self._own else 0]
        return own

    def from_step(self, start_step: int = 0) -> Iterator[Any]:
        """Yield a batch (1, B, …) for every step from the 0-based `start_step` on, endlessly."""
        spec = self._spec
        sampler: DistributedSampler[Any] = DistributedSampler(
            self._dataset,
            num_replicas=1 if self._own else spec.population,
            rank=0 if self._own else self._node,
            shuffle=spec.shuffle,
            seed=spec.seed,
        )
        batches = _From(BatchSampler(sampler, spec.batch_size, self._drop_last))
        named = self._options.get("worker_init_fn") is None  # a worker_init_fn may access the dataset: keep it
        loader: DataLoader[Any] = DataLoader(
            OfNode(self._dataset, self._node) if named else self._dataset,
            generator=generator(spec.seed, LOADER),
            batch_sampler=batches,
            **self._options,
        )
        epoch, batches.start = divmod(start_step - self._missed, int(self.epoch_steps[self._node]))
        while True:
            sampler.set_epoch(epoch)
            for batch in loader:
                check_tensors(batch)
                yield tree_map(lambda t: t[None], batch)
            epoch, batches.start = epoch + 1, 0


class _From:
    """A batch sampler that skips its first `start` batches without fetching their examples."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batches, self.start = batches, 0

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batches), self.start, None)
