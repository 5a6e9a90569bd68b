"""The commands with their options: dataclasses, whose fields and docstrings are options and help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

# Examples per node and step that suit each built-in model.
BATCH_SIZES = {"gpt": 8, "mlp": 16, "cnn": 16}
WINDOWS = 256  # windows of text for validation


def _optional(metavar: str | None = None, default: str = "") -> Any:
    """Return the annotation of an optional argument, with the value and default that --help shows."""
    return arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


_Switch = Annotated[bool, _optional(default="off")]
_Names = Annotated[tuple[str, ...], _optional("NAME …", "seven; see `vsim strategies`")]
_Paths = Annotated[tuple[str, ...], Positional, arg(metavar="PATH …")]
_Network = Annotated[str | None, _optional("'BANDWIDTH, LATENCY, COLLECTIVE'", "that of the comparison")]
_Compute = Annotated[str | None, _optional("SECONDS", "that of the comparison")]


def _group(title: str) -> Any:
    """Return the annotation of options that stand below a title in --help; "": next to the command's own options."""
    return arg(name=title)


@dataclass
class Details:
    """how examples are dealt, and how the model is trained on them"""

    mnist_folder: Annotated[str | None, _optional("DIR")] = None
    """folder of the four files of --data mnist or fashion_mnist; default for fashion_mnist: Debian's folder"""
    partition: Annotated[str | None, _optional("KIND", "all nodes share them")] = None
    """how to deal the examples to the nodes, such as dirichlet:alpha=0.1"""
    batch_size: Annotated[int | None, _optional(default="by model")] = None
    """examples per node and step"""
    lr: Annotated[float | None, _optional(default="by model")] = None
    """inner learning rate of AdamW"""
    seed: int = 42
    """seed of everything random"""
    quiet: _Switch = False
    """show no progress"""


@dataclass
class Problem:
    """what is trained"""

    details: Annotated[Details, _group("data and model")]
    data: Literal["docs", "digits", "mnist1d", "mnist", "fashion_mnist"] = "docs"
    """docs: Python's manual, which is always available; mnist1d: generated strokes"""
    text: Annotated[str | None, _optional("FILE")] = None
    """characters of a text file, instead of --data"""
    model: Annotated[
        Literal["gpt", "mlp", "cnn"] | None, _optional(default="gpt for text, mlp for mnist1d, cnn for images")
    ] = None
    """model to train"""
    nodes: Annotated[int | None, _optional("K", "4")] = None
    """number of nodes"""
    steps: Annotated[int | None, _optional("T", "160; with --budget, what it pays for")] = None
    """optimizer steps"""

    @property
    def num_nodes(self) -> int:
        return 4 if self.nodes is None else self.nodes

    @property
    def is_text(self) -> bool:
        return self.text is not None or self.data == "docs"

    @property
    def kind(self) -> str:
        """The kind of model."""
        fitting = ["gpt"] if self.is_text else ["mlp"] if self.data == "mnist1d" else ["cnn", "mlp"]
        kind = self.model or fitting[0]
        if kind not in fitting:
            raise ValueError(f"--model {kind} does not fit the data; --model may be {' or '.join(fitting)} here")
        return kind

    @property
    def examples_per_step(self) -> int:
        return BATCH_SIZES[self.kind] if self.details.batch_size is None else self.details.batch_size

    @property
    def num_steps(self) -> int:
        return 160 if self.steps is None else self.steps

    def title(self, budget: Sequence[str]) -> str:
        """Return what is going to be trained, to show before it is."""
        data = Path(self.text).name if self.text is not None else self.data
        data += f" ({self.details.partition})" if self.details.partition else ""
        nodes = f"{self.num_nodes} nodes × batch {self.examples_per_step}"
        length = f"within {', '.join(budget)}" if budget else f"{self.num_steps} steps"
        return f"{self.kind.upper()} on {data}, {nodes}, {length}"


@dataclass
class Common(Problem):
    """what is trained, on which network, and where results go"""

    seeds: Annotated[tuple[int, ...], _optional("N …", "one, --seed")] = ()
    """train with each of these seeds: mean, deviation and bands"""
    network: Annotated[str | None, _optional("'BANDWIDTH, LATENCY, COLLECTIVE'")] = None
    """show hours on it: "200 Mbit/s, 50 ms"; collectives: 'ring', 'tree', 'halving-doubling' or 'server'; or a file of
    `vsim measure`, cluster.json"""
    compute: Annotated[str | None, _optional("SECONDS")] = None
    """time that a node computes in a step: 0.8, '800 ms', or cluster.json; asynchronous strategies need it"""
    out: Annotated[str, arg(metavar="DIR")] = "vsim-out"
    """folder for figures and data"""


@dataclass
class Training:
    """training and validation"""

    participation: Annotated[str | None, _optional("KIND", "all nodes")] = None
    """which nodes take part: sample:of=200, dropout:p=0.2, trace:file=events.csv, deadline:seconds=30"""
    val_size: Annotated[int | None, _optional("N", f"{WINDOWS} windows of text; up to 2048 images")] = None
    """validation examples"""
    val_interval: Annotated[int | None, _optional("STEPS", "up to ten times in --steps")] = None
    """steps between validations"""
    device: Annotated[str | None, _optional(default="the first available of cuda, mps and cpu")] = None
    """where to train"""
    executor: Literal["auto", "vmap", "loop"] = "auto"
    """how gradients are computed"""
    deterministic: _Switch = False
    """bitwise equal to separate processes; slower"""
    autocast: _Switch = False
    """compute in bfloat16"""
    compile: _Switch = False
    """compile losses, gradients and kernels, which takes ten seconds or more"""
    processes: Annotated[str | None, _optional("N", "1")] = None
    """number of processes that share the nodes, or 'auto'"""


@dataclass
class Price:
    """targets, budgets and prices"""

    target_loss: Annotated[float | None, _optional("LOSS")] = None
    """show the steps and bytes, and with --network the hours, that each run takes to this validation loss"""
    speeds: Annotated[str | None, _optional("V,V,…")] = None
    """speeds of the nodes, relative to --compute: 1,1,1,4"""
    dollars_per_hour: Annotated[float | None, _optional("DOLLARS", "no price")] = None
    """price of a node"""
    budget: Annotated[tuple[str, ...], _optional("KIND=AMOUNT …", "equal steps")] = ()
    """train each for the steps that this pays for: time=10h, cost=500 (dollars), wire=2GB (a node), examples=1e6"""
    at: Annotated[float | None, _optional("N", "the model that is trained")] = None
    """parameters of the model that --budget pays for; bytes and hours are then those of this model"""


@dataclass
class Output:
    """logs and checkpoints"""

    run_name: Annotated[str | None, _optional("NAME")] = None
    """log every step to LOG_DIR/NAME/<strategy>/*.csv"""
    tensorboard: _Switch = False
    """write TensorBoard events to LOG_DIR, too"""
    wandb_project: Annotated[str | None, _optional("NAME")] = None
    """log to this project of Weights & Biases"""
    log_dir: Annotated[str | None, _optional("LOG_DIR", "logs")] = None
    """folder of all logs"""
    save_dir: Annotated[str | None, _optional("DIR")] = None
    """folder to save all runs in, at the end and when interrupted (Ctrl-C)"""
    checkpoint_interval: Annotated[int | None, _optional("STEPS")] = None
    """steps between checkpoints; default: only at the end"""
    resume: _Switch = False
    """continue the runs in --save-dir"""


@dataclass
class Choice:
    """presets, tuned arguments, and runs that were trained before"""

    preset: Annotated[tuple[str, ...], _optional("NAME …", "none")] = ()
    """strategies with the hyperparameters of their papers; `vsim strategies` lists them"""
    tune: Annotated[tuple[str, ...], _optional("NAME=V,V,… …", "none")] = ()
    """values to try for arguments; each strategy is compared with its own best, found with other seeds"""
    extend: Annotated[str | None, _optional("FILE", "train all")] = None
    """a comparison.json of the same problem: train only the strategies and seeds that it lacks"""


@dataclass
class Compare:
    """Train the same model with several strategies, and compare loss and bytes."""

    problem: Annotated[Common, _group("")]
    training: Annotated[Training, _group("training")]
    priced: Annotated[Price, _group("price")]
    output: Annotated[Output, _group("log and checkpoint")]
    choice: Annotated[Choice, _group("strategy")]
    strategies: _Names = ()
    """strategies to compare; `vsim strategies` lists them; with --preset only these are added to the preset"""


@dataclass
class Sweep:
    """Train with every combination of some settings of a strategy, and find the best."""

    problem: Annotated[Common, _group("")]
    training: Annotated[Training, _group("training")]
    priced: Annotated[Price, _group("price")]
    output: Annotated[Output, _group("log and checkpoint")]
    settings: Annotated[tuple[str, ...], arg(name="set", metavar="NAME=V,V,… …")]
    """arguments of the strategy, num_nodes or batch_size, with the values to try"""
    strategy: str = "diloco"
    """strategy to train"""
    halving: Annotated[int | None, _optional("F")] = None
    """at each of several rungs, let only the best 1/F of the settings continue"""
    extend: Annotated[str | None, _optional("FILE", "train all")] = None
    """a sweep.json of the same problem: train only the settings and seeds that it lacks"""


@dataclass
class Show:
    """Print the tables of saved runs, also of runs that are still training."""

    paths: _Paths
    """comparison.json or sweep.json, or their folders; a --save-dir; or a folder of CSV logs, LOG_DIR/NAME"""
    target_loss: Annotated[float | None, _optional("LOSS")] = None
    """show what each run took to this validation loss"""
    network: _Network = None
    """show hours on it: "200 Mbit/s, 50 ms", or cluster.json"""
    compute: _Compute = None
    """time that a node computes in a step: 0.8, '800 ms', or cluster.json"""


@dataclass
class Report:
    """Write saved comparisons as a page with sliders for network and compute."""

    paths: _Paths
    """comparison.json or sweep.json, or their folders; or a --save-dir, also of runs that still train"""
    out: Annotated[str, arg(metavar="FILE")] = "report.html"
    """the page, one HTML file"""
    network: _Network = None
    """initial setting of the sliders, "200 Mbit/s, 50 ms", or cluster.json"""
    compute: _Compute = None
    """time that a node computes in a step: 0.8, '800 ms', or cluster.json"""
    title: Annotated[str | None, _optional("TEXT", "what was trained; of several files, their names")] = None
    """title of the page"""


@dataclass
class Watch:
    """Show a page of runs in this machine's browser as they train; Ctrl-C ends it."""

    paths: _Paths
    """a --save-dir or a folder of CSV logs, LOG_DIR/NAME; or comparison.json, or its folder"""
    port: int = 0
    """port to listen on; 0: any free port"""
    every: Annotated[float, arg(metavar="SECONDS")] = 5.0
    """seconds between checks of the files"""
    network: _Network = None
    """initial setting of the sliders, "200 Mbit/s, 50 ms", or cluster.json"""
    compute: _Compute = None
    """time that a node computes in a step: 0.8, '800 ms', or cluster.json"""
    only: Annotated[tuple[str, ...], arg(metavar="WORDS …", help_behavior_hint="(default: all)")] = ()
    """show runs with these words in their names, such as diloco, 'H=10 lr=0.001' or '*avg'"""


@dataclass
class Time:
    """Compute how long runs would take on a network, without training."""

    compute: Annotated[str, arg(metavar="SECONDS")]
    """time that a node computes in a step: 0.8, '800 ms', or cluster.json"""
    strategies: _Names = ()
    """strategies to price"""
    parameters: Annotated[float, arg(metavar="N")] = 1e9
    """number of parameters of the model"""
    bytes_per_parameter: Annotated[int, arg(metavar="B")] = 4
    """1, 2, 4 or 8"""
    nodes: Annotated[int, arg(metavar="K")] = 4
    """number of nodes"""
    steps: int = 1000
    """optimizer steps"""
    network: Annotated[str, arg(metavar="'BANDWIDTH, LATENCY'")] = "200 Mbit/s, 50 ms"
    """bandwidth, latency, algorithm of collectives, such as '1 Gbit/s, 5 ms, tree'; a ring if none is named; or
    cluster.json"""
    layers: Annotated[int | None, _optional("L", "no overlap")] = None
    """overlap messages with the backward pass, layer by layer"""


@dataclass
class Verify:
    """Compare the simulator with one process per node, bit by bit, after every step."""

    problem: Annotated[Problem, _group("")] = field(default_factory=lambda: Problem(Details(), steps=50))
    strategy: str = "diloco:H=10"
    """strategy to verify"""
    threads: Annotated[int | None, _optional(default="the machine's / K")] = None
    """CPU threads of every process"""
    processes: Annotated[int | None, _optional("N", "none")] = None
    """compare also with this number of processes, which hold several nodes each"""


@dataclass
class Measure:
    """Measure the links of a cluster and the seconds of your model's steps; write them to a file that --network and
    --compute take."""

    nodes: Annotated[int | None, _optional("K", "the ranks that torchrun started")] = None
    """number of processes on this machine; without it, under torchrun: one process per machine or GPU"""
    step: Annotated[str | None, _optional("FILE.py:FUNCTION", "the links only")] = None
    """function that returns your model and a function that trains it by one step, whose seconds are measured"""
    check: _Switch = False
    """run AllReduce and DiLoCo, H = 10, and print their predicted and measured seconds"""
    seconds: Annotated[float, arg(metavar="SECONDS")] = 30.0
    """about how long each run of --check takes"""
    out: Annotated[str, arg(metavar="FILE")] = "cluster.json"
    """the file"""


@dataclass
class Atlas:
    """Train all strategies on the tasks of the atlas, with equal tuning and budgets; or your own strategy, beside the
    stored results of all others."""

    tasks: Annotated[tuple[str, ...], _optional("NAME …", "all")] = ()
    """characters, digits, strokes, synthetic or quadratics"""
    strategies: Annotated[tuple[str, ...], _optional("NAME …", "all; with --mine, none")] = ()
    """strategies of the atlas to train again, such as DiLoCo"""
    mine: Annotated[str | None, _optional("MODULE:CLASS")] = None
    """a strategy of your own, with a class attribute `space`: argument → range"""
    deterministic: _Switch = False
    """compute node by node, for equal digests on one machine; slower"""
    out: Annotated[str, arg(metavar="DIR")] = "vsim-atlas"
    """folder for the entries, a file for each task and strategy; entries that are there are not trained again"""
    page: Annotated[str | None, _optional("FILE.md")] = None
    """write tables and figure into this page, between its marks"""
    quiet: _Switch = False
    """show no progress"""


@dataclass
class Strategies:
    """List the strategies and presets, with their arguments."""


Command = Compare | Sweep | Show | Report | Watch | Time | Verify | Measure | Atlas | Strategies
