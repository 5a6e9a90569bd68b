"""The README's Python runs as it stands, top to bottom, and its strategies do what it says of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from page_code import ROOT, blocks, run_page

from vsim import Trainer
from vsim.data import digits
from vsim.models import MLP
from vsim.strategy import Strategy
from vsim.strategy.communicate import all_gather, all_reduce

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

README = ROOT / "README.md"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def names(extra: str) -> set[str]:
    """The packages that an extra lists itself."""
    return {re.match(r"[\w.-]+", requirement)[0] for requirement in EXTRAS[extra]}


@pytest.fixture(scope="module")
def readme() -> dict[str, Any]:
    """What the README's blocks define, run in one scope: each continues the one before."""
    return run_page(README)


def test_the_extras_of_the_two_commands_alone_pin_torch() -> None:
    # Whoever adds another extra keeps the torch that is installed. The pin is the one that the table of speed names.
    minor = int(re.search(r"\(torch 2\.(\d+), ", README.read_text(encoding="utf-8"))[1])
    assert f"torch>=2.{minor},<2.{minor + 1}" in EXTRAS["examples"]
    assert [extra for extra in EXTRAS if "torch" in names(extra)] == ["examples"]
    including = [
        extra for extra, own in EXTRAS.items() if re.search(r"vsim-torch\[.*\b(examples|test|dev)\b", str(own))
    ]
    assert including == ["test", "dev", "all"]
    assert {
        "digits",
        "privacy",
        "wandb",
        "tensorboard",
        "test-any-torch",
    } <= EXTRAS.keys()  # in errors and docs


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


@pytest.mark.slow  # as long as a page that trains for many steps; see test_docs.py
def test_readme_blocks_run(readme: dict[str, Any]) -> None:
    comparison = readme["comparison"]
    assert readme["trainer"].history.node_losses.shape == (50, 8)
    # What the page says of the table: the order, the steps, and how long AllReduce computes.
    assert {name: run.ledger.steps for name, run in comparison.items()} == {
        "AllReduce": 54,
        "FedAvg, H = 10": 128,
        "DiLoCo, H = 10": 128,
    }
    losses = {name: run.history.last("global_loss") for name, run in comparison.items()}
    assert max(losses, key=losses.__getitem__) == "AllReduce"
    earlier = {name: run.history.at_step(54, "global_loss") for name, run in comparison.items()}
    assert min(earlier, key=earlier.__getitem__) == "AllReduce"
    table = comparison.table(columns=readme["columns"])
    assert "36.3 %" in table and max(map(len, table.splitlines()[:5])) <= 100  # as wide as a page of a repository
    (shown,) = (block.text for block in blocks(README) if block.kind == "text")
    assert [line.split("  ")[0] for line in shown.splitlines()] == [line.split("  ")[0] for line in table.splitlines()]
    assert shown.splitlines()[0] == table.splitlines()[0]
    # DiLoCo needs more steps to a loss of 1, but is there first, by the quotient of the utilizations.
    steps = {name: first for name, (first,) in comparison.steps_to(1.0).items()}
    assert steps["AllReduce"] < steps["DiLoCo, H = 10"] < steps["FedAvg, H = 10"]
    assert steps["DiLoCo, H = 10"] / steps["AllReduce"] < 85.9 / 36.3


def test_the_first_screen_is_short_and_so_are_paragraphs() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count("\n") <= 120
    prose = re.sub(r"^```.*?^```$|<!-- made from .*?<!-- end -->", "", text, flags=re.DOTALL | re.MULTILINE)
    assert all(part.count("\n") < 5 for part in re.split(r"\n\n|\n(?=- )", prose.strip()))
    places = [text.index(part) for part in ("?", "![", "```sh", "```text", "- **Reproduced", "```python")]
    assert places == sorted(places)  # what it answers, the picture, a command, the table; then what proves it


def test_readme_pictures_exist() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert pictures and all((README.parent / picture).is_file() for picture in pictures)


# For each example the bytes of a step, of tensors 16×64, 16, 10×16 and 10, and of how many nodes each has the weights.
EXAMPLES: dict[str, tuple[Callable[[int], int], int]] = {
    "Int8Gradients": (lambda step: 1210 + 4 * 4, 4),  # a byte an entry and 4 for the scale of each tensor
    "Gossip": (lambda step: 4 * 1210, 2),
    "OneTensorATurn": (lambda step: 4 * [1024, 16, 160, 10][(step - 1) % 4], 1),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short_and_learn_and_send_what_the_pages_say(name: str) -> None:
    block = example(name)
    body = block[block.index("class ") :].strip().splitlines()
    assert len([line for line in body if line.strip()]) <= 11  # the class line and ten
    trainer = Trainer(MLP(hidden=(16,), seed=0), *digits())
    options: dict[str, Any] = {"max_steps": 60, "progress": False, "deterministic": True, "val_interval": None}
    trainer.fit(strategy=defined(name)(lr=1e-2), num_nodes=4, **options)
    losses, sent = trainer.history["global_loss"], [0.0] * 60
    assert losses[-1] < 0.5 * losses[0]
    for event in trainer.ledger:
        sent[event.step - 1] += event.payload_bytes
    of_step, alike = EXAMPLES[name]
    assert sent == [of_step(step) for step in range(1, 61)]
    cluster = trainer.strategy.cluster
    equal = torch.tensor([[torch.equal(a, b) for a in cluster.weights] for b in cluster.weights])
    assert equal.sum(0).tolist() == [alike] * 4
    if name == "OneTensorATurn":  # it was the turn of the last bias
        views = cluster.replicas.views(cluster.weights).values()
        assert [torch.equal(v, v[:1].expand_as(v)) for v in views] == [False, False, False, True]
    if name == "Gossip":
        assert all(list(map(len, event.groups)) == [2, 2] for event in trainer.ledger)
