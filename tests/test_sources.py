"""The built-in data: what it contains, how it is cut, and what is said about bad files."""

import gzip
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.data.sources import Vocabulary, digits, docs_text, fashion_mnist, mnist, mnist1d, text_file


@pytest.fixture(autouse=True)
def _global_rng_untouched() -> Iterator[None]:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    yield
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
    assert before[2] == random.getstate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@settings(max_examples=40)
@given(st.text(min_size=1), st.characters(), st.data())
def test_characters_are_encoded_and_decoded(text: str, character: str, data: st.DataObject) -> None:
    text = text.replace(character, "") or chr(ord(character) ^ 1)
    vocabulary = Vocabulary(text)
    assert vocabulary.size == len(set(text))
    other = "".join(data.draw(st.lists(st.sampled_from(vocabulary.characters), max_size=20)))
    ids = vocabulary.encode(other)
    assert ids.dtype == torch.int64 and ids.shape == (len(other),)
    assert ids.tolist() == [vocabulary.characters.index(one) for one in other]
    assert vocabulary.decode(ids) == other
    with refused(ValueError, f"unknown character {character!r} at {len(other)};"):
        vocabulary.encode(other + character)


def test_vocabulary() -> None:
    vocabulary = Vocabulary("abba")
    assert repr(vocabulary) == "Vocabulary('ab')"
    assert vocabulary == Vocabulary("ab") and hash(vocabulary) == hash(Vocabulary("ab"))
    assert vocabulary != Vocabulary("abc") and vocabulary != "ab"
    assert vocabulary.decode(torch.tensor(1)) == "b"
    assert Vocabulary("a\udcff").decode(torch.tensor([1, 0])) == "\udcffa"  # a lone surrogate
    for ids, said in [
        (torch.tensor([0, 2]), "2 … 0 to 1"),
        (torch.tensor([-1]), "-1"),
        (torch.zeros(1, 1, dtype=torch.int64), "(1, 1) torch.int64"),
        (torch.zeros(1), "(1,) torch.float32"),
    ]:
        with refused(ValueError, said):
            vocabulary.decode(ids)
    with refused(ValueError, "empty text"):
        Vocabulary("")


def test_docs_text() -> None:
    text = "\n".join(topics[name] for name in sorted(topics))
    train, val = docs_text()
    assert train.vocabulary is val.vocabulary
    assert train.vocabulary == Vocabulary(text)
    assert 90 < train.vocabulary.size < 200 and len(train) > 3000
    x, y = train[1]
    assert x.shape == y.shape == (64,) and x.dtype == y.dtype == torch.int64
    assert train.vocabulary.decode(x) == text[64:128]
    assert train.vocabulary.decode(y) == text[65:129]
    split = len(text) - round(0.1 * len(text))
    assert val.vocabulary.decode(val[0][0]) == text[split : split + 64]
    train, val = docs_text(block_size=256, stride=1)  # windows that are views
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*train.tensors, *val.tensors)}) == 1
    assert train.tensors[0].untyped_storage().nbytes() < 10e6  # and not 256 times the text


@settings(max_examples=60)
@given(
    st.text(string.ascii_letters, min_size=2, max_size=200),
    st.integers(1, 9),
    st.integers(1, 12) | st.none(),
    st.integers(1, 99),
)
def test_text_windows(folder: Path, text: str, block_size: int, stride: int | None, percent: int) -> None:
    path = folder / "text.txt"
    path.write_text(text)
    fraction = percent / 100
    minimum = -(-100 * (block_size + 1) // min(percent, 100 - percent))  # rounded up
    if len(text) < minimum:
        with pytest.raises(ValueError, match=f"{len(text)} characters.* at least {minimum}$"):
            text_file(path, block_size, stride, fraction)
        return
    train, val = text_file(path, block_size, stride, fraction)
    stride = stride or block_size
    kept = round(len(text) * fraction)
    for dataset, part in ((train, text[: len(text) - kept]), (val, text[len(text) - kept :])):
        starts = range(0, len(part) - block_size, stride)
        assert [dataset.vocabulary.decode(x) for x, _ in dataset] == [part[i : i + block_size] for i in starts]
        assert [dataset.vocabulary.decode(y) for _, y in dataset] == [part[i + 1 : i + 1 + block_size] for i in starts]
        assert len(dataset) >= 1


def test_text_that_cannot_be_read_or_cut(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(("é" * 100).encode("latin-1"))
    train, _ = text_file(path, 4, encoding="latin-1")
    assert train.vocabulary.characters == "é"
    with refused(ValueError, "utf-8 … position 0"):
        text_file(path, 4)
    with refused(ValueError, "utf-99"):
        text_file(path, 4, encoding="utf-99")
    for missing in (tmp_path / "nowhere.txt", tmp_path):
        with refused(FileNotFoundError, str(missing)):
            text_file(missing)
    with refused(ValueError, "pydoc_data.topics … at least 10000010"):
        docs_text(block_size=10**6)


def test_digits() -> None:
    train, val = digits()  # scikit-learn's first import, which may draw from Python's generator
    assert (len(train), len(val)) == (1438, 359)
    x, y = (torch.cat(pair) for pair in zip(train.tensors, val.tensors, strict=True))
    assert x.shape == (1797, 1, 8, 8) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert x.min() == 0 and x.max() == 1 and set(y.tolist()) == set(range(10))
    # Every example is there once, with its own label.
    bunch = sys.modules["sklearn.datasets"].load_digits()
    expected = np.column_stack([bunch.data / 16, bunch.target])
    found = np.column_stack([x.flatten(1), y])
    assert np.array_equal(expected[np.lexsort(expected.T)], found[np.lexsort(found.T)])
    assert all(torch.equal(a, b) for a, b in zip(digits()[0].tensors, train.tensors, strict=True))
    assert not torch.equal(digits(seed=1)[1].tensors[1], val.tensors[1])
    assert len(digits(val_fraction=0.5)[1]) == 898
    assert len(digits(val_fraction=1e-9)[1]) == 1


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with refused(ImportError, 'pip install "vsim-torch[digits]"'):
        digits()


PARTS = ["train-images", "train-labels", "t10k-images", "t10k-labels"]
SMALL = [np.ones((3, 28, 28)), np.ones(3)] * 2


def write_mnist(folder: Path, arrays: list[np.ndarray], suffixes: list[str], dash: str = "-") -> None:
    """Write a file for each of PARTS."""
    for part, values, suffix in zip(PARTS, arrays, suffixes, strict=True):
        raw = np.array([0x0800 | values.ndim, *values.shape], dtype=">u4").tobytes() + values.astype(np.uint8).tobytes()
        content = gzip.compress(raw, compresslevel=1) if suffix else raw
        (folder / f"{part}{dash}idx{values.ndim}-ubyte{suffix}").write_bytes(content)


@settings(max_examples=40)
@given(
    counts=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    suffixes=st.lists(st.sampled_from(["", ".gz"]), min_size=4, max_size=4),
    dash=st.sampled_from(["-", "."]),
    seed=st.integers(0, 2**32 - 1),
)
def test_idx_round_trip(tmp_path_factory, counts, height, width, suffixes, dash, seed) -> None:
    folder = tmp_path_factory.mktemp("mnist")
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 256, (count, *size)) for count in counts for size in ((height, width), ())]
    write_mnist(folder, arrays, suffixes, dash)
    for dataset, images, labels in zip(mnist(str(folder)), arrays[::2], arrays[1::2], strict=True):
        x, y = dataset.tensors
        assert x.dtype == torch.float32 and y.dtype == torch.int64
        assert x.shape == (len(images), 1, height, width)
        assert np.array_equal((x[:, 0] * 255).round().numpy(), images)
        assert np.array_equal(y.numpy(), labels)
        assert not x.numel() or 0 <= x.min() <= x.max() <= 1


def test_fashion_mnist_is_where_debian_puts_it_or_in_a_folder(tmp_path: Path, monkeypatch) -> None:
    write_mnist(tmp_path, SMALL, [".gz"] * 4)
    monkeypatch.setattr("vsim.data.sources.FASHION_MNIST", tmp_path / "nowhere")
    with refused(FileNotFoundError, "nowhere … dataset-fashion-mnist … folder="):
        fashion_mnist()
    assert [len(part) for part in fashion_mnist(tmp_path)] == [3, 3]
    monkeypatch.setattr("vsim.data.sources.FASHION_MNIST", tmp_path)
    assert [len(part) for part in fashion_mnist()] == [3, 3]


def test_mnist_that_is_missing_or_no_gzip(tmp_path: Path) -> None:
    with refused(FileNotFoundError, str(tmp_path / "nowhere")):
        mnist(tmp_path / "nowhere")
    write_mnist(tmp_path, SMALL, [".gz"] * 4)
    path = tmp_path / "t10k-labels-idx1-ubyte.gz"
    path.rename(tmp_path / "labels")
    with refused(FileNotFoundError, "t10k-labels-idx1-ubyte … t10k-labels.idx1-ubyte.gz", str(tmp_path)):
        mnist(tmp_path)
    (tmp_path / "labels").rename(path)
    whole = path.read_bytes()
    garbled = whole[:30] + bytes(255 - byte for byte in whole[30:])
    for raw in (b"plain", whole[:-10], garbled):
        path.write_bytes(raw)
        with refused(ValueError, "t10k-labels-idx1-ubyte.gz … gzip"):
            mnist(tmp_path)


def test_mnist1d_is_the_authors_by_default() -> None:
    """Numbers of the authors' package, mnist1d 0.0.2, with its default arguments."""
    train, val = mnist1d()
    assert train.tensors[0].shape == (4000, 40) and train.tensors[0].dtype == torch.float32
    assert val.tensors[0].shape == (1000, 40) and val.tensors[1].dtype == torch.int64
    assert torch.cat([train.tensors[1], val.tensors[1]]).bincount().tolist() == [500] * 10
    assert val.tensors[1][:10].tolist() == [2, 6, 3, 9, 4, 3, 1, 9, 5, 2]
    assert val.tensors[0][0, :3].tolist() == pytest.approx([-0.0787708, -0.2107317, -0.0917514], abs=1e-6)
    assert val.tensors[0][-1, -3:].tolist() == pytest.approx([0.6598756, 0.8777344, 1.1931518], abs=1e-6)
    assert not torch.equal(mnist1d(seed=1)[1].tensors[1], val.tensors[1])


def test_sizes_of_mnist1d() -> None:
    assert [len(part) for part in mnist1d(130, 0.1, 2**32 - 1)] == [117, 13]
    with refused(ValueError, "size … multiple of 10 … 5001"):
        mnist1d(5001)
    with refused(ValueError, "size=10,000,000,000,000 … GB"):
        mnist1d(10**13)
