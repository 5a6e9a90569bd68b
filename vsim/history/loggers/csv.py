"""A run's record in CSV files."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from vsim.arguments import a_path
from vsim.history.formats import csv_field
from vsim.history.loggers.base import Row, free_folders
from vsim.writing import replacing


class CSVLogger:
    """Files in `<log_dir>/<run_name>/`: `train.csv`, `validation.csv` and `config.json`.

    Every row is written to its file when it is logged, so that an interrupted or killed run keeps its files. Missing
    values are empty fields. If a later row has a new column, the file is written again. A folder that already holds a
    run is not touched: the new run gets a number (`<run_name>-2`), and a warning says so. Without a run name, the date
    and time are the name.

    Args:
        log_dir: the folder of all runs; made if needed.

    Attributes:
        folder: the folder of the last run.
    """

    def __init__(self, log_dir: str | Path = "logs") -> None:
        self.log_dir = a_path("log_dir", log_dir)
        self.folder: Path | None = None
        self._tables: dict[str, _Table] = {}

    def start(self, config: Mapping[str, Any]) -> None:
        """Make the folder and write `config.json`."""
        self.finish("")
        text = json.dumps(config, indent=2, allow_nan=False) + "\n"
        for folder in free_folders(self.log_dir, config.get("run_name"), "*.csv", "config.json"):
            # Open with "x", so that only one of several runs that start at once gets the folder.
            with suppress(FileExistsError), (folder / "config.json").open("x", encoding="utf-8") as file:
                file.write(text)
                self.folder = folder
                break

    def log_train(self, row: Row) -> None:
        """Write a line of `train.csv`."""
        self._table("train.csv").write(row)

    def log_validation(self, row: Row) -> None:
        """Write a line of `validation.csv`."""
        self._table("validation.csv").write(row)

    def finish(self, failure: str) -> None:
        """Close the files."""
        for table in self._tables.values():
            table.close()
        self._tables = {}

    def _table(self, name: str) -> _Table:
        assert self.folder is not None
        if name not in self._tables:
            self._tables[name] = _Table(self.folder / name)
        return self._tables[name]


class _Table:
    """A CSV file that grows line by line. A column that a later row adds is empty in the lines before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO = path.open("x", newline="", encoding="utf-8")
        self._columns: list[str] = []

    def write(self, row: Row) -> None:
        if new := [name for name in row if name not in self._columns]:
            self._add(new)
        csv.writer(self._file).writerow([csv_field(row.get(name, math.nan)) for name in self._columns])
        self._file.flush()

    def _add(self, new: list[str]) -> None:
        with self._path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))[1:]
        self._columns += new
        with replacing(self._path) as part, part.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([map(csv_field, self._columns), *(line + [""] * len(new) for line in lines)])
        self._file.close()
        self._file = self._path.open("a", newline="", encoding="utf-8")

    def close(self) -> None:
        self._file.close()
