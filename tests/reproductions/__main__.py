"""Measure results again, save them, and write their pages: `python -m tests.reproductions [NAME …] [--quick]`.

What follows `--` is given to the script, which must have a parameter `options`.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import takewhile

from .result import LONG_PAGE, PAGE, Result, as_json, long_page, page, results, scripts

known = scripts()
parser = argparse.ArgumentParser(prog="python -m tests.reproductions", description=__doc__)
parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default: all")
parser.add_argument("--quick", action="store_true", help="run short forms, and save nothing")
parser.add_argument("--page", action="store_true", help="measure nothing; renew titles and notes from the scripts")
own = [*takewhile(lambda word: word != "--", sys.argv[1:])]
options = sys.argv[len(own) + 2 :]
arguments = parser.parse_args(own)
if unknown := set(arguments.names) - known.keys():
    parser.error(f"no script is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")

if arguments.page:
    for result in results():
        result.table = as_json(known[result.name].TABLE)
        result.save()
else:
    for name in arguments.names or known:
        script, begun = known[name], time.perf_counter()
        try:
            found = script.measure(arguments.quick, **({"options": options} if options else {}))
        except FileNotFoundError as error:  # data that the machine does not have
            print(f"{name}: {error}")
            continue
        result = Result.of(script, found, time.perf_counter() - begun, options)
        print(f"{result.table['title']}: {result.seconds:.1f} s")
        for row, expected, measured, agree in result.lines():
            print(f"  {row}: {expected}, measured {measured}{'' if agree else ' (disagrees)'}")
        if not arguments.quick:
            result.save()
if not arguments.quick:
    PAGE.write_text(page(), encoding="utf-8")
    LONG_PAGE.write_text(long_page(), encoding="utf-8")
