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
from vsim.models import MLP
from vsim.records.history import COLUMNS, History
from vsim.records.plots import X_AXES, bands, overview
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
    assert list(frame.columns) == ["strategy", "seed", *COLUMNS]
    assert set(frame["seed"]) == {42}
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
        assert ax.get_title("right") == "not shown, as nothing is sent: alone"
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
    assert bands({}, ax=ax) is ax


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


class FailsAt(Strategy):
    """Raises in a step."""

    def step(self) -> None:
        if self.local_step == 3:
            raise RuntimeError("out of ideas\nat length")
        super().step()


def compared(strategies: dict[str, Strategy], **options: Any) -> vsim.Comparison:
    train, val = digits()
    defaults = {"num_nodes": 2, "max_steps": 5, "progress": False}
    return vsim.compare(options.pop("model", MLP(seed=0)), train, val, strategies=strategies, **{**defaults, **options})


def test_what_is_refused_is_refused_before_the_first_run() -> None:
    steps: list[int] = []
    with pytest.raises(ValueError, match="island_size must be a whole number from 1 to 2, got 3"):
        compared(
            {"good": Strategy(), "bad": FedAvgStrategy(island_size=3)},
            train_loss_hook=lambda step, loss: steps.append(step),
        )
    assert steps == []


def test_check_raises_what_fit_would_and_trains_nothing() -> None:
    trainer = vsim.Trainer(MLP(seed=0), digits()[0])
    trainer.check(strategy=FedAvgStrategy(island_size=2), num_nodes=2)
    assert len(trainer.history) == 0 and len(trainer.ledger) == 0
    with pytest.raises(ValueError, match="island_size"):
        trainer.check(strategy=FedAvgStrategy(island_size=3), num_nodes=2)
    with pytest.raises(TypeError, match="did you mean 'num_nodes'"):
        trainer.check(strategy=Strategy(), num_node=2)
    trainer.check(strategy=Strategy(), num_nodes=2, backend="process", progress=False)
    with pytest.raises(ValueError, match="executor='loop' has no effect"):
        trainer.check(strategy=Strategy(), num_nodes=2, backend="process", executor="loop")
    trainer.fit(strategy=Strategy(), num_nodes=2, max_steps=2, progress=False)
    assert len(trainer.history) == 3


def test_a_run_that_fails_later_is_kept_and_loses_no_other() -> None:
    with pytest.warns(UserWarning, match="bad: out of ideas"):
        result = compared({"good": Strategy(), "bad": FailsAt(), "also good": SimpleReduceStrategy()})
    bad = result["bad"]
    assert bad.failure == "RuntimeError: out of ideas" and isinstance(bad.error, RuntimeError)
    assert bad.model is None and len(bad.history) == 4
    assert result["good"].model is not None and result["also good"].model is not None
    assert "RuntimeError: out of ideas" in result.table()
    with pytest.raises(RuntimeError, match="out of ideas"):  # nothing is lost when it is the first
        compared({"bad": FailsAt(), "good": Strategy()})


@pytest.fixture(scope="module")
def repeated() -> vsim.Comparison:
    strategies: dict[str, Strategy] = {"AllReduce": SimpleReduceStrategy(lr=1e-2), "FedAvg": FedAvgStrategy(H=2)}
    return compared(strategies, model=lambda seed: MLP(hidden=(8,), seed=seed), seeds=[3, 1], val_interval=1)


def test_several_seeds_by_hand(repeated: vsim.Comparison) -> None:
    assert [run.seed for run in repeated.runs("FedAvg")] == [3, 1] and repeated["FedAvg"].seed == 3
    alone = compared({"FedAvg": FedAvgStrategy(H=2)}, model=MLP(hidden=(8,), seed=1), seed=1, val_interval=1)
    assert np.array_equal(alone["FedAvg"].history.node_losses, repeated.runs("FedAvg")[1].history.node_losses)

    row = {row["strategy"]: row for row in repeated.rows()}["FedAvg"]
    a, b = (history.last("global_loss") for history in repeated.histories["FedAvg"])
    assert a != b
    assert row["validation loss"] == pytest.approx((a + b) / 2)
    assert row["validation loss std"] == pytest.approx(abs(a - b) / math.sqrt(2))  # of two, with n − 1
    assert "payload MB/node std" not in row  # alike for every seed
    assert f"{row['validation loss']:.4f} ± {row['validation loss std']:.4f}" in repeated.table()
    assert list(repeated.to_pandas()["seed"].unique()) == [3, 1] and len(repeated.to_pandas()) == 2 * 2 * 6


def test_bands_are_mean_and_deviation(repeated: vsim.Comparison) -> None:
    ax = bands(repeated.histories, "payload")
    line = ax.get_lines()[0]
    runs = repeated.histories["AllReduce"]
    losses = np.stack([history["global_loss"] for history in runs])[:, 1:]  # at step 0 nothing was sent
    np.testing.assert_allclose(line.get_ydata(), losses.mean(0))
    np.testing.assert_allclose(line.get_xdata(), runs[0]["payload_bytes"][1:] / 1e6)
    corners = ax.collections[0].get_paths()[0].vertices
    assert corners[:, 1].min() == pytest.approx((losses.mean(0) - losses.std(0, ddof=1)).min())
    assert corners[:, 1].max() == pytest.approx((losses.mean(0) + losses.std(0, ddof=1)).max())


def test_the_mean_ends_where_the_first_run_does(repeated: vsim.Comparison) -> None:
    long = repeated.histories["FedAvg"][0]
    short = History()
    for step in range(3):
        short.append({"step": step, "global_loss": 1.0})
    (line,) = bands({"x": [long, short]}).get_lines()
    assert list(line.get_xdata()) == [0, 1, 2]
    assert bands({"x": []}).get_lines()[0].get_xdata().size == 0


def test_a_seed_that_fails_is_left_out_of_the_mean_and_noted(repeated: vsim.Comparison, tmp_path: Path) -> None:
    repeated.to_json(tmp_path / "c.json")
    copy = vsim.Comparison.from_json(tmp_path / "c.json")
    copy.runs("FedAvg")[0].failure = "non-finite loss"
    rows = {row["strategy"]: row for row in copy.rows()}
    assert rows["FedAvg"]["validation loss"] == copy.runs("FedAvg")[1].history.last("global_loss")
    assert rows["FedAvg"]["note"] == "seed 3: non-finite loss" and rows["AllReduce"]["note"] == ""


def test_json_gives_everything_back(repeated: vsim.Comparison, tmp_path: Path) -> None:
    repeated.to_json(tmp_path / "c.json")
    again = vsim.Comparison.from_json(tmp_path / "c.json")
    assert again.rows() == repeated.rows() and repr(again) == repr(repeated)
    for name in repeated:
        for ours, theirs in zip(again.runs(name), repeated.runs(name), strict=True):
            assert list(ours.ledger) == list(theirs.ledger) and ours.seed == theirs.seed
            assert ours.history.as_plain() == theirs.history.as_plain()
    repeated["FedAvg"].history.to_json(tmp_path / "h.json")
    with pytest.raises(ValueError, match=r"was not written by Comparison.to_json: it lacks 'allreduce_bytes'"):
        vsim.Comparison.from_json(tmp_path / "h.json")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seeds": []}, ValueError, r"seeds must be different numbers, at least one, got \[\]"),
        ({"seeds": [1, 1]}, ValueError, "seeds must be different numbers"),
        ({"seeds": [1, -1]}, ValueError, "every one of seeds must be a whole number >= 0, got -1"),
        ({"seeds": [1], "seed": 2}, TypeError, "seed and seeds say the same thing"),
        ({"model": 3}, TypeError, r"model must be a torch.nn.Module, or a function f\(seed\)"),
        ({"model": MLP}, TypeError, r"or a function f\(seed\) that makes one, got <class"),
        ({"model": lambda seed: seed}, TypeError, r"model\(42\) must return a torch.nn.Module, got int"),
        ({"progress": "bar"}, ValueError, "progress must be True, False or 'plot', got 'bar'"),
        ({"progress": "plot"}, ValueError, "progress='plot' draws in a notebook, and this is none"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compared({"a": Strategy()}, **options)


@pytest.mark.parametrize(
    ("strategies", "error", "message"),
    [
        ([SimpleReduceStrategy()], TypeError, "strategies must be a dict of name → strategy, got list"),
        ({}, ValueError, "strategies is empty"),
        ({"a": "diloco"}, TypeError, "must be Strategy objects, got a: 'diloco'"),
        ({1: Strategy(), "b": Strategy()}, TypeError, "names of strategies must be strings, got 1$"),
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
