"""Every error names what was given and what is allowed; kinds and bounds are in test_malformed_inputs.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from errors import refused, unnamed
from reference_cluster import small_gpt, small_mlp, tokens, vectors
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import vsim
from vsim import Trainer, load_checkpoint
from vsim.logger import CSVLogger
from vsim.network import Compute
from vsim.strategy import (
    CommunicateOptimizeStrategy,
    Compressor,
    DiLoCoStrategy,
    FedAvgStrategy,
    IndexSelector,
    OptimSpec,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
    TopK,
    compress,
)
from vsim.strategy.communicate import all_reduce


def fit(
    model: nn.Module | None = None, data: Any = None, val: Any = None, loss_fn: Any = None, **options: Any
) -> nn.Module:
    options = {"strategy": SimpleReduceStrategy(), "num_nodes": 2, "max_steps": 2, "progress": False, **options}
    return Trainer(model or small_mlp(), vectors() if data is None else data, val, loss_fn=loss_fn).fit(**options)


def made_and_fit(make: Callable[..., Strategy], **arguments: Any) -> nn.Module:
    return fit(strategy=make(**arguments), max_steps=9)


class Asynchronous(Strategy):
    is_asynchronous = True


class Model(nn.Module):
    """Its loss is f(outputs, targets)."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)
        self.loss = loss

    def forward(self, batch: list[Tensor]) -> Any:
        return self.loss(self.linear(batch[0]), batch[1])


def uncopyable() -> nn.Module:
    model = small_mlp()
    model.kept = model.layers[0].weight * 2
    return model


def own_shards(rank: int, num_nodes: int, train: bool) -> TensorDataset:
    return vectors(num_nodes - 1 - rank)


def beside(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 5), layer)


def not_finite(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) * torch.nan


def infinite(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) * torch.inf


def compared(name: Any = "one", **options: Any) -> Any:
    options = {"num_nodes": 2, "max_steps": 2, "progress": False, **options}
    return vsim.compare(small_mlp(), vectors(), strategies={name: SimpleReduceStrategy()}, **options)


class Unmade(Strategy):
    def __init__(self) -> None:
        self.H = 3


class Twice(Strategy):
    def step(self) -> None:
        super().step()
        super().step()


class Sends(Strategy):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def step(self) -> None:
        all_reduce(self.what)
        super().step()


class Rows(Compressor):
    def exchange(self, arranged: Any, cluster: Any, label: str) -> Any:
        return list(arranged)


class Bare(Compressor):
    def exchange(self, arranged: Any, cluster: Any, label: str) -> Any:
        return arranged[0].mean(0)


class Silent(Compressor):
    def exchange(self, arranged: Any, cluster: Any, label: str) -> Any:
        for rows in arranged:
            rows.zero_()


class Idle(Strategy):
    def step(self) -> None:
        self.optim.step()


class Mixing(Strategy):
    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        self.optim = torch.optim.Adafactor(model.parameters())


# An argument of `fit`, a value, the error, and what it says besides the name of both.
OF_FIT: list[tuple[str, Any, type[Exception], str]] = [
    ("num_node", 2, TypeError, "fit() … did you mean 'num_nodes'"),
    ("qqq", 2, TypeError, "Valid: strategy, num_nodes, num_epochs"),
    ("num_nodes", 10**12, ValueError, "1000000000000 … GB … fit"),
    ("seed", 2**64, ValueError, "from 0 to … 18446744073709551616"),
    ("device", "gpu", ValueError, "this machine has … gpu … cpu"),
    ("device", "meta", ValueError, "this machine has … meta … cpu"),
    ("device", "cpu:7", ValueError, "this machine has … cpu:7"),
    ("executor", "map", ValueError, "'auto', 'vmap', 'loop' … map"),
    ("run_name", "a\0b", ValueError, "folder"),
    ("run_name", "a" * 300, ValueError, "at most 200 bytes"),
    ("resume", 3, TypeError, "True … path … 3"),
    ("eval_loss_hook", print, ValueError, "val_dataset"),
    ("strategy", None, TypeError, "Strategy object … None"),
    ("strategy", DiLoCoStrategy, TypeError, "Strategy object … class"),
    ("loss_fn", nn.CrossEntropyLoss, TypeError, "(outputs, y) … CrossEntropyLoss"),
    ("loss_fn", nn.Linear(5, 1), ValueError, "trainable parameters … part of the model … freeze"),
    ("dataloader_kwargs", {3: 1}, TypeError, "3 … Valid: num_workers"),
    ("dataloader_kwargs", {"num_worker": 1}, TypeError, "num_worker … did you mean 'num_workers'"),
    ("dataloader_kwargs", {"batch_size": 1}, TypeError, "batch_size"),
    ("dataloader_kwargs", {"sampler": [0, 1]}, TypeError, "sampler … Subset(dataset, list(sampler))"),
    ("dataloader_kwargs", {"batch_sampler": [[0]]}, TypeError, "batch_sampler … Subset(dataset … batch_size="),
    ("dataloader_kwargs", {"shuffle": False}, TypeError, "give … shuffle="),
    ("dataloader_kwargs", {"generator": None}, TypeError, "generator … seed="),
    ("dataloader_kwargs", {"collate_fn": "pad"}, TypeError, "collate_fn … (samples) … pad"),
]


@pytest.mark.parametrize(("name", "value", "error", "said"), OF_FIT)
def test_an_argument_of_fit(name: str, value: Any, error: type[Exception], said: str) -> None:
    with refused(error, name, said):
        fit(**{name: value})


classification, no_pairs = partial(nn.Linear, 12, 5), TensorDataset(torch.ones(8, 12))
NO_LOSS = "the loss does not depend on any trainable parameter"
chained = ChainedScheduler, ChainedScheduler([StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 2)])
short = {"inner_optim": "sgd", "lr_scheduler": OneCycleLR, "lr_scheduler_kwargs": {"max_lr": 0.1, "total_steps": 3}}
priced = {"parameters": 1e6, "num_nodes": 2, "max_steps": 2, "network": 1e9, "compute": 1}
asynchronous = {"strategy": Asynchronous(), "compute": 1}
# What a user did, the error, and what it says.
TABLE: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # Arguments that do not fit together, or have no effect
    (lambda: Trainer(small_mlp(), vectors(), devise="cpu"), TypeError, "Trainer() … devise … did you mean 'device'"),
    (lambda: Trainer(small_mlp(), vectors(), device="tpu0"), ValueError, "tpu0 … cpu"),
    (lambda: fit(batch_size=16, minibatch_size=3), ValueError, "batch_size 16 … minibatch_size 3 … [1, 2, 4, 8, 16]"),
    (lambda: fit(batch_size=6, gradient_accumulation=4), ValueError, "gradient_accumulation 4 … [1, 2, 3, 6]"),
    (lambda: fit(batch_size=4, minibatch_size=8), ValueError, "minibatch_size … from 1 to 4 … 8"),
    (lambda: fit(minibatch_size=4, gradient_accumulation=4), TypeError, "minibatch_size and gradient_accumulation"),
    (lambda: fit(executor="loop", chunk_size=2), ValueError, "chunk_size=2 … executor='loop'"),
    (lambda: fit(executor="loop", compile=True), ValueError, "compile=True … executor='loop'"),
    (lambda: fit(backend="process", chunk_size=2), ValueError, "chunk_size=2 … backend='process'"),
    (lambda: fit(deterministic=True, autocast=True), ValueError, "deterministic=True … autocast=True"),
    (lambda: fit(num_nodes=10**12, backend="process"), ValueError, "num_nodes=1000000000000 … GB"),
    (lambda: fit(num_nodes=10**12, data=own_shards), ValueError, "num_nodes=1000000000000 … GB"),
    (lambda: fit(compute=0.8, network="1 Gbit/s"), TypeError, "compute and network … SimpleReduceStrategy"),
    (lambda: fit(strategy=Asynchronous()), TypeError, "Asynchronous … compute=Compute"),
    (lambda: fit(strategy=Asynchronous(), compute=Compute(1, speeds=[1, 2, 3])), ValueError, "compute … 3 nodes … 2"),
    (lambda: fit(**asynchronous, backend="process"), ValueError, "Asynchronous … simulated only … backend='process'"),
    (lambda: fit(strategy=Asynchronous(), compute=Compute(1, layers=3)), ValueError, "layers … Asynchronous"),
    (lambda: vsim.price(Asynchronous(), **priced), ValueError, "Asynchronous … compute"),
    (lambda: vsim.verify(small_mlp(), vectors(), Asynchronous(), 2), ValueError, "Asynchronous … simulated only"),
    (lambda: compared(""), ValueError, "strategy … name … empty"),
    (lambda: compared(3), TypeError, "names of strategies … strings … 3"),
    # Data
    (lambda: fit(data=vectors(3), num_nodes=5), ValueError, "3 examples … 5 nodes … num_nodes"),
    (lambda: fit(data=DataLoader(vectors())), TypeError, "train_dataset … DataLoader"),
    (lambda: fit(classification(), no_pairs, loss_fn=F.nll_loss), ValueError, "loss_fn= … (x, y) … tuple of 1"),
    # Models and losses
    (lambda: Trainer(lambda x: x, vectors()), TypeError, "model … torch.nn.Module … function"),
    (lambda: fit(nn.Identity()), ValueError, "no trainable parameter"),
    (lambda: fit(beside(nn.Linear(5, 5).double())), ValueError, "torch.float32 … 1.weight: torch.float64 … 1.bias"),
    (lambda: fit(nn.LazyLinear(3)), ValueError, "'weight', 'bias' … not initialised"),
    (lambda: fit(beside(nn.LazyBatchNorm1d(affine=False))), ValueError, "1.running_mean … not initialised"),
    (lambda: fit(small_mlp().to("meta")), ValueError, "layers.0.weight … meta"),
    (
        lambda: fit(beside(nn.Linear(3, 3, device="meta").requires_grad_(False))),
        ValueError,
        "'1.weight', '1.bias' … meta",
    ),
    (lambda: fit(uncopyable()), TypeError, "copy.deepcopy … deepcopy protocol"),
    (lambda: fit(Model(not_finite)), FloatingPointError, "step 1 … nodes [0, 1] … node 0: nan, node 1: nan"),
    (
        lambda: fit(Model(infinite), num_nodes=12),
        FloatingPointError,
        "nodes [0, 1, 2 … 11] … node 0: inf … node 7: inf",
    ),
    (lambda: fit(Model(lambda o, y: o.mean() + 1j)), ValueError, "loss … real … torch.complex64"),
    (lambda: fit(Model(lambda o, y: {"logits": o})), ValueError, "scalar … loss … dict … loss_fn="),
    # Strategies and optimizers
    (lambda: FedAvgStrategy(h=3), TypeError, "FedAvgStrategy() … 'h' … H, average, island_size"),
    (lambda: SimpleReduceStrategy(H=3), TypeError, "SimpleReduceStrategy … 'H'"),
    (lambda: DiLoCoStrategy(outer_lrr=1), TypeError, "outer_lrr … did you mean 'outer_lr'"),
    (lambda: DiLoCoStrategy(learning_rate=1), TypeError, "learning_rate … did you mean 'lr'"),
    (lambda: DiLoCoStrategy(weight_decay=1), TypeError, "weight_decay … OptimSpec('adamw', weight_decay=1)"),
    (lambda: DiLoCoStrategy(momentum=0.9), TypeError, "momentum … OptimSpec('sgd', momentum=0.9)"),
    (lambda: fit(data=vectors().tensors), TypeError, "a tuple of 2 arrays … TensorDataset(x, y)"),
    (lambda: fit(strategy=FedAvgStrategy(island_size=3)), ValueError, "island_size … from 1 to 2 … 3"),
    (lambda: Strategy([Strategy()]), TypeError, "Strategy() … no part of another"),
    (lambda: CommunicateOptimizeStrategy([FedAvgStrategy]), TypeError, "communication_modules … class"),
    (lambda: CommunicateOptimizeStrategy(FedAvgStrategy()), TypeError, "communication_modules"),
    (lambda: Strategy([DiLoCoStrategy(H=2)] * 2), ValueError, "DiLoCoStrategy"),
    (
        lambda: Strategy([SimpleReduceStrategy(), SimpleReduceStrategy(average="median")]),
        ValueError,
        "SimpleReduceStrategy",
    ),
    (lambda: DiLoCoStrategy(average=compress(TopK)), TypeError, "compressor … Compressor"),
    (lambda: DiLoCoStrategy(outer_optim_spec="sgd"), TypeError, "outer_optim_spec … outer_optim … vsim.compat.exogym"),
    (lambda: OptimSpec("sgd", lr=float("inf")), ValueError, "lr=inf … finite"),
    (lambda: DiLoCoStrategy(outer_optim=OptimSpec("sgd", lr=0.0)), ValueError, "outer_lr … > 0"),
    (lambda: fit(strategy=Mixing()), TypeError, "Adafactor … mix nodes"),
    (lambda: fit(strategy=DiLoCoStrategy(outer_optim="muon")), ValueError, "Muon"),
    (lambda: OptimSpec("adamw", betas=0.9), TypeError, "OptimSpec(AdamW, betas=0.9)"),
    (lambda: OptimSpec("sgd", momentum=-1), ValueError, "momentum=-1"),
    (lambda: OptimSpec("sgd", lr="x"), TypeError, "OptimSpec(SGD, lr='x')"),
    (lambda: OptimSpec("adam", fused=True, foreach=True), ValueError, "fused=True … foreach=True"),
    (lambda: OptimSpec("sgd", differentiable=True), ValueError, "differentiable=True"),
    (lambda: Strategy(lr_scheduler=StepLR, lr_scheduler_kwargs={"step_size": 0}), ValueError, "StepLR(step_size=0)"),
    (lambda: fit(strategy=Strategy(**short), max_steps=4), ValueError, "OneCycleLR … 3 steps … total_steps=4"),
    *(
        (partial(Strategy, lr_scheduler=scheduler), TypeError, f"lr_scheduler … {name}")
        for name, scheduler in (("SequentialLR", SequentialLR), *(("ChainedScheduler", one) for one in chained))
    ),
    # Subclasses
    (lambda: fit(strategy=Unmade()), TypeError, "Unmade.__init__() … super"),
    (lambda: fit(strategy=Sends(3.0)), ValueError, "all_reduce() … stacked … 3.0"),
    (lambda: fit(strategy=Sends(torch.ones(7))), ValueError, "2 nodes … (7,)"),
    (lambda: fit(strategy=Twice()), TypeError, "Twice … step 1 … twice … super"),
    (lambda: fit(strategy=Idle()), TypeError, "Idle.step() … super().step"),
    *(
        (partial(made_and_fit, strategy, average=of), ValueError, "must make … (2, 293)")
        for strategy in (SimpleReduceStrategy, FedAvgStrategy, partial(DiLoCoStrategy, H=1))
        for of in (lambda rows, _: rows, lambda rows, _: rows.mean(), lambda rows, _: None)
    ),
    *(
        (partial(made_and_fit, strategy, average=compress(Rows())), ValueError, "Rows.exchange() … (2, 293)")
        for strategy in (SimpleReduceStrategy, partial(DiLoCoStrategy, H=1))
    ),
    *(
        (partial(made_and_fit, DiLoCoStrategy, H=1, average=compress(bad)), TypeError, f"1 tensors … {found}")
        for bad, found in ((Bare(), "Tensor"), (Silent(), "NoneType"))
    ),
]


@pytest.mark.parametrize(("call", "error", "said"), TABLE)
def test_bad_input(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with refused(error, said):
        call()


@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda o, y: F.cross_entropy(o, y, reduction="none"), "scalar … (15,) … .mean()"),
        (lambda o, y: None, "scalar … NoneType"),
        (lambda o, y: y.float().mean(), NO_LOSS),
        (lambda o, y: Outputs(None), "scalar … loss … NoneType"),
        (lambda o, y: (o.mean(), o.sum()), "tuple of (Tensor, Tensor)"),  # which of them?
        (lambda o, y: (o,), "tuple of (Tensor)"),
    ],
)
def test_what_is_no_loss(loss: Callable[..., Any], said: str, executor: str) -> None:
    with refused(ValueError, "loss", said):
        fit(Model(loss), executor=executor)


class Own(nn.Module):
    """A model whose forward takes the parts of a batch by names that say nothing of which is the target."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, idx: Tensor, following: Tensor | None = None) -> Any:
        logits = self.head(self.embed(idx))
        return logits, None if following is None else F.cross_entropy(logits.flatten(0, 1), following.flatten())


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
        return Outputs(F.cross_entropy(self.linear(input_ids), labels))


class WithOptions(ByName):
    def forward(self, input_ids: Any, labels: Any, **_: Any) -> Any:
        return super().forward(input_ids, labels)


class Outputs(NamedTuple):
    loss: Tensor | None


class Keeps(nn.Module):
    """Computes with a tensor of its call before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(12, 5), None

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = self.linear(batch[0])
        loss = F.cross_entropy(outputs if self.last is None else outputs + 0 * self.last.mean(), batch[1])
        self.last = outputs
        return loss


X, Y = vectors().tensors
NAMED = [{"input_ids": x, "labels": y, "weights": x} for x, y in zip(X, Y, strict=True)]
GIVEN = "the model or its loss raised this at step 1, given batch[0]: float32 (15, 12), batch[1]: int64 (15,)"
OF_WEIGHTS, OF_LABELS = "weights … torch.float32 … x.to(torch.float32)", "labels … torch.int64 … y.long()"
OF_HALF = "weights … torch.bfloat16 … x.to(torch.bfloat16)"

# A model, its data and loss, and what the error says in addition to PyTorch's message.
MISFITS: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "no loss_fn": (classification, vectors(), None, f"{GIVEN} … model(batch) … tuple of 2 … loss_fn="),
    "in parts": (Own, tokens(), None, "idx, following … model(*batch)"),
    "by name": (ByName, NAMED, None, "input_ids, labels … drop or rename the field 'weights'"),
    "by other names": (WithOptions, NAMED, None, "input_ids, labels … model(**batch).loss"),
    "without the first": (ByName, [{"labels": y} for y in Y], None, "input_ids, labels … give the field 'input_ids'"),
    "in half": (lambda: ByName().bfloat16(), [{"input_ids": x, "labels": y} for x, y in vectors()], None, OF_HALF),
    "nested": (classification, [((x, x), y) for x, y in vectors()], F.cross_entropy, "model(x) … a list of 2"),
    "narrow": (classification, TensorDataset(X[:, :7], Y), F.cross_entropy, "(15, 7) … weight … (5, 12)"),
    "keeps": (Keeps, vectors(), None, "last … make it a buffer"),
    **{
        f"x of {kind}": (classification, TensorDataset(X.to(kind), Y), F.cross_entropy, OF_WEIGHTS)
        for kind in (torch.float64, torch.complex64, torch.int64)
    },
    **{
        f"y of {kind}": (classification, TensorDataset(X, Y.to(kind)), F.cross_entropy, OF_LABELS)
        for kind in (torch.float32, torch.bool, torch.int32)
    },
    **{
        f"y + {shift}": (classification, TensorDataset(X, Y + shift), F.cross_entropy, f"from {shift} to … from 0")
        for shift in (3, -3)
    },
}


@pytest.mark.parametrize("executor", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("name", MISFITS)
def test_a_batch_that_does_not_fit_the_model(name: str, executor: str) -> None:
    model, data, loss_fn, said = MISFITS[name]
    with pytest.raises((TypeError, RuntimeError, IndexError, AttributeError)) as caught:
        fit(model(), data, loss_fn=loss_fn, executor=executor)
    assert not unnamed(str(caught.value), said), str(caught.value)
    assert "functorch_wrapped" not in str(caught.value)


def test_labels_of_the_validation_data_that_the_model_does_not_know() -> None:
    with refused(IndexError, "out of bounds", "validation after step 0", "3 to 7"):
        fit(classification(), val=TensorDataset(X, Y + 3), loss_fn=F.cross_entropy)


def test_what_is_allowed_after_an_error() -> None:
    # A trainer and a strategy that were given something wrong are as good as new.
    trainer, strategy = Trainer(small_gpt(), tokens()), FedAvgStrategy(island_size=3)
    run = partial(trainer.fit, strategy=strategy, max_steps=2, progress=False)
    with refused(ValueError, "island_size", 3):
        run(num_nodes=2)
    with refused(ValueError, "50 nodes"):
        run(num_nodes=50)
    assert isinstance(run(num_nodes=4), nn.Module)


def test_whole_numbers_of_other_libraries(tmp_path: Path) -> None:
    numbers = {"num_nodes": np.int64(2), "batch_size": torch.tensor(4), "seed": np.uint32(3), "max_steps": np.int8(3)}
    trainer = Trainer(small_mlp(), vectors())
    trainer.fit(
        strategy=SimpleReduceStrategy(), logger=CSVLogger(tmp_path), save_dir=tmp_path, **numbers, progress=False
    )
    assert load_checkpoint(tmp_path).num_nodes == 2 and len(trainer.history) == 4


@pytest.mark.parametrize("selector", [ShuffledSequentialIndexSelector, PartitionedIndexSelector, RandomIndexSelector])
def test_the_smallest_share_there_is(selector: type[IndexSelector]) -> None:
    assert isinstance(fit(strategy=SPARTAStrategy(index_selector=selector(5e-324))), nn.Module)
