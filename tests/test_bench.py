"""The script that times a step: what it compares computes the same, and every candidate takes its turns."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
import bench_step
from bench_step import BATCH_SIZE, LR, MODELS, bare, check_agreement, in_turn, model_and_examples, separate

from vsim.models import GPT


def batch_of(name: str, num_nodes: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    model, examples = model_and_examples(name, num_nodes)
    return model, [t[: num_nodes * BATCH_SIZE].unflatten(0, (num_nodes, BATCH_SIZE)) for t in examples]


def test_the_script_measures_every_candidate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)  # an import of JAX fails
    monkeypatch.setitem(MODELS, "mlp", MODELS["mlp"]._replace(steps=4))
    names = ["allreduce", "demo"]
    path = tmp_path / "bench.json"
    arguments = ["--models", "mlp", "--nodes", "2", "--rounds", "1", "--out", str(path), "--strategies", *names]
    bench_step.main(arguments)
    record = json.loads(path.read_text())
    (line,), (by_strategy,) = record["lines"], record["by_strategy"]
    candidates = ["separate", "vmap", "loop", "auto", "exact", "exact, fused", "floor"]
    assert list(line["seconds"]) == candidates and all(0 < seconds < 1 for seconds in line["seconds"].values())
    assert line["ratios"]["separate"] == 1.0 and line["ratios"]["floor"] < line["ratios"]["vmap"]
    assert list(by_strategy["seconds"]) == names and by_strategy["ratios"]["allreduce"] == 1.0
    printed = capsys.readouterr().out
    assert "exact, fused" in printed and "ratio to allreduce" in printed
    with pytest.raises(ImportError, match="jax"):
        bench_step.main([*arguments, "--jax"])


def test_all_take_turns_in_an_order_that_changes() -> None:
    taken: list[str] = []

    def turn(name: str) -> float:
        taken.append(name)
        return 0.25

    times = in_turn({name: partial(turn, name) for name in "abc"}, 20)
    rounds = ["".join(taken[i : i + 3]) for i in range(0, len(taken), 3)]
    assert len(rounds) == 21  # the first is a warm-up
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds) and len(set(rounds)) == 6
    assert times == {name: [0.25] * 20 for name in "abc"}


def test_a_peer_that_computes_something_else_is_no_comparison() -> None:
    model, batch = batch_of("mlp", 2)
    check_agreement({"separate": separate(model, batch), "again": separate(model, batch)})
    losses = separate(model, batch)()
    with pytest.raises(RuntimeError, match="still cannot be compared: at step 2 its losses differ by up to"):
        check_agreement({"separate": separate(model, batch), "still": lambda: losses})
    with pytest.raises(RuntimeError, match="at step 1"):
        check_agreement({"separate": separate(model, batch), "broken": lambda: [losses[0], float("nan")]})


def test_every_model_of_the_script_trains() -> None:
    for name, workload in MODELS.items():
        assert torch.isfinite(workload.make()(workload.examples(2))), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
def test_the_bare_step_computes_the_same() -> None:
    model = GPT(97, block_size=8, layers=1, width=16, heads=2, seed=0)  # tied weights; attention has no vmapped form
    batch = list(torch.randint(0, 97, (2, 2, 4, 8), generator=torch.Generator().manual_seed(0)))
    check_agreement({"separate": separate(model, batch), "bare": bare(model, batch)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_jax_computes_the_same(name: str) -> None:
    pytest.importorskip("jax", reason="JAX is too large for the tests' own extra")
    from jax_step import jax_step

    model, batch = batch_of(name, 2)
    in_jax = jax_step(model, batch, LR)
    assert in_jax is not None
    check_agreement({"separate": separate(model, batch), "jax": in_jax})
