"""Small TileLang kernels that use every feature of the launchers, so that the launchers are tested apart from the product."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ROWS, COLUMNS = 64, 128


@dataclass(frozen=True)
class StandIn:
    """A kernel spec as flashqla_hub.compile wants it."""

    name: str
    builder: Callable[[], Any]
    minimum_instructions: dict[str, int]
    pass_configs: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        return self.builder()


def build_scale_rows() -> Any:
    """y[b, s, h, :] = factor * x[b, s, h, :] for the first s < lengths[b]: run-time strides, a scalar of each dtype, PDL."""
    import tilelang.language as T

    B, S, H = (T.dynamic(name) for name in ("B", "S", "H"))
    x_b, x_s, x_h = (T.dynamic(name, "int64") for name in ("x_b", "x_s", "x_h"))

    @T.prim_func
    def scale_rows(
        x: T.StridedTensor((B, S, H, COLUMNS), (x_b, x_s, x_h, 1), "bfloat16"),
        lengths: T.Tensor((B + 1,), "int32"),
        y: T.Tensor((B, S, H, COLUMNS), "bfloat16"),
        factor: T.float32,
        first: T.int32,
    ):
        with T.Kernel(T.ceildiv(S, ROWS), B * H, threads=128) as (i_tile, i_bh):
            x_smem = T.alloc_shared((ROWS, COLUMNS), "bfloat16")
            x_local = T.alloc_fragment((ROWS, COLUMNS), "bfloat16")
            x_ready = T.alloc_barrier(128)
            T.pdl_sync()
            b, h = T.truncdiv(i_bh, H), T.truncmod(i_bh, H)
            T.tma_copy(x[b, i_tile * ROWS : i_tile * ROWS + ROWS, h, 0:COLUMNS], x_smem, barrier=x_ready)
            T.mbarrier_arrive(x_ready)
            T.mbarrier_wait_parity(x_ready, 0)
            T.copy(x_smem, x_local)
            for row, column in T.Parallel(ROWS, COLUMNS):
                if first + i_tile * ROWS + row < lengths[b]:
                    y[b, i_tile * ROWS + row, h, column] = x_local[row, column] * factor

    return scale_rows


def build_cluster_copy() -> Any:
    """y = x for [M, 128], two blocks to a cluster, in and out by TMA."""
    import tilelang.language as T

    M = T.dynamic("M")

    @T.prim_func
    def cluster_copy(x: T.Tensor((M, COLUMNS), "float16"), y: T.Tensor((M, COLUMNS), "float16")):
        with T.ClusterKernel(T.truncdiv(M + 2 * ROWS - 1, 2 * ROWS) * 2, threads=128, cluster_dims=(2, 1, 1)) as i_tile:
            tile = T.alloc_shared((ROWS, COLUMNS), "float16")
            tile_ready = T.alloc_barrier(128)
            T.tma_copy(x[i_tile * ROWS : i_tile * ROWS + ROWS, 0:COLUMNS], tile, barrier=tile_ready)
            T.mbarrier_arrive(tile_ready)
            T.mbarrier_wait_parity(tile_ready, 0)
            T.copy(tile, y[i_tile * ROWS : i_tile * ROWS + ROWS, 0:COLUMNS])

    return cluster_copy


STAND_INS = (
    StandIn("scale_rows", build_scale_rows, {"UTMALDG": 1}),
    StandIn("cluster_copy", build_cluster_copy, {"UTMALDG": 1, "UTMASTG": 1}),
)
