"""The arguments of `vsim.compare` from a Trainer of transformers or Lightning, neither of which this module imports."""

from __future__ import annotations

import copy
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import RandomSampler, SequentialSampler, default_collate

from vsim.arguments import given
from vsim.cluster.optim import OptimSpec
from vsim.private_torch import mark_stepped

# Arguments of optimizers that choose between equal implementations.
_KERNELS = ("foreach", "fused", "capturable", "differentiable")
# Methods that a subclass of transformers' Trainer may override to train otherwise, and hooks of a LightningModule.
_OF_TRAINER = ("compute_loss", "training_step", "get_batch_samples", "_inner_training_loop", "train")
_HOOKS = (
    *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "backward", "lr_scheduler_step"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_fit_start"),
    *("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end"),
)
# Callbacks of Lightning that only watch.
_WATCHING = ("Checkpoint", "ProgressBar", "Summary", "LearningRateMonitor", "DeviceStatsMonitor", "Timer")


def from_trainer(
    trainer: Any, module: Any = None, train_dataloaders: Any = None, val_dataloaders: Any = None
) -> dict[str, Any]:
    """Return the arguments of `vsim.compare` for the training that a Trainer of transformers or Lightning would do.

        vsim.compare(**vsim.from_trainer(trainer), strategies={"DiLoCo": DiLoCoStrategy(H=50)}, num_nodes=8)

    Model, data, collator, loss, batch size (including gradient accumulation), optimizer with its parameter groups,
    schedule, clipping, seed and steps are those of the trainer; `strategy_defaults` carries the optimizer, schedule and
    clipping to all strategies. Every node takes as many steps of as many examples as the trainer would, so that K nodes
    together see K times the examples. The order of shuffled examples is vsim's. The trainer is not changed.

    Args:
        trainer: a `transformers.Trainer`, or a Trainer of Lightning, that has not trained yet.
        module, train_dataloaders, val_dataloaders: the arguments of Lightning's `fit`. The loss is that of
            `training_step`, also on the validation data; `log` does nothing.

    Raises:
        TypeError: `trainer` is neither. ValueError: something that changes the training cannot be carried; the message
            names it.
    """
    kinds = {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(trainer).__mro__}
    if "transformers.Trainer" in kinds:
        if module is not None or train_dataloaders is not None or val_dataloaders is not None:
            raise TypeError("module, train_dataloaders and val_dataloaders belong to a Trainer of Lightning")
        return _of_transformers(trainer)
    if kinds & {"lightning.Trainer", "pytorch_lightning.Trainer"}:
        return _of_lightning(trainer, module, train_dataloaders, val_dataloaders)
    raise TypeError(f"trainer must be a Trainer of transformers or Lightning, got {given(trainer)}")


def _reject(found: Mapping[str, Any]) -> None:
    """Raise a ValueError that names what cannot be carried: the keys with a true value."""
    if named := [name for name, there in found.items() if there]:
        raise ValueError(f"from_trainer cannot carry {', '.join(named)}: change it, or give vsim.compare its arguments")


def _of_transformers(trainer: Any) -> dict[str, Any]:
    args, cls = trainer.args, type(trainer)
    base = next(own for own in cls.__mro__ if own.__name__ == "Trainer" and own.__module__.startswith("transformers."))
    foreign = [
        type(one).__name__
        for one in trainer.callback_handler.callbacks
        if not type(one).__module__.startswith("transformers.") or type(one).__name__ == "EarlyStoppingCallback"
    ]
    overridden = [name for name in _OF_TRAINER if getattr(cls, name, None) is not getattr(base, name, None)]
    order = getattr(args, "train_sampling_strategy", "random")
    _reject(
        {
            f"label_smoothing_factor={args.label_smoothing_factor}": args.label_smoothing_factor,
            "compute_loss_func": getattr(trainer, "compute_loss_func", None),
            f"neftune_noise_alpha={args.neftune_noise_alpha}": args.neftune_noise_alpha,
            "fp16=True": args.fp16,
            f"train_sampling_strategy={order!r}": order not in ("random", "sequential"),
            "deepspeed": args.deepspeed,
            "fsdp": args.fsdp,
            f"the method {', '.join(overridden)} of {cls.__name__}": overridden,
            f"the callback {', '.join(foreign)}": foreign,
            "a dataset without a length": not hasattr(trainer.train_dataset, "__len__"),
            "several evaluation datasets": isinstance(trainer.eval_dataset, dict),
            "a training that has begun": trainer.state.global_step,
        }
    )
    loader, pieces = trainer.get_train_dataloader(), args.gradient_accumulation_steps
    incomplete = pieces > 1 and args.dataloader_drop_last and len(loader) % pieces  # a step there, none in vsim
    _reject({f"gradient_accumulation_steps={pieces} with an incomplete step in an epoch": incomplete})
    steps = args.max_steps if args.max_steps > 0 else int(-(-args.num_train_epochs * _steps(loader, pieces) // 1))
    names = ("optimizer", "lr_scheduler", "_created_lr_scheduler")
    before = {name: getattr(trainer, name) for name in names if hasattr(trainer, name)}
    try:
        trainer.create_optimizer_and_scheduler(num_training_steps=steps)
        defaults = _defaults(trainer.optimizer, trainer.model, "model.", trainer.lr_scheduler, steps)
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)
    val = None if trainer.eval_dataset is None else trainer.get_eval_dataloader().dataset
    return {
        "model": _Accumulated(trainer),
        "train_dataset": loader.dataset,
        "val_dataset": val,
        "batch_size": args.train_batch_size * pieces,
        "shuffle": order == "random",
        "max_steps": steps,
        "seed": args.seed,
        "autocast": bool(args.bf16),
        "dataloader_kwargs": _loading(loader, _AsDict(loader.collate_fn), args.dataloader_drop_last),
        "strategy_defaults": defaults | ({"max_norm": args.max_grad_norm} if args.max_grad_norm else {}),
    }


def _of_lightning(trainer: Any, module: Any, train: Any, val: Any) -> dict[str, Any]:
    module = getattr(trainer, "lightning_module", None) if module is None else module
    if module is None:
        raise TypeError("module is missing: from_trainer(trainer, module, …) takes the arguments of trainer.fit")
    base = next(own for own in type(module).__mro__ if own.__name__ == "LightningModule")
    hooks = [name for name in _HOOKS if getattr(type(module), name, None) is not getattr(base, name, None)]
    foreign = [type(one).__name__ for one in trainer.callbacks if not type(one).__name__.endswith(_WATCHING)]
    clip, accumulated = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    _reject(
        {
            "manual optimization": not module.automatic_optimization,
            f"the hook {', '.join(hooks)} of {type(module).__name__}": hooks,
            f"the callback {', '.join(foreign)}": foreign,
            f"gradient_clip_algorithm={trainer.gradient_clip_algorithm!r}": clip
            and trainer.gradient_clip_algorithm not in (None, "norm"),
            f"precision={trainer.precision!r}": trainer.precision not in ("32-true", "bf16-mixed"),
            f"limit_train_batches={trainer.limit_train_batches}": trainer.limit_train_batches not in (None, 1.0),
            f"overfit_batches={trainer.overfit_batches}": trainer.overfit_batches,
            "a training that has begun": trainer.global_step,
            "neither max_steps nor max_epochs": trainer.max_steps <= 0 and (trainer.max_epochs or 0) <= 0,
        }
    )
    source = module if train is None else train
    if hasattr(source, "train_dataloader"):  # a module or a LightningDataModule
        if source is not module:
            source.setup("fit")
        train, val = source.train_dataloader(), source.val_dataloader() if val is None else val
    val = val[0] if isinstance(val, list | tuple) and len(val) == 1 else val
    sampler = getattr(train, "sampler", None)
    _reject(
        {
            f"training data of type {type(train).__name__}": not isinstance(train, torch.utils.data.DataLoader),
            f"the sampler {type(sampler).__name__}": not isinstance(sampler, RandomSampler | SequentialSampler),
            "several validation loaders": isinstance(val, list | tuple),
            f"accumulate_grad_batches={accumulated} with an incomplete step in an epoch": accumulated > 1
            and (len(train) % accumulated or (len(train.dataset) % train.batch_size and not train.drop_last)),
        }
    )
    optimizer, scheduling = _only_optimizer(module.configure_optimizers())
    per_epoch = _steps(train, accumulated)
    steps = trainer.max_steps if trainer.max_steps > 0 else trainer.max_epochs * per_epoch
    about = scheduling if isinstance(scheduling, Mapping) else {"scheduler": scheduling}
    every = about.get("frequency", 1) * (per_epoch if about.get("interval", "epoch") == "epoch" else 1)
    defaults = _defaults(optimizer, module, "module.", about["scheduler"], steps, every)
    collate = None if train.collate_fn is default_collate else train.collate_fn
    return {
        "model": _TrainingStep(copy.deepcopy(module)),
        "train_dataset": train.dataset,
        "val_dataset": None if val is None else val.dataset,
        "batch_size": train.batch_size * accumulated,
        **({"gradient_accumulation": accumulated} if accumulated > 1 else {}),
        "shuffle": isinstance(sampler, RandomSampler),
        "max_steps": steps,
        "seed": int(os.environ.get("PL_GLOBAL_SEED", 42)),
        "autocast": trainer.precision == "bf16-mixed",
        "dataloader_kwargs": _loading(train, collate, train.drop_last),
        "strategy_defaults": defaults | ({"max_norm": clip} if clip else {}),
    }


class _AsDict:
    """A collator whose batch is a dict; those of transformers may return a BatchEncoding."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> dict[str, Any]:
        return dict(self.collate(samples))


class _Accumulated(nn.Module):
    """A model of transformers, whose loss in training is that of all accumulated pieces, as its Trainer computes it.

    The Trainer tells models that take it the number of labels of all pieces, by which they divide; of other models it
    takes the mean over the pieces. In validation the loss is the model's own.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.model, self.size = trainer.model, trainer.args.train_batch_size
        self.counts = bool(getattr(trainer, "model_accepts_loss_kwargs", False))
        self.shifts = bool(getattr(trainer, "_loss_shifts_labels", False))

    def forward(self, batch: dict[str, Tensor]) -> Any:
        if not self.training:
            return self.model(**batch)
        more: dict[str, Tensor] = {}
        if self.counts and "labels" in batch:
            labels = batch["labels"][..., 1:] if self.shifts else batch["labels"]
            more = {"num_items_in_batch": batch.get("shift_labels", labels).ne(-100).sum()}
        starts = range(0, len(next(iter(batch.values()))), self.size)
        pieces = [{name: value[start : start + self.size] for name, value in batch.items()} for start in starts]
        outputs = [self.model(**piece, **more) for piece in pieces]
        losses = [one["loss"] if isinstance(one, Mapping) else one[0] for one in outputs]
        return sum(losses) / (1 if more else len(losses))


class _TrainingStep(nn.Module):
    """A LightningModule as a model whose output is the loss of its training step."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        module.log = module.log_dict = _log_nothing  # they need a trainer
        self.module = module
        self.numbered = "batch_idx" in inspect.signature(module.training_step).parameters

    def forward(self, batch: Any) -> Tensor:
        out = self.module.training_step(batch, 0) if self.numbered else self.module.training_step(batch)
        loss: Tensor = out["loss"] if isinstance(out, Mapping) else out
        return loss


def _log_nothing(*_: Any, **__: Any) -> None:
    """Log nothing."""


class Rates:
    """A learning-rate schedule as the factors of all steps; the last one holds from there on."""

    def __init__(self, factors: Sequence[float]) -> None:
        self.factors = list(factors)

    def __call__(self, step: int) -> float:
        return self.factors[min(step, len(self.factors) - 1)]


def _steps(loader: Any, pieces: int) -> int:
    """Return the number of optimizer steps in an epoch."""
    return max(1, -(-len(loader) // pieces))


def _loading(loader: Any, collate: Any, drop_last: bool) -> dict[str, Any]:
    own = {"collate_fn": collate, "num_workers": loader.num_workers, "drop_last": drop_last}
    return {name: value for name, value in own.items() if value}


def _only_optimizer(made: Any) -> tuple[Optimizer, Any]:
    """Return the optimizer of `configure_optimizers`, and its schedule or None."""
    if isinstance(made, Mapping):
        return made["optimizer"], made.get("lr_scheduler")
    if isinstance(made, list | tuple):
        pair = len(made) == 2 and isinstance(made[0], list | tuple)
        optimizers, schedules = made if pair else (made, [])
        _reject({"several optimizers": len(optimizers) != 1, "several schedules": len(schedules) > 1})
        return _only_optimizer(optimizers[0]) if not schedules else (optimizers[0], schedules[0])
    _reject({f"configure_optimizers() that returns {given(made)}": not isinstance(made, Optimizer)})
    return made, None


def _defaults(
    optimizer: Optimizer, model: nn.Module, prefix: str, scheduler: Any, steps: int, every: int = 1
) -> dict[str, Any]:
    """Return `strategy_defaults` for an optimizer of a model and its scheduler, which steps after `every` steps."""
    spec = spec_of(optimizer, {prefix + name: p for name, p in model.named_parameters() if p.requires_grad})
    if scheduler is None:
        return {"inner_optim": spec}
    by_step = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
    _reject({f"the schedule {type(scheduler).__name__}": not by_step})
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    stand_in = SimpleNamespace(**{**vars(optimizer), "param_groups": groups})  # no copies of the weights
    own = copy.deepcopy(scheduler, {id(optimizer): stand_in})
    mark_stepped(own.optimizer)
    found = []
    for step in range(steps):
        if step and step % every == 0:
            own.step()
        found.append([float(one["lr"]) / float(one["initial_lr"]) if one["initial_lr"] else 1.0 for one in groups])
    _reject({"a schedule that differs between parameter groups": any(max(one) - min(one) > 1e-9 for one in found)})
    rates = Rates([one[0] for one in found])
    return {"inner_optim": spec, "lr_scheduler": LambdaLR, "lr_scheduler_kwargs": {"lr_lambda": rates}}


def spec_of(optimizer: Optimizer, named: Mapping[str, Tensor]) -> OptimSpec:
    """Return the specification of an optimizer over these parameters, name → tensor, with its groups by pattern."""
    cls, name_of = type(optimizer), {id(p): name for name, p in named.items()}
    stepped = {id(p) for p in chain.from_iterable(group["params"] for group in optimizer.param_groups)}
    missing = [name for name, p in named.items() if id(p) not in stepped]
    _reject(
        {
            f"parameters that the optimizer does not step ({', '.join(missing[:3])}); freeze them": missing,
            "an optimizer of parameters that the model lacks": stepped - name_of.keys(),
        }
    )
    known = {name: p.default for name, p in inspect.signature(cls).parameters.items() if name not in _KERNELS}
    options = []
    for group in optimizer.param_groups:
        own = {**group, "lr": float(group.get("initial_lr", group["lr"]))} if "lr" in group else dict(group)
        options.append({name: own[name] for name in known if name in own and name != "params"})
    first, groups = options[0], dict[str, dict[str, Any]]()
    for group, own in zip(optimizer.param_groups, options, strict=True):
        differs = {name: value for name, value in own.items() if value != first[name]}
        names = [name_of[id(p)] for p in group["params"]]
        groups |= dict.fromkeys(_patterns(names, named.keys() - set(names)), differs) if differs else {}
    return OptimSpec(cls, groups=groups or None, **{n: v for n, v in first.items() if n == "lr" or v != known[n]})


def _patterns(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return few patterns that match these names and no others.

    >>> _patterns(["h.0.ln.weight", "h.1.ln.weight", "h.0.bias"], ["h.0.weight"])
    ['h.*.ln.weight', '*.bias']
    """
    others, found = [*others], list[str]()
    for name in names:
        if not any(fnmatchcase(name, pattern) for pattern in found):
            wide = [f"*.{name.rpartition('.')[2]}", re.sub(r"(?<=\.)\d+(?=\.)", "*", name)]
            fits = [one for one in wide if fnmatchcase(name, one) and not any(fnmatchcase(o, one) for o in others)]
            found.append([*fits, name][0])
    return found
