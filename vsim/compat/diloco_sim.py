"""The interface of diloco-sim: one object with all settings and a method `train()`, on top of `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from vsim.arguments import a_function, a_path, given, known_keywords, naming, real_number, whole_number
from vsim.cluster.ledger import Ledger
from vsim.cluster.optim import OptimSpec
from vsim.data.batches import check_dataset
from vsim.data.order import Order
from vsim.engine.objective import LossFunction
from vsim.history.history import History
from vsim.history.loggers.base import perplexity
from vsim.strategy import Algorithm, DiLoCoStrategy, SPARTADiLoCoStrategy
from vsim.trainer import Trainer

_OUTER = {"lr": 0.7, "nesterov": True, "momentum": 0.9}


@dataclass(frozen=True)
class TrainStats:
    """The argument of `train_loss_hook`: mean loss over the nodes' batches, exp(loss), and the step's number."""

    loss: float
    perplexity: float
    step: int


@dataclass(frozen=True)
class EvalStats(TrainStats):
    """The argument of `eval_loss_hook`: validation loss of the global model, exp(loss), and the step's number."""


class DilocoSimulator:
    """DiLoCo on simulated nodes, optionally with SPARTA between syncs.

    Args:
        model_cls, model_kwargs: the model is `model_cls(**model_kwargs)`; it returns outputs.
        loss_fn: f(outputs, y) → scalar loss of a batch (x, y).
        train_dataset: training data, shared by the nodes.
        eval_dataset: data for the validation after every outer step; None: no validation.
        num_nodes: K.
        optimizer_cls, optimizer_kwargs: the inner optimizer; default AdamW with lr 0.001.
        outer_optimizer_cls, outer_optimizer_kwargs: the outer optimizer; default SGD, lr 0.7, Nesterov momentum 0.9.
        diloco_interval: local steps between outer steps, H.
        batch_size: examples per node and step.
        num_epochs: passes over the data. max_local_step: stop after this many local steps if the epochs end later.
        eval_iters: batches of `batch_size` examples in a validation.
        ckpt_interval: outer steps between checkpoints, which are saved in `save_dir`.
        cosine_anneal, warmup_steps: the schedule of the inner learning rate; see `Algorithm`.
        p_sparta: share of the weights averaged after every `sparta_interval`-th step; 0: none.
        train_loss_hook: called with a `TrainStats` after every step.
        eval_loss_hook: called with an `EvalStats` after every validation, including the one before training.

    Attributes:
        model: the initial model. trainer: the `Trainer`. history, ledger: the record of the last `train()`.

    Raises:
        TypeError, ValueError: an argument is unknown, out of range, or would have no effect.

    Example:
        >>> import torch.nn.functional as F
        >>> from vsim.data import digits
        >>> from vsim.models import MLP
        >>> train, test = digits()
        >>> simulator = DilocoSimulator(
        ...     model_cls=MLP, model_kwargs={"seed": 0}, loss_fn=F.cross_entropy, train_dataset=train,
        ...     eval_dataset=test, diloco_interval=10, max_local_step=20,
        ... )
        >>> model = simulator.train()
        >>> len(simulator.ledger), simulator.history["step"][-1]
        (2, np.float64(20.0))
    """

    @known_keywords
    def __init__(
        self,
        *,
        model_cls: Callable[..., nn.Module],
        loss_fn: LossFunction,
        train_dataset: Dataset[Any],
        model_kwargs: Mapping[str, Any] | None = None,
        num_nodes: int = 4,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        diloco_interval: int = 500,
        batch_size: int = 16,
        eval_dataset: Dataset[Any] | None = None,
        optimizer_cls: type[Optimizer] = torch.optim.AdamW,
        ckpt_interval: int | None = None,
        eval_iters: int = 50,
        save_dir: str | None = None,
        outer_optimizer_cls: type[Optimizer] = torch.optim.SGD,
        outer_optimizer_kwargs: Mapping[str, Any] | None = None,
        max_local_step: int | None = None,
        num_epochs: int = 1,
        cosine_anneal: bool = False,
        warmup_steps: int = 0,
        p_sparta: float = 0.0,
        sparta_interval: int = 1,
        train_loss_hook: Callable[[TrainStats], Any] | None = None,
        eval_loss_hook: Callable[[EvalStats], Any] | None = None,
    ) -> None:
        if not callable(model_cls) or isinstance(model_cls, nn.Module):
            raise TypeError(f"model_cls must be a class, called with model_kwargs; got {model_cls!r}")
        counts = {"num_nodes": num_nodes, "batch_size": batch_size, "num_epochs": num_epochs, "eval_iters": eval_iters}
        for name, count in {**counts, "diloco_interval": diloco_interval, "sparta_interval": sparta_interval}.items():
            whole_number(name, count)
        if max_local_step is not None:
            whole_number("max_local_step", max_local_step)
        if real_number("p_sparta", p_sparta, at_least=0, at_most=1) == 0 and sparta_interval != 1:
            raise ValueError(f"sparta_interval={sparta_interval} has no effect without a p_sparta above 0")
        check_dataset(train_dataset, "train_dataset")
        if eval_dataset is not None:
            check_dataset(eval_dataset, "eval_dataset")
        own = {"model_kwargs": model_kwargs, "optimizer_kwargs": optimizer_kwargs}
        for name, kwargs in {**own, "outer_optimizer_kwargs": outer_optimizer_kwargs}.items():
            if not isinstance(kwargs, Mapping | None):
                raise TypeError(f"{name} must be a dict of arguments, got {given(kwargs)}")
        with naming("model_cls, model_kwargs"):
            self.model = model_cls(**(model_kwargs or {}))
        self.trainer = Trainer(self.model, train_dataset, eval_dataset, loss_fn=loss_fn)
        with naming("optimizer_cls, optimizer_kwargs"):
            inner = OptimSpec(optimizer_cls, **(optimizer_kwargs if optimizer_kwargs is not None else {"lr": 0.001}))
        outer_kwargs = outer_optimizer_kwargs
        if outer_kwargs is None:
            outer_kwargs = _OUTER if outer_optimizer_cls is torch.optim.SGD else {}
        with naming("outer_optimizer_cls, outer_optimizer_kwargs"):
            outer = OptimSpec(outer_optimizer_cls, **outer_kwargs)
        schedule: Any = {"warmup_steps": warmup_steps, "cosine_anneal": cosine_anneal}
        self.strategy: Algorithm
        if p_sparta:
            self.strategy = SPARTADiLoCoStrategy(
                inner_optim=inner,
                outer_optim=outer,
                p_sparta=p_sparta,
                sparta_interval=sparta_interval,
                H=diloco_interval,
                **schedule,
            )
        else:
            self.strategy = DiLoCoStrategy(inner_optim=inner, outer_optim=outer, H=diloco_interval, **schedule)
        steps = _fewer_steps(max_local_step, train_dataset, num_nodes, batch_size, num_epochs)
        validation = {"val_size": eval_iters * batch_size, "val_interval": diloco_interval}
        self._fit_options: dict[str, Any] = {
            "num_nodes": num_nodes,
            **({"num_epochs": num_epochs} if steps is None else {"max_steps": steps}),
            "batch_size": batch_size,
            **({} if eval_dataset is None else validation),
            "train_loss_hook": _with_stats(train_loss_hook, "train_loss_hook", TrainStats),
            "eval_loss_hook": _with_stats(eval_loss_hook, "eval_loss_hook", EvalStats),
        }
        if ckpt_interval is not None:
            self._fit_options["checkpoint_interval"] = whole_number("ckpt_interval", ckpt_interval) * diloco_interval
        if save_dir is not None:
            a_path("save_dir", save_dir)
            self._fit_options["save_dir"] = save_dir

    def train(self) -> nn.Module:
        """Train, and return the mean of the nodes' final models."""
        return self.trainer.fit(strategy=self.strategy, **self._fit_options)

    @property
    def history(self) -> History:
        """The record of the last `train()`."""
        return self.trainer.history

    @property
    def ledger(self) -> Ledger:
        """The ledger of the last `train()`: every collective."""
        return self.trainer.ledger


def _fewer_steps(
    max_local_step: int | None, dataset: Dataset[Any], num_nodes: int, batch_size: int, num_epochs: int
) -> int | None:
    """Return `max_local_step` if it comes before the end of the epochs, else None."""
    if max_local_step is None:
        return None
    order = Order([len(dataset)], num_nodes, batch_size, True, 0, False)  # type: ignore[arg-type]
    return max_local_step if max_local_step < num_epochs * order.steps_per_epoch else None


def _with_stats(
    hook: Callable[[Any], Any] | None, name: str, stats: type[TrainStats]
) -> Callable[[int, float], Any] | None:
    """Return a hook f(step, loss) for `fit` that calls `hook` with an object of the class `stats`."""
    if hook is None:
        return None
    a_function(name, hook, stats.__name__)
    return lambda step, loss: hook(stats(loss, perplexity(loss), step))
