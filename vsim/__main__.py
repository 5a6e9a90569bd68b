"""`python -m vsim`: the command line."""

import sys

from vsim_cli import main

sys.exit(main())
