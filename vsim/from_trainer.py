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
# What a subclass may override without another training: patterns of methods. All others of the library are refused.
_OF_TRAINER = (
    *("*eval*", "*predict*", "*test*", "*log*", "*save*", "*checkpoint*", "*metrics*", "*model_card*", "*hub*"),
    *("create_optimizer*", "create_scheduler", "get_decay_parameter_names", "get_optimizer_*", "floating_point_ops"),
)
_OF_MODULE = (
    *("forward", "training_step", "configure_optimizers", "configure_model", "prepare_data", "setup", "teardown"),
    *("*validation*", "*val_dataloader", "*test*", "*predict*", "*checkpoint*", "*hyperparameters*", "*state_dict"),
    *("train_dataloader", "log*", "print", "to_*", "on_fit_end", "on_train_end", "on_exception", "from_datasets"),
)
# Callbacks of Lightning that only watch.
_WATCHING = ("Checkpoint", "ProgressBar", "Summary", "LearningRateMonitor", "DeviceStatsMonitor")


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
    args = trainer.args
    foreign = [
        type(one).__name__
        for one in trainer.callback_handler.callbacks
        if not type(one).__module__.startswith("transformers.") or type(one).__name__ == "EarlyStoppingCallback"
    ]
    overridden = _overridden(trainer, _OF_TRAINER)
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
            f"the method {', '.join(overridden)} of {type(trainer).__name__}": overridden,
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
    hooks = [(type(one).__name__, _overridden(one, _OF_MODULE)) for one in (train, module)]
    foreign = [type(one).__name__ for one in trainer.callbacks if not _watches(one)]
    clip, accumulated = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    _reject(
        {
            "manual optimization": not module.automatic_optimization,
            **{f"the hook {', '.join(own)} of {name}": own for name, own in hooks},
            "training_step(dataloader_iter)": "dataloader_iter" in inspect.signature(module.training_step).parameters,
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
    module = copy.deepcopy(module)
    train, val, shuffle = _loaders(module, train, val, accumulated)
    per_epoch = _steps(train, accumulated)
    limits = [trainer.max_steps, (trainer.max_epochs or 0) * per_epoch]
    steps = min(limit for limit in limits if limit > 0)  # whichever comes first; -1: no limit
    module.trainer = SimpleNamespace(  # what schedules ask for
        **{"estimated_stepping_batches": steps, "num_training_batches": len(train)},
        **{name: getattr(trainer, name) for name in ("max_steps", "max_epochs", "accumulate_grad_batches")},
    )
    optimizer, scheduling = _only_optimizer(module.configure_optimizers())
    module.trainer = None
    about = scheduling if isinstance(scheduling, Mapping) else {"scheduler": scheduling}
    frequency, by_epoch = about.get("frequency", 1), about.get("interval", "epoch") == "epoch"

    def moves(step: int) -> bool:
        """Return whether Lightning steps the schedule after this optimizer step; it counts an epoch's batches."""
        epochs, within = divmod(step - 1, per_epoch)
        if by_epoch:
            return within + 1 == per_epoch and (epochs + 1) % frequency == 0
        return min((within + 1) * accumulated, len(train)) % frequency == 0

    defaults = _defaults(optimizer, module, "module.", about["scheduler"], steps, moves)
    collate = None if train.collate_fn is default_collate else train.collate_fn
    return {
        "model": _TrainingStep(copy.deepcopy(module)),
        "train_dataset": train.dataset,
        "val_dataset": None if val is None else val.dataset,
        "batch_size": train.batch_size * accumulated,
        **({"gradient_accumulation": accumulated} if accumulated > 1 else {}),
        "shuffle": shuffle,
        "max_steps": steps,
        "seed": int(os.environ.get("PL_GLOBAL_SEED", 42)),
        "autocast": trainer.precision == "bf16-mixed",
        "dataloader_kwargs": _loading(train, collate, train.drop_last),
        "strategy_defaults": defaults | ({"max_norm": clip} if clip else {}),
    }


def _loaders(module: Any, train: Any, val: Any, accumulated: int) -> tuple[Any, Any, bool]:
    """Return the loaders of training and validation (or None), and whether the former shuffles; set up the module."""
    source = train if hasattr(train, "train_dataloader") else module
    for one in dict.fromkeys([source, module]):
        one.prepare_data()
        one.setup("fit")
    module.configure_model()
    if train is None or source is train:
        has_val = val is None and "val_dataloader" in _overridden(source, ())
        train, val = source.train_dataloader(), source.val_dataloader() if has_val else val
    val = val[0] if isinstance(val, list | tuple) and len(val) == 1 else val
    _reject({f"training data of type {type(train).__name__}": not isinstance(train, torch.utils.data.DataLoader)})
    sampler, count = train.sampler, len(train.dataset)
    drawn = type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples != count)
    _reject(
        {
            f"the sampler {type(sampler).__name__}": type(sampler) not in (RandomSampler, SequentialSampler),
            "a RandomSampler that draws with replacement, or another number of examples": drawn,
            "a batch_sampler": train.batch_size is None,
            "several validation loaders": isinstance(val, list | tuple),
        }
    )
    incomplete = len(train) % accumulated or (count % train.batch_size and not train.drop_last)
    _reject(
        {f"accumulate_grad_batches={accumulated} with an incomplete step in an epoch": accumulated > 1 and incomplete}
    )
    return train, val, isinstance(sampler, RandomSampler)


def _library_class(one: Any) -> type:
    """Return the nearest class of transformers or Lightning from which an object's class derives, else object."""
    libraries = ("transformers", "lightning", "pytorch_lightning")
    return next((cls for cls in type(one).__mro__ if cls.__module__.partition(".")[0] in libraries), object)


def _overridden(one: Any, allowed: Sequence[str]) -> list[str]:
    """Return the methods of its library that an object's class overrides, but for those that match `allowed`."""
    own, base = type(one), _library_class(one)
    theirs = dict.fromkeys(
        name for cls in base.__mro__ if not cls.__module__.startswith("torch.") for name in vars(cls)
    )
    return [
        name
        for name in theirs
        if not name.startswith("__") and not any(fnmatchcase(name, pattern) for pattern in allowed)
        if callable(getattr(base, name)) and (getattr(own, name) is not getattr(base, name) or name in vars(one))
    ]


def _watches(callback: Any) -> bool:
    """Return whether a callback of Lightning, or a class derived from it, only watches the training."""
    return _library_class(callback).__name__.endswith(_WATCHING)


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
        kinds = [one.kind for one in inspect.signature(module.training_step).parameters.values()]
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.numbered = sum(kind in by_position for kind in kinds) > 1 or inspect.Parameter.VAR_POSITIONAL in kinds

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
    optimizer: Optimizer,
    model: nn.Module,
    prefix: str,
    scheduler: Any,
    steps: int,
    moves: Callable[[int], bool] = lambda _: True,
) -> dict[str, Any]:
    """Return `strategy_defaults` for an optimizer of a model and its scheduler, stepped after the steps of `moves`."""
    spec = spec_of(optimizer, {prefix + name: p for name, p in model.named_parameters() if p.requires_grad})
    if scheduler is None:
        return {"inner_optim": spec}
    by_step = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
    _reject({f"the schedule {type(scheduler).__name__}": not by_step})
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    stand_in = SimpleNamespace(**{**vars(optimizer), "param_groups": groups})  # no copies of the weights
    own = copy.deepcopy(scheduler, {id(optimizer): stand_in})
    mark_stepped(own.optimizer)
    found, fixed = [], [{name: value for name, value in group.items() if name != "lr"} for group in groups]
    for step in range(steps):
        if step and moves(step):
            own.step()
        changed = {name for one, at in zip(groups, fixed, strict=True) for name in at if one[name] != at[name]}
        _reject({f"the schedule {type(scheduler).__name__}, which changes {', '.join(sorted(changed))}": changed})
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
