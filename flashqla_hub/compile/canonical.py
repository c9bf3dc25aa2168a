"""A prim_func in a form from which TileLang always generates the same source.

TileLang places shared buffers of equal size in the order of their names, and buffers of equal name in the order of their
addresses in memory, which changes from run to run. Buffers that are made outside of the prim_func's own text, in helper
classes for instance, all have the empty name. So each gets a name of its own before the lowering.
"""

import json
from hashlib import sha256
from itertools import count

from tilelang import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder

PLACES = ("ir.SourceName", "ir.Span")  # which line a node comes from: of no meaning


def name_buffers(prim_func: tirx.PrimFunc) -> None:
    """Gives every buffer that the function allocates a name of its own, in place: NAME_1, NAME_2, ... or buffer_1, ..."""
    taken = {buffer.name for buffer in prim_func.buffer_map.values()} | {""}
    unnamed = []
    for buffer in _allocated_buffers(prim_func):
        if buffer.name in taken:
            unnamed.append(buffer)
        taken.add(buffer.name)
    for buffer in unnamed:
        candidates = (f"{buffer.name or 'buffer'}_{number}" for number in count(1))
        name = next(candidate for candidate in candidates if candidate not in taken)
        taken.add(name)
        IRBuilder.name(name, buffer)


def digest_of(prim_func: tirx.PrimFunc) -> str:
    """sha256 over the function's full structure; where its source stands (file, line) does not count."""
    graph = json.loads(tvm.ir.save_json(prim_func))
    for node in graph["nodes"]:
        if node["type"] in PLACES:
            node["data"] = None
    return sha256(json.dumps(graph, sort_keys=True).encode()).hexdigest()


def _allocated_buffers(prim_func: tirx.PrimFunc) -> list[tirx.Buffer]:
    """In the order in which the function's text allocates them."""
    found: list[tirx.Buffer] = []

    def visit(node: object) -> None:
        if isinstance(node, tirx.SBlock):
            found.extend(node.alloc_buffers)

    tirx.stmt_functor.post_order_visit(prim_func.body, visit)
    return found
