"""Every error names what was given and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from separate import small_gpt, small_mlp, tokens, vectors
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import vsim
from vsim import Trainer, load_checkpoint
from vsim.arguments import real_number
from vsim.data import text_file
from vsim.engine import VmapError
from vsim.logger import CSVLogger
from vsim.network import Compute
from vsim.strategy import (
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    Compressor,
    DeMoStrategy,
    DiLoCoCommunicator,
    DiLoCoStrategy,
    FedAvgStrategy,
    GradientAverage,
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
from vsim.training.run import Diverged


class Bad(NamedTuple):
    """What a user did, and what should be said."""

    name: str
    call: Callable[[], Any]
    error: type[BaseException]
    message: str


def fit(
    model: nn.Module | None = None, data: Any = None, val: Any = None, loss_fn: Any = None, **options: Any
) -> nn.Module:
    options = {"strategy": SimpleReduceStrategy(), "num_nodes": 2, "max_steps": 2, "progress": False, **options}
    return Trainer(model or small_mlp(), vectors() if data is None else data, val, loss_fn=loss_fn).fit(**options)


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


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(1)


class Words(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": "word", "y": index}


def half_double() -> nn.Module:
    model = small_mlp()
    model.layers[3].double()
    return model


def lazy_buffer() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 5), nn.LazyBatchNorm1d(affine=False))


def uncopyable() -> nn.Module:
    model = small_mlp()
    model.kept = model.layers[0].weight * 2
    return model


def lost_weight() -> nn.Module:
    model = small_mlp()
    model.layers[0].weight.data[0, 0] = torch.nan
    return model


def selecting(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs, targets)
    return loss[loss > 0].sum()


def not_finite(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) * torch.nan


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


NODES = r"num_nodes must be a whole number"

TABLE = [
    # Unknown keywords
    Bad("keyword of fit", lambda: fit(num_node=2), TypeError, r"fit\(\) got .* 'num_node'; did you mean 'num_nodes'"),
    Bad("keyword of fit, far", lambda: fit(qqq=2), TypeError, r"'qqq'\. Valid: strategy, num_nodes, num_epochs"),
    Bad(
        "keyword of Trainer",
        lambda: Trainer(small_mlp(), vectors(), devise="cpu"),
        TypeError,
        r"Trainer\(\) got an unknown argument 'devise'; did you mean 'device'",
    ),
    Bad(
        "keyword of a strategy",
        lambda: FedAvgStrategy(h=3),
        TypeError,
        r"FedAvgStrategy\(\) got an unknown argument 'h'.*Valid: island_size, H, average, inner_optim, opt",
    ),
    Bad("argument of another strategy", lambda: SimpleReduceStrategy(H=3), TypeError, "SimpleReduceStrategy.*'H'"),
    Bad("near keyword", lambda: DiLoCoStrategy(outer_lrr=1), TypeError, "'outer_lrr'; did you mean 'outer_lr'"),
    Bad("keyword of an optimizer", lambda: OptimSpec("sgd", momentun=1), TypeError, "SGD.*did you mean 'momentum'"),
    Bad(
        "keyword of the loader",
        lambda: fit(dataloader_kwargs={"num_worker": 1}),
        TypeError,
        "dataloader_kwargs got .* 'num_worker'; did you mean 'num_workers'",
    ),
    Bad(
        "batch size twice",
        lambda: fit(dataloader_kwargs={"batch_size": 1}),
        TypeError,
        "dataloader_kwargs got .*'batch",
    ),
    *(
        Bad(
            name,
            partial(fit, dataloader_kwargs={name: value}),
            TypeError,
            rf"dataloader_kwargs got '{name}', .* give .*{cure}",
        )
        for name, value, cure in (
            ("sampler", [0, 1], r"Subset\(dataset, list\(sampler\)\)"),
            ("batch_sampler", [[0, 1]], r"Subset\(dataset, .* in batch_sampler .*batch_size="),
            ("shuffle", False, "shuffle="),
            ("generator", None, "seed="),
        )
    ),
    # Numbers
    Bad("no nodes", lambda: fit(num_nodes=0), ValueError, rf"{NODES} >= 1, got 0"),
    Bad("negative nodes", lambda: fit(num_nodes=-1), ValueError, rf"{NODES} >= 1, got -1"),
    Bad("half a node", lambda: fit(num_nodes=1.5), TypeError, rf"{NODES}, got 1\.5 of type float"),
    Bad("nodes as text", lambda: fit(num_nodes="4"), TypeError, rf"{NODES}, got '4' of type str"),
    Bad("nodes as truth", lambda: fit(num_nodes=True), TypeError, rf"{NODES}, got True of type bool"),
    Bad("no steps", lambda: fit(max_steps=0), ValueError, "max_steps must be a whole number >= 1, got 0"),
    Bad("1e3 steps", lambda: fit(max_steps=1e3), TypeError, r"max_steps must be a whole number, got 1000\.0"),
    Bad("no epochs", lambda: fit(num_epochs=0), ValueError, "num_epochs must be a whole number >= 1, got 0"),
    Bad("no batch", lambda: fit(batch_size=0), ValueError, "batch_size must be a whole number >= 1, got 0"),
    Bad("interval of 0", lambda: fit(val_interval=0), ValueError, "val_interval must be a whole number >= 1, got 0"),
    Bad("correlation at 0", lambda: fit(correlation_interval=0), ValueError, "correlation_interval must be .*, got 0"),
    Bad("no examples", lambda: fit(val_size=0), ValueError, "val_size must be a whole number >= 1, got 0"),
    Bad("negative seed", lambda: fit(seed=-1), ValueError, "seed must be a whole number from 0 to .*, got -1"),
    Bad("seed None", lambda: fit(seed=None), TypeError, "seed must be a whole number, got None of type NoneType"),
    Bad(
        "minibatch that does not divide",
        lambda: fit(batch_size=16, minibatch_size=3),
        ValueError,
        r"batch_size 16 cannot be divided by minibatch_size 3; minibatch_size may be one of \[1, 2, 4, 8, 16\]",
    ),
    Bad(
        "pieces that do not divide",
        lambda: fit(batch_size=6, gradient_accumulation=4),
        ValueError,
        r"batch_size 6 cannot be divided by gradient_accumulation 4; .* one of \[1, 2, 3, 6\]",
    ),
    Bad("minibatch too large", lambda: fit(batch_size=4, minibatch_size=8), ValueError, "from 1 to 4, got 8"),
    Bad(
        "both spellings of accumulation",
        lambda: fit(minibatch_size=4, gradient_accumulation=4),
        TypeError,
        "minibatch_size and gradient_accumulation say the same thing; give one",
    ),
    # Data
    Bad("empty dataset", lambda: fit(data=vectors(0)), ValueError, "train_dataset is empty"),
    Bad("empty validation", lambda: fit(val=vectors(0)), ValueError, "val_dataset is empty"),
    Bad(
        "empty shard",
        lambda: fit(data=lambda rank, num_nodes, train: vectors(1 - rank)),
        ValueError,
        r"train_dataset\(1, 2, True\) is empty",
    ),
    Bad(
        "fewer examples than nodes",
        lambda: fit(data=vectors(3), num_nodes=5),
        ValueError,
        "has 3 examples, fewer than the 5 nodes; lower num_nodes",
    ),
    Bad(
        "nothing left",
        lambda: fit(data=vectors(8), dataloader_kwargs={"drop_last": True}),
        ValueError,
        "drop_last leaves 2 of 2 nodes no batch of batch_size=16 examples .*0: 4, 1: 4",
    ),
    Bad("a stream", lambda: fit(data=Stream()), TypeError, "train_dataset must be a dataset .* got Stream"),
    Bad("a loader", lambda: fit(data=DataLoader(vectors())), TypeError, "train_dataset must be .* got DataLoader"),
    Bad("a class", lambda: fit(data=TensorDataset), TypeError, "train_dataset must be a dataset .* got type"),
    Bad("a number for validation", lambda: fit(val=7), TypeError, "val_dataset must be a dataset .* got int"),
    Bad("text in batches", lambda: fit(data=Words()), ValueError, r"tensors only, got batch\['text'\]"),
    Bad("text in validation", lambda: fit(val=Words()), ValueError, r"tensors only, got batch\['text'\]"),
    Bad(
        "no pairs",
        lambda: fit(nn.Linear(12, 5), TensorDataset(torch.ones(8, 12)), loss_fn=F.cross_entropy),
        ValueError,
        r"with loss_fn= a batch must be a pair \(x, y\); the dataset gives a tuple of 1",
    ),
    Bad("missing file", lambda: text_file("no/such/file.txt"), FileNotFoundError, r"no/such/file\.txt"),
    # Models
    Bad("not a model", lambda: Trainer(lambda x: x, vectors()), TypeError, "model must be a torch.nn.Module, got func"),
    Bad("class of a model", lambda: Trainer(nn.Linear, vectors()), TypeError, "must be a torch.nn.Module, got type"),
    Bad("nothing to train", lambda: fit(nn.Identity()), ValueError, "no trainable parameter"),
    Bad(
        "mixed dtypes",
        lambda: fit(half_double()),
        ValueError,
        r"share one dtype; most are torch.float32, but not layers.3.weight: torch.float64, layers.3.bias: ",
    ),
    Bad("a lazy model", lambda: fit(nn.LazyLinear(3)), ValueError, r"\['weight', 'bias'\] are not initialised yet"),
    Bad("a lazy buffer", lambda: fit(lazy_buffer()), ValueError, r"buffers \['1.running_mean', .* not initialised yet"),
    Bad(
        "a model without values",
        lambda: fit(small_mlp().to("meta")),
        ValueError,
        r"parameters \['layers.0.weight', .* are on the meta device and have no values",
    ),
    Bad(
        "a frozen part without values",
        lambda: fit(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta").requires_grad_(False))),
        ValueError,
        r"parameters \['1.weight', '1.bias'\] are on the meta device",
    ),
    Bad(
        "a model that cannot be copied",
        lambda: fit(uncopyable()),
        TypeError,
        r"the model cannot be copied by copy\.deepcopy, which every node needs: .*deepcopy protocol",
    ),
    Bad(
        "weights that are not numbers",
        lambda: fit(lost_weight()),
        Diverged,
        r"non-finite loss at step 1 on nodes \[0, 1\]",
    ),
    Bad(
        "a complex loss",
        lambda: fit(Model(lambda outputs, y: outputs.mean() + 1j)),
        ValueError,
        "the loss must be a real number, got one of dtype torch.complex64",
    ),
    Bad(
        "a whole number for a loss",
        lambda: fit(Model(lambda outputs, y: outputs.mean().long())),
        ValueError,
        "the loss does not depend on any trainable parameter",
    ),
    Bad(
        "class of a loss",
        lambda: fit(nn.Linear(12, 5), loss_fn=nn.CrossEntropyLoss),
        TypeError,
        r"loss_fn must be a function of \(outputs, y\), got the class CrossEntropyLoss",
    ),
    Bad(
        "a vector for a loss",
        lambda: fit(Model(lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"))),
        ValueError,
        r"the loss must be a scalar \(the mean over the batch\), got a tensor of shape \(15,\); .*\.mean\(\)",
    ),
    Bad("outputs for a loss", lambda: fit(Model(lambda o, y: o)), ValueError, r"shape \(15, 5\); .* give loss_fn="),
    Bad(
        "nothing for a loss",
        lambda: fit(Model(lambda o, y: None)),
        ValueError,
        "must be a scalar tensor, .*, got NoneType",
    ),
    Bad(
        "a dictionary for a loss",
        lambda: fit(Model(lambda outputs, y: {"logits": outputs})),
        ValueError,
        "the loss must be a scalar tensor, or outputs with one called loss, got dict; .* give loss_fn= if the model",
    ),
    Bad(
        "a vector from loss_fn",
        lambda: fit(nn.Linear(12, 5), loss_fn=nn.CrossEntropyLoss(reduction="none")),
        ValueError,
        r"the loss must be a scalar",
    ),
    Bad(
        "a loss without parameters",
        lambda: fit(Model(lambda outputs, y: y.float().mean())),
        ValueError,
        "the loss does not depend on any trainable parameter",
    ),
    Bad(
        "loss_fn of a kind",
        lambda: fit(loss_fn="mse"),
        TypeError,
        r"loss_fn must be a function of \(outputs, y\), got 'mse'",
    ),
    Bad(
        "loss_fn that learns",
        lambda: fit(loss_fn=nn.Linear(5, 1)),
        ValueError,
        "loss_fn has trainable parameters: make them part of the model, or freeze them",
    ),
    Bad(
        "a model that fails under vmap",
        lambda: fit(Model(selecting), executor="vmap"),
        VmapError,
        r"cannot be vectorised over nodes at .*test_bad_input.py:\d+, `return loss\[loss > 0\].*"
        r"executor='loop' runs it",
    ),
    Bad(
        "a loss that is not a number",
        lambda: fit(Model(not_finite)),
        Diverged,
        r"non-finite loss at step 1 on nodes \[0, 1\] \(node 0: nan, node 1: nan\)",
    ),
    Bad(
        "a step that is too large",
        lambda: fit(strategy=Strategy(inner_optim="sgd", lr=1e30), max_steps=9),
        Diverged,
        r"non-finite loss at step \d on nodes \[0, 1\]",
    ),
    # Strategies
    Bad("no strategy", lambda: fit(strategy=None), TypeError, "strategy must be a vsim Strategy object, got None"),
    Bad(
        "class of a strategy",
        lambda: fit(strategy=DiLoCoStrategy),
        TypeError,
        "strategy must be a vsim Strategy object, got <class .*DiLoCoStrategy",
    ),
    Bad("FedAvg with H 0", lambda: FedAvgStrategy(H=0), ValueError, "H must be a whole number >= 1, got 0"),
    Bad("DiLoCo with H 0", lambda: DiLoCoStrategy(H=0), ValueError, "H must be a whole number >= 1, got 0"),
    Bad("H of a half", lambda: DiLoCoStrategy(H=0.5), TypeError, r"H must be a whole number, got 0\.5"),
    Bad("DiLoCo module", lambda: DiLoCoCommunicator(-2), ValueError, "H must be a whole number >= 1, got -2"),
    Bad("averaging never", lambda: AveragingCommunicator(every=0), ValueError, "every must be a whole number >= 1"),
    Bad(
        "island larger than the cluster",
        lambda: fit(strategy=FedAvgStrategy(island_size=3)),
        ValueError,
        "island_size must be a whole number from 1 to 2, got 3",
    ),
    Bad("empty islands", lambda: FedAvgStrategy(island_size=0), ValueError, "island_size must be .* >= 1, got 0"),
    Bad(
        "average",
        lambda: FedAvgStrategy(average="medain"),
        ValueError,
        "average must be one of 'mean', .* got 'medain'; did you mean 'median'",
    ),
    Bad(
        "no module",
        lambda: CommunicateOptimizeStrategy([SimpleReduceStrategy()]),
        TypeError,
        r"CommunicateOptimizeStrategy\(\): communication_modules must be CommunicationModules, got SimpleReduceStr",
    ),
    Bad(
        "class of a module",
        lambda: CommunicateOptimizeStrategy([AveragingCommunicator]),
        TypeError,
        "must be CommunicationModules, got <class",
    ),
    Bad(
        "two optimizers",
        lambda: SimpleReduceStrategy(optim_spec="sgd", inner_optim="sgd"),
        TypeError,
        r"SimpleReduceStrategy\(\): inner_optim and optim_spec are two spellings of one argument",
    ),
    Bad(
        "two outer optimizers",
        lambda: DiLoCoStrategy(outer_optim="sgd", outer_optim_spec="sgd"),
        TypeError,
        "outer_optim and outer_optim_spec are two spellings",
    ),
    Bad("two rates", lambda: FedAvgStrategy(lr=0.1, inner_lr=0.1), TypeError, "lr and inner_lr are two spellings"),
    Bad(
        "rate twice",
        lambda: FedAvgStrategy(inner_optim=OptimSpec("sgd", lr=0.1), lr=0.2),
        TypeError,
        r"the learning rate is given twice, as 0\.2 and in OptimSpec\(SGD, lr=0\.1\)",
    ),
    Bad("negative rate", lambda: FedAvgStrategy(lr=-0.1), ValueError, r"lr must be >= 0, got -0\.1"),
    Bad("rate as text", lambda: FedAvgStrategy(lr="0.1"), TypeError, r"lr must be a number, got '0\.1' of type str"),
    Bad("NaN as rate", lambda: FedAvgStrategy(lr=float("nan")), ValueError, "lr must be >= 0, got nan"),
    Bad("clipping to nothing", lambda: FedAvgStrategy(max_norm=0), ValueError, "max_norm must be > 0, got 0"),
    Bad(
        "unknown optimizer",
        lambda: FedAvgStrategy(inner_optim="adamv"),
        ValueError,
        "optimizer must be one of .*'adam'.*, got 'adamv'; did you mean 'adam",
    ),
    Bad("an optimizer that is built", lambda: FedAvgStrategy(inner_optim=3), TypeError, "torch.optim class .* got 3"),
    Bad("closures", lambda: FedAvgStrategy(inner_optim="lbfgs"), ValueError, "LBFGS needs closures"),
    Bad("an optimizer that mixes nodes", lambda: fit(strategy=Mixing()), TypeError, "Adafactor .* would mix nodes"),
    Bad(
        "an outer optimizer for matrices only",
        lambda: fit(strategy=DiLoCoStrategy(outer_optim="muon")),
        ValueError,
        "Muon only supports 2D parameters",
    ),
    Bad(
        "unknown schedule",
        lambda: FedAvgStrategy(lr_scheduler="cosin"),
        ValueError,
        "lr_scheduler must be one of 'cosine', 'lambda_cosine', got 'cosin'; did you mean 'cosine'",
    ),
    Bad(
        "a schedule without effect",
        lambda: FedAvgStrategy(lr_scheduler_kwargs={"gamma": 0.1}),
        TypeError,
        "lr_scheduler_kwargs has no effect without lr_scheduler=",
    ),
    Bad(
        "an argument of an optimizer that it cannot take",
        lambda: OptimSpec("adamw", betas=0.9),
        TypeError,
        r"OptimSpec\(AdamW, betas=0\.9\) is not possible: 'float' object is not subscriptable",
    ),
    Bad("negative momentum", lambda: OptimSpec("sgd", momentum=-1), ValueError, "momentum=-1.* Invalid momentum value"),
    Bad("rate of a specification", lambda: OptimSpec("sgd", lr="x"), TypeError, r"OptimSpec\(SGD, lr='x'\) is not"),
    Bad("two kernels", lambda: OptimSpec("adam", fused=True, foreach=True), ValueError, "cannot be `True` together"),
    Bad("through the optimizer", lambda: OptimSpec("sgd", differentiable=True), ValueError, "differentiable=True"),
    Bad(
        "a schedule of no steps",
        lambda: FedAvgStrategy(lr_scheduler=StepLR, lr_scheduler_kwargs={"step_size": 0}),
        ValueError,
        r"lr_scheduler StepLR\(step_size=0\) is not possible: .*zero",
    ),
    Bad("half a schedule", lambda: FedAvgStrategy(lr_scheduler=StepLR), TypeError, r"StepLR\(\) .* 'step_size'"),
    *(
        Bad(
            f"{scheduler if isinstance(scheduler, type) else 'a made one'}",
            partial(FedAvgStrategy, lr_scheduler=scheduler),
            TypeError,
            rf"lr_scheduler .*{name}.* a subclass .*__init__\(self, optimizer\): super\(\).__init__\(.*LinearLR",
        )
        for name, scheduler in (
            ("SequentialLR", SequentialLR),
            ("ChainedScheduler", ChainedScheduler),
            ("ChainedScheduler", ChainedScheduler([StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 2)])),
        )
    ),
    Bad(
        "a schedule shorter than the run",
        lambda: fit(
            strategy=FedAvgStrategy(
                inner_optim="sgd", lr_scheduler=OneCycleLR, lr_scheduler_kwargs={"max_lr": 0.1, "total_steps": 3}
            ),
            max_steps=4,
        ),
        ValueError,
        "OneCycleLR is over after 3 steps, and the run has 4: give it total_steps=4",
    ),
    Bad(
        "arguments of a schedule in a list",
        lambda: FedAvgStrategy(lr_scheduler=StepLR, lr_scheduler_kwargs=[3]),
        TypeError,
        r"lr_scheduler_kwargs must be a dict of the scheduler's arguments, got \[3\]",
    ),
    Bad(
        "annealing in words", lambda: FedAvgStrategy(cosine_anneal="no"), TypeError, "cosine_anneal must be True or Fa"
    ),
    Bad("half a step of warm-up", lambda: FedAvgStrategy(warmup_steps=1.5), TypeError, "warmup_steps must be a whole"),
    Bad(
        "one module",
        lambda: CommunicateOptimizeStrategy(AveragingCommunicator()),
        TypeError,
        "must be a list of Commun",
    ),
    Bad(
        "no modules",
        lambda: CommunicateOptimizeStrategy(None),
        TypeError,
        "communication_modules must be a list of .* N",
    ),
    Bad("SPARTA of nothing", lambda: SPARTAStrategy(p_sparta=0), ValueError, "p_sparta must be > 0 and <= 1, got 0"),
    Bad("SPARTA of twice all", lambda: SPARTAStrategy(p_sparta=2), ValueError, "p_sparta must be > 0 and <= 1, got 2"),
    Bad("SPARTA never", lambda: SPARTAStrategy(sparta_interval=0), ValueError, "sparta_interval must be .*, got 0"),
    Bad(
        "class of a compressor",
        lambda: DiLoCoStrategy(average=compress(TopK)),
        TypeError,
        "compressor must be a Compressor obj",
    ),
    Bad(
        "tiles of nothing", lambda: DeMoStrategy(compression_chunk=0), ValueError, "compression_chunk must be .*, got 0"
    ),
    # Execution
    Bad("shuffled in words", lambda: fit(shuffle="no"), TypeError, "shuffle must be True or False, got 'no'"),
    Bad("a dtype for autocast", lambda: fit(autocast="fp16"), TypeError, "autocast must be True or False, got 'fp16'"),
    Bad(
        "exact in words", lambda: fit(deterministic="yes"), TypeError, "deterministic must be True or False, got 'yes'"
    ),
    Bad(
        "a seed beyond torch's", lambda: fit(seed=2**64), ValueError, "seed must be a whole number from 0 to 9223372036"
    ),
    Bad(
        "no hook",
        lambda: fit(train_loss_hook=3),
        TypeError,
        r"train_loss_hook must be a function of \(step, loss\), got 3",
    ),
    Bad(
        "a clock without use",
        lambda: fit(compute=0.8, network="1 Gbit/s"),
        TypeError,
        "compute and network have no effect with SimpleReduceStrategy, which trains in lockstep; price the history",
    ),
    Bad("no clock", lambda: fit(strategy=Asynchronous()), TypeError, r"Asynchronous is asynchronous: .*compute=Comp"),
    Bad(
        "a clock of others",
        lambda: fit(strategy=Asynchronous(), compute=Compute(1, speeds=[1, 2, 3])),
        ValueError,
        "compute has 3 nodes, and the run 2",
    ),
    Bad(
        "asynchronous processes",
        lambda: fit(strategy=Asynchronous(), compute=1, backend="process"),
        ValueError,
        "Asynchronous: asynchronous strategies are simulated only, got backend='process'",
    ),
    Bad(
        "layers of a phase",
        lambda: fit(strategy=Asynchronous(), compute=Compute(1, layers=3)),
        ValueError,
        "layers has no effect with Asynchronous",
    ),
    Bad(
        "a price of what depends on time",
        lambda: vsim.price(Asynchronous(), parameters=1e6, num_nodes=2, max_steps=2, network=1e9, compute=1),
        ValueError,
        "Asynchronous is asynchronous: what it sends depends on how long nodes compute",
    ),
    Bad(
        "asynchronous bits",
        lambda: vsim.verify(small_mlp(), vectors(), Asynchronous(), 2),
        ValueError,
        "Asynchronous: asynchronous strategies are simulated only",
    ),
    Bad("a name with a zero", lambda: fit(run_name="a\0b"), ValueError, "run_name must name a folder"),
    Bad("a number for a folder", lambda: fit(save_dir=3), TypeError, "save_dir must be a path, got 3"),
    Bad(
        "a number for a run",
        lambda: fit(resume=3),
        TypeError,
        "resume, unless True .*, must be a path, got 3",
    ),
    Bad(
        "arguments of the loader in a list",
        lambda: fit(dataloader_kwargs=["drop_last"]),
        TypeError,
        r"dataloader_kwargs must be a dict of arguments of DataLoader, got \['drop_last'\]",
    ),
    Bad(
        "workers as text",
        lambda: fit(dataloader_kwargs={"num_workers": "2"}),
        TypeError,
        "dataloader_kwargs: num_workers must be a whole number, got '2'",
    ),
    Bad(
        "no collate function",
        lambda: fit(dataloader_kwargs={"collate_fn": "pad"}),
        TypeError,
        r"dataloader_kwargs: collate_fn must be a function of \(samples\), got 'pad'",
    ),
    Bad(
        "drop_last in words",
        lambda: fit(dataloader_kwargs={"drop_last": "no"}),
        TypeError,
        "drop_last must be True or False, got 'no'",
    ),
    Bad(
        "unknown executor",
        lambda: fit(executor="map"),
        ValueError,
        "executor must be one of 'auto', 'vmap', 'loop', got 'map'",
    ),
    Bad("unknown device", lambda: fit(device="gpu"), ValueError, "unknown device 'gpu'; this machine has .*cpu"),
    Bad(
        "unknown device of a trainer",
        lambda: Trainer(small_mlp(), vectors(), device="tpu0"),
        ValueError,
        "unknown device 'tpu0'; this machine has .*cpu",
    ),
    Bad("device of a kind", lambda: fit(device=[1]), ValueError, r"unknown device \[1\]; this machine has"),
    Bad(
        "absent device",
        lambda: fit(device="meta"),
        ValueError,
        "device 'meta' is not available; this machine has .*cpu",
    ),
    Bad(
        "another word for compile",
        lambda: fit(compile="trace"),
        TypeError,
        "compile must be True or False, got 'trace'",
    ),
    Bad(
        "a loop in chunks",
        lambda: fit(executor="loop", chunk_size=2),
        ValueError,
        "chunk_size=2 has no effect with executor='loop'",
    ),
    Bad(
        "a compiled loop",
        lambda: fit(executor="loop", compile=True),
        ValueError,
        "compile=True has no effect with executor='loop'",
    ),
    Bad("no chunk", lambda: fit(chunk_size=0), ValueError, "chunk_size must be .*1.*got 0"),
    Bad(
        "processes in chunks",
        lambda: fit(backend="process", chunk_size=2),
        ValueError,
        "chunk_size=2 has no effect with backend='process'",
    ),
    Bad(
        "exact and half as precise",
        lambda: fit(deterministic=True, autocast=True),
        ValueError,
        "deterministic=True is bitwise equal to eager float32, which autocast=True is not",
    ),
    Bad(
        "a hook that is never called",
        lambda: fit(eval_loss_hook=print),
        ValueError,
        "eval_loss_hook has no effect without a val_dataset",
    ),
    # What has no effect, or makes no sense
    Bad("a trillion nodes", lambda: fit(num_nodes=10**12), ValueError, r"num_nodes=1000000000000 nodes take .* GB at"),
    Bad(
        "a trillion nodes with their own data",
        lambda: fit(num_nodes=10**12, data=lambda rank, num_nodes, train: vectors()),
        ValueError,
        "num_nodes=1000000000000 nodes take .* at most [0-9]+ fit",
    ),
    Bad(
        "a trillion processes",
        lambda: fit(num_nodes=10**12, backend="process"),
        ValueError,
        "num_nodes=1000000000000 nodes take .* at most [0-9]+ fit",
    ),
    Bad("the eighth CPU", lambda: fit(device="cpu:7"), ValueError, "device 'cpu:7' is not available; this machine has"),
    Bad(
        "a number for a name",
        lambda: fit(dataloader_kwargs={3: 1}),
        TypeError,
        "dataloader_kwargs got an unknown argument 3. Valid: num_workers",
    ),
    *(
        Bad(
            f"{name} of the loader",
            partial(fit, dataloader_kwargs={name: value}),
            error,
            f"dataloader_kwargs: {name} must be {allowed}",
        )
        for name, value, error, allowed in [
            ("pin_memory", "x", TypeError, "True or False, got 'x'"),
            ("persistent_workers", 1, TypeError, "True or False, got 1"),
            ("in_order", None, TypeError, "True or False, got None"),
            ("timeout", -1, ValueError, ">= 0, got -1"),
            ("prefetch_factor", "2", TypeError, "a whole number, got '2'"),
        ]
    ),
    Bad("a name that is too long", lambda: fit(run_name="a" * 300), ValueError, "run_name .* at most 200 bytes; got"),
    Bad("an empty name", lambda: fit(run_name=""), ValueError, "run_name must name a folder .*; got ''"),
    Bad("clipping never", lambda: Strategy(max_norm=float("inf")), ValueError, "max_norm must be > 0 and finite, got"),
    Bad("rate without end", lambda: Strategy(lr=float("inf")), ValueError, "lr must be >= 0 and finite, got inf"),
    Bad("rate of a spec", lambda: OptimSpec("sgd", lr=float("inf")), ValueError, r"SGD, lr=inf\) .* lr must be finite"),
    Bad("no outer rate", lambda: DiLoCoStrategy(outer_lr=0), ValueError, "outer_lr must be > 0, got 0: the outer"),
    Bad(
        "no rate of an outer optimizer",
        lambda: DiLoCoStrategy(outer_optim=OptimSpec("sgd", lr=0.0)),
        ValueError,
        "outer_lr must be > 0",
    ),
    Bad(
        "averages of averages",
        lambda: Strategy([GradientAverage(), GradientAverage("median")]),
        ValueError,
        r"Strategy\(\): communication_modules has the same GradientAverage twice",
    ),
    Bad(
        "one module at two places", lambda: Strategy([DiLoCoCommunicator(2)] * 2), ValueError, "same DiLoCoCommunicator"
    ),
    Bad("a strategy without a base", lambda: fit(strategy=Unmade()), TypeError, r"Unmade.__init__\(\) must call super"),
    Bad(
        "a number to reduce",
        lambda: fit(strategy=Sends(3.0)),
        ValueError,
        r"all_reduce\(\) takes a stacked tensor.*got 3",
    ),
    Bad(
        "a vector of one node", lambda: fit(strategy=Sends(torch.ones(7))), ValueError, r"each of 2 nodes in front; got"
    ),
    Bad("a step that is two", lambda: fit(strategy=Twice()), TypeError, "Twice: step 1 is counted twice; call super"),
    *(
        Bad(
            f"{strategy.__name__} with an average of rows to {name}",
            lambda of=of, strategy=strategy, more=more: fit(strategy=strategy(average=of, **more)),  # type: ignore[misc]
            ValueError,
            r"must make \(\d+,\) of \(2, \d+\), got ",
        )
        for strategy, more in ((SimpleReduceStrategy, {}), (FedAvgStrategy, {}), (DiLoCoStrategy, {"H": 1}))
        for name, of in {
            "rows": lambda rows, _: rows,
            "a number": lambda rows, _: rows.mean(),
            "nothing": lambda rows, _: None,
        }.items()
    ),
    *(
        Bad(
            f"a compressor that returns {found}",
            lambda compressor=compressor: fit(strategy=DiLoCoStrategy(H=1, average=compress(compressor))),  # type: ignore[misc]
            TypeError,
            rf"exchange\(\) must return the averages of what it is given, a list of 1 tensors; got {found}$",
        )
        for compressor, found in ((Bare(), "Tensor"), (Silent(), "NoneType"))
    ),
    *(
        Bad(
            f"{type(strategy).__name__} with a compressor that does not average",
            lambda strategy=strategy: fit(strategy=strategy),  # type: ignore[misc]
            ValueError,
            r"Rows.exchange\(\) must return the average of the nodes, a shared tensor \(\d+,\); got \(2, \d+\)",
        )
        for strategy in (
            SimpleReduceStrategy(average=compress(Rows())),
            DiLoCoStrategy(H=1, average=compress(Rows())),
        )
    ),
    Bad("a step that is none", lambda: fit(strategy=Idle()), TypeError, r"Idle.step\(\) must end with super\(\).step"),
    Bad("a number of seeds", lambda: compared(seeds=3), TypeError, "seeds must be a list, got 3"),
    Bad("a run without a name", lambda: compared(""), ValueError, "every strategy needs a name, .* one is empty"),
    Bad("a number for a name of a run", lambda: compared(3), TypeError, "names of strategies must be strings, got 3"),
]


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.name)
def test_bad_input(bad: Bad) -> None:
    with pytest.raises(bad.error) as caught:
        bad.call()
    assert type(caught.value) is bad.error
    text = " ".join(map(str, caught.value.args))
    assert re.search(bad.message, text, re.DOTALL), text


def test_the_table_has_every_row_once() -> None:
    assert len({bad.name for bad in TABLE}) == len(TABLE)


@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_errors_do_not_depend_on_the_executor(executor: str) -> None:
    for loss, message in [
        (lambda o, y: F.cross_entropy(o, y, reduction="none"), r"must be a scalar .* shape \(15,\)"),
        (lambda o, y: None, "got NoneType"),
        (lambda o, y: y.float().mean(), "does not depend on any trainable parameter"),
    ]:
        with pytest.raises(ValueError, match=message):
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
CLASSIFIER = partial(nn.Linear, 12, 5)
GIVEN = r"the model or its loss raised this at step 1, given batch\[0\]: float32 \(15, 12\), batch\[1\]: int64 \(15,\)"

# A model or loss, its input, and what the error must say in addition to PyTorch's message.
MISFITS: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "no loss_fn": (CLASSIFIER, vectors(), None, rf"{GIVEN}.*model\(batch\), with a tuple of 2.*needs loss_fn="),
    "in parts": (
        Own,
        tokens(),
        None,
        r"takes idx, following: give .*\(batch\) returns the loss of model\(\*batch",
    ),
    "by name": (
        ByName,
        NAMED,
        None,
        r"takes input_ids, labels: give .*\(batch\) returns model\(\*\*batch\)\.loss",
    ),
    "nested": (CLASSIFIER, [((x, x), y) for x, y in vectors()], F.cross_entropy, r"called as model\(x\).* a list of 2"),
    "too narrow": (CLASSIFIER, TensorDataset(X[:, :7], Y), F.cross_entropy, r"\(15, 7\).*weight, has shape \(5, 12\)"),
    "keeps": (Keeps, vectors(), None, "last (keeps a tensor of an earlier call|in forward).*make it a buffer"),
    **{
        f"x of {kind}": (
            CLASSIFIER,
            TensorDataset(X.to(kind), Y),
            F.cross_entropy,
            r"weights are torch\.float32.*x\.fl",
        )
        for kind in (torch.float64, torch.float16, torch.complex64, torch.int64)
    },
    **{
        f"y of {kind}": (
            CLASSIFIER,
            TensorDataset(X, Y.to(kind)),
            F.cross_entropy,
            r"labels are torch\.int64 \(y\.l",
        )
        for kind in (torch.float32, torch.bool, torch.int32)
    },
    **{
        f"y + {shift}": (CLASSIFIER, TensorDataset(X, Y + shift), F.cross_entropy, f"from {shift} to .* count from 0")
        for shift in (3, -3)
    },
}


@pytest.mark.parametrize("executor", ["auto", "vmap", "loop"])
@pytest.mark.parametrize(("model", "data", "loss_fn", "message"), MISFITS.values(), ids=MISFITS)
def test_what_a_model_was_given(model: Any, data: Any, loss_fn: Any, message: str, executor: str) -> None:
    with pytest.raises((TypeError, RuntimeError, IndexError, AttributeError)) as caught:
        fit(model(), data, loss_fn=loss_fn, executor=executor)
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)
    assert "functorch_wrapped" not in str(caught.value)


def test_labels_of_the_validation_data_that_the_model_does_not_know() -> None:
    with pytest.raises(IndexError, match=r"Target . is out of bounds.*in the validation after step 0, given .* 3 to 7"):
        fit(CLASSIFIER(), val=TensorDataset(X, Y + 3), loss_fn=F.cross_entropy)


@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_outputs_that_hold_the_loss(executor: str) -> None:
    def weights(wrapped: Callable[[Tensor], Any]) -> Tensor:
        torch.manual_seed(0)
        trained = fit(Model(lambda outputs, y: wrapped(F.cross_entropy(outputs, y))), vectors(), executor=executor)
        return torch.cat([p.detach().flatten() for p in trained.parameters()])

    with torch.random.fork_rng():
        forms = (lambda loss: loss, lambda loss: {"loss": loss}, Outputs, lambda loss: (loss.expand(3), loss))
        alone, *others = map(weights, forms)
    assert all(torch.equal(alone, other) for other in others)
    with pytest.raises(ValueError, match="must be a scalar tensor, or outputs with one called loss, got NoneType"):
        fit(Model(lambda outputs, y: Outputs(None)), executor=executor)
    with pytest.raises(ValueError, match=r"got tuple of \(Tensor, Tensor\); return the loss alone"):
        fit(Model(lambda outputs, y: (outputs.mean(), outputs.sum())), executor=executor)  # which of them?
    with pytest.raises(ValueError, match=r"got tuple of \(Tensor\); return the loss alone"):
        fit(Model(lambda outputs, y: (outputs,)), executor=executor)


def test_a_model_that_fails_under_vmap_trains_in_the_loop() -> None:
    ours = fit(Model(selecting), executor="loop")
    assert isinstance(ours, Model)


def test_what_is_allowed_after_an_error() -> None:
    # A trainer and a strategy that were given something wrong are as good as new.
    trainer, strategy = Trainer(small_gpt(), tokens()), FedAvgStrategy(island_size=3)
    run = partial(trainer.fit, strategy=strategy, max_steps=2, progress=False)
    with pytest.raises(ValueError, match="island_size"):
        run(num_nodes=2)
    with pytest.raises(ValueError, match="fewer than the 50 nodes"):
        run(num_nodes=50)
    assert isinstance(run(num_nodes=4), nn.Module)


def test_numbers_without_bounds() -> None:
    with pytest.raises(ValueError, match="x must be > 0 and <= 1, got 2"):
        real_number("x", 2, above=0, at_most=1)
    with pytest.raises(ValueError, match="x must be finite, got nan"):
        real_number("x", float("nan"))


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


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "absent.txt"))):
        text_file(tmp_path / "absent.txt")
