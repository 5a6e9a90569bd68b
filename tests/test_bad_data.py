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
from errors import refused, unnamed
from separate import small_gpt, small_mlp, tokens, vectors
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import vsim
from vsim import Trainer
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


@pytest.mark.parametrize(
    ("where", "made", "said"),
    [
        ("data", lambda i: example(i, 12 - i % 2), "equal size"),
        ("val", lambda i: None, "NoneType"),
        ("own", lambda i: example(i) if i % 2 else example(i)[0], ""),
        ("val", lambda i: example(i)[: 1 + i % 2], "equal size"),
        ("data", lambda i: {"x": torch.ones(1)} if i % 2 else {"y": torch.ones(1)}, ""),
    ],
    ids=["ragged", "nothing", "fields", "lengths", "names"],
)
def test_examples_that_do_not_fit_together(where: str, made: Any, said: str) -> None:
    data: Any = Examples(made)
    with refused(ValueError, "one batch … collate_fn", said):
        fit(**{"data": lambda rank, num_nodes, train: data} if where == "own" else {where: data})


def test_datasets_of_the_nodes_that_do_not_fit_together() -> None:
    x, y = vectors().tensors
    for other, said in ((TensorDataset(x), "[1, 2]"), (TensorDataset(x[:, :5], y), "[(16, 5), (16, 12)]")):
        with refused(ValueError, said):
            fit(data=lambda rank, num_nodes, train, other=other: vectors() if rank else other)


def test_collate_functions_that_do_not_fit_together() -> None:
    turns = iter(range(99))

    def collate(samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        return batch if next(turns) % 2 else {"x": batch[0]}

    with refused(ValueError, "nodes … batches … fields"):
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
    with refused(OSError, "step 3 … example 20 … node 0 … the disk"):
        fit(**shared, **options)
    own = {**shared, "data": lambda rank, num_nodes, train: Examples(broken if rank else example)}
    with refused(OSError, "step 6 … example 20 … node 1 … the disk"):
        fit(**own, **options)
    with refused(OSError, "example 20 … the disk is gone"):
        fit(val=Examples(broken))
    with refused(OSError, "examples 0, 2, 4, 6, 1, 3, 5, 7 … node 0, 1 … not there"):
        fit(**{**shared, "data": AtOnce(example)})
    listed = [example(i) for i in range(9)]
    with refused(IndexError, "step 2 … example 10 … node 0 … its length is 29"):
        fit(**{**shared, "data": Examples(listed.__getitem__)})


class AtOnce(Examples):
    def __getitems__(self, indices: list[int]) -> Any:
        raise OSError("not there")


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


def test_factories() -> None:
    with refused(TypeError, "train_dataset … (rank, num_nodes, train_dataset)"):
        fit(data=lambda rank: vectors())
    with refused(AttributeError, "missing"):
        fit(data=lambda rank, num_nodes, train: vectors().missing)


@pytest.mark.parametrize("executor", ["auto", "vmap", "loop"])
def test_tokens_out_of_range(executor: str) -> None:
    # As in eager PyTorch, an index out of range raises: the vectorized forms must not read outside of a node's row.
    ids, targets = tokens().tensors
    for shift in (12, -12, 10**9):
        with pytest.raises(IndexError, match="out of range"):
            fit(small_gpt(), TensorDataset(ids + shift, targets), executor=executor)


def test_validation_that_is_not_a_number_is_said_once() -> None:
    x, y = vectors().tensors
    with pytest.warns(UserWarning, match="non-finite validation loss at step 0") as said:
        fit(val=TensorDataset(x * torch.nan, y), max_steps=6, val_interval=2)
    assert len(said) == 1
    # Where training has diverged as well, its error says so.
    with refused(FloatingPointError, "loss at step 2"):
        fit(val=vectors(), strategy=Strategy(inner_optim="sgd", lr=1e38), max_steps=9, val_interval=1)


# Weights -------------------------------------------------------------------------------------------------------------


def test_weights_that_no_later_loss_tells_of(tmp_path: Path) -> None:
    with refused(FloatingPointError, "weights after step 1 … nodes [0, 1]"):
        fit(strategy=Lost(), max_steps=1)
    # Nor are they saved: the checkpoint before stays the newest.
    with refused(FloatingPointError, "weights after step 3"):
        fit(strategy=Late(inner_optim="sgd", lr=0.1), max_steps=9, save_dir=tmp_path, checkpoint_interval=1)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step-0000000{t}.safetensors" for t in (1, 2)]
    # One node alone is named; two that are finite may have a mean that is not.
    with refused(FloatingPointError, "weights after step 3 … nodes [1]"):
        fit(strategy=Late(inner_optim="sgd", lr=0.1), max_steps=3)
    with refused(FloatingPointError, "mean of the nodes' weights after step 1"):
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
    ("contents", "said"),
    [(b"", "got 0"), (b"too short", "got 9"), (b"\x89PNG\r\n\x1a\n" + b"\0" * 4000, "utf-8")],
)
def test_files_that_are_no_text(contents: bytes, said: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(contents)
    with refused(ValueError, "text.txt", said):
        text_file(path)
    assert main(["compare", "--text", str(path), "--steps", "1", "--quiet"]) == 2
    assert said in capsys.readouterr().err


def idx(ndim: int, shape: list[int], contents: bytes) -> bytes:
    return b"".join(n.to_bytes(4, "big") for n in [0x0800 | ndim, *shape]) + contents


IMAGES, LABELS = idx(3, [2, 4, 4], bytes(32)), idx(1, [2], bytes([1, 2]))


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (b"", LABELS, "cut short … 0 bytes"),
        (IMAGES[:10], LABELS, "header of 16"),
        (IMAGES[:-1], LABELS, "cut short … 47 bytes … 48 … (2, 4, 4)"),
        (IMAGES + b"1", LABELS, "too long … 49 bytes"),
        (LABELS, LABELS, "magic number 2049 … 2051"),
        (b"GIF89a" + IMAGES, LABELS, "magic number"),
        (IMAGES, LABELS[:-1], "cut short"),
        (IMAGES, idx(1, [1], b"1"), "2 images … 1 labels"),
        (idx(3, [2**32 - 1, 2**32 - 1, 2**32 - 1], b""), LABELS, "cut short"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_are_not_mnists(images: bytes, labels: bytes, said: str, tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(images)
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    with refused(ValueError, "ubyte", said):
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
    for place, value, said in [
        (["columns"], 3, "History.to_json"),
        (["columns", "step"], ..., "step"),
        (["columns", "step", 1], "one", ""),
        (["columns", "lr"], [1, 2], "lr … 2 … step … 3"),
        (["strategy"], ..., "strategy"),
        (["node_losses", 0], [1, 2, 3], "2 values a step"),
        (["ledger"], ..., "ledger"),
        (["node_losses"], ..., "node_losses"),
        (["node_losses", 0], {"a": 1}, ""),
    ]:
        path.write_text(json.dumps(damaged(history, place, value)))
        with refused(ValueError, "record.json", said):
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
        with refused(ValueError, "record.json … Comparison.to_json"):
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
            with refused(ValueError, "record.json is not"):
                cls.from_json(path)
    assert not (tmp_path / "x").exists()


def test_folders_for_logs_that_are_files(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    for logger in (CSVLogger(tmp_path / "logs"), TensorBoardLogger(tmp_path / "logs")):
        with pytest.raises(NotADirectoryError, match="logs"):
            fit(logger=logger, run_name="run")


# Other faces ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--val-interval", "0"], "val_interval … 0"),
        (["--out", "taken"], "--out taken … folder"),
        (["--strategies", "diloco:H="], "argument=value … H="),
        (["--strategies", "sparta:p_sparta=2"], "p_sparta … 2"),
        (["--strategies", ""], "strategy"),
        (["--seed", "-1"], "seeds … -1"),
        (["--batch-size", "0"], "batch_size … >= 1 … 0"),
        (["--checkpoint-interval", "3"], "checkpoint_interval … save_dir"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_the_command_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("")
    assert main(["compare", "--data", "digits", "--model", "mlp", "--steps", "2", "--quiet", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not unnamed(err, said) and err.count("\n") == 1 and "loss" not in out


def test_data_that_are_not_finite_are_told_so() -> None:
    x, y = vectors().tensors
    x = x.clone()
    x[5, 3] = float("inf")
    with refused(FloatingPointError, "non-finite loss … not finite: batch[0]"):
        fit(data=TensorDataset(x, y), max_steps=9, batch_size=4, gradient_accumulation=2)
    with refused(FloatingPointError, "lower learning rate"):
        fit(max_steps=9, strategy=SimpleReduceStrategy(inner_optim="sgd", lr=1e30))
