"""Checkpoints: what a run is after a step, in one file.

The file is in the safetensors format: tensors, and a JSON text that says what they are, so that reading it never runs
code. A checksum over both tells whether a byte has changed. It is written under another name, flushed to the disk and
then renamed, so that there is the old file or the new one, and never half of one.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vsim.arguments import real_number, whole_number
from vsim.cluster.collectives import reduce_rows
from vsim.cluster.ledger import Event, Ledger
from vsim.cluster.replicas import Replicas, Views
from vsim.cluster.state import CheckpointError, Shard
from vsim.records.history import COLUMNS, History

__all__ = ["Checkpoint", "CheckpointError", "checkpoints_in", "latest_checkpoint", "load_checkpoint"]

FORMAT = 1
# In a folder, so many are kept: the newest, and one to fall back on.
KEPT = 2
_NAME = re.compile(r"step-(\d{8,})\.safetensors")
# What safetensors has a name for. Other dtypes are stored as their bytes.
_STORED = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
}


@dataclass(eq=False)
class Checkpoint:
    """A run as it was after a step.

    Attributes:
        step: t, completed optimizer steps.
        num_nodes: K.
        history, ledger: the record of the run up to this step.
        examples: that all nodes had trained on. seconds: of training.
        fingerprint: what the run was: argument → value.
        shards: the state, one of all nodes together (from the simulator), or one of every node (from its process).
        path: the file that it was loaded from, if it was.
        forks: whether a run that starts from it is a new one; see `fork`. keeps_optimizer: whether the fork's inner
            optimizer goes on with its state, where it fits.
    """

    step: int
    num_nodes: int
    history: History
    ledger: Ledger
    examples: int
    seconds: float
    fingerprint: dict[str, Any]
    shards: list[Shard]
    path: Path | None = None
    forks: bool = False
    keeps_optimizer: bool = True

    @property
    def together(self) -> bool:
        """Whether the nodes were rows of one matrix."""
        return len(self.shards) == 1

    @property
    def weights(self) -> Tensor:
        """Stacked (K, P), on the CPU."""
        rows = torch.cat([shard.tensor(shard.tree["weights"]) for shard in self.shards])
        return rows.expand(self.num_nodes, -1)  # equal nodes may share one row

    @property
    def buffers(self) -> Views:
        """Name → stacked (K, *shape), on the CPU."""
        own = [{name: shard.tensor(node) for name, node in shard.tree["buffers"]["items"]} for shard in self.shards]
        return {name: torch.cat([buffers[name] for buffers in own]) for name in own[0]}

    def mean_weights(self) -> Tensor:
        """Return the mean replica, shared (P,); equal replicas are it as they are."""
        weights = self.weights
        return weights[0].clone() if _equal_rows(weights) else reduce_rows(weights, "mean")

    def mean_buffers(self) -> Views:
        """Return name → shared buffer: the mean over the nodes where it is floating, else node 0's."""
        return {
            name: b[0].clone() if _equal_rows(b) or not (b.is_floating_point() or b.is_complex()) else b.mean(0)
            for name, b in self.buffers.items()
        }

    def model(self, like: nn.Module, node: int | None = None) -> nn.Module:
        """Return a copy of the model `like` with the weights and buffers of this step.

        Args:
            like: the model that was trained, or one with the same parameters and buffers.
            node: whose; None for the mean of all nodes, which is what `fit` returns.

        Raises:
            CheckpointError: `like` has other parameters or buffers.
            IndexError: there is no such node.
        """
        skeleton = Replicas.of(like, 1, torch.device("cpu"))
        self.check_layout(layout_of(skeleton))
        if node is None:
            return skeleton.as_module(self.mean_weights(), self.mean_buffers(), like)
        if not 0 <= node < self.num_nodes:
            raise IndexError(f"node must be from 0 to {self.num_nodes - 1}, got {node}")
        return skeleton.as_module(self.weights[node], {n: b[node] for n, b in self.buffers.items()}, like)

    def fork(self, optimizer: bool = True) -> Checkpoint:
        """Return this checkpoint as the start of a new run: `fit(resume=checkpoint.fork(), strategy=…, num_nodes=…)`.

        Strategy, number of nodes, batch size, data, seed and learning rate may be others; the model must have the same
        parameters. Step, examples and the position in the data (that of the new run's order at this step) and in the
        learning-rate schedule go on. With the same K every node goes on with its own weights, buffers and stream of
        random numbers, with another K all start from the mean. A strategy's own state (outer weights, residuals, means
        on their way) starts anew, from the mean replica. History and ledger start at this step, with 0 bytes; those of
        the run so far stay with the checkpoint.

        Args:
            optimizer: keep the state of the nodes' inner optimizers where it fits: the same K, optimizer class, device
                and `deterministic`, and options that keep the same tensors. False: it starts anew.
        """
        forked = copy.copy(self)
        forked.forks, forked.keeps_optimizer = True, optimizer
        return forked

    def save(self, path: str | Path) -> None:
        """Write the file `path` atomically; its folder must exist."""
        _write(self, Path(path))

    def check_layout(self, layout: Mapping[str, Any]) -> None:
        """Raise a CheckpointError if a model has other parameters or buffers than this one's."""
        changes = list(differences({k: self.fingerprint.get(k) for k in layout}, layout))
        if changes:
            raise CheckpointError(f"the checkpoint is of another model: {'; '.join(changes)}")

    def __repr__(self) -> str:
        where = f" from {self.path}" if self.path else ""
        return f"Checkpoint(step {self.step}, {self.num_nodes} nodes, {self.fingerprint.get('strategy', '')}{where})"


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint in a file, or the newest one in a folder that can be used.

    Nothing in it is executed. Where the newest of a folder is damaged, a UserWarning says so, and the one before it is
    returned.

    Raises:
        CheckpointError: there is none, it is damaged, or it is something else.

    Example:
        >>> import tempfile, vsim
        >>> from vsim.data import digits
        >>> from vsim.models import MLP
        >>> from vsim.strategy import DiLoCoStrategy, FedAvgStrategy
        >>> trainer = vsim.Trainer(MLP(seed=0), digits()[0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = trainer.fit(
        ...         strategy=DiLoCoStrategy(H=2), num_nodes=4, max_steps=6, save_dir=folder, progress=False
        ...     )
        ...     checkpoint = vsim.load_checkpoint(folder)
        >>> checkpoint.step, tuple(checkpoint.weights.shape)
        (6, (4, 26122))
        >>> _ = trainer.fit(
        ...     strategy=FedAvgStrategy(H=2), num_nodes=8, max_steps=8, resume=checkpoint.fork(), progress=False
        ... )
        >>> trainer.history["step"].tolist()
        [6.0, 7.0, 8.0]
    """
    path = Path(path)
    if not path.is_dir():
        return _read(path)
    found = checkpoints_in(path)
    if not found:
        raise CheckpointError(f"there is no checkpoint in the folder {path}")
    problems: list[str] = []
    for candidate in reversed(found):
        try:
            checkpoint = _read(candidate)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if problems:
            warnings.warn(f"{'; '.join(problems)}; using {candidate.name} instead", UserWarning, stacklevel=2)
        return checkpoint
    raise CheckpointError(f"no checkpoint in the folder {path} can be used: {'; '.join(problems)}")


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return `folder` if there is a checkpoint in it, else None.

    `fit(…, save_dir=d, resume=latest_checkpoint(d))` goes on with a run where there is one, and else starts it.
    """
    return Path(folder) if checkpoints_in(Path(folder)) else None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the files of checkpoints in a folder, by step; none where there is no folder."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where in a folder the checkpoint of a step is."""
    return folder / f"step-{step:08d}.safetensors"


def step_of(path: Path) -> int:
    """Return the step that the name of a checkpoint says."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def prepare_folder(folder: Path) -> None:
    """Make a folder for checkpoints, and remove what writing was cut off in the middle of.

    Raises:
        CheckpointError: it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".step-*.part"):
            left.unlink()
        probe = folder / f".step-{os.getpid()}.part"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(f"save_dir {str(folder)!r} cannot be written to: {error}") from error


def prune(folder: Path, step: int) -> None:
    """Remove all checkpoints up to `step` but the newest."""
    for old in [path for path in checkpoints_in(folder) if step_of(path) <= step][:-KEPT]:
        with suppress(FileNotFoundError):
            old.unlink()


def layout_of(replicas: Replicas) -> dict[str, Any]:
    """Return what a model's weights and buffers are: the part of the fingerprint that a fork must share."""
    return {
        **{f"parameter {c.name}": [list(c.shape), str(replicas.weights.dtype)] for c in replicas.layout},
        **{f"buffer {name}": [list(b.shape[1:]), str(b.dtype)] for name, b in replicas.buffers.items()},
        "parameters": [c.name for c in replicas.layout],
        "buffers": list(replicas.buffers),
    }


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> Iterable[str]:
    """Yield what differs between two fingerprints, in words."""
    for name in dict.fromkeys([*saved, *given]):
        before, now = (side.get(name) for side in (saved, given))
        if before != now:
            yield f"{name} was {_shown(before)} and is {_shown(now)}"


def _shown(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _equal_rows(stacked: Tensor) -> bool:
    return torch.equal(stacked, stacked[:1].expand_as(stacked))


# The file ------------------------------------------------------------------------------------------------------------


def _write(checkpoint: Checkpoint, path: Path) -> None:
    from safetensors.torch import save_file  # here, as only who saves needs it

    tensors = _record_tensors(checkpoint)
    trees: dict[str, int] = {}  # processes have the same, mostly; so for their shared tensors
    keys: dict[tuple[int, str], list[str]] = {}
    shards: list[dict[str, Any]] = []
    for shard in checkpoint.shards:
        tree = json.dumps(shard.tree)
        own = []
        for number, storage in enumerate(shard.storages):
            alike = keys.setdefault((number, f"{storage.dtype}{storage.numel()}"), [])
            stored = storage if storage.dtype in _STORED else storage.view(torch.uint8)
            key = next((key for key in alike[:1] if _same_bytes(tensors[key], stored)), None)
            if key is None:
                key = f"{len(shards)}/{number}"
                tensors[key] = stored
                alike.append(key)
            own.append([key, str(storage.dtype).removeprefix("torch.")])
        shards.append({"tree": trees.setdefault(tree, len(trees)), "starts": shard.starts, "storages": own})
    text = json.dumps(
        {
            "format": FORMAT,
            "step": checkpoint.step,
            "num_nodes": checkpoint.num_nodes,
            "examples": checkpoint.examples,
            "seconds": checkpoint.seconds,
            "fingerprint": checkpoint.fingerprint,
            "record": _record_text(checkpoint),
            "trees": [json.loads(tree) for tree in trees],
            "shards": shards,
        }
    )
    part = path.with_name(f".{path.stem}.{os.getpid()}.part")
    try:
        save_file(tensors, part, {"vsim": text, "sha256": _checksum(text, tensors)})
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system lets a folder be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _read(path: Path) -> Checkpoint:
    from safetensors import SafetensorError, safe_open

    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path} is empty")
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if not {"vsim", "sha256"} <= metadata.keys():
                raise CheckpointError(f"{path} is a safetensors file, but not a checkpoint of vsim")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (SafetensorError, UnicodeDecodeError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of vsim, or is torn: {error}") from error
    if metadata["sha256"] != _checksum(metadata["vsim"], tensors):
        raise CheckpointError(f"{path} is damaged: its contents do not have their checksum")
    try:
        saved = json.loads(metadata["vsim"])
        if saved["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {saved['format']}, and this version of vsim reads {FORMAT}")
        shards = [
            Shard(
                saved["trees"][shard["tree"]],
                shard["starts"],
                [tensors[key].view(_dtype(name)) for key, name in shard["storages"]],
            )
            for shard in saved["shards"]
        ]
        history, ledger = _record(saved["record"], tensors)
        numbers = {key: saved[key] for key in ("step", "num_nodes", "examples", "seconds", "fingerprint")}
        for key in ("step", "num_nodes", "examples"):
            whole_number(key, saved[key], at_least=0)
        real_number("seconds", saved["seconds"], at_least=0)
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} does not hold what a checkpoint of vsim holds: {error!r}") from error
    return Checkpoint(**numbers, history=history, ledger=ledger, shards=shards, path=path.absolute())


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return dtype


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for key in sorted(tensors):
        tensor = tensors[key]
        digest.update(f"\n{key} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bytes(_bytes(a)) == bytes(_bytes(b))


# The record of the run -----------------------------------------------------------------------------------------------


def _record_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    history, ledger = checkpoint.history, checkpoint.ledger
    numbers = [(e.step, e.payload_bytes, e.wire_bytes, e.total_wire_bytes) for e in ledger]
    names = _names(ledger)
    tables = [{name: i for i, name in enumerate(column)} for column in names]
    which = [[table[key] for table, key in zip(tables, _key(e), strict=True)] for e in ledger]
    return {
        "history": torch.from_numpy(np.stack([history[name] for name in COLUMNS])),
        "node_losses": torch.from_numpy(history.node_losses.copy()),
        "ledger": torch.tensor(numbers, dtype=torch.float64).view(-1, 4),
        "ledger_names": torch.tensor(which, dtype=torch.int32).view(-1, 3),
    }


def _key(event: Event) -> tuple[Any, ...]:
    return event.collective, event.label, event.group_sizes


def _names(ledger: Ledger) -> list[list[Any]]:
    columns = list(zip(*(_key(event) for event in ledger), strict=True)) or [(), (), ()]
    return [list(dict.fromkeys(column)) for column in columns]


def _record_text(checkpoint: Checkpoint) -> dict[str, Any]:
    history = checkpoint.history
    return {
        "strategy": history.strategy,
        "executor": history.executor,
        "columns": list(COLUMNS),
        "ledger_names": _names(checkpoint.ledger),
    }


def _record(text: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[History, Ledger]:
    columns = dict(zip(text["columns"], tensors["history"].tolist(), strict=True))
    losses = tensors["node_losses"].numpy()
    history = History(text["strategy"], losses.shape[1])
    history.executor = text["executor"]
    rows = len(columns["step"])
    for i in range(rows):
        done = i - (rows - len(losses))
        history.append({name: column[i] for name, column in columns.items()}, losses[done] if done >= 0 else None)
    ledger = Ledger()
    collectives, labels, sizes = text["ledger_names"]
    for numbers, (a, b, c) in zip(tensors["ledger"].tolist(), tensors["ledger_names"].tolist(), strict=True):
        step, payload_bytes, wire_bytes, total = numbers
        event = Event(int(step), collectives[a], labels[b], payload_bytes, wire_bytes, total, tuple(sizes[c]))
        ledger.record(event)
    return history, ledger


def copy_record(checkpoint: Checkpoint, history: History | None, ledger: Ledger | None) -> None:
    """Fill an empty history, or ledger, with what the checkpoint's run did."""
    if history is not None:
        losses = checkpoint.history.node_losses
        first = len(checkpoint.history) - len(losses)
        columns = {name: checkpoint.history[name].tolist() for name in COLUMNS}
        for i in range(len(checkpoint.history)):
            row = {name: column[i] for name, column in columns.items()}
            history.append(row, losses[i - first] if i >= first else None)
        history.executor = checkpoint.history.executor
    if ledger is not None:
        for event in checkpoint.ledger:
            ledger.record(event)
