"""The runs of a comparison by name, and the files that they are written to."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from vsim.extras import extra
from vsim.network import Compute, Network
from vsim.records.compared import ComparedRun
from vsim.records.history import History, holding_a_record, read_json, write_csv, write_json

if TYPE_CHECKING:
    import pandas as pd

Self = TypeVar("Self", bound="Runs")


class Runs(Mapping[str, ComparedRun]):
    """Name → runs, one for each seed, in the order in which they were added; see `Comparison`."""

    def __init__(self, allreduce_bytes: int) -> None:
        self.allreduce_bytes = allreduce_bytes
        self.network: Network | None = None
        self.compute: Compute | None = None
        self._runs: dict[str, list[ComparedRun]] = {}
        self._names: list[str] = []  # of all runs, of a selection too: the looks of lines follow from them

    @overload
    def __getitem__(self, name: str) -> ComparedRun: ...
    @overload
    def __getitem__(self: Self, name: list[str]) -> Self: ...
    def __getitem__(self: Self, name: str | list[str]) -> ComparedRun | Self:
        if not isinstance(name, list):
            return self.runs(name)[0]
        selection = copy.copy(self)
        selection._runs = {one: self.runs(one) for one in name}
        return selection

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def runs(self, name: str) -> list[ComparedRun]:
        """Return the runs of one strategy, one for each seed."""
        if name not in self._runs:
            raise KeyError(f"no run {name!r}; there are {', '.join(self._runs)}")
        return self._runs[name]

    @property
    def num_nodes(self) -> int | None:
        """K; None if it is not the same for all."""
        numbers = {history.num_nodes for history in self._all_histories()}
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def histories(self) -> dict[str, list[History]]:
        """Name → histories, one for each seed: what `vsim.records.plots.bands` draws."""
        return {name: [run.history for run in runs] for name, runs in self._runs.items()}

    def add(self, name: str, run: ComparedRun) -> None:
        """Add a run of one seed."""
        if name not in self._runs:
            self._names.append(name)
        self._runs.setdefault(name, []).append(run)

    def _titles(self, name: str) -> dict[str, Any]:
        """What a row of the table is called: column → text."""
        return {"strategy": name}

    def _titled_runs(self) -> Iterator[tuple[dict[str, Any], ComparedRun]]:
        """All runs, with what their lines in files begin with: column → value."""
        for name, runs in self._runs.items():
            for run in runs:
                yield {"strategy": name, "seed": run.seed}, run

    def _all_histories(self) -> list[History]:
        return [run.history for runs in self._runs.values() for run in runs]

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with one row a strategy, seed and step: these two and the columns of `History`."""
        pandas = extra("pandas", "to_pandas()", "pandas", "notebook")
        frames = [run.history.to_pandas().assign(**titles) for titles, run in self._titled_runs()]
        titles, _ = next(self._titled_runs())
        return pandas.concat(frames, ignore_index=True)[[*titles, *self._columns]]

    def to_csv(self, path: str | Path) -> None:
        """Write one line a strategy, seed and step, with the columns of `to_pandas`."""
        titles, _ = next(self._titled_runs())
        rows = (
            (*own.values(), *values)
            for own, run in self._titled_runs()
            for values in zip(*(run.history.column(c).tolist() for c in self._columns), strict=True)
        )
        write_csv(path, (*titles, *self._columns), rows)

    @property
    def _columns(self) -> list[str]:
        """Those of all histories; some strategies have columns of their own."""
        return list(dict.fromkeys(c for _, run in self._titled_runs() for c in run.history.columns))

    def to_json(self, path: str | Path) -> None:
        """Write everything but the models, for `from_json`: histories, ledgers, failures."""
        write_json(path, self._as_plain())

    @classmethod
    def from_json(cls: type[Self], path: str | Path) -> Self:
        """Read what `to_json` wrote; the runs have no models.

        Raises:
            ValueError: the file holds something else.
        """
        content = read_json(path, cls.__name__, cls._keys)
        with holding_a_record(path, cls.__name__):
            return cls._from_plain(content)

    _keys: tuple[str, ...] = ("allreduce_bytes", "runs")

    def _as_plain(self) -> dict[str, Any]:
        runs = [{"strategy": name, **run.as_plain()} for name, runs in self._runs.items() for run in runs]
        priced = {key: None if own is None else own.as_plain() for key, own in self._priced_on.items()}
        return {"allreduce_bytes": self.allreduce_bytes, "runs": runs, **priced}

    @property
    def _priced_on(self) -> dict[str, Network | Compute | None]:
        return {"network": self.network, "compute": self.compute}

    @classmethod
    def _from_plain(cls: type[Self], content: Mapping[str, Any]) -> Self:
        comparison = cls._empty(content)
        if content.get("network") is not None:
            comparison.network = Network.from_plain(content["network"])
            comparison.compute = Compute.from_plain(content["compute"])
        for run in content["runs"]:
            comparison.add(run["strategy"], ComparedRun.from_plain(run))
        return comparison

    @classmethod
    def _empty(cls: type[Self], content: Mapping[str, Any]) -> Self:
        return cls(content["allreduce_bytes"])
