"""The process of one node, started by `vsim.distributed.launch` as `python -m vsim.distributed.child FD`."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Take the setup from standard input, train, and answer through the inherited pipe."""
    answer = Connection(int(sys.argv[1]), readable=False)
    setup = pickle.load(sys.stdin.buffer)
    # Standard input closes when the parent is gone, however it went.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _say(answer, "done", _train(setup, answer))
    except BaseException as error:
        _say(answer, "failed", (_pickled(error), traceback.format_exc()))
        answer.close()
        os._exit(1)


def _train(setup: dict[str, Any], answer: Connection) -> Any:
    import cloudpickle
    import torch
    import torch.distributed as dist

    from vsim.distributed.node import run_node
    from vsim.loop import StepReport

    def send(report: StepReport) -> None:
        if setup["rank"] == 0:
            _say(answer, "report", report)

    torch.set_num_threads(setup["threads"])
    device = torch.device(setup["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{setup['rendezvous']}",
        rank=setup["rank"],
        world_size=setup["num_nodes"],
        timeout=timedelta(seconds=setup["timeout_seconds"]),
    )
    try:
        return run_node(cloudpickle.loads(setup["config"]), device, send)
    finally:
        dist.destroy_process_group()


def _say(answer: Connection, kind: str, content: Any) -> None:
    # As bytes: multiprocessing's own pickler would pass tensors as handles, which die with this process.
    answer.send_bytes(pickle.dumps((kind, content)))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _pickled(error: BaseException) -> bytes | None:
    import cloudpickle

    try:
        return cloudpickle.dumps(error)
    except Exception:
        return None


if __name__ == "__main__":
    main()
