"""A column of a comparison is one record, from which rows, tables, files and the page follow."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim.analysis import columns
from vsim.analysis.columns import COLUMNS, Column
from vsim.analysis.tables import MEGABYTES
from vsim.strategy import AloneStrategy, FedAvgStrategy, SimpleReduceStrategy

DATA = TensorDataset(torch.linspace(-3, 3, 16)[:, None], torch.arange(16) % 4 // 3)  # a quarter of class 1
POINT = "MB per accuracy point"
BYTES = 8  # of the weights of the model


class Constant(nn.Module):
    """Says class 0 for all examples, whatever its two weights are."""

    def __init__(self, of: int = 0) -> None:
        super().__init__()
        self.weights, self.of = nn.Parameter(torch.ones(2)), of

    def forward(self, x: Tensor) -> Tensor:
        own = self.weights.sum() * 1e-6 + x.new_ones(len(x))
        return torch.stack([own, -own][:: -1 if self.of else 1], 1)


@pytest.fixture(scope="module")
def comparison() -> vsim.Comparison:
    strategies = {
        "AllReduce": SimpleReduceStrategy(lr=1e-9),
        "FedAvg": FedAvgStrategy(H=2, lr=1e-9),
        "alone": AloneStrategy(lr=1e-9),
    }
    options: Any = {"num_nodes": 2, "max_steps": 4, "batch_size": 4, "progress": False, "loss_fn": F.cross_entropy}
    return vsim.compare(Constant(), DATA, DATA, strategies=strategies, **options)


def page(of: vsim.Comparison) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', of.report().html, flags=re.S)
    own: dict[str, Any]
    (own,) = json.loads(text)
    return own


def test_megabytes_per_accuracy_point_by_hand(comparison: vsim.Comparison, tmp_path: Path) -> None:
    rows = {row["strategy"]: row for row in comparison.rows().to_dict("records")}
    sent = {"AllReduce": 4 * BYTES, "FedAvg": 2 * BYTES, "alone": 0}  # a ring of two sends the payload once
    assert {row["accuracy"] for row in rows.values()} == {0.75}
    assert {name: row[POINT] for name, row in rows.items()} == pytest.approx(
        {name: own / 1e6 / 75 for name, own in sent.items()}
    )
    assert POINT.removeprefix("MB ") not in comparison.table()  # which would be wider for everybody
    table = comparison.table(columns=[POINT])
    assert table.splitlines()[0].endswith("  B per accuracy point") and table.splitlines()[2].endswith("0.43")
    frame = comparison.to_pandas()
    assert frame[POINT].notna().tolist() == 3 * [False, False, False, False, True]
    comparison.to_csv(tmp_path / "c.csv")
    assert pd.read_csv(tmp_path / "c.csv")[POINT].dropna().tolist() == pytest.approx(
        [own / 75e6 for own in sent.values()]
    )
    assert comparison.differences("alone", of=POINT)["difference"].tolist() == pytest.approx([32 / 75e6, 16 / 75e6])
    shown = page(comparison)
    assert POINT in shown["more"] and shown["headings"][POINT]["scales"]
    assert [run["row"][POINT] for run in shown["runs"]] == pytest.approx([row[POINT] for row in rows.values()])


def test_rows_are_a_frame(comparison: vsim.Comparison) -> None:
    frame = comparison.rows(network="1 Gbit/s", compute=1.0).set_index("strategy")
    assert frame["hours"].tolist() == pytest.approx([4 / 3600] * 3, rel=1e-3) and frame["wire MB/node"]["alone"] == 0
    assert list(frame) == [
        key for key in comparison.rows(network="1 Gbit/s", compute=1.0).to_dict("records")[0] if key != "strategy"
    ]


def test_there_is_no_price_of_a_point_without_points() -> None:
    data = TensorDataset(DATA.tensors[0], torch.zeros(16, dtype=torch.long))
    options: Any = {"num_nodes": 2, "max_steps": 2, "batch_size": 4, "progress": False, "loss_fn": F.cross_entropy}
    strategies = {"AllReduce": SimpleReduceStrategy(lr=1e-9)}
    (row,) = vsim.compare(Constant(1), data, data, strategies=strategies, **options).rows().to_dict("records")
    assert row["accuracy"] == 0 and math.isnan(row[POINT])
    without = vsim.compare(Constant(1), data, strategies=strategies, **options)
    assert POINT not in without.rows().to_dict("records")[0] and POINT not in without.to_pandas()


def test_a_new_column_is_one_record(comparison: vsim.Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    new = Column("sent {unit} a step", MEGABYTES, of=lambda own: own.wire_bytes / 1e6 / own.steps, scales=True)
    unscaled = Column("MB that do not grow", of=lambda own: 7.0, is_at_end=True)
    monkeypatch.setattr(columns, "COLUMNS", (*COLUMNS, new, unscaled))
    assert [row["sent MB a step"] for row in comparison.rows().to_dict("records")] == pytest.approx([8e-6, 4e-6, 0])
    for format in ("simple", "latex_booktabs", "html"):
        assert all(one in comparison.table(format) for one in ("sent B a step", "MB that do not grow", "8.00", "7.00"))
    assert comparison.to_pandas()["MB that do not grow"].dropna().tolist() == [7.0] * 3
    shown = page(comparison)
    assert [name in shown["table"] for name in ("sent MB a step", "MB that do not grow")] == [True, True]
    scales = {name: own["scales"] for name, own in shown["headings"].items()}
    assert scales["sent MB a step"] and not scales["MB that do not grow"]


def test_columns_that_grow_with_the_model_say_so(comparison: vsim.Comparison) -> None:
    """What doubles with the model's weights is what the page's slider of the model's size multiplies."""
    own, large = (
        of.rows().to_dict("records")[0] for of in (comparison, comparison.at(model=nn.Linear(2, 2, bias=False)))
    )
    names = {name for name, value in own.items() if large[name] != value}
    assert names == {column.name for column in COLUMNS if column.scales and column.name in own}
    assert {column for column in COLUMNS if column.measure is MEGABYTES} == {one for one in COLUMNS if one.scales}


def test_the_page_computes_every_live_column() -> None:
    script = (Path(columns.__file__).parent / "report" / "script" / "prices.js").read_text(encoding="utf-8")
    priced = script[script.index("const priced = ") : script.index("return found;", script.index("const priced = "))]
    names = [column.to("target").name for column in COLUMNS if column.is_live]
    assert len(names) == 6 and all(f'"{name}"' in priced for name in names)


def test_names_of_columns_differ() -> None:
    names = [column.to(1.0).name for column in COLUMNS]
    assert len({*names}) == len(names) and not any("{" in name for name in names)
