"""The import path of scaling laws for users; they are defined in `vsim.scale.laws`."""

from vsim.scale.laws import (
    Law,
    Prediction,
    diloco_2503_09799,
    fit,
    penalty,
    published,
)

__all__ = [
    "Law",
    "Prediction",
    "diloco_2503_09799",
    "fit",
    "penalty",
    "published",
]
