"""`python -m vsim`: the command line."""

import sys

from vsim.cli import main

sys.exit(main())
