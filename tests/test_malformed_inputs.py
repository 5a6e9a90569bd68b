"""Every parameter of every public function refuses nonsense by name, before training, or takes it knowingly."""

from __future__ import annotations

import inspect
import pkgutil
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from comparisons_by_hand import comparison as made
from comparisons_by_hand import run
from reference_cluster import small_mlp, vectors
from torch import nn

import vsim
import vsim.data
import vsim.models
import vsim.network
import vsim.scaling
import vsim.strategy
from vsim.core.fields import OPTIONS
from vsim.logger import CSVLogger
from vsim.strategy import DiLoCoStrategy, RandomIndexSelector, SimpleReduceStrategy, Strategy, TopK

resource = pytest.importorskip("resource")  # not on Windows

# Values that are nonsense for most parameters, each made where it is given.
NONSENSE: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "[]": list,
    "''": str,
    "b'x'": lambda: b"x",
    "10**400": lambda: 10**400,
    "-1": lambda: -1,
    "0.5": lambda: 0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1e39": lambda: 1e39,  # beyond float32
    "array": lambda: np.array([1, 2]),
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "[None]": lambda: [None],
    "class": lambda: int,
    "lambda": lambda: lambda: None,
    "object": object,
    "dict": lambda: {"a": 1},
    "1j": lambda: 1j,
    "True": lambda: True,
    "'{'": lambda: "{",
    "'%s'": lambda: "%s",
    "'25MB'": lambda: "25MB",
}
SECONDS, BYTES = 60, 2**32  # that a call may take, in time and address space
# Classes whose methods users call on what runs return. Other classes are given to vsim, which calls their methods.
OF_RESULTS = (
    *(vsim.Checkpoint, vsim.Comparison, vsim.History, vsim.Ladder, vsim.Sweep, vsim.Timeline),
    *(vsim.data.Partition, vsim.scaling.Law),
)


def public() -> dict[str, Callable[..., Any]]:
    """Name → every public function and class, and every method with arguments of `OF_RESULTS`.

    Public are the names in `__all__` of vsim and of the modules in it that users import from, and all functions of
    modules that are in `vsim.__all__` themselves.
    """
    modules = [
        vsim,
        *(getattr(vsim, one.name) for one in pkgutil.iter_modules(vsim.__path__) if hasattr(vsim, one.name)),
    ]
    found: dict[str, Callable[..., Any]] = {}
    for module in filter(inspect.ismodule, modules):
        names = getattr(module, "__all__", None)
        if names is None and module.__name__.rpartition(".")[2] in vsim.__all__:
            names = [name for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__]
        elif module.__name__.rpartition(".")[2] in INSIDE.split():
            continue
        for name in names or ():
            if name[0] != "_" and callable(one := getattr(module, name)):
                found.setdefault(name, one)
    known = set()
    for cls in OF_RESULTS:
        for name in dir(cls):
            static = inspect.getattr_static(cls, name)
            function = getattr(static, "__func__", static)
            if name[0] != "_" and getattr(function, "__module__", "").startswith("vsim") and function not in known:
                known.add(function)
                kinds = [p.kind for p in inspect.signature(getattr(cls, name)).parameters.values()]
                if [
                    kind
                    for kind in kinds[not hasattr(static, "__func__") :]
                    if kind is not inspect.Parameter.VAR_KEYWORD
                ]:
                    found[f"{cls.__name__}.{name}"] = function
    return found


# Packages whose names other packages of vsim use; users get their classes from vsim.
INSIDE = "algorithms analysis cluster compat core engine figures history measuring processes runs scale search verify"

# What is taken knowingly: why, the values, and the "function.parameter: annotation" that take them.
ACCEPTED = [
    (
        "left out",
        "None",
        r"None|diloco_2503_09799\.form|Optim|Personal|Fragments|AnyNetwork|AnyCompute|StrategyOptions",
    ),
    (
        "left out",
        "None",
        r"\.(callbacks|max_steps|num_workers|outer_lr|error_feedback)|DilocoSimulator\.(loss|cos|warm)",
    ),
    ("a flag", "True", r": .*bool|error_feedback"),
    ("a number", "0.5", r": .*(float|StrategyOptions)|compute|network|inside|between|(given|grid):"),
    ("a loss may have any sign", "-1", r"\.loss:"),
    ("no limit", "inf", r"\.(network|bandwidth|given|inside|between|server|patience):|^Pipeline\.within:"),
    ("one number for each node or point", "array tensor", r"compute|seconds_per_step|speeds|given|grid|bandwidths|lat"),
    ("whole numbers", "array", r"\.(seeds|sizes|steps|H|num_nodes|batch_size):"),
    ("any sequence is a dataset", "array tensor [None]", r"dataset:"),
    ("a path or name, looked up later", "'{' '%s' '25MB'", r"path|folder|_dir|store|(run_|experiment_)?name:|project"),
    ("what a run looks up when it starts", "'{' '%s' '25MB'", r"\.(monitor|only|personal):"),
    ("a number of bytes, as text", "'25MB'", r"^Compute\.memory:"),
    ("a title", "'{' '%s' '25MB'", r"\.title:"),
    ("no title, no pattern, and EXO Gym's default device", "''", r"figure\.title|\.(only|personal|device):"),
    ("none", "[]", r"select\.only|\.(logger|callbacks|columns|file|hidden|communication_modules):"),
    ("the default device", "[None]", r"\.devices:"),
    ("one node in a region", "dict", r"regions\.regions:"),
]
# Other words under which an error speaks of a parameter.
ALIASES_TEXT = """
    changes=Schedule cls=optimizer dataset=num_nodes file=Trace given=network|compute inner_lr=lr inside=region|links
    model_cls=model names=strategy optim_spec=inner_optim outer=outer_optim parts=average rest=optimizer
    speeds=seconds_per_step text=bandwidth train_dataset=dataset val_dataset=dataset
"""
ALIASES = dict(pair.split("=") for pair in ALIASES_TEXT.split())
# An error that is not about the value need not show it.
NOT_THE_VALUE = (
    "no effect|un(known|expected)|missing|needs|is empty|either|none|of shape|got 0|finite|dataset|node|model"
)

# Public, and not called here: made by runs and functions, or of options that have been checked; torch optimizers, built
# from an OptimSpec; without arguments, or with those of a parent; of a Trainer of another library; and no functions.
NOT_CALLED = """
    Batches Checkpoint ComparedRun Comparison Difference Event GroupAverage History Law Ledger Log Order Partition
    Prediction SavedRun Search Sweep TextDataset Timeline VerifyReport Vocabulary epoch_indices FedAdagrad FedAdam
    FedYogi Callback CheckpointError LocalTrainer Logger algorithm files_at
    from_trainer state
"""
# Methods of results that vsim calls, with values that it has checked or read from a file.
CALLED_BY_VSIM = """
    Checkpoint.check_layout Checkpoint.fill Comparison.add Comparison.has Comparison.holding Comparison.labels
    Comparison.looks Comparison.prices Comparison.pricing
    Comparison.pricing_of Comparison.spent History.amend History.append History.continue_from
    History.from_plain History.with_ledger History.measured History.bytes_per_node
    History.at_step History.crossing Sweep.labels Sweep.looks Sweep.of_points Sweep.sends_most
"""


class Accepted(BaseException):
    """Raised in place of training: nothing was found in the arguments."""


class Slow(BaseException):
    """Raised in a call that takes too long."""


class Call(NamedTuple):
    """A public function, and arguments that it takes."""

    name: str
    function: Callable[..., Any]
    given: dict[str, Any]
    without: frozenset[str] = frozenset()

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        kinds = inspect.Parameter
        found = inspect.signature(self.function).parameters.values()
        return {p.name: p for p in found if p.kind is not kinds.VAR_KEYWORD and p.name not in self.without}

    def __call__(self, **changed: Any) -> Any:
        given, parameters = {**self.given, **changed}, inspect.signature(self.function).parameters
        positional = [
            n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) and n in given
        ]
        return self.function(*[given.pop(name) for name in positional], **given)


def with_parameters(function: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    """Return a function of keywords with this signature: name → annotation."""
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=text) for name, text in names.items()]

    def called(**given: Any) -> Any:
        return function(**given)

    called.__signature__ = inspect.Signature(own)
    return called


def calls(folder: Path) -> list[Call]:
    model, data, train = small_mlp(), vectors(64), {"num_nodes": 2, "max_steps": 2, "batch_size": 4, "progress": False}
    problem = {"model": model, "train_dataset": data, "val_dataset": data}
    trainer = vsim.Trainer(**problem)
    options = {"participation": vsim.Schedule({1: [0]}), "save_dir": folder / "saved"}
    trainer.fit(**train, strategy=SimpleReduceStrategy(), **options)
    history, checkpoint = trainer.history, vsim.load_checkpoint(folder / "saved")
    strategies = {"a": SimpleReduceStrategy(lr=0.1), "b": DiLoCoStrategy(H=1, lr=0.1)}
    compared = vsim.compare(**problem, **train, strategies=strategies, seeds=[1, 2])
    settings = {"H": [1, 2], "lr": [0.1, 0.2]}
    swept = vsim.sweep(**problem, **train, strategy=DiLoCoStrategy, settings=settings)
    steps = {key: value for key, value in train.items() if key != "max_steps"}
    rungs = {**problem, **steps, "model": lambda width: nn.Linear(12, width), "sizes": [5, 6], "strategies": strategies}
    rungs["loss_fn"], target = F.cross_entropy, {"num_nodes": 2, "within": {"wire": "1 GB"}}
    climbed = vsim.ladder(**rungs, max_steps=2)
    climbed.save(folder / "ladder.json")
    frame = {"N": [1e6, 2e6, 4e6, 8e6], "loss": [4.0, 3.5, 3.0, 2.7]}
    dealt, loss = vsim.data.partition(data, 2, "iid"), compared.runs("a")[0].history.last("global_loss") + 1
    times, of_nodes = {"network": 1e6, "compute": 1.0}, {"strategy": SimpleReduceStrategy(), "num_nodes": 4}
    for name, result in (("compared", compared), ("history", history)):
        result.to_json(folder / f"{name}.json")
    (folder / "text.txt").write_text("abc " * 1000)
    options = inspect.signature(vsim.Trainer.fit).parameters

    def fit(**changed: Any) -> Any:
        for option in changed.keys() & {"log_x_axis", "log_interval"}:
            changed = {"logger": CSVLogger(folder / option), **changed}
        if changed.keys() & {"num_processes", "devices", "threads_per_process", "timeout_seconds"}:
            changed["backend"] = "process"
        if "checkpoint_interval" in changed:
            changed["save_dir"] = folder / "other"
        return vsim.Trainer(**problem).fit(**{"strategy": SimpleReduceStrategy(), **train, **changed})

    def trained(**given: Any) -> Any:
        return vsim.Trainer(**given).fit(**train, strategy=SimpleReduceStrategy())

    def swept_over(**given: Any) -> Any:
        own = {key: value for key, value in train.items() if key not in given}
        varied = {name: [value] for name, value in given.items()}
        return vsim.sweep(**problem, **own, strategy=DiLoCoStrategy, settings=varied)

    def looked_into(**given: Any) -> Any:
        (name, value), *_ = given.items()
        inside = {"metrics": {"m": value}, "callbacks": [value]}
        return fit(**{name: inside.get(name, {name: value})} if name in inside else {"dataloader_kwargs": given})

    of_trainer = {name: p.annotation for name, p in inspect.signature(vsim.Trainer).parameters.items()}
    of_fit = {name: p.annotation for name, p in options.items() if name != "self"}
    of_setting = {"H": "int", "outer_lr": "float", "num_nodes": "int", "batch_size": "int"}
    of_container = {"metrics": "", "callbacks": "", "num_workers": "int", "timeout": "float", "drop_last": "bool"}
    simulator = {"model_cls": lambda: nn.Linear(12, 5), "loss_fn": F.cross_entropy, "train_dataset": data}
    regions = {"regions": {"a": 2, "b": 2}, "inside": "1 Mbit/s, 1 ms", "between": ("1 Mbit/s", 0)}
    shared = frozenset(options) - {"strategy", "num_nodes"}
    found = [
        Call("Trainer", with_parameters(trained, of_trainer), problem),
        Call("Trainer.fit", with_parameters(fit, of_fit), {}),
        Call("inside an option", with_parameters(looked_into, of_container), {}),
        Call("a setting of a sweep", with_parameters(swept_over, of_setting), {}),
        Call("sweep", vsim.sweep, {**problem, **train, "strategy": DiLoCoStrategy, "settings": settings}, shared),
        Call("ladder", vsim.ladder, {**rungs, "max_steps": 2}, shared | {"tokens_per_parameter"}),
        Call("ladder, tokens", vsim.ladder, {**rungs, "tokens_per_parameter": 1.0}, shared | {"budget"}),
        Call("tune", vsim.tune, {**problem, **train, "space": lambda trial: DiLoCoStrategy(lr=0.1)}, shared),
    ]
    # Where a name is found that begins with that of its class: the result of a run, or what is public.
    places = {"Checkpoint": checkpoint, "Comparison": compared, "GPT": vsim.models.GPT(16), "History": history}
    places |= {
        "Law": vsim.scaling.fit(frame, bootstrap=0),
        "Ladder": climbed,
        "Partition": dealt,
        "Sweep": swept,
        "Timeline": history.time(1e6, 1.0),
    }
    own = public()
    # What takes other arguments than none, and those that it takes.
    paths = """
        Checkpoint.save=own.vsim Comparison.from_json=compared.json Comparison.report=report.html
        Comparison.to_csv=own.csv Comparison.to_json=own.json History.from_json=history.json History.to_csv=own.csv
        History.to_json=own.json Ladder.load=ladder.json read_comparison=compared.json
        Ladder.save=own.json load_checkpoint=saved load_ladder=ladder.json text_file=text.txt
    """
    needed: dict[str, dict[str, Any]] = {
        **{name: {"path": folder / file} for name, file in (pair.split("=") for pair in paths.split())},
        **dict.fromkeys(["Comparison.rows", "Comparison.table", "History.time"], times),
        **{name: {"folder": folder / "mnist"} for name in ("fashion_mnist", "mnist")},
        "AsynchronousStrategy": {"H": 1},
        "Ladder": {"comparisons": climbed.comparisons, "parameters": climbed.parameters},
        "fit": {"frame": frame, "bootstrap": 1},
        "penalty": {"comparison": made(a=[run([3.0, 2.0])], b=[run([3.0, 2.0])]), "to": "a", "loss": 2.5},
        "read_log": {"folder": folder / "log"},
        "read_comparisons": {"paths": [folder / "compared.json"]},
        "select": {"comparisons": {"compared": compared}, "only": ["a"]},
        "Attack": {"kind": "min_max", "share": 0.2},
        "Availability": {"p": [0.5, 1.0]},
        "FedAvgStrategy": {"island_size": 2},
        "ByLabel": {"counts": [[1, 2], [3, 0]]},
        "Checkpoint.model": {"like": model},
        "CommunicateOptimizeStrategy": {"communication_modules": []},
        "Comparison.at": {"parameters": 1e6},
        "Comparison.best": {"within": {"time": "10 h"}, **times},
        "Comparison.cheapest": {"loss": loss, **times},
        "Comparison.renamed": {"names": {"a": "c"}},
        "Comparison.runs": {"name": "a"},
        "Comparison.steps_to": {"loss": loss},
        "Comparison.winners": {"loss": loss, "compute": 1.0},
        "Compute": {"seconds_per_step": 1.0, "layers": 4, "jitter": 0.1},
        "Compute.from_flops": {"flops_per_step": 1e9, "flops_per_second": 1e12},
        "Compute.of": {"given": 1.0},
        "DayNight": {"period": 24},
        "Deadline": {"seconds": "adaptive"},
        "DilocoSimulator": {**simulator, "eval_dataset": data},
        "DropSlowest": {"share": 0.5},
        "Dropout": {"p": 0.5},
        "Every": {"H": 1},
        "GPT": {"vocab_size": 16},
        "GPT.generate": {"prompt": torch.zeros(1, 1).long(), "max_new_tokens": 1},
        "HierarchicalStrategy": {"levels": {2: 1, 4: 2}},
        "History.column": {"name": "step"},
        "History.last": {"column": "step"},
        "Ladder.decide": {**target, **times, "parameters": 1e6, "max_steps": 2},
        "Ladder.order": {"to": 1e6},
        "Network": {"bandwidth": 1e6},
        "Pipeline": {"tokens": 64, "within": 1e6, "stages": 2},
        "Network.between": {"bandwidth": [[1, 1], [1, 1]]},
        "Network.of": {"given": 1e6},
        "Network.parse": {"text": "1 Mbit/s"},
        "Network.regions": regions,
        "OptimSpec": {"cls": "sgd", "rest": "sgd"},
        "Partition.indices": {"rank": 0},
        "Partition.split": {"test": 0.5, "seed": 1},
        "PostLocal": {"warmup_steps": 1},
        "DPFedAvgStrategy": {"H": 1, "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5},
        "QSR": {"alpha": 1.0},
        "Partial": {"share": 0.5},
        "RandomGraph": {"degree": 2},
        "Sample": {"n": 2, "of": 4},
        "Schedule": {"changes": {0: [0, 1]}},
        "Seconds": {"seconds": 1.0},
        "SPARTAStrategy": {"index_selector": RandomIndexSelector(0.5)},
        "StateAverage": {"name": "exp_avg", "H": 2},
        "Sweep.heatmap": {"x": "H", "y": "lr"},
        "Trace": {"file": [(1, 0, "leave")]},
        "WandbLogger": {"project": "one"},
        "centered_clip": {"radius": 1.0},
        "clip": {"norm": 1.0},
        "compare": {**problem, **train, **times, "strategies": strategies},
        "compress": {"compressor": TopK(0.1), "error_feedback": True},
        "grid": {"strategy": DiLoCoStrategy},
        "latest_checkpoint": {"folder": folder / "saved"},
        "mnist1d": {"size": 10},
        "partition": {"dataset": data, "num_nodes": 2, "kind": "dirichlet", "alpha": 1.0},
        "partition, noise": {"dataset": data, "num_nodes": 2, "kind": "noise", "sigma": 1.0},
        "partition, power_law": {"dataset": data, "num_nodes": 2, "kind": "power_law", "exponent": 1.0, "min_size": 1},
        "partition, shards": {"dataset": data, "num_nodes": 2, "kind": "shards", "shards": 2},
        "price": {**of_nodes, **times, "max_steps": 4, "parameters": 1e6},
        "required_bandwidth": {**of_nodes, "parameters": 1e6, "compute": 1.0, "grid": [1e9], "max_steps": 2},
        "synthetic_federated": {"alpha": 1.0, "beta": 1.0, "num_clients": 2},
        "restarts": {"steps": 2},
        "timeline": {"run": history, **times},
        "verify": {**problem, **train, "strategy": SimpleReduceStrategy()},
    }
    known = {call.name for call in found} | {*NOT_CALLED.split(), *CALLED_BY_VSIM.split()}
    assert not {*NOT_CALLED.split(), *CALLED_BY_VSIM.split()} - own.keys()
    for name in sorted(own.keys() - known | needed.keys()):
        place, _, method = name.partition(",")[0].partition(".")
        one = getattr(places.get(place, own.get(place)), method) if method else own[place]
        found.append(Call(name, one, needed.get(name, {"p": 0.5} if name.endswith("IndexSelector") else {})))
    for name in OPTIONS[1:]:
        schedule = {"lr_scheduler": "cosine"} if name in ("warmup_steps", "cosine_anneal", "max_steps") else {}
        found.append(Call("Strategy", with_parameters(Strategy, {name: "StrategyOptions, bool"}), schedule))
    return found


@contextmanager
def limited() -> Iterator[None]:
    """End a call that takes too long."""

    def late(*_: Any) -> None:
        raise Slow

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def shows(text: str, value: Any) -> bool:
    """Whether an error shows a value, an entry of it, or its type."""
    entries = value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value
    parts = [value, *(entries if isinstance(entries, list | bytes) else ())]
    parts += [*entries.keys(), *entries.values()] if isinstance(entries, dict) else []
    texts = [t for one in parts for t in (type(one).__name__, getattr(one, "__qualname__", repr(one)), str(one))]
    return any(one[:12].lower() in text.lower() for one in texts)


def objection(call: Call, name: str, value: Any) -> str | None:
    """Return what is wrong with the error that a value raises; None if the value is accepted."""
    try:
        with limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(**{name: value})
        return None
    except Accepted:
        return None
    except KeyError as error:  # a look-up by name
        return "" if re.search("no (run|column)", str(error)) and shows(str(error), value) else f"KeyError: {error}"
    except (TypeError, ValueError, OSError) as error:
        text = str(error)
        if isinstance(value, str) and isinstance(error, OSError | vsim.CheckpointError) and value in text:
            return ""  # a path at which there is nothing
        names = rf"\b({name}|{ALIASES.get(name, name)})\b|unknown argument"
        if value is None and isinstance(error, FileNotFoundError) and re.search(names, text):
            return ""  # the default path, at which there is nothing
        if isinstance(error, OSError) or not re.search(names, text):
            return f"without the name: {type(error).__name__}: {text[:200]}"
        if not shows(text, value) and not re.search(NOT_THE_VALUE, text):
            return f"without the value: {text[:200]}"
        return f"long: {text[:200]} …" if len(text) > 1000 else ""
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        plt.close("all")


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def train(*_: Any, **__: Any) -> None:
        raise Accepted

    def replace() -> None:
        monkeypatch.setattr("vsim.trainer.train_in_processes", train)
        monkeypatch.setattr("vsim.trainer.fit", train)
        monkeypatch.setattr("vsim.runs.race.fit", train)

    return replace


@pytest.fixture
def little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":  # elsewhere the limit does not work
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
def test_nonsense(tmp_path, monkeypatch, untrained, little_memory) -> None:
    monkeypatch.chdir(tmp_path)
    table, wrong, used, count = calls(tmp_path), [], set(), 0
    untrained()
    for call in table:
        for name, parameter in call.parameters.items():
            where = f"{call.name}.{name}: {parameter.annotation}"
            for value, make in NONSENSE.items():
                (tmp_path / str(count)).mkdir()
                monkeypatch.chdir(tmp_path / str(count))
                count += 1
                found = objection(call, name, make())
                if found is None:
                    fits = [value in values.split() and re.search(place, where) for _, values, place in ACCEPTED]
                    rows = [row for row, fit in enumerate(fits) if fit]
                    used.update(rows)
                    found = "" if rows else "accepted"
                if found:
                    wrong.append(f"{call.name}.{name} = {value}: {found}")
    assert count > 13_000
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong])
    assert used == set(range(len(ACCEPTED)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("seeds", {"seeds": range(10**12)}),
        ("H", {"settings": {"H": range(1, 10**12)}}),
        ("num_nodes", {"num_nodes": 10**12}),
        ("minibatch_size", {"batch_size": 10**12, "minibatch_size": 7}),
    ],
)
def test_sizes_are_checked_before_memory(name: str, given: dict[str, Any], little_memory) -> None:
    options = {"strategy": DiLoCoStrategy, "settings": {"H": 1}, "num_nodes": 2, "max_steps": 1, "progress": False}
    with limited(), pytest.raises(ValueError, match=rf"\b{name}\b"):
        vsim.sweep(small_mlp(), vectors(), **{**options, **given})
