"""Scripts as users of EXO Gym write them run when `exogym` in their imports becomes `vsim`."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from vsim import Trainer

# EXO Gym's scripts give both, and end with the smaller.
pytestmark = pytest.mark.filterwarnings("ignore:num_epochs=.* has no effect with max_steps=:UserWarning")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(script: str, **scope: Any) -> dict[str, Any]:
    """Run a script whose imports of exogym are made imports of vsim, and nothing else; return what it defines."""
    assert "exogym" in script and "vsim" not in script
    scope = {"__name__": "__main__", **scope}
    exec(compile(textwrap.dedent(script.replace("exogym", "vsim")), "script.py", "exec"), scope)
    return scope


def rows(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


NANOGPT = """
    import argparse
    from dataclasses import dataclass
    from functools import partial

    import torch
    import torch.nn as nn
    from torch.nn import functional as F

    from exogym.trainer import LocalTrainer
    from exogym.strategy.optim import OptimSpec


    @dataclass
    class GPTConfig:
        block_size: int = 16
        vocab_size: int = 128
        n_embd: int = 16
        dropout: float = 0.1


    class GPT(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.wte, self.wpe = (nn.Embedding(n, config.n_embd) for n in (config.vocab_size, config.block_size))
            self.drop, self.ln_f = nn.Dropout(config.dropout), nn.LayerNorm(config.n_embd)
            self.h = nn.ModuleList(nn.Linear(config.n_embd, config.n_embd) for _ in "12")
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
            self.wte.weight = self.lm_head.weight
            self.apply(self._init_weights)

        def _init_weights(self, module):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

        def forward(self, batch, inference=False):
            idx, targets = (batch, None) if inference else batch
            x = self.drop(self.wte(idx) + self.wpe(torch.arange(0, idx.size(1), device=idx.device)))
            for block in self.h:
                x = x + F.gelu(block(x))
            logits = self.lm_head(self.ln_f(x))
            if inference:
                return logits
            return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


    class TextDataset(torch.utils.data.Dataset):
        def __init__(self, data, block_size):
            self.data, self.block_size = data, block_size

        def __len__(self):
            return len(self.data) - self.block_size - 1

        def __getitem__(self, idx):
            x = self.data[idx:idx + self.block_size + 1]
            return x[:-1], x[1:]


    def dataset_factory(block_size, end_pc, rank, num_nodes, train_dataset):
        start, end = (rank / num_nodes * end_pc, (rank + 1) / num_nodes * end_pc) if train_dataset else (end_pc, 1.0)
        data = torch.frombuffer(bytearray(TEXT.encode("ascii", "replace")), dtype=torch.uint8).long()
        return TextDataset(data[int(start * len(data)):int(end * len(data))], block_size)


    parser = argparse.ArgumentParser(conflict_handler="resolve")
    parser.add_argument("--strategy", default="base")
    parser.add_argument("--num_nodes", type=int, default=2)
    parser.add_argument("--minibatch_size", type=int, default=None)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--cosine_anneal", action="store_true")
    parser.add_argument("--run_name", type=str, default=None)
    parser.add_argument("--correlation_interval", type=int, default=None)
    parser.add_argument("--island_size", type=int, default=None)


    def create_strategy(args):
        schedule = {"warmup_steps": 2, "cosine_anneal": args.cosine_anneal}
        common = dict(lr_scheduler="lambda_cosine", lr_scheduler_kwargs=schedule, max_norm=1.0)
        optim = OptimSpec(torch.optim.AdamW, lr=args.lr)
        outer_optim = OptimSpec(torch.optim.SGD, lr=0.7, nesterov=True, momentum=0.9)
        if args.strategy == "base":
            from exogym.strategy.strategy import SimpleReduceStrategy
            return SimpleReduceStrategy(optim_spec=optim, **common)
        if args.strategy == "fedavg":
            from exogym.strategy.federated_averaging import FedAvgStrategy
            return FedAvgStrategy(inner_optim=optim, H=4, island_size=args.island_size or args.num_nodes, **common)
        if args.strategy == "sparta":
            from exogym.strategy.sparta import SPARTAStrategy
            return SPARTAStrategy(optim_spec=optim, p_sparta=0.05, **common)
        if args.strategy == "diloco":
            from exogym.strategy.diloco import DiLoCoStrategy
            return DiLoCoStrategy(optim_spec=optim, outer_optim_spec=outer_optim, H=4, **common)
        if args.strategy == "diloco_sparta":
            from exogym.strategy.sparta_diloco import SPARTADiLoCoStrategy
            return SPARTADiLoCoStrategy(
                optim_spec=optim, outer_optim_spec=outer_optim, H=4, p_sparta=0.05, sparta_interval=2, **common,
            )
        from exogym.strategy.demo import DeMoStrategy
        return DeMoStrategy(
            lr=args.lr, compression_decay=0.999, compression_topk=32, compression_chunk=64, weight_decay=0.0, **common,
        )


    args = parser.parse_args(ARGUMENTS)
    factory = partial(dataset_factory, 16, 0.9)
    torch.manual_seed(1337)
    trainer = LocalTrainer(GPT(GPTConfig()), factory, factory)
    final = trainer.fit(
        num_epochs=1, max_steps=20, strategy=create_strategy(args), num_nodes=args.num_nodes, device="",
        batch_size=8, minibatch_size=args.minibatch_size, shuffle=True, val_size=32, val_interval=10,
        correlation_interval=args.correlation_interval, wandb_project=None,
        run_name=args.run_name or f"{args.strategy}_bs8", log_x_axis="step",
    )
    logits = final(torch.zeros(1, 16, dtype=torch.long), inference=True)
    torch.save(final.state_dict(), "model.pt")
"""
TEXT = "".join(
    f"{i} bottles of beer on the wall, {i} bottles of beer. Take one down and pass it around. " for i in range(40)
)


@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")
@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--strategy fedavg --island_size 2 --num_nodes 4",
        "--strategy sparta --correlation_interval 5",
        "--strategy diloco --cosine_anneal --minibatch_size 4 --run_name mine",
        "--strategy diloco_sparta",
        "--strategy demo --lr 0.003",
    ],
)
def test_nanogpt_by_its_command_line(arguments: str) -> None:
    scope = run(NANOGPT, TEXT=TEXT, ARGUMENTS=arguments.split())
    args = scope["args"]
    folder = f"logs/{args.run_name or args.strategy + '_bs8'}"
    train, validation = rows(f"{folder}/train.csv"), rows(f"{folder}/validation.csv")
    assert len(train) == 20 and [int(row["step"]) for row in validation] == [0, 10, 20]
    assert float(validation[-1]["global_loss"]) < float(validation[0]["global_loss"])
    assert float(train[-1]["tokens_per_second"]) == pytest.approx(16 * float(train[-1]["examples_per_second"]))
    assert train[0].keys() >= {"train_loss", "train_perplexity"}
    assert validation[0].keys() >= {"global_perplexity", "local_loss", "local_perplexity"}
    assert float(train[0]["lr"]) == 0 and (args.cosine_anneal or float(train[2]["lr"]) == args.lr)
    assert int(train[-1]["examples_trained"]) == 20 * 8 * args.num_nodes
    config = json.loads(Path(f"{folder}/config.json").read_text())
    assert config["num_nodes"] == args.num_nodes and config["strategy"]["optim_spec"]["lr"] == args.lr
    assert scope["logits"].shape == (1, 16, 128)
    measured = [int(row["step"]) for row in train if row["correlation"]]
    assert measured == ([5, 10, 15, 20] if args.correlation_interval else [])


PLAYGROUND = """
    import torch
    import torch.nn.functional as F
    from exogym.strategy.communicate import broadcast, all_reduce, all_gather
    from exogym.strategy.optim import OptimSpec, ensure_optim_spec
    from exogym.strategy.strategy import SimpleReduceStrategy, Strategy
    from exogym.trainer import Trainer


    class QuantizationStrategy(Strategy):
        def __init__(self, optim_spec, levels):
            super().__init__()
            self.optim_spec = optim_spec
            self.scale = 1 / levels

        def step(self):
            for param in self.model.parameters():
                if param.grad is not None:
                    quantized = torch.round(param.grad / self.scale).to(torch.int32)
                    all_reduce(quantized)
                    param.grad = (quantized.to(torch.float32) * self.scale) / self.num_nodes

            self.optim.step()
            super().step()


    class AverageEverySecond(Strategy):
        def __init__(self, optim_spec=None, every=2, **kwargs):
            super().__init__(**kwargs)
            self.optim_spec = ensure_optim_spec(optim_spec) or OptimSpec(torch.optim.AdamW)
            self.every = every

        def _init_node(self, model, rank, num_nodes):
            super()._init_node(model, rank, num_nodes)
            self.optim = self.optim_spec.build(model)
            self._setup_scheduler()

        def step(self):
            self.optim.step()
            if (self.local_step + 1) % self.every == 0:
                for param in self.model.parameters():
                    all_reduce(param.data, op=torch.distributed.ReduceOp.SUM)
                    param.data /= self.num_nodes
            super().step()


    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))

        def forward(self, batch):
            x, y = batch
            return F.cross_entropy(self.layers(x), y)


    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 12, generator=generator)
    data = torch.utils.data.TensorDataset(x, x[:, :5].argmax(1))
    optim = OptimSpec(torch.optim.AdamW, lr=0.02)
    schedule = {"lr_scheduler": "lambda_cosine", "lr_scheduler_kwargs": {"warmup_steps": 3}}
    torch.manual_seed(0)
    net, trainers = Net(), {}
    for name, strategy in {
        "quantized": QuantizationStrategy(optim, levels=1000),
        "every second": AverageEverySecond(optim, **schedule),
        "default": SimpleReduceStrategy(optim_spec=optim, max_norm=1.0),
    }.items():
        trainers[name] = Trainer(net, data, data)
        trainers[name].fit(
            num_epochs=1, max_steps=30, strategy=strategy, num_nodes=4, device="cpu", batch_size=8, minibatch_size=4,
            shuffle=False, val_size=64, val_interval=10,
        )
"""


def test_strategies_from_the_playground() -> None:
    trainers: dict[str, Trainer] = run(PLAYGROUND)["trainers"]
    for name, trainer in trainers.items():
        losses = trainer.history.measured("global_loss")[0]
        assert losses[-1] < 0.5 * losses[0], name
    every_second = trainers["every second"]
    assert sorted({event.step for event in every_second.ledger}) == list(range(2, 31, 2))
    assert every_second.history["lr"][1:5].tolist() == pytest.approx([0, 0.02 / 3, 0.04 / 3, 0.02])
    # 12·16 + 16 + 16·5 + 5 entries, as 4-byte integers every step, or as weights every second.
    assert trainers["quantized"].ledger.payload_bytes == 30 * 4 * 293
    assert every_second.ledger.payload_bytes == 15 * 4 * 293
    # The numbers were rounded to a thousandth: close to AllReduce, and not the same.
    exact, rounded = (trainers[name].history.last("global_loss") for name in ("default", "quantized"))
    assert exact != rounded and math.isclose(exact, rounded, rel_tol=0.2)


EVERY_ARGUMENT = """
    import torch
    from torch.utils.data import TensorDataset
    from exogym import LocalTrainer
    from exogym.strategy import (
        AveragingCommunicator, CommunicateOptimizeStrategy, DeMoStrategy, DiLoCoCommunicator, DiLoCoStrategy,
        FedAvgStrategy, OptimSpec, PartitionedIndexSelector, RandomIndexSelector, ShuffledSequentialIndexSelector,
        SimpleReduceStrategy, SparseCommunicator, SPARTADiLoCoStrategy, SPARTAStrategy, Strategy,
    )

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(60, 6), torch.randint(3, (60,)))
    losses, evaluations = [], []
    options = dict(
        num_nodes=2, num_epochs=2, max_steps=6, batch_size=8, shuffle=True, val_size=20, val_interval=2, seed=7,
        device="cpu", autocast=True, executor="vmap", deterministic=False, backend="stacked", correlation_interval=3,
        dataloader_kwargs={"num_workers": 0, "drop_last": True}, logger=None, log_interval=2, log_x_axis="step",
        progress=False,
        train_loss_hook=lambda step, loss: losses.append((step, loss)),
        eval_loss_hook=lambda step, loss: evaluations.append((step, loss)),
    )
    sgd = OptimSpec(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    strategies = [
        SimpleReduceStrategy(optim_spec="sgd", lr=0.1, lr_scheduler="cosine", warmup_steps=1, max_steps=6),
        FedAvgStrategy(H=2, island_size=1, inner_optim="adam", inner_lr=0.01),
        DiLoCoStrategy(inner_optim="adam", H=2, outer_optim=sgd),
        DiLoCoStrategy(H=2, outer_lr=0.4, lr_scheduler=torch.optim.lr_scheduler.StepLR,
                       lr_scheduler_kwargs={"step_size": 2}),
        SPARTAStrategy(p_sparta=0.1, sparta_interval=2, async_delay=1, quantization_bits=8),
        SPARTAStrategy(index_selector=ShuffledSequentialIndexSelector(0.25)),
        SPARTAStrategy(p_sparta=0.1, compression_method="topk"),
        SPARTADiLoCoStrategy(p_sparta=0.1, sparta_interval=1, H=3, outer_optim_spec=sgd),
        CommunicateOptimizeStrategy(
            communication_modules=[
                SparseCommunicator(index_selector=PartitionedIndexSelector(0.2)),
                SparseCommunicator(sparsification_rate=0.1, every=2),
                AveragingCommunicator(island_size=2, every=3),
                DiLoCoCommunicator(3, sgd),
            ],
            optim_spec=OptimSpec(torch.optim.AdamW, lr=0.01), max_norm=1.0,
        ),
        Strategy(lr=0.01),
    ]
    histories = []
    for number, strategy in enumerate(strategies):
        trainer = LocalTrainer(torch.nn.Linear(6, 3), data, data, loss_fn=torch.nn.functional.cross_entropy)
        size = ({"minibatch_size": 4}, {"gradient_accumulation": 4}, {"max_memory_usage": 0.9})[number % 3]
        trainer.fit(strategy=strategy, run_name=f"run-{number}", **size, **options)
        histories.append(trainer.history)
"""


def test_every_argument_is_taken_and_honoured() -> None:
    scope = run(EVERY_ARGUMENT)
    strategies = scope["strategies"]
    assert len(scope["losses"]) == 6 * len(strategies)
    assert [step for step, _ in scope["evaluations"]] == [0, 2, 4, 6] * len(strategies)
    for number, history in enumerate(scope["histories"]):
        assert history["step"][-1] == 6 and history.executor == "vmap"
        assert history.minibatch_size == (4, 2, None)[number % 3]
        assert history["examples"].tolist() == [16 * t for t in range(7)]  # epochs of 3 whole batches
        assert np.isfinite(history["correlation"][[0, 3, 6]]).all()
        assert [int(row["step"]) for row in rows(f"logs/run-{number}/train.csv")] == [2, 3, 4, 6]
        config = json.loads(Path(f"logs/run-{number}/config.json").read_text())
        assert config["strategy"]["class"] == type(strategies[number]).__name__ and config["seed"] == 7
    assert scope["histories"][3]["lr"][1:].tolist() == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5])


BY_POSITION = """
    import torch
    from exogym.strategy.demo import DeMoStrategy
    from exogym.strategy.diloco import DiLoCoStrategy
    from exogym.strategy.federated_averaging import FedAvgStrategy
    from exogym.strategy.optim import OptimSpec
    from exogym.strategy.sparta import SPARTAStrategy
    from exogym.strategy.sparta_diloco import SPARTADiLoCoStrategy
    from exogym.strategy.strategy import SimpleReduceStrategy

    inner = OptimSpec(torch.optim.SGD, lr=0.5)
    outer = OptimSpec(torch.optim.Adam, lr=0.25)
    strategies = [
        SimpleReduceStrategy(inner),
        FedAvgStrategy(inner, 2, 7),
        DiLoCoStrategy(inner, outer, 7),
        SPARTAStrategy(inner, 0.125),
        SPARTADiLoCoStrategy(inner, outer, 0.125, 3, 7),
    ]
    demo = DeMoStrategy(None, 0.875)
"""


def test_arguments_by_position_have_their_old_order() -> None:
    scope = run(BY_POSITION)
    assert all(strategy.optim_spec is scope["inner"] for strategy in scope["strategies"])
    _, (islands,), (diloco,), (sparta,), (both, also) = (s.communication_modules for s in scope["strategies"])
    assert (islands.island_size, islands.H) == (2, 7)
    assert diloco.outer_optim_spec is also.outer_optim_spec is scope["outer"] and diloco.H == also.H == 7
    assert sparta.index_selector.p == both.index_selector.p == 0.125 and both.H == 3
    assert scope["demo"].momentum.error_feedback == 0.875
    for cls in {type(strategy) for strategy in scope["strategies"]}:
        with pytest.raises(TypeError, match="inner_optim and optim_spec are two spellings"):
            cls(scope["inner"], optim_spec="adam")
        with pytest.raises(TypeError, match=r"an optimizer must be a torch.optim class or the name of one, got 10"):
            cls(10)


def test_the_names_of_the_earlier_modules_are_the_same_objects() -> None:
    import vsim.logger
    import vsim.strategy
    from vsim.strategy import communicate_optimize_strategy, demo, diloco, federated_averaging, optim, sparta
    from vsim.strategy import sparta_diloco as both
    from vsim.strategy import strategy as base

    for module in (communicate_optimize_strategy, federated_averaging, both, base, sparta):
        assert all(getattr(module, name) is getattr(vsim.strategy, name) for name in module.__all__)
    assert all(getattr(vsim.logger, name) is getattr(vsim.history.loggers, name) for name in vsim.logger.__all__)
    for module, name in ((optim, "OptimSpec"), (diloco, "DiLoCoStrategy"), (demo, "DeMoStrategy")):
        assert getattr(module, name) is getattr(vsim.strategy, name)
    with pytest.raises(ValueError, match="optimizer must be one of"):
        optim.ensure_optim_spec("adamww")
    spec = optim.ensure_optim_spec(None, default=optim.OptimSpec(torch.optim.SGD, lr=0.1))
    assert spec.cls is torch.optim.SGD and spec.kwargs == {"lr": 0.1}


def test_the_names_of_the_earlier_modules_are_imported_first_and_travel() -> None:
    from vsim.strategy import optim, sparta_diloco

    things = (optim, optim.ensure_optim_spec, sparta_diloco, sparta_diloco.SPARTADiLoCoStrategy)
    shipped = cloudpickle.dumps((*things, lambda: optim.ensure_optim_spec))
    code = f"""
import vsim.strategy.optim, importlib.util, pickle, sys
from vsim.strategy.optim import ensure_optim_spec
from vsim.strategy.sparta_diloco import SPARTADiLoCoStrategy
optim, ensure, both, strategy, ask = pickle.loads({shipped!r})
assert optim is vsim.strategy.optim is sys.modules["vsim.strategy.optim"] and both is vsim.strategy.sparta_diloco
assert ensure is ensure_optim_spec is ask() and strategy is SPARTADiLoCoStrategy
assert importlib.util.find_spec("vsim.strategy.optim").name == "vsim.strategy.optim"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
