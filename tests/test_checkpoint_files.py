"""What is not a whole checkpoint is an error that says so, and never runs code."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_runs import ADAMW, assert_same_run, fit, trainer_of
from errors import refused, warned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_cluster import vectors
from safetensors import safe_open
from safetensors.torch import save_file
from test_process_exactness import ROWS, Row, nodes_of

from vsim import CheckpointError, load_checkpoint
from vsim.checkpoint.files import FORMAT, packed
from vsim.checkpoint.folder import checkpoints_in
from vsim.cluster.randomness import GENERATORS
from vsim.models import MLP
from vsim.runs.saving import captured
from vsim.strategy import DiLoCoStrategy

QUICK = ["SPARTA, delayed, 4 bits"]
NAME = "step-00000007.safetensors"


def strategy() -> DiLoCoStrategy:
    return DiLoCoStrategy(H=3, inner_optim=ADAMW)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 5 and 7."""
    folder = tmp_path_factory.mktemp("run")
    fit(strategy(), max_steps=7, checkpoint_interval=5, save_dir=folder)
    assert [path.name for path in checkpoints_in(folder)] == ["step-00000005.safetensors", NAME]
    return folder


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def rewritten(path: Path, change: Callable[[str], str], valid: bool) -> None:
    """Change the text; with the checksum that it then needs, or without."""
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    changed = change(metadata["vsim"])
    assert changed != metadata["vsim"]
    digest = hashlib.sha256(changed.encode()).hexdigest() if valid else metadata["sha256"]
    save_file(tensors, path, {"vsim": changed, "sha256": digest})


def shortened(path: Path, to: float) -> None:
    contents = path.read_bytes()
    path.write_bytes(contents[: int(to * len(contents))])


def with_text(old: str, new: str, valid: bool = True) -> Callable[[Path], None]:
    return lambda path: rewritten(path, lambda text: text.replace(old, new), valid)


TORN = "is not a checkpoint of vsim, or is torn"
MALFORMED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda path: shortened(path, 0.5), TORN),
    "in the header": (lambda path: path.write_bytes(path.read_bytes()[:100]), TORN),
    "empty": (lambda path: shortened(path, 0), "is empty"),
    "foreign": (lambda path: save_file({"weight": torch.ones(3)}, path), "not a checkpoint of vsim"),
    "pickled": (lambda path: path.write_bytes(pickle.dumps(Trap(path.parent / "sprung"))), TORN),
    "torch": (lambda path: torch.save({"trap": Trap(path.parent / "sprung")}, path), TORN),
    "from the future": (with_text(f'"format": {FORMAT}', '"format": 99'), "has format 99"),
    "before nodes had rows of their own": (
        with_text(f'"format": {FORMAT}', '"format": 9'),
        f"has format 9, and this version of vsim reads {FORMAT}: resume with the version that saved it",
    ),
    "swapped": (with_text('"step": 7', '"step": 8', valid=False), "checksum"),
    "senseless": (with_text('"settings": {', '"apart": {'), "does not hold what a checkpoint of vsim holds"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_an_error_and_the_one_before_is_used(kind: str, run: Path, tmp_path: Path) -> None:
    folder, (spoil, message) = tmp_path / "run", MALFORMED[kind]
    shutil.copytree(run, folder)
    spoil(folder / NAME)
    with refused(CheckpointError, NAME, message):
        load_checkpoint(folder / NAME)
    with warned(NAME, message, "using step-00000005.safetensors"):
        assert load_checkpoint(folder).step == 5
    if kind == "truncated":
        with warned(NAME, message, "using step-00000005.safetensors"):
            resumed = fit(strategy(), save_dir=folder, resume=True, max_steps=9)
        assert_same_run(resumed, fit(strategy(), max_steps=9))
    assert not (folder / "sprung").exists()


def test_a_folder_where_nothing_can_be_used(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    for path in checkpoints_in(tmp_path / "run"):
        shortened(path, 0.5)
    with refused(CheckpointError, "no checkpoint in the folder", "step-00000005", NAME, "torn"):
        fit(strategy(), save_dir=tmp_path / "run", resume=True)


FORGED = [
    ('"step": 7', '"step": "seven"', "step must be a whole number"),
    ('"num_nodes": 3, "population"', '"num_nodes": -3, "population"', "does not have -3 values a step"),
    ('"population": 3', '"population": 1000000000000000', "num_nodes=1,000,000,000,000,000 nodes take"),
    ('"ledger": {"steps": 7', '"ledger": {"steps": 1000000000000000', "steps=1,000,000,000,000,000 steps take"),
    ('"columns": {"step"', '"columns": {"more"', "'step'"),
    ('"columns": {"step": {"sha256": "', '"columns": {"step": {"sha256": "elsewhere-', "elsewhere-"),
    ('"dtype": "float64"', '"dtype": "load"', "view"),
    ('"dtype": "float64", "shape": [', '"dtype": "float64", "shape": [9, ', "shape '[9, "),
    ('"kinds": [[', '"kinds": [[7, ', "is not iterable"),
    ('"kinds": [', '"kinds": [], "none": [', "list index out of range"),
]


@pytest.mark.parametrize(("old", "new", "message"), FORGED)
def test_a_file_that_was_written_by_hand(old: str, new: str, message: str, run: Path, tmp_path: Path) -> None:
    path = tmp_path / NAME
    shutil.copy(run / NAME, path)
    rewritten(path, lambda text: text.replace(old, new, 1), valid=True)
    with refused(CheckpointError, NAME, "does not hold what a checkpoint of vsim holds", message):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"generator": ', '{"generated": '),
        ('{"optimizer": ["', '{"optimizer": ["another'),
        ('{"optimizer": ', '{"__class__": '),
        ('{"dict": [', '{"dict": [1, '),
        *(('["pos", 624]', f'["pos", {at}]') for at in (-1, 625, 2**40, "NaN", '"x"')),  # of NumPy, in its memory
    ],
)
def test_a_state_that_was_written_by_hand(old: str, new: str, run: Path, tmp_path: Path) -> None:
    path = tmp_path / NAME
    shutil.copy(run / NAME, path)
    rewritten(path, lambda text: text.replace(old, new, 1), valid=True)
    with pytest.raises(
        CheckpointError, match=r"the state in the checkpoint at step 7 cannot be restored|was a another"
    ):
        fit(strategy(), resume=path, max_steps=9)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_flipped_bit_and_every_truncation_is_noticed(data: st.DataObject, run: Path, tmp_path: Path) -> None:
    contents = bytearray((run / NAME).read_bytes())
    header_bytes = 8 + int.from_bytes(contents[:8], "little")
    end = data.draw(st.sampled_from([8, header_bytes, len(contents)]))  # the length, the text, the tensors
    place = data.draw(st.integers(0, end - 1))
    if data.draw(st.booleans()):
        del contents[place:]
    else:
        contents[place] ^= 1 << data.draw(st.integers(0, 7))
    spoiled = tmp_path / NAME
    spoiled.write_bytes(contents)
    with pytest.raises(CheckpointError, match=NAME):
        load_checkpoint(spoiled)


def test_what_was_cut_off_while_writing_is_removed(run: Path, tmp_path: Path) -> None:
    (tmp_path / ".step-00000003.123.part").write_bytes(b"half")
    fit(strategy(), max_steps=2, save_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.safetensors"]


def test_a_write_that_fails_leaves_the_old_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / NAME
    shutil.copy(run / NAME, path)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    checkpoint = load_checkpoint(run)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint.save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [NAME]


def test_what_is_equal_is_written_once(run: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(run)
    checkpoint.shared["more"] = [checkpoint.stacked["weights"].clone() for _ in range(3)]
    checkpoint.save(tmp_path / NAME)
    assert (tmp_path / NAME).stat().st_size < (run / NAME).stat().st_size + 1000
    again = load_checkpoint(tmp_path / NAME)
    assert packed(again.shared)[0] == packed(checkpoint.shared)[0]


def test_a_file_under_the_name_of_another_step_is_not_used(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, folder := tmp_path / "run")
    (folder / NAME).rename(folder / "step-00000009.safetensors")
    with refused(CheckpointError, "step-00000009.safetensors", "holds step 7"):
        load_checkpoint(folder, step=9)
    with warned("holds step 7", "using step-00000005.safetensors"):
        assert load_checkpoint(folder).step == 5
    shutil.copy(run / NAME, tmp_path / "best.safetensors")
    assert load_checkpoint(tmp_path / "best.safetensors").step == 7


@pytest.mark.parametrize("name", ["MT19937", "Philox"])
@pytest.mark.parametrize("at", [-1, 10**6])
def test_the_state_of_a_generator_is_checked(name: str, at: int) -> None:
    generator = np.random.Generator(getattr(np.random, name)(1))
    read, write = GENERATORS[np.random.Generator]
    state = read(generator)
    write(generator, state)
    where, key = (state["state"], "pos") if name == "MT19937" else (state, "buffer_pos")
    where[key] = at
    with refused(ValueError, f"of {name}", "from 0 to", at):
        write(generator, state)


def test_the_checkpoint_of_a_step_is_found_in_a_folder(run: Path) -> None:
    assert load_checkpoint(run, step=5).step == 5
    for step, error in (("a", TypeError), (-1, ValueError), (True, TypeError)):
        with refused(error, "step", step):
            load_checkpoint(run, step=step)  # type: ignore[arg-type]
    with refused(CheckpointError, "step 6", "5, 7"):
        load_checkpoint(run, step=6)


def state_of(row: Row) -> str:
    trainer = trainer_of(lambda: MLP(12, (9,), 5, seed=1), vectors)  # rows of odd length, with gaps between them
    fit(row.make(), trainer, num_nodes=nodes_of(row), max_steps=4, val_interval=None, deterministic=True)
    checkpoint = captured(trainer._last)  # type: ignore[arg-type]
    return packed([checkpoint.stacked, checkpoint.shared])[0]


@pytest.mark.filterwarnings("ignore:(DCT|RandomBasis)TopK:UserWarning")
@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=() if r.name in QUICK else pytest.mark.slow, id=r.name) for r in ROWS]
)
def test_equal_runs_have_equal_files(row: Row) -> None:
    """Byte for byte, but for what was measured: nothing that was never written to gets into a file."""
    first = state_of(row)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()  # type: ignore[attr-defined]
        second = state_of(row)
    finally:
        torch.use_deterministic_algorithms(False)
    assert first == second  # with a SHA-256 of every tensor
