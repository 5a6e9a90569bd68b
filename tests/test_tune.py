"""`compare(tune=…)`: every strategy with its own best setting, found with other seeds."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from comparisons_by_hand import run
from errors import refused
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim.analysis.swept import Sweep
from vsim.core.fields import arguments_of
from vsim.search.grid import points
from vsim.strategy import DiLoCoStrategy, OptimSpec, SimpleReduceStrategy
from vsim_cli import main

LRS = [0.05, 0.2, 0.5, 5.0]  # of SGD on a quadratic with curvature 1: the third is the best, the last diverges


class Quadratic(nn.Module):
    """The squared distance of a weight from the examples."""

    def __init__(self, start: float = 4.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), start))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return 0.5 * (self.weight - batch[0]).square().sum(1).mean()


def data(seed: int) -> TensorDataset:
    return TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(seed)))


TRAIN, VAL = data(0), data(1)
STRATEGIES = {
    "AllReduce": SimpleReduceStrategy(inner_optim=OptimSpec("sgd")),
    "DiLoCo": DiLoCoStrategy(H=2, inner_optim=OptimSpec("sgd"), outer_optim=OptimSpec("sgd", lr=1.0)),
}
OPTIONS: dict[str, Any] = {"num_nodes": 2, "max_steps": 6, "batch_size": 8, "progress": False}


def compare(**options: Any) -> vsim.Comparison:
    return vsim.compare(Quadratic(), TRAIN, VAL, **({"strategies": STRATEGIES, **OPTIONS} | options))


@pytest.fixture(scope="module")
def tuned() -> vsim.Comparison:
    return compare(tune={"lr": LRS}, seeds=[3, 7])


@pytest.mark.filterwarnings("ignore:.*diverged|.*not finite:UserWarning")
def test_each_strategy_takes_its_best_setting(tuned: vsim.Comparison) -> None:
    for name, strategy in STRATEGIES.items():
        sweep = tuned.tuned[name]
        assert isinstance(sweep, Sweep)
        # Each setting by itself, with the seeds after the largest of the comparison.
        losses = {}
        for lr in LRS:
            own = type(strategy)(**{**arguments_of(strategy), "lr": lr})
            runs = compare(strategies={name: own}, seeds=[8, 9]).runs(name)
            losses[lr] = statistics.fmean(run.history.last("global_loss") for run in runs)
            of_sweep = next(key for key, values in sweep.settings.items() if values["lr"] == lr)
            assert [run.seed for run in sweep.runs(of_sweep)] == [8, 9]
            tried = statistics.fmean(run.history.last("global_loss") for run in sweep.runs(of_sweep))
            assert tried == pytest.approx(losses[lr], rel=1e-5)
        best = min(losses, key=losses.__getitem__)
        assert best in LRS[1:-1] and sweep.settings[sweep.best()] == {"lr": best}
        assert [run.seed for run in tuned.runs(name)] == [3, 7]
        assert {arguments_of(run.strategy)["lr"] for run in tuned.runs(name)} == {best}
        assert tuned.rows().to_dict("records")[list(STRATEGIES).index(name)]["lr"] == f"{best:g}"
        # What is not tuned is as it was given.
        assert {**arguments_of(tuned[name].strategy), "lr": None} == {**arguments_of(strategy), "lr": None}


def test_the_table_and_files_have_the_settings(tuned: vsim.Comparison, tmp_path: Path) -> None:
    assert tuned.table().splitlines()[0].split()[:2] == ["strategy", "lr"]
    tuned.to_json(tmp_path / "tuned.json")
    read = vsim.Comparison.from_json(tmp_path / "tuned.json")
    assert read.table() == tuned.table() and list(read.tuned) == list(tuned.tuned)
    assert all(sweep.table() == tuned.tuned[name].table() for name, sweep in read.tuned.items())
    assert tuned[["DiLoCo"]].tuned is tuned.tuned


def test_a_setting_is_for_the_strategies_that_take_it(tmp_path: Path) -> None:
    strategies = {**STRATEGIES, "DiLoCo": DiLoCoStrategy(H=2, inner_optim="sgd", lr=0.2)}
    with pytest.warns(UserWarning, match=r"DiLoCo: the best outer_lr is .*, the (smallest|largest) that was tried"):
        comparison = compare(strategies=strategies, tune={"outer_lr": [0.1, 0.7]})
    assert list(comparison.tuned) == ["DiLoCo"]
    assert [row["outer_lr"] for row in comparison.rows().to_dict("records")] == ["–", "0.7"]
    note = "tuned: DiLoCo (2 settings); not tuned: AllReduce"
    assert note in comparison.table().splitlines() and note not in comparison.table(columns=["wire MB/node"])
    assert note in comparison.figure().get_suptitle().replace("\n", " ")
    assert "tuned" not in comparison[["AllReduce"]].table()
    comparison.to_json(tmp_path / "tuned.json")
    for one in (comparison, vsim.Comparison.from_json(tmp_path / "tuned.json")):
        about = one.describe()
        assert about["tuned"] == {"DiLoCo": f"{comparison.tuned['DiLoCo'].best()} of 2 settings"}
        assert "tune={'outer_lr': [0.1, 0.7]}" in about["calls"][0]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ([0.01, 0.05], r"0\.05, the largest that was tried; a larger one"),
        ([0.5, 1.9], r"0\.5, the smallest that was tried; a smaller"),
    ],
)
def test_a_best_value_at_the_edge_is_named(rates: list[float], said: str) -> None:
    with pytest.warns(UserWarning, match=rf"AllReduce: the best lr is {said}"):
        compare(strategies={"AllReduce": STRATEGIES["AllReduce"]}, tune={"lr": rates})


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ([[3], [1], [1], [1], [3]], "lr=0.3"),  # of equal ones the middle
        ([[3], [1], [1], [2], [3]], "lr=0.2"),
        ([[3], [1.01], [1], [2], [3]], "lr=0.3"),  # one seed says nothing of what is not equal
        ([[3, 4], [1, 3], [2, 2], [3, 1], [4, 4]], "lr=0.3"),  # the seeds disagree
        ([[3, 4], [1, 2], [1.5, 2.6], [2, 3], [4, 4]], "lr=0.2"),
        ([[None], [None], [1], [1], [1]], "lr=0.4"),  # None: it diverged
    ],
)
def test_of_tied_settings_the_middle_one_is_taken(losses: list[list[float | None]], chosen: str) -> None:
    rates = [0.1, 0.4, 0.3, 0.2, 0.5]  # in any order
    sweep = Sweep(0, points(SimpleReduceStrategy, {"lr": rates}))
    for rate, own in zip(sorted(rates), losses, strict=True):
        for seed, loss in enumerate(own):
            one = run([5.0], seed=seed, diverged=1) if loss is None else run([5.0, loss], seed=seed)
            sweep.add(f"SimpleReduce lr={rate:g}", one)
    assert sweep.chosen().endswith(chosen)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* that was tried:UserWarning")
def test_tuning_resumes_from_its_folder(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tune": {"lr": LRS[:3]}, "seeds": [3, 7]}
    whole = compare(**options)
    options["save_dir"] = tmp_path

    def interrupt(run: Any) -> None:
        if run.done == 3:
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"), pytest.raises(KeyboardInterrupt, match="while tuning"):
        compare(**options, callbacks=[interrupt])
    with pytest.raises(vsim.CheckpointError, match="resume=True"):
        compare(**options)
    for _ in range(2):  # from the middle of tuning, and from the end of all
        again, columns = compare(**options, resume=True), ["validation loss"]
        for name in STRATEGIES:
            assert again.tuned[name].table(columns=columns) == whole.tuned[name].table(columns=columns)
            for one, other in zip(again.runs(name), whole.runs(name), strict=True):
                assert one.history["global_loss"][-1] == other.history["global_loss"][-1]
        with pytest.raises(vsim.CheckpointError, match="resume=True"):
            compare(**options)


@pytest.mark.filterwarnings("ignore:.* that was tried:UserWarning")
def test_tuning_does_not_see_the_test_data() -> None:
    comparison = compare(tune={"lr": LRS[:3]}, test_dataset=data(2))
    assert "test loss" in comparison.rows().to_dict("records")[0]
    assert not any("test loss" in row for sweep in comparison.tuned.values() for row in sweep.rows().to_dict("records"))


@pytest.mark.filterwarnings("ignore:.* that was tried:UserWarning")
def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["compare", "--data", "digits", "--model", "mlp", "--steps", "4", "--quiet", "--out", str(tmp_path)]
    few += ["--strategies", "allreduce", "diloco", "--val-size", "16", "--nodes", "2", "--tune"]
    assert main([*few, "lr=1e-3,2e-2", "outer_lr=0.4,0.7"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[:3] == ["strategy", "lr", "outer_lr"]
    read = vsim.Comparison.from_json(tmp_path / "comparison.json")
    assert [len(sweep) for sweep in read.tuned.values()] == [2, 4]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_mistakes_are_named_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"AllReduce": STRATEGIES["AllReduce"]}
    with refused(ValueError, "AllReduce: no run got to its end", "lr=1e+30: non-finite"):
        compare(strategies=one, tune={"lr": [1e30, 1e31]}, max_steps=8)
    monkeypatch.setattr(Quadratic, "forward", None)  # nothing trains
    cases: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
        ({"tune": {"lr": [0.1]}}, ValueError, ["tune['lr']", "at least two values", "[0.1]"]),
        ({"tune": {"lr": [0.1, 0.1]}}, ValueError, ["lr has 0.1 twice"]),
        ({"tune": {"outer_rl": [0.1, 0.2]}}, ValueError, ["outer_rl", "outer_lr"]),
        ({"tune": {"lr": [0.1, -1.0]}}, ValueError, ["lr=-1", "lr must be"]),
    ]
    for options, kind, words in cases:
        with refused(kind, *words):
            compare(**options)
    with refused(ValueError, "tune=", "validation dataset"):
        vsim.compare(Quadratic(), TRAIN, strategies=STRATEGIES, tune={"lr": [0.1, 0.2]}, **OPTIONS)
