"""Datasets, files and records that are not what they should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from reference_cluster import small_gpt, small_mlp, tokens, vectors
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


def test_batches_of_the_nodes_that_do_not_fit_together() -> None:
    x, y = vectors().tensors
    for other, said in ((TensorDataset(x), "[1, 2]"), (TensorDataset(x[:, :5], y), "[(16, 5), (16, 12)]")):
        with refused(ValueError, said):
            fit(data=lambda rank, num_nodes, train, other=other: vectors() if rank else other)
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


class AtOnce(Examples):
    def __getitems__(self, indices: list[int]) -> Any:
        raise OSError("not there")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_a_dataset_raises_names_example_node_and_step(workers: int) -> None:
    # In order: node 0 has 0, 2, 4, …, four a step, so that 20 is its third of step 3.
    options = {"dataloader_kwargs": {"num_workers": workers}, "shuffle": False, "batch_size": 4, "max_steps": 9}
    listed = [example(i) for i in range(9)]
    for data, error, said in (
        (Examples(broken), OSError, "step 3 … example 20 … node 0 … the disk"),
        (lambda rank, *_: Examples(broken if rank else example), OSError, "step 6 … example 20 … node 1 … the disk"),
        (AtOnce(example), OSError, "examples 0, 2, 4, 6, 1, 3, 5, 7 … node 0, 1 … not there"),
        (Examples(listed.__getitem__), IndexError, "step 2 … example 10 … node 0 … its length is 29"),
    ):
        with refused(error, said):
            fit(data=data, **options)
    with refused(OSError, "example 20 … the disk is gone"):
        fit(val=Examples(broken))


class Unlucky(Exception):
    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"{index}: {reason}")


def test_an_error_that_takes_more_than_a_text() -> None:
    def unlucky(index: int) -> Any:
        raise Unlucky(index, "gone")

    with pytest.raises(RuntimeError, match=r"step 1: .*Unlucky: example \d+ of .* node 0: \d+: gone") as caught:
        fit(data=Examples(unlucky))
    assert isinstance(caught.value.__cause__.__cause__, Unlucky)


class FirstTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = small_mlp()

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.model(batch[:2])


def test_one_example_and_tensors_without_numbers() -> None:
    assert len(fit(data=vectors(1), num_nodes=1).history) == 3
    assert len(fit(data=lambda rank, num_nodes, train: vectors(1, seed=rank), num_nodes=4).history) == 3
    extra = fit(data=Examples(lambda i: (*example(i), torch.ones(0))), model=FirstTwo())
    assert np.array_equal(extra.history.node_losses, fit(data=Examples(example)).history.node_losses)


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


def test_what_is_not_finite_is_told_of() -> None:
    x, y = vectors().tensors
    with pytest.warns(UserWarning, match="non-finite validation loss at step 0") as said:
        fit(val=TensorDataset(x * torch.nan, y), max_steps=6, val_interval=2)
    assert len(said) == 1
    # Where training has diverged as well, its error says so.
    with refused(FloatingPointError, "loss at step 2"):
        fit(val=vectors(), strategy=Strategy(inner_optim="sgd", lr=1e38), max_steps=9, val_interval=1)
    x[5, 3] = float("inf")
    with refused(FloatingPointError, "non-finite loss … not finite: batch[0]"):
        fit(data=TensorDataset(x, y), max_steps=9, batch_size=4, gradient_accumulation=2)
    with refused(FloatingPointError, "lower learning rate"):
        fit(max_steps=9, strategy=SimpleReduceStrategy(inner_optim="sgd", lr=1e30))


class Lost(Strategy):
    """After a step the first tensor holds these numbers: in all nodes but the last, and in the last one."""

    def __init__(self, step: int, first: float, last: float) -> None:
        super().__init__(inner_optim="sgd", lr=0.1)
        self.at, self.first, self.last = step, first, last

    def step(self) -> None:
        super().step()
        if self.local_step == self.at:
            weights = next(self.model.parameters())
            weights.fill_(self.first)
            weights[-1] = self.last


def test_weights_that_no_later_loss_tells_of(tmp_path: Path) -> None:
    inf, nan = torch.inf, torch.nan
    with refused(FloatingPointError, "weights after step 1 … nodes [0, 1]"):
        fit(strategy=Lost(1, inf, inf), max_steps=1)
    # Nor are they saved: the checkpoint before stays the newest.
    with refused(FloatingPointError, "weights after step 3"):
        fit(strategy=Lost(3, 0, nan), max_steps=9, save_dir=tmp_path, checkpoint_interval=1)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step-0000000{t}.safetensors" for t in (1, 2)]
    # One node alone is named; two that are finite may have a mean that is not.
    with refused(FloatingPointError, "weights after step 3 … nodes [1]"):
        fit(strategy=Lost(3, 0, nan), max_steps=3)
    with refused(FloatingPointError, "mean of the nodes' weights after step 1"):
        fit(strategy=Lost(1, 3e38, 2.9e38), max_steps=1)


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


@pytest.fixture(scope="module")
def comparison() -> vsim.Comparison:
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 2, "progress": False}
    return vsim.compare(small_mlp(), vectors(), vectors(8, seed=1), strategies={"one": FedAvgStrategy()}, **options)


# In a record, where something is missing (...) or something else, and what the error says.
DAMAGES: list[tuple[list[Any], Any, str]] = [
    (["columns"], 3, "History.to_json"),
    (["columns", "step"], ..., "step"),
    (["columns", "step", 1], "one", ""),
    (["columns", "lr"], [1, 2], "lr … 2 … step … 3"),
    (["strategy"], ..., "strategy"),
    (["node_losses", 0], [1, 2, 3], "2 values a step"),
    (["node_losses", 0], {"a": 1}, ""),
    (["ledger"], ..., "ledger"),
    (["ledger", "events"], [[1, 2]], ""),
    (["ledger", "kinds", 0, 1], "shout", ""),
    (["ledger", "kinds", 0, 4], [[0, 2]], ""),
]
OF_COMPARISONS: list[tuple[list[Any], Any, str]] = [
    (["runs"], 3, ""),
    (["runs", 0], "run", ""),
    (["runs", 0, "history"], ..., ""),
    (["runs", 0, "failure"], ..., ""),
    *((["runs", 0, "history", *path], value, "") for path, value, _ in DAMAGES),
]


@pytest.mark.parametrize(("cls", "damages"), [(vsim.History, DAMAGES), (vsim.Comparison, OF_COMPARISONS)])
def test_records_that_are_damaged(comparison: vsim.Comparison, cls: Any, damages: Any, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    (comparison if cls is vsim.Comparison else comparison["one"].history).to_json(path)
    text = path.read_text()
    for (*above, key), value, said in damages:
        content = place = json.loads(text)
        for name in above:
            place = place[name]
        if value is ...:
            del place[key]
        else:
            place[key] = value
        path.write_text(json.dumps(content))
        with refused(ValueError, f"record.json … {cls.__name__}.to_json", said):
            cls.from_json(path)


def test_folders_for_logs_that_are_files(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    for logger in (CSVLogger(tmp_path / "logs"), TensorBoardLogger(tmp_path / "logs")):
        with pytest.raises(NotADirectoryError, match="logs"):
            fit(logger=logger, run_name="run")
