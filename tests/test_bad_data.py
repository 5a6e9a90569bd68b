"""Datasets, files and records that are not what they should be."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from separate import small_gpt, small_mlp, tokens, vectors
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import vsim
from vsim import DilocoSimulator, Trainer
from vsim.data import mnist, text_file
from vsim.logger import CSVLogger, TensorBoardLogger
from vsim.strategy import FedAvgStrategy, SimpleReduceStrategy, Strategy
from vsim_cli import main


def fit(model: nn.Module | None = None, data: Any = None, val: Any = None, **options: Any) -> Trainer:
    trainer = Trainer(model or small_mlp(), vectors() if data is None else data, val)
    options = {"strategy": SimpleReduceStrategy(), "num_nodes": 2, "max_steps": 2, "progress": False, **options}
    trainer.fit(**options)
    return trainer


class Examples(Dataset[Any]):
    """Example i is f(i)."""

    def __init__(self, example: Callable[[int], Any], count: int = 29) -> None:
        self.example, self.count = example, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.example(index)


def example(index: int, width: int = 12) -> tuple[Tensor, Tensor]:
    return torch.full((width,), float(index)), torch.tensor(index % 5)


# Datasets ------------------------------------------------------------------------------------------------------------

UNFIT = {
    "ragged": (lambda i: example(i, 12 - i % 2), "stack expects each tensor to be equal size"),
    "nothing": (lambda i: None, "found <class 'NoneType'>"),
    "fields": (lambda i: example(i) if i % 2 else example(i)[0], ""),
    "lengths": (lambda i: example(i)[: 1 + i % 2], "each element in list of batch should be of equal size"),
    "names": (lambda i: {"x": torch.ones(1)} if i % 2 else {"y": torch.ones(1)}, "'[xy]'"),
}


@pytest.mark.parametrize("where", ["train", "val", "own"])
@pytest.mark.parametrize(("made", "message"), UNFIT.values(), ids=UNFIT)
def test_examples_that_do_not_fit_together(made: Any, message: str, where: str) -> None:
    data = Examples(made)
    given: dict[str, Any] = {
        "train": {"data": data},
        "val": {"val": data},
        "own": {"data": lambda rank, num_nodes, train: data},
    }[where]
    with pytest.raises(ValueError, match=f"cannot be put into one batch: .*{message}.*collate_fn"):
        fit(**given)


def test_datasets_of_the_nodes_that_do_not_fit_together() -> None:
    x, y = vectors().tensors
    for other, message in [
        (TensorDataset(x), r"different numbers of fields: \[1, 2\]"),
        (TensorDataset(x[:, :5], y), r"different shapes, \[\(16, 5\), \(16, 12\)\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            fit(data=lambda rank, num_nodes, train, other=other: vectors() if rank else other)


def test_collate_functions_that_do_not_fit_together() -> None:
    turns = iter(range(99))

    def collate(samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        return batch if next(turns) % 2 else {"x": batch[0]}

    with pytest.raises(ValueError, match="the nodes' batches have different fields and cannot be stacked"):
        fit(dataloader_kwargs={"collate_fn": collate})


def broken(index: int) -> Any:
    if index == 20:
        raise OSError("the disk is gone")
    return example(index)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_a_dataset_raises_names_example_node_and_step(workers: int) -> None:
    # In order: node 0 has 0, 2, 4, …, four a step, so that 20 is its third of step 3.
    shared: dict[str, Any] = {"data": Examples(broken), "shuffle": False, "batch_size": 4, "max_steps": 9}
    options = {"dataloader_kwargs": {"num_workers": workers}}
    with pytest.raises(OSError, match=r"batches of step 3: (?s:.*)example 20 of the dataset, of node 0: the disk"):
        fit(**shared, **options)
    own = {**shared, "data": lambda rank, num_nodes, train: Examples(broken if rank else example)}
    with pytest.raises(OSError, match=r"batches of step 6: (?s:.*)example 20 of the dataset, of node 1: the disk"):
        fit(**own, **options)
    with pytest.raises(OSError, match=r"^example 20 of the dataset: the disk is gone"):
        fit(val=Examples(broken))
    with pytest.raises(OSError, match="examples 0, 2, 4, 6, 1, 3, 5, 7 of the dataset, of node 0, 1: not there"):
        fit(**{**shared, "data": AtOnce(example)})


class AtOnce(Examples):
    def __getitems__(self, indices: list[int]) -> Any:
        raise OSError("not there")


def test_a_length_that_is_not_so() -> None:
    listed = [example(i) for i in range(9)]
    with pytest.raises(IndexError, match=r"step 2: example 10 of the dataset, of node 0: list .* \(its length is 29\)"):
        fit(data=Examples(listed.__getitem__), shuffle=False, batch_size=4, max_steps=9)


class Unlucky(Exception):
    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"{index}: {reason}")


def test_an_error_that_takes_more_than_a_text() -> None:
    def unlucky(index: int) -> Any:
        raise Unlucky(index, "gone")

    with pytest.raises(RuntimeError, match=r"step 1: .*Unlucky: example \d+ of .* node 0: \d+: gone") as caught:
        fit(data=Examples(unlucky))
    assert isinstance(caught.value.__cause__.__cause__, Unlucky)  # type: ignore[union-attr]


def test_one_example() -> None:
    assert len(fit(data=vectors(1), num_nodes=1).history) == 3
    with pytest.raises(ValueError, match="has 1 examples, fewer than the 4 nodes; lower num_nodes"):
        fit(data=vectors(1), num_nodes=4)
    assert len(fit(data=lambda rank, num_nodes, train: vectors(1, seed=rank), num_nodes=4).history) == 3


def test_examples_without_numbers() -> None:
    extra = fit(data=Examples(lambda i: (*example(i), torch.ones(0))), model=FirstTwo())
    assert np.array_equal(extra.history.node_losses, fit(data=Examples(example)).history.node_losses)


class FirstTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = small_mlp()

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.model(batch[:2])


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        (lambda rank, num_nodes, train: None, TypeError, r"train_dataset\(0, 2, True\) must be a dataset .* NoneType"),
        (lambda rank: vectors(), TypeError, r"train_dataset must be a function of \(rank, num_nodes, train_"),
        (lambda rank, num_nodes, train: [], ValueError, r"train_dataset\(0, 2, True\) is empty"),
        (lambda rank, num_nodes, train: vectors().missing, AttributeError, "missing"),
    ],
    ids=["none", "arguments", "empty", "raises"],
)
def test_factories(factory: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fit(data=factory)


@pytest.mark.parametrize("executor", ["auto", "vmap", "loop"])
def test_labels_and_tokens_out_of_range(executor: str) -> None:
    # As in eager PyTorch, an index out of range raises: the vectorized forms must not read outside of a node's row.
    x, y = vectors().tensors
    ids, targets = tokens().tensors
    for shift in (3, -3, 10**9):
        with pytest.raises(IndexError, match="is out of bounds"):
            fit(data=TensorDataset(x, y + shift), executor=executor)
        with pytest.raises(IndexError, match="out of range"):
            fit(small_gpt(), TensorDataset(ids + shift * 4, targets), executor=executor)
    for wrong in (TensorDataset(x, y.float()), TensorDataset(x.long(), y)):
        with pytest.raises(RuntimeError, match=r"dtype|scalar type"):  # as torch 2.13 has it, or as before
            fit(data=wrong, executor=executor)


def test_inputs_that_are_not_numbers() -> None:
    x, y = vectors().tensors
    x = x.clone()
    x[11] = torch.nan
    with pytest.raises(FloatingPointError, match=r"non-finite loss at step 2 on nodes \[1\] \(node 1: nan\)"):
        fit(
            data=TensorDataset(x, y), shuffle=False, batch_size=4, max_steps=9
        )  # 11 is node 1's sixth: its second batch


def test_validation_that_is_not_a_number_is_said_once() -> None:
    x, y = vectors().tensors
    lost = TensorDataset(x * torch.nan, y)
    with pytest.warns(
        UserWarning, match="non-finite validation loss at step 0, where the training loss is fin"
    ) as said:
        fit(val=lost, max_steps=6, val_interval=2)
    assert len(said) == 1
    # Where training has diverged as well, its error says so.
    with pytest.raises(FloatingPointError, match="non-finite loss at step 2"):
        fit(val=vectors(), strategy=Strategy(inner_optim="sgd", lr=1e38), max_steps=9, val_interval=1)


# Weights -------------------------------------------------------------------------------------------------------------


def test_weights_that_no_later_loss_tells_of(tmp_path: Path) -> None:
    with pytest.raises(
        FloatingPointError, match=r"non-finite weights after step 1 on nodes \[0, 1\]\. A lower learning"
    ):
        fit(strategy=Lost(), max_steps=1)
    # Nor are they saved: the checkpoint before stays the newest.
    with pytest.raises(FloatingPointError, match="non-finite weights after step 3"):
        fit(strategy=Late(inner_optim="sgd", lr=0.1), max_steps=9, save_dir=tmp_path, checkpoint_interval=1)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step-0000000{t}.safetensors" for t in (1, 2)]
    # One node alone is named; two that are finite may have a mean that is not.
    with pytest.raises(FloatingPointError, match=r"non-finite weights after step 3 on nodes \[1\]"):
        fit(strategy=Late(inner_optim="sgd", lr=0.1), max_steps=3)
    with pytest.raises(FloatingPointError, match=r"non-finite mean of the nodes' weights after step 1"):
        fit(strategy=Huge(), max_steps=1)


class Late(Strategy):
    def step(self) -> None:
        super().step()
        if self.local_step == 3:
            next(self.model.parameters())[-1] = torch.nan


class Lost(Strategy):
    def step(self) -> None:
        super().step()
        next(self.model.parameters()).fill_(torch.inf)


class Huge(Strategy):
    def step(self) -> None:
        super().step()
        weights = next(self.model.parameters())
        weights.fill_(3e38)
        weights[-1] = 2.9e38


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "got 0 characters"),
        (b"too short", "got 9 characters"),
        (bytes(range(256)) * 20, "is not utf-8 text"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 4000, "is not utf-8 text"),
    ],
    ids=["empty", "short", "binary", "picture"],
)
def test_files_that_are_no_text(contents: bytes, message: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=message):
        text_file(path)
    assert main(["compare", "--text", str(path), "--steps", "1", "--quiet"]) == 2
    assert message in capsys.readouterr().err


def idx(ndim: int, shape: list[int], contents: bytes) -> bytes:
    return b"".join(n.to_bytes(4, "big") for n in [0x0800 | ndim, *shape]) + contents


IMAGES, LABELS = idx(3, [2, 4, 4], bytes(32)), idx(1, [2], bytes([1, 2]))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (b"", LABELS, "is cut short: 0 bytes"),
        (IMAGES[:10], LABELS, "not even a header of 16"),
        (IMAGES[:-1], LABELS, r"is cut short: 47 bytes; 48 for shape \(2, 4, 4\) expected"),
        (IMAGES + b"1", LABELS, "is too long: 49 bytes"),
        (LABELS, LABELS, "starts with magic number 2049; 2051 is needed"),
        (b"GIF89a" + IMAGES, LABELS, "starts with magic number"),
        (IMAGES, LABELS[:-1], "is cut short"),
        (IMAGES, idx(1, [1], b"1"), "2 images and .* 1 labels"),
        (idx(3, [2**32 - 1, 2**32 - 1, 2**32 - 1], b""), LABELS, "is cut short"),
    ],
    ids=["empty", "header", "cut", "long", "kind", "picture", "labels cut", "counts", "huge"],
)
def test_files_that_are_not_mnists(images: bytes, labels: bytes, message: str, tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(images)
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(ValueError, match=message):
        mnist(tmp_path)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def damaged(content: Any, path: list[Any], value: Any) -> Any:
    """Return a copy with what is at `path` replaced, or with `...` left out."""
    content = json.loads(json.dumps(content))
    place = content
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return content


def test_records_that_are_damaged(tmp_path: Path) -> None:
    train, val = vectors(), vectors(8, seed=1)
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 2, "progress": False}
    comparison = vsim.compare(small_mlp(), train, val, strategies={"one": FedAvgStrategy()}, **options)
    path = tmp_path / "record.json"
    comparison["one"].history.to_json(path)
    history = json.loads(path.read_text())
    for place, value, message in [
        (["columns"], 3, "History.to_json writes"),
        (["columns", "step"], ..., "it lacks 'step'"),
        (["columns", "step", 1], "one", "could not convert"),
        (["columns", "lr"], [1, 2], "column 'lr' has 2 values, and 'step' 3"),
        (["strategy"], ..., "it lacks 'strategy'"),
        (["node_losses", 0], [1, 2, 3], "does not have 2 values a step, one a node"),
        (["ledger"], ..., "it lacks 'ledger'"),
        (["node_losses"], ..., "was not written by History.to_json: it lacks"),
        (["node_losses", 0], {"a": 1}, "could not convert|does not have"),
    ]:
        path.write_text(json.dumps(damaged(history, place, value)))
        with pytest.raises(ValueError, match=f"record.json .*({message})"):
            vsim.History.from_json(path)
    comparison.to_json(path)
    whole = path.read_text()
    for place, value in [
        (["runs"], 3),
        (["runs", 0], "run"),
        (["runs", 0, "history"], ...),
        (["runs", 0, "history", "columns", "lr"], [1]),
        (["runs", 0, "history", "ledger", "events"], [[1, 2]]),
        (["runs", 0, "history", "ledger", "kinds", 0, 1], "shout"),
        (["runs", 0, "history", "ledger", "kinds", 0, 4], [[0, 2]]),
        (["runs", 0, "failure"], ...),
    ]:
        path.write_text(json.dumps(damaged(json.loads(whole), place, value)))
        with pytest.raises(ValueError, match=r"record\.json does not hold what Comparison\.to_json writes"):
            vsim.Comparison.from_json(path)
    for contents in (
        whole[: len(whole) // 2].encode(),
        b"",
        b"\xff\xfe\0",
        b"[" * 100_000,
        pickle.dumps(Trap(path / "x")),
    ):
        path.write_bytes(contents)
        for cls in (vsim.History, vsim.Comparison):
            with pytest.raises(ValueError, match=r"record\.json is not (JSON|text)"):
                cls.from_json(path)
    assert not (tmp_path / "x").exists()


def test_folders_for_logs_that_are_files(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    for logger in (CSVLogger(tmp_path / "logs"), TensorBoardLogger(tmp_path / "logs")):
        with pytest.raises(NotADirectoryError, match="logs"):
            fit(logger=logger, run_name="run")
    with pytest.raises(TypeError, match="log_dir must be a path, got 3"):
        CSVLogger(3)  # type: ignore[arg-type]


# Other faces ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_dataset": None}, "train_dataset must be a dataset with __getitem__ and __len__, .* got NoneType"),
        ({"train_dataset": lambda rank: 3}, "train_dataset must be a dataset"),
        ({"model_cls": lambda: 3}, "model must be a torch.nn.Module, got int"),
        ({"model_cls": small_mlp()}, "model_cls must be a class"),
        ({"optimizer_kwargs": {"rate": 1}}, "AdamW got an unknown argument 'rate'"),
        ({"optimizer_kwargs": {"betas": 0.9}}, "betas=0.9.* is not possible"),
        ({"cosine_anneal": "yes"}, "cosine_anneal must be True or False, got 'yes'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_the_face_of_diloco_sim(options: dict[str, Any], message: str) -> None:
    given = {"model_cls": small_mlp, "loss_fn": F.cross_entropy, "train_dataset": vectors(), **options}
    with pytest.raises(TypeError, match=message):
        DilocoSimulator(max_local_step=2, **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--val-interval", "0"], "val_interval must be a whole number >= 1, got 0"),
        (["--out", "taken"], "--out taken is a file; give a folder"),
        (["--strategies", "diloco:H=0"], "H must be a whole number >= 1, got 0"),
        (["--strategies", "diloco:H="], "expected argument=value after the colon, got 'H='"),
        (["--strategies", "sparta:p_sparta=2"], "p_sparta must be > 0 and <= 1, got 2"),
        (["--strategies", ""], "strategy must be one of"),
        (["--lr", "nan"], "lr must be >= 0, got nan"),
        (["--seed", "-1"], "seeds must be a whole number >= 0, got -1"),
        (["--batch-size", "0"], "batch_size must be a whole number >= 1, got 0"),
        (["--checkpoint-interval", "3"], "checkpoint_interval has no effect without save_dir"),
        (["--device", "abacus"], "unknown device 'abacus'"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_the_command_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("")
    assert main(["compare", "--data", "digits", "--model", "mlp", "--steps", "2", "--quiet", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1
    assert "loss" not in said.out


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation": 2}], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_data_that_are_not_finite_are_told_so(value: float, options: dict[str, Any]) -> None:
    x, y = vectors().tensors
    x = x.clone()
    x[5, 3] = value
    with pytest.raises(FloatingPointError, match=r"non-finite loss at step \d on nodes .* not finite: batch\[0\]$"):
        fit(data=TensorDataset(x, y), max_steps=9, batch_size=4, **options)
    with pytest.raises(FloatingPointError, match="A lower learning rate"):
        fit(max_steps=9, strategy=SimpleReduceStrategy(inner_optim="sgd", lr=1e30))
