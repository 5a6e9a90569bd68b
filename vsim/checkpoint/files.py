"""Checkpoints: snapshots of a run after a step, each in one file.

The file is in the safetensors format: tensors, and a JSON text that describes them, so that reading it never runs
code. A checksum over both tells whether a byte has changed. The file is written under another name, flushed to the disk
and then renamed, so that there is the old file or the new one, and never half of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vsim.arguments import real_number, whole_number
from vsim.checkpoint.fingerprint import differences, layout_of
from vsim.checkpoint.folder import checkpoint_path, checkpoints_in, replacing, step_of
from vsim.checkpoint.snapshot import Shard, flat_bytes
from vsim.cluster.collectives import reduce_rows
from vsim.cluster.ledger import Ledger
from vsim.cluster.replicas import Replicas, Views
from vsim.cluster.state import CheckpointError
from vsim.records.history import History

FORMAT = 3
_NUMBERS = ("step", "num_nodes", "examples", "seconds", "fingerprint")
# What every version of safetensors has a name for. Other dtypes are stored as their bytes.
_STORED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8}
_STORED |= {torch.int64, torch.int32, torch.int16, torch.int8}


@dataclass(eq=False)
class Checkpoint:
    """A snapshot of a run after a step.

    Attributes:
        step: t, completed optimizer steps.
        num_nodes: K.
        history: the record of the run up to this step.
        examples: that all nodes had trained on. seconds: of training.
        fingerprint: everything that the run's course depends on: argument → value.
        shards: the state, one of all nodes together (from the simulator), or one of every node (from its process).
        path: the file that it was loaded from, if it was.
        forks: whether a run that starts from it is a new one; see `fork`. keeps_optimizer: whether the fork's inner
            optimizer keeps its state, where that fits.
    """

    step: int
    num_nodes: int
    history: History
    examples: int
    seconds: float
    fingerprint: dict[str, Any]
    shards: list[Shard]
    path: Path | None = None
    forks: bool = False
    keeps_optimizer: bool = True

    @property
    def ledger(self) -> Ledger:
        """What was communicated up to this step."""
        return self.history.ledger

    @property
    def together(self) -> bool:
        """Whether the nodes were rows of one matrix."""
        return len(self.shards) == 1

    @property
    def weights(self) -> Tensor:
        """Stacked (K, P), on the CPU."""
        rows = torch.cat([shard.tensors["weights"] for shard in self.shards])
        return rows.expand(self.num_nodes, -1)  # equal nodes may share one row

    @property
    def buffers(self) -> Views:
        """Name → stacked (K, *shape), on the CPU."""
        names = [name for name, _ in self.shards[0].tree["buffers"]["items"]]
        return {name: torch.cat([shard.tensors[f"buffers[{name!r}]"] for shard in self.shards]) for name in names}

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
        self.check_layout(skeleton)
        if node is None:
            return skeleton.as_module(self.mean_weights(), self.mean_buffers(), like)
        if not 0 <= node < self.num_nodes:
            raise IndexError(f"node must be from 0 to {self.num_nodes - 1}, got {node}")
        return skeleton.as_module(self.weights[node], {n: b[node] for n, b in self.buffers.items()}, like)

    def fork(self, optimizer: bool = True) -> Checkpoint:
        """Return this checkpoint as the start of a new run: `fit(resume=checkpoint.fork(), strategy=…, num_nodes=…)`.

        Strategy, number of nodes, batch size, data, seed and learning rate may be others; the model must have the same
        parameters. Step, examples and the position in the data (that of the new run's order at this step) and in the
        learning-rate schedule continue. With the same K every node keeps its own weights, buffers and stream of random
        numbers, with another K all start from the mean. A strategy's own state (outer weights, residuals, means
        on their way) starts anew, from the mean replica. History and ledger start at this step, with 0 bytes; those of
        the run so far stay with the checkpoint.

        Args:
            optimizer: keep the state of the nodes' inner optimizers where it fits: the same K, optimizer class, device
                and `deterministic`, and options that keep the same tensors. False: it starts anew.
        """
        return replace(self, forks=True, keeps_optimizer=optimizer)

    def save(self, path: str | Path) -> None:
        """Write the file `path` atomically; its folder must exist."""
        _write(self, Path(path))

    def check_layout(self, replicas: Replicas) -> None:
        """Raise a CheckpointError if a model has other parameters or buffers than this one's."""
        layout = layout_of(replicas)
        changes = list(differences({k: self.fingerprint.get(k) for k in layout}, layout))
        if changes:
            raise CheckpointError(f"the checkpoint is of another model: {'; '.join(changes)}")

    def __repr__(self) -> str:
        where = f" from {self.path}" if self.path else ""
        return f"Checkpoint(step {self.step}, {self.num_nodes} nodes, {self.fingerprint.get('strategy', '')}{where})"


def _equal_rows(stacked: Tensor) -> bool:
    return torch.equal(stacked, stacked[:1].expand_as(stacked))


# Folders --------------------------------------------------------------------------------------------------------------


def load_checkpoint(path: str | Path, step: int | None = None) -> Checkpoint:
    """Return the checkpoint in a file, or of a folder that of a step, or the newest one that can be used.

    Nothing in it is executed. Where the newest of a folder is damaged, a UserWarning says so, and the one before it is
    returned.

    Args:
        step: which of a folder; None for the newest.

    Raises:
        CheckpointError: there is none, it is damaged, or it is something else.
    """
    path = Path(path)
    if not os.path.isdir(path):
        return _read(path)
    found = checkpoints_in(path)
    if step is not None:
        if checkpoint_path(path, step) not in found:
            there = ", ".join(str(step_of(file)) for file in found) or "none"
            raise CheckpointError(f"there is no checkpoint of step {step} in the folder {path}; there are: {there}")
        return _read(checkpoint_path(path, step))
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

    `fit(…, save_dir=d, resume=latest_checkpoint(d))` resumes a run if there is one, and starts it otherwise.
    """
    return Path(folder) if checkpoints_in(Path(folder)) else None


# The file -------------------------------------------------------------------------------------------------------------


def _write(checkpoint: Checkpoint, path: Path) -> None:
    from safetensors import SafetensorError  # here, as only who saves needs it
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    keys: dict[str, str] = {}  # what is equal, such as the processes' shared tensors, is written once
    memory: set[int] = set()

    def store(key: str, tensor: Tensor) -> list[Any]:
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        flat = flat_bytes(tensor)
        tensor = flat.view(tensor.dtype).view(shape) if tensor.dtype in _STORED else flat
        digest = _digest(tensor)
        if digest not in keys:
            pointer = tensor.untyped_storage().data_ptr()
            tensors[key] = tensor.clone() if pointer in memory else tensor  # which safetensors wants apart
            keys[digest] = key
            memory.add(pointer)
        return [keys[digest], dtype, shape]

    shards = [
        [shard.tree, {name: store(f"{name}{f' of node {i}' if i else ''}", t) for name, t in shard.tensors.items()}]
        for i, shard in enumerate(checkpoint.shards)
    ]
    text = json.dumps(
        {
            "format": FORMAT,
            **{name: getattr(checkpoint, name) for name in _NUMBERS},
            "record": _record_of(checkpoint, store),
            "shards": shards,
        }
    )
    with replacing(path) as part:
        try:
            save_file(tensors, part, {"vsim": text, "sha256": _checksum(text, tensors)})
        except SafetensorError as error:
            raise OSError(None, str(error)) from error


def _read(path: Path) -> Checkpoint:
    from safetensors import SafetensorError, safe_open

    problem = "is not a checkpoint of vsim, or is torn: "
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path} is empty")
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if not {"vsim", "sha256"} <= metadata.keys():
                raise CheckpointError(f"{path} is a safetensors file, but not a checkpoint of vsim")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if metadata["sha256"] != _checksum(metadata["vsim"], tensors):
            raise CheckpointError(f"{path} is damaged: its contents do not have their checksum")
        problem = "does not hold what a checkpoint of vsim holds: "
        saved = json.loads(metadata["vsim"])
        if saved["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {saved['format']}, and this version of vsim reads {FORMAT}")
        for name in ("step", "num_nodes", "examples"):
            whole_number(name, saved[name], at_least=0)
        real_number("seconds", saved["seconds"], at_least=0)

        def load(stored: list[Any]) -> Tensor:
            key, dtype, shape = stored
            return tensors[key].view(getattr(torch, dtype)).view(shape)

        shards = [Shard(tree, {name: load(stored) for name, stored in own.items()}) for tree, own in saved["shards"]]
        history = _record(saved["record"], load)
        numbers = {name: saved[name] for name in _NUMBERS}
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (SafetensorError, LookupError, TypeError, AttributeError, RuntimeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} {problem}{error}") from error
    return Checkpoint(**numbers, history=history, shards=shards, path=path.absolute())


def _digest(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(flat_bytes(tensor).numpy().data).hexdigest()}"


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    digests = (f"\n{key} {_digest(tensors[key])}" for key in sorted(tensors))
    return hashlib.sha256((text + "".join(digests)).encode()).hexdigest()


# The record of the run ------------------------------------------------------------------------------------------------


def _record_of(checkpoint: Checkpoint, store: Callable[[str, Tensor], list[Any]]) -> dict[str, Any]:
    history = checkpoint.history
    ledger = history.ledger.as_plain()
    events = torch.tensor(ledger["events"], dtype=torch.int64).view(-1, 3)
    return {
        "strategy": history.strategy,
        "executor": history.executor,
        "columns": list(history.columns),
        "rows": store("history", torch.from_numpy(np.stack([history[name] for name in history.columns]))),
        "node_losses": store("node_losses", torch.from_numpy(history.node_losses)),
        "ledger": {**ledger, "events": store("ledger", events)},
    }


def _record(saved: Mapping[str, Any], load: Callable[[list[Any]], Tensor]) -> History:
    losses = load(saved["node_losses"]).numpy()
    history = History(saved["strategy"], losses.shape[1])
    history.executor = saved["executor"]
    rows = [dict(zip(saved["columns"], row, strict=True)) for row in load(saved["rows"]).T.tolist()]
    for i, row in enumerate(rows, len(losses) - len(rows)):
        history.append(row, losses[i] if i >= 0 else None)
    ledger = saved["ledger"]
    history.ledger = Ledger.from_plain({**ledger, "events": load(ledger["events"]).tolist()}, history.num_nodes)
    return history
