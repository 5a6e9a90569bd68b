"""Deal a dataset to K clients, evenly or heterogeneously."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from vsim.arguments import a_function, known_keywords, one_of, real_number, whole_number
from vsim.cluster.randomness import isolated
from vsim.data.batches import check_dataset, fetch, in_memory
from vsim.figures.style import literal, sized

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Ints = NDArray[np.int64]
_FEW = 30  # the most clients that a picture can distinguish
_DRAWS = 1000  # largest number of draws for `min_size`; then an error
_A_SHARE = 0.25  # examples: clients with a smaller exact share of a class are the last to get leftovers of the class
Labels = Sequence[Any] | Tensor | Ints | Callable[[Any], Any]


@known_keywords
def partition(
    dataset: Dataset[Any],
    num_nodes: int,
    kind: str,
    *,
    alpha: float | None = None,
    min_size: int | None = None,
    shards: int | None = None,
    classes: int | None = None,
    exponent: float | None = None,
    sigma: float | None = None,
    labels: Labels | None = None,
    seed: int = 0,
) -> Partition:
    """Deal the examples of a dataset to K clients, each example to one client.

    - "iid": shuffle the examples, and cut them into K parts, whose sizes differ by at most 1.
    - "dirichlet": for each class, draw the K clients' shares from Dirichlet(α) [1905.12022].
    - "shards": sort the examples by class, cut them into `shards` · K equal pieces, and deal `shards` random pieces to
      each client [1602.05629].
    - "classes": give each client exactly `classes` classes, and each class to about the same number of clients, in
      equal parts [2102.02079].
    - "quantity": give each client all classes in proportion, and a size that is a share from Dirichlet(α) [2102.02079].
    - "power_law": give each client all classes in proportion, and `min_size` examples; deal the remaining examples in
      shares proportional to r^(−`exponent`), where r = 1 … K is the client's place in a random order.
    - "noise": as "iid", and add Gaussian noise of deviation σ · (k + 1) / K to the inputs of client k = 0 … K − 1, once
      [2102.02079: feature noise].

    With a small α, "dirichlet" and "quantity" may leave some clients with almost no examples. Clients with fewer than
    `min_size` examples draw their shares again, up to 1,000 times; the draws of other clients stay.

    Args:
        dataset: a map-style dataset; not copied.
        num_nodes: the number of clients K.
        alpha: α > 0 for "dirichlet" and "quantity": the smaller, the more the clients differ.
        min_size: fewest examples of a client, for "dirichlet", "quantity" and "power_law"; default 10.
        shards: pieces per client for "shards", default 2. classes: classes per client for "classes".
        exponent: exponent > 0 for "power_law": the larger, the more the sizes differ.
        sigma: σ > 0 for "noise", which is added to the first tensor of a TensorDataset or of a Subset of one.
        labels: the class of every example, whole numbers or text, as a sequence or as a function of an example. None:
            the second tensor of a TensorDataset; for other datasets, the second field of every example, which is read
            once. "iid" and "noise" need no labels, and read no examples.
        seed: seed of the partition's own generator.

    Returns:
        The `Partition`: a factory of datasets, to give as `train_dataset`.

    Raises:
        TypeError: an argument has no effect on the kind, or is missing.
        ValueError: an argument is out of its range, the dataset has too few examples, or labels are missing.

    Deviations: [1909.06335] has clients of equal size, and draws for each client its shares of the classes; here, for
    each class, the clients' shares of the class are drawn. Repeated draws make small clients larger than in the plain
    distribution. [2102.02079] calls σ · (k + 1) / K the variance; its authors' code draws noise of deviation
    σ · k / (K − 1) at every read.
    """
    named: dict[str, Any] = {
        **{"alpha": alpha, "min_size": min_size, "shards": shards, "classes": classes},
        **{"exponent": exponent, "sigma": sigma},
    }
    deal, defaults = KINDS[one_of("kind", kind, KINDS)]
    odd = [name for name, value in named.items() if value is not None and name not in defaults]
    if odd:
        raise TypeError(f"partition: {odd[0]}= has no effect on {kind!r}, which takes {', '.join(defaults) or 'none'}")
    given = {name: default if named[name] is None else named[name] for name, default in defaults.items()}
    if any(value is None for value in given.values()):
        raise TypeError(f"partition: {kind!r} needs {' and '.join(n for n, v in given.items() if v is None)}=")
    for name, value in given.items():
        whole_number(name, value) if name in _WHOLE else real_number(name, value, above=0)
        given[name] = value.item() if isinstance(value, np.generic) else value
    size = len(check_dataset(dataset, "dataset"))  # type: ignore[arg-type]
    num_nodes, seed = whole_number("num_nodes", num_nodes, at_most=size), whole_number("seed", seed, at_least=0)
    names, codes = _classes(dataset, labels, needed=kind not in ("iid", "noise"))
    stream = np.random.default_rng(seed)
    description = ", ".join([kind, *(f"{name}={value}" for name, value in given.items()), f"seed={seed}"])
    level = given.pop("sigma", None)
    owners = deal(stream, codes, num_nodes, **given)
    if level is not None:
        dataset = _noisy(dataset, level * (owners + 1) / num_nodes, stream)
    return Partition(dataset, num_nodes, owners, names, codes, description)


class Partition:
    """A dataset dealt to K clients by `partition`; give it as `train_dataset`, and the run calls it for each client.

    Attributes:
        dataset, num_nodes: the dataset, and the number K of clients.
        sizes: (K,) number of examples of every client.
        classes: the labels; empty if unknown.
        counts: (K, classes) number of examples of every client in every class.
    """

    def __init__(
        self, dataset: Dataset[Any], num_nodes: int, owners: Ints, classes: Sequence[Any], codes: Ints, description: str
    ) -> None:
        self.dataset, self.num_nodes, self.classes, self._description = dataset, num_nodes, classes, description
        self._codes, dealt = codes, np.flatnonzero(owners >= 0)  # owner −1: an example in another part of a split
        owners = owners[dealt]
        self._order = torch.from_numpy(dealt[np.argsort(owners, kind="stable")])  # (n,), client 0's first
        self.sizes = torch.from_numpy(np.bincount(owners, minlength=num_nodes))
        self._ends = self.sizes.cumsum(0)
        cells = np.bincount(owners * len(classes) + codes[dealt], minlength=num_nodes * len(classes))
        self.counts = torch.from_numpy(cells[: num_nodes * len(classes)].reshape(num_nodes, len(classes)))

    def indices(self, rank: int) -> Tensor:
        """Return the positions (n,) of a client's examples in the dataset, in ascending order."""
        end = int(self._ends[whole_number("rank", rank, at_least=0, at_most=self.num_nodes - 1)])
        return self._order[end - int(self.sizes[rank]) : end]

    @known_keywords
    def split(self, test: float = 0.2, *, seed: int = 0) -> tuple[Partition, Partition]:
        """Split the examples of every client at random; return a partition for training, and one for testing clients.

        Give the first as `train_dataset`, and the second as `client_val_dataset`.

        Args:
            test: share of each client's examples for testing, in (0, 1); rounded to whole examples, with at least one
                example of every client in each part.
            seed: seed of the split's own generator.

        Raises:
            ValueError: a client has fewer than two examples.
        """
        share, stream = (
            real_number("test", test, above=0, below=1),
            np.random.default_rng(whole_number("seed", seed, at_least=0)),
        )
        if int(self.sizes.min()) < 2:
            client = int(self.sizes.argmin())
            raise ValueError(
                f"{self!r}: client {client} has {int(self.sizes[client])} of the two examples that a split takes: deal "
                "with min_size=2, or to fewer clients"
            )
        train, tested = np.full((2, len(self._codes)), -1)
        for client, size in enumerate(self.sizes.tolist()):
            mixed = stream.permutation(self.indices(client).numpy())
            number = min(max(1, round(share * size)), size - 1)
            tested[mixed[:number]], train[mixed[number:]] = client, client
        names = (f"{self._description}, split({share:g}, seed={seed}) to {part}" for part in ("train", "test"))
        return tuple(  # type: ignore[return-value]
            Partition(self.dataset, self.num_nodes, own, self.classes, self._codes, description)
            for own, description in zip((train, tested), names, strict=True)
        )

    def __call__(self, rank: int, num_nodes: int, train_dataset: bool) -> Subset[Any]:
        """Return the training data of node `rank`.

        Raises:
            ValueError: the run has another number of nodes, or asks for validation data, which a partition lacks.
        """
        if num_nodes != self.num_nodes:
            raise ValueError(f"{self!r} is for {self.num_nodes} nodes, and the run has {num_nodes}")
        if not train_dataset:
            raise ValueError(f"{self!r} is of training data; give the validation data as a dataset of its own")
        own = self.indices(rank)  # positions (n,); datasets that are not in memory may need Python numbers
        return Subset(self.dataset, own if in_memory(self.dataset) else own.tolist())  # type: ignore[arg-type]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw each client's number of examples by class, and above it the client's total.

        More than 30 clients are sorted by their largest class, and then by size.

        Args:
            ax: the axes to draw in; default: axes of a new figure, as wide as a column.
        """
        from matplotlib.colors import PowerNorm
        from matplotlib.ticker import MaxNLocator

        from vsim.figures.paper import axes_of

        if not self.classes:
            raise ValueError(f"{self!r} has no classes to show: give partition(…, labels=…)")
        ax = axes_of(ax, 3.4, min(4.0, 1.6 + 0.11 * len(self.classes)))
        counts, many = self.counts.numpy(), self.num_nodes > _FEW
        if many:
            counts = counts[np.lexsort((-counts.sum(1), counts.argmax(1)))]
        cells = np.ma.masked_equal(counts.T, 0)  # white
        image = ax.imshow(cells, aspect="auto", cmap="viridis_r", norm=PowerNorm(0.5, 0), interpolation="nearest")
        ax.set(xlabel="client, by its main class" if many else "client", ylabel="class")
        ax.set_yticks(range(len(self.classes)), [literal(str(name)) for name in self.classes])
        above = ax.inset_axes((0, 1.05, 1, 0.33), sharex=ax)
        edges = np.arange(self.num_nodes + 1) - 0.5
        above.stairs(counts.sum(1), edges, fill=True, color="0.5")
        if not many:
            ax.set_xticks(range(self.num_nodes))
            gaps: Any = {"color": "white", "linewidth": 0.8}
            ax.vlines(edges[1:-1], *ax.get_ylim(), **gaps)
            ax.hlines(np.arange(1, len(self.classes)) - 0.5, *ax.get_xlim(), **gaps)
            above.vlines(edges[1:-1], 0, counts.sum(1).max(), **gaps)
        above.set(ylabel="examples", ylim=(0, None))
        above.tick_params("x", labelbottom=False, length=0)
        above.yaxis.set_major_locator(MaxNLocator(2, integer=True))
        above.spines[["top", "right"]].set_visible(False)
        ticks = MaxNLocator(4, integer=True)
        bar = ax.figure.colorbar(image, ax=ax, aspect=30, pad=0.02, label="examples of the class", ticks=ticks)
        bar.outline.set_visible(False)
        for axes in (ax, above, bar.ax):
            sized(axes)
        return ax

    def __repr__(self) -> str:
        smallest, middle, largest = (f"{int(self.sizes.sort().values[i]):,}" for i in (0, self.num_nodes // 2, -1))
        own = ""
        if len(self.classes):
            own = f", {(self.counts > 0).sum(1).double().mean():.3g} of {len(self.classes)} classes each on average"
        return (
            f"Partition({self._description}: {int(self.sizes.sum()):,} examples, K = {self.num_nodes:,} with "
            f"{smallest} to {largest}, median {middle}{own})"
        )

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"


def _classes(dataset: Dataset[Any], labels: Labels | None, needed: bool) -> tuple[Sequence[Any], Ints]:
    """Return the classes, and every example's class (N,) as an index into them."""
    size = len(dataset)  # type: ignore[arg-type]
    labels = _stored(dataset) if labels is None else labels
    if labels is None and not needed:
        return [], np.zeros(size, np.int64)
    if labels is None or callable(labels):
        if labels is not None:
            a_function("labels", labels, "example")
        labels = list(_read(dataset, labels, size))
    found = np.asarray(labels)
    if found.shape != (size,) or found.dtype.kind not in "biuU":
        raise ValueError(
            f"partition: labels must be a whole number or a text for each of {size:,} examples, got {found.dtype} of "
            f"shape {found.shape}; give labels=, as a sequence or as a function of an example"
        )
    classes, codes = np.unique(found, return_inverse=True)
    return classes.tolist(), codes.astype(np.int64)


def _stored(dataset: Dataset[Any]) -> Tensor | None:
    """Return the second tensor (N,) of a dataset that is held in tensors, if it can hold labels; else None."""
    if type(dataset) is Subset:
        inner = _stored(dataset.dataset)
        return None if inner is None else inner[torch.as_tensor(dataset.indices, dtype=torch.long)]
    if in_memory(dataset) is None or len(dataset.tensors) < 2:  # type: ignore[attr-defined]
        return None
    second: Tensor = dataset.tensors[1]  # type: ignore[attr-defined]
    return None if second.dim() > 1 or second.is_floating_point() else second.cpu()


def _read(dataset: Dataset[Any], label: Callable[[Any], Any] | None, size: int) -> Iterator[Any]:
    """Yield the label of every example; read examples one by one."""
    with isolated(0, torch.device("cpu")):  # a dataset may draw random numbers
        for i in range(size):
            (example,) = fetch(dataset, [i])
            try:
                own = example[1] if label is None else label(example)
            except (TypeError, LookupError) as error:
                if label is not None:
                    raise
                raise ValueError(
                    f"partition: example {i} of the dataset has no second field ({error}); give labels=, as a sequence "
                    "or as a function of an example"
                ) from error
            yield own.item() if isinstance(own, Tensor) and own.dim() == 0 else own


# The kinds: return the owners (N,) of N examples with classes `codes` (N,), 0 … C − 1 --------------------------------


def _iid(stream: np.random.Generator, codes: Ints, num_nodes: int) -> Ints:
    owners = np.empty_like(codes)
    owners[stream.permutation(len(codes))] = _pieces(len(codes), num_nodes)
    return owners


def _dirichlet(stream: np.random.Generator, codes: Ints, num_nodes: int, alpha: float, min_size: int) -> Ints:
    owners = np.empty_like(codes)
    counts = _drawn(stream, np.bincount(codes), num_nodes, alpha, min_size)
    for own, parts in zip(_shuffled(stream, codes), counts, strict=True):
        owners[own] = np.repeat(np.arange(num_nodes), parts)
    return owners


def _shards(stream: np.random.Generator, codes: Ints, num_nodes: int, shards: int) -> Ints:
    pieces = shards * num_nodes
    if pieces > len(codes):
        raise ValueError(f"partition: shards={shards} for {num_nodes} nodes are {pieces:,}, of {len(codes):,} examples")
    owners = np.empty_like(codes)
    dealt = stream.permutation(pieces) // shards  # the client of every piece
    owners[np.concatenate(_shuffled(stream, codes))] = dealt[_pieces(len(codes), pieces)]
    return owners


def _by_classes(stream: np.random.Generator, codes: Ints, num_nodes: int, classes: int) -> Ints:
    sizes = np.bincount(codes)
    whole_number("classes", classes, at_most=len(sizes))
    if classes * num_nodes < len(sizes):
        raise ValueError(
            f"partition: {num_nodes} nodes with classes={classes} cover at most {classes * num_nodes} of the "
            f"{len(sizes)} classes, and no node would get the others"
        )
    has = np.zeros((num_nodes, len(sizes)), bool)
    for client in has:
        client[np.argsort(has.sum(0) + stream.random(len(sizes)))[:classes]] = True  # with the fewest clients so far
    if (has.sum(0) > sizes).any():
        rare = int(np.argmax(has.sum(0) - sizes))
        raise ValueError(f"partition: {has.sum(0)[rare]} nodes need a class that has {sizes[rare]} examples")
    owners = np.empty_like(codes)
    for own, clients in zip(_shuffled(stream, codes), has.T, strict=True):
        owners[own] = stream.permutation(np.flatnonzero(clients))[_pieces(len(own), int(clients.sum()))]
    return owners


def _quantity(stream: np.random.Generator, codes: Ints, num_nodes: int, alpha: float, min_size: int) -> Ints:
    mixed = _mixed(stream, codes)
    (counts,) = _drawn(stream, np.array([len(codes)]), num_nodes, alpha, min_size)
    return _cut(mixed, counts)


def _power_law(stream: np.random.Generator, codes: Ints, num_nodes: int, exponent: float, min_size: int) -> Ints:
    _check_enough(min_size, num_nodes, len(codes))
    mixed, places = _mixed(stream, codes), stream.permutation(num_nodes) + 1.0
    shares = np.exp(-exponent * np.log(places))
    rest = np.array([len(codes) - min_size * num_nodes])
    return _cut(mixed, min_size + _whole((shares / shares.sum() * rest)[None], rest)[0])


# Kind → the function that deals the examples, and the defaults of its arguments; None: the argument is required.
KINDS: dict[str, tuple[Callable[..., Ints], dict[str, Any]]] = {
    "iid": (_iid, {}),
    "dirichlet": (_dirichlet, {"alpha": None, "min_size": 10}),
    "shards": (_shards, {"shards": 2}),
    "classes": (_by_classes, {"classes": None}),
    "quantity": (_quantity, {"alpha": None, "min_size": 10}),
    "power_law": (_power_law, {"exponent": None, "min_size": 10}),
    "noise": (_iid, {"sigma": None}),
}
_WHOLE = ("min_size", "shards", "classes")


def _noisy(dataset: Dataset[Any], deviations: NDArray[np.float64], stream: np.random.Generator) -> TensorDataset:
    """Return a copy of a dataset with Gaussian noise of these deviations (N,) in its first tensor."""
    read = in_memory(dataset)
    first, *others = [None] if read is None else read(torch.arange(len(deviations)))
    if first is None or not first.is_floating_point():
        given = type(dataset).__name__ if first is None else f"tensors of {first.dtype}"
        raise TypeError(f"partition: 'noise' needs a dataset that is a TensorDataset of real inputs, got {given}")
    noise = torch.from_numpy(stream.standard_normal(first.shape, np.float32)).to(first)
    scale = torch.from_numpy(deviations).to(first).view(-1, *[1] * (first.dim() - 1))
    return TensorDataset(first + scale * noise, *others)


def _pieces(size: int, number: int) -> Ints:
    """Cut `size` places into `number` pieces, whose sizes differ by at most 1; return each place's piece (size,)."""
    return np.arange(size) * number // size


def _shuffled(stream: np.random.Generator, codes: Ints) -> list[Ints]:
    """Return the examples of every class, shuffled."""
    return [stream.permutation(np.flatnonzero(codes == c)) for c in range(codes.max() + 1)]


def _mixed(stream: np.random.Generator, codes: Ints) -> Ints:
    """Return the examples in a random order, in which every interval has all classes in proportion to their sizes."""
    own = _shuffled(stream, codes)
    places = np.concatenate([(np.arange(len(one)) + stream.random()) / len(one) for one in own])
    mixed: Ints = np.concatenate(own)[np.argsort(places)]
    return mixed


def _cut(order: Ints, counts: Ints) -> Ints:
    """Deal examples in the given order; client k gets counts[k] examples."""
    owners = np.empty_like(order)
    owners[order] = np.repeat(np.arange(len(counts)), counts)
    return owners


def _check_enough(min_size: int, num_nodes: int, size: int) -> None:
    if min_size * num_nodes > size:
        raise ValueError(
            f"partition: min_size={min_size} for {num_nodes:,} nodes are {min_size * num_nodes:,} examples, and there "
            f"are {size:,}; lower min_size, or take fewer nodes"
        )


def _drawn(stream: np.random.Generator, totals: Ints, num_nodes: int, alpha: float, min_size: int) -> Ints:
    """Cut class sizes `totals` (C,) into (C, K) by shares from Dirichlet(α); each client gets at least `min_size`."""
    _check_enough(min_size, num_nodes, int(totals.sum()))
    logs, short = np.empty((len(totals), num_nodes)), np.full(num_nodes, True)
    for _ in range(_DRAWS):
        # Draw logarithms of Gamma(α), because draws underflow for small α: G(α) = G(α + 1) · U^(1/α).
        new = len(totals), int(short.sum())
        logs[:, short] = np.log(stream.standard_gamma(alpha + 1, new)) - stream.standard_exponential(new) / alpha
        shares = np.exp(logs - logs.max(1, keepdims=True))
        counts = _whole(shares / shares.sum(1, keepdims=True) * totals[:, None], totals)
        short = counts.sum(0) < min_size
        if not short.any():
            return counts
    advice = "lower min_size or take fewer nodes"
    if totals.sum() >= 2 * min_size * num_nodes:  # there are enough examples, but shares are unequal
        advice += ", or raise alpha"
    raise ValueError(
        f"partition: after {_DRAWS:,} draws of Dirichlet({alpha}), {short.sum():,} of {num_nodes:,} nodes have fewer "
        f"than min_size={min_size} of {totals.sum():,} examples; {advice}"
    )


def _whole(exact: NDArray[np.float64], totals: Ints) -> Ints:
    """Round shares (C, K) to whole examples, class by class, so that each class has its total.

    Examples left over by rounding down go to clients that have a share of the class, first to the clients furthest
    behind their exact shares so far. Without this order, large α would round all classes up at the same clients.
    """
    counts = np.floor(exact).astype(np.int64)
    behind = np.zeros(exact.shape[1])
    for own, count, total in zip(exact, counts, totals, strict=True):
        rest = own - count
        behind += rest
        order = np.argsort(-np.where(own >= _A_SHARE, len(totals) + behind, rest), kind="stable")
        up = order[: total - count.sum()]
        count[up] += 1
        behind[up] -= 1
    return counts
