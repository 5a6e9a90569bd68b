"""The command line, started as a user starts it."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

import vsim
from vsim.cli import parse_settings, parse_strategy, strategy_class
from vsim.data import digits, partition
from vsim.strategy import (
    COMPARED,
    PRESETS,
    STRATEGIES,
    DiLoCoCommunicator,
    DiLoCoStrategy,
    EDiTStrategy,
    FedAvgStrategy,
    SPARTADiLoCoStrategy,
    StatisticalQuantizer,
    TileTopK,
    TopK,
    mean,
)
from vsim_cli import main

QUICK = ["--steps", "4", "--val-size", "16", "--quiet"]


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def png_size(path: Path) -> int:
    assert path.read_bytes().startswith(b"\x89PNG")
    return path.stat().st_size


def test_compare_writes_table_figure_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["--target-loss", 0.1]
    assert run("compare", *QUICK, "--strategies", "allreduce", "fedavg:H=2", "--out", tmp_path / "out", *target) == 0
    printed = capsys.readouterr().out
    assert "steps to 0.1" in printed and printed.count("never") == 4
    assert "allreduce" in printed and "fedavg:H=2" in printed and "2.0×" in printed
    assert png_size(tmp_path / "out" / "comparison.png") > 10_000
    with open(tmp_path / "out" / "comparison.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["strategy"] for line in lines] == ["allreduce"] * 5 + ["fedavg:H=2"] * 5
    assert float(lines[-1]["payload_bytes"]) == 2 * float(lines[1]["payload_bytes"])
    saved = vsim.Comparison.from_json(tmp_path / "out" / "comparison.json")
    assert [str(v) for v in saved["fedavg:H=2"].history["payload_bytes"]] == [
        line["payload_bytes"] + ".0" for line in lines[5:]
    ]


def test_results_are_never_overwritten_and_can_be_extended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--data", "digits", "--model", "mlp", "--out", tmp_path / "out"]
    assert run("compare", *QUICK, *small, "--strategies", "allreduce") == 0
    first = (tmp_path / "out" / "comparison.json").read_bytes()
    more = ["--strategies", "allreduce", "alone", "--seeds", 42, 1, "--extend", tmp_path / "out" / "comparison.json"]
    assert run("compare", *QUICK, *small, *more) == 0
    said = capsys.readouterr()
    assert f"{tmp_path / 'out'} holds a comparison already" in said.err and str(tmp_path / "out-2") in said.err
    assert (tmp_path / "out" / "comparison.json").read_bytes() == first
    both = vsim.Comparison.from_json(tmp_path / "out-2" / "comparison.json")
    assert {name: [one.seed for one in both.runs(name)] for name in both} == {"allreduce": [42, 1], "alone": [42, 1]}
    assert (
        both["allreduce"].history["seconds"].tolist()
        == vsim.Comparison.from_json(tmp_path / "out" / "comparison.json")["allreduce"].history["seconds"].tolist()
    )  # not trained again
    assert [call.split()[:2] for call in both.describe()["calls"]] == [["vsim", "compare"]] * 2
    assert run("compare", *QUICK, *small, "--strategies", "alone", "--extend", tmp_path / "absent.json") == 2


def test_hours_on_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--data", "digits", "--model", "mlp", "--out", tmp_path, "--strategies", "allreduce", "alone"]
    priced = ["--network", "200 Mbit/s, 50 ms", "--compute", 0.8, "--target-loss", 9]
    assert run("compare", *QUICK, *small, *priced) == 0
    printed = capsys.readouterr().out
    assert "utilization" in printed and "hours to 9" in printed and "100.0 %" in printed
    assert png_size(tmp_path / "winners.png") > 10_000
    assert run("compare", *QUICK, *small, "--network", "200 MB") == 2
    assert "bandwidth must be a rate in bits" in capsys.readouterr().err
    assert run("compare", *QUICK, *small, "--network", "200 Mbit/s") == 2
    assert "compute is missing" in capsys.readouterr().err


def test_asynchronous_strategies_train_by_a_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--data", "digits", "--model", "mlp", "--nodes", 2, "--out", tmp_path]
    clock = ["--compute", 0.8, "--speeds", "1,4", "--network", "1 Gbit/s"]
    both = ["--strategies", "fedavg:H=2", "async_diloco:H=2"]
    assert run("compare", *QUICK, *small, *clock, *both, "--target-loss", 9) == 0
    assert "hours to 9" in capsys.readouterr().out and not (tmp_path / "winners.png").exists()
    capsys.readouterr()
    for options, message in (
        (["--strategies", "async_diloco"], "AsyncDiLoCoStrategy is asynchronous"),
        (["--strategies", "async_diloco", "--speeds", "1,2"], "--speeds has no effect without --compute"),
        (["--strategies", "async_diloco", "--speeds", "1,x", "--compute", 1], "--speeds must be numbers"),
    ):
        assert run("compare", *QUICK, *small, *options) == 2
        assert message in capsys.readouterr().err


def test_sweep_writes_table_curves_map_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--data", "digits", "--model", "mlp", "--out", tmp_path / "out", "--seeds", 1, 2]
    assert run("sweep", *QUICK, *small, "--set", "H=1,2", "outer_lr=0.4,0.7,1.0", "warmup_steps=1") == 0
    printed = capsys.readouterr().out
    losses = [float(line.split()[2]) for line in printed.splitlines() if "±" in line]
    assert len(losses) == 6 and losses == sorted(losses)
    assert png_size(tmp_path / "out" / "sweep.png") > 10_000 and png_size(tmp_path / "out" / "heatmap.png") > 10_000
    with open(tmp_path / "out" / "sweep.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert {(line["H"], line["outer_lr"], line["seed"]) for line in lines} == {
        (H, rate, seed) for H in "12" for rate in ("0.4", "0.7", "1") for seed in "12"
    }
    assert run("sweep", *QUICK, *small, "--strategy", "fedavg:H=2", "--set", "num_nodes=2,3") == 0
    printed = capsys.readouterr().out
    assert "num_nodes" in printed and "heat map" not in printed  # of one setting


def test_the_options_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: dict[str, object] = {}

    def sweep(model: object, train: object, val: object, **options: object) -> None:
        heard.update(options)
        raise ValueError("heard")

    monkeypatch.setattr("vsim.cli.sweep_settings", sweep)
    small = ["--data", "digits", "--strategy", "diloco:H=7", "--lr", 0.5, "--out", tmp_path]
    saving = ["--save-dir", tmp_path / "s", "--checkpoint-interval", 5, "--resume"]
    assert run("sweep", *QUICK, *small, *saving, "--set", "outer_lr=0.1,1", "batch_size=4,8", "--halving", 3) == 2
    assert heard["settings"] == {"lr": 0.5, "H": 7, "outer_lr": [0.1, 1], "batch_size": [4, 8]}
    assert heard["strategy"] is DiLoCoStrategy and heard["halving"] == 3 and "batch_size" not in heard
    assert (heard["num_nodes"], heard["save_dir"], heard["resume"]) == (4, tmp_path / "s", True)


def test_time_prints_what_runs_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["time", "--parameters", "1e6", "--nodes", 2, "--steps", 10, "--compute", "500 ms"]
    assert run(*small, "--network", "32 Mbit/s", "--strategies", "allreduce", "diloco:H=5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1e+06 parameters, 2 nodes, 10 steps" and "32 Mbit/s" in lines[1]
    # 4 MB over 32 Mbit/s: 1 s at every step, and at two of ten.
    assert [line.split() for line in lines[-2:]] == [
        ["allreduce", "15", "s", "1.5", "s", "33.3%", "0.04", "GB"],
        ["diloco:H=5", "7", "s", "700", "ms", "71.4%", "0.008", "GB"],
    ]
    for wrong, message in (
        (["--network", "10 MB"], "that is bytes"),
        (["--strategies", "dilco"], "did you mean 'diloco'"),
        (["--strategies", "sparta:compression_method=topk"], "what it sends depends on values"),
    ):
        assert run(*small, *wrong) == 2
        error = capsys.readouterr().err
        assert error.startswith("vsim time: ") and message in error and error.count("\n") == 1


def test_parse_settings() -> None:
    given = ["H=5,10", "lr=1e-3", "inner_optim=sgd,adamw", "pairs=(1,2),(3,4)", "cosine_anneal=True,False", "x=None"]
    assert parse_settings(given) == {
        "H": [5, 10],
        "lr": [1e-3],
        "inner_optim": ["sgd", "adamw"],
        "pairs": [(1, 2), (3, 4)],
        "cosine_anneal": [True, False],
        "x": [None],
    }


@pytest.mark.parametrize("command", [["compare", "--strategies", "allreduce"], ["sweep", "--set", "H=2"]])
def test_results_that_cannot_be_written_are_refused_before_training(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it trains")

    for name in ("compare_strategies", "sweep_settings"):
        monkeypatch.setattr(f"vsim.cli.{name}", never)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", "/proc/none"):
        assert run(*command, "--data", "digits", *QUICK, "--out", out) == 2
        error = capsys.readouterr().err
        assert f"--out {out}" in error and error.count("\n") == 1
    monkeypatch.chdir(tmp_path)
    for option in (["--out", ""], ["--save-dir", " "]):
        assert run(*command, "--data", "digits", *QUICK, *option) == 2
        assert f"{option[0]} must name a folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] in (["file"], ["file", "vsim-out"], ["vsim-out", "file"])


def test_an_interrupt_says_where_the_run_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt("step 3: the run is saved in 'run'")

    monkeypatch.setattr("vsim.cli.compare_strategies", interrupted)
    assert run("compare", "--data", "digits", *QUICK, "--out", tmp_path) == 130
    assert capsys.readouterr().err == "vsim compare: step 3: the run is saved in 'run'\n"


def test_a_comparison_of_which_no_run_ends_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [*QUICK, "--data", "digits", "--model", "mlp", "--out", tmp_path]
    with pytest.warns(UserWarning, match="non-finite loss"):
        status = run("compare", *small, "--strategies", "allreduce:lr=1e30", "fedavg:lr=1e30")
    assert status == 2
    output = capsys.readouterr()
    assert "diverged at step" in output.out and "no run got to its end" in output.err
    with pytest.warns(UserWarning, match="non-finite loss"):
        assert run("sweep", *small, "--set", "lr=1e30,1e-3") == 0  # one did
    assert "diverged at step" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")  # the bias of the ten classes
def test_compare_has_some_strategies_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", *QUICK, "--data", "digits", "--model", "mlp", "--nodes", 2, "--out", tmp_path) == 0
    printed = capsys.readouterr().out
    assert [
        line.split()[0] for line in printed.splitlines() if line.split(":")[0].split(" ")[0] in STRATEGIES
    ] == COMPARED


def test_a_sweep_that_is_saved_and_goes_on(tmp_path: Path) -> None:
    losses = []
    for steps, out, *more in ((8, "straight"), (4, "a", "--save-dir", "s"), (8, "b", "--save-dir", "s", "--resume")):
        more = [tmp_path / "s" if one == "s" else one for one in more]
        sweep = ["sweep", "--data", "digits", "--model", "mlp", "--val-size", 16, "--quiet", "--set", "H=2,3", *more]
        assert run(*sweep, "--steps", steps, "--val-interval", 4, "--out", tmp_path / out) == 0
        with open(tmp_path / out / "sweep.csv", newline="") as file:
            losses.append([(line["H"], line["step"], line["train_loss"]) for line in csv.DictReader(file)])
    assert losses[2] == losses[0] != losses[1]


def test_text_from_a_file_and_the_seed(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    losses = []
    for seed in (1, 1, 2):
        out = tmp_path / str(len(losses))
        assert run("compare", *QUICK, "--text", text, "--seed", seed, "--strategies", "allreduce", "--out", out) == 0
        with open(out / "comparison.csv", newline="") as file:
            losses.append([line["train_loss"] for line in csv.DictReader(file)])
    assert losses[0] == losses[1] != losses[2]


def test_presets_are_the_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diloco = parse_strategy("diloco-paper", lr=1e-3)
    (module,) = diloco.communication_modules
    assert isinstance(module, DiLoCoCommunicator) and module.H == 500
    assert diloco.optim_spec.kwargs == {"weight_decay": 0.1, "lr": 4e-4}
    assert module.outer_optim_spec.kwargs == {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    small = ["--data", "digits", "--model", "mlp", "--nodes", 2, "--out", tmp_path]
    both = ["--preset", "diloco-paper:H=2", "--strategies", "allreduce"]
    assert run("compare", *QUICK, *small, *both) == 0
    table = capsys.readouterr().out
    assert "diloco-paper:H=2" in table and "allreduce" in table and "fedavg" not in table
    assert run("compare", *QUICK, *small, "--preset", "diloco-paper", "--lr", 1) == 2
    assert "--lr has no effect on diloco-paper, which has its own: give diloco-paper:lr=1" in capsys.readouterr().err
    assert run("compare", *QUICK, *small, "--strategies", "allreduce", "muloco:H=3", "--lr", 1) == 2
    assert "--lr has no effect on muloco, which has its own: give muloco:lr=1" in capsys.readouterr().err


def test_compressors_and_optimizers_with_their_arguments(tmp_path: Path) -> None:
    text = "diloco:H=2,average=compress(topk(0.1)),inner_optim=adamw(weight_decay=0.1,betas=(0.8,0.9)),outer_lr=0.5"
    strategy = parse_strategy(text, lr=1e-3)
    (module,) = strategy.communication_modules
    assert isinstance(module, DiLoCoCommunicator) and module.average.message is not None
    assert isinstance(module.average.message.compressor, TopK) and module.average.message.compressor.fraction == 0.1
    assert strategy.optim_spec.kwargs == {"weight_decay": 0.1, "betas": (0.8, 0.9), "lr": 1e-3}
    made = parse_settings(["average=compress(powersgd(rank=1)),compress(topk(0.01)),mean()"])["average"]
    assert list(map(repr, made)) == [
        "compress(PowerSGD(rank=1), error_feedback=1)",
        "compress(TopK(fraction=0.01), error_feedback=1)",
        "mean(by='nodes')",
    ]
    (tiles,) = parse_settings(["average=compress(tiletopk(8,quantizer=statisticalquantizer(2)))"])["average"]
    compressor = tiles.compressor
    assert isinstance(compressor, TileTopK) and compressor.topk == 8
    assert isinstance(compressor.quantizer, StatisticalQuantizer) and compressor.quantizer.bits == 2
    small = [*QUICK, "--data", "digits", "--model", "mlp", "--out", tmp_path]
    assert run("compare", *small, "--strategies", "diloco:H=2", "diloco:H=2,average=compress(topk(0.01))") == 0
    with open(tmp_path / "comparison.csv", newline="") as file:
        sent = {line["strategy"]: float(line["payload_bytes"]) for line in csv.DictReader(file)}
    whole, compressed = sent.values()
    assert 0 < compressed < 0.03 * whole


def test_help_and_mistakes_in_options_load_no_torch() -> None:
    for arguments, status in ((["--help"], 0), (["--version"], 0), (["sweep"], 2), (["compare", "--nodes", "x"], 2)):
        code = f"import sys\ntry:\n  from vsim_cli import main; status = main({arguments})\n"
        code += "except SystemExit as end: status = end.code\nprint('torch' in sys.modules, status)"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert out.splitlines()[-1] == f"False {status}"


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["compare", "--help"])
    printed = capsys.readouterr().out
    assert "examples:" in printed and all(name in printed for name in (*STRATEGIES, *PRESETS, "powersgd"))


def test_parse_strategy() -> None:
    fedavg = parse_strategy("fedavg:island_size=2,average=mean('examples'),lr=0.5", lr=1e-3)
    assert isinstance(fedavg, FedAvgStrategy) and fedavg.optim_spec.kwargs == {"lr": 0.5}
    averaging = vars(fedavg.communication_modules[0])
    assert averaging["island_size"] == 2 and averaging["H"] == 10
    assert averaging["average"].rule == mean("examples")
    given = "lr_scheduler=cosine,lr_scheduler_kwargs={'T_max': 3, 'eta_min': 0.1},personal=['a, b', \"c's\"]"
    assert strategy_class(f"fedper:{given}", 1e-3)[2] == {
        "lr_scheduler": "cosine",
        "lr_scheduler_kwargs": {"T_max": 3, "eta_min": 0.1},
        "personal": ["a, b", "c's"],
    }
    for name, cls in (("diloco", DiLoCoStrategy), ("sparta_diloco", SPARTADiLoCoStrategy), ("edit", EDiTStrategy)):
        assert repr(parse_strategy(name, lr=1e-3)) == repr(cls(lr=1e-3))  # the defaults of Python
    diloco = parse_strategy("diloco", lr=1e-3)
    assert isinstance(diloco, DiLoCoStrategy) and diloco.optim_spec.kwargs == {"lr": 1e-3}


def test_seeds_and_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--data", "digits", "--model", "mlp", "--out", tmp_path / "out"]
    logs = ["--run-name", "sweep", "--tensorboard", "--log-dir", tmp_path / "logs"]
    assert run("compare", *QUICK, *small, "--strategies", "allreduce", "fedavg:H=2", *logs, "--seeds", 1, 2) == 0
    assert "±" in capsys.readouterr().out
    with open(tmp_path / "out" / "comparison.csv", newline="") as file:
        assert [line["seed"] for line in csv.DictReader(file)] == 2 * (["1"] * 5 + ["2"] * 5)
    names = [f"{name}__seed_{seed}" for name in ("allreduce", "fedavg_H=2") for seed in (1, 2)]
    assert sorted(p.name.replace(",_", "__") for p in (tmp_path / "logs" / "sweep").iterdir()) == names
    for folder in (tmp_path / "logs" / "sweep").iterdir():
        assert len((folder / "train.csv").read_text().splitlines()) == 5
        assert list(folder.glob("events.out.tfevents.*"))


@pytest.mark.parametrize(("option", "data"), [("partition", "digits"), ("participation", "docs")])
def test_how_clients_are_dealt_and_come(
    option: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def compare(model: object, train: object, val: object, **options: object) -> None:
        heard.append(repr(train if option == "partition" else options["participation"]))
        raise ValueError("heard")

    monkeypatch.setattr("vsim.cli.compare_strategies", compare)
    cases: dict[str, dict[str, list[str]]] = {
        "partition": {
            "quantity:alpha=0.2,min_size=5,seed=1": ["heard"],
            "dirichlet": ["partition", "'dirichlet' needs alpha="],
            "shard": ["kind", "'iid'", "did you mean 'shards'"],
            "shards:2": ["--partition shards:2", "argument=value", "'2'"],
            "shards:shard=2": ["'shard'", "did you mean 'shards'"],
        },
        "participation": {
            "sample:of=20,rounds=10,stragglers=overcommit(1.5)": ["heard"],
            "deadline:seconds=3": ["heard"],
            "sample": ["--participation sample", "of= is missing"],
            "sample:of=20,stragglers=deadline()": ["deadline()", "seconds= is missing"],
            "schedule": ["'dropout'", "'schedule'"],
            "dropout:p=2": ["p must be", ">= 0 and < 1", "2"],
        },
    }
    for text, words in cases[option].items():
        assert run("compare", *QUICK, "--out", tmp_path, "--nodes", 3, "--data", data, f"--{option}", text) == 2
        error = capsys.readouterr().err
        assert all(word in error for word in words), error
    expected = {
        "partition": [repr(partition(digits()[0], 3, "quantity", alpha=0.2, min_size=5, seed=1))],
        "participation": ["Sample(n=3, of=20, rounds=10, stragglers=OverCommit(factor=1.5))", "Deadline(seconds=3.0)"],
    }
    assert heard == expected[option]


# Mistakes: one line that names the command, the argument, the value and what is allowed -------------------------------

MISTAKES: list[tuple[list[str], list[str]]] = [
    (["sweep", "--set", "H"], ["--set 'H'", "name=value,value"]),
    (["sweep", "--set", "H=1", "H=2"], ["--set names H more than once"]),
    (["sweep", "--set", "h=3"], ["'h'", "did you mean 'H'"]),
    (["sweep", "--set", "num_node=3"], ["did you mean 'num_nodes'"]),
    (["sweep", "--set", "H=5,0"], ["DiLoCo H=0", ">= 1", "got 0"]),
    (["sweep", "--strategy", "diloco:H=3", "--set", "H=5,10"], ["--strategy and --set", "H"]),
    (["sweep", "--nodes", "2", "--set", "num_nodes=2,3"], ["--set gives num_nodes", "--nodes"]),
    (["sweep", "--batch-size", "2", "--set", "batch_size=2"], ["--set gives batch_size", "--batch-size"]),
    (["sweep", "--set", "H=5", "--resume"], ["--resume needs --save-dir"]),
    (["compare", "--strategies", "diloco:h=50"], ["'h'", "did you mean 'H'", "Valid: "]),
    (["compare", "--strategies", "dilocco"], ["strategy must be one of", "'dilocco'", "did you mean 'diloco'"]),
    (["compare", "--strategies", "diloco:H"], ["argument=value", "'H'"]),
    (["compare", "--strategies", "diloco:H="], ["argument=value", "'H='"]),
    (["compare", "--strategies", "diloco:H=0"], ["H must be", ">= 1", "got 0"]),
    (["compare", "--strategies", "diloco:H=1,H=2"], ["names H more than once"]),
    (["compare", "--strategies", "diloco", "diloco"], ["names diloco more than once"]),
    (["compare", "--strategies", "diloco", "--strategies", "demo"], ["--strategies is given more than once"]),
    (["compare", "--strategies", "diloco:average=compress(topk(2))"], ["topk(2)", "fraction", "<= 1", "2"]),
    (["compare", "--strategies", "diloco:average=compress(topkk(2))"], ["'topkk'", "did you mean 'topk'"]),
    (["compare", "--strategies", "diloco:average=compress(topk(x))"], ["topk(x)", "Python literals"]),
    (["compare", "--strategies", "diloco:average=compress(tiletopk(8,quantizer=fp5()))"], ["'fp5'", "'fp4'"]),
    (["compare", "--strategies", "diloco:average=compress('topk')"], ["compressor", "Compressor object", "'topk'"]),
    (["compare", "--strategies", f"diloco:H={'-' * 9000}5"], ["H must be a whole number", "'---"]),
    (["compare", "--strategies", f"diloco:H={'(' * 9000}5"], ["H must be a whole number"]),
    (["compare", "--nodes", "0"], ["num_nodes", ">= 1", "got 0"]),
    (["compare", "--text", "no/such/file.txt"], ["no/such/file.txt"]),
    (["compare", "--model", "cnn"], ["--model cnn", "gpt"]),
    (["compare", "--data", "digits", "--model", "gpt"], ["--model", "cnn or mlp"]),
    (["compare", "--data", "mnist1d", "--model", "cnn"], ["--model", "mlp"]),
    (["compare", "--data", "mnist"], ["--data mnist needs --mnist-folder"]),
    (["compare", "--data", "mnist", "--mnist-folder", "no/such/dir"], ["no/such/dir"]),
    (["compare", "--mnist-folder", "."], ["--mnist-folder", "no effect", "--data mnist"]),
    (["compare", "--data", "fashion_mnist", "--mnist-folder", "no/such/dir"], ["no/such/dir"]),
    (["compare", "--device", "tpu"], ["device 'tpu'"]),
    (["compare", "--log-dir", "x"], ["--log-dir", "no effect", "--run-name or --tensorboard"]),
    (["compare", "--log-dir", "", "--tensorboard"], ["log_dir"]),
    (["compare", "--run-name", "../x"], ["run_name", "log folder"]),
    (["compare", "--deterministic", "--compile"], ["compile=True"]),
    (["compare", "--deterministic", "--autocast"], ["autocast=True"]),
    (["compare", "--preset", "dilocopaper"], ["--preset", "did you mean 'diloco-paper'"]),
    (["compare", "--resume"], ["--resume needs --save-dir"]),
    (["compare", "--checkpoint-interval", "2"], ["checkpoint_interval", "no effect", "save_dir"]),
    (["compare", "--save-dir", "no/such", "--checkpoint-interval", "0"], ["checkpoint_interval", "got 0"]),
]
# The parser writes more than a line, and exits.
UNPARSED: list[tuple[list[str], list[str]]] = [
    (["compare", "--nodes", "1.5"], ["--nodes", "1.5"]),
    (["compare", "--stratgies", "x"], ["--stratgies", "--strategies"]),
    (["compare", "--data", "docs", "--text", "x"], ["--data", "--text"]),
    (["compare", "--data", "dogs"], ["--data", "dogs", "docs", "digits"]),
    (["compare", "--seed", "1", "--seeds", "2"], ["--seed", "--seeds"]),
    (["sweep"], ["--set"]),
    (["train"], ["train", "compare"]),
    ([], ["compare", "verify"]),
]


@pytest.mark.parametrize(("arguments", "words"), [*MISTAKES, *UNPARSED], ids=lambda own: " ".join(own)[:50])
def test_mistakes_are_named(
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if (arguments, words) in UNPARSED:
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    else:
        data = ["--data", "digits"] if arguments[0] == "sweep" else []
        assert main([*arguments, *data, "--steps", "2", "--quiet"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and all(word in output.err for word in words), output.err
    if (arguments, words) in MISTAKES:
        assert output.err.count("\n") == 1 and output.err.startswith(f"vsim {arguments[0]}: ")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vsim {vsim.__version__}\n"
