"""Loggers: what is in the files, on W&B and in TensorBoard, when it is there, and that training does not notice."""

from __future__ import annotations

import csv
import functools
import json
import math
import os
import random
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import given
from hypothesis import strategies as st
from reference_cluster import small_mlp, vectors
from test_torchrun import free_port, torchrun
from torch import nn

import vsim
from vsim import CSVLogger, TensorBoardLogger, Trainer, WandbLogger
from vsim.history.loggers import RunLog, folder_name
from vsim.history.loggers.base import train_row
from vsim.history.progress import StepReport
from vsim.saved import read_log
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec

STEPS = 6
TRAIN = ["step", "examples_trained", "train_loss", "train_perplexity", "lr", "payload_bytes", "wire_bytes"]
VALIDATION = ["step", "local_loss", "local_perplexity", "global_loss", "global_perplexity"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fit(trainer: Trainer | None = None, **options: Any) -> Trainer:
    trainer = trainer or Trainer(small_mlp(), vectors(), vectors(7))
    interval = None if trainer.val_dataset is None else 3
    defaults = {"num_nodes": 3, "max_steps": STEPS, "batch_size": 4, "val_interval": interval, "progress": False}
    trainer.fit(**{"strategy": DiLoCoStrategy(H=2, lr=0.01), **defaults, **options})
    return trainer


def read(path: Path | str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name] or "nan") for row in rows]


class Notes:
    """A logger that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def hear(self, kind: str, content: Any) -> None:
        self.heard.append((kind, content if kind == "finish" else dict(content)))

    def start(self, config: Mapping[str, Any]) -> None:
        self.hear("start", config)

    def log_train(self, row: Mapping[str, float]) -> None:
        self.hear("train", row)

    def log_validation(self, row: Mapping[str, float]) -> None:
        self.hear("validation", row)

    def finish(self, failure: str) -> None:
        self.hear("finish", failure)

    def steps(self, kind: str) -> list[int]:
        return [int(content["step"]) for k, content in self.heard if k == kind]


# CSV files


def test_the_files_say_what_the_history_says() -> None:
    trainer = fit(run_name="first", correlation_interval=2)
    history = trainer.history
    train, validation = read("logs/first/train.csv"), read("logs/first/validation.csv")
    assert list(train[0])[:7] == TRAIN and list(validation[0])[:5] == VALIDATION
    after = slice(1, None)
    for name in ("step", "train_loss", "lr", "payload_bytes", "wire_bytes", "seconds", "memory_bytes"):
        assert column(train, name) == history[name][after].tolist(), name
    assert column(train, "examples_trained") == history["examples"][after].tolist()
    assert column(train, "train_perplexity") == [math.exp(x) for x in history["train_loss"][after]]
    for name in ("divergence", "correlation"):
        np.testing.assert_array_equal(column(train, name), history[name][after])
    rates = np.diff(history["examples"]) / np.diff(history["seconds"])
    np.testing.assert_allclose(column(train, "examples_per_second"), rates, rtol=1e-12)
    assert np.isnan(column(train, "tokens_per_second")).all()
    assert (history["memory_bytes"][after] > 1e7).all()

    steps, local, overall, accuracy = history.measured("step", "local_loss", "global_loss", "global_accuracy")
    assert column(validation, "step") == steps.tolist() == [0, 3, 6]
    assert column(validation, "local_loss") == local.tolist()
    assert column(validation, "global_loss") == overall.tolist()
    assert column(validation, "global_accuracy") == accuracy.tolist()
    assert column(validation, "global_perplexity") == [math.exp(x) for x in overall]
    assert column(validation, "local_perplexity") == [math.exp(x) for x in local]
    assert trainer.loggers[0].folder == Path("logs/first")  # type: ignore[attr-defined]


def test_without_accuracy_and_validation() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(9, 12), torch.ones(9, 1))
    for name, val in (("no-val", None), ("mse", data)):
        fit(Trainer(nn.Linear(12, 1), data, val, loss_fn=nn.MSELoss()), run_name=name)
    assert len(read("logs/no-val/train.csv")) == STEPS and not Path("logs/no-val/validation.csv").exists()
    assert "global_accuracy" not in read("logs/mse/validation.csv")[0]


class Measures(FedAvgStrategy):
    """Has a column of its own from step `since` on, whose name must be quoted in a file."""

    def __init__(self, since: int) -> None:
        super().__init__(H=2, lr=0.01)
        self.since = since

    def columns(self) -> Mapping[str, float]:
        return {'twice, "2k"': 2.0 * self.cluster.step} if self.cluster.step >= self.since else {}


@pytest.mark.parametrize("since", [0, 1, 3])
def test_a_strategys_own_columns_are_in_the_files_from_their_first_step_on(since: int) -> None:
    name = 'twice, "2k"'
    history = fit(strategy=Measures(since), run_name="own", metrics={"one": lambda model, batch: 1.0}).history
    files = (read(f"logs/own/{kind}.csv") for kind in ("train", "validation"))
    for rows, steps in zip(files, (range(1, STEPS + 1), (0, 3, 6)), strict=True):
        assert column(rows, "step") == [*steps]
        np.testing.assert_array_equal(column(rows, name), history[name][[*steps]])
        assert all(None not in row.values() for row in rows)
        assert ("one" in rows[0]) == (len(steps) == 3)
    assert read_log("logs/own")["step"].tolist() == history["step"].tolist()


def test_the_configuration() -> None:
    strategy = DiLoCoStrategy(H=2, inner_optim=OptimSpec("sgd", lr=0.05, momentum=0.5), warmup_steps=2, max_norm=1.5)
    fit(run_name="c", strategy=strategy, val_size=5, train_loss_hook=print_nothing, max_steps=None, num_epochs=2)
    config = json.loads(Path("logs/c/config.json").read_text())
    plain = {"num_nodes": 3, "val_size": 5, "seed": 42, "max_steps": None, "total_steps": 6}
    assert config.items() >= {**plain, "train_loss_hook": "test_logger.print_nothing"}.items()
    described = config["strategy"]
    assert described["class"] == "DiLoCoStrategy" and described["max_norm"] == 1.5
    assert described["optim_spec"] == {"class": "SGD", "lr": 0.05, "momentum": 0.5}
    assert described["H"] == 2 and described["outer_optim_spec"]["lr"] == 0.7 and "lr" not in described
    shapes = {name: list(p.shape) for name, p in small_mlp().named_parameters()}
    about = {"class": "MLP", "parameters": 293, "trainable_parameters": 293, "parameter_bytes": 4 * 293}
    assert config["model"] == {**about, "shapes": shapes, "digest": config["model"]["digest"]}
    assert config["train_dataset"]["class"] == "TensorDataset" and config["train_dataset"]["examples"] == 29
    assert config["versions"]["vsim"] == vsim.__version__ and config["versions"]["torch"] == torch.__version__


def print_nothing(step: int, loss: float) -> None:
    pass


def test_a_run_that_is_there_already_is_left_alone() -> None:
    fit(run_name="r")
    before = Path("logs/r/train.csv").read_text()
    for number in (2, 3):
        with pytest.warns(UserWarning, match=rf"logs/r holds a run already; this one is in logs/r-{number}$"):
            fit(run_name="r", max_steps=2)
    assert Path("logs/r/train.csv").read_text() == before
    assert len(read("logs/r-3/train.csv")) == 2


def test_rows_are_in_the_file_when_they_are_logged_and_stay_when_the_run_is_interrupted() -> None:
    seen: list[int] = []

    def look(step: int, loss: float) -> None:
        seen.append(len(read("logs/live/train.csv")))
        interrupt(step, loss)

    notes = Notes()
    with pytest.raises(KeyboardInterrupt):
        fit(logger=[CSVLogger(), notes], run_name="live", train_loss_hook=look)
    assert seen == column(read("logs/live/train.csv"), "step") == [1, 2, 3]
    assert notes.heard[-1][0] == "finish" and notes.heard[-1][1].startswith("Interrupted: interrupted after step 3:")


def interrupt(step: int, loss: float) -> None:
    if step == 3:
        raise KeyboardInterrupt


# When


def test_what_is_logged_when() -> None:
    notes = Notes()
    trainer = fit(logger=notes, run_name="n", log_interval=4, correlation_interval=3, val_interval=5, max_steps=9)
    kinds = [kind for kind, _ in notes.heard]
    assert kinds[0] == "start" and kinds[-1] == "finish" and notes.heard[-1][1] == ""
    assert notes.steps("train") == [3, 4, 6, 8, 9] and notes.steps("validation") == [0, 5, 9]
    assert notes.heard[0][1]["run_name"] == "n" and notes.heard[0][1]["logger"] == ["Notes"]
    assert not Path("logs").exists()  # with a logger= it is what logs
    # Rates are over the steps since the row before.
    rows = [row for kind, row in notes.heard if kind == "train"]
    history = trainer.history
    for before, row in zip([0, 3, 4, 6, 8], rows, strict=True):
        step = int(row["step"])
        examples = history["examples"][step] - history["examples"][before]
        assert row["examples_per_second"] == examples / (history["seconds"][step] - history["seconds"][before])


@given(st.floats(-5, 2000), st.floats(0, 10), st.floats(0, 10), st.integers(0, 10**9))
def test_rates_and_perplexities_are_numbers_or_unknown(
    loss: float, started: float, elapsed: float, examples: int
) -> None:
    before = {"step": 0.0, "examples": 0.0, "seconds": started}
    row = {"step": 1.0, "examples": examples, "seconds": started + elapsed, "train_loss": loss, "lr": 0.1}
    logged = train_row(row, before)
    assert logged["train_perplexity"] == (math.exp(loss) if loss < 700 else math.inf)
    assert math.isnan(logged["examples_per_second"]) or logged["examples_per_second"] >= 0
    assert math.isnan(logged["tokens_per_second"])


class Failing(Notes):
    """Fails in a method, and in that of training at step 2."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def hear(self, method: str, content: Any) -> None:
        super().hear(method, content)
        if method == self.method and (method != "train" or content["step"] == 2):
            raise OSError("disk full")


@pytest.mark.parametrize(("method", "where"), [("train", "log_train of step 2"), ("finish", "finish")])
def test_a_failing_logger_is_a_warning_and_training_goes_on(method: str, where: str) -> None:
    failing, notes = Failing(method), Notes()
    with pytest.warns(UserWarning, match=rf"Failing failed in {where} \(OSError: disk full\)"):
        fit(logger=[failing, notes])
    assert failing.steps("train") == ([1, 2] if method == "train" else [1, 2, 3, 4, 5, 6])
    assert failing.heard[-1] == notes.heard[-1] == ("finish", "")
    assert notes.steps("train") == list(range(1, STEPS + 1))


def test_a_logger_that_cannot_start_stops_the_run_before_its_first_step() -> None:
    notes, failing = Notes(), Failing("start")
    trainer = Trainer(small_mlp(), vectors(), vectors())
    with pytest.raises(OSError, match="disk full"):
        fit(trainer, logger=[notes, failing])
    assert trainer.history["step"].tolist() == []
    assert notes.heard[-1] == failing.heard[-1] == ("finish", "OSError: disk full")
    Path("logs").write_text("a file")
    with pytest.raises(OSError, match="logs"):
        fit(run_name="x")


class Drawing(Notes):
    def hear(self, kind: str, content: Any) -> None:
        torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from the global generators."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(12) + np.random.rand() + random.random(), index % 5  # noqa: NPY002


def test_what_a_logger_draws_changes_nothing() -> None:
    losses = [
        fit(Trainer(small_mlp(), Noisy()), logger=logger).history["train_loss"][1:].tolist()
        for logger in (None, Drawing(), CSVLogger())
    ]
    assert losses[0] == losses[1] == losses[2]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, dict[str, float]], list[int]]:
    """What the runs of W&B are given: step → row, and the codes at their ends."""
    import wandb

    rows: dict[int, dict[str, float]] = {}
    codes: list[int] = []
    log, finish = wandb.Run.log, wandb.Run.finish

    def note(run: Any, row: dict[str, float], step: int) -> None:
        assert step >= max(rows, default=0)  # W&B drops others
        rows.setdefault(step, {}).update(row)
        log(run, row, step=step)

    def end(run: Any, exit_code: int) -> None:
        codes.append(exit_code)
        finish(run, exit_code)

    monkeypatch.setattr(wandb.Run, "log", note)
    monkeypatch.setattr(wandb.Run, "finish", end)
    return rows, codes


def offline(tmp_path: Path, **options: Any) -> WandbLogger:
    return WandbLogger("vsim-tests", mode="offline", dir=str(tmp_path), **options)


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, told: Any, capfd: pytest.CaptureFixture[str]) -> None:
    import wandb

    logger, (rows, codes) = offline(tmp_path), told
    states = random.getstate(), torch.get_rng_state()
    streams = sys.stdout, sys.stderr
    history = fit(logger=logger, run_name="a run").history
    assert states[0] == random.getstate() and torch.equal(states[1], torch.get_rng_state())
    assert (sys.stdout, sys.stderr) == streams and wandb.run is None and codes == [0]
    run = logger.run
    assert (run.project, run.name, run.group, logger.url) == ("vsim-tests", "a run", "", None)
    assert run.config["num_nodes"] == 3 and run.config["strategy"]["class"] == "DiLoCoStrategy"
    assert run.config["strategy"]["arguments"] == {"H": 2, "lr": 0.01}
    assert list(rows) == list(range(STEPS + 1))
    assert [row.get("train_loss") for row in rows.values()] == [None, *history["train_loss"][1:].tolist()]
    measured = [row["global_loss"] for row in rows.values() if "global_loss" in row]
    assert measured == history.measured("global_loss")[0].tolist()
    assert "divergence" not in rows[1] and rows[1]["examples_trained"] == 12
    assert list(tmp_path.rglob("run-*.wandb")) and capfd.readouterr() == ("", "")


def test_wandb_over_examples_and_a_failed_run(tmp_path: Path, told: Any) -> None:
    logger, (rows, codes) = offline(tmp_path, experiment_name="mine", group="g"), told
    with pytest.raises(KeyboardInterrupt):
        fit(logger=logger, run_name="theirs", log_x_axis="examples", train_loss_hook=interrupt)
    assert (logger.run.name, logger.run.group, codes) == ("mine", "g", [1])
    assert list(rows) == [0, 12, 24, 30]


def test_the_shorthand_for_wandb(tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    # What WANDB_MODE and WANDB_DIR would say; wandb reads them once in a process.
    settings = functools.partial(wandb.Settings, mode="offline", root_dir=str(tmp_path))
    monkeypatch.setattr(wandb, "Settings", settings)
    files, logger = fit(wandb_project="short", run_name="tuesday/both", max_steps=2).loggers
    assert isinstance(files, CSVLogger) and isinstance(logger, WandbLogger) and list(told[0]) == [0, 1, 2]
    assert (logger.run.project, logger.run.name, logger.run.group) == ("short", "tuesday/both", "tuesday")
    assert len(read("logs/tuesday/both/train.csv")) == 2


def events_in(folder: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    return events


def test_tensorboard_has_the_losses_and_settings() -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    history = fit(logger=[CSVLogger(), TensorBoardLogger()], run_name="tb", correlation_interval=3).history
    events = events_in("logs/tb")
    assert "config/text_summary" in events.Tags()["tensors"]
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert len(read("logs/tb/train.csv")) == STEPS  # in one folder, without a warning
    for tag, name in (("train/loss", "train_loss"), ("validation/global_loss", "global_loss")):
        steps, losses = history.measured("step", name)
        assert found[tag] == [(int(t), pytest.approx(x)) for t, x in zip(steps, losses, strict=True)]
    assert [step for step, _ in found["train/divergence"]] == [3, 6]
    assert {"train/perplexity", "train/lr", "train/examples_per_second", "validation/global_perplexity"} <= set(found)
    kept = {tag: HParamsPluginData.FromString(own) for tag, own in events.PluginTagToContent("hparams").items()}
    start = kept["_hparams_/session_start_info"].session_start_info.hparams
    assert start["strategy"].string_value == "DiLoCoStrategy" and start["H"].number_value == 2
    assert start["lr"].number_value == 0.01 and start["num_nodes"].number_value == 3
    metrics = [info.name.tag for info in kept["_hparams_/experiment"].experiment.metric_infos]
    assert {"train/loss", "validation/global_loss", "validation/wire_bytes"} <= set(metrics)
    with pytest.warns(UserWarning, match="logs/tb holds a run already"):
        fit(logger=TensorBoardLogger(), run_name="tb", log_x_axis="examples", max_steps=3)
    assert [event.step for event in events_in("logs/tb-2").Scalars("train/loss")] == [12, 24, 30]  # shards of 10


@pytest.mark.slow
def test_under_torchrun_one_rank_logs(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from reference_cluster import small_mlp, vectors
        from vsim import Trainer
        from vsim.strategy import FedAvgStrategy

        trainer = Trainer(small_mlp(), vectors(), vectors())
        trainer.fit(
            strategy=FedAvgStrategy(H=2), num_nodes=2, max_steps=3, run_name="ranks", progress=False,
            backend="process", threads_per_process=1,
        )
        sys.stdout.write("loggers: %d\\n" % len(trainer.loggers))  # at once: the ranks share a pipe
    """)
    )
    run = torchrun("--nproc_per_node=2", "--master_port", str(free_port()), str(path))
    out, _ = run.communicate(timeout=120)
    assert run.returncode == 0, out
    assert sorted(line for line in out.splitlines() if line.startswith("loggers")) == ["loggers: 0", "loggers: 1"]
    assert os.listdir("logs") == ["ranks"] and len(read("logs/ranks/train.csv")) == 3


# compare


def test_runs_have_folders_of_their_own() -> None:
    """One logger for many runs, one run after the other; runs of a comparison; without a name, by date and time."""
    logger, trainer = CSVLogger(), Trainer(small_mlp(), vectors(), vectors())
    for name in ("a", "b"):
        fit(trainer, logger=logger, run_name=name, max_steps=2)
        assert trainer.loggers == [logger]
    assert len(read("logs/a/train.csv")) == len(read("logs/b/train.csv")) == 2
    strategies: dict[str, Any] = {"diloco:H=2": DiLoCoStrategy(H=2), "FedAvg": FedAvgStrategy()}
    options: dict[str, Any] = {"strategies": strategies, "num_nodes": 2, "max_steps": 2, "progress": False}
    notes = Notes()
    vsim.compare(small_mlp(), vectors(), vectors(), logger=[CSVLogger(), notes], run_name="sweep/lr", **options)
    assert sorted(os.listdir("logs/sweep/lr")) == ["FedAvg", "diloco_H=2"]
    assert len(read("logs/sweep/lr/diloco_H=2/train.csv")) == 2
    names = [content["run_name"] for kind, content in notes.heard if kind == "start"]
    assert names == ["sweep/lr/diloco_H=2", "sweep/lr/FedAvg"]
    vsim.compare(small_mlp(), vectors(), logger=CSVLogger("elsewhere"), **options)
    (folder,) = Path("elsewhere").iterdir()
    assert sorted(os.listdir(folder)) == ["FedAvg", "diloco_H=2"]
    fit(logger=CSVLogger("elsewhere"), max_steps=1)
    assert len(list(Path("elsewhere").glob("*/config.json"))) == 1
    assert folder_name("..") == "_" and folder_name("a b/c") == "a_b_c"


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
        ({"logger": CSVLogger}, TypeError, ["logger", "CSVLogger()", "<class 'vsim"]),
        ({"logger": [CSVLogger(), 3]}, TypeError, ["logger", "list of them", "3"]),
        ({"run_name": "../up"}, ValueError, ["run_name", "folder", "'../up'"]),
        ({"run_name": "/root"}, ValueError, ["run_name", "folder", "'/root'"]),
        ({"log_interval": 5}, ValueError, ["log_interval", "no effect", "logger"]),
        ({"run_name": "x", "log_x_axis": "example"}, ValueError, ["log_x_axis", "did you mean 'examples'"]),
        ({"run_name": "x", "log_x_axis": "examples"}, ValueError, ["log_x_axis='examples'", "no effect"]),
        ({"loger": None}, TypeError, ["'loger'", "did you mean 'logger'"]),
    ]
    for own, kind, words in options:
        with refused(kind, *words):
            fit(**own)
    with refused(TypeError, "'entitty'", "did you mean 'entity'"):
        WandbLogger("p", entitty="me")
    with refused(TypeError, "'name'"):
        WandbLogger("p", name="x")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    absent: list[tuple[str, Any]] = [("wandb", lambda: WandbLogger("p")), ("wandb", lambda: fit(wandb_project="p"))]
    for name, make in [*absent, ("tensorboard", TensorBoardLogger)]:
        with refused(ImportError, name, f'pip install "vsim-torch[{name}]"'):
            make()
    with refused(ValueError, "empty"):
        fit(Trainer(small_mlp(), vectors(0)), run_name="never")
    assert not Path("logs").exists()


def test_wandb_without_a_key_is_one_line_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**_: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", functools.wraps(wandb.init)(refuse))
    steps: list[int] = []
    with pytest.raises(ValueError, match=r"refuses the run: No API key configured. Use .* — .*WANDB_API_KEY") as caught:
        fit(wandb_project="p", train_loss_hook=lambda step, loss: steps.append(step))
    assert "\n" not in str(caught.value) and not steps


def test_a_run_that_goes_on_from_a_later_step_is_logged_from_there() -> None:
    notes = Notes()
    log = RunLog([notes], {})
    log.on_start(StepReport({}, None, [], "vmap", 8))
    for step in (7, 8):
        row = {"step": step, "examples": 10 * step, "tokens": 20 * step, "train_loss": 1.0, "lr": 0.1}
        log.on_step(StepReport({**row, "seconds": 2.0 * step}, [1.0], [], "vmap", 8))
    last = notes.heard[-1][1]
    assert last["examples_per_second"] == 5 and last["tokens_per_second"] == 10
