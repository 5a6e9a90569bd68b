"""The description of a comparison in words: strategies, model, data, options, versions, machine and date."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

from vsim.analysis.compared import Runs
from vsim.history.describe import WIDTH

# Entries that are shown even if they were not given.
_ALWAYS = frozenset({"num_nodes", "model", "train_dataset", "val_dataset", "loss_fn", "versions", "machine"})


class Provenance(dict[str, Any]):
    """A description that is displayed as indented text, also in a notebook."""

    def __repr__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def _lines(content: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in content.items():
        inner: list[str] = []
        if isinstance(value, Mapping):
            inner = [*_lines(value, f"{indent}  ")]
        elif isinstance(value, list) and len(str(value)) > WIDTH and isinstance(value[0], str):
            inner = [f"{indent}  {line}" for line in value]
        yield f"{indent}{name}:" if inner else f"{indent}{name}: {value}"
        yield from inner


def describe(comparison: Runs) -> Provenance:
    """Describe what was compared: strategies, model, data, options, versions, machine, date, call and executor.

    Only options that differ from the defaults of `Trainer.fit` are listed. A comparison from a file without
    configurations is described only by its strategies and seeds.
    """
    by_name = {name: [run.seed for run in comparison.runs(name)] for name in comparison}
    alike = len({tuple(own) for own in by_name.values()}) == 1
    seeds: Any = next(iter(by_name.values())) if alike else by_name
    calls = {name: comparison[name].history.config.get("strategy", {}).get("call", "") for name in comparison}
    configs = [history.config for history in comparison.all_histories if history.config]
    sweeps = {name: own for name, own in comparison.tuned.items() if name in comparison}
    tuned = {name: f"{own.chosen()} of {len(own)} settings" for name, own in sweeps.items()}
    shared: dict[str, list[Any]] = {}
    for name, value in (item for config in configs for item in config.items()):
        if value not in shared.setdefault(name, []):
            shared[name].append(value)
    started, models = sorted(shared.pop("started", [])), shared.get("model", [])
    if len(models) > 1:  # of several seeds
        shared["model"] = [{**models[0], "digest": [model["digest"] for model in models]}]
    given = _ALWAYS.union(*(config.get("given", ()) for config in configs)) - {"strategy", "seed"}
    known = {name: values if len(values) > 1 else values[0] for name, values in shared.items() if name in given}
    known |= {"started": " to ".join(dict.fromkeys(started[:1] + started[-1:]))}
    known |= {"computed": [*dict.fromkeys(filter(None, (history.computed for history in comparison.all_histories)))]}
    known = {name: value for name, value in known.items() if value not in (None, "", [])}
    known |= {"tuned": tuned} if tuned else {}
    return Provenance({"strategies": calls, "seeds": seeds, **known, "calls": list(comparison.calls)})
