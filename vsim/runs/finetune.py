"""Fine-tune the global model on a client's data before the client's validation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from vsim.cluster.randomness import EVALUATION, generator, isolated
from vsim.cluster.replicas import copied
from vsim.data.batches import resolve
from vsim.engine.objective import Objective
from vsim.runs.tracked import TrackedRun


def fine_tuned(
    run: TrackedRun, client: int, weights: Tensor, buffers: Mapping[str, Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return weights (P,) and buffers after `client_val_steps` steps on the training data of a client.

    An ordinary copy of the model is trained in eager PyTorch, by a new inner optimizer of the strategy. The batches are
    shuffled by a generator seeded for the client.
    """
    spec, replicas, device = run.spec, run.cluster.replicas, weights.device
    (dataset,) = resolve(spec.train_dataset, spec.population, range(client, client + 1), True, "train_dataset")
    model = replicas.as_module(weights, buffers, like=spec.model).to(device)
    if not model.training:
        model.train()
    objective = Objective(model, copied(spec.loss_fn, "loss_fn")).to(device)
    optimizer = spec.strategy.optim_spec.build(model)
    loader = DataLoader(
        dataset,
        batch_size=spec.batch_size,
        shuffle=True,
        generator=generator(spec.seed, EVALUATION, client),
        collate_fn=(spec.dataloader_kwargs or {}).get("collate_fn"),
    )
    with isolated(spec.seed, device), torch.enable_grad():
        for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), spec.client_val_steps):
            model.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16) if spec.autocast else nullcontext():
                loss, _ = objective(tree_map(lambda t: t.to(device), batch))
            loss.backward()
            optimizer.step()
    tuned, parameters = weights.clone(), dict(model.named_parameters())
    with torch.no_grad():
        for name, view in replicas.views(tuned).items():
            view.copy_(parameters[name])
    return tuned, {name: b.detach() for name, b in model.named_buffers()}
