"""Merging low-rank adapters: identities of the rules, what they send, and W₀ as state of a run."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from errors import refused
from strategies_by_hand import Driven, normal, same_apart, size, started
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim import Sample
from vsim.strategy import AdapterStrategy, Algorithm, AloneStrategy, Attack, FedAvgStrategy, PostLocal

K, R, SCALING = 3, 2, 0.5
RULES = ("fedit", "ffa", "fedsa", "flora", "fedex")


class Adapted(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self, n: int, m: int, stream: torch.Generator, trainable: bool = True) -> None:
        super().__init__()
        self.base = nn.Linear(m, n)
        self.base.weight = nn.Parameter(torch.randn(n, m, generator=stream) / m**0.5, requires_grad=trainable)
        self.base.bias = nn.Parameter(torch.zeros(n), requires_grad=False)
        self.lora_A = nn.Parameter(torch.randn(R, m, generator=stream) / m**0.5)
        self.lora_B = nn.Parameter(torch.zeros(n, R))
        self.scaling = SCALING

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * x @ self.lora_A.T @ self.lora_B.T  # type: ignore[no-any-return]


def model(trainable: bool = True) -> nn.Sequential:
    stream = torch.Generator().manual_seed(0)
    head = nn.Linear(6, 3)
    head.weight = nn.Parameter(torch.randn(3, 6, generator=stream))
    head.bias = nn.Parameter(torch.zeros(3))
    return nn.Sequential(Adapted(6, 5, stream, trainable), nn.Tanh(), head)


def stepped(rule: str, steps: int = 1, **options: Any) -> tuple[Driven, dict[str, Tensor], dict[str, Tensor]]:
    """A run of `steps` rounds; its weights before the last merge, and after it, by name."""
    run = started(AdapterStrategy(rule=rule, H=1, inner_optim="sgd", lr=0.1, **options), model(), K)
    views = run.cluster.replicas.views
    for step in range(steps):
        gradients = normal(K, size(model()) - 6, seed=step)
        before = run.cluster.weights - 0.1 * gradients  # the bias of the base is frozen in the model, and has no column
        run.step(gradients)
    before = {name: view.clone() for name, view in views(before).items()}
    return run, before, views(run.cluster.weights.clone())


def whole(of: dict[str, Tensor], base: Tensor) -> Tensor:
    """W₀ + s·B A of each node."""
    return base + SCALING * of["0.lora_B"] @ of["0.lora_A"]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_a_merge_is_the_mean_of_the_products_or_not(rule: str, steps: int) -> None:
    base = model().state_dict()["0.base.weight"]
    if steps == 2 and rule in ("flora", "fedex"):
        base = stepped(rule)[2]["0.base.weight"][0]
    _, before, after = stepped(rule, steps)
    if rule == "ffa":
        before["0.lora_A"] = after["0.lora_A"]
        torch.testing.assert_close(after["0.lora_A"][0], model().state_dict()["0.lora_A"])
    expected = whole(before, base).mean(0)
    found = whole(after, after["0.base.weight"])
    if rule == "fedit":
        a, b = before["0.lora_A"], before["0.lora_B"]
        residual = SCALING * ((b @ a).mean(0) - b.mean(0) @ a.mean(0))
        torch.testing.assert_close(found[0] + residual, expected)
        assert residual.norm() > 0.01 * (expected - base).norm()
    elif rule == "fedsa":
        a, b = before["0.lora_A"].mean(0), before["0.lora_B"]
        torch.testing.assert_close(found, base + SCALING * b @ a)
        assert not torch.equal(found[0], found[1])
    else:
        torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-5, atol=1e-6)
    if rule not in ("flora", "fedex"):  # W₀ neither trains nor changes
        assert torch.equal(after["0.base.weight"], base.expand(K, -1, -1))
    for name in ("2.weight", "2.bias"):
        torch.testing.assert_close(after[name], before[name].mean(0).expand_as(after[name]))
    shared = [name for name in after if not (rule == "fedsa" and "lora_B" in name)]
    assert all(torch.equal(after[name], after[name][:1].expand_as(after[name])) for name in shared)


def test_flora_draws_a_again_with_the_spread_that_it_had() -> None:
    wide = nn.Sequential(Adapted(6, 4000, torch.Generator().manual_seed(0)))
    run = started(AdapterStrategy(rule="flora", H=1, inner_optim="sgd", lr=0.1), wide, K)
    first = run.cluster.replicas.views(run.cluster.weights.clone())["0.lora_A"][0]
    seen = []
    for _ in range(2):
        run.step(torch.zeros_like(run.cluster.weights))
        seen.append(run.cluster.replicas.views(run.cluster.weights.clone()))
    drawn = [of["0.lora_A"][0] for of in seen]
    assert all(abs(float(a.std() / first.std()) - 1) < 0.03 for a in drawn)
    assert not torch.equal(drawn[0], drawn[1]) and not seen[0]["0.lora_B"].any()


HEAD = 3 * 6 + 3
SENT = {  # entries of a node: with n = 6, m = 5, r = 2
    "fedit": [("all_reduce", R * (6 + 5) + HEAD)],
    "ffa": [("all_reduce", R * 6 + HEAD)],
    "fedsa": [("all_reduce", R * 5 + HEAD)],
    "flora": [("all_gather", R * (6 + 5)), ("all_reduce", HEAD)],
    "fedex": [("all_gather", R * (6 + 5)), ("all_reduce", HEAD)],
}


@pytest.mark.parametrize("rule", RULES)
def test_what_is_sent(rule: str) -> None:
    run = stepped(rule)[0]
    assert [(e.collective, e.payload_bytes) for e in run.ledger] == [(name, 4 * n) for name, n in SENT[rule]]
    for of in (model(), model().to("meta")):
        priced = vsim.price(
            AdapterStrategy(rule=rule, H=1), model=of, num_nodes=K, max_steps=1, network="1 Gbit/s", compute=1.0
        )
        assert priced.seconds[-1] > 1


def test_published_ratios_of_payloads() -> None:
    """For a square weight, FFA sends half of FedIT; with K clients, FLoRA's server sends K times what it receives."""
    stream = torch.Generator().manual_seed(0)
    square = nn.Sequential(Adapted(8, 8, stream))
    sent = {}
    for rule in RULES:
        run = started(AdapterStrategy(rule=rule, H=1, inner_optim="sgd"), square, K)
        run.step(torch.zeros_like(run.cluster.weights))
        sent[rule] = sum(e.payload_bytes for e in run.ledger)
    assert sent["ffa"] / sent["fedit"] == sent["fedsa"] / sent["fedit"] == 0.5
    assert sent["flora"] == sent["fedex"] == sent["fedit"] == 4 * R * (8 + 8)


@pytest.mark.parametrize("rule", RULES)
def test_nodes_held_apart_have_equal_bits(rule: str) -> None:
    gradients = normal(4, K, size(model()) - 6)
    same_apart(AdapterStrategy(rule=rule, H=2, lr=0.1, inner_optim="sgd"), model(), gradients)


STREAM = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(96, 5, generator=STREAM), torch.randint(3, (96,), generator=STREAM))
OPTIONS: dict[str, Any] = {"num_nodes": K, "max_steps": 6, "batch_size": 4, "progress": False}


def fitted(strategy: AdapterStrategy, **options: Any) -> vsim.Trainer:
    trainer = vsim.Trainer(model(), DATA, loss_fn=nn.functional.cross_entropy)
    trainer.last = trainer.fit(strategy=strategy, **{**OPTIONS, **options})  # type: ignore[attr-defined]
    return trainer


def test_five_rules_beside_each_other_each_have_their_own_base() -> None:
    strategies = {rule: AdapterStrategy(rule=rule, H=3, lr=0.05) for rule in RULES}
    seen: dict[str, Tensor] = {}

    def look(run: Any) -> None:
        if run.done == 6:
            seen[run.strategy.rule] = run.cluster.replicas.views(run.cluster.weights)["0.base.weight"].clone()

    vsim.compare(model(), DATA, strategies=strategies, loss_fn=nn.functional.cross_entropy, callbacks=[look], **OPTIONS)
    start = model().state_dict()["0.base.weight"]
    for rule in RULES:
        base, alone = seen[rule], fitted(strategies[rule]).strategy
        assert alone is not None
        torch.testing.assert_close(base, alone.cluster.replicas.views(alone.cluster.weights)["0.base.weight"])
        assert torch.equal(base, start.expand_as(base)) is (rule not in ("flora", "fedex")), rule


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_is_the_same(rule: str, tmp_path: Any) -> None:
    strategy = AdapterStrategy(rule=rule, H=2, lr=0.05)
    whole_run = fitted(strategy)
    fitted(strategy, max_steps=4, save_dir=tmp_path)
    resumed = fitted(strategy, save_dir=tmp_path, resume=True)
    assert whole_run.strategy is not None and resumed.strategy is not None
    assert torch.equal(resumed.strategy.cluster.weights, whole_run.strategy.cluster.weights)


@pytest.mark.parametrize("rule", RULES)
def test_clients_of_a_population(rule: str) -> None:
    """What stays with a client, or never changes, is not pulled. W₀ is, where it changes."""
    trainer = fitted(AdapterStrategy(rule=rule, H=2, lr=0.05), participation=Sample(2, of=4), num_nodes=2)
    pulled = {event.payload_bytes for event in trainer.ledger if event.collective == "pull"}
    own = {"fedit": R * (6 + 5), "ffa": R * 6, "fedsa": R * 5}
    assert pulled == {4 * (HEAD + own.get(rule, R * (6 + 5) + 6 * 5))}


def test_fedsa_gives_a_client_its_own_b_when_it_comes_back() -> None:
    seen: dict[int, Tensor] = {}
    returned = []

    def look(run: Any) -> None:
        strategy, b = run.strategy, run.cluster.replicas.views(run.cluster.weights)["0.lora_B"]
        for row, client in enumerate(run.cluster.active):
            if run.done % 2 and client in seen:  # in a round; B is recorded at its end
                assert torch.equal(strategy.personal_adapters[row], seen[client].flatten())
                assert (b[row] - seen[client]).abs().max() < 0.2 < (seen[client]).abs().max()  # a step away from it
                returned.append(client)
            elif not run.done % 2:
                seen[client] = b[row].clone()

    options: dict[str, Any] = {"participation": Sample(2, of=4), "num_nodes": 2, "max_steps": 16, "callbacks": [look]}
    fitted(AdapterStrategy(rule="fedsa", H=2, lr=0.15), **options)
    assert len({*returned}) > 2 and not torch.equal(seen[0], seen[1])


def test_a_frozen_base_is_left_alone_or_refused() -> None:
    for rule in ("fedit", "ffa", "fedsa"):
        run = started(AdapterStrategy(rule=rule, H=1), model(trainable=False), K)
        run.step(torch.ones_like(run.cluster.weights))
        assert sum(e.payload_bytes for e in run.ledger) == 4 * sum(n for _, n in SENT[rule])
    for rule in ("flora", "fedex"):
        with refused(ValueError, rule, "0.lora_A … requires_grad=True"):
            started(AdapterStrategy(rule=rule), model(trainable=False), K)


def test_what_does_not_fit_is_refused() -> None:
    with refused(ValueError, "rule", "fedavg"):
        AdapterStrategy(rule="fedavg")
    with refused(TypeError, "scaling=2 … no effect … rule='fedit'"):
        AdapterStrategy(scaling=2)
    with refused(TypeError, "rule='flora' … plain mean … median"):
        AdapterStrategy(rule="flora", average="median")
    with refused(ValueError, "H … warm-up"):
        started(AdapterStrategy(H=PostLocal(2, 3)), model(), K)
    with refused(ValueError, "lora_A … 0.weight"):
        started(AdapterStrategy(), nn.Sequential(nn.Linear(2, 2)), K)
    without = model()
    del without[0].scaling
    with refused(ValueError, "fedex … 0.lora_A … scaling="):
        started(AdapterStrategy(rule="fedex"), without, K)
    started(AdapterStrategy(rule="fedex", scaling=SCALING), without, K)
    transposed = nn.Sequential(Adapted(6, 5, torch.Generator()))
    transposed[0].lora_A = nn.Parameter(torch.zeros(5, R))
    with refused(ValueError, "0.lora_A must be (r, m)"):
        started(AdapterStrategy(), transposed, K)
    with refused(ValueError, "AdapterStrategy: Attack('sign_flip', share=0.4)"):
        started(AdapterStrategy(rule="flora", attack=Attack("sign_flip", share=0.4)), model(), K)


def test_names_as_in_peft() -> None:
    class Layer(nn.Module):
        """As peft builds it: a base layer, and dicts of linear layers and scales by the name of an adapter."""

        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(5, 6)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(5, R, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(R, 6, bias=False)})
            self.scaling = {"default": 0.25}

    run = started(AdapterStrategy(rule="fedex", H=1), nn.Sequential(Layer()), K)
    assert isinstance(run.strategy, AdapterStrategy)
    assert run.strategy.scales == {"0.lora_A.default.weight": 0.25}
    run.step(normal(*run.cluster.weights.shape))
    assert [e.payload_bytes for e in run.ledger] == [4 * R * (6 + 5), 4 * 6]


def test_fedit_is_fedavg_of_a_model_with_a_frozen_base() -> None:
    gradients = normal(K, size(model(False)) - 36, seed=3)
    options: dict[str, Any] = {"H": 1, "inner_optim": "sgd", "lr": 0.1}
    ours, plain = (
        started(s, model(False), K).step(gradients) for s in (AdapterStrategy(**options), FedAvgStrategy(**options))
    )
    assert torch.equal(ours, plain)


def payloads(rank: int, n: int, m: int) -> dict[str, float]:
    """Rule → entries that a node sends for an adapter alone."""
    found = {}
    for rule in RULES:
        bare = nn.Sequential(Adapted(n, m, torch.Generator().manual_seed(0)))
        bare[0].lora_A = nn.Parameter(torch.zeros(rank, m))
        bare[0].lora_B = nn.Parameter(torch.zeros(n, rank))
        ledger = AdapterStrategy(rule=rule, H=1).dry_run(bare.to("meta"), K, 1)
        found[rule] = sum(event.payload_bytes for event in ledger) / 4
    return found


@pytest.mark.parametrize("rank", [4, 8])
def test_payloads_have_the_published_ratios(rank: int) -> None:
    """A square layer of width d, as in RoBERTa's attention: FFA-LoRA sends half of what FedIT does [2403.12313], and so
    does FedSA-LoRA [2410.01463]; FLoRA sends what FedIT does [2409.05976, where what returns is K times as large], and
    all sizes are linear in the rank. Against the whole weight d², FedIT sends 2r / d.
    """
    d = 768
    found = payloads(rank, d, d)
    assert found == {
        "fedit": 2 * rank * d,
        "ffa": rank * d,
        "fedsa": rank * d,
        "flora": 2 * rank * d,
        "fedex": 2 * rank * d,
    }
    assert found["fedit"] / d**2 == 2 * rank / d
    wide = payloads(rank, 4 * d, d)  # an MLP's first layer: B is four times as large as A
    assert [wide[rule] / wide["fedit"] for rule in ("ffa", "fedsa")] == [4 / 5, 1 / 5]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's and transformers', of each other
@pytest.mark.parametrize("rule", RULES)
def test_models_of_peft(rule: str) -> None:
    """After a round, against nodes that train alone: see the rules above."""
    import test_models_of_others as others  # makes transformers importable

    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=99, **sizes, bos_token_id=0, eos_token_id=0)
    )
    settings = {"r": R, "lora_alpha": 3, "target_modules": ["q_proj", "gate_proj"]}
    tuned = peft.get_peft_model(plain, peft.LoraConfig(**settings))

    def trained(strategy: Algorithm, trains: str, fixed: str = "-") -> dict[str, Tensor]:
        model = others.FromDict.__new__(others.FromDict)
        nn.Module.__init__(model)
        model.model = copy.deepcopy(tuned)
        for name, p in model.named_parameters():
            p.requires_grad = bool(re.search(trains, name)) and fixed not in name
        trainer = vsim.Trainer(model, others.Sentences())
        options = {"num_nodes": K, "max_steps": 2, "batch_size": 2, "progress": False}
        trainer.fit(strategy=strategy, **options)
        replicas = trainer.strategy.cluster.replicas  # type: ignore[union-attr]
        shared = {name: p.detach().expand(K, *p.shape) for name, p in model.named_parameters()}
        return shared | replicas.views(replicas.weights.clone())

    common: dict[str, Any] = {"inner_optim": "sgd", "lr": 0.5}
    alone = trained(AloneStrategy(**common), "lora_", "lora_A" if rule == "ffa" else "-")
    trains = "lora_|(q|gate)_proj.base_layer" if rule in ("flora", "fedex") else "lora_"
    merged = trained(AdapterStrategy(rule=rule, H=2, **common), trains)
    for place in ("self_attn.q_proj", "mlp.gate_proj"):
        a, b, w = (
            f"model.base_model.model.model.layers.0.{place}.{end}"
            for end in ("lora_A.default.weight", "lora_B.default.weight", "base_layer.weight")
        )
        mean = (alone[b] @ alone[a]).mean(0)
        expected = {
            "fedit": alone[b].mean(0) @ alone[a].mean(0),
            "fedsa": alone[b] @ alone[a].mean(0),
        }.get(rule, mean)
        s = 3 / R
        found = merged[w] + s * merged[b] @ merged[a]
        assert alone[b].abs().sum() > 0
        torch.testing.assert_close(found - alone[w], (s * expected).expand_as(found), rtol=1e-4, atol=1e-7)
