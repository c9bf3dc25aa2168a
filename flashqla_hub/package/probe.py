"""Load one variant in a process of its own and tell, as JSON on standard output, what that did to the process.

python -m flashqla_hub.package.probe BUILD_VARIANT
"""

import json
import socket
import sys
from pathlib import Path


def probe(variant: Path) -> dict:
    """Load `variant` with `kernels`, all connections refused.

    Returns:
        {"module": its name, "missing": names of `__all__` that do not exist, "ops": the ops that loading registered}.
    """
    import torch
    from kernels import get_local_kernel

    before = set(torch._C._dispatch_get_all_op_names())
    socket.socket.connect = socket.socket.connect_ex = _refuse
    kernel = get_local_kernel(variant)
    return {
        "module": kernel.__name__,
        "missing": [name for name in kernel.__all__ if not hasattr(kernel, name)],
        "ops": sorted(set(torch._C._dispatch_get_all_op_names()) - before),
    }


def _refuse(self: socket.socket, address: object) -> None:
    raise ConnectionRefusedError(f"loading the kernel connects to {address}; a kernel must load without a network")


if __name__ == "__main__":
    try:
        print(json.dumps(probe(Path(sys.argv[1]))))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
