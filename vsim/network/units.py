"""Rates and durations as people write them: "200 Mbit/s", "50 ms"."""

from __future__ import annotations

import math
import re
from numbers import Real
from typing import Any

from vsim.arguments import real_number

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_NUMBER = r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*"


def bits_per_second(name: str, value: Any) -> float:
    """Return a rate in bit/s, given as a number of them or as text: "100 Mbit/s", "1 Gbps"; it may be infinite.

    Raises:
        TypeError: neither. ValueError: not above 0, or text that is no rate; of bytes the message says so.
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
        value = float(match[1]) * _PREFIXES[match[2]]
    return math.inf if isinstance(value, Real) and value == math.inf else real_number(name, value, above=0)


def seconds(name: str, value: Any, **bounds: float) -> float:
    """Return a duration in seconds, given as a number of them or as text: "50 ms".

    Raises:
        TypeError: neither. ValueError: not within the bounds of `real_number`, or text that is no duration.
    """
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + "(s|ms|us|µs|μs|ns)" + r"\s*", value)
        if match is None:
            raise ValueError(f"{name} must be a duration, such as '50 ms', got {value!r}")
        value = float(match[1]) * _SECONDS[match[2]]
    return real_number(name, value, **bounds)


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
