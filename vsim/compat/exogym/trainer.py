"""EXO Gym's trainers, which take both a number of epochs and a number of steps."""

from __future__ import annotations

from typing import Any

from torch import nn

from vsim import trainer
from vsim.arguments import is_factory, whole_number
from vsim.data.order import Order


class Trainer(trainer.Trainer):
    """`vsim.Trainer`, whose `fit` takes num_epochs and max_steps together, and ends with what comes first."""

    def fit(self, **options: Any) -> nn.Module:
        """Train, and return the mean of the nodes' final models; see `vsim.Trainer.fit` for the arguments."""
        epochs, steps = options.get("num_epochs"), options.get("max_steps")
        if epochs is not None and steps is not None:
            comes_first = whole_number("num_epochs", epochs) * self._steps_per_epoch(options)
            options["max_steps"] = min(whole_number("max_steps", steps), comes_first)
            del options["num_epochs"]
        if options.get("device") == "":  # as in EXO Gym's examples
            del options["device"]
        return super().fit(**options)

    def _steps_per_epoch(self, options: dict[str, Any]) -> int:
        data: Any = self.train_dataset
        nodes = whole_number("num_nodes", options.get("num_nodes"))
        datasets = [data(rank, nodes, True) for rank in range(nodes)] if is_factory(data) else [data]
        shuffle, drop_last = (
            options.get("shuffle", True),
            (options.get("dataloader_kwargs") or {}).get("drop_last", False),
        )
        return Order(
            [len(own) for own in datasets], nodes, options.get("batch_size", 16), shuffle, 0, drop_last
        ).steps_per_epoch


class LocalTrainer(Trainer):
    """`Trainer` on this machine."""
