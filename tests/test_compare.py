"""compare(): identical conditions, a table and figures that say what the ledgers say."""

from __future__ import annotations

import base64
import csv
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim.data import digits
from vsim.history import COLUMNS, History
from vsim.models import MLP
from vsim.plot import X_AXES, overview, plot_histories
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, Strategy

K, STEPS = 3, 20


@pytest.fixture(scope="module")
def comparison() -> vsim.Comparison:
    train, val = digits()
    return vsim.compare(
        MLP(hidden=(16,), seed=0),
        train,
        val,
        strategies={
            "AllReduce": SimpleReduceStrategy(lr=1e-2),
            "FedAvg": FedAvgStrategy(H=5, lr=1e-2),
            "alone": Strategy(lr=1e-2),
        },
        num_nodes=K,
        max_steps=STEPS,
        val_interval=5,
        progress=False,
    )


def test_every_run_is_what_fit_gives_alone(comparison: vsim.Comparison) -> None:
    train, val = digits()
    trainer = vsim.Trainer(MLP(hidden=(16,), seed=0), train, val)
    alone = trainer.fit(
        strategy=FedAvgStrategy(H=5, lr=1e-2), num_nodes=K, max_steps=STEPS, val_interval=5, progress=False
    )
    run = comparison["FedAvg"]
    assert run.model is not None
    for ours, theirs in zip(run.model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert np.array_equal(run.history.node_losses, trainer.history.node_losses)
    assert list(run.ledger) == list(trainer.ledger)


def test_all_start_alike_and_see_the_same_first_batch(comparison: vsim.Comparison) -> None:
    first = [run.history.node_losses[0] for run in comparison.values()]
    assert np.array_equal(first[0], first[1]) and np.array_equal(first[0], first[2])
    assert len({run.history["global_loss"][0] for run in comparison.values()}) == 1


def test_rows_by_hand(comparison: vsim.Comparison) -> None:
    rows = {row["strategy"]: row for row in comparison.rows()}
    # 64·16 + 16 + 16·10 + 10 = 1210 parameters of 4 bytes. AllReduce: all of them at each of 20 steps; FedAvg: after
    # steps 5, 10, 15, 20. A ring of 3 sends 2·2/3 of the payload.
    step_bytes = 1210 * 4
    assert rows["AllReduce"]["payload MB/node"] == pytest.approx(20 * step_bytes / 1e6)
    assert rows["FedAvg"]["payload MB/node"] == pytest.approx(4 * step_bytes / 1e6)
    assert rows["FedAvg"]["wire MB/node"] == pytest.approx(4 * step_bytes * 4 / 3 / 1e6)
    assert rows["AllReduce"]["times less than AllReduce"] == pytest.approx(1)
    assert rows["FedAvg"]["times less than AllReduce"] == pytest.approx(5)
    assert rows["alone"]["payload MB/node"] == 0 and math.isnan(rows["alone"]["times less than AllReduce"])
    for name, run in comparison.items():
        assert rows[name]["validation loss"] == run.history["global_loss"][-1]
        assert rows[name]["perplexity"] == pytest.approx(math.exp(run.history["global_loss"][-1]))
        assert rows[name]["accuracy"] == run.history["global_accuracy"][-1]


def test_the_table_and_the_notebook_view_hold_every_strategy(comparison: vsim.Comparison) -> None:
    text, html = comparison.table(), comparison._repr_html_()
    for name in comparison:
        assert name in text and name in html
    assert "5.0×" in text and "–" in text
    assert "<table>" in html
    encoded = re.search(r"base64,([^\"]+)\"", html)
    assert encoded is not None and base64.b64decode(encoded.group(1)).startswith(b"\x89PNG")
    assert comparison.table() in repr(comparison)


def test_to_pandas_and_to_csv_agree(comparison: vsim.Comparison, tmp_path: Path) -> None:
    frame = comparison.to_pandas()
    assert list(frame.columns) == ["strategy", *COLUMNS]
    assert len(frame) == 3 * (STEPS + 1)
    comparison.to_csv(tmp_path / "c.csv")
    with open(tmp_path / "c.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["strategy"] for line in lines] == list(frame["strategy"])
    for column in ("step", "train_loss", "payload_bytes", "global_loss"):
        written = np.array([float(line[column] or "nan") for line in lines])
        assert np.array_equal(written, frame[column].to_numpy(dtype=float), equal_nan=True)


@pytest.mark.parametrize("x", X_AXES)
def test_plot_draws_the_columns(comparison: vsim.Comparison, x: str) -> None:
    import matplotlib.pyplot as plt

    ax = comparison.plot(x=x)
    column, divisor, _, logarithmic = X_AXES[x]
    lines = {line.get_label(): line for line in ax.get_lines()}
    # Who communicates nothing has no place on a logarithmic axis of bytes; the figure says so in words.
    assert set(lines) == {"AllReduce", "FedAvg"} if logarithmic else set(comparison)
    assert ax.get_xscale() == ("log" if logarithmic else "linear")
    if logarithmic:
        assert any("alone" in text.get_text() for text in ax.texts)
    xs, ys = comparison["FedAvg"].history.measured(column, "global_loss")
    drawn = lines["FedAvg"]
    assert np.array_equal(drawn.get_xdata(), xs[xs > 0] / divisor if logarithmic else xs / divisor)
    assert np.array_equal(drawn.get_ydata(), ys[xs > 0] if logarithmic else ys)
    plt.close(ax.figure)


def test_plot_on_given_axes_and_other_columns(comparison: vsim.Comparison) -> None:
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    assert comparison.plot(y="train_loss", ax=ax) is ax
    assert ax.get_ylabel() == "training loss"
    with pytest.raises(ValueError, match=r"x must be one of .*'payload'.*, got 'bytes'"):
        comparison.plot(x="bytes", ax=ax)
    with pytest.raises(KeyError, match=r"no column 'loss'; there are step"):
        comparison.plot(y="loss", ax=ax)


def test_a_run_that_diverges_does_not_flatten_the_others() -> None:
    def history(losses: list[float]) -> History:
        h = History()
        for step, loss in enumerate(losses):
            h.append({"step": step, "global_loss": loss, "payload_bytes": step})
        return h

    histories = {"good": history([3.0, 2.0, 1.0]), "bad": history([3.0, 50.0, 900.0])}
    assert overview(histories).axes[0].get_ylim()[1] < 4
    assert overview({"good": histories["good"]}).axes[0].get_ylim()[1] > 3
    assert overview({"empty": History()}).axes[0].get_lines()[0].get_xdata().size == 0
    ax = overview({}).axes[0]
    assert plot_histories({}, ax) is ax


class Explodes(nn.Module):
    """A model of one weight, whose loss is infinite once it has moved far enough."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return torch.where(self.w.sum() < -2.5, torch.inf, self.w.sum() + 0 * batch[0].mean())


@pytest.mark.filterwarnings("ignore:bad. non-finite loss:UserWarning")
def test_a_diverging_strategy_is_kept_and_the_others_go_on() -> None:
    data = TensorDataset(torch.zeros(64, 1))
    strategies = {"bad": Strategy(inner_optim="sgd", lr=1.0), "good": Strategy(inner_optim="sgd", lr=0.1)}
    result = vsim.compare(
        Explodes(), data, strategies=strategies, num_nodes=2, max_steps=10, batch_size=2, progress=False
    )
    # w = −step, so that the loss of step 4 (w = −3) is the first that is infinite.
    assert result["bad"].failure == "non-finite loss at step 4 on nodes [0, 1]"
    assert result["bad"].model is None and len(result["bad"].history) == 4
    assert result["good"].model is not None and len(result["good"].history) == 11
    assert "non-finite loss at step 4" in result.table()


def test_an_interrupt_keeps_what_was_done() -> None:
    train, val = digits()
    calls: list[int] = []

    def interrupt(step: int, loss: float) -> None:
        calls.append(step)
        if len(calls) == 13:
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="second: interrupted after step 3"):
        result = vsim.compare(
            MLP(seed=0),
            train,
            val,
            strategies={"first": Strategy(), "second": Strategy(), "third": Strategy()},
            num_nodes=2,
            max_steps=10,
            progress=False,
            train_loss_hook=interrupt,
        )
    assert list(result) == ["first", "second"]
    assert result["first"].model is not None and len(result["second"].history) == 4
    assert "interrupted after step 3" in result.table()


def test_without_validation_the_training_loss_is_shown() -> None:
    train, _ = digits()
    result = vsim.compare(
        MLP(seed=0), train, strategies={"one": SimpleReduceStrategy()}, num_nodes=2, max_steps=20, progress=False
    )
    (row,) = result.rows()
    assert row["training loss"] == pytest.approx(result["one"].history["train_loss"][-2:].mean())
    assert "validation loss" not in row and "accuracy" not in row
    assert result.figure().axes[0].get_ylabel() == "training loss"


@pytest.mark.parametrize(
    ("strategies", "error", "message"),
    [
        ([SimpleReduceStrategy()], TypeError, "strategies must be a dict of name → strategy, got list"),
        ({}, ValueError, "strategies is empty"),
        ({"a": "diloco"}, TypeError, "must be Strategy objects, got a: 'diloco'"),
    ],
)
def test_bad_strategies(strategies: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        vsim.compare(MLP(), TensorDataset(torch.zeros(4, 64)), strategies=strategies, num_nodes=2)


def test_unknown_names(comparison: vsim.Comparison) -> None:
    with pytest.raises(KeyError, match="no run 'DiLoCo'; there are AllReduce, FedAvg, alone"):
        comparison["DiLoCo"]
    with pytest.raises(TypeError, match="unknown argument 'max_step'; did you mean 'max_steps'"):
        vsim.compare(
            MLP(), TensorDataset(torch.zeros(4, 64)), strategies={"a": DiLoCoStrategy()}, num_nodes=2, max_step=3
        )
