"""Try vsim on a device, and write a Markdown page to send: tests, milliseconds a step, memory of a node.

    python tests/on_real_device.py cuda              (or mps; at most nine minutes)
    python tests/on_real_device.py cpu --quick       (a minute: CI tries the script itself)

Each part runs in a process of its own. A part that fails, hangs or takes the device down with it is reported on the
page, the others still run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
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

TESTS = Path(__file__).resolve().parent
_LEAST_SECONDS, _TAIL_LINES = 5.0, 60
_VERDICT = re.compile(r"^\S+?::(?P<test>.+?) (?P<verdict>PASSED|FAILED|ERROR)\b", re.M)


@dataclass
class Part:
    """A command, and what came of it.

    Attributes:
        limit: the longest that it may take, in seconds.
        outcome: "ok", or what went wrong. seconds: how long it took. output: all that it printed.
    """

    name: str
    command: Sequence[str]
    limit: float
    outcome: str = "not run"
    seconds: float = 0.0
    output: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, limit: float) -> None:
        """Run the command, with all processes that it starts, for at most `limit` seconds."""
        begun, status = time.monotonic(), None
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self.environment}
            process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=TESTS, start_new_session=True
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                pass
            finally:
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

    def section(self) -> list[str]:
        """Return what the page says of it: the last output, which has a benchmark's tables; of tests, which failed."""
        verdicts = [*_VERDICT.finditer(self.output)] if self.name == "tests" else []
        text = ["", f"## {self.name}: {self.outcome}", ""]
        if verdicts:
            failed = [m["test"] for m in verdicts if m["verdict"] != "PASSED"]
            text += [f"{len(verdicts) - len(failed)} of {len(verdicts)} tests that ended have passed."]
            text += [f"- failed: `{test}`" for test in failed] + [""]
        if not verdicts or self.outcome != "ok":
            lines = [line.replace("```", "'''") for line in self.output.splitlines()[-_TAIL_LINES:]]
            text += [f"`{shlex.join(self.command)}`", "", "```text", *lines, "```"]
        return text


def parts_for(device: str, quick: bool) -> list[Part]:
    """Return the tests, the memory of a node, and the bench, which has the same candidates wherever they exist."""
    environment = {"VSIM_DEVICE": device, **({"VSIM_QUICK": "1"} if quick else {})}
    pytest = [*("-m", "pytest", "-n", "0", "-v", "--tb=short", "-rfE", "-W", "default"), str(TESTS / "any_device.py")]
    parts = [Part("tests", [sys.executable, *pytest], 240, environment=environment)]

    def bench(name: str, script: str, arguments: str, limit: float) -> None:
        command = [sys.executable, str(TESTS / "benchmarks" / f"bench_{script}.py"), "--device", device]
        parts.append(Part(name, [*command, *shlex.split(arguments)], limit))

    exact = "" if device.startswith("mps") else "exact"  # deterministic=True is refused there
    if quick:
        bench("memory", "memory", "--models mlp --nodes 4", 60)
        bench("steps", "step", "--models mlp --nodes 4 --rounds 1 --steps 3 --only separate vmap exact floor", 60)
        return parts
    bench("memory", "memory", "--models mlp cnn gpt --nodes 16 64", 90)
    all_models, few = "--models mlp cnn gpt --nodes 16 --rounds 2 --steps 20", "--rounds 2 --steps 20"
    bench("steps", "step", f"{all_models} --only separate loop vmap {exact} floor", 90)
    bench("bfloat16", "step", f"{all_models} --autocast --only separate vmap", 60)
    bench("many MLPs", "step", f"--models mlp --nodes 64 256 1024 {few} --only vmap {exact} floor", 60)
    bench("compiled", "step", f"{all_models} --compile --only vmap compiled", 150)
    bench("many CNNs and GPTs", "step", f"--models cnn gpt --nodes 4 64 {few} --only vmap {exact} floor", 60)
    bench("a larger GPT", "step", f"--models gpt-large --nodes 4 16 {few} --only loop vmap", 60)
    bench("many compiled MLPs", "step", f"--models mlp --nodes 1024 {few} --compile --only vmap compiled", 60)
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


def page(facts: dict[str, str], parts: Sequence[Part], command: str) -> str:
    """Return the page: facts, outcomes, and a section of each part."""
    device = facts.get("GPU", facts["device"]).partition(",")[0]
    text = [f"# vsim on {device}", "", f"Written by `{command}`.", ""]
    text += [f"- {name}: {value}" for name, value in facts.items()]
    text += ["", "| part | outcome | seconds |", "| --- | --- | --- |"]
    text += [f"| {part.name} | {part.outcome} | {part.seconds:.0f} |" for part in parts]
    return "\n".join([*text, *(line for part in parts if part.output for line in part.section())]) + "\n"


def run_parts(parts: Sequence[Part], minutes: float, write: Any) -> bool:
    """Run the parts within so many minutes, write the page after each, and return whether all were ok."""
    begun = time.monotonic()
    for number, part in enumerate(parts, 1):
        left = 60 * minutes - (time.monotonic() - begun)
        if left < _LEAST_SECONDS:
            part.outcome = "no time left"
        else:
            print(f"[{time.monotonic() - begun:4.0f} s] {number} of {len(parts)}: {part.name}", flush=True)
            part.run(min(part.limit, left))
        print(f"[{time.monotonic() - begun:4.0f} s]     {part.outcome}", flush=True)
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
    facts, parts = about(device), parts_for(str(device), options.quick)
    out = options.out or Path(f"vsim-on-{device.type}-{facts['date'][:10]}.md")
    command = f"python tests/on_real_device.py {options.device}{' --quick' if options.quick else ''}"
    ok = run_parts(parts, options.minutes, lambda: out.write_text(page(facts, parts, command), encoding="utf-8"))
    print(f"{out}: please send this page with an issue, whether all went well or not")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
