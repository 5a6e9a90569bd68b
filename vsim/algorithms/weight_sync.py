"""Weights for rollouts: a trainer sends receivers the bfloat16 weights that changed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vsim.arguments import real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.collectives import Pending
from vsim.core.algorithm import Algorithm
from vsim.core.fields import algorithm, state
from vsim.core.when import When, sync_interval

HEADER = 9  # bytes: one says how wide the codes of places are, eight how many codes there are
CODES = {1: torch.uint8, 2: torch.int16}  # bytes of a code → dtype; the largest code skips that many places


@algorithm
class WeightSyncStrategy(Algorithm):
    """Train on one node, and send the bfloat16 weights that changed to receivers, which generate rollouts: PULSE
    [2026, arXiv:2602.03839].

        θ ← optimizer(θ, g);  after every H-th step, to each receiver:
        the pairs (i, bf16(θ_i)) for all i whose bits differ from the bits sent last

    A message holds values, not differences, so that receivers have the trainer's bfloat16 weights, bit for bit. At the
    small learning rates of reinforcement learning, few weights change by as much as bfloat16 can tell, 2⁻⁸ of their
    size. The history has the share that changed as `changed_share`.

    The receivers are not nodes: they neither train nor send. Their weights are the attribute `receiver_weights`, which
    is equal for all of them. The trainer sends each a message of its own; with a relay or a store that all receivers
    read, give receivers=1.

    Args:
        receivers: N.
        H: steps from one message to the next, at least 1, or a schedule of `vsim.strategy.when`.
        staleness: τ, the steps that a message may take while the trainer continues; receivers then have the weights of
            τ steps ago. 0: the trainer waits for its messages.
        changed_share: the share of weights that changes between messages, for `vsim.price`, where weights have no
            values; without effect in training.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: N·s·P·(2 + 1) bytes every H steps, for a share s that changed; 2 bytes an index where 1 is not enough, or
    N·2·P bytes for all weights, if that is less.

    Raises:
        ValueError: there is more than one node.

    Deviations from the paper: places are sent as distances of 1 or 2 bytes, without a further compressor. What
    receivers do with the weights, rewards, and the examples they make, are not simulated: the trainer has its data.
    """

    family = "rollouts"

    receivers: int = 1
    H: int | When = 1
    staleness: int = 0
    changed_share: float | None = None

    sent_weights: Tensor = state()  # bfloat16 weights after the last message, shared (P,)
    receiver_weights: Tensor = state()  # the weights that have arrived, shared (P,)
    pending: list[Pending] = state()  # messages on their way, the oldest first
    last_share: float = state()

    def __post_init__(self) -> None:
        self.receivers = whole_number("receivers", self.receivers)
        self.H = sync_interval(self.H)
        self.staleness = whole_number("staleness", self.staleness, at_least=0)
        if self.changed_share is not None:
            self.changed_share = real_number("changed_share", self.changed_share, at_least=0, at_most=1)
        super().__post_init__()

    def check_nodes(self, cluster: Cluster) -> None:
        if cluster.population != 1:
            raise ValueError(
                f"WeightSyncStrategy trains on one node and sends to receivers=; got num_nodes={cluster.population}"
            )

    def setup(self, cluster: Cluster) -> None:
        self.check_nodes(cluster)
        start = cluster.weights[0].bfloat16()
        self.keep_shared(sent_weights=start, receiver_weights=start.clone(), pending=[], last_share=0.0)

    def communicate(self, cluster: Cluster) -> None:
        super().communicate(cluster)
        while self.pending and self.pending[0].due == cluster.step:
            message = self.pending.pop(0).result()[0]
            if not message.is_meta:
                self.receiver_weights = decoded(message, self.receiver_weights)

    def sync(self, cluster: Cluster) -> None:
        now = cluster.weights[0].bfloat16()
        if now.is_meta and self.changed_share is not None:
            message = torch.empty(expected_bytes(len(now), self.changed_share), dtype=torch.uint8, device="meta")
        else:
            message = encoded(now, self.sent_weights)
            self.last_share = float((_bits(now) != _bits(self.sent_weights)).double().mean())
        self.sent_weights = now
        size = self.receivers * len(message)
        label = f"changed weights to {self.receivers} receivers"
        start = cluster.collectives.start
        self.pending.append(start("push", message[None], label=label, payload_bytes=size, delay=self.staleness))

    def measured(self, cluster: Cluster) -> Mapping[str, float]:
        return {"changed_share": self.last_share}


def encoded(new: Tensor, old: Tensor) -> Tensor:
    """Return a message (bytes,) from which `decoded` makes bfloat16 weights `new` (P,) of `old` (P,).

    The places of changed entries are sent as the number of unchanged ones before them, in codes of one byte or two. A
    gap that is too long begins with largest codes, each of which skips as many places, and has no value.
    """
    index = (_bits(new) != _bits(old)).nonzero().flatten()
    gaps = index.diff(prepend=index.new_tensor([-1])) - 1
    skips = {width: gaps // _largest(width) for width in CODES}
    counts = {width: len(gaps) + int(skips[width].sum()) for width in CODES}
    width = min(CODES, key=lambda one: one * counts[one])
    values = new[index]
    if width * counts[width] + 2 * len(index) >= 2 * len(new):
        return torch.cat([_header(0, 0, new), new.view(torch.uint8)])
    codes = torch.full((counts[width],), _largest(width), device=new.device)
    codes[(skips[width] + 1).cumsum(0) - 1] = gaps % _largest(width)
    return torch.cat([_header(width, len(codes), new), *(_bytes(t) for t in (codes.to(CODES[width]), values))])


def decoded(message: Tensor, old: Tensor) -> Tensor:
    """Return the bfloat16 weights (P,) that a message makes of `old` (P,)."""
    width, count = int(message[0]), int(message[1:HEADER].clone().view(torch.int64))
    if not width:
        return message[HEADER:].clone().view(torch.bfloat16)
    stop = HEADER + width * count
    codes = message[HEADER:stop].clone().view(CODES[width]).long() % (_largest(width) + 1)
    is_entry = codes != _largest(width)
    places = (codes + is_entry).cumsum(0)[is_entry] - 1
    new = old.clone()
    new[places] = message[stop:].clone().view(torch.bfloat16)
    return new


def expected_bytes(size: int, share: float) -> int:
    """Return the mean size of a message if each of `size` entries changes with probability `share`."""
    changed, same = share * size, 1 - share
    # The gap before an entry is geometric, and P(gap ≥ n) = same ** n.
    skips = {width: same ** _largest(width) for width in CODES}
    sent = [changed * (2 + width / (1 - skips[width])) for width in CODES] if share else [0.0]
    return HEADER + round(min(2 * size, *sent))


def _largest(width: int) -> int:
    return (1 << 8 * width) - 1


def _bits(weights: Tensor) -> Tensor:
    return weights.view(torch.int16)  # also of NaN, and of both zeros


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def _header(width: int, count: int, like: Tensor) -> Tensor:
    numbers = torch.tensor([count], device=like.device).view(torch.uint8)
    return torch.cat([numbers.new_tensor([width]), numbers])
