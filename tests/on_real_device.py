"""Try vsim on a device, and write a Markdown page to send: tests, milliseconds a step, memory of a node.

    python tests/on_real_device.py cuda              (or mps; at most nine minutes)
    python tests/on_real_device.py cpu --quick       (a minute: CI tries the script itself)

Each part runs in a process of its own. A part that fails, hangs or takes the device down with it is reported on the
page, the others still run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vsim.engine.machine import pick_device
from vsim.version import __version__

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))
from bench_memory import table as memory_table

TESTS = Path(__file__).resolve().parent
BENCHMARKS = TESTS / "benchmarks"
_HEARTBEAT_SECONDS, _LEAST_SECONDS, _TAIL_LINES = 20.0, 5.0, 60
_VERDICT = re.compile(r"^\S+?::(?P<test>.+?) (?P<verdict>PASSED|FAILED|ERROR)\b", re.M)
_CANDIDATES = {
    "separate": "K modules in a loop",
    "loop": "`executor='loop'`",
    "vmap": "`'vmap'`",
    "exact": "`deterministic=True`",
    "compiled": "`compile=True`",
    "floor": "kernels alone",
}


@dataclass
class Part:
    """A command, and what came of it.

    Attributes:
        limit: the longest that it may take, in seconds.
        result: a JSON file that the command writes, if it does.
        outcome: "ok", or what went wrong. seconds: how long it took. output: all that it printed.
    """

    name: str
    command: Sequence[str]
    limit: float
    result: Path | None = None
    outcome: str = "not run"
    seconds: float = 0.0
    output: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the result, as many as were written."""
        if self.result is None or not self.result.is_file():
            return []
        found = json.loads(self.result.read_text(encoding="utf-8"))
        return list(found["lines"] if isinstance(found, dict) else found)

    def run(self, limit: float, say: Any) -> None:
        """Run the command, with all processes that it starts, for at most `limit` seconds."""
        begun = time.monotonic()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self.environment}
            process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=TESTS, start_new_session=True
            )
            try:
                while (left := limit - (time.monotonic() - begun)) > 0:
                    try:
                        process.wait(min(left, _HEARTBEAT_SECONDS))
                        break
                    except subprocess.TimeoutExpired:
                        say(f"    still in {self.name}")
            finally:
                status = process.poll()
                if status is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                self.seconds = time.monotonic() - begun
                log.seek(0)
                self.output = log.read()
        if status is None:
            self.outcome = f"stopped after {self.seconds:.0f} s"
        elif status < 0:
            self.outcome = f"killed by {signal.Signals(-status).name}"
        else:
            self.outcome = "ok" if status == 0 else f"failed (exit status {status})"


def parts_for(device: str, quick: bool, folder: Path) -> list[Part]:
    """Return the tests, the memory of a node, and the bench, which has the same candidates wherever they exist."""
    kind = device.partition(":")[0]
    environment = {"VSIM_DEVICE": device, **({"VSIM_QUICK": "1"} if quick else {})}
    pytest = [*("-m", "pytest", "-n", "0", "-v", "--tb=short", "-rfE", "-W", "default"), str(TESTS / "any_device.py")]
    parts = [Part("tests", [sys.executable, *pytest], 240, environment=environment)]

    def bench(name: str, script: str, arguments: str, limit: float) -> None:
        result = folder / f"{len(parts)}.json"
        command = [sys.executable, str(BENCHMARKS / script), "--device", device, "--out", str(result)]
        parts.append(Part(name, [*command, *shlex.split(arguments)], limit, result))

    exact = "" if kind == "mps" else "exact"  # deterministic=True is refused there
    if quick:
        bench("memory", "bench_memory.py", "--models mlp --nodes 4", 60)
        only = "separate vmap exact floor"
        bench("steps", "bench_step.py", f"--models mlp --nodes 4 --rounds 1 --steps 3 --only {only}", 60)
        return parts
    bench("memory", "bench_memory.py", "--models mlp cnn gpt --nodes 16 64", 90)
    few = "--rounds 2 --steps 20"
    bench(
        "steps", "bench_step.py", f"--models mlp cnn gpt --nodes 16 {few} --only separate loop vmap {exact} floor", 90
    )
    bench("bfloat16", "bench_step.py", f"--models mlp cnn gpt --nodes 16 {few} --autocast --only separate vmap", 60)
    bench("many MLPs", "bench_step.py", f"--models mlp --nodes 64 256 1024 {few} --only vmap {exact} floor", 60)
    bench("compiled", "bench_step.py", f"--models mlp cnn gpt --nodes 16 {few} --compile --only vmap compiled", 150)
    bench("many CNNs and GPTs", "bench_step.py", f"--models cnn gpt --nodes 4 64 {few} --only vmap {exact} floor", 60)
    bench("a larger GPT", "bench_step.py", f"--models gpt-large --nodes 4 16 {few} --only loop vmap", 60)
    bench("many compiled MLPs", "bench_step.py", f"--models mlp --nodes 1024 {few} --compile --only vmap compiled", 60)
    return parts


def about(device: torch.device) -> dict[str, str]:
    """Return what the numbers depend on: the device, versions, the machine, the date."""
    found = {"date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC", "device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory, capability = properties.total_memory / 2**30, f"{properties.major}.{properties.minor}"
        found["GPU"] = f"{properties.name}, {memory:.0f} GiB, capability {capability}; {torch.cuda.device_count()} here"
        found["CUDA, cuDNN"] = f"{torch.version.cuda or torch.version.hip}, {torch.backends.cudnn.version()}"
    elif device.type == "mps":
        found["macOS"] = f"{platform.mac_ver()[0]}, {torch.mps.recommended_max_memory() / 2**30:.0f} GiB for MPS"
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=TESTS, capture_output=True, text=True)
    found["vsim"] = " ".join(filter(None, (__version__, commit.stdout.strip())))
    found["versions"] = f"torch {torch.__version__}, Python {platform.python_version()}, NumPy {np.__version__}"
    processor = platform.processor() or platform.machine()
    found["machine"] = f"{platform.platform()}, {processor}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return found


def step_table(lines: Sequence[dict[str, Any]]) -> str:
    """Return milliseconds a step as a Markdown table, a line of which may come from several parts."""
    rows: dict[tuple[str, int, bool], dict[str, float]] = {}
    for line in lines:
        own = rows.setdefault((line["model"], line["num_nodes"], line["autocast"]), {})
        for label, seconds in line["seconds"].items():
            own.setdefault(label, seconds)
    labels = [label for label in _CANDIDATES if any(label in own for own in rows.values())]
    text = [["model", "K", "dtype", *(_CANDIDATES[label] for label in labels)]]
    text.append(["---"] * len(text[0]))
    for (model, nodes, autocast), own in sorted(rows.items()):
        cells = [f"{1e3 * own[label]:.3g}" if label in own else "" for label in labels]
        text.append([model, f"{nodes:,}", "bfloat16" if autocast else "float32", *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in text)


def page(facts: dict[str, str], parts: Sequence[Part], command: str) -> str:
    """Return the page: facts, outcomes, tables, and the last output of all parts that failed."""
    device = facts.get("GPU", facts["device"]).partition(",")[0]
    text = [f"# vsim on {device}", "", f"Written by `{command}`.", ""]
    text += [f"- {name}: {value}" for name, value in facts.items()]
    text += ["", "| part | outcome | seconds |", "| --- | --- | --- |"]
    text += [f"| {part.name} | {part.outcome} | {part.seconds:.0f} |" for part in parts]
    verdicts = [m for part in parts if part.name == "tests" for m in _VERDICT.finditer(part.output)]
    failed = [m["test"] for m in verdicts if m["verdict"] != "PASSED"]
    text += ["", "## Tests", "", f"{len(verdicts) - len(failed)} of {len(verdicts)} tests that ended have passed."]
    text += [f"- failed: `{test}`" for test in failed]
    steps = [line for part in parts for line in part.lines() if "seconds" in line]
    memory = [line for part in parts for line in part.lines() if "added_bytes" in line]
    if steps:
        what = "Batch 16 a node, AdamW, nodes that train alone (`bench_step.py`). An empty cell was not measured."
        text += ["", "## Milliseconds a step", "", what, "", step_table(steps)]
    if memory:
        text += ["", "## Memory", "", memory_table(memory, "github")]
    for part in parts:
        if part.outcome != "ok":
            text += [
                "",
                f"## Output of {part.name}: {part.outcome}",
                "",
                f"`{shlex.join(part.command)}`",
                "",
                "```text",
            ]
            text += [line.replace("```", "'''") for line in part.output.splitlines()[-_TAIL_LINES:]] + ["```"]
    return "\n".join(text) + "\n"


def run_parts(parts: Sequence[Part], minutes: float, write: Any) -> bool:
    """Run the parts within so many minutes, write the page after each, and return whether all were ok."""
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:4.0f} s] {text}", flush=True)

    for number, part in enumerate(parts, 1):
        left = 60 * minutes - (time.monotonic() - begun)
        if left < _LEAST_SECONDS:
            part.outcome = "no time left"
        else:
            say(f"{number} of {len(parts)}: {part.name}")
            part.run(min(part.limit, left), say)
        say(f"    {part.outcome}")
        write()
    return all(part.outcome == "ok" for part in parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", help="cuda, cuda:1, mps or cpu")
    parser.add_argument("--quick", action="store_true", help="a few tests and numbers, to try this script")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after that many")
    parser.add_argument("--out", type=Path, help="the page (default: vsim-on-DEVICE-DATE.md)")
    options = parser.parse_args(argv)
    device = pick_device(options.device)
    facts = about(device)
    out = options.out or Path(f"vsim-on-{device.type}-{facts['date'][:10]}.md")
    command = f"python tests/on_real_device.py {options.device}{' --quick' if options.quick else ''}"
    with tempfile.TemporaryDirectory(prefix="vsim-device-") as folder:
        parts = parts_for(str(device), options.quick, Path(folder))
        ok = run_parts(parts, options.minutes, lambda: out.write_text(page(facts, parts, command), encoding="utf-8"))
    print(f"{out}: please send this page with an issue, whether all went well or not")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
