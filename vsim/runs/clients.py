"""Keep the state of a population's clients between rounds, and make the models that clients use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from vsim.arguments import whole_number
from vsim.cluster.cluster import Cluster
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import Lasting, Stateful, of_clients, owners, placements_of
from vsim.cluster.store import Store
from vsim.core.algorithm import Algorithm


class Clients:
    """The state that N clients keep between rounds; in each round, n of them have rows in the strategy's tensors.

    A client that has not been drawn yet takes no memory.

    Args:
        strategy: a strategy that is set up for a run; its `keep_client` declares the state of clients.
        store: a folder for the state; None: keep it in the host's memory.
        claims: whether this process locks the folder; True in one process of a run.

    Raises:
        TypeError: the strategy keeps state for each row, but not for each client: the row's next client would get it.
        ValueError: another run uses the folder. OSError: the disk is full.
    """

    def __init__(self, strategy: Algorithm, cluster: Cluster, store: Store | None = None, claims: bool = True) -> None:
        self._owners = list(owners(strategy).values())
        odd = [
            f"{type(o).__name__}.{name}"
            for o in self._owners
            for name, where in placements_of(o).items()
            if where == "stacked" and name not in of_clients(o)
        ]
        if odd:
            raise TypeError(
                f"{type(strategy).__name__} keeps {', '.join(odd)} for each node, which the clients of a population "
                "would pass on to each other; with participation=Sample(…) a strategy keeps it by keep_client"
            )
        # The initial state of every client, and client → its rows.
        self._first = [value[0].clone() for _, _, value in self._values()]
        self.kept: dict[int, list[Tensor]] = {}
        self._files: list[Tensor] | None = None
        self._store, self._claims = store, claims
        if store is not None:
            if claims:
                store.claim()
            self._files = [store.tensor(f"{i}.bin", cluster.population, own) for i, own in enumerate(self._first)]

    def _values(self) -> Iterator[tuple[Any, str, Tensor]]:
        for owner in self._owners:
            for name in sorted(of_clients(owner)):
                yield owner, name, getattr(owner, name)

    def state_dict(self) -> dict[str, Any]:
        """Return "drawn": the clients drawn; "kept": their stacked rows, in this order; "first": a new client's row.

        Raises:
            ValueError: another run has used the folder in the meantime.
        """
        self._check()
        kept = [torch.stack(rows) for rows in zip(*self.kept.values(), strict=True)]
        return {"drawn": [*self.kept], "kept": kept, "first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        rows = zip(*(kept.cpu().clone() for kept in state["kept"]), strict=True)
        self.kept = {client: self._stored(client, own) for client, own in zip(state["drawn"], rows, strict=False)}
        self._first = state["first"]  # the setup of a resumed fork has computed another first row

    @property
    def lasting(self) -> Lasting:
        """The declaration of the clients' state."""
        return Lasting(shared=lambda: {"clients": self})

    def _check(self) -> None:
        self._check_whole()
        if self._store is not None and self._claims:
            self._store.check()

    def _check_whole(self) -> None:
        if self._store is not None:
            self._store.check_whole()

    def leave(self, cluster: Cluster) -> None:
        """Store the rows of the present clients."""
        self._check_whole()
        with cluster.collectives.unbilled():
            all_rows = [cluster.collectives.all_gather(v, label="state of clients").cpu() for *_, v in self._values()]
        for row, client in enumerate(cluster.active):
            self.kept[client] = self._stored(client, [rows[row] for rows in all_rows])

    def _stored(self, client: int, rows: Sequence[Tensor]) -> list[Tensor]:
        if self._files is None:
            return [row.clone() for row in rows]
        return [file[client].copy_(row) for file, row in zip(self._files, rows, strict=True)]

    def arrive(self, cluster: Cluster) -> None:
        """Load the state of the present clients into their rows."""
        self._check_whole()
        values = [value for *_, value in self._values()]
        for row, node in enumerate(cluster.replicas.nodes if values else ()):
            for own, value in zip(self.kept.get(cluster.active[node], self._first), values, strict=True):
                value[row] = own

    def of(self, owner: Stateful, client: int) -> dict[str, Tensor]:
        """Return name → row: a client's last stored state in `owner`, which is the strategy or a part of it."""
        self._check_whole()
        rows = zip(self._values(), self.kept.get(client, self._first), strict=True)
        return {name: row for (part, name, _), row in rows if part is owner}


class OwnModels:
    """Makes clients' models: the global model with personal values. All processes must create one: this gathers rows.

    Args:
        clients: the state of a population's clients; None if every node is a client.
    """

    def __init__(self, strategy: Algorithm, cluster: Cluster, clients: Clients | None) -> None:
        self._parts, self._clients, self._active = strategy.parts, clients, cluster.active
        gather = cluster.collectives.all_gather
        self._present: list[dict[str, Tensor]] = []  # one dict per module: name → rows (K, …) of present nodes
        with cluster.collectives.unbilled():
            for module in self._parts if strategy.is_personal else ():
                module.remember(cluster)
                names = sorted(of_clients(module))
                self._present.append({n: gather(getattr(module, n), label="state of clients") for n in names})

    def __call__(self, client: int, weights: Tensor, buffers: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return copies of the global weights (P,) and buffers, with the client's personal values put in.

        Raises:
            ValueError: the client is an absent node, and has no personal values.
        """
        weights, own_buffers = weights.clone(), {name: b.clone() for name, b in buffers.items()}
        for module, rows in zip(self._parts, self._present, strict=False):
            if client in self._active:
                place = self._active.index(client)
                module.personalize(weights, own_buffers, {name: value[place] for name, value in rows.items()})
            elif self._clients is not None:
                module.personalize(weights, own_buffers, self._clients.of(module, client))
            else:
                raise ValueError(f"node {client} does not take part at the end of the run, and has no model of its own")
        return weights, own_buffers


@dataclass
class ClientModels:
    """The models that clients use at the end of a run; held without the run, and sent by processes.

    Attributes:
        population: the number of nodes or clients. weights (P,), buffers: of the global model.
        places: client → its row. other: the row of all other clients; None: they have no model.
        columns: (p,) the weights that differ from the global model's on some client. rows: (n, p) their values.
        own_buffers: name → stacked buffers (n, …), for buffers that differ.
    """

    population: int
    weights: Tensor
    buffers: Mapping[str, Tensor]
    places: dict[int, int]
    other: int | None
    columns: Tensor
    rows: Tensor
    own_buffers: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, strategy: Algorithm, clients: Clients | None, weights: Tensor, buffers: Mapping[str, Tensor]
    ) -> ClientModels:
        """Return the models that have the global weights and buffers, with personal values put in."""
        cluster, known = strategy.cluster, set[int]()
        if strategy.is_personal:
            known = {*cluster.active, *(() if clients is None else clients.kept)}
        rest = [] if strategy.is_personal and clients is None else [*({*range(cluster.population)} - known)][:1]
        made = OwnModels(strategy, cluster, clients)  # in every process
        differ, odd = torch.zeros_like(weights, dtype=torch.bool), set[str]()
        for client in (*known, *rest):  # twice, so that no more than one whole model is in memory
            own, own_buffers = made(client, weights, buffers)
            differ |= own != weights
            odd |= {name for name, b in buffers.items() if not torch.equal(own_buffers[name], b)}
        columns, rows = differ.nonzero().flatten(), list[Tensor]()
        of_buffers: dict[str, list[Tensor]] = {name: [] for name in odd}
        for client in (*known, *rest):
            own, own_buffers = made(client, weights, buffers)
            rows.append(own[columns].cpu())
            for name, stored in of_buffers.items():
                stored.append(own_buffers[name].cpu())
        return cls(
            cluster.population,
            weights.cpu().clone(),
            {name: b.cpu().clone() for name, b in buffers.items()},
            {client: row for row, client in enumerate(known)},
            len(known) if rest else None,
            columns.cpu(),
            torch.stack(rows),
            {name: torch.stack(stored) for name, stored in of_buffers.items()},
        )

    def model(self, client: int, like: nn.Module) -> nn.Module:
        """Return a client's model, as a copy of the module `like`.

        Raises:
            ValueError: the client is a node that was absent at the end, and has no personal values.
        """
        client = whole_number("client", client, at_least=0, at_most=self.population - 1)
        row = self.places.get(client, self.other)
        if row is None:
            raise ValueError(f"node {client} does not take part at the end of the run, and has no model of its own")
        weights = self.weights.clone()
        weights[self.columns] = self.rows[row]
        buffers = {**self.buffers, **{name: own[row] for name, own in self.own_buffers.items()}}
        return Replicas.of(like, 1, torch.device("cpu")).as_module(weights, buffers, like=like)


def lasting(strategy: Algorithm, placement: str) -> list[Tensor]:
    """Return the tensors that a strategy and its parts declare with this placement, "stacked" or "shared"."""
    values = [
        getattr(o, name)
        for o in owners(strategy).values()
        for name, where in placements_of(o).items()
        if where == placement
    ]
    inside = [[*own.state.values()] if isinstance(own, Optimizer) else [own] for own in tree_leaves(values)]
    return [t for t in tree_leaves(inside) if isinstance(t, Tensor) and t.dim()]
