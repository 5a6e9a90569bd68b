"""The README's Python runs as it stands, top to bottom, and its strategies do what it says of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from itertools import chain
from typing import Any

import pytest
import torch
from documents import ROOT, blocks, run_page
from torch import Tensor

import vsim
import vsim.strategy
from vsim import Trainer
from vsim.data import digits
from vsim.models import MLP
from vsim.strategy import SimpleReduceStrategy, Strategy
from vsim.strategy.communicate import all_gather, all_reduce

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

README = ROOT / "README.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = re.compile(r"[\w.-]+")  # of a package, in a requirement


def needed(package: str, found: set[str]) -> set[str]:
    """Return `found` with a package and all that it needs, as far as they are installed."""
    if package not in found:
        found.add(package)
        with suppress(metadata.PackageNotFoundError):
            for requirement in metadata.requires(package) or []:
                if "extra ==" not in requirement:
                    needed(NAME.match(requirement)[0].lower(), found)  # type: ignore[index]
    return found


def modules(package: str) -> set[str]:
    """What can be imported of a package; `metadata.packages_distributions` does not know of most on Python 3.10."""
    with suppress(metadata.PackageNotFoundError):
        return {file.parts[0].removesuffix(".py") for file in metadata.files(package) or [] if file.suffix == ".py"}
    return set()


def extras() -> dict[str, list[str]]:
    """Return the requirements of each extra, with those of the extras that it includes."""
    own = PROJECT["optional-dependencies"]

    def included(name: str) -> Iterator[str]:
        for requirement in own[name]:
            others = re.fullmatch(r"vsim\[([\w,-]+)\]", requirement)
            yield from chain.from_iterable(map(included, others[1].split(","))) if others else [requirement]

    return {name: list(included(name)) for name in own}


def not_installed(command: str) -> set[str]:
    """The modules of optional packages that a `pip install -e` of vsim leaves out; but pytest's, which runs here."""
    asked = re.search(r'pip install -e "\.\[([\w,-]+)\]"', command)
    there: set[str] = set()
    for own in (PROJECT["dependencies"], *(extras()[name] for name in (asked[1].split(",") if asked else []))):
        for requirement in own:
            needed(NAME.match(requirement)[0], there)  # type: ignore[index]
    every = {NAME.match(requirement)[0] for own in extras().values() for requirement in own}  # type: ignore[index]
    left_out = {package for package in every - there if not package.startswith("pytest")}
    return set().union(*map(modules, left_out))


class Without:
    """A finder without these modules, as if they were not installed. A None in sys.modules would be found."""

    def __init__(self, finder: Any, modules: set[str]) -> None:
        self.finder, self.modules = finder, modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in self.modules else self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


@pytest.fixture(scope="module")
def readme() -> dict[str, Any]:
    """What the README's blocks define, run in one scope: each continues the one before.

    With the packages that the page says to install, and no others.
    """
    first = next(block for block in blocks(README) if block.kind == "sh")
    with pytest.MonkeyPatch.context() as patch:
        missing = not_installed(first.text)
        patch.setattr(sys, "meta_path", [Without(finder, missing) for finder in sys.meta_path])
        for module in missing:
            patch.delitem(sys.modules, module, raising=False)
        return run_page(README)


def test_the_first_command_installs_what_the_page_uses() -> None:
    # That the page runs under this fixture shows it; here, that the fixture takes packages away.
    assert {"sklearn", "wandb", "hypothesis"} <= not_installed("pip install -e .")
    more = not_installed('pip install -e ".[examples,tensorboard]"')
    assert {"wandb", "hypothesis"} <= more and not {"sklearn", "pandas", "scipy", "tensorboard"} & more


def test_the_extras_of_the_two_commands_alone_pin_torch() -> None:
    # Whoever adds another extra keeps the torch that is installed. The pin is the one that the table of speed names.
    minor = re.search(r"\(torch 2\.(\d+), ", README.read_text(encoding="utf-8"))
    assert minor is not None
    pins = {name: [r for r in own if NAME.match(r)[0] == "torch"] for name, own in extras().items()}  # type: ignore[index]
    pinned = {name for name, pin in pins.items() if pin}
    assert pinned == {"examples", "test", "dev", "all"}
    assert {pin for name in pinned for pin in pins[name]} == {f"torch>=2.{minor[1]},<2.{int(minor[1]) + 1}"}
    assert {"digits", "privacy", "wandb", "tensorboard", "test-any-torch"} <= pins.keys()  # which errors and docs name


def run(strategy: Strategy, num_nodes: int = 4, max_steps: int = 12) -> Trainer:
    train, val = digits()
    trainer = Trainer(MLP(hidden=(16,), seed=0), train, val)
    trainer.fit(
        strategy=strategy,
        num_nodes=num_nodes,
        max_steps=max_steps,
        progress=False,
        deterministic=True,
        val_interval=None,
    )
    return trainer


def weights(trainer: Trainer) -> Tensor:
    assert trainer.strategy is not None
    return trainer.strategy.cluster.weights


def example(name: str) -> str:
    """The block of the README or of the page on strategies that defines a class."""
    text = "".join(page.read_text(encoding="utf-8") for page in (README, ROOT / "docs" / "own-strategy.md"))
    (block, *_) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if f"class {name}" in b]
    return block.split("\ntrainer = ")[0]


def defined(name: str) -> type[Strategy]:
    """The class that such a block defines."""
    scope: dict[str, Any] = {"torch": torch, "Strategy": Strategy, "all_reduce": all_reduce, "all_gather": all_gather}
    exec(example(name), scope)
    return scope[name]


def test_readme_blocks_run(readme: dict[str, Any]) -> None:
    comparison = readme["comparison"]
    assert readme["trainer"].history.node_losses.shape == (50, 8)
    # What the page says of the table: the order, the steps, a tenth of the bytes, and how long AllReduce computes.
    assert {name: run.ledger.steps for name, run in comparison.items()} == {
        "AllReduce": 54,
        "FedAvg, H = 10": 128,
        "DiLoCo, H = 10": 128,
    }
    losses = {name: run.history.last("global_loss") for name, run in comparison.items()}
    assert max(losses, key=losses.__getitem__) == "AllReduce"
    earlier = {name: run.history.at_step(54, "global_loss") for name, run in comparison.items()}
    assert min(earlier, key=earlier.__getitem__) == "AllReduce"
    table = comparison.table()
    assert "10.7×" in table and "36.3 %" in table
    shown, verified = (block.text for block in blocks(README) if block.kind == "text")
    assert str(readme["report"]) == verified.strip()
    assert [line.split("  ")[0] for line in shown.splitlines()] == [line.split("  ")[0] for line in table.splitlines()]
    assert shown.splitlines()[0] == table.splitlines()[0]
    # DiLoCo needs more steps to a loss of 1, but is there first, by the quotient of the utilizations.
    steps = {name: first for name, (first,) in comparison.steps_to(1.0).items()}
    assert steps["AllReduce"] < steps["DiLoCo, H = 10"] < steps["FedAvg, H = 10"]
    assert steps["DiLoCo, H = 10"] / steps["AllReduce"] < 85.9 / 36.3


def test_readme_pictures_exist() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert pictures and all((README.parent / picture).is_file() for picture in pictures)


def test_the_table_has_every_strategy() -> None:
    own = {name for name in vsim.strategy.__all__ if name.endswith("Strategy")} - {"Strategy", "AsynchronousStrategy"}
    page = ROOT / "docs" / "strategies.md"
    assert own - set(re.findall(r"`(\w+)", page.read_text(encoding="utf-8"))) == set()


def test_int8_gradients() -> None:
    trainer = run(defined("Int8Gradients")(lr=1e-2))
    # A byte an entry and 4 for the scale, of the tensors 16×64, 16, 10×16, 10, at each of 12 steps.
    assert trainer.ledger.payload_bytes == 12 * (1024 + 16 + 160 + 10 + 4 * 4)
    assert trainer.ledger.wire_bytes == (trainer.ledger.num_nodes - 1) * trainer.ledger.payload_bytes
    rows = weights(trainer)
    assert torch.equal(rows, rows[:1].expand_as(rows))
    # It follows the real average closely, but not to the bit.
    exact, rounded = run(SimpleReduceStrategy(lr=1e-2)), trainer
    assert not torch.equal(weights(exact), rows)
    assert rounded.history.last("global_loss") == pytest.approx(exact.history.last("global_loss"), rel=0.05)


def test_gossip() -> None:
    trainer = run(defined("Gossip")(lr=1e-2))
    # Every step all 1210 weights go to one partner, in groups of two.
    assert trainer.ledger.payload_bytes == 12 * 1210 * 4
    assert all(list(map(len, event.groups)) == [2, 2] for event in trainer.ledger)
    rows = weights(trainer)
    # After the last step every node equals its partner, and no other.
    equal = torch.tensor([[torch.equal(a, b) for a in rows] for b in rows])
    assert equal.sum(0).tolist() == [2, 2, 2, 2]
    odd = run(defined("Gossip")(lr=1e-2), num_nodes=3)
    assert {tuple(map(len, event.groups)) for event in odd.ledger} == {(2, 1)}


def test_one_tensor_a_turn() -> None:
    trainer = run(defined("OneTensorATurn")(lr=1e-2), max_steps=6)
    sizes = [1024, 16, 160, 10]
    assert [event.payload_bytes for event in trainer.ledger] == [4 * n for n in [*sizes, *sizes[:2]]]
    # After step 6 it was the turn of the first bias: it alone is equal on all nodes.
    views = trainer.strategy.cluster.replicas.views(weights(trainer))  # type: ignore[union-attr]
    same = [torch.equal(v, v[:1].expand_as(v)) for v in views.values()]
    assert same == [False, True, False, False]


@pytest.mark.parametrize("name", ["Int8Gradients", "Gossip", "OneTensorATurn"])
def test_they_are_short_and_they_learn(name: str) -> None:
    block = example(name)
    body = block[block.index("class ") :].strip().splitlines()
    assert len([line for line in body if line.strip()]) <= 11  # the class line and ten
    trainer = run(defined(name)(lr=1e-2), max_steps=60)
    losses = trainer.history["global_loss"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_the_map_is_that_of_a_validation_at_every_step(readme: dict[str, Any]) -> None:
    """Cells that name one strategy name the one that a search over all steps finds, cell by cell."""
    shown = readme["comparison"].winners(loss=1.0, compute=0.8)
    every = vsim.compare(
        readme["CNN"](seed=0),
        *(readme["train"], readme["val"]),
        strategies=readme["strategies"],
        **{"num_nodes": 8, "max_steps": 100, "val_interval": 1, "progress": False},
    )
    steps = {}
    for name in every:
        measured, losses = every[name].history.measured("step", "global_loss")
        steps[name] = int(measured[losses <= 1.0][0])
    certain = 0
    for row, latency in list(zip(shown.first, shown.latencies, strict=True))[::4]:
        for bandwidth, names in list(zip(shown.bandwidths, row, strict=True))[::4]:
            network = vsim.Network(float(bandwidth), float(latency))
            took = {name: every[name].history.time(network, 0.8).seconds[at] for name, at in steps.items()}
            assert min(took, key=took.__getitem__) in names
            certain += len(names) == 1
    assert certain > 50
