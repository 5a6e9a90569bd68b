"""Three small models in the form the trainer expects: `model((x, y))` is the loss.

Every model of this module also returns the logits from `model(x)` and `model.logits(x)`, and the loss and the share of
right predictions from `model.loss_and_accuracy((x, y))`. All models are plain functions of their parameters (without
`.item()`, branches on data or writes into an input), so that `functional_call` under `torch.func.vmap` runs K models at
once.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsim.arguments import countable, given, real_number, true_or_false, whole_number
from vsim.private_torch import TorchDispatchMode

__all__ = ["CNN", "GPT", "MLP"]


class _LossModel(nn.Module):
    """A classifier that returns its own loss; subclasses define `logits`."""

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits: class scores along the last dimension."""
        raise NotImplementedError

    def forward(self, batch: Tensor | Sequence[Tensor]) -> Tensor:
        """Return the mean cross-entropy of a batch `(x, y)`, a scalar in nats; for a single tensor x, the logits."""
        if isinstance(batch, Tensor):
            return self.logits(batch)
        x, y = batch
        return _cross_entropy(self.logits(x), y)

    def loss_and_accuracy(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return two scalars: the loss of a batch `(x, y)`, and the share of right predictions in [0, 1].

        Labels of −100 do not count; if all labels are −100, both scalars are NaN. Call `eval()` first if dropout or
        BatchNorm matters: the model runs in its current mode.
        """
        x, y = batch
        logits, counted = self.logits(x), y != -100
        return _cross_entropy(logits, y), ((logits.argmax(-1) == y) & counted).sum() / counted.sum()


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


class MLP(_LossModel):
    """Fully connected layers with ReLU between them; the input is flattened.

    x is (B, *shape) with `prod(shape) == in_features`, y is (B,) int64, logits are (B, num_classes).

    Args:
        in_features: length of a flattened example.
        hidden: width of each hidden layer; empty for a linear classifier.
        num_classes: number of classes.
        dropout: probability after each ReLU, in [0, 1).
        seed: seed of the initial weights, which are drawn on the CPU without changing the global generator; None: draw
            from the global generator.

    Raises:
        ValueError: an argument is out of its range, or an input has another size.

    >>> model = MLP(in_features=4, hidden=(8,), num_classes=3, seed=0)
    >>> x, y = torch.ones(5, 2, 2), torch.zeros(5, dtype=torch.int64)
    >>> model((x, y)).shape, model(x).shape
    (torch.Size([]), torch.Size([5, 3]))
    """

    def __init__(
        self,
        in_features: int = 64,
        hidden: Sequence[int] = (128, 128),
        num_classes: int = 10,
        dropout: float = 0.0,
        *,
        seed: int | None = None,
    ) -> None:
        whole_number("in_features", in_features)
        whole_number("num_classes", num_classes)
        _check_tuple("hidden", hidden)
        real_number("dropout", dropout, at_least=0, below=1)
        widths = [in_features, *hidden, num_classes]
        _check_memory("in_features, hidden, num_classes", sum(map(math.prod, itertools.pairwise(widths))))
        super().__init__()
        self.in_features = in_features
        layers: list[nn.Module] = []
        width = in_features
        with _seeded(seed):
            for next_width in hidden:
                layers += [nn.Linear(width, next_width), nn.ReLU(), nn.Dropout(dropout)]
                width = next_width
            self.layers = nn.Sequential(*layers, nn.Linear(width, num_classes))

    def logits(self, x: Tensor) -> Tensor:
        """(B, *shape) → (B, num_classes)."""
        if math.prod(x.shape[1:]) != self.in_features:
            raise ValueError(
                f"MLP: got examples of shape {tuple(x.shape[1:])}; in_features={self.in_features} numbers expected"
            )
        return self.layers(x.flatten(1))


class CNN(_LossModel):
    """Blocks of 3×3 convolution, ReLU and 2×2 max-pooling, then a linear head.

    x is (B, *image_shape), y is (B,) int64, logits are (B, num_classes). The defaults fit 8×8 digits;
    `image_shape=(1, 28, 28)` fits MNIST.

    Args:
        image_shape: (channels, height, width); each block halves height and width, rounded down; at least one pixel
            must remain.
        channels: output channels of each block; at least one block.
        num_classes: number of classes.
        batch_norm: put BatchNorm2d after each convolution.
        dropout: probability before the head, in [0, 1).
        seed: see `MLP`.

    Raises:
        ValueError: an argument is out of its range, or an input has another shape.
    """

    def __init__(
        self,
        image_shape: Sequence[int] = (1, 8, 8),
        channels: Sequence[int] = (32, 64),
        num_classes: int = 10,
        batch_norm: bool = False,
        dropout: float = 0.0,
        *,
        seed: int | None = None,
    ) -> None:
        _check_tuple("image_shape", image_shape, length=3)
        _check_tuple("channels", channels, at_least=1)
        whole_number("num_classes", num_classes)
        true_or_false("batch_norm", batch_norm)
        real_number("dropout", dropout, at_least=0, below=1)
        depth, height, width = image_shape
        if min(height, width) < 2 ** len(channels):
            raise ValueError(
                f"image_shape: got {tuple(image_shape)}; {len(channels)} poolings need a height and width "
                f"of at least {2 ** len(channels)}"
            )
        super().__init__()
        self.image_shape = tuple(image_shape)
        layers: list[nn.Module] = []
        with _seeded(seed):
            for next_depth in channels:
                layers.append(nn.Conv2d(depth, next_depth, kernel_size=3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(next_depth))
                layers += [nn.ReLU(), nn.MaxPool2d(2)]
                depth, height, width = next_depth, height // 2, width // 2
            self.features = nn.Sequential(*layers)
            self.dropout = nn.Dropout(dropout)
            _check_memory("num_classes", depth * height * width * num_classes)
            self.head = nn.Linear(depth * height * width, num_classes)

    def logits(self, x: Tensor) -> Tensor:
        """(B, *image_shape) → (B, num_classes)."""
        if x.shape[1:] != self.image_shape:
            raise ValueError(f"CNN: got images of shape {tuple(x.shape[1:])}; image_shape={self.image_shape} expected")
        return self.head(self.dropout(self.features(x).flatten(1)))


class GPT(_LossModel):
    """A decoder-only transformer after GPT-2: pre-LayerNorm, learned positions, tied embedding and head.

    x is (B, T) int64 with T ≤ block_size, y is (B, T) int64, the next token for each token of x; logits are (B, T,
    vocab_size). Initial weights are GPT-2's: normal with standard deviation 0.02, divided by sqrt(2 · layers) for the
    projections that write into the residual stream; biases are zero.

    Args:
        vocab_size: number of different tokens.
        block_size: longest context, in tokens.
        layers: number of transformer blocks.
        width: size of the residual stream; a multiple of heads.
        heads: attention heads of each block.
        dropout: probability on the embedding and on the output of each attention and MLP, in [0, 1); attention weights
            have no dropout.
        seed: see `MLP`.

    Raises:
        ValueError: an argument is out of its range, or an input is longer than block_size.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int = 64,
        layers: int = 2,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
        *,
        seed: int | None = None,
    ) -> None:
        sizes = {"vocab_size": vocab_size, "block_size": block_size, "layers": layers, "width": width, "heads": heads}
        for name, size in sizes.items():
            whole_number(name, size)
        real_number("dropout", dropout, at_least=0, below=1)
        _check_memory("vocab_size, block_size, layers, width", (vocab_size + block_size + 12 * layers * width) * width)
        if width % heads:
            raise ValueError(f"width: got {width}; a multiple of heads={heads} is needed")
        super().__init__()
        self.vocab_size = vocab_size
        self.block_size = block_size
        with _seeded(seed):
            self.tokens = nn.Embedding(vocab_size, width)
            self.positions = nn.Embedding(block_size, width)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(layers)))
            self.norm = nn.LayerNorm(width)
            self.lm_head = nn.Linear(width, vocab_size, bias=False)
            self.lm_head.weight = self.tokens.weight
            self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def logits(self, x: Tensor) -> Tensor:
        """(B, T) → (B, T, vocab_size)."""
        length = x.shape[-1]
        if length > self.block_size:
            raise ValueError(f"GPT: got {length} tokens; at most block_size={self.block_size} allowed")
        hidden = self.dropout(self.tokens(x) + self.positions.weight[:length])  # (B, T, width)
        return self.lm_head(self.norm(self.blocks(hidden)))

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Sample a continuation without dropout, and restore the training mode.

        Args:
            prompt: (B, T0) int64 with T0 ≥ 1; the model sees the last block_size tokens.
            max_new_tokens: tokens to add, ≥ 0.
            temperature: divides the logits, ≥ 0; 0 takes the likeliest token.
            top_k: sample from the `top_k` likeliest tokens, ≥ 1; None: from all tokens.
            generator: source of the draws, on the model's device; None: a new generator with seed 0, so that equal
                calls return equal text. The global generator is never used.

        Returns:
            (B, T0 + max_new_tokens) int64: the prompt and its continuation.

        Raises:
            ValueError: an argument is out of its range.
        """
        if not isinstance(prompt, Tensor) or prompt.ndim != 2 or prompt.dtype != torch.int64 or prompt.shape[1] == 0:
            found = f"{tuple(prompt.shape)} {prompt.dtype}" if isinstance(prompt, Tensor) else given(prompt)
            raise ValueError(f"prompt: got {found}; (B, T0 ≥ 1) int64 is needed")
        lowest, highest = (int(end) for end in prompt.aminmax()) if prompt.numel() else (0, 0)
        if lowest < 0 or highest >= self.vocab_size:
            raise ValueError(f"prompt: got tokens {lowest} to {highest}; 0 to {self.vocab_size - 1} allowed")
        countable("max_new_tokens", max_new_tokens, "tokens", 8, at_least=0)
        real_number("temperature", temperature, at_least=0)
        if top_k is not None:
            whole_number("top_k", top_k)
        if generator is None:
            generator = torch.Generator(prompt.device).manual_seed(0)
        training = {module: module.training for module in self.modules()}
        self.eval()
        try:
            for _ in range(max_new_tokens):
                logits = self.logits(prompt[:, -self.block_size :])[:, -1]  # (B, vocab_size)
                token = _sample(logits, temperature, top_k, generator)
                prompt = torch.cat([prompt, token], dim=1)
        finally:
            for module, mode in training.items():
                module.training = mode
        return prompt


class _Block(nn.Module):
    """One transformer block: attention and MLP, each with LayerNorm before and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, T, width) → (B, T, width)."""
        hidden = hidden + self.dropout(self._attend(self.attention_norm(hidden)))
        return hidden + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden)))))

    def _attend(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, T, width / heads)
            for part in self.attention_in(hidden).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """Sample one token per row: (B, vocab_size) → (B, 1)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # Shift the largest logit to 0 before the division, so that a low temperature does not overflow.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        values, candidates = logits.topk(top_k)
        choice = torch.multinomial(values.softmax(-1), 1, generator=generator)
        return candidates.gather(-1, choice)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Draw initial weights from `seed` within the block, without changing the global generators."""
    if seed is None:
        yield
        return
    # Draw on the CPU whatever the default device, so that a seed gives the same weights on every device.
    with torch.device("cpu"), _DrawingFrom(torch.Generator().manual_seed(whole_number("seed", seed, at_least=0))):
        yield


class _DrawingFrom(TorchDispatchMode):
    """In this thread, draw initial weights from the generator `stream` instead of the global generator."""

    def __init__(self, stream: torch.Generator) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default):
            kwargs["generator"] = self.stream
        return func(*args, **kwargs)


def _check_tuple(name: str, sizes: Sequence[int], length: int | None = None, at_least: int = 0) -> None:
    if not isinstance(sizes, list | tuple) or len(sizes) < at_least or (length is not None and len(sizes) != length):
        count = f"{length}" if length is not None else f"at least {at_least}"
        raise TypeError(f"{name} must be a list of {count} whole numbers, got {given(sizes)}")
    for index, size in enumerate(sizes):
        whole_number(f"{name}[{index}]", size)


def _check_memory(names: str, weights: int) -> None:
    """Raise a ValueError that names these arguments if a model of so many weights does not fit into memory."""
    if torch.get_default_device().type != "meta":
        countable(f"{names}: the number of weights", weights, "weights", 4)
