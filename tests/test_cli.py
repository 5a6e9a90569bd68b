"""The command line, started as a user starts it."""

from __future__ import annotations

import csv
import itertools
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import vsim
from vsim.cli import parse_settings, parse_strategy, strategy_class
from vsim.data import digits, partition
from vsim.strategy import (
    COMPARED,
    PRESETS,
    STRATEGIES,
    DiLoCoStrategy,
    EDiTStrategy,
    FedAvgStrategy,
    SPARTADiLoCoStrategy,
    StatisticalQuantizer,
    TileTopK,
    mean,
)
from vsim_cli import main

QUICK = ["--steps", "4", "--val-size", "16", "--quiet"]
SMALL = [*QUICK, "--data", "digits", "--model", "mlp"]


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def lines_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options that the command line calls vsim with, which trains nothing."""
    options: dict[str, Any] = {}

    def hear(model: Any, train: Any, val: Any, **given: Any) -> None:
        options.update(given, train=train)
        raise ValueError("heard")

    for name in ("compare_strategies", "sweep_settings"):
        monkeypatch.setattr(f"vsim.cli.{name}", hear)
    return options


def test_compare_writes_table_figure_data_and_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, logs = tmp_path / "out", tmp_path / "logs"
    strategies = ["allreduce", "fedavg:H=2", "fedavg:H=2,average=compress(topk(0.01))"]
    given = ["--preset", "diloco-paper:H=2", "--strategies", *strategies, "--target-loss", 0.1, "--seeds", 1, 2]
    given += ["--run-name", "sweep", "--tensorboard", "--log-dir", logs]
    assert run("compare", *SMALL, *given, "--out", out) == 0
    printed, names = capsys.readouterr().out, {*strategies, "diloco-paper:H=2"}
    assert all(text in printed for text in ("steps to 0.1", "never", "±", "2.0×", *names))
    assert is_png(out / "comparison.png")
    lines, saved = lines_of(out / "comparison.csv"), vsim.Comparison.from_json(out / "comparison.json")
    assert set(saved) == names
    sent: dict[str, list[float]] = {}
    for name, seed in itertools.product(saved, (1, 2)):
        rows = [line for line in lines if (line["strategy"], line["seed"]) == (name, str(seed))]
        sent[name] = [float(line["payload_bytes"]) for line in rows]
        assert sent[name] == saved.runs(name)[seed - 1].history["payload_bytes"].tolist()
    every, seldom, compressed = (sent[name][-1] for name in strategies)
    assert every == 2 * seldom and 0 < compressed < 0.03 * seldom
    folders = [*(logs / "sweep").iterdir()]
    assert len(folders) == 8
    for folder in folders:
        assert len((folder / "train.csv").read_text().splitlines()) == 5
        assert list(folder.glob("events.out.tfevents.*"))


def test_text_trains_a_gpt(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    small = ["--steps", 1, "--val-size", 2, "--nodes", 2, "--quiet", "--strategies", "alone", "--out", tmp_path]
    assert run("compare", "--text", tmp_path / "notes.txt", *small) == 0
    about = vsim.Comparison.from_json(tmp_path / "comparison.json").describe()
    assert about["model"]["class"] == "GPT"


def test_results_are_never_overwritten_and_can_be_extended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, other = tmp_path / "out" / "comparison.json", tmp_path / "out-2" / "comparison.json"
    small = ["compare", *SMALL, "--out", tmp_path / "out", "--strategies"]
    assert run(*small, "allreduce") == 0
    first = out.read_bytes()
    assert run(*small, "allreduce", "alone", "--seeds", 42, 1, "--extend", out) == 0
    said = capsys.readouterr()
    assert f"{tmp_path / 'out'} holds a comparison already" in said.err and str(tmp_path / "out-2") in said.err
    assert out.read_bytes() == first
    one, both = (vsim.Comparison.from_json(path) for path in (out, other))
    assert {name: [one.seed for one in both.runs(name)] for name in both} == {"allreduce": [42, 1], "alone": [42, 1]}
    seconds = [own["allreduce"].history["seconds"].tolist() for own in (one, both)]
    assert seconds[0] == seconds[1]  # not trained again
    assert [call.split()[:2] for call in both.describe()["calls"]] == [["vsim", "compare"]] * 2


def test_hours_on_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    priced = ["--network", "200 Mbit/s, 50 ms", "--compute", 0.8, "--target-loss", 9]
    assert run("compare", *SMALL, "--strategies", "allreduce", "alone", "--out", tmp_path, *priced) == 0
    printed = capsys.readouterr().out
    assert "utilization" in printed and "seconds to 9" in printed and "100.0 %" in printed
    assert is_png(tmp_path / "winners.png")


def test_asynchronous_strategies_train_by_a_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = ["--compute", 0.8, "--speeds", "1,4", "--network", "1 Gbit/s", "--target-loss", 9]
    both = ["--nodes", 2, "--strategies", "fedavg:H=2", "async_diloco:H=2"]
    assert run("compare", *SMALL, *both, *clock, "--out", tmp_path) == 0
    assert "seconds to 9" in capsys.readouterr().out and not (tmp_path / "winners.png").exists()
    compute = vsim.Comparison.from_json(tmp_path / "comparison.json").compute
    assert compute is not None and compute.as_plain()["node_seconds"] == [0.8, 0.2]


def test_sweep_writes_table_curves_map_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    varied = ["--set", "H=1,2", "outer_lr=0.4,1.0", "warmup_steps=1"]
    assert run("sweep", *SMALL, "--out", tmp_path, "--seeds", 1, 2, *varied) == 0
    losses = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines() if "±" in line]
    assert len(losses) == 4 and losses == sorted(losses)
    assert is_png(tmp_path / "sweep.png") and is_png(tmp_path / "heatmap.png")
    found = {(line["H"], line["outer_lr"], line["seed"]) for line in lines_of(tmp_path / "sweep.csv")}
    assert found == {*itertools.product("12", ("0.4", "1"), "12")}


def test_the_options_of_a_sweep(tmp_path: Path, heard: dict[str, Any]) -> None:
    small = ["--data", "digits", "--strategy", "diloco:H=7", "--lr", 0.5, "--out", tmp_path]
    saving = ["--save-dir", tmp_path / "s", "--checkpoint-interval", 5, "--resume"]
    assert run("sweep", *QUICK, *small, *saving, "--set", "outer_lr=0.1,1", "batch_size=4,8", "--halving", 3) == 2
    assert heard["settings"] == {"lr": 0.5, "H": 7, "outer_lr": [0.1, 1], "batch_size": [4, 8]}
    assert heard["strategy"] is DiLoCoStrategy and heard["halving"] == 3 and "batch_size" not in heard
    assert (heard["num_nodes"], heard["save_dir"], heard["resume"]) == (4, tmp_path / "s", True)


def test_the_options_of_compare(tmp_path: Path, heard: dict[str, Any]) -> None:
    assert run("compare", *SMALL, "--out", tmp_path, "--seed", 7, "--nodes", 2) == 2
    assert list(heard["strategies"]) == COMPARED and (heard["seeds"], heard["num_nodes"]) == ([7], 2)


def test_time_prints_what_runs_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["time", "--parameters", "1e6", "--nodes", 2, "--steps", 10, "--compute", "500 ms"]
    assert run(*small, "--network", "32 Mbit/s", "--strategies", "allreduce", "diloco:H=5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1M parameters, 2 nodes, 10 steps" and "32 Mbit/s" in lines[1]
    # 4 MB over 32 Mbit/s: 1 s at every step, and at two of ten.
    assert [line.split() for line in lines[-2:]] == [
        ["allreduce", "15.00", "1.50", "33.3", "%", "40.00"],
        ["diloco:H=5", "7.00", "0.70", "71.4", "%", "8.00"],
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
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    heard: dict[str, Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", "/proc/none"):
        assert run(*command, *SMALL, "--out", out) == 2
        error = capsys.readouterr().err
        assert f"--out {out}" in error and error.count("\n") == 1
    for option in (["--out", ""], ["--save-dir", " "]):
        assert run(*command, *SMALL, *option) == 2
        assert f"{option[0]} must name a folder" in capsys.readouterr().err
    assert not heard and {path.name for path in tmp_path.iterdir()} - {"vsim-out"} == {"file"}


def test_an_interrupt_says_where_the_run_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt("step 3: the run is saved in 'run'")

    monkeypatch.setattr("vsim.cli.compare_strategies", interrupted)
    assert run("compare", "--data", "digits", *QUICK, "--out", tmp_path) == 130
    assert capsys.readouterr().err == "vsim compare: step 3: the run is saved in 'run'\n"


def test_warnings_are_lines_without_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, before = [], warnings.formatwarning

    def warned(*_: object, **__: object) -> None:
        said.append(warnings.formatwarning(UserWarning("demo: sends\n more"), UserWarning, "file.py", 3))
        raise KeyboardInterrupt

    monkeypatch.setattr("vsim.cli.compare_strategies", warned)
    assert run("compare", "--data", "digits", *QUICK, "--out", tmp_path) == 130
    assert said == ["warning: demo: sends more\n"] and warnings.formatwarning is before


def test_the_table_fits_the_terminal_below_what_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["compare", *SMALL, "--out", tmp_path, "--strategies", "allreduce", "--seeds", 1, 2, "--nodes", 2]
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run(*command, "--network", "1 Gbit/s", "--compute", 0.8) == 0
    printed = capsys.readouterr().out
    assert "seconds to simulate" in printed and "not shown" not in printed  # no terminal
    title = printed.splitlines()[1]
    assert title == "MLP on digits, 2 nodes × batch 16, 4 steps, seeds 1 2; 1 Gbit/s, 0.8 s of computing a step"
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["show", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 60
    assert "not shown in 60 characters:" in printed and "seconds to simulate" in " ".join(printed.split())


def test_a_title_names_the_partition_and_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--partition",
        "dirichlet:alpha=0.5",
        "--budget",
        "time=2 s",
        "--network",
        "1 Gbit/s",
        "--compute",
        "800ms",
    ]
    given += ["--nodes", 2, "--strategies", "allreduce", "--quiet", "--val-size", 4, "--out", tmp_path]
    assert run("compare", "--data", "digits", "--model", "mlp", *given) == 0
    trained = "MLP on digits (dirichlet, alpha=0.5), 2 nodes × batch 16, within 2 s"
    assert capsys.readouterr().out.splitlines()[1] == f"{trained}; 1 Gbit/s, 800ms of computing a step"
    assert vsim.Comparison.from_json(tmp_path / "comparison.json").trained == trained


def test_a_comparison_of_which_no_run_ends_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="non-finite loss"):
        assert run("compare", *SMALL, "--out", tmp_path, "--strategies", "allreduce:lr=1e30", "fedavg:lr=1e30") == 2
    output = capsys.readouterr()
    assert "diverged at step" in output.out and "no run got to its end" in output.err


def test_presets_are_the_papers() -> None:
    diloco = parse_strategy("diloco-paper", lr=1e-3)
    (module,) = diloco.parts
    assert isinstance(module, DiLoCoStrategy) and module.H == 500
    assert diloco.optim_spec.kwargs == {"weight_decay": 0.1, "lr": 4e-4}
    assert module.outer_optim_spec.kwargs == {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def test_compressors_and_optimizers_with_their_arguments() -> None:
    text = "diloco:H=2,average=compress(topk(0.1)),inner_optim=adamw(weight_decay=0.1,betas=(0.8,0.9)),outer_lr=0.5"
    strategy = parse_strategy(text, lr=1e-3)
    assert repr(strategy.parts[0].average).endswith(" | compress(TopK(fraction=0.1), error_feedback=1)")
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


def test_help_and_mistakes_in_options_load_no_torch() -> None:
    code = """
import sys
import warnings
from vsim_cli import main
for arguments, status in (
    *((["--help"], 0), (["--version"], 0), (["compare", "--help"], 0)),
    *((["sweep"], 2), (["compare", "--nodes", "x"], 2), (["comapre"], 2)),
):
    try:
        found = main(arguments)
    except SystemExit as end:
        found = end.code
    assert found == status and "torch" not in sys.modules, arguments
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    command = [sys.executable, "-X", "importtime", "-m", "vsim"]
    for arguments, status in ((["--help"], 0), (["show", "--help"], 0), (["--version"], 0), (["comapre"], 2)):
        ended = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert ended.returncode == status and not re.search(r"\| +(torch|numpy)\b", ended.stderr), arguments
    assert "vsim 0." in subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout


def test_a_misspelled_option_brings_options_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "--step", "3"])
    said = capsys.readouterr().err
    assert "--steps T" in said and said.count("--steps") == 1 and "vsim compare --help" in said


@pytest.mark.slow
def test_a_closed_pipe_ends_a_command_in_silence() -> None:
    code = "import sys; from vsim_cli import main; sys.exit(main(['strategies']))"
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert command.stdout is not None and command.stderr is not None
    command.stdout.close()
    assert command.stderr.read() == "" and command.wait() == 141
    command.stderr.close()


def test_help_teaches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("compare", "sweep", "time", "show", "watch", "report", "verify"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        printed = capsys.readouterr().out
        examples = printed.partition("examples:\n")[2]
        assert max(map(len, printed.splitlines())) <= 80 and set(re.findall("vsim (\\w+)", examples)) == {command}
        if command in ("compare", "sweep"):
            first, *others = re.split(r"(?m)^\W*[a-z ]*options\b", printed)[1:]  # boxed, or not, by the encoding
            ten = {"strategies", "data", "text", "model", "nodes", "steps", "seeds", "network", "compute", "out"}
            own = {"strategy", "set", "halving", "extend"} if command == "sweep" else set()
            options = set(re.findall(r"(?m)^\W{2}--(\w+) ", first))
            assert options == ((ten - {"strategies"}) | own if own else ten) and len(others) >= 4


def test_strategies_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["strategies"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for name in (*STRATEGIES, *PRESETS):
        assert f"\n  {name}\n    " in printed
    words = " ".join(printed.split())
    for part in ("powersgd", "diloco Take H local steps", "outer_optim, H=100, outer_lr,", "H=500", *COMPARED):
        assert part in words
    assert "By default, compare and time take: allreduce" in words


def test_parse_strategy() -> None:
    fedavg = parse_strategy("fedavg:island_size=2,average=mean('examples'),lr=0.5", lr=1e-3)
    assert isinstance(fedavg, FedAvgStrategy) and fedavg.optim_spec.kwargs == {"lr": 0.5}
    averaging = vars(fedavg.parts[0])
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


def test_how_clients_are_dealt_and_come(tmp_path: Path, heard: dict[str, Any]) -> None:
    small = ["compare", *SMALL, "--out", tmp_path, "--nodes", 3]
    run(*small, "--partition", "quantity:alpha=0.2,min_size=5,seed=1")
    assert repr(heard["train"]) == repr(partition(digits()[0], 3, "quantity", alpha=0.2, min_size=5, seed=1))
    given = "sample:of=20,rounds=10,stragglers=overcommit(1.5)"
    sampled = "Sample(n=3, of=20, rounds=10, stragglers=OverCommit(factor=1.5))"
    for text, expected in {given: sampled, "deadline:seconds=3": "Deadline(seconds=3.0)"}.items():
        run(*small, "--participation", text)
        assert repr(heard["participation"]) == expected


# One line that names the command, the argument, the value and what is allowed.
MISTAKES: list[tuple[str, list[str]]] = [
    ("sweep --set H", ["--set 'H'", "name=value,value"]),
    ("sweep --set H=1 H=2", ["--set names H more than once"]),
    ("sweep --set H=5,0", ["DiLoCo H=0", ">= 1", "got 0"]),
    ("sweep --strategy diloco:H=3 --set H=5,10", ["--strategy and --set", "H"]),
    ("sweep --nodes 2 --set num_nodes=2,3", ["--set gives num_nodes", "--nodes"]),
    ("sweep --batch-size 2 --set batch_size=2", ["--set gives batch_size", "--batch-size"]),
    ("sweep --set H=5 --resume", ["--resume needs --save-dir"]),
    ("compare --strategies diloco:h=50", ["'h'", "did you mean 'H'", "Valid: "]),
    (
        "compare --strategies dilocco",
        ["strategy 'dilocco': did you mean 'diloco'? strategy must be one of 'afl', 'allreduce'"],
    ),
    ("compare --strategies diloco:H", ["argument=value", "'H'"]),
    ("compare --strategies diloco:H=", ["argument=value", "'H='"]),
    ("compare --strategies diloco:H=0", ["diloco:H=0: H must be", ">= 1", "got 0"]),
    ("compare --strategies diloco:H=1,H=2", ["names H more than once"]),
    ("compare --strategies diloco diloco", ["names diloco more than once"]),
    ("compare --strategies diloco --strategies demo", ["--strategies is given more than once"]),
    ("compare --strategies diloco:average=compress(topk(2))", ["topk(2)", "fraction", "<= 1", "2"]),
    ("compare --strategies diloco:average=compress(topkk(2))", ["'topkk'", "did you mean 'topk'"]),
    ("compare --strategies diloco:average=compress(topk(x))", ["topk(x)", "Python literals"]),
    ("compare --strategies diloco:average=compress(tiletopk(8,quantizer=fp5()))", ["'fp5'", "'fp4'"]),
    ("compare --strategies diloco:average=compress('topk')", ["compressor", "Compressor object", "'topk'"]),
    (f"compare --strategies diloco:H={'-' * 9000}5", ["H must be a whole number", "'---"]),
    (f"compare --strategies diloco:H={'(' * 9000}5", ["H must be a whole number"]),
    ("compare --strategies allreduce muloco:H=3 --lr 1", ["--lr has no effect on muloco", "give muloco:lr=1"]),
    ("compare --preset diloco-paper --lr 1", ["--lr has no effect on diloco-paper", "give diloco-paper:lr=1"]),
    ("compare --preset dilocopaper", ["--preset", "did you mean 'diloco-paper'"]),
    ("compare --strategies alone --extend absent.json", ["compare: absent.json: no such file"]),
    ("compare --text no/such/file.txt", ["no/such/file.txt"]),
    ("compare --model cnn", ["--model cnn", "gpt"]),
    ("compare --data digits --model gpt", ["--model", "cnn or mlp"]),
    ("compare --data mnist1d --model cnn", ["--model", "mlp"]),
    ("compare --data mnist", ["--data mnist needs --mnist-folder"]),
    ("compare --data mnist --mnist-folder no/such/dir", ["no/such/dir"]),
    ("compare --data fashion_mnist --mnist-folder no/such/dir", ["no/such/dir"]),
    ("compare --mnist-folder .", ["--mnist-folder", "no effect", "--data mnist"]),
    ("compare --log-dir x", ["--log-dir", "no effect", "--run-name or --tensorboard"]),
    ("compare --resume", ["--resume needs --save-dir"]),
    ("compare --checkpoint-interval 2", ["--checkpoint-interval has no effect without --save-dir,"]),
    ("verify --steps 0", ["vsim verify: --steps must be a whole number >= 1, got 0"]),
    (
        "compare --data digits --partition foo",
        ["vsim compare: --partition foo: kind must be one of 'iid', 'dirichlet'"],
    ),
    ("compare --data digits --tune lr=a", ["--tune lr: give at least two values"]),
    ("compare --text absent.txt", ["vsim compare: --text absent.txt: no such file"]),
    (
        "compare --data digits --network 200_Mbit/s,1ms --compute 1 --speeds 1,2",
        ["--compute with --speeds or a file has 2"],
    ),
    (
        "compare --strategies diloco:max_steps=9",
        ["strategy diloco:max_steps=9: max_steps has no effect without lr_sche"],
    ),
    ("sweep --set nodes=2,4", ["unknown argument 'nodes'; did you mean 'num_nodes'?"]),
    ("compare --strategies diloco:K=3", ["unknown argument 'K'", "Valid: outer_optim", "max_steps"]),
    ("compare --steps 0", ["--steps must be a whole number >= 1, got 0"]),
    ("compare --data digits --processes 0", ["vsim compare: --processes must be a whole number from 1 to 4, got 0"]),
    ("compare --data docs --text x", ["--data and --text are both given", "give one of these"]),
    ("compare --seed 1 --seeds 2", ["--seed and --seeds are both given"]),
    ("comapre", ["no such command; did you mean 'compare'? The commands are compare, sweep, "]),
    ("train", ["no such command; the commands are compare"]),
    ("compare --data digits --network 200_MB", ["--network: bandwidth must be a rate in bits"]),
    ("compare --data digits --network 200_Mbit/s", ["--network needs --compute SECONDS"]),
    ("compare --compute -1", ["--compute must be", "-1"]),
    ("compare --budget time=soon", ["--budget['time']", "'soon'"]),
    ("compare --budget time=1h", ["--budget time and cost need --network and --compute"]),
    ("compare --budget cost=5 --network 200_Mbit/s --compute 1", ["--budget cost needs --dollars-per-hour"]),
    ("compare --strategies async_diloco", ["AsyncDiLoCoStrategy is asynchronous"]),
    ("compare --strategies async_diloco --speeds 1,2", ["--speeds has no effect without --compute"]),
    ("compare --strategies async_diloco --compute 1 --speeds 1,x", ["--speeds must be numbers"]),
    ("compare --data digits --partition dirichlet", ["partition", "'dirichlet' needs alpha="]),
    ("compare --data digits --partition shard", ["kind", "'iid'", "did you mean 'shards'"]),
    ("compare --data digits --partition shards:2", ["--partition shards:2", "argument=value", "'2'"]),
    ("compare --data digits --partition shards:shard=2", ["'shard'", "did you mean 'shards'"]),
    ("compare --participation sample", ["--participation sample", "of= is missing"]),
    ("compare --participation sample:of=20,stragglers=deadline()", ["deadline()", "seconds= is missing"]),
    ("compare --participation schedule", ["'dropout'", "'schedule'"]),
    ("compare --participation dropout:p=2", ["p must be", ">= 0 and < 1", "2"]),
    ("compare --budget wire_bytes=5", ["'time', 'cost', 'wire', 'examples'"]),
    ("compare --budget time", ["--budget 'time': expected"]),
    ("compare --budget time=1h time=2h", ["--budget names time more than once"]),
    ("compare --tune lr=1e-3,2e-2 --lr 1e-3", ["--lr and --tune lr"]),
    ("compare --tune lr", ["--tune 'lr': expected name=value"]),
]
# The parser writes more than a line, and exits.
UNPARSED: list[tuple[str, list[str]]] = [
    ("compare --nodes 1.5", ["--nodes", "1.5"]),
    ("compare --stratgies x", ["--stratgies", "--strategies"]),
    ("compare --data dogs", ["--data", "dogs", "docs", "digits"]),
    ("sweep", ["--set"]),
    ("", ["compare", "verify"]),
]


@pytest.mark.parametrize(("line", "words"), [*MISTAKES, *UNPARSED], ids=lambda own: own[:50] if own else "nothing")
def test_mistakes_are_named(
    line: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, is_one_line = [text.replace("200_M", "200 M") for text in line.split()], (line, words) in MISTAKES
    if is_one_line:
        data = ["--data", "digits"] if arguments[0] == "sweep" else []
        steps = [] if "--steps" in arguments else ["--steps", "2"]
        assert main([*arguments, *data, *steps, "--quiet"]) == 2
    else:
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    output = capsys.readouterr()
    assert output.out == "" and all(word in output.err for word in words), output.err
    if is_one_line:
        assert output.err.count("\n") == 1 and output.err.startswith(f"vsim {arguments[0]}: ")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vsim {vsim.__version__}\n"
