"""The generated launchers: every value that a kernel gets, written out by hand."""

import fake_gpu
import pytest
import torch
from fake_gpu import TensorMap, launches, op

B, S, H, COLUMNS = 2, 200, 3, 128
BFLOAT16, FLOAT16 = 9, 6  # CU_TENSOR_MAP_DATA_TYPE_*
SWIZZLE_NONE, SWIZZLE_128B, L2_PROMOTION_128B = 0, 3, 2


def scale_rows_of_a_fused_projection():
    """x is one of five slices of a [B, S, 5, H, 128] tensor, so that all three strides differ from the contiguous ones."""
    projection = torch.zeros(B, S, 5, H, COLUMNS, dtype=torch.bfloat16)
    x, y = projection[:, :, 1], torch.zeros(B, S, H, COLUMNS, dtype=torch.bfloat16)
    lengths = torch.tensor([200, 17, 0], dtype=torch.int32)
    op("stage_scale_rows", x, lengths, y, 0.5, -3)
    return launches(), {"x": x.data_ptr(), "y": y.data_ptr(), "lengths": lengths.data_ptr()}


def copy_in_clusters():
    x, y = (torch.zeros(300, COLUMNS, dtype=torch.float16) for _ in range(2))
    op("stage_cluster_copy", x, y)
    return launches(), {"x": x.data_ptr(), "y": y.data_ptr()}


def test_every_argument_arrives_under_its_name(stand_in_process):
    [launch], addresses = stand_in_process.run(scale_rows_of_a_fused_projection)
    x_map = launch.arguments.pop("x_desc")
    assert launch.arguments == {
        "lengths": addresses["lengths"],
        "y": addresses["y"],
        "B": 2,
        "H": 3,
        "S": 200,
        "factor": 0.5,
        "first": -3,
    }
    assert x_map == TensorMap(
        address=addresses["x"],
        dtype=BFLOAT16,
        dims=(128, 200, 3, 2),
        strides=(5 * 3 * 128 * 2, 128 * 2, 200 * 5 * 3 * 128 * 2),
        box=(128, 64, 1, 1),
        element_strides=(1, 1, 1, 1),
        swizzle=SWIZZLE_NONE,
        interleave=0,
        l2_promotion=L2_PROMOTION_128B,
        out_of_bounds=0,
    )


def test_grid_block_shared_memory_and_programmatic_launch(stand_in_process):
    [launch], _ = stand_in_process.run(scale_rows_of_a_fused_projection)
    assert (launch.grid, launch.block) == ((4, 6, 1), (128, 1, 1))
    assert launch.shared_memory == 64 * 128 * 2
    assert launch.programmatic
    assert launch.cluster == (0, 0, 0)


def test_cluster_dimension_and_store_map(stand_in_process):
    [launch], addresses = stand_in_process.run(copy_in_clusters)
    assert (launch.grid, launch.cluster, launch.programmatic) == ((6, 1, 1), (2, 1, 1), False)
    assert launch.arguments["M"] == 300
    for name in ("x", "y"):
        tile = launch.arguments[f"{name}_desc"]
        assert (tile.address, tile.dtype, tile.dims, tile.strides) == (addresses[name], FLOAT16, (128, 300), (256,))
        assert (tile.box, tile.swizzle) == ((64, 64), SWIZZLE_128B)


def scale_rows(x, y_shape=(B, S, H, COLUMNS), lengths=B + 1):
    op(
        "stage_scale_rows",
        x,
        torch.zeros(lengths, dtype=torch.int32),
        torch.zeros(y_shape, dtype=torch.bfloat16),
        1.0,
        0,
    )
    return launches()


def scale_one_row_with_odd_strides():
    x = torch.zeros(4096, dtype=torch.bfloat16).as_strided((1, 1, 3, COLUMNS), (7, 5, 128, 1))
    return scale_rows(x, (1, 1, 3, COLUMNS), 2)


def scale_nothing():
    return scale_rows(torch.zeros(0, S, H, COLUMNS, dtype=torch.bfloat16), (0, S, H, COLUMNS), 1)


def test_stride_of_a_size_one_axis_does_not_matter(stand_in_process):
    [launch] = stand_in_process.run(scale_one_row_with_odd_strides)
    assert launch.arguments["x_desc"].strides == (16, 256, 16)


def test_an_empty_grid_is_not_launched(stand_in_process):
    assert stand_in_process.run(scale_nothing) == []


def with_dtype():
    return scale_rows(torch.zeros(B, S, H, COLUMNS))


def with_rank():
    return scale_rows(torch.zeros(B, S, H * COLUMNS, dtype=torch.bfloat16))


def with_other_size():
    return scale_rows(torch.zeros(B, S, H, COLUMNS, dtype=torch.bfloat16), (B, S, H + 1, COLUMNS))


def with_derived_size():
    return scale_rows(torch.zeros(B, S, H, COLUMNS, dtype=torch.bfloat16), lengths=B + 2)


def with_inner_stride():
    return scale_rows(torch.zeros(B, S, H, 2 * COLUMNS, dtype=torch.bfloat16)[..., ::2])


def with_unaligned_stride():
    return scale_rows(torch.zeros(B, S, H, COLUMNS + 1, dtype=torch.bfloat16)[..., :COLUMNS])


def with_unaligned_address():
    flat = torch.zeros(B * S * H * COLUMNS + 8, dtype=torch.bfloat16)
    return scale_rows(flat[1 : 1 + B * S * H * COLUMNS].view(B, S, H, COLUMNS))


def with_other_device():
    return scale_rows(fake_gpu.place(torch.zeros(B, S, H, COLUMNS, dtype=torch.bfloat16), 1))


def with_oversized_grid():
    x = torch.zeros(256, 1, 257, COLUMNS, dtype=torch.bfloat16)
    return scale_rows(x, x.shape, 257)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (with_dtype, "x is float32 and scale_rows takes bfloat16; convert it."),
        (with_rank, "x has 3 dimensions and scale_rows takes 4."),
        (with_other_size, "y.shape[2] is 4 and scale_rows takes 3, as the other arguments give it."),
        (with_derived_size, "lengths.shape[0] is 4 and scale_rows takes 3, as the other arguments give it."),
        (with_inner_stride, "x.stride(3) is 2 and scale_rows takes 1; pass x.contiguous()."),
        (
            with_unaligned_stride,
            "x has a stride of 774 bytes and scale_rows takes multiples of 16 below 2^40; pass x.contiguous().",
        ),
        (
            with_unaligned_address,
            "x starts at an address that is no multiple of 16 bytes, which scale_rows needs; pass x.clone().",
        ),
        (with_other_device, "lengths is on device 0 and the other tensors are on device 1; move it there."),
        (
            with_oversized_grid,
            "scale_rows_kernel would need a grid of 1 x 65792 x 1 blocks, and CUDA takes 2147483647 x 65535 x 65535; "
            "split the call.",
        ),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_no_launch(stand_in_process, call, sentence):
    with pytest.raises(RuntimeError) as error:
        stand_in_process.run(call)
    assert sentence in str(error.value)
    assert stand_in_process.run(launches) == []
