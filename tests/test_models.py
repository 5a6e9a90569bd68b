"""The built-in models: right by hand, causal, seeded, and the same under vmap as one by one."""

import copy
import math
import pickle
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from vsim.models import CNN, GPT, MLP


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def _global_rng_untouched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test in this file fails if it moves the global generator, unless it asks to."""
    before = torch.get_rng_state()
    yield
    assert "ambient_rng" in request.fixturenames or torch.equal(before, torch.get_rng_state())


@pytest.fixture
def ambient_rng() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        yield


def images(*lead: int, shape: tuple[int, ...] = (1, 8, 8)) -> tuple[Tensor, Tensor]:
    x = torch.rand(*lead, *shape, generator=generator(1))
    return x, torch.randint(10, lead, generator=generator(2))


def tokens(*lead: int, vocab_size: int = 11, length: int = 6) -> tuple[Tensor, Tensor]:
    text = torch.randint(vocab_size, (*lead, length + 1), generator=generator(1))
    return text[..., :-1], text[..., 1:]


Make = Callable[[int], nn.Module]
MODELS: dict[str, tuple[Make, Callable[..., tuple[Tensor, Tensor]]]] = {
    "mlp": (lambda seed: MLP(64, hidden=(16, 12), seed=seed), images),
    "linear": (lambda seed: MLP(64, hidden=(), seed=seed), images),
    "cnn": (lambda seed: CNN(channels=(4, 6), seed=seed), images),
    "cnn, batch norm": (lambda seed: CNN(channels=(4, 6), batch_norm=True, seed=seed), images),
    "gpt": (lambda seed: GPT(11, block_size=8, layers=2, width=16, heads=2, seed=seed), tokens),
}
ON_ALL = pytest.mark.parametrize(("make", "batch"), MODELS.values(), ids=MODELS)


# What every model promises


@ON_ALL
def test_three_ways_to_call(make: Make, batch: Callable[..., tuple[Tensor, Tensor]]) -> None:
    model, (x, y) = make(0).eval(), batch(5)
    logits = model.logits(x)
    assert torch.equal(model(x), logits)
    assert logits.shape[:-1] == y.shape
    # From the definition: minus the log of the right answer's probability, averaged over all answers.
    by_hand = -logits.log_softmax(-1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(model((x, y)), by_hand)
    torch.testing.assert_close(model([x, y]), by_hand)  # what torch's own collation gives
    share = np.mean(logits.argmax(-1).numpy() == y.numpy())
    loss, accuracy = model.loss_and_accuracy((x, y))
    assert loss.item() == model((x, y)).item()
    assert accuracy.shape == () and accuracy.item() == pytest.approx(share)


def test_dropout_only_in_training(ambient_rng: None) -> None:
    for make, x in (
        (lambda dropout: MLP(64, hidden=(32,), dropout=dropout, seed=0), images(4)[0]),
        (lambda dropout: CNN(channels=(4,), dropout=dropout, seed=0), images(4)[0]),
        (lambda dropout: GPT(11, block_size=8, width=16, heads=2, dropout=dropout, seed=0), tokens(4)[0]),
    ):
        model, plain = make(0.5), make(0.0)
        assert not torch.equal(model(x), model(x))
        assert torch.equal(model.eval()(x), plain(x))


@ON_ALL
def test_seed(make: Make, batch: Callable[..., tuple[Tensor, Tensor]]) -> None:
    first, same, other = make(3).state_dict(), make(3).state_dict(), make(4).state_dict()
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_without_a_seed_the_global_generator_counts(ambient_rng: None) -> None:
    for make in (MLP, CNN, lambda: GPT(7, width=8, heads=1)):
        state = torch.get_rng_state()
        first = make()
        assert not torch.equal(state, torch.get_rng_state())
        torch.set_rng_state(state)
        assert all(torch.equal(p, q) for p, q in zip(first.parameters(), make().parameters(), strict=True))
    # A seed means what `torch.manual_seed` with it would have meant.
    torch.manual_seed(9)
    assert all(torch.equal(p, q) for p, q in zip(MLP().parameters(), MLP(seed=9).parameters(), strict=True))
    with torch.device("meta"):  # whatever the default device
        model = MLP(seed=9)
    assert torch.equal(model.layers[0].weight, MLP(seed=9).layers[0].weight)


# By hand


@pytest.mark.parametrize("hidden", [(), (7,), [5, 6, 4]])
def test_mlp_by_hand(hidden: tuple[int, ...]) -> None:
    model = MLP(in_features=12, hidden=hidden, num_classes=3, seed=0)
    x = torch.randn(5, 3, 4, generator=generator())
    value = x.reshape(5, 12)
    *inner, last = [layer for layer in model.layers if isinstance(layer, nn.Linear)]
    for layer in inner:
        value = (value @ layer.weight.T + layer.bias).clamp(min=0)
    torch.testing.assert_close(model(x), value @ last.weight.T + last.bias)
    assert [layer.out_features for layer in inner] == list(hidden)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 5, 7), (1, 28, 28)])
def test_cnn_by_hand(shape: tuple[int, int, int], batch_norm: bool) -> None:
    model = CNN(image_shape=shape, channels=(3, 5), num_classes=4, batch_norm=batch_norm, seed=0)
    value = x = images(6, shape=shape)[0]
    for convolution in [layer for layer in model.features if isinstance(layer, nn.Conv2d)]:
        # A convolution is a matrix product with the 3×3 patches; zeros around the image.
        patches = F.unfold(value, kernel_size=3, padding=1)  # (B, channels · 9, pixels)
        value = convolution.weight.flatten(1) @ patches + convolution.bias[:, None]
        value = value.unflatten(-1, (shape[1], shape[2]))
        if batch_norm:  # in training, with weight 1 and bias 0
            mean = value.mean(dim=(0, 2, 3), keepdim=True)
            variance = value.var(dim=(0, 2, 3), keepdim=True, correction=0)
            value = (value - mean) / (variance + 1e-5).sqrt()
        value = value.clamp(min=0)
        height, width = shape[1] // 2, shape[2] // 2
        value = value[..., : 2 * height, : 2 * width].unflatten(-1, (width, 2)).amax(-1)
        value = value.unflatten(-2, (height, 2)).amax(-2)
        shape = (len(convolution.weight), height, width)
    by_hand = value.flatten(1) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(x), by_hand, atol=1e-5, rtol=1e-4)


def test_gpt_by_hand() -> None:
    model = GPT(11, block_size=8, layers=2, width=12, heads=3, seed=0)
    for parameter in model.parameters():  # at the start biases are 0 and would hide mistakes
        nn.init.normal_(parameter, std=0.3, generator=generator(parameter.numel()))
    x = tokens(2)[0]

    def norm(value: Tensor, module: nn.LayerNorm) -> Tensor:
        centred = value - value.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / scale * module.weight + module.bias

    hidden = torch.stack([model.tokens.weight[row] + model.positions.weight[:6] for row in x])
    for block in model.blocks:
        projected = norm(hidden, block.attention_norm) @ block.attention_in.weight.T + block.attention_in.bias
        heads = []
        for start in range(0, 12, 4):  # 3 heads of 4
            query, key, value = (projected[..., part + start : part + start + 4] for part in (0, 12, 24))
            scores = query @ key.transpose(1, 2) / math.sqrt(4)
            future = torch.ones(6, 6, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
        hidden = hidden + torch.cat(heads, -1) @ block.attention_out.weight.T + block.attention_out.bias
        inner = norm(hidden, block.mlp_norm) @ block.mlp_in.weight.T + block.mlp_in.bias
        inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
        hidden = hidden + inner @ block.mlp_out.weight.T + block.mlp_out.bias
    by_hand = norm(hidden, model.norm) @ model.tokens.weight.T
    torch.testing.assert_close(model(x), by_hand, atol=1e-5, rtol=1e-4)


def test_gpt_starts_as_gpt2() -> None:
    model = GPT(500, block_size=64, layers=8, width=128, heads=4, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            expected = 0.02 / 4 if "_out" in name else 0.02  # sqrt(2 · 8 layers) = 4
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
    # Near-equal scores: the first loss is that of guessing.
    assert model(tokens(4, vocab_size=500)).item() == pytest.approx(math.log(500), rel=0.02)


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_gpt_head_is_tied(copied: Callable[[GPT], GPT]) -> None:
    model = copied(GPT(11, block_size=8, layers=1, width=8, heads=1, seed=0))
    assert model.lm_head.weight is model.tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


GPT_SMALL = GPT(11, block_size=8, layers=2, width=16, heads=2, dropout=0.5, seed=0).eval()


@settings(max_examples=15)
@given(st.data())
def test_gpt_is_causal(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 8))
    row = st.lists(st.integers(0, 10), min_size=length, max_size=length)
    x = torch.tensor([data.draw(row)])
    place = data.draw(st.integers(0, length - 1))
    changed = x.clone()
    changed[0, place] = (x[0, place] + data.draw(st.integers(1, 10))) % 11
    before, after = GPT_SMALL(x), GPT_SMALL(changed)
    torch.testing.assert_close(before[:, :place], after[:, :place], atol=1e-6, rtol=0)
    assert not torch.allclose(before[:, place], after[:, place], atol=1e-6, rtol=0)


# Generation


def test_generate_greedily() -> None:
    model = GPT_SMALL
    prompt = tokens(3, length=5)[0]
    text = model.generate(prompt, 6, temperature=0)
    assert text.shape == (3, 11) and text.dtype == torch.int64
    assert torch.equal(text[:, :5], prompt)
    for place in range(5, 11):  # past place 8 the context slides
        expected = model(text[:, max(0, place - 8) : place])[:, -1].argmax(-1)
        assert torch.equal(text[:, place], expected)
    assert torch.equal(model.generate(prompt, 6, top_k=1), text)
    assert torch.equal(model.generate(prompt, 6, temperature=1e-12), text)
    assert torch.equal(model.generate(prompt, 0), prompt)


@pytest.mark.parametrize("top_k", [None, 3, 11, 50])
def test_generate_draws_from_the_distribution(top_k: int | None) -> None:
    model = copy.deepcopy(GPT_SMALL)
    nn.init.normal_(model.tokens.weight, generator=generator())
    prompt = torch.full((4000, 1), 3)
    drawn = model.generate(prompt, 1, temperature=2.0, top_k=top_k, generator=generator())[:, 1]
    expected = (model(prompt[:1])[0, -1] / 2).softmax(-1).detach()
    if top_k == 3:
        expected[expected < expected.sort().values[-3]] = 0
        expected /= expected.sum()
    found = torch.bincount(drawn, minlength=11) / 4000
    torch.testing.assert_close(found, expected, atol=0.04, rtol=0)  # 5 standard deviations of 1/2
    assert (found[expected == 0] == 0).all()
    texts = [GPT_SMALL.generate(prompt[:2], 9, generator=g) for g in (None, None, generator(0), generator(1))]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2]) and not torch.equal(texts[0], texts[3])


def test_generate_leaves_each_modules_mode() -> None:
    model = copy.deepcopy(GPT_SMALL).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    assert torch.equal(model.generate(tokens(1)[0], 9), GPT_SMALL.generate(tokens(1)[0], 9))  # without dropout, that is
    assert [module.training for module in model.modules()] == modes


# Arguments; bounds of numbers are in test_malformed_inputs.py


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: GPT_SMALL.generate(torch.zeros(3, dtype=torch.int64), 1), ValueError, "prompt … (3,) torch.int64"),
        (lambda: GPT_SMALL.generate(torch.zeros(1, 3), 1), ValueError, "prompt … (1, 3) torch.float32"),
        (lambda: GPT_SMALL.generate(torch.zeros(1, 0, dtype=torch.int64), 1), ValueError, "prompt … (1, 0)"),
        (lambda: GPT_SMALL.generate(torch.tensor([[2, 11]]), 1), ValueError, "prompt … 2 to 11 … 0 to 10"),
        (lambda: GPT_SMALL.generate(tokens(1)[0], 1, temperature=-0.5), ValueError, "temperature … -0.5"),
        (lambda: GPT_SMALL.generate(tokens(1)[0], 1, top_k=0), ValueError, "top_k … >= 1 … 0"),
        (lambda: MLP(hidden=(8, -1)), ValueError, "hidden[1] … -1"),
        (lambda: MLP(hidden=8), TypeError, "hidden … whole numbers … 8"),
        (lambda: MLP(dropout=1.0), ValueError, "dropout … >= 0 and < 1 … 1.0"),
        (lambda: CNN(image_shape=(8, 8)), TypeError, "image_shape … 3 … (8, 8)"),
        (lambda: CNN(image_shape=(1, 8, 3)), ValueError, "image_shape … at least 4"),
        (lambda: CNN(channels=()), TypeError, "channels … at least 1 … ()"),
        (lambda: CNN(channels=(3.0,)), TypeError, "channels[0] … 3.0"),
        (lambda: GPT(5, width=10, heads=4), ValueError, "width … 10 … heads=4"),
        (lambda: MLP(seed=0)(torch.zeros(2, 65)), ValueError, "MLP … (65,) … in_features=64"),
        (lambda: CNN(seed=0)(torch.zeros(2, 8, 8)), ValueError, "CNN … (8, 8)"),
        (lambda: GPT_SMALL(tokens(1, length=9)[0]), ValueError, "GPT … 9 tokens … block_size=8"),
    ],
)
def test_refused(make: Callable[[], object], error: type[Exception], said: str) -> None:
    with refused(error, said):
        make()
