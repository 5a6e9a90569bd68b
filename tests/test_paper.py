"""The paper about vsim: its numbers are those of the documentation, and its references are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).parents[1] / "docs"
PAPER = (DOCS / "paper" / "paper.md").read_text(encoding="utf-8")
BIB = (DOCS / "paper" / "paper.bib").read_text(encoding="utf-8")
# What the paper says → the page that says it, and how.
CLAIMS = {
    "a step of 1,024 small networks takes 4.9 ms": ("gpus", "| | 1,024 | | | 4.9 |"),
    "1.4 times as long as a step of 16": ("gpus", "1,024 MLPs take only 1.4 times as long as 16"),
    "results of 15 sources: 252 of 324 published or derived numbers agree": (
        "reproduced",
        "252 of 324 published or derived numbers from 15 sources agree",
    ),
    "Of the 72 others, 68 are in two tables of simulated bandwidths": (
        "reproduced",
        "68 of the 72 others are in two tables of simulated bandwidths",
    ),
    "All 29 numbers on scaling laws for DiLoCo": ("reproduced", "(https://arxiv.org/abs/2503.09799) | 29 of 29 |"),
    "the 17 rows of steps of gossip and RelaySGD": ("reproduced", "| 17 of 17 |"),
    "between 2 and 4 nodes at 20, 50 and 200 Mbit/s": ("time", "on 2 and 4 nodes at 20, 50 and 200 Mbit/s"),
    "differ from the ledger by at most 0.4 %": ("time", "differed by at most 0.4 % from the bytes in the ledger"),
    "predicted seconds are within 8 %": ("time", "the predicted seconds were within 8 % of the measured ones"),
    "The predicted times of 64 runs": ("measured_clusters", "the predicted times of 64 runs of DiLoCo and local SGD"),
    "4 % on average at 1 Gbit/s, 8 % at 5 Gbit/s, 10 % at 200 Mbit/s and 20 % at 50 Mbit/s": (
        "measured_clusters",
        "4 % on average at 1 Gbit/s, 8 % at 5 Gbit/s, 10 % at 200 Mbit/s and 20 % at 50 Mbit/s",
    ),
    "too short by 25 to 45 %": ("measured_clusters", "too short by 25 to 45 %"),
    "contain the true difference in 94 to 96 % of cases": (
        "significance",
        "contains the true difference in 94 to 96 %",
    ),
    "of twelve kinds whose truth is known": ("ladder", "ladders of twelve kinds whose truth is known"),
    "at least 93 % of the decided rankings are right": ("ladder", "At least 93 % of the decided rankings were right"),
    "41 strategies at equal bytes": ("../README", "41 strategies, tuned equally, at equal bytes"),
    "a strategy gets 12 trials": ("atlas", "Every strategy gets 12 trials"),
    "of 36 rankings of two strategies in the published ladder, only 27 held": (
        "ladder",
        "only 27 of 36 rankings of two strategies held at a larger size",
    ),
    "1.3 billion parameters": ("ladder", "not decided for 1.3B parameters"),
    "on more than four machines, on links with latency, or on links faster than 5 Gbit/s": (
        "accuracy",
        "more than four machines, on links with latency, or on links faster than 5 Gbit/s",
    ),
}


def joined(text: str) -> str:
    return " ".join(text.replace("**", "").split())


@pytest.mark.parametrize("said", CLAIMS)
def test_its_numbers_are_those_of_the_pages(said: str) -> None:
    page, there = CLAIMS[said]
    assert joined(said) in joined(PAPER)
    assert joined(there) in joined((DOCS / f"{page}.md").read_text(encoding="utf-8"))


def test_every_number_is_among_them() -> None:
    body = re.sub(r"@\w+|\$.*?\$|H200|float32", "", PAPER.split("---\n")[2])
    left = joined(body)
    for said in CLAIMS:
        left = left.replace(joined(said), "")
    assert set(re.findall(r"\d[\d.,]*\d|\d", left)) <= {"95"}  # of an interval


def test_it_counts_the_strategies_and_tasks_of_the_atlas() -> None:
    entries = [*(DOCS.parent / "vsim" / "atlas" / "results").glob("*/*.json")]
    assert len({path.name for path in entries}) == 41 and len({path.parent for path in entries}) == 5


def test_it_has_the_form_of_the_journal_and_its_references_exist() -> None:
    head = yaml.safe_load(PAPER.split("---\n")[1])
    assert head["authors"] == [{"name": "The vsim authors", "affiliation": 1}] and head["bibliography"] == "paper.bib"
    assert {
        "# Summary",
        "# Statement of need",
        "# What is new",
        "# How it was checked",
        "# Limits",
        "# References",
    } <= {*PAPER.splitlines()}
    entries = dict(re.findall(r"^@\w+\{(\w+),\n(.*?)^\}$", BIB, re.MULTILINE | re.DOTALL))
    assert {*re.findall(r"@(\w+)", PAPER.split("---\n")[2])} == entries.keys()
    for entry in entries.values():
        assert all(f"  {field} = {{" in entry for field in ("author", "title", "year"))
        assert re.search(r"  (doi = \{10\.|url = \{https://|eprint = \{\d{4}\.\d{5}\})", entry)
        for number in re.findall(r"eprint = \{(.*)\}", entry):
            assert f"arXiv.{number}" in entry or "booktitle" in entry
    assert len(PAPER.split()) < 1500  # four pages
