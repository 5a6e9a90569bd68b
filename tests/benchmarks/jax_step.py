"""The same step in JAX: `jit` of `vmap` of `value_and_grad`, with AdamW written out.

A model that vsim has has one form here. Of the forms tried, each is the one that XLA computes fastest on a CPU: images
with their channels last, pooling as the maximum of a reshaped array, attention as two products and a softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vsim.models import CNN, GPT, MLP

Arrays = dict[str, Any]  # by the names of the torch model's parameters


def jax_step(model: nn.Module, batch: Sequence[Tensor], lr: float) -> Callable[[], list[float]] | None:
    """Return the step of K nodes that start from the model's weights, or None for a model without a form in JAX."""
    import jax

    if type(model) not in _FORMS:
        return None
    jnp, tree_map = jax.numpy, jax.tree_util.tree_map
    logits = _FORMS[type(model)](jax, model)
    x, y = (jnp.array(t.numpy()) for t in batch)
    weights = {name: jnp.array(p.detach().expand(len(x), *p.shape).numpy()) for name, p in model.named_parameters()}
    options = torch.optim.AdamW([torch.zeros(1)]).defaults
    (beta1, beta2), eps, decay = options["betas"], options["eps"], options["weight_decay"]

    def loss(own: Arrays, x: Any, y: Any) -> Any:
        scores = jax.nn.log_softmax(logits(own, x))
        return -jnp.take_along_axis(scores, y[..., None], -1).mean()

    gradients = jax.vmap(jax.value_and_grad(loss))

    def update(state: Any, x: Any, y: Any) -> Any:
        weights, m, v, t = state
        losses, grads = gradients(weights, x, y)
        t = t + 1
        m = tree_map(lambda m, g: beta1 * m + (1 - beta1) * g, m, grads)
        v = tree_map(lambda v, g: beta2 * v + (1 - beta2) * g * g, v, grads)

        def stepped(w: Any, m: Any, v: Any) -> Any:
            return w * (1 - lr * decay) - lr * m / (1 - beta1**t) / (jnp.sqrt(v / (1 - beta2**t)) + eps)

        return (tree_map(stepped, weights, m, v), m, v, t), losses

    compiled = jax.jit(update, donate_argnums=0)
    zeros = [tree_map(jnp.zeros_like, weights) for _ in range(2)]
    state = (weights, *zeros, jnp.zeros(()))

    def step() -> list[float]:
        nonlocal state
        state, losses = compiled(state, x, y)
        return losses.tolist()

    return step


def _linear(own: Arrays, name: str, x: Any) -> Any:
    return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]


def _mlp(jax: Any, model: Any) -> Callable[[Arrays, Any], Any]:
    *hidden, last = (f"layers.{i}" for i, layer in enumerate(model.layers) if isinstance(layer, nn.Linear))

    def logits(own: Arrays, x: Any) -> Any:
        for layer in hidden:
            x = jax.nn.relu(_linear(own, layer, x))
        return _linear(own, last, x)

    return logits


def _cnn(jax: Any, model: Any) -> Callable[[Arrays, Any], Any]:
    layers = [f"features.{i}" for i, layer in enumerate(model.features) if isinstance(layer, nn.Conv2d)]

    def logits(own: Arrays, x: Any) -> Any:
        x = x.transpose(0, 2, 3, 1)  # (B, height, width, channels)
        for layer in layers:
            order = ("NHWC", "OIHW", "NHWC")
            x = jax.lax.conv_general_dilated(x, own[f"{layer}.weight"], (1, 1), "SAME", dimension_numbers=order)
            examples, height, width, channels = x.shape
            x = jax.nn.relu(x + own[f"{layer}.bias"])
            x = x.reshape(examples, height // 2, 2, width // 2, 2, channels).max((2, 4))
        return _linear(own, "head", x.transpose(0, 3, 1, 2).reshape(len(x), -1))

    return logits


def _gpt(jax: Any, model: Any) -> Callable[[Arrays, Any], Any]:
    jnp, blocks, heads = jax.numpy, range(len(model.blocks)), model.blocks[0].heads

    def norm(own: Arrays, name: str, x: Any) -> Any:
        deviation = jnp.sqrt(x.var(-1, keepdims=True) + model.norm.eps)
        return (x - x.mean(-1, keepdims=True)) / deviation * own[f"{name}.weight"] + own[f"{name}.bias"]

    def attend(own: Arrays, block: str, x: Any) -> Any:
        parts = jnp.split(_linear(own, f"{block}.attention_in", x), 3, -1)
        query, key, value = (part.reshape(*x.shape[:2], heads, -1) for part in parts)  # (B, T, heads, width / heads)
        scores = jnp.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value)
        return _linear(own, f"{block}.attention_out", mixed.reshape(x.shape))

    def logits(own: Arrays, x: Any) -> Any:
        x = own["tokens.weight"][x] + own["positions.weight"][: x.shape[1]]
        for i in blocks:
            block = f"blocks.{i}"
            x = x + attend(own, block, norm(own, f"{block}.attention_norm", x))
            wide = jax.nn.gelu(_linear(own, f"{block}.mlp_in", norm(own, f"{block}.mlp_norm", x)), approximate=False)
            x = x + _linear(own, f"{block}.mlp_out", wide)
        return norm(own, "norm", x) @ own["tokens.weight"].T

    return logits


_FORMS: dict[type[nn.Module], Callable[[Any, Any], Callable[[Arrays, Any], Any]]] = {MLP: _mlp, CNN: _cnn, GPT: _gpt}
