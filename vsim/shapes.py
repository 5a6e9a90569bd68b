"""Models without values: a copy of a model, or a GPT of a given number of parameters; and checks for shared memory."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vsim.arguments import one_of, real_number, whole_number
from vsim.private_torch import storage_key

_DTYPES = {1: torch.float8_e5m2, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_META = torch.device("meta")
# Tokens of a GPT with a given number of parameters: GPT-2's vocabulary as padded for accelerators, 64 · 786.
_TOKENS, _POSITIONS, _SMALLEST_GPT = 50_304, 2_048, 20_000_000


def without_values(
    parameters: float | None,
    layers: int | None,
    model: nn.Module | None,
    bytes_per_parameter: int | None = None,
) -> nn.Module:
    """Return a model on the meta device: a copy of `model`, or a GPT with `parameters`; see `vsim.price`."""
    if (parameters is None) == (model is None):
        raise TypeError("give either parameters=, how many there are, or a model=")
    if bytes_per_parameter is not None:
        bytes_per_parameter = int(one_of("bytes_per_parameter", str(bytes_per_parameter), map(str, _DTYPES)))
    if model is not None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {model!r}")
        if layers is not None:
            raise TypeError("layers= has no effect with model=, which has its own; it goes with parameters=")
        check_apart(model)
        values = {id(t): t for t in (*model.parameters(), *model.buffers())}
        bare = copy.deepcopy(model, {key: _without_values(t) for key, t in values.items()})  # copies no value
        return bare if bytes_per_parameter is None else bare.to(_DTYPES[bytes_per_parameter])
    number = real_number("parameters", parameters)
    size = whole_number("parameters", int(number) if number.is_integer() else parameters, at_most=10**15)
    layers = None if layers is None else whole_number("layers", layers)
    if size < (layers or 1):
        raise ValueError(f"parameters must be at least the number of layers, {layers}, got {size}")
    return gpt_of(size, layers).to(_DTYPES[bytes_per_parameter or 4])


def gpt_of(parameters: int, layers: int | None = None) -> nn.Module:
    """Return a model without values that has exactly this number of parameters, in the shapes of a GPT.

    The model has an embedding of about 50,304 tokens and 2,048 positions and, in each layer, the matrices of attention
    (3d, d) and (d, d) and of an MLP (4d, d) and (d, 4d), with biases and norms. The width d is the nearest multiple of
    64; the number of tokens is adjusted by multiples of 64. All sides therefore have many divisors, as in models made
    for accelerators. Below 20 million parameters, an embedding would be most of the model: the model is `layers`
    matrices of equal size, as square as their divisors allow.

    Args:
        layers: default: the layers of a GPT with d = 80 · layers, about 12 for 125 million and 26 for 1.3 billion
            parameters.
    """
    usual = max(1, round((parameters / (12 * 80**2)) ** (1 / 3)))
    depth = usual if layers is None else layers

    def size(width: int, tokens: int = _TOKENS) -> int:
        return (tokens + _POSITIONS + 2) * width + depth * (12 * width + 13) * width

    root = math.sqrt((_TOKENS + _POSITIONS) ** 2 + 48 * depth * parameters)  # solves 12 depth d² + (tokens + …) d = N
    guess = int((root - _TOKENS - _POSITIONS) / (24 * depth)) // 64
    widths = [64 * n for n in (guess, guess + 1) if n > 0]
    width = min(widths, key=lambda width: abs(size(width) - parameters), default=0)
    tokens = _TOKENS + 64 * math.floor((parameters - size(width)) / (64 * width)) if width else 0
    if parameters < _SMALLEST_GPT or tokens < 64:
        depth = layers or 1
        sizes = [parameters // depth + (layer < parameters % depth) for layer in range(depth)]
        sides = [next(w for w in range(math.isqrt(own), 0, -1) if own % w == 0) for own in sizes]
        shapes = [(own // side, side) for own, side in zip(sizes, sides, strict=True)]
        return nn.ParameterList(nn.Parameter(torch.empty(shape, device=_META)) for shape in shapes)
    matrices = {"attention_in": (3, 1), "attention_out": (1, 1), "mlp_in": (4, 1), "mlp_out": (1, 4)}
    block: dict[str, tuple[int, ...]] = {}
    for name, (out, into) in matrices.items():
        block |= {f"{name}_weight": (out * width, into * width), f"{name}_bias": (out * width,)}
    block |= {f"norm{i}_{what}": (width,) for i in (1, 2) for what in ("weight", "bias")}
    model = _Gpt()
    model.tokens = nn.Embedding(tokens, width, device=_META)  # not a hidden matrix, as it is an nn.Embedding
    model.positions = nn.Embedding(_POSITIONS, width, device=_META)
    model.blocks = nn.ModuleList(_module(block) for _ in range(depth))
    model.norm = _module({"weight": (width,), "bias": (width,)})
    rest = parameters - size(width, tokens)  # below 64 · width
    for i, shape in enumerate([(rest // 64, 64), (rest % 64,)]):
        if math.prod(shape):
            model.register_parameter(f"rest{i}", nn.Parameter(torch.empty(shape, device=_META)))
    return model


class _Gpt(nn.Module):
    """A model of `gpt_of`."""


def sizes_of(model: nn.Module) -> dict[str, int]:
    """Return what a `Pipeline` takes from a model: bytes_per_activation and, of a GPT of `gpt_of`, layers and width."""
    first = next(model.parameters(), None)
    sizes = {} if first is None else {"bytes_per_activation": first.element_size()}
    if isinstance(model, _Gpt):
        sizes |= {"layers": len(model.blocks), "width": len(model.norm.weight)}  # type: ignore[arg-type, union-attr]
    return sizes


def check_apart(model: nn.Module) -> None:
    """Raise a ValueError if a trainable parameter shares memory with another parameter or with a buffer.

    Training keeps the two tensors in separate places, so that their values would diverge. Tied parameters are one
    `nn.Parameter`, and allowed.
    """
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, t in itertools.chain(model.named_parameters(), model.named_buffers()):
        lazy = isinstance(t, nn.UninitializedParameter | nn.UninitializedBuffer)
        if not lazy and t.layout is torch.strided and t.numel():
            by_storage.setdefault(storage_key(t), []).append((name, t))
    for tensors in by_storage.values():
        reaching: list[tuple[str, Tensor]] = []  # earlier tensors whose spans may overlap with the next ones
        for name, t in sorted(tensors, key=lambda own: _span(own[1])) if len(tensors) > 1 else ():
            reaching = [(other, own) for other, own in reaching if _span(own)[1] > _span(t)[0]]
            for other, own in reaching:
                if (own.requires_grad or t.requires_grad) and _have_common_entries(own, t):
                    one, two = (known for known, _ in tensors if known in (name, other))
                    raise ValueError(
                        f"{one} and {two} share memory without being one parameter, for instance through .data, and "
                        f"would train apart: tie them as a parameter ({two} = {one}), or give each its own memory "
                        "(.clone())"
                    )
            reaching.append((name, t))


def _span(t: Tensor) -> tuple[int, int]:
    """Return the offsets in bytes of a tensor's first entry, and of the end of its last entry, in its storage."""
    size, first = t.element_size(), int(t.storage_offset())
    last = first + sum((length - 1) * stride for length, stride in zip(t.shape, t.stride(), strict=True))
    return first * size, (last + 1) * size


def _have_common_entries(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors with overlapping spans in one storage share an entry; columns of a matrix do not."""
    if (one.is_contiguous() and other.is_contiguous()) or one.element_size() != other.element_size():
        return True
    marks = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


@contextmanager
def naming_layers(model: nn.Module) -> Iterator[None]:
    """Add to a ValueError, if `model` (from `without_values`) is a single matrix, that it is, and what to do."""
    try:
        yield
    except ValueError as error:
        if isinstance(model, nn.ParameterList) and len(model) == 1:
            raise ValueError(
                f"{error}. Here the {model[0].numel():,} parameters are one matrix: say with layers= of how many they "
                "are, or give a model="
            ) from error
        raise


def _module(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """Return a module with parameters of these shapes, without values."""
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.empty(shape, device=_META)))
    return module


def _without_values(tensor: Tensor) -> Tensor:
    bare = torch.empty_like(tensor, device=_META)
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
