"""How often nodes communicate under the quadratic synchronization rule, in the runs of its paper; without training."""

from __future__ import annotations

import math
from typing import NamedTuple

from vsim.strategy import QSR

from .result import Row, Table


class Run(NamedTuple):
    epochs: int
    peak: float  # learning rate
    rule: QSR


STEPS_AN_EPOCH = 312  # ImageNet in batches of 4,096
RUNS = {
    "ViT-B, H_base 4": Run(300, 0.008, QSR(0.0175, 4, warmup_steps=10_000)),
    "ViT-B, H_base 8": Run(300, 0.008, QSR(0.0175, 8, warmup_steps=10_000)),
    "ResNet-152, H_base 2": Run(200, 0.8, QSR(0.2, 2, warmup_steps=5 * STEPS_AN_EPOCH)),
    "ResNet-152, H_base 4": Run(200, 0.8, QSR(0.25, 4, warmup_steps=5 * STEPS_AN_EPOCH)),
}
PUBLISHED = dict(zip(RUNS, (10.4, 6.9, 39.7, 20.1), strict=True))
TABLE = Table(
    title="Communication under QSR",
    setting="Syncs in percent of the steps. ViT-B: 300 epochs of 312 steps, of which 10,000 steps are a linear "
    "warm-up (peak rate .008, α .0175). ResNet-152: 200 epochs, of which five are warm-up, peak rate .8, α .2"
    " (H_base 2) and .25 (H_base 4). The rate then falls to 0 along a cosine.",
    source="Gu et al. 2024, tables of communication for ViT-B and ResNet-152",
    url="https://arxiv.org/abs/2310.14423",
    note="The published shares are quoted from another source, because the paper's tables were not available. Epochs, "
    "steps, peak rates and warm-ups are those of the authors' code (github.com/hmgxr128/QSR at 93f0fac, "
    "example-run-vit-localadamw.sh and recipe/resnet-B=4096-localsgdm.yml).",
    rows={name: Row(value, within=0.05, unit="%") for name, value in PUBLISHED.items()},
)


def rate(step: int, run: Run) -> float:
    """The learning rate of step number `step`, from 0."""
    warmup, steps = run.rule.warmup_steps, run.epochs * STEPS_AN_EPOCH
    if step < warmup:
        return run.peak * step / warmup
    return run.peak * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def share(run: Run) -> float:
    steps, step, syncs = run.epochs * STEPS_AN_EPOCH, 0, 0
    while step < steps:
        step = run.rule.after(step, rate(step, run), steps - step, None)
        syncs += 1
    return 100 * syncs / steps


def measure(quick: bool) -> dict[str, float]:
    return {name: share(run) for name, run in RUNS.items()}
