"""Lets timm, transformers and Lightning load where torch and torchvision differ in build; imported before them.

All three import torchvision where they can. That registers forms of two operators of its compiled library, which a
build of torch for another device than torchvision's cannot load: there they are declared.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

if torchvision := importlib.util.find_spec("torchvision"):
    try:
        for library in Path(str(torchvision.origin)).parent.glob("_C*.so"):  # newer ones: _C_stable.so
            torch.ops.load_library(library)
    except OSError:
        OPERATORS = torch.library.Library("torchvision", "DEF")  # declared as long as it lives
        for operator in ("nms", "qnms"):
            OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
