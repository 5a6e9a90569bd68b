"""`vsim compare`, `sweep`, `train`, `time`, `verify`, `doctor` and `bench`: the main jobs from the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vsim.cli.parser import parser
from vsim.cli.problem import parse_strategy
from vsim.process import NodeFailure

__all__ = ["main", "parse_strategy"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError, NodeFailure) as error:
        print(f"vsim {arguments.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"vsim {arguments.command}: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130
