"""The network between the nodes: its links, their notation as text, and the seconds of a collective."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Hashable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vsim.arguments import a_text, known_keywords, naming, one_of, real_number, reject_unknown, whole_number
from vsim.arguments import given as given_value
from vsim.network.cluster_file import names_file, read_part
from vsim.network.cost import ALGORITHMS, COLLECTIVES, algorithm_of, ring_seconds, rounds, ways

Floats = NDArray[np.float64]
Link = str | tuple[float | str, float | str]
Crowd = tuple[tuple[int, int], ...]
# The most numbers in an array when several calls are priced at once.
_NUMBERS = 1 << 22
# Bound on the number of nodes, because every node takes memory; a larger number is probably a typing error.
MOST_NODES = 10**6

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {
    **{"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0},
    **{"ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9},
}
_NUMBER = r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*"


def bits_per_second(name: str, value: Any) -> float:
    """Return a rate in bit/s, given as a number (possibly infinite) or as text: "100 Mbit/s", "1 Gbps".

    Raises:
        TypeError: `value` is not a number or text. ValueError: `value` is not a rate, is in bytes, or is not above 0.
    """
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + r"([kMGT]?)(bit/s|bits/s|bps|bit|b/s)\s*", value, flags=re.ASCII)
        if match is None:
            amount = re.fullmatch(_NUMBER + r"([kKMGT]?)(?:B|bytes?)(/s|ps)?\s*", value)
            hint = ""
            if amount is not None:
                what = "bytes a second" if amount[3] else "bytes, and no rate"
                hint = f": that is {what}; as a rate {8 * float(amount[1]):g} {amount[2].replace('K', 'k')}bit/s"
            raise ValueError(f"{name} must be a rate in bits, such as '200 Mbit/s', got {value!r}{hint}")
        bits = float(match[1]) * _PREFIXES[match[2]]
        if bits == math.inf:
            raise ValueError(f"{name} must be below 1.8e308 bit/s, got {value!r}; for an infinite rate give math.inf")
        value = bits
    return math.inf if isinstance(value, Real) and value == math.inf else real_number(name, value, above=0)


def seconds(name: str, value: Any, **bounds: float) -> float:
    """Return a duration in seconds, given as a number of seconds or as text: "50 ms", "10 h".

    Raises:
        TypeError: `value` is not a number or text. ValueError: `value` is text that is not a duration,
            or is outside the bounds of `real_number`.
    """
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + "(d|h|min|s|ms|us|µs|μs|ns)" + r"\s*", value)
        if match is None:
            units = "d, h, min, s, ms, us or ns"
            raise ValueError(f"{name} must be a duration in {units}, such as '50 ms', got {value!r}")
        value = float(match[1]) * _SECONDS[match[2]]
    return real_number(name, value, **bounds)


def num_bytes(name: str, value: Any) -> float:
    """Return a size in bytes, given as a number of bytes or as text: "80 GB", in powers of ten.

    Raises:
        TypeError: `value` is not a number or text. ValueError: `value` is not a size, or is not above 0.
    """
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + r"([kMGT]?)B\s*", value, flags=re.ASCII)
        if match is None:
            raise ValueError(f"{name} must be a number of bytes, or text such as '80 GB', got {value!r}")
        value = float(match[1]) * _PREFIXES[match[2]]
    return real_number(name, value, above=0)


def rate(bits: float) -> str:
    """Return a rate as text.

    >>> rate(2e8)
    '200 Mbit/s'
    """
    for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if unit <= bits < math.inf:
            return f"{bits / unit:.4g} {prefix}bit/s"
    return f"{bits:g} bit/s"


def delay(value: float) -> str:
    """Return a short duration as text.

    >>> delay(0.05)
    '50 ms'
    """
    return f"{value * 1e3:.4g} ms"


class Network:
    """Nodes with a link between each pair, over one full-duplex line per node; messages on one line queue in order.

        a message of S bytes takes  latency + 8 S / bandwidth

    Args:
        bandwidth: bandwidth of a node's line in each direction, in bit/s or text: "200 Mbit/s", "1 Gbit/s".
        latency: latency of a message, one way, in seconds or text: "50 ms".
        collective: how collectives are made of messages: "ring", "tree", "halving-doubling" or "server"; see
            `vsim.network.cost`. Default: a server in runs of clients (see `Sample`), a ring in all others.
        server: bandwidth of the server's line, for collectives through a server, and for pushes and pulls with any
            `collective`. Default: the nodes' bandwidth. If links differ, the server is at the place of node 0.

    Raises:
        TypeError, ValueError: a bandwidth is not above 0 or not a rate ("10 MB" is bytes), or a latency is below 0.

    >>> Network("200 Mbit/s", "50 ms").seconds("all_reduce", 8, 100e6)  # 14 messages of 12.5 MB
    array([7.7])
    """

    @known_keywords
    def __init__(
        self,
        bandwidth: float | str,
        latency: float | str = 0.0,
        *,
        collective: str | None = None,
        server: float | str | None = None,
    ) -> None:
        self.collective = None if collective is None else one_of("collective", collective, ALGORITHMS)
        # Nodes are at places. Entry (i, j) is the link from place i to place j; the diagonal has links inside a place.
        # For alternative networks (see `grid`), a first dimension over the networks precedes these two.
        try:
            self._bits = np.array([[bits_per_second("bandwidth", bandwidth)]])
        except TypeError as error:
            raise TypeError(f"{error}; where links differ, Network.between takes a matrix") from None
        self._latency = np.array([[_latency("latency", latency)]])
        self._place: NDArray[np.int64] | None = None  # of every node; None: all nodes at one place
        self._server: Any = None if server is None else bits_per_second("server", server)

    @classmethod
    def parse(cls, text: str) -> Network:
        """Return the network that a text "bandwidth, latency, collective" describes; only the bandwidth is required.

        >>> Network.parse("200 Mbit/s, 50 ms, tree")
        Network(200 Mbit/s, 50 ms, tree)
        """
        first, *rest = (part.strip() for part in a_text("text", text).split(","))
        named = rest and (rest[-1] in ALGORITHMS or not any(letter.isdigit() for letter in rest[-1]))
        collective = one_of("collective", rest.pop(), ALGORITHMS) if named else None
        if len(rest) > 1:
            raise ValueError(
                f"a network is 'bandwidth, latency, collective', such as '200 Mbit/s, 50 ms', got {text!r}"
            )
        return cls(first, *rest, collective=collective)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Network:
        """Return the network of a file that `vsim measure` wrote, or that was written by hand.

        The file is JSON. Its field "network" is text, as in `parse`, or an object with the arguments of `Network`; if
        `bandwidth` is a matrix, with those of `Network.between`.

        Raises:
            OSError: the file cannot be read. ValueError, TypeError: a field, which the message names, is missing or
                not possible.
        """
        own = read_part(path, "network")
        with naming(f"{path}: network"):
            if isinstance(own, str):
                return cls.parse(own)
            if not isinstance(own, dict):
                raise TypeError(f"must be text, or an object with bandwidth and latency, got {given_value(own)}")
            reject_unknown(own, ("bandwidth", "latency", "collective", "server"), "the object")
            if own.get("bandwidth") is None:
                raise ValueError("bandwidth is missing")
            links_differ = any(isinstance(own.get(name), list) for name in ("bandwidth", "latency"))
            return (cls.between if links_differ else cls)(**own)

    @classmethod
    def of(cls, given: Network | str | float | None) -> Network:
        """Return a network: `given` itself, the one that a text describes or that a file holds (see `from_file`; text
        that ends in ".json" is a path), or one with a number as its bandwidth."""
        if given is None:
            raise TypeError("network is missing: give a Network, or text such as '200 Mbit/s, 50 ms'")
        if isinstance(given, Network):
            return given
        if isinstance(given, str) and names_file(given):
            return cls.from_file(given)
        with naming("network"):
            if isinstance(given, float | int) and 0 < given < 1000:
                raise ValueError(f"{given} is in bit/s; give a unit, such as '{given} Mbit/s', or Network({given})")
            return cls.parse(given) if isinstance(given, str) else cls(given)

    @classmethod
    def between(cls, bandwidth: Sequence[Any], latency: Sequence[Any] | float | str = 0, **options: Any) -> Network:
        """Return a network whose links differ.

        Args:
            bandwidth: (K, K), row i and column j from node i to node j, in bit/s or text; the diagonal is not used.
            latency: (K, K) in seconds or text, or one latency for all links.
            options: `collective` and `server`, see `Network`.

        Raises:
            ValueError: a matrix is not square, or the two matrices differ in size.
        """
        bits = _matrix("bandwidth", bandwidth, bits_per_second)
        one = isinstance(latency, str | Real)
        delays = np.full_like(bits, _latency("latency", latency)) if one else _matrix("latency", latency, _latency)
        if bits.shape != delays.shape:
            raise ValueError(f"bandwidth is of {len(bits)} nodes, and latency of {len(delays)}")
        np.fill_diagonal(bits, math.inf)
        np.fill_diagonal(delays, 0)
        return cls._of_places(bits, delays, np.arange(len(bits)), options)

    @classmethod
    def regions(
        cls,
        regions: Mapping[str, int],
        inside: Link | Mapping[str, Link],
        between: Link | Mapping[tuple[str, str], Link],
        **options: Any,
    ) -> Network:
        """Return a network of nodes in regions; nodes are numbered region by region.

        >>> Network.regions({"eu": 4, "us": 4}, inside="10 Gbit/s, 1 ms", between="200 Mbit/s, 80 ms")
        Network(8 nodes at 2 places, 200 Mbit/s … 10 Gbit/s, 1 ms … 80 ms)

        Args:
            regions: name → number of nodes, at most 10⁶ in total.
            inside: the links inside a region, as "bandwidth, latency" or a pair (bandwidth, latency); or name → links.
            between: the links between regions; or (name, name) → links, for both directions unless the
                reverse is given, too.
            options: `collective` and `server`, see `Network`.

        Raises:
            ValueError: a region or a pair of regions has no links, or there are too many nodes.
        """
        if not isinstance(regions, Mapping) or not regions:
            raise TypeError(f"regions must be a mapping, name to nodes, such as {{'eu': 4, 'us': 4}}, got {regions!r}")
        names = list(regions)
        counts = [whole_number(f"regions[{name!r}]", regions[name]) for name in names]
        whole_number("regions: the number of all nodes", sum(counts), at_most=MOST_NODES)
        given: dict[tuple[str, str], Any] = dict(between) if isinstance(between, Mapping) else {}
        odd = [pair for pair in given if not (isinstance(pair, tuple) and len(pair) == 2)]
        if odd:
            raise TypeError(f"between must map pairs of names to links, such as {tuple(names[:2])!r}, got {odd[0]!r}")
        given |= {(name, name): link for name, link in inside.items()} if isinstance(inside, Mapping) else {}
        unknown = {name for pair in given for name in pair} - set(names)
        if unknown:
            raise ValueError(f"there is no region {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        bits, delays = np.empty((2, len(names), len(names)))
        for i, a in enumerate(names):
            for j, b in enumerate(names):
                link = given.get((a, b), given.get((b, a), inside if a == b else between))
                if isinstance(link, Mapping):
                    raise ValueError(f"no links are given for {a if a == b else f'{a} and {b}'}")
                with naming("inside" if i == j else "between"):
                    bits[i, j], delays[i, j] = _link(link)
        return cls._of_places(bits, delays, np.repeat(np.arange(len(names)), counts), options)

    @classmethod
    def grid(cls, bandwidths: ArrayLike, latencies: ArrayLike, **options: Any) -> Network:
        """Return N alternative networks of equal links, to be priced together; see `Clock`.

        Args:
            bandwidths: (N,) in bit/s. latencies: (N,) in seconds. options: `collective` and `server`, see `Network`.
        """
        bits, delays = (np.asarray(own, dtype=np.float64)[:, None, None] for own in (bandwidths, latencies))
        return cls._of_places(bits, delays, None, options)

    def for_run(self, of_clients: bool) -> Network:
        """Return this network with the algorithm of collectives that a run of nodes, or of clients, uses."""
        other = copy.copy(self)
        other.collective = algorithm_of(self.collective, of_clients)
        return other

    def in_units(self) -> Network:
        """Return this network, for `scaled`, with equal links of 1 bit/s and 1 s, and a server's line in proportion.

        A network whose links differ is returned unchanged; `scaled` then multiplies its own links.
        """
        if self._place is not None:
            return self
        other = copy.copy(self)
        bits = float(self._bits[0, 0])
        if self._server is not None and not self._server / bits > 0:
            raise ValueError(f"the server's line has no ratio to lines of {rate(bits)}")
        other._server = None if self._server is None else self._server / bits
        other._bits, other._latency = np.ones((1, 1)), np.ones((1, 1))
        return other

    def scaled(self, inverse_bandwidth: Floats, latency: Floats) -> Network:
        """Return N alternatives of this network, to be priced together, with all links multiplied by factors (N,)."""
        with np.errstate(divide="ignore"):
            factor = 1 / np.asarray(inverse_bandwidth, dtype=np.float64)
        other = copy.copy(self)
        other._bits = self._bits * factor[:, None, None]
        other._latency = self._latency * np.asarray(latency, dtype=np.float64)[:, None, None]
        other._server = None if self._server is None else self._server * factor
        return other

    @classmethod
    def _of_places(
        cls, bits: Floats, latency: Floats, place: NDArray[np.int64] | None, options: dict[str, Any]
    ) -> Network:
        network = cls(math.inf, **options)
        network._bits, network._latency, network._place = bits, latency, place
        return network

    @property
    def num_nodes(self) -> int | None:
        """K; None if the network fits any number of nodes."""
        return None if self._place is None else len(self._place)

    @property
    def alternatives(self) -> int:
        """N, the number of networks in a `grid`; otherwise 1."""
        return len(self._bits) if self._bits.ndim > 2 else 1

    @property
    def options(self) -> dict[str, Any]:
        """The settings besides links: `collective` and `server`, None where not named."""
        return {"collective": self.collective, "server": self._server}

    def as_plain(self) -> dict[str, Any]:
        """Return the network as lists, numbers and text for JSON."""
        place = None if self._place is None else self._place.tolist()
        bits = [[str(one) for one in row] for row in self._bits.tolist()]  # text, as JSON has no infinity
        return {"bits_per_second": bits, "latency": self._latency.tolist(), "place": place, **self.options}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Network:
        """Make a network from the result of `as_plain`."""
        options = {key: plain[key] for key in ("collective", "server")}
        bits, latency, place = (plain[key] for key in ("bits_per_second", "latency", "place"))
        place = None if place is None else np.array(place)
        return cls._of_places(np.array(bits, dtype=np.float64), np.array(latency, dtype=np.float64), place, options)

    def check(self, num_nodes: int) -> None:
        """Raise a ValueError if this network is for another number of nodes."""
        if self.num_nodes not in (None, whole_number("num_nodes", num_nodes)):
            raise ValueError(f"the network has {self.num_nodes} nodes, and the run {num_nodes}")

    def kind(self, group: Sequence[int]) -> Hashable:
        """Return a key for the price of a collective of these nodes: their number, or their places if links differ.

        A ring goes through the nodes in the order of their numbers, starting with the group's first node.
        """
        if len(set(group)) < len(group):
            raise ValueError(f"a group has every node once, got {list(group)}")
        if self._place is None:
            return len(group)
        if not 0 <= min(group, default=0) <= max(group, default=0) < len(self._place):
            raise ValueError(f"nodes must be from 0 to {len(self._place) - 1}, got {list(group)}")
        nodes = list(group)
        if algorithm_of(self.collective) == "ring" and len(group) > 2:
            nodes.sort()
            first = nodes.index(group[0])
            nodes = nodes[first:] + nodes[:first]
        return tuple(self._place[nodes].tolist())

    def seconds(self, collective: str, kind: Hashable, payload_bytes: ArrayLike, crowd: Crowd = ()) -> Floats:
        """Return the seconds of a collective once all nodes of its group are ready; in a ring, by default.

        Args:
            collective: a name as in the ledger. kind: the result of `kind(group)`; the group's size if links are equal.
            payload_bytes: (E,) the payload of a node in each of E calls.
            crowd: (size, number of groups of this size) for all groups that use a server at once, including this group.
                Default: only this group.

        Returns:
            Seconds (E,); on a `grid` of N networks, (N, E).

        Raises:
            ValueError: there is no such collective, bytes are negative, or links differ and `kind` is a number.
        """
        payload = np.atleast_1d(np.asarray(payload_bytes, dtype=np.float64))
        places = self._places(kind)
        one_of("collective", collective, COLLECTIVES)
        if not (payload >= 0).all():
            raise ValueError(f"payload_bytes must be >= 0, got {payload.min()}")
        algorithm = algorithm_of(self.collective)
        if collective in ("push", "pull") or (algorithm == "server" and collective != "send" and len(places)):
            return self._through_server(collective, places, payload, crowd or ((len(places), 1),))
        total = np.zeros((*self._bits.shape[:-2], len(payload)))
        if len(places) < 2:
            return total
        if collective == "all_to_all":
            return self._to_each(places, payload / len(places))
        if self._place is None:  # on equal links, the messages of a round end together
            own = places[:1]
            for times, share, _ in rounds(collective, len(places), algorithm):
                total += times * self._messages(own, own, np.max(share) * payload)
            return total
        many = max(1, _NUMBERS // (self.alternatives * len(places)))  # payloads at once
        last = self._around if algorithm == "ring" and collective != "send" else self._in_rounds
        found = [last(collective, places, payload[i : i + many]) for i in range(0, len(payload), many)]
        return np.concatenate([total[..., :0], *found], -1)

    def _places(self, kind: Hashable) -> NDArray[np.int64]:
        """Return the places of a group's nodes, in the group's order, from the group's key `kind`."""
        if isinstance(kind, tuple):
            places, most = np.array(kind), self._bits.shape[-1] - 1
            if len(kind) and not (places.dtype.kind == "i" and 0 <= places.min() <= places.max() <= most):
                raise ValueError(f"kind must be of kind(nodes), which are places from 0 to {most}, got {kind}")
            return places
        size = whole_number("kind", kind)
        if self._place is not None:
            raise ValueError(f"links differ, and it matters which nodes take part: give kind(nodes), got kind={size}")
        return np.zeros(size, dtype=np.int64)

    def _messages(self, sources: NDArray[np.int64], targets: NDArray[np.int64], size: Floats) -> Floats:
        """Return the seconds (E,) until all of several simultaneous messages between these places have arrived."""
        link = ..., sources, targets
        return (self._latency[link][..., None] + 8 * size / self._bits[link][..., None]).max(-2)

    def _to_each(self, places: NDArray[np.int64], size: Floats) -> Floats:
        """Return the seconds in which every node sends a message to every other node: those of the busiest line.

        Messages may be split, so that in some order no line waits for another [Gonzalez and Sahni 1976].
        """
        used, nodes = np.unique(places, return_counts=True)
        link = ..., used[:, None], used
        cost = self._latency[link][..., None] + 8 * size / self._bits[link][..., None]
        others = (nodes - np.eye(len(used)))[..., None]  # number of other nodes at each place
        out, into = (others * cost).sum(-2).max(-2), (others.swapaxes(0, 1) * cost).sum(-3).max(-2)
        return np.maximum(out, into)

    def _around(self, collective: str, places: NDArray[np.int64], payload: Floats) -> Floats:
        """Return the seconds of a collective around the ring of nodes at these places, from each node to the next."""
        links = np.stack([places, np.roll(places, -1)])
        starts = np.flatnonzero((links != np.roll(links, 1, axis=1)).any(0))  # where runs of equal links start
        starts = starts if len(starts) else np.zeros(1, dtype=np.int64)
        count = np.diff(starts, append=starts[0] + len(places))
        if collective == "broadcast":  # a chain: leave out the last link, which closes the ring
            count[-1] -= 1
            starts, count = starts[count > 0], count[count > 0]
        link = ..., *links[:, starts]
        latency, bits = (np.moveaxis(own[link], -1, 0)[..., None] for own in (self._latency, self._bits))  # (P, …, 1)
        if collective == "broadcast":  # sent in small pieces, so that the slowest link is always busy
            return np.tensordot(count, latency, 1) + (8 * payload / bits).max(0)
        ((times, share, _),) = rounds(collective, len(places), "ring")
        return ring_seconds(latency, 8 * share * payload / bits, count, times)

    def _in_rounds(self, collective: str, places: NDArray[np.int64], payload: Floats) -> Floats:
        """Return the seconds of rounds of messages between pairs; a node waits only for the messages that it needs.

        In a tree, a node sends or receives one message at a time. Otherwise a node sends to one node while it receives
        from another: a message waits for its source's messages from earlier rounds, for the source's line, and, after
        the latency, for the target's line.
        """
        algorithm = algorithm_of(self.collective)
        in_tree = collective == "broadcast" or algorithm == "tree"
        has, sent = np.zeros((2, *self._bits.shape[:-2], len(places), len(payload)))
        for _, share, pairs in rounds(collective, len(places), algorithm):
            assert pairs is not None
            (source, target), link = pairs, (..., *places[pairs])
            latency = self._latency[link][..., None]
            seconds = 8 * np.multiply.outer(share, payload) / self._bits[link][..., None]
            if in_tree:
                start = np.maximum(has[..., source, :], has[..., target, :])
                has[..., source, :] = has[..., target, :] = start + latency + seconds
            else:
                start = np.maximum(has[..., source, :], sent[..., source, :])
                sent[..., source, :] = start + seconds
                has[..., target, :] = np.maximum(start + latency, has[..., target, :]) + seconds
        return has.max(-2)

    def _through_server(self, collective: str, places: NDArray[np.int64], payload: Floats, crowd: Crowd) -> Floats:
        total = np.zeros((*self._bits.shape[:-2], len(payload)))
        for i, (inward, who, share) in enumerate(ways(collective, len(places))):
            nodes, size = places[who], share * payload
            if not len(nodes):  # a broadcast of one node has no receiver
                continue
            server = np.full(len(nodes), self._home)
            own = self._messages(nodes, server, size) if inward else self._messages(server, nodes, size)
            payloads = sum(groups * ways(collective, n)[i].payloads(n) for n, groups in crowd)
            total += np.maximum(8 * (payloads * payload) / self._server_bits(inward)[..., None], own)
        return total

    @property
    def _home(self) -> int:
        """The place of the server."""
        return 0 if self._place is None else int(self._place[0])

    def _server_bits(self, inward: bool) -> Floats:
        """Return the bandwidth of the server's line, in or out: shape (), or (N,) on a `grid`."""
        if self._server is not None:
            return np.full(self._bits.shape[:-2], self._server)
        lines = self._bits[..., self._home] if inward else self._bits[..., self._home, :]
        fastest = lines.max(-1, where=np.isfinite(lines), initial=0)
        return np.where(fastest > 0, fastest, math.inf)

    def server_seconds(self, inward: bool, size: float) -> Floats:
        """Return the seconds of `size` bytes on the server's line, in or out: shape (), or (N,) on a `grid`."""
        return np.asarray(8 * size / self._server_bits(inward))

    def __repr__(self) -> str:
        places = self._bits.shape[-1]
        other = ~np.eye(places, dtype=bool) | (self._bits < math.inf) | (places == 1)
        shown = [_span(self._bits[other], rate), _span(self._latency[other], delay)]
        shown += [] if self.collective is None else [self.collective]
        if self._place is not None:
            shown.insert(0, f"{self.num_nodes} nodes at {places} places")
        return f"Network({', '.join(shown)})"


def _link(given: Any) -> tuple[float, float]:
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, tuple | list) else (given,)
    if not 1 <= len(parts) <= 2:
        raise ValueError(f"links are 'bandwidth, latency', such as '200 Mbit/s, 50 ms', got {given!r}")
    bandwidth, latency = (*parts, 0)[:2]
    return bits_per_second("bandwidth", bandwidth), _latency("latency", latency)


def _latency(name: str, given: Any) -> float:
    return seconds(name, given, at_least=0)


def _matrix(name: str, given: Any, parse: Any) -> Floats:
    rows = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(rows, list | tuple) or not all(isinstance(row, list | tuple) for row in rows):
        raise TypeError(f"{name} must be a (K, K) matrix, from every node to every other, got {given!r}")
    if not rows or any(len(row) != len(rows) for row in rows):
        shape = f"{len(rows)} rows of {', '.join(sorted({str(len(row)) for row in rows})) or 0}"
        raise ValueError(f"{name} must be a (K, K) matrix, from every node to every other, got {shape}")
    return np.array(
        [
            [0.0 if i == j else parse(f"{name}[{i}, {j}]", one) for j, one in enumerate(row)]
            for i, row in enumerate(rows)
        ]
    )


def _span(values: Floats, text: Any) -> str:
    low, high = text(values.min(initial=math.inf)), text(values.max(initial=0))
    return low if low == high else f"{low} … {high}"
