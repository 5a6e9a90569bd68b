"""The command line, started as a user starts it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model

from vsim.cli import main, parse_strategy
from vsim.models import CNN
from vsim.strategy import STRATEGIES, DiLoCoStrategy, FedAvgStrategy

QUICK = ["--steps", "4", "--val-size", "16", "--quiet"]


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def png_size(path: Path) -> int:
    assert path.read_bytes().startswith(b"\x89PNG")
    return path.stat().st_size


def test_compare_writes_table_figure_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", *QUICK, "--strategies", "allreduce", "fedavg:H=2", "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "allreduce" in printed and "fedavg:H=2" in printed and "2.0×" in printed
    assert png_size(tmp_path / "out" / "comparison.png") > 10_000
    with open(tmp_path / "out" / "comparison.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["strategy"] for line in lines] == ["allreduce"] * 5 + ["fedavg:H=2"] * 5
    assert float(lines[-1]["payload_bytes"]) == 2 * float(lines[1]["payload_bytes"])


def test_several_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--data", "digits", "--model", "mlp", "--strategies", "allreduce", "--out", tmp_path]
    assert run("compare", *QUICK, *small, "--seeds", 1, 2) == 0
    assert "±" in capsys.readouterr().out
    with open(tmp_path / "comparison.csv", newline="") as file:
        assert [line["seed"] for line in csv.DictReader(file)] == ["1"] * 5 + ["2"] * 5
    with pytest.raises(SystemExit, match="2"):
        run("compare", "--seed", 1, "--seeds", 2)
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")  # the bias of the ten classes
def test_compare_all_strategies_is_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", *QUICK, "--data", "digits", "--model", "mlp", "--nodes", 2, "--out", tmp_path) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in STRATEGIES)


def test_train_keeps_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", *QUICK, "--data", "digits", "--strategy", "diloco:H=2", "--out", tmp_path) == 0
    assert "diloco:H=2" in capsys.readouterr().out
    model = CNN((1, 8, 8))
    load_model(model, tmp_path / "model.safetensors")
    assert png_size(tmp_path / "history.png") > 10_000
    assert len((tmp_path / "history.csv").read_text().splitlines()) == 6  # header, step 0, four steps


def test_logs(tmp_path: Path) -> None:
    logs = ["--run-name", "sweep", "--tensorboard", "--log-dir", tmp_path / "logs", "--out", tmp_path / "out"]
    assert run("compare", *QUICK, "--data", "digits", "--strategies", "allreduce", "fedavg:H=2", *logs) == 0
    assert run("train", *QUICK, "--data", "digits", "--strategy", "diloco", *logs) == 0
    assert sorted(p.name for p in (tmp_path / "logs" / "sweep").iterdir()) == ["allreduce", "diloco", "fedavg_H=2"]
    for folder in (tmp_path / "logs" / "sweep").iterdir():
        assert len((folder / "train.csv").read_text().splitlines()) == 5
        assert list(folder.glob("events.out.tfevents.*"))


def test_text_from_a_file_and_the_seed(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    losses = []
    for seed in (1, 1, 2):
        out = tmp_path / str(len(losses))
        assert run("train", *QUICK, "--text", text, "--seed", seed, "--strategy", "allreduce", "--out", out) == 0
        with open(out / "history.csv", newline="") as file:
            losses.append([line["train_loss"] for line in csv.DictReader(file)])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--strategies", "dilocco"], "strategy must be one of .* got 'dilocco'; did you mean 'diloco'"),
        (["compare", "--strategies", "diloco:H"], "expected argument=value after the colon, got 'H'"),
        (["compare", "--strategies", "diloco:h=3"], "unknown argument 'h'.*Valid: H"),
        (["compare", "--strategies", "diloco:H=0"], "H must be a whole number >= 1, got 0"),
        (["compare", "--strategies", "diloco", "diloco"], "names diloco more than once"),
        (["compare", "--nodes", "0"], "num_nodes must be a whole number >= 1, got 0"),
        (["compare", "--text", "no/such/file.txt"], "no/such/file.txt"),
        (["compare", "--model", "cnn"], "--model cnn does not fit the data; --model may be gpt here"),
        (["compare", "--data", "digits", "--model", "gpt"], "--model may be mlp or cnn here"),
        (["compare", "--data", "mnist"], "--data mnist needs --mnist-folder"),
        (["compare", "--data", "mnist", "--mnist-folder", "no/such/dir"], "no/such/dir"),
        (["compare", "--mnist-folder", "."], "--mnist-folder has no effect without --data mnist"),
        (["compare", "--device", "tpu"], "device 'tpu'"),
        (["compare", "--log-dir", "x"], "--log-dir has no effect without --run-name or --tensorboard"),
        (["compare", "--deterministic", "--compile", "full"], "compile=True does not have them"),
        (
            ["compare", "--executor", "vmap", "--compile", "auto"],
            "compile=.auto. is a choice that executor=.auto. makes",
        ),
        (["compare", "--deterministic", "--autocast"], "autocast=True does not have them"),
        (["compare", "--run-name", "../x"], "run_name must name a folder within the log folder"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    assert main([*arguments, "--steps", "2", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("vsim compare: ")
    assert re.search(message, error), error


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["compare", "--help"])
    printed = capsys.readouterr().out
    assert "examples:" in printed and all(name in printed for name in STRATEGIES)


def test_a_training_that_diverges_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="non-finite loss"):
        status = run("train", *QUICK, "--data", "digits", "--model", "mlp", "--lr", "1e30", "--out", tmp_path)
    assert status == 2
    assert "non-finite loss at step" in capsys.readouterr().err


def test_parse_strategy() -> None:
    fedavg = parse_strategy("fedavg:island_size=2,weighting=examples,lr=0.5", lr=1e-3)
    assert isinstance(fedavg, FedAvgStrategy) and fedavg.optim_spec.kwargs == {"lr": 0.5}
    averaging = vars(fedavg.communication_modules[0])
    assert averaging == {"island_size": 2, "every": 10, "weighting": "examples"}
    diloco = parse_strategy("diloco", lr=1e-3)
    assert isinstance(diloco, DiLoCoStrategy) and diloco.optim_spec.kwargs == {"lr": 1e-3}


def test_a_run_that_is_saved_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "--data", "digits", "--val-size", 16, "--quiet", "--strategy", "fedavg:H=2"]
    saving = ["--save-dir", tmp_path / "run", "--checkpoint-interval", 3]
    assert run(*train, "--steps", 8, "--out", tmp_path / "straight", "--val-interval", 4) == 0
    assert run(*train, "--steps", 4, "--out", tmp_path / "out", "--val-interval", 4, *saving) == 0
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [f"step-0000000{i}.safetensors" for i in (3, 4)]
    assert run(*train, "--steps", 8, "--out", tmp_path / "out", "--val-interval", 4, *saving, "--resume") == 0
    models = [load_file(tmp_path / out / "model.safetensors") for out in ("straight", "out")]
    assert all(torch.equal(a, b) for a, b in zip(models[0].values(), models[1].values(), strict=True))
    path = tmp_path / "run" / "step-00000006.safetensors"
    assert run(*train, "--steps", 8, "--out", tmp_path / "other", "--resume", path) == 0
    assert run(*train, "--steps", 8, "--out", tmp_path / "other", "--resume", path, "--nodes", 3) == 2
    assert "is of another run: num_nodes was 4 and is 3" in capsys.readouterr().err
    assert run(*train, "--resume") == 2
    assert "--resume needs --save-dir DIR, or the PATH of a checkpoint" in capsys.readouterr().err
    assert run(*train, "--checkpoint-interval", 2) == 2
    assert "checkpoint_interval has no effect without save_dir" in capsys.readouterr().err
