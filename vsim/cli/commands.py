"""What the commands do: train, print, and write to --out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from safetensors.torch import save_model

from vsim import bench
from vsim.arguments import whole_number
from vsim.cli.problem import (
    batch_size,
    computing,
    data,
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
from vsim.records.comparison import Comparison
from vsim.records.plots import save
from vsim.sweep import sweep
from vsim.trainer import Trainer
from vsim.verify import verify


def run_compare(arguments: argparse.Namespace) -> int:
    comparison = _compared(arguments, arguments.strategies, arguments.seeds)
    print(f"\n{comparison.table()}\n")
    comparison.to_csv(arguments.out / "comparison.csv")
    save(comparison.figure(title(arguments)), arguments.out / "comparison.png")
    print(f"figure: {arguments.out / 'comparison.png'}\ndata:   {arguments.out / 'comparison.csv'}")
    return _status(comparison)


def run_sweep(arguments: argparse.Namespace) -> int:
    settings = parse_settings(arguments.set)
    cls, defaults, given = strategy_class(arguments.strategy, lr(arguments))
    twice = given.keys() & settings.keys()
    if twice:
        raise ValueError(f"--strategy and --set both give {', '.join(sorted(twice))}")
    (train, val), options = data(arguments), _options(arguments, arguments.seeds)
    for key, option in (("num_nodes", arguments.nodes), ("batch_size", arguments.batch_size)):
        if key in settings:
            if option is not None:
                raise ValueError(f"--set gives {key}, and --{key.removeprefix('num_').replace('_', '-')} does, too")
            del options[key]
    result = sweep(
        partial(model, model_kind(arguments), train),
        train,
        val,
        strategy=cls,
        settings={**defaults, **given, **settings},
        halving=arguments.halving,
        **options,
    )
    print(f"\n{result.table()}\n")
    out = arguments.out
    result.to_csv(out / "sweep.csv")
    save(result.figure(), out / "sweep.png")
    print(f"curves:   {out / 'sweep.png'}")
    if len(result.varied) > 1:
        save(result.heatmap(*result.varied[:2]), out / "heatmap.png")
        print(f"heat map: {out / 'heatmap.png'}")
    print(f"data:     {out / 'sweep.csv'}")
    return _status(result)


def run_train(arguments: argparse.Namespace) -> int:
    comparison = _compared(arguments, [arguments.strategy])
    ((name, run),) = comparison.items()
    if run.failure.startswith("interrupted"):
        raise KeyboardInterrupt
    if run.model is None:
        raise FloatingPointError(f"{name}: {run.failure}")
    print(f"\n{comparison.table()}\n")
    run.history.to_csv(arguments.out / "history.csv")
    save(comparison.figure(title(arguments)), arguments.out / "history.png")
    save_model(run.model, str(arguments.out / "model.safetensors"))
    for what in ("history.png", "history.csv", "model.safetensors"):
        print(arguments.out / what)
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    train, _ = data(arguments)
    report = verify(
        model(model_kind(arguments), train, arguments.seed),
        train,
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
    trainer = Trainer(model(model_kind(arguments), train, arguments.seed), train)
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


def run_bench(arguments: argparse.Namespace) -> int:
    for name in ("nodes", "rounds"):
        for value in getattr(arguments, name) if name == "nodes" else filter(None, [arguments.rounds]):
            whole_number(f"--{name}", value)
    strategies = {text: partial(parse_strategy, text, 1e-4) for text in arguments.strategies}
    for make in strategies.values():
        make()  # before minutes of measuring
    lines = bench.bench(
        arguments.models,
        arguments.nodes,
        compile=arguments.compile,
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


def _compared(
    arguments: argparse.Namespace, strategies: Sequence[str], seeds: Sequence[int] | None = None
) -> Comparison:
    repeated = sorted({s for s in strategies if list(strategies).count(s) > 1})
    if repeated:
        raise ValueError(f"--strategies names {', '.join(repeated)} more than once")
    made = {text: parse_strategy(text, lr(arguments)) for text in strategies}
    (train, val), options = data(arguments), _options(arguments, seeds)
    return compare(partial(model, model_kind(arguments), train), train, val, strategies=made, **options)


def _options(arguments: argparse.Namespace, seeds: Sequence[int] | None) -> dict[str, Any]:
    """The arguments of `compare` and `sweep` that have one meaning for all runs."""
    if arguments.resume is True and arguments.save_dir is None:
        raise ValueError("--resume needs --save-dir DIR, or the PATH of a checkpoint")
    every = max(1, arguments.steps // 10) if arguments.val_interval is None else arguments.val_interval
    options = {
        "num_nodes": 4 if arguments.nodes is None else arguments.nodes,
        "max_steps": arguments.steps,
        "batch_size": batch_size(arguments),
        "val_size": arguments.val_size,
        "val_interval": every,
        "seeds": [arguments.seed] if seeds is None else seeds,
        **computing(arguments),
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


def _status(comparison: Comparison) -> int:
    """0, or 2 if no run got anywhere: they diverged or failed."""
    if any(not run.failed for name in comparison for run in comparison.runs(name)):
        return 0
    print("no run got to its end", file=sys.stderr)
    return 2
