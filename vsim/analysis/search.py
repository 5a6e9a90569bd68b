"""The trials of a search with optuna: a sorted comparison that knows each trial's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from vsim.analysis.compared import ComparedRun
from vsim.analysis.comparison import Comparison
from vsim.analysis.swept import Point, Sweep
from vsim.history.formats import checksum, write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Search(Sweep):
    """The trials of `vsim.tune`, the best first. "trial 7" is the trial with number 7 in optuna's study.

    Attributes:
        study: optuna's study, with all trials; None if the search was read from a file.
        objectives: the numbers to minimize: "loss", and "wire", "time" or "cost".
        varied: the parameters of all trials. A parameter that a trial lacks is None, shown as –.
    """

    study: Any = None

    def __init__(self, allreduce_bytes: int, points: Mapping[str, Point], objectives: Sequence[str]) -> None:
        super().__init__(allreduce_bytes, points)
        self.objectives = list(objectives)

    @classmethod
    def of(
        cls,
        runs: Mapping[str, Sequence[ComparedRun]],
        params: Mapping[str, Mapping[str, Any]],
        objectives: Sequence[str],
        priced: Comparison,
    ) -> Search:
        """Return the search of these runs.

        Args:
            runs: name → runs, one for each seed. params: name → parameters. priced: gives bytes, network and compute.
        """
        varied = dict.fromkeys(key for name in runs for key in params[name])
        points = {
            name: Point(
                {key: params[name].get(key) for key in varied}, {key: _text(params[name].get(key)) for key in varied}
            )
            for name in runs
        }
        search = cls(priced.allreduce_bytes, points, objectives)
        vars(search).update(vars(priced.holding({}, names=[], calls=[], tuned={})))
        for name, own in runs.items():
            for run in own:
                search.add(name, run)
        return search

    def labels(self, name: str) -> dict[str, Any]:
        """Return the number and parameters of a row of the table as text."""
        return {"trial": name.removeprefix("trial "), **self.points[name].labels}

    @property
    def title(self) -> str:
        """The number of trials, followed by nodes, size and number of seeds, as text."""
        return f"{len(self)} trials; {super(Sweep, self).title}"

    def _pictures(self) -> dict[str, Figure | Axes]:
        return Comparison._pictures(self)  # sampled values rarely repeat, so that a map would be empty

    _keys = (*Sweep._keys, "objectives")

    def to_json(self, path: str | Path) -> None:
        """Write everything but the models and the study, for `from_json`, with a checksum."""
        content = self._as_plain()
        write_json(path, {**content, "sha256": checksum(content)})

    @classmethod
    def _from_plain(cls, content: Mapping[str, Any]) -> Self:
        own = {key: value for key, value in content.items() if key != "sha256"}
        if content.get("sha256", written := checksum(own)) != written:  # files of 0.2.0 have no checksum
            raise ValueError("the file is damaged: its contents do not have their checksum")
        return super()._from_plain(own)

    def _as_plain(self) -> dict[str, Any]:
        return {**super()._as_plain(), "objectives": self.objectives}

    @classmethod
    def _empty(cls, content: Mapping[str, Any]) -> Search:
        sweep = Sweep._empty(content)
        return cls(sweep.allreduce_bytes, sweep.points, content["objectives"])


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
