"""Private functions of torch stand in one module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [p for folder in ("vsim", "kernels/vsim_kernels") for p in sorted((ROOT / folder).rglob("*.py"))]
# torch._C, torch.nn.modules._x, F._x, `from torch._functorch import`, and attributes of tensors, modules, optimizers.
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._(?!foreach_|_)\w+|\bF\._\w+|from torch[\w.]* import .*\b_\w+"
    r"|\._(version|cdata|parameters|buffers|modules|\w+_hooks|opt_called|schema|op)\b|\bfunctorch\.\w"
)
ALLOWED = re.compile(r"from torch\.utils\._pytree import|torch\.ops\.\w+\._\w+|\baten\._\w+")


@pytest.mark.parametrize("line", ["torch._C._len()", "from torch.x import _y", "from torch._C import z", "m._buffers"])
def test_what_is_private_is_seen(line: str) -> None:
    assert PRIVATE.search(ALLOWED.sub("", line))


def test_private_functions_of_torch_stand_in_one_module() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        if path.name != "private_torch.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(ALLOWED.sub("", line))
    ]
    assert len(FILES) > 80 and not found, "\n".join(found)
