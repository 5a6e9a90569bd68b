"""One federated training in pfl or in Flower's simulation, as their own examples do it; bench_federated.py runs this.

    PYTHON tests/benchmarks/federated_peers.py pfl mlp --rounds 10

It needs neither vsim nor its packages. The last line, JSON, has the peer's version, the seconds of every round but the
first, and those before. Model and data of all sides are made here.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import os
import time
import warnings

import torch
from torch import Tensor, nn

EXAMPLES, BATCH, LR = 50, 10, 0.1  # of every client, of a step, of SGD: five steps a round


@functools.cache
def population(clients: int) -> tuple[Tensor, Tensor]:
    """Return x (clients, EXAMPLES, 1, 8, 8) and y (clients, EXAMPLES): ten blurred patterns, with noise."""
    stream = torch.Generator().manual_seed(0)
    y = torch.randint(0, 10, (clients, EXAMPLES), generator=stream)
    x = torch.rand(10, 1, 8, 8, generator=stream)[y]
    return x.add_(torch.randn(x.shape, generator=stream), alpha=0.3), y


class Classifier(nn.Module):
    """The MLP 64-128-128-10, or a CNN of two layers; with the two methods that pfl asks for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden = [nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
        filters = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        filters += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)]
        self.layers = nn.Sequential(*(hidden if kind == "mlp" else filters))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, object]:
        from pfl.metrics import Weighted

        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


def pfl_rounds(kind: str, clients: int, cohort: int, rounds: int) -> tuple[str, list[float]]:
    """As in pfl's benchmarks with PyTorch: FederatedAveraging on its SimulatedBackend, without evaluation."""
    import pfl
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    marks: list[float] = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
            marks.append(time.perf_counter())
            return False, Metrics()

    x, y = population(clients)
    data = FederatedDataset(
        lambda client: Dataset([x[client], y[client]], user_id=str(client)),
        get_user_sampler("random", list(range(clients))),
    )
    module = Classifier(kind)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds + 1,
            evaluation_frequency=10**9,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        callbacks=[Clock()],
    )
    return f"pfl {pfl.version.__version__}", marks


def flower_rounds(kind: str, clients: int, cohort: int, rounds: int) -> tuple[str, list[float]]:
    """As in Flower's quickstart with PyTorch: a ClientApp with a DataLoader, FedAvg, Ray with a core a client."""
    import flwr
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app, marks = ClientApp(), ServerApp(), list[float]()
    folder = os.path.dirname(os.path.abspath(__file__))

    @client_app.train()
    def train(msg: Message, context: Context) -> Message:
        import sys

        sys.path.insert(0, folder)  # where Ray's processes find the data, which each makes once
        import federated_peers
        from torch.utils.data import DataLoader, TensorDataset

        torch.set_num_threads(1)
        x, y = federated_peers.population(clients)
        client = int(context.node_config["partition-id"])
        model = federated_peers.Classifier(kind)
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        total = 0.0
        for images, labels in DataLoader(TensorDataset(x[client], y[client]), batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            loss = model.loss(images, labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        metrics = MetricRecord({"train_loss": total / (EXAMPLES // BATCH), "num-examples": EXAMPLES})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        FedAvg(fraction_train=cohort / clients, fraction_evaluate=0.0, min_available_nodes=clients).start(
            grid=grid,
            initial_arrays=ArrayRecord(Classifier(kind).state_dict()),
            num_rounds=rounds + 1,
            evaluate_fn=lambda round_, arrays: marks.append(time.perf_counter()) if round_ else None,
        )

    run_simulation(server_app, client_app, clients, backend_config={"client_resources": {"num_cpus": 1}})
    return f"flwr {flwr.__version__}", marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=["pfl", "flower"])
    parser.add_argument("model", choices=["mlp", "cnn"])
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(arguments.threads)
    run = pfl_rounds if arguments.peer == "pfl" else flower_rounds
    population(arguments.clients)
    started = time.perf_counter()
    version, marks = run(arguments.model, arguments.clients, arguments.cohort, arguments.rounds)
    seconds = [after - before for before, after in itertools.pairwise(marks)]
    print(
        json.dumps(
            {"version": f"{version}, torch {torch.__version__}", "seconds": seconds, "before": marks[0] - started}
        )
    )


if __name__ == "__main__":
    main()
