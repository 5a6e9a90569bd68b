"""Trainings of transformers and Lightning as comparisons: with one node, the library's own steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loadable_torchvision  # noqa: F401
import pytest
import torch
from reference_cluster import small_mlp, vectors
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset, WeightedRandomSampler

import vsim
from vsim.cluster.optim import OptimSpec
from vsim.from_trainer import spec_of
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy

STEPS = 9


def trained_alone(arguments: dict[str, Any]) -> nn.Module:
    """The model after the training with one node."""
    comparison = vsim.compare(
        **arguments, strategies={"alone": SimpleReduceStrategy()}, num_nodes=1, progress=False, executor="loop"
    )
    model = comparison["alone"].model
    assert model is not None
    return model


def assert_close(found: nn.Module, expected: nn.Module, prefix: str = "") -> None:
    own = dict(found.named_parameters())
    for name, p in expected.named_parameters():
        torch.testing.assert_close(own[prefix + name], p, rtol=2e-5, atol=2e-6)


# transformers ---------------------------------------------------------------------------------------------------------


class Sentences(Dataset[dict[str, Tensor]]):
    """Token sequences of different lengths."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = torch.randint(1, 40, (6 + i % 5,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    pad = nn.utils.rnn.pad_sequence
    tokens = pad([one["input_ids"] for one in samples], batch_first=True)
    labels = pad([one["labels"] for one in samples], batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "labels": labels, "attention_mask": (tokens > 0).long()}


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes a small `transformers.Trainer`, with other arguments."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

    def make(cls: Any = transformers.Trainer, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        own: dict[str, Any] = {
            **{"per_device_train_batch_size": 4, "learning_rate": 3e-3, "weight_decay": 0.1, "max_steps": STEPS},
            **{"train_sampling_strategy": "sequential", "warmup_steps": 3, "lr_scheduler_type": "cosine"},
            **{"max_grad_norm": 0.5, "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True},
        }
        args = transformers.TrainingArguments(output_dir=str(tmp_path), **{**own, **options})
        model = transformers.GPT2LMHeadModel(config)
        data: dict[str, Any] = {"train_dataset": Sentences(), "eval_dataset": Sentences(), "data_collator": padded}
        return cls(**{"model": model, "args": args, **data, **(trainer or {})})

    return make


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "lr_scheduler_type": "linear"},
        {
            **{"gradient_accumulation_steps": 4, "per_device_train_batch_size": 5, "dataloader_drop_last": False},
            **{"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.0},
        },
        {"dataloader_drop_last": True, "per_device_train_batch_size": 5, "optim": "sgd", "learning_rate": 0.3},
    ],
)
@pytest.mark.slow
def test_one_node_takes_the_steps_of_transformers(make_trainer: Callable[..., Any], options: dict[str, Any]) -> None:
    trainer = make_trainer(**options)
    start = copy.deepcopy(trainer.model)
    arguments = vsim.from_trainer(trainer)
    assert trainer.optimizer is None and trainer.lr_scheduler is None  # it is not changed
    optim = arguments["strategy_defaults"]["inner_optim"]
    assert optim.kwargs["weight_decay"] == 0.1 and optim.kwargs["lr"] == trainer.args.learning_rate
    assert {pattern: own["weight_decay"] for pattern, own in optim.groups.items()}["*.bias"] == 0.0
    names = {len(found) for _, found in optim.parts(arguments["model"])}
    assert len(names) == 2 and sum(names) == len([*trainer.model.parameters()])
    found = trained_alone(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert_close(found, trainer.model, "model.")
    assert (trainer.model.transformer.wte.weight - start.transformer.wte.weight).abs().max() > 5e-3


class Labelled(Dataset[dict[str, Tensor]]):
    """Token sequences of three classes."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = torch.randint(1, 40, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": torch.tensor(i % 3)}


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.slow
def test_pieces_are_accumulated_as_transformers_does(make_trainer: Callable[..., Any], counts: bool) -> None:
    """Also where it adds up the means of the pieces, as of a classifier that does not divide by the labels' number."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(
        vocab_size=40, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes
    )
    data = {
        "train_dataset": Labelled(),
        "eval_dataset": None,
        "data_collator": None,
        "model": transformers.BertForSequenceClassification(config),
    }
    sgd = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    trainer = make_trainer(trainer=data, gradient_accumulation_steps=2, **sgd)
    trainer.model_accepts_loss_kwargs = counts
    found = trained_alone(vsim.from_trainer(trainer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert_close(found, trainer.model, "model.")


@pytest.mark.slow
def test_a_comparison_of_eight_nodes_takes_the_trainers_settings(make_trainer: Callable[..., Any]) -> None:
    strategies = {"all": SimpleReduceStrategy(), "DiLoCo": DiLoCoStrategy(H=3, lr=1e-4)}
    arguments = vsim.from_trainer(make_trainer(train_sampling_strategy="random", seed=7))
    assert arguments["shuffle"] is True and arguments["seed"] == 7 and arguments["max_steps"] == STEPS
    comparison = vsim.compare(**arguments, strategies=strategies, num_nodes=8, progress=False, val_interval=None)
    for name, rate in (("all", 3e-3), ("DiLoCo", 1e-4)):  # which has a rate of its own
        rates = comparison.histories[name][0]["lr"]
        assert max(rates[1:]) == pytest.approx(rate) and len(rates) == 1 + STEPS


@pytest.mark.slow
def test_what_transformers_trains_otherwise_is_an_error(make_trainer: Callable[..., Any]) -> None:
    transformers = pytest.importorskip("transformers")

    class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    class Weighted(transformers.Trainer):  # type: ignore[misc, name-defined]
        def _get_train_sampler(self, *_: Any) -> Any:
            return WeightedRandomSampler([1.0] * 2 + [0.0] * 22, 24)

    class Loads(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, 8, collate_fn=self.data_collator)

    class Watches(transformers.Trainer):  # type: ignore[misc, name-defined]
        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)

    assert vsim.from_trainer(make_trainer(cls=Watches))["max_steps"] == STEPS

    class Writes(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        pass

    cases: list[tuple[dict[str, Any], str]] = [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length'"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"gradient_accumulation_steps": 4, "dataloader_drop_last": True}, "gradient_accumulation_steps=4 with"),
        ({"cls": Own}, "the method compute_loss of Own"),
        ({"cls": Weighted}, "the method _get_train_sampler of Weighted"),
        ({"cls": Loads}, "the method get_train_dataloader of Loads"),
        ({"trainer": {"callbacks": [Writes()]}}, "the callback Writes"),
        ({"trainer": {"compute_loss_func": lambda *_, **__: None}}, "compute_loss_func"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "the schedule ReduceLROnPlateau"),
    ]
    for options, named in cases:
        with pytest.raises(ValueError, match="from_trainer cannot carry") as caught:
            vsim.from_trainer(make_trainer(**options))
        assert named in str(caught.value)


# Lightning ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lightning() -> Any:
    return pytest.importorskip("lightning")


def module_of(lightning: Any, configure: Callable[[Any], Any], **methods: Any) -> Any:
    """A small LightningModule with this configure_optimizers, and other methods."""

    def __init__(self: Any) -> None:
        lightning.LightningModule.__init__(self)
        self.net = small_mlp()

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return {"loss": loss}

    own = {"__init__": __init__, "training_step": training_step, "configure_optimizers": configure, **methods}
    return type("Module", (lightning.LightningModule,), own)()


def adam_with_groups(self: Any) -> dict[str, Any]:
    decayed = [p for name, p in self.named_parameters() if not name.endswith("bias")]
    rest = [p for name, p in self.named_parameters() if name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def every_third_batch(self: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 3}}


def one_cycle(self: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.5, total_steps=self.trainer.estimated_stepping_batches, cycle_momentum=False
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def cycles_momentum(self: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=12)}


def by_epoch(self: Any) -> tuple[list[Any], list[Any]]:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def lightning_trainer(lightning: Any, folder: Path, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    own = {"max_epochs": 3, "gradient_clip_val": 0.5, "accelerator": "cpu", "logger": False, **quiet}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning.Trainer(**{**own, **options}, default_root_dir=folder)


@pytest.mark.parametrize(
    ("configure", "options", "batch"),
    [
        (adam_with_groups, {}, 8),
        (by_epoch, {"max_epochs": -1, "max_steps": 7, "gradient_clip_val": None}, 8),
        (by_epoch, {"accumulate_grad_batches": 2, "gradient_clip_val": None}, 7),
        (every_third_batch, {"max_steps": 11}, 7),
        (every_third_batch, {"accumulate_grad_batches": 2, "max_steps": 1000}, 7),
        (one_cycle, {}, 7),
        (by_epoch, {"gradient_clip_val": None}, None),  # the module's own loader
    ],
)
@pytest.mark.slow
def test_one_node_takes_the_steps_of_lightning(
    lightning: Any, configure: Any, options: dict[str, Any], batch: int | None, tmp_path: Path
) -> None:
    own = {} if batch else {"train_dataloader": lambda _: DataLoader(vectors(28), 7)}
    module, loader = module_of(lightning, configure, **own), DataLoader(vectors(28), batch) if batch else None
    trainer = lightning_trainer(lightning, tmp_path, **options)
    arguments = vsim.from_trainer(trainer, module, loader)
    found = trained_alone(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader)
    assert trainer.global_step == arguments["max_steps"]
    assert_close(found, module, "module.")


@pytest.mark.slow
def test_modules_are_set_up_as_lightning_does(lightning: Any, tmp_path: Path) -> None:
    """By a data module without validation data, and by hooks of both in Lightning's order; the module is left alone."""
    calls = list[str]()

    class Data(lightning.LightningDataModule):  # type: ignore[misc, name-defined]
        def prepare_data(self) -> None:
            calls.append("prepare")

        def setup(self, stage: str) -> None:
            calls.append(f"data {stage}")

        def train_dataloader(self) -> Any:
            return DataLoader(vectors(28), 7)

    def setup(self: Any, stage: str) -> None:
        calls.append(f"module {stage}")
        with torch.no_grad():
            next(self.parameters()).zero_()

    def training_step(self: Any, batch: Any, number: int) -> Any:  # Lightning counts its arguments
        assert number >= 0
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def made() -> Any:
        torch.manual_seed(0)
        return module_of(lightning, by_epoch, setup=setup, training_step=training_step)

    module = made()
    arguments = vsim.from_trainer(lightning_trainer(lightning, tmp_path), module, Data())
    assert calls == ["prepare", "data fit", "module fit"] and arguments["val_dataset"] is None
    assert next(module.parameters()).any()
    found = trained_alone(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning_trainer(lightning, tmp_path).fit(module, Data())
    assert_close(found, module, "module.")


@pytest.mark.slow
def test_what_lightning_trains_otherwise_is_an_error(lightning: Any, tmp_path: Path) -> None:
    def hook(self: Any, *_: Any) -> None:
        pass

    def two(self: Any) -> list[Any]:
        return [torch.optim.SGD(self.net.parameters(), lr=0.1) for _ in range(2)]

    def some(self: Any) -> Any:
        return torch.optim.SGD([next(self.parameters())], lr=0.1)

    callback = type("Writes", (lightning.Callback,), {})()
    cases: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
        (two, {}, {}, "several optimizers"),
        (some, {}, {}, "parameters that the optimizer does not step (module.net."),
        (by_epoch, {"on_train_batch_end": hook}, {}, "the hook on_train_batch_end of Module"),
        (by_epoch, {"on_after_batch_transfer": hook}, {}, "the hook on_after_batch_transfer of Module"),
        (by_epoch, {"configure_callbacks": hook}, {}, "the hook configure_callbacks of Module"),
        (cycles_momentum, {}, {}, "the schedule OneCycleLR, which changes betas"),
        (by_epoch, {}, {"max_time": "00:01:00:00"}, "the callback Timer"),
        (by_epoch, {}, {"callbacks": [callback]}, "the callback Writes"),
        (by_epoch, {}, {"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm="),
        (by_epoch, {}, {"accumulate_grad_batches": 3}, "accumulate_grad_batches=3 with an incomplete step"),
        (by_epoch, {}, {"max_epochs": -1}, "neither max_steps nor max_epochs"),
    ]
    for configure, methods, options, named in cases:
        trainer = lightning_trainer(lightning, tmp_path, **options)
        with pytest.raises(ValueError, match="from_trainer cannot carry") as caught:
            vsim.from_trainer(trainer, module_of(lightning, configure, **methods), DataLoader(vectors(28), 7))
        assert named in str(caught.value)
    data = vectors(28)
    loaders = {
        "the sampler WeightedRandomSampler": DataLoader(data, 7, sampler=WeightedRandomSampler([1.0] * 28, 28)),
        "draws with replacement": DataLoader(data, 7, sampler=RandomSampler(data, replacement=True)),
        "another number of examples": DataLoader(data, 7, sampler=RandomSampler(data, num_samples=7)),
        "a batch_sampler": DataLoader(data, batch_sampler=[[0, 1], [2]]),
    }
    for named, loader in loaders.items():
        with pytest.raises(ValueError, match=named):
            vsim.from_trainer(lightning_trainer(lightning, tmp_path), module_of(lightning, by_epoch), loader)
    with pytest.raises(ValueError, match="training data of type list"):
        vsim.from_trainer(lightning_trainer(lightning, tmp_path), module_of(lightning, by_epoch), [DataLoader(data)])
    augments = type("Module", (lightning.LightningDataModule,), {"on_after_batch_transfer": hook})()
    with pytest.raises(ValueError, match="the hook on_after_batch_transfer of Module"):
        vsim.from_trainer(lightning_trainer(lightning, tmp_path), module_of(lightning, by_epoch), augments)
    with pytest.raises(TypeError, match="module is missing"):
        vsim.from_trainer(lightning_trainer(lightning, tmp_path))


# Without either -------------------------------------------------------------------------------------------------------


def test_another_trainer_is_an_error() -> None:
    with pytest.raises(TypeError, match="must be a Trainer of transformers or Lightning"):
        vsim.from_trainer(vsim.Trainer(small_mlp(), vectors()))


def test_an_optimizer_becomes_its_specification() -> None:
    model = small_mlp()
    named = dict(model.named_parameters())
    biases = [p for name, p in named.items() if name.endswith("bias")]
    others = [p for name, p in named.items() if not name.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": others}, {"params": biases, "weight_decay": 0.0}], lr=0.1, betas=(0.5, 0.9)
    )
    assert repr(spec_of(optimizer, named)) == (
        "OptimSpec(AdamW, lr=0.1, betas=(0.5, 0.9), groups={'*.bias': {'weight_decay': 0.0}})"
    )
    assert repr(spec_of(torch.optim.SGD(model.parameters(), lr=0.1, foreach=True), named)) == "OptimSpec(SGD, lr=0.1)"


def test_defaults_are_for_strategies_that_have_none_of_their_own() -> None:
    defaults = {"inner_optim": OptimSpec("sgd", lr=0.1), "max_norm": 2.0, "warmup_steps": 3}
    strategies = {
        "plain": SimpleReduceStrategy(),
        "rate": SimpleReduceStrategy(lr=0.5, max_norm=1.0),
        "own": DiLoCoStrategy(inner_optim="adamw", H=2, lr_scheduler="cosine"),
    }
    data = TensorDataset(*vectors().tensors)
    comparison = vsim.compare(
        small_mlp(), data, strategies=strategies, num_nodes=2, max_steps=4, progress=False, strategy_defaults=defaults
    )
    calls = {name: comparison.histories[name][0].config["strategy"] for name in comparison}
    assert "SGD" in str(calls["plain"]) and "SGD" in str(calls["rate"]) and "AdamW" in str(calls["own"])
    assert comparison.histories["rate"][0]["lr"][-1] == 0.5 and comparison.histories["plain"][0]["lr"][-1] == 0.1
    for wrong, error in ((["sgd"], "must be a dict"), ({"rate": 1}, "unknown argument 'rate'")):
        with pytest.raises(TypeError, match=error):
            vsim.compare(small_mlp(), data, strategies=strategies, num_nodes=2, strategy_defaults=wrong)  # type: ignore[arg-type]
