"""What the commands do: train, print, and write to --out."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_model

from vsim import bench
from vsim.arguments import whole_number
from vsim.cli.problem import (
    attending,
    batch_size,
    clock,
    computing,
    data,
    dealt,
    loggers,
    lr,
    model,
    model_kind,
    parse_settings,
    parse_strategy,
    strategy_class,
    title,
    writable,
)
from vsim.compare import compare
from vsim.doctor import machine
from vsim.network import Compute, Network
from vsim.network.timeline import duration
from vsim.price import price
from vsim.records.compared import ComparedRun
from vsim.records.comparison import Comparison
from vsim.records.loggers import folder_name
from vsim.records.table import text_table
from vsim.strategy import COMPARED
from vsim.sweep import sweep
from vsim.trainer import Trainer
from vsim.verify import verify


def run_compare(arguments: argparse.Namespace) -> int:
    named = arguments.strategies = arguments.strategies or list(COMPARED)
    repeated = sorted({text for text in named if named.count(text) > 1})
    if repeated:
        raise ValueError(f"--strategies names {', '.join(repeated)} more than once")
    strategies = {text: parse_strategy(text, lr(arguments)) for text in named}
    (train, val), options = data(arguments), _options(arguments)
    start = partial(model, model_kind(arguments), train)
    comparison = compare(start, dealt(arguments, train), val, strategies=strategies, seeds=_seeds(arguments), **options)
    print(f"\n{comparison.table(loss=arguments.target_loss)}\n")
    comparison.to_csv(arguments.out / "comparison.csv")
    x = "step" if arguments.network is None else "time"
    comparison.figure(title(arguments), x=x).save(arguments.out / "comparison.png")
    print(f"figure: {arguments.out / 'comparison.png'}\ndata:   {arguments.out / 'comparison.csv'}")
    in_lockstep = not any(strategy.is_asynchronous for strategy in strategies.values())  # others have one network
    if arguments.network is not None and arguments.target_loss is not None and in_lockstep:
        _save_figure(comparison.winners(arguments.target_loss).plot(), arguments.out / "winners.png")
        print(f"map:    {arguments.out / 'winners.png'}")
    return _status(comparison)


def run_sweep(arguments: argparse.Namespace) -> int:
    settings = parse_settings(arguments.set)
    cls, defaults, given = strategy_class(arguments.strategy, lr(arguments))
    twice = given.keys() & settings.keys()
    if twice:
        raise ValueError(f"--strategy and --set both give {', '.join(sorted(twice))}")
    (train, val), options = data(arguments), _options(arguments)
    for key, option in (("num_nodes", arguments.nodes), ("batch_size", arguments.batch_size)):
        if key in settings:
            if option is not None:
                raise ValueError(f"--set gives {key}, and --{key.removeprefix('num_').replace('_', '-')} does, too")
            del options[key]
    result = sweep(
        partial(model, model_kind(arguments), train),
        dealt(arguments, train),
        val,
        strategy=cls,
        settings={**defaults, **given, **settings},
        seeds=_seeds(arguments),
        halving=arguments.halving,
        **options,
    )
    print(f"\n{result.table(loss=arguments.target_loss)}\n")
    out = arguments.out
    result.to_csv(out / "sweep.csv")
    result.figure().save(out / "sweep.png")
    print(f"curves:   {out / 'sweep.png'}")
    if len(result.varied) > 1:
        _save_figure(result.heatmap(*result.varied[:2]), out / "heatmap.png")
        print(f"heat map: {out / 'heatmap.png'}")
    print(f"data:     {out / 'sweep.csv'}")
    return _status(result)


def run_train(arguments: argparse.Namespace) -> int:
    text, kind = arguments.strategy, model_kind(arguments)
    strategy = parse_strategy(text, lr(arguments))
    (train, val), options = data(arguments), _options(arguments)
    trainer = Trainer(model(kind, train, arguments.seed), dealt(arguments, train), val)
    trainer.run_label = text
    if options["run_name"] is not None:  # beside other strategies of that name
        options["run_name"] += f"/{folder_name(text)}"
    trained = trainer.fit(strategy=strategy, seed=arguments.seed, **options)
    result = Comparison(sum(p.nbytes for p in trained.parameters() if p.requires_grad))
    result.add(text, ComparedRun(trainer.history, trained, seed=arguments.seed))
    print(f"\n{result.table()}\n")
    trainer.history.to_csv(arguments.out / "history.csv")
    result.figure(title(arguments)).save(arguments.out / "history.png")
    save_model(trained, str(arguments.out / "model.safetensors"))
    for what in ("history.png", "history.csv", "model.safetensors"):
        print(arguments.out / what)
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    train, _ = data(arguments)
    report = verify(
        model(model_kind(arguments), train, arguments.seed),
        dealt(arguments, train),
        parse_strategy(arguments.strategy, lr(arguments)),
        arguments.nodes,
        arguments.steps,
        threads=arguments.threads,
        executor=arguments.executor,
        batch_size=batch_size(arguments),
        seed=arguments.seed,
        progress=not arguments.quiet,
    )
    print(report)
    return 0 if report.identical else 1


def run_doctor(arguments: argparse.Namespace) -> int:
    train, _ = data(arguments)
    trainer = Trainer(model(model_kind(arguments), train, arguments.seed), dealt(arguments, train))
    explanation = trainer.explain(
        strategy=parse_strategy(arguments.strategy, lr(arguments)),
        num_nodes=arguments.nodes,
        max_steps=arguments.steps,
        batch_size=batch_size(arguments),
        seed=arguments.seed,
        **computing(arguments),
    )
    print(f"{machine()}\n\n{title(arguments)}\n{explanation}")
    return 0


def run_time(arguments: argparse.Namespace) -> int:
    compute = Compute(arguments.compute, layers=arguments.layers)
    network = Network.parse(arguments.network)
    rows = []
    for text in arguments.strategies:
        line = price(
            parse_strategy(text, 1e-3),
            parameters=arguments.parameters,
            num_nodes=arguments.nodes,
            max_steps=arguments.steps,
            network=network,
            compute=compute,
            bytes_per_parameter=arguments.bytes_per_parameter,
        )
        seconds, sent = float(line.seconds[-1]), sum(event.payload_bytes for event in line.ledger) / 1e9
        rows.append(
            {
                "strategy": text,
                "time": duration(seconds),
                "a step": duration(seconds / arguments.steps),
                "compute": f"{line.utilization:.1%}",
                "payload per node": f"{sent:.3g} GB" if sent < 1000 else f"{sent:,.0f} GB",
            }
        )
    what = f"{arguments.parameters:.4g} parameters, {arguments.nodes} nodes, {arguments.steps} steps"
    print(f"{what}\n{network!r}, {compute!r}\n\n{text_table(rows, 'simple', ['strategy'])}")
    return 0


def run_bench(arguments: argparse.Namespace) -> int:
    for value in arguments.nodes:
        whole_number("--nodes", value)
    if arguments.rounds is not None:
        whole_number("--rounds", arguments.rounds)
    writable(arguments.out)
    strategies = {text: partial(parse_strategy, text, 1e-4) for text in arguments.strategies}
    for make in strategies.values():
        make()  # before minutes of measuring
    lines = bench.bench(
        arguments.models,
        arguments.nodes,
        compile=arguments.compile,
        jax=arguments.jax,
        rounds=arguments.rounds,
        progress=lambda line: print(f"{line.model}, K = {line.num_nodes}: done", file=sys.stderr),
    )
    print(f"\n{bench.table(lines)}\n")
    by_strategy = []
    if strategies:
        by_strategy = bench.bench_strategies(arguments.models, arguments.nodes, strategies, rounds=arguments.rounds)
        print(f"{bench.strategy_table(by_strategy)}\n")
    for path in bench.save(lines, arguments.out, by_strategy):
        print(path)
    return 0


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments that `fit`, `compare` and `sweep` have in common."""
    if arguments.resume is True and arguments.save_dir is None:
        or_a_path = ", or the PATH of a checkpoint" if arguments.command == "train" else ""
        raise ValueError(f"--resume needs --save-dir DIR{or_a_path}")
    every = max(1, arguments.steps // 10) if arguments.val_interval is None else arguments.val_interval
    options = {
        "num_nodes": 4 if arguments.nodes is None else arguments.nodes,
        "max_steps": arguments.steps,
        "batch_size": batch_size(arguments),
        "val_size": arguments.val_size,
        "val_interval": every,
        "participation": attending(arguments),
        **computing(arguments),
        **clock(arguments),
        "logger": loggers(arguments),
        "run_name": arguments.run_name,
        "wandb_project": arguments.wandb_project,
        "progress": not arguments.quiet,
        "save_dir": arguments.save_dir,
        "checkpoint_interval": arguments.checkpoint_interval,
        "resume": arguments.resume,
    }
    writable(arguments.out)
    return options


def _save_figure(figure: Any, path: Path) -> None:
    from vsim.figures.paper import save  # here, as it loads matplotlib

    save(figure, path)


def _seeds(arguments: argparse.Namespace) -> list[int]:
    return [arguments.seed] if arguments.seeds is None else list(arguments.seeds)


def _status(comparison: Comparison) -> int:
    """0, or 2 if no run got anywhere: they diverged or failed."""
    if any(not run.failed for name in comparison for run in comparison.runs(name)):
        return 0
    print("no run got to its end", file=sys.stderr)
    return 2
