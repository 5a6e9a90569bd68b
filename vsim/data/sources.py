"""Datasets without a download: the text in every CPython, text files, scikit-learn's digits, MNIST-1D, and MNIST and
Fashion-MNIST from local files.

Each function returns a pair (train, val) of TensorDatasets, which have a `name`, and draws nothing from the global
generators.
"""

import gzip
import math
import zlib
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from vsim.arguments import a_path, a_text, countable, real_number, whole_number
from vsim.extras import extra
from vsim.reading import regular

__all__ = ["TextDataset", "Vocabulary", "digits", "docs_text", "fashion_mnist", "mnist", "mnist1d", "text_file"]

D = TypeVar("D", bound=TensorDataset)
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


class Vocabulary:
    """The distinct characters of a text, in code point order; a character's id is its place among them.

    Args:
        text: any text with at least one character.

    Raises:
        ValueError: the text is empty.

    >>> vocabulary = Vocabulary("hello")
    >>> vocabulary.characters, vocabulary.size
    ('ehlo', 4)
    >>> vocabulary.encode("hole")
    tensor([1, 3, 2, 0])
    >>> vocabulary.decode(torch.tensor([1, 0]))
    'he'
    """

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("Vocabulary: got an empty text; at least one character is needed")
        self._codes = np.unique(_code_points(text))  # (size,)
        self.characters = "".join(map(chr, self._codes.tolist()))

    @property
    def size(self) -> int:
        """Number of characters."""
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text's characters, (len(text),) int64; an unknown character raises a ValueError."""
        codes = _code_points(text)
        ids = np.searchsorted(self._codes, codes).clip(max=self.size - 1)
        unknown = np.flatnonzero(self._codes[ids] != codes)
        if len(unknown):
            place = int(unknown[0])
            raise ValueError(f"encode: unknown character {text[place]!r} at {place}; allowed: {self.characters!r}")
        return torch.from_numpy(ids.astype(np.int64))

    def decode(self, ids: Tensor) -> str:
        """Return the text of ids (T,), or the character of an id (); an id outside 0 … size − 1 raises a ValueError."""
        if ids.ndim > 1 or ids.is_floating_point():
            raise ValueError(f"decode: got {tuple(ids.shape)} {ids.dtype}; integers of shape (T,) or () allowed")
        numbers = ids.reshape(-1).tolist()
        for number in numbers:
            if not 0 <= number < self.size:
                raise ValueError(f"decode: got id {number}; 0 to {self.size - 1} allowed")
        return "".join(self.characters[number] for number in numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.characters == other.characters

    def __hash__(self) -> int:
        return hash(self.characters)

    def __repr__(self) -> str:
        return f"Vocabulary({self.characters!r})"


class TextDataset(TensorDataset):
    """Windows of a text: x (N, block_size) int64, and y of the same shape, each window shifted by one character.

    x and y are views of `ids`, so a small stride costs no memory. Characters after the last whole window are left out.

    Args:
        ids: the text, (length,) int64 with length > block_size.
        vocabulary: the characters behind the ids.
        block_size: characters in a window.
        stride: characters from the start of one window to the start of the next.
    """

    def __init__(self, ids: Tensor, vocabulary: Vocabulary, block_size: int, stride: int) -> None:
        super().__init__(ids[:-1].unfold(0, block_size, stride), ids[1:].unfold(0, block_size, stride))
        self.vocabulary = vocabulary


def docs_text(
    block_size: int = 64, stride: int | None = None, val_fraction: float = 0.1
) -> tuple[TextDataset, TextDataset]:
    """Python's own language reference, as shipped with every CPython: about 0.5 MB of English, by character.

    The text, and with it the vocabulary, differs a little from one Python version to the next.

    Args:
        block_size: characters in a window, ≥ 1.
        stride: characters from the start of one window to the start of the next, ≥ 1; default: block_size.
        val_fraction: share of the text for validation, taken from its end; between 0 and 1.

    Returns:
        (train, val): datasets of x (N, block_size) int64 and y, the next characters, of the same shape; both have
        the same `.vocabulary`.

    Raises:
        ValueError: an argument is out of its range, or too large for the text.
    """
    from pydoc_data.topics import topics  # half a megabyte, which only this function needs

    text = "\n".join(topics[name] for name in sorted(topics))
    return _named("docs", *_windows(text, "pydoc_data.topics", block_size, stride, val_fraction))


def text_file(
    path: str | Path,
    block_size: int = 64,
    stride: int | None = None,
    val_fraction: float = 0.1,
    encoding: str = "utf-8",
) -> tuple[TextDataset, TextDataset]:
    """A text file, by character; see `docs_text` for the other arguments and the result.

    Args:
        path: the file.
        encoding: the file's encoding, such as "utf-8" or "latin-1".

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the text is too short for one window in each part, or the file is not text in this encoding.
    """
    path = a_path("path", path)
    if not path.is_file():
        raise FileNotFoundError(f"text_file: no file at {path}")
    a_text("encoding", encoding)
    try:
        text = regular(path).read_text(encoding=encoding)
    except LookupError:
        raise ValueError(f"text_file: unknown encoding {encoding!r}; 'utf-8' and 'latin-1' are common") from None
    except UnicodeError as error:
        raise ValueError(f"text_file: {path} is not {encoding} text ({error}); give its encoding=") from error
    return _named(path.name, *_windows(text, str(path), block_size, stride, val_fraction))


def digits(val_fraction: float = 0.2, seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1,797 handwritten digits, shuffled and split.

    Args:
        val_fraction: share of examples for validation, between 0 and 1.
        seed: seed of the shuffle.

    Returns:
        (train, val): datasets of x (N, 1, 8, 8) float32 in [0, 1] and y (N,) int64 in 0 … 9.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: an argument is out of its range.
    """
    sklearn_datasets = extra("sklearn.datasets", "digits", "scikit-learn", "digits")
    real_number("val_fraction", val_fraction, above=0, below=1)
    seed = whole_number("seed", seed, at_least=0)
    bunch = sklearn_datasets.load_digits()
    x = torch.from_numpy(bunch.images.astype(np.float32)).div_(16).unsqueeze(1)  # (N, 1, 8, 8)
    y = torch.from_numpy(bunch.target.astype(np.int64))
    order = torch.randperm(len(y), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    val_length = _val_length(len(y), val_fraction, 1)
    val, train = order[:val_length], order[val_length:]
    return _named("digits", TensorDataset(x[train], y[train]), TensorDataset(x[val], y[val]))


def mnist(folder: str | Path) -> tuple[TensorDataset, TensorDataset]:
    """MNIST, or any data set in its format, from its four IDX files.

    Args:
        folder: contains `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
            `t10k-labels-idx1-ubyte`; each name may end in `.gz`, and may have `.idx` in place of `-idx`.

    Returns:
        (train, val): datasets of x (N, 1, 28, 28) float32 in [0, 1] and y (N,) int64; if the files give another
        height and width than 28, x has theirs.

    Raises:
        FileNotFoundError: the folder or one of the files is missing.
        ValueError: a file is not in the format or is cut short, or numbers of images and labels differ.
    """
    folder = a_path("folder", folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"mnist: no folder at {folder}")
    # Find all four files before reading the first, to report an incomplete folder at once.
    parts = [
        (_find_idx(folder, f"{part}-images", 3), _find_idx(folder, f"{part}-labels", 1)) for part in ("train", "t10k")
    ]
    train, val = (_images_and_labels(images, labels) for images, labels in parts)
    return _named(folder.name, train, val)


def fashion_mnist(folder: str | Path | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Fashion-MNIST [Xiao et al. 2017, arXiv:1708.07747], from its four IDX files.

    Args:
        folder: contains the files, see `mnist`; default: `/usr/share/datasets/fashion-mnist`, the folder of Debian's
            package `dataset-fashion-mnist`.

    Returns:
        (train, val): datasets of 60,000 and 10,000 images, see `mnist`.

    Raises:
        FileNotFoundError: the folder or one of the files is missing.
        ValueError: a file is not in the format or is cut short, or numbers of images and labels differ.
    """
    if folder is None and not FASHION_MNIST.is_dir():
        raise FileNotFoundError(
            f"fashion_mnist: no folder at {FASHION_MNIST}; install Debian's package dataset-fashion-mnist, or give "
            "folder="
        )
    return _named("Fashion-MNIST", *mnist(FASHION_MNIST if folder is None else folder))


def _named(name: str, train: D, val: D) -> tuple[D, D]:
    """Give datasets the `name` by which records, titles and pages call them."""
    for own in (train, val):
        vars(own)["name"] = name
    return train, val


def _windows(
    text: str, source: str, block_size: int, stride: int | None, val_fraction: float
) -> tuple[TextDataset, TextDataset]:
    """Encode a text, split off its end for validation, and cut both parts into windows."""
    stride = block_size if stride is None else stride
    for name, size in (("block_size", block_size), ("stride", stride)):
        whole_number(name, size)
    real_number("val_fraction", val_fraction, above=0, below=1)
    # A window needs block_size + 1 characters, because its last target is the next character, and each part needs a
    # window. Rounding is needed as 1 - 0.9 is slightly below 0.1, which would demand a character too many.
    minimum = math.ceil(round((block_size + 1) / min(val_fraction, 1 - val_fraction), 6))
    if len(text) < minimum:
        raise ValueError(
            f"{source}: got {len(text)} characters; block_size={block_size} and "
            f"val_fraction={val_fraction} need at least {minimum}"
        )
    vocabulary = Vocabulary(text)
    ids = vocabulary.encode(text)
    split = len(ids) - _val_length(len(ids), val_fraction, block_size + 1)
    train, val = ids[:split], ids[split:]
    return TextDataset(train, vocabulary, block_size, stride), TextDataset(val, vocabulary, block_size, stride)


def _val_length(length: int, val_fraction: float, at_least: int) -> int:
    """Return the number of validation examples out of `length`; both parts get at least `at_least` examples."""
    return min(max(round(length * val_fraction), at_least), length - at_least)


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    """Return a text's code points (len(text),). Lone surrogates, as in undecoded file names, are kept."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _find_idx(folder: Path, stem: str, ndim: int) -> Path:
    """Return the path of an IDX file, whose name may have four spellings."""
    names = [f"{stem}{dash}idx{ndim}-ubyte{suffix}" for suffix in ("", ".gz") for dash in ("-", ".")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"mnist: {folder} has none of {', '.join(names)}")


def _images_and_labels(images_path: Path, labels_path: Path) -> TensorDataset:
    images = _read_idx(images_path, ndim=3)  # (N, height, width)
    labels = _read_idx(labels_path, ndim=1)  # (N,)
    if len(images) != len(labels):
        raise ValueError(
            f"mnist: {images_path.name} has {len(images)} images and {labels_path.name} has "
            f"{len(labels)} labels; equal counts are needed"
        )
    x = torch.from_numpy(images.astype(np.float32)).div_(255).unsqueeze(1)  # (N, 1, height, width)
    return TensorDataset(x, torch.from_numpy(labels.astype(np.int64)))


def _read_idx(path: Path, ndim: int) -> npt.NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes: a magic number and `ndim` sizes, all big-endian 32-bit, then the bytes."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"mnist: {path} is not a whole gzip file: {error}") from error
    magic = 0x0800 | ndim  # 0x08 is the format's code for unsigned bytes
    found = int.from_bytes(raw[:4], "big")
    if len(raw) >= 4 and found != magic:
        raise ValueError(f"mnist: {path} starts with magic number {found}; {magic} is needed")
    header_bytes = 4 + 4 * ndim
    if len(raw) < header_bytes:
        raise ValueError(f"mnist: {path} is cut short: {len(raw)} bytes, not even a header of {header_bytes}")
    shape = tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(4, header_bytes, 4))
    expected_bytes = header_bytes + math.prod(shape)
    if len(raw) != expected_bytes:
        what = "is cut short" if len(raw) < expected_bytes else "is too long"
        raise ValueError(f"mnist: {path} {what}: {len(raw)} bytes; {expected_bytes} for shape {shape} expected")
    return np.frombuffer(raw, dtype=np.uint8, offset=header_bytes).reshape(shape)


# Constants of MNIST-1D's definition: one stroke for each digit, and the parameters of its transformations.
_STROKES = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)
_PADDING, _TRANSLATION, _LENGTH = (36, 60), 48, 40
_SCALE, _SHEAR, _NOISE, _WHITE_NOISE, _BLUR = 0.4, 0.75, 0.25, 0.02, 2
_BYTES_OF_A_STROKE = 8000  # memory that a stroke takes while it is drawn


def mnist1d(size: int = 5000, val_fraction: float = 0.2, seed: int = 42) -> tuple[TensorDataset, TensorDataset]:
    """MNIST-1D [Greydanus and Kobak 2020, arXiv:2011.14439]: ten classes of generated strokes of 40 numbers.

    A stroke is a template of 12 numbers, padded with 36 to 60 zeros, stretched to 72 numbers, scaled by 0.8 to 1.2 and
    shifted cyclically by up to 47 places. Then its zeros are replaced by correlated noise; white noise and a shear are
    added to all numbers; and the stroke is resampled to 40 numbers. Linear models classify about a third of the
    validation data correctly, MLPs two thirds.

    With the defaults, which are the defaults of the authors' generator, the examples equal the authors' up to rounding.

    Args:
        size: number of examples, a multiple of 10; each class has a tenth of them.
        val_fraction: share of examples for validation, between 0 and 1.
        seed: seed of all draws, below 2³².

    Returns:
        (train, val): datasets of x (N, 40) float32, with mean 0 and standard deviation 1, and y (N,) int64 in 0 … 9.

    Raises:
        ValueError: an argument is out of its range.
    """
    from scipy.ndimage import gaussian_filter1d  # needed only here

    countable("size", size, "examples", _BYTES_OF_A_STROKE)
    if size % len(_STROKES):
        raise ValueError(f"mnist1d: size must be a multiple of {len(_STROKES)}, got {size}")
    real_number("val_fraction", val_fraction, above=0, below=1)
    # Use NumPy's old generator, as in the definition; no version of NumPy changes its stream.
    whole_number("seed", seed, at_least=0, at_most=2**32 - 1)
    stream = np.random.RandomState(seed)
    strokes = np.array(_STROKES)
    strokes = (strokes - strokes.mean(1, keepdims=True)) / strokes.std(1, keepdims=True)
    strokes = (strokes - strokes[:, :1]) / 6 + 1e-8  # only padding is 0
    y = np.repeat(np.arange(len(strokes)), size // len(strokes))  # (N,)
    width = strokes.shape[1] + _PADDING[1]
    x, blurred, white = np.empty((3, size, width))
    shear = np.empty((size, 1))
    places = np.linspace(0, 1, width)
    for i, label in enumerate(y):
        padded = np.zeros(strokes.shape[1] + _PADDING[0] + int(stream.rand() * (_PADDING[1] - _PADDING[0] + 1)))
        padded[: strokes.shape[1]] = strokes[label]
        stretched = np.interp(places, np.linspace(0, 1, len(padded)), padded)
        scale = 1 + _SCALE * (stream.rand() - 0.5)
        x[i] = np.roll(scale * stretched, stream.choice(_TRANSLATION))
        blurred[i], white[i] = _NOISE * stream.randn(width), _WHITE_NOISE * stream.randn(width)
        shear[i] = _SHEAR * (stream.rand() - 0.5)
    x = np.where(x != 0, x, gaussian_filter1d(blurred, _BLUR)) + white - shear * np.linspace(-0.5, 0.5, width)
    kept = np.linspace(0, 1, _LENGTH)
    x = np.stack([np.interp(kept, places, own) for own in x])  # (N, 40)
    order = stream.permutation(size)
    x, y = ((x - x.mean()) / x.std()).astype(np.float32)[order], y[order]
    split = size - _val_length(size, val_fraction, 1)
    train, val = ((torch.from_numpy(x[part]), torch.from_numpy(y[part])) for part in (slice(split), slice(split, None)))
    return _named("MNIST-1D", TensorDataset(*train), TensorDataset(*val))
