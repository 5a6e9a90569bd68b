"""Checkpoints: snapshots of a run after a step, each in one file.

The file has the safetensors format: the bytes of each tensor, named by their SHA-256, and a JSON text that holds all
other state. Reading the file never runs code, and the checksums reveal changed bytes. The file is written under another
name, flushed to the disk and then renamed, so that a reader finds the old or the new file, never a part of a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vsim.arguments import a_path, given, true_or_false, whole_number
from vsim.checkpoint.folder import (
    Saving,
    checkpoint_path,
    checkpoints_in,
    folder_at,
    is_checkpoint,
    step_of,
)
from vsim.checkpoint.tree import Encoded
from vsim.cluster.ledger import Ledger
from vsim.cluster.reductions import reduce_rows
from vsim.cluster.replicas import Replicas, Views
from vsim.cluster.state import CheckpointError
from vsim.history.agreement import CHANGED, differences, layout_of
from vsim.history.describe import flat_bytes
from vsim.history.history import History
from vsim.reading import regular
from vsim.writing import replacing

FORMAT = 11


@dataclass(eq=False)
class Checkpoint:
    """A snapshot of a run after a step.

    Attributes:
        step: the number of completed steps.
        history: the record of the run up to this step.
        settings: argument → description for everything that determines the run; see `vsim.history.describe`.
        held: the number of nodes that each process held.
        stacked: name → encoded state with a row for each node. shared: name → encoded state that is equal on all nodes.
            See `vsim.checkpoint.tree`.
        path: the file from which the checkpoint was loaded, if any.
        forks: whether a run that starts from this checkpoint is a new run; see `fork`.
        keeps_optimizer: whether a fork keeps the state of the inner optimizers, if it fits.
    """

    step: int
    history: History
    settings: dict[str, Any]
    held: list[int]
    stacked: dict[str, Encoded]
    shared: dict[str, Encoded]
    path: Path | None = None
    forks: bool = False
    keeps_optimizer: bool = True

    @property
    def num_nodes(self) -> int:
        """The number of nodes K."""
        return self.history.num_nodes

    @property
    def ledger(self) -> Ledger:
        """The ledger of all collectives up to this step."""
        return self.history.ledger

    @property
    def weights(self) -> Tensor:
        """The nodes' weights (K, P), on the CPU."""
        return self.stacked["weights"].cpu()

    @property
    def buffers(self) -> Views:
        """Name → the nodes' buffers (K, *shape), on the CPU."""
        named = {name: rows for name, rows in self.stacked.items() if name.startswith("buffer ")}
        return {name.removeprefix("buffer "): rows.cpu() for name, rows in named.items()}

    def mean_weights(self) -> Tensor:
        """Return the mean (P,) of the nodes' weights. Weights that are equal on all nodes are not rounded."""
        return _mean(self.weights)

    def mean_buffers(self) -> Views:
        """Return name → buffer: the mean over the nodes if the dtype is floating-point, else node 0's buffer."""
        return {name: _mean(buffer) for name, buffer in self.buffers.items()}

    def model(self, like: nn.Module, node: int | None = None) -> nn.Module:
        """Return a copy of the model `like` with the weights and buffers of this step.

        Args:
            like: the trained model, or a model with the same parameters and buffers.
            node: the number of a node; None: the mean of all nodes, as in the model that `fit` returns.

        Raises:
            CheckpointError: `like` has other parameters or buffers.
            TypeError, ValueError: there is no such node, or `like` is not a model.
        """
        if not isinstance(like, nn.Module):
            raise TypeError(f"like must be a torch.nn.Module, got {given(like)}")
        skeleton = Replicas.of(like, 1, torch.device("cpu"))
        self.check_layout(skeleton)
        if node is None:
            return skeleton.as_module(self.mean_weights(), self.mean_buffers(), like)
        node = whole_number("node", node, at_least=0, at_most=len(self.weights) - 1)
        return skeleton.as_module(self.weights[node], {n: b[node] for n, b in self.buffers.items()}, like)

    def fork(self, optimizer: bool = True) -> Checkpoint:
        """Return this checkpoint as the start of a new run: `fit(resume=checkpoint.fork(), strategy=…, num_nodes=…)`.

        Strategy, number of nodes, batch size, data, seed and learning rate may differ; the model must have the same
        parameters. The numbers of steps and examples continue, and so do the positions in the learning-rate schedule
        and in the data (in the new run's order, at this step). With the same K, every node keeps its weights, buffers,
        state of the model in Python and stream of random numbers; with another K, all nodes start from the mean, and
        from the first node's state in Python. The strategy's state (outer
        weights, residuals, delayed means) starts again from the mean replica. History and ledger start at this step,
        with 0 bytes; the checkpoint keeps the earlier part.

        Args:
            optimizer: True keeps the state of the nodes' inner optimizers if K, optimizer class, device and
                `deterministic` are the same, and the options need the same tensors. False resets the state.
        """
        return replace(self, forks=True, keeps_optimizer=true_or_false("optimizer", optimizer))

    def fill(self, history: History) -> None:
        """Fill an empty history with the record so far, unless this is a fork."""
        if not self.forks:
            history.continue_from(self.history)

    def save(self, path: str | Path) -> None:
        """Write the file `path` atomically; its folder must exist."""
        from safetensors import SafetensorError  # here, because only saving needs this
        from safetensors.numpy import save_file

        history, ledger = self.history, self.ledger.as_plain()
        record = {
            "strategy": history.strategy,
            "num_nodes": history.num_nodes,
            "population": self.ledger.num_nodes,
            "executor": history.executor,
            "columns": {name: torch.from_numpy(history[name]) for name in history.columns},
            "node_losses": torch.from_numpy(history.node_losses),
            "client_val": {
                name: torch.from_numpy(values)
                for name in ("losses", "accuracies")
                if len(values := getattr(history, f"client_val_{name}"))
            },
            "ledger": {**ledger, "events": torch.tensor(ledger["events"], dtype=torch.int64)},
        }
        about = {name: getattr(self, name) for name in ("step", "settings", "held", "stacked", "shared")}
        text, contents = packed({"format": FORMAT, **about, "history": record})
        with replacing(a_path("path", path)) as part:
            try:
                arrays = {digest: flat.numpy() for digest, flat in contents.items()}
                save_file(arrays, part, {"vsim": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
            except SafetensorError as error:
                raise OSError(None, str(error)) from error

    def check_layout(self, replicas: Replicas) -> None:
        """Raise a CheckpointError if a model has other parameters or buffers than the checkpoint's."""
        layout = layout_of(replicas)
        changes = list(differences({k: self.settings.get(k) for k in layout}, layout, CHANGED))
        if changes:
            raise CheckpointError(f"the checkpoint is of another model: {'; '.join(changes)}")

    def __repr__(self) -> str:
        where = f" from {self.path}" if self.path else ""
        strategy = self.settings.get("strategy", {}).get("class", "")
        return f"Checkpoint(step {self.step}, {self.num_nodes} nodes, {strategy}{where})"


def _mean(rows: Tensor) -> Tensor:
    if not (rows.is_floating_point() or rows.is_complex()):
        return rows[0].clone()
    alike = (rows == rows[0]).all(0)  # the mean of equal values needs no rounding
    return torch.where(alike, rows[0], reduce_rows(rows, "mean"))


# Folders --------------------------------------------------------------------------------------------------------------


def load_checkpoint(path: str | Path, step: int | None = None) -> Checkpoint:
    """Return the checkpoint in a file, or a folder's checkpoint of a given step (default: the newest readable one).

    Loading never executes code from the file. If the newest checkpoint of a folder is damaged, return the previous
    checkpoint with a UserWarning.

    Args:
        step: the step of the checkpoint in a folder; None: the newest.

    Raises:
        CheckpointError: there is no checkpoint, the checkpoint is damaged, or the file is not a checkpoint.
        TypeError, ValueError: `step` is not a whole number ≥ 0.
    """
    path = a_path("path", path)
    if not os.path.isdir(path):
        return _read(path)
    found = checkpoints_in(path)
    if step is not None:
        whole_number("step", step, at_least=0)
        if checkpoint_path(path, step) not in found:
            steps = ", ".join(str(step_of(file)) for file in found) or "none"
            raise CheckpointError(f"there is no checkpoint of step {step} in the folder {path}; there are: {steps}")
        return _read(checkpoint_path(path, step))
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
    if not found:
        raise CheckpointError(f"there is no checkpoint in the folder {path}")
    raise CheckpointError(f"no checkpoint in the folder {path} can be used: {'; '.join(problems)}")


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return `folder` if it holds a checkpoint, else None.

    `fit(…, save_dir=d, resume=latest_checkpoint(d))` resumes a saved run, or starts a new run if none is saved.
    """
    folder = a_path("folder", folder)
    return folder if checkpoints_in(folder) else None


def start_of(resume: Any, save_dir: str | Path | None, last: Checkpoint | None) -> Checkpoint | None:
    """Return the checkpoint that a run with `resume` starts from; None for a new run.

    Args:
        resume: True (from `save_dir`, or without `save_dir` from the `last` run of this trainer), a file, a folder, or
            a Checkpoint; False or None for a new run.
    """
    if resume is None or resume is False:
        return None
    if isinstance(resume, Checkpoint):
        return resume
    if resume is True and save_dir is None:
        if last is None:
            raise CheckpointError(
                "resume=True without save_dir resumes this trainer's last run, and there is none in memory; give "
                "save_dir, or the path of a checkpoint"
            )
        return last
    return load_checkpoint(
        a_path("save_dir", save_dir) if resume is True else a_path("resume, unless True or a Checkpoint,", resume)
    )


def saving_of(checkpoint_interval: int | None, save_dir: str | Path | None, start: Checkpoint | None) -> Saving | None:
    """Return where a run is saved; None if it is not saved.

    Raises:
        CheckpointError: save_dir is not a folder, or it holds checkpoints of another run or of later steps.
        TypeError, ValueError: checkpoint_interval is given without save_dir, or save_dir is not a path.
    """
    if save_dir is None:
        if checkpoint_interval is not None:
            raise ValueError("checkpoint_interval has no effect without save_dir, the folder to save to")
        return None
    folder = folder_at(save_dir)
    found = checkpoints_in(folder)
    if found and (start is None or start.forks or not (start.path in found or step_of(found[-1]) <= start.step)):
        raise CheckpointError(
            f"save_dir {str(save_dir)!r} holds the checkpoints of a run, up to {found[-1].name}; give resume=True to "
            "resume it, or another save_dir"
        )
    return Saving(folder, checkpoint_interval)


# The file -------------------------------------------------------------------------------------------------------------


def packed(tree: Any) -> tuple[str, dict[str, Tensor]]:
    """Return a tree as JSON, and SHA-256 → bytes (n,) of the tree's tensors; equal tensors are stored once."""
    contents: dict[str, Tensor] = {}

    def pack(tensor: Tensor) -> dict[str, Any]:
        flat = flat_bytes(tensor.cpu())
        digest = _digest(flat)
        contents[digest] = flat
        return {"sha256": digest, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}

    return json.dumps(tree, default=pack), contents


def unpacked(text: str, contents: Mapping[str, Tensor]) -> Any:
    """Return the tree that was given to `packed`."""

    def unpack(node: dict[str, Any]) -> Any:
        if node.keys() != {"sha256", "dtype", "shape"}:
            return node
        return contents[node["sha256"]].view(getattr(torch, node["dtype"])).view(node["shape"])

    return json.loads(text, object_hook=unpack)


def _read(path: Path) -> Checkpoint:
    from safetensors import safe_open

    problem = "is not a checkpoint of vsim, or is torn: "
    try:
        if regular(path).stat().st_size == 0:
            raise CheckpointError(f"{path} is empty")
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if not {"vsim", "sha256"} <= metadata.keys():
                raise CheckpointError(f"{path} is a safetensors file, but not a checkpoint of vsim")
            # Copy the bytes, so that they are aligned for any dtype.
            contents = {digest: file.get_tensor(digest).clone() for digest in file.keys()}  # noqa: SIM118
        text = metadata["vsim"]
        checksums = {metadata["sha256"]: hashlib.sha256(text.encode()).hexdigest()}
        checksums |= {digest: _digest(flat) for digest, flat in contents.items()}
        if any(digest != now for digest, now in checksums.items()):
            raise CheckpointError(f"{path} is damaged: its contents do not have their checksum")
        problem = "does not hold what a checkpoint of vsim holds: "
        saved = unpacked(text, contents)
        if (format := saved.pop("format")) != FORMAT:
            raise CheckpointError(
                f"{path} has format {format}, and this version of vsim reads {FORMAT}: resume with the version that "
                "saved it, or start the run again"
            )
        whole_number("step", saved["step"], at_least=0)
        if is_checkpoint(path) and step_of(path) != saved["step"]:
            raise CheckpointError(f"{path} holds step {saved['step']}, which is not that of its name")
        history = History.from_plain(tree_map_only(Tensor, Tensor.tolist, saved.pop("history")))
        return Checkpoint(**saved, history=history, path=path.absolute())
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{path} {problem}{str(error) or type(error).__name__}") from error


def _digest(flat: Tensor) -> str:
    return hashlib.sha256(flat.numpy().data).hexdigest()
