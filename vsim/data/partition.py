"""A dataset dealt to K clients: alike, or as unlike as clients are."""

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
_FEW = 30  # clients that a picture distinguishes
_DRAWS = 1000  # by which every client has its examples, or the partition is given up
_A_SHARE = 0.25  # of an example: with less of a class, a client gets none of it before those with more
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
    """Deal the examples of a dataset to K clients, every example to one of them.

    - "iid": all are shuffled and cut into K parts, whose sizes differ by at most 1.
    - "dirichlet": of each class every client has its own share; the K shares are drawn from Dirichlet(α) [1905.12022].
    - "shards": all are sorted by class and cut into `shards` · K equal pieces, of which every client is dealt `shards`
      [1602.05629].
    - "classes": every client has exactly `classes` classes, and every class about as many clients, who have it in
      equal parts [2102.02079].
    - "quantity": every client has all classes in proportion; the sizes are shares from Dirichlet(α) [2102.02079].
    - "power_law": every client has all classes in proportion, and `min_size` examples; the others are dealt in shares
      proportional to r^(−`exponent`), where r = 1 … K is the client's place in a random order.
    - "noise": as "iid", and the inputs of client k = 0 … K − 1 get Gaussian noise of deviation σ · (k + 1) / K, once
      [2102.02079: feature noise].

    For "dirichlet" and "quantity": where α is small, a draw leaves some clients with next to nothing. Those with fewer
    than `min_size` examples draw their shares again, while the others' stay, up to 1,000 times.

    Args:
        dataset: map-style. It is not copied.
        num_nodes: K.
        alpha: of "dirichlet" and "quantity", > 0: the smaller, the less alike the clients are.
        min_size: of the same and of "power_law", the fewest examples of a client; default 10.
        shards: of "shards", default 2. classes: of "classes".
        exponent: of "power_law", > 0: the larger, the less equal the sizes are.
        sigma: of "noise", > 0. The first tensor of the dataset, a TensorDataset or a Subset of one, gets the noise.
        labels: the class of every example, whole numbers or text, as a sequence or as a function of an example. None:
            the second tensor of a TensorDataset, the second field of another dataset's examples, each of which is then
            read once; "iid" needs no labels, and reads none.
        seed: of the partition, which has a generator of its own.

    Returns:
        The `Partition`: a factory of datasets, to be given as `train_dataset`.

    Raises:
        TypeError: an argument that the kind does not have, or lacks.
        ValueError: one out of its range, or more than the dataset has examples for; no labels.

    Deviations: [1909.06335] draws the classes' shares of each client, all of equal size, and not the clients' shares of
    each class. Repeated draws make small clients larger than the bare distribution has them. [2102.02079] calls
    σ · (k + 1) / K the variance; its authors' code draws noise of deviation σ · k / (K − 1), at every read.
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
    size = len(check_dataset(dataset, "dataset"))  # type: ignore[arg-type]
    whole_number("num_nodes", num_nodes, at_most=size)
    names, codes = _classes(dataset, labels, needed=kind not in ("iid", "noise"))
    stream = np.random.default_rng(whole_number("seed", seed, at_least=0))
    told = ", ".join([kind, *(f"{name}={value}" for name, value in given.items()), f"seed={seed}"])
    level = given.pop("sigma", None)
    owners = deal(stream, codes, num_nodes, **given)
    if level is not None:
        dataset = _noisy(dataset, level * (owners + 1) / num_nodes, stream)
    return Partition(dataset, num_nodes, owners, names, codes, told)


class Partition:
    """A dataset dealt to K clients; called as `train_dataset` is, it returns a client's examples. See `partition`.

    Attributes:
        dataset, num_nodes: what is dealt, and to how many, K.
        sizes: (K,) examples of every client.
        classes: the labels; none if unknown.
        counts: (K, classes) examples of every client by class.
    """

    def __init__(
        self, dataset: Dataset[Any], num_nodes: int, owners: Ints, classes: Sequence[Any], codes: Ints, told: str
    ) -> None:
        self.dataset, self.num_nodes, self.classes, self._told = dataset, num_nodes, classes, told
        self._codes, dealt = codes, np.flatnonzero(owners >= 0)  # −1: another part of a split has it
        owners = owners[dealt]
        self._order = torch.from_numpy(dealt[np.argsort(owners, kind="stable")])  # (n,), client 0's first
        self.sizes = torch.from_numpy(np.bincount(owners, minlength=num_nodes))
        self._ends = self.sizes.cumsum(0)
        cells = np.bincount(owners * len(classes) + codes[dealt], minlength=num_nodes * len(classes))
        self.counts = torch.from_numpy(cells[: num_nodes * len(classes)].reshape(num_nodes, len(classes)))

    def indices(self, rank: int) -> Tensor:
        """The examples of a client, (n,) positions in the dataset, ascending."""
        end = int(self._ends[whole_number("rank", rank, at_least=0, at_most=self.num_nodes - 1)])
        return self._order[end - int(self.sizes[rank]) : end]

    @known_keywords
    def split(self, test: float = 0.2, *, seed: int = 0) -> tuple[Partition, Partition]:
        """Split the examples of every client at random: return a partition to train on, and one to test each client.

        Give the second as `client_val_dataset`, with the first as the training data.

        Args:
            test: the share of each client's examples that are for the test, in (0, 1), rounded; at least one example of
                a client is in either part.
            seed: of the split, which has a generator of its own.

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
        names = (f"{self._told}, split({share:g}, seed={seed}) to {part}" for part in ("train", "test"))
        return tuple(  # type: ignore[return-value]
            Partition(self.dataset, self.num_nodes, own, self.classes, self._codes, told)
            for own, told in zip((train, tested), names, strict=True)
        )

    def __call__(self, rank: int, num_nodes: int, train_dataset: bool) -> Subset[Any]:
        """Return the training data of node `rank`.

        Raises:
            ValueError: the run has another number of nodes, or asks for validation data, which is not dealt.
        """
        if num_nodes != self.num_nodes:
            raise ValueError(f"{self!r} is for {self.num_nodes} nodes, and the run has {num_nodes}")
        if not train_dataset:
            raise ValueError(f"{self!r} is of training data; give the validation data as a dataset of its own")
        own = self.indices(rank)  # a view, which is how tensors are gathered; other datasets may want numbers
        return Subset(self.dataset, own if in_memory(self.dataset) else own.tolist())  # type: ignore[arg-type]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw how many examples of every class each client has, and above it how many in all.

        More than 30 clients stand in the order of the class that they have most of, and of their size.

        Args:
            ax: where to draw; default the axes of a new figure, of the width of a column.
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
        bar = ax.figure.colorbar(image, ax=ax, aspect=30, pad=0.02, label="of a class", ticks=ticks)
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
            f"Partition({self._told}: {int(self.sizes.sum()):,} examples, K = {self.num_nodes:,} with {smallest} to "
            f"{largest}, median {middle}{own})"
        )

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"


def _classes(dataset: Dataset[Any], labels: Labels | None, needed: bool) -> tuple[Sequence[Any], Ints]:
    """Return the classes, and the position of every example's among them (N,)."""
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
    """Return the second tensor of a dataset that is held in tensors, if it can be of labels: (N,)."""
    if type(dataset) is Subset:
        inner = _stored(dataset.dataset)
        return None if inner is None else inner[torch.as_tensor(dataset.indices, dtype=torch.long)]
    if in_memory(dataset) is None or len(dataset.tensors) < 2:  # type: ignore[attr-defined]
        return None
    second: Tensor = dataset.tensors[1]  # type: ignore[attr-defined]
    return None if second.dim() > 1 or second.is_floating_point() else second.cpu()


def _read(dataset: Dataset[Any], label: Callable[[Any], Any] | None, size: int) -> Iterator[Any]:
    """Yield the label of every example, each read alone."""
    with isolated(0, torch.device("cpu")):  # examples may be drawn
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


# How each kind is dealt: who owns each of N examples, whose classes are `codes` (N,), of 0 … C − 1 -------------------


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
        client[np.argsort(has.sum(0) + stream.random(len(sizes)))[:classes]] = True  # which the fewest have so far
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


# Kind → how it is dealt, and its arguments by default; None: to be given.
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
    """The piece of each of `size` places, cut into pieces whose sizes differ by at most 1."""
    return np.arange(size) * number // size


def _shuffled(stream: np.random.Generator, codes: Ints) -> list[Ints]:
    """The examples of every class, shuffled."""
    return [stream.permutation(np.flatnonzero(codes == c)) for c in range(codes.max() + 1)]


def _mixed(stream: np.random.Generator, codes: Ints) -> Ints:
    """The examples in the order of their places within their own classes: any stretch has all classes in proportion."""
    own = _shuffled(stream, codes)
    places = np.concatenate([(np.arange(len(one)) + stream.random()) / len(one) for one in own])
    mixed: Ints = np.concatenate(own)[np.argsort(places)]
    return mixed


def _cut(order: Ints, counts: Ints) -> Ints:
    """Deal examples in this order, to each client its count (K,)."""
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
    """Cut each of `totals` (C,) by shares from Dirichlet(α): (C, K), of which each client has min_size at least."""
    _check_enough(min_size, num_nodes, int(totals.sum()))
    logs, short = np.empty((len(totals), num_nodes)), np.full(num_nodes, True)
    for _ in range(_DRAWS):
        # Logarithms of Gamma(α), which for small α are beyond floating point: G(α) = G(α + 1) · U^(1/α).
        new = len(totals), int(short.sum())
        logs[:, short] = np.log(stream.standard_gamma(alpha + 1, new)) - stream.standard_exponential(new) / alpha
        shares = np.exp(logs - logs.max(1, keepdims=True))
        counts = _whole(shares / shares.sum(1, keepdims=True) * totals[:, None], totals)
        short = counts.sum(0) < min_size
        if not short.any():
            return counts
    advice = "lower min_size or take fewer nodes"
    if totals.sum() >= 2 * min_size * num_nodes:  # enough for all, unequally dealt
        advice += ", or raise alpha"
    raise ValueError(
        f"partition: after {_DRAWS:,} draws of Dirichlet({alpha}), {short.sum():,} of {num_nodes:,} nodes have fewer "
        f"than min_size={min_size} of {totals.sum():,} examples; {advice}"
    )


def _whole(exact: NDArray[np.float64], totals: Ints) -> Ints:
    """Round shares (C, K) to whole examples, class by class, so that each class has its total.

    Examples left over by rounding down go to clients that have a share in the class, the ones furthest behind their
    exact share so far first: with large α, all classes would otherwise be rounded up at the same clients.
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
