"""A step of vsim, timed beside what else there is."""

from __future__ import annotations

import itertools
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from vsim import bench
from vsim.bench import show
from vsim.bench.jax_step import jax_step
from vsim.bench.measure import Line, in_turn, memory_ratio, run_of
from vsim.bench.peers import bare, check_agreement, separate
from vsim.bench.workloads import BATCH_SIZE, model_and_examples
from vsim.cli import main
from vsim.models import GPT
from vsim.strategy import SimpleReduceStrategy, Strategy


def test_bench_measures_all_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)  # an import of JAX fails
    assert main(["bench", "--models", "mlp", "--nodes", "1", "2", "--rounds", "1", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [(line["model"], line["num_nodes"]) for line in record["lines"]] == [("mlp", 1), ("mlp", 2)]
    for line in record["lines"]:
        assert line["seconds"].keys() == {"separate", "vmap", "trace", "loop", "auto", "exact", "exact, fused", "floor"}
        assert all(seconds > 0 for seconds in line["seconds"].values())
        assert line["ratios"].keys() == {"separate", "floor"}
        assert line["ratios"]["separate"]["separate"] == 1.0
        assert line["seconds"]["floor"] < line["seconds"]["vmap"]
        assert line["ratios"]["floor"]["vmap"] > 1  # a median of ratios, not the ratio of the medians
        assert 1 < line["memory_ratio"] < 1.5
        assert line["chosen"] in ("vmap", "loop")
        assert 1 <= line["steps_a_turn"] <= 10
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "vmap / floor" in capsys.readouterr().out
    assert [line["num_nodes"] for line in record["by_strategy"]] == [1, 2]
    for line in record["by_strategy"]:
        assert line["seconds"].keys() == {"allreduce", "diloco:H=10", "sparta", "demo"}
        assert all(seconds > 0 for seconds in line["seconds"].values())
        assert line["ratios"]["allreduce"] == 1.0
    assert main(["bench", "--nodes", "0"]) == 2
    assert "--nodes must be" in capsys.readouterr().err
    assert main(["bench", "--strategies", "no_such"]) == 2  # before it measures anything
    assert "no_such" in capsys.readouterr().err
    assert main(["bench", "--jax", "--out", str(tmp_path)]) == 2
    assert 'vsim bench --jax needs jax: pip install "vsim[bench]"' in capsys.readouterr().err


def test_all_take_turns_in_an_order_that_changes() -> None:
    taken: list[str] = []
    times = in_turn({name: partial(taken.append, name) for name in "abc"}, 20)
    rounds = ["".join(taken[i : i + 3]) for i in range(0, len(taken), 3)]
    assert len(rounds) == 21  # the first is a warm-up
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds) and len(set(rounds)) == 6
    assert all(len(times[name]) == 20 for name in "abc")
    assert in_turn({"itself": lambda: 0.25}, 2) == {"itself": [0.25, 0.25]}


def test_a_turn_of_several_steps_begins_with_some_that_are_not_timed() -> None:
    # The warm-up takes 0 to 5; of the round that counts, 6 and 7 are not timed, and 8 to 11 are.
    assert in_turn({"counts": partial(next, map(float, itertools.count()))}, 1, steps=4) == {"counts": [9.5]}
    slept = in_turn({"a": lambda: torch.ones(1000, 1000).sum(), "b": lambda: None}, 3, steps=2)
    assert len(slept["a"]) == len(slept["b"]) == 3 and min(slept["a"]) > max(slept["b"])


def test_tables_leave_cells_empty_where_a_peer_has_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(model: str, **seconds: float) -> Line:
        ratios = {base: {label: s / seconds[base] for label, s in seconds.items()} for base in seconds}
        return Line(model, 4, 10, seconds, ratios, 0.5, 1.1, "vmap")

    common = {"separate": 0.008, "vmap": 0.004, "floor": 0.001}
    monkeypatch.setattr(show, "version", {"torch": "2.13.0", "jax": "0.10.2"}.get)
    times, ratios, note = bench.table([line("mlp", **common, jax=0.005), line("resnet", **common)]).split("\n\n")
    cells = [[text.split() for text in part.splitlines() if "-" not in text] for part in (times, ratios)]
    assert [len(row) for row in cells[0][1:]] == [9, 8] and cells[0][1][:6] == ["mlp", "4", "8", "4", "5", "1"]
    assert cells[1][1:] == [["mlp", "4", "0.50", "4.00", "0.80"], ["resnet", "4", "0.50", "4.00"]]
    assert ratios.splitlines()[0].split("  ")[-1].strip() == "vmap / JAX" and "bare" not in times + ratios
    assert note.startswith("torch 2.13.0; jax 0.10.2; ")
    assert "jax" not in bench.table([line("resnet", **common)])


def test_what_computes_something_else_is_no_comparison() -> None:
    model, examples = model_and_examples(bench.MODELS["mlp"], 2)
    batch = [t.unflatten(0, (2, BATCH_SIZE)) for t in examples]
    check_agreement({"separate": separate(model, batch), "again": separate(model, batch)})
    losses = separate(model, batch)()
    with pytest.raises(RuntimeError, match="still is no comparison: at step 2 its losses are up to"):
        check_agreement({"separate": separate(model, batch), "still": lambda: losses})
    with pytest.raises(RuntimeError, match="at step 1"):
        check_agreement({"separate": separate(model, batch), "broken": lambda: [losses[0], float("nan")]})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
def test_the_bare_step_computes_the_same_and_says_nothing() -> None:
    model = GPT(97, block_size=8, layers=1, width=16, heads=2, seed=0)  # tied weights; attention has no vmapped form
    batch = list(torch.randint(0, 97, (2, 2, 4, 8), generator=torch.Generator().manual_seed(0)))
    check_agreement({"separate": separate(model, batch), "bare": bare(model, batch)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_jax_computes_the_same(name: str) -> None:
    pytest.importorskip("jax", reason="JAX is too large for the tests' own extra")
    model, examples = model_and_examples(bench.MODELS[name], 2)
    batch = [t.unflatten(0, (2, BATCH_SIZE)) for t in examples]
    in_jax = jax_step(model, batch)
    assert in_jax is not None
    check_agreement({"separate": separate(model, batch), "jax": in_jax})


@pytest.mark.slow
def test_jax_takes_its_turn(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="JAX is too large for the tests' own extra")
    lines = bench.bench(["mlp", "resnet"], [1], jax=True, rounds=1)
    assert [line.ratios.keys() >= {"jax"} for line in lines] == [True, False]
    bench.save(lines, tmp_path)
    assert json.loads((tmp_path / "bench.json").read_text())["jax"] == sys.modules["jax"].__version__


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
def test_a_compiled_step_takes_its_turn() -> None:
    (line,) = bench.bench(["mlp"], [4], compile=True, rounds=3)
    assert 0 < line.seconds["compiled"] < 1  # what compiling takes is not in it
    assert line.ratios["separate"]["compiled"] > 0 and line.ratios["floor"]["compiled"] > 1
    assert 0 < line.seconds["bare"] < line.seconds["separate"]
    header, _, _, _, of_ratios, _, row, *_ = bench.table([line]).splitlines()
    assert "compiled ms" in header and "bare ms" in header and "compiled / bare" in of_ratios
    assert f"{line.ratios['separate']['compiled']:.2f}" in row and f"{line.ratios['bare']['compiled']:.2f}" in row
    assert {"compiled", "bare"} <= {text.get_text() for text in bench.figure([line]).legends[0].get_texts()}


@pytest.mark.parametrize("name", [n for n in bench.MODELS if n != "gpt-large"])
def test_a_step_holds_little_more_than_matrices_and_activations(name: str) -> None:
    model, examples = model_and_examples(bench.MODELS[name], 4)
    run = run_of(model, examples, 4, Strategy(lr=1e-4), {"executor": "vmap"})
    batch = [t.unflatten(0, (4, BATCH_SIZE)) for t in examples]
    run.stacks[0].executor.losses_and_grads(batch)
    assert 1 < memory_ratio(run, batch) < 1.15


def test_strategies_are_measured_beside_the_first() -> None:
    made = {"alone": Strategy, "AllReduce": SimpleReduceStrategy}
    (line,) = bench.bench_strategies(["mlp"], [4], made, rounds=2)
    assert line.ratios["alone"] == 1.0 and line.ratios["AllReduce"] > 0
    # Weights, gradients and AdamW's two moments: four rows a node, or one for all nodes.
    row = 4 * sum(p.numel() for p in bench.MODELS["mlp"].make().parameters())
    assert line.held_bytes["alone"] == pytest.approx(4 * 4 * row, rel=0.001)
    assert line.held_bytes["AllReduce"] == pytest.approx(4 * row, rel=0.001)
    assert "AllReduce" in bench.strategy_table([line])
    assert bench.strategy_table([]) != bench.strategy_table([line])


def test_every_model_of_the_bench_trains() -> None:
    for name, workload in bench.MODELS.items():
        loss = workload.make()(workload.examples(2))
        assert torch.isfinite(loss), name


def test_no_model_is_measured_with_more_nodes_than_it_is_meant_for() -> None:
    assert bench.bench(["gpt-large"], [64]) == []
