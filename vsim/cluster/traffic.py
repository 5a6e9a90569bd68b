"""The payloads that each node transmits in a collective, from which all wire bytes are computed."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import one_of, whole_number


class Traffic(NamedTuple):
    """The payloads that a group of n nodes hands in and transmits.

    Attributes:
        handed, sent: (n,) payloads that each node hands in, and transmits, by the node's place in the group.
        busiest, total: payloads that the busiest node transmits, and that all nodes transmit together; exact fractions.
        server: payloads that the server, which is not a node, transmits.
        is_even: whether all nodes of the group hand in the same number of payloads, and transmit the same number.
    """

    handed: NDArray[np.float64]
    sent: NDArray[np.float64]
    busiest: Fraction
    total: Fraction
    server: Fraction
    is_even: bool


# Group size n → (payloads that each node except the last transmits, payloads that the last node transmits).
_Places = Callable[[int], tuple[Fraction, Fraction]]
_ONCE = Fraction(1)
_NONE = Fraction(0)
_COLLECTIVES: dict[str, _Places] = {
    # In a ring [Patarasu and Yuan 2009], each node passes payloads on to its neighbour.
    "all_reduce": lambda n: (Fraction(2 * (n - 1), n),) * 2,
    "merge": lambda n: (Fraction(n - 1),) * 2,
    "all_gather": lambda n: (Fraction(n - 1),) * 2,
    "reduce_scatter": lambda n: (Fraction(n - 1, n),) * 2,
    "broadcast": lambda n: (_ONCE, _NONE),
    # The following send directly from one node to another.
    "all_to_all": lambda n: (Fraction(n - 1, n),) * 2,
    "send": lambda n: (_ONCE, _NONE),
    "push": lambda n: (_ONCE, _ONCE),
    "pull": lambda n: (_NONE, _NONE),
}
# Group size n → payloads that a server transmits which carries out the collective for n clients, as in
# `vsim.network.cost.ways`. A client that hands in a payload sends it to the server once.
_BACK: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": Fraction,
    "merge": Fraction,
    "all_gather": lambda n: Fraction(n * (n - 1)),
    "reduce_scatter": lambda n: _ONCE,
    "broadcast": lambda n: Fraction(n - 1),
    "all_to_all": lambda n: Fraction(n - 1),
}


@lru_cache(maxsize=256)
def traffic(collective: str, n: int, through_server: bool = False) -> Traffic:
    """Return the payloads that a group of `n` nodes transmits.

    Args:
        collective: "all_reduce", "merge" (all rows become one), "all_gather", "reduce_scatter", "broadcast" (from
            the first node of the group), "all_to_all" (a part to each node), "send" (from the first node of a pair to
            the second), "push" (from each node to a server) or "pull" (from a server to each node).
        n: at least 1.
        through_server: whether a server carries out the collective, instead of a ring; a "send" needs neither.

    Raises:
        ValueError: the collective is unknown, or `n` is below 1.
    """
    one_of("collective", collective, tuple(_COLLECTIVES))
    whole_number("n", n)
    each, last = _COLLECTIVES[collective](n)
    server, handed = Fraction(n if collective == "pull" else 0), np.ones(n)
    if collective in ("broadcast", "send"):
        handed[1:] = 0
    elif collective == "pull":
        handed[:] = 0
    sent, total = np.full(n, float(each)), each * (n - 1) + last
    sent[-1] = float(last)
    if through_server and collective in _BACK:
        server = _BACK[collective](n)
        if collective != "all_to_all":  # whose nodes keep their own part
            sent, each, last = handed.copy(), _ONCE, _ONCE
            total = Fraction(int(handed.sum()))
    for values in (handed, sent):
        values.flags.writeable = False
    is_even = all(bool((values == values[0]).all()) for values in (handed, sent))
    return Traffic(handed, sent, max(each, last) if n > 1 else last, total, server, is_even)
