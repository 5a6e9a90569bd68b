"""Scripts as users of diloco-sim write them run on `vsim.DilocoSimulator`, and every keyword does what it says."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from errors import refused
from reference_cluster import vectors
from torch import nn
from torch.nn.utils import parameters_to_vector

from vsim import DilocoSimulator, Trainer
from vsim.compat.diloco_sim import EvalStats, TrainStats
from vsim.strategy import DiLoCoStrategy, OptimSpec, SPARTADiLoCoStrategy


class Net(nn.Module):
    def __init__(self, in_features: int = 12, width: int = 16, num_classes: int = 5) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(in_features, width), nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.relu(self.hidden(x)))


def simulator(**options: Any) -> DilocoSimulator:
    torch.manual_seed(0)
    required: dict[str, Any] = {"model_cls": Net, "loss_fn": F.cross_entropy, "train_dataset": vectors(60)}
    return DilocoSimulator(**{**required, "batch_size": 4, "diloco_interval": 2, **options})


SCRIPT = """
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from diloco_sim import DilocoSimulator
    from sklearn.datasets import load_digits
    from torch.utils.data import TensorDataset


    class CNNModel(nn.Module):
        def __init__(self, input_channels=1, input_height=28, input_width=28, num_classes=10):
            super(CNNModel, self).__init__()
            self.conv1 = nn.Conv2d(in_channels=input_channels, out_channels=8, kernel_size=3, padding=1)
            self.conv2 = nn.Conv2d(in_channels=8, out_channels=16, kernel_size=3, padding=1)
            self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
            self.fc1 = nn.Linear(in_features=16 * (input_height // 4) * (input_width // 4), out_features=32)
            self.fc2 = nn.Linear(in_features=32, out_features=num_classes)

        def forward(self, x):
            x = self.pool(F.relu(self.conv1(x)))
            x = self.pool(F.relu(self.conv2(x)))
            x = x.view(x.size(0), -1)
            return self.fc2(F.relu(self.fc1(x)))


    if __name__ == "__main__":
        torch.manual_seed(12345)
        digits = load_digits()
        x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
        train_losses, eval_losses = [], []

        wm = DilocoSimulator(
            model_cls=CNNModel,
            model_kwargs={"num_classes": 10, "input_height": 8, "input_width": 8},
            optimizer_kwargs={"lr": 0.005},
            num_nodes=4,
            train_dataset=TensorDataset(x[:1500], y[:1500]),
            eval_dataset=TensorDataset(x[1500:], y[1500:]),
            loss_fn=F.cross_entropy,
            batch_size=16,
            diloco_interval=10,
            eval_iters=15,
            num_epochs=2,
            cosine_anneal=True,
            warmup_steps=5,
            p_sparta=0.05,
            outer_optimizer_kwargs={"lr": 0.7, "momentum": 0.9, "nesterov": True},
            train_loss_hook=lambda stats: train_losses.append(stats.loss),
            eval_loss_hook=lambda stats: eval_losses.append((stats.loss, stats.perplexity)),
        )
        model = wm.train()
"""


def test_a_cnn_on_digits() -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    script = SCRIPT.replace("from diloco_sim import", "from vsim import")
    exec(compile(textwrap.dedent(script), "script.py", "exec"), scope)
    steps = 2 * math.ceil(375 / 16)
    assert len(scope["train_losses"]) == steps
    assert len(scope["eval_losses"]) == 1 + math.ceil(steps / 10)  # before training, every outer step, at the end
    losses = [loss for loss, _ in scope["eval_losses"]]
    assert losses[-1] < 0.9 * losses[0]
    assert scope["eval_losses"][0][1] == math.exp(losses[0])
    assert isinstance(scope["model"], nn.Module)


def test_the_minimal_arguments_of_its_readme() -> None:
    minimal = DilocoSimulator(
        model_cls=Net, model_kwargs={"width": 8}, train_dataset=vectors(200), loss_fn=F.cross_entropy
    )
    minimal.train()
    history = minimal.history
    assert history["step"][-1] == math.ceil(50 / 16) and history["lr"][1] == 0.001
    assert len(minimal.ledger) == 0 and np.isnan(history["global_loss"]).all()  # no 500th step, no validation data
    assert parameters_to_vector(minimal.model.parameters()).numel() == 12 * 8 + 8 + 8 * 5 + 5


@pytest.mark.parametrize("p_sparta", [0.0, 0.3])
def test_it_is_trainer_with_other_words(p_sparta: float) -> None:
    sparse: dict[str, Any] = {"p_sparta": p_sparta, "sparta_interval": 3} if p_sparta else {}
    ours = simulator(
        model_kwargs={"width": 7},
        num_nodes=3,
        optimizer_cls=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.1, "momentum": 0.5},
        outer_optimizer_cls=torch.optim.Adam,
        outer_optimizer_kwargs={"lr": 0.02},
        eval_dataset=vectors(40, seed=3),
        eval_iters=2,
        num_epochs=2,
        max_local_step=7,
        cosine_anneal=True,
        warmup_steps=2,
        **sparse,
    )
    theirs = Trainer(ours.model, vectors(60), vectors(40, seed=3), loss_fn=F.cross_entropy)
    inner, outer = OptimSpec("sgd", lr=0.1, momentum=0.5), OptimSpec("adam", lr=0.02)
    schedule: dict[str, Any] = {"cosine_anneal": True, "warmup_steps": 2}
    strategy = (
        SPARTADiLoCoStrategy(
            p_sparta=p_sparta, sparta_interval=3, H=2, outer_optim=outer, inner_optim=inner, **schedule
        )
        if p_sparta
        else DiLoCoStrategy(H=2, outer_optim=outer, inner_optim=inner, **schedule)
    )
    final = theirs.fit(
        strategy=strategy, num_nodes=3, max_steps=7, batch_size=4, val_size=8, val_interval=2, progress=False
    )
    for a, b in zip(ours.train().parameters(), final.parameters(), strict=True):
        assert torch.equal(a, b)
    for column in ("train_loss", "global_loss", "lr", "payload_bytes"):
        np.testing.assert_array_equal(ours.history[column], theirs.history[column])
    assert list(ours.ledger) == list(theirs.ledger)


def test_it_ends_with_the_epochs_or_before() -> None:
    # 60 examples on 4 nodes are shards of 15: 4 batches of at most 4.
    for options, steps in (({"num_epochs": 3}, 12), ({"num_epochs": 3, "max_local_step": 5}, 5)):
        trained = simulator(**options)
        trained.train()
        assert trained.history["step"][-1] == steps


def test_hooks_get_stats() -> None:
    train: list[TrainStats] = []
    evaluations: list[EvalStats] = []
    trained = simulator(train_loss_hook=train.append, eval_loss_hook=evaluations.append, eval_dataset=vectors(9))
    trained.train()
    history = trained.history
    assert [s.loss for s in train] == history["train_loss"][1:].tolist() and [s.step for s in train] == [1, 2, 3, 4]
    assert all(s.perplexity == math.exp(s.loss) for s in train)
    assert [(s.step, s.loss) for s in evaluations] == list(zip(*history.measured("step", "global_loss"), strict=True))


def test_the_model_is_made_once_and_can_be_trained_again() -> None:
    trained = simulator()
    first = parameters_to_vector(trained.train().parameters())
    assert torch.equal(first, parameters_to_vector(trained.train().parameters()))
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(trained.model.parameters(), Net().parameters(), strict=True))


def test_checkpoints_are_counted_in_outer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(Trainer, "fit", lambda self, **options: asked.update(options))
    simulator(ckpt_interval=3, save_dir="saved", diloco_interval=5).train()
    assert asked["checkpoint_interval"] == 15 and asked["save_dir"] == "saved"
    asked.clear()
    simulator().train()
    assert not {"checkpoint_interval", "save_dir"} & asked.keys()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"diloco_intervall": 3}, TypeError, "DilocoSimulator() … did you mean 'diloco_interval'"),
        ({"model_cls": Net()}, TypeError, "model_cls … class"),
        ({"model_cls": lambda: 3}, TypeError, "torch.nn.Module … int"),
        ({"train_dataset": lambda rank: 3}, TypeError, "train_dataset"),
        ({"sparta_interval": 4}, ValueError, "sparta_interval=4 … p_sparta"),
        ({"optimizer_kwargs": {"rl": 1}}, TypeError, "AdamW … rl"),
        ({"train_loss_hook": 3}, TypeError, "train_loss_hook … (TrainStats) … 3"),
        ({"eval_loss_hook": print}, ValueError, "eval_loss_hook … val_dataset"),
    ],
)
def test_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with refused(error, said):
        simulator(**options).train()
