"""The lowering: the same source for the same kernel, and one sentence for what the launchers cannot do."""

import importlib
import re

import pytest

from flashqla_hub.compile.errors import LoweringError

pytestmark = pytest.mark.usefixtures("tools")


class UnnamedTiles:
    """Buffers made outside of a prim_func's text, which TileLang leaves without names."""

    def __init__(self):
        import tilelang.language as T

        self.a, self.b, self.c, self.d = (T.alloc_shared((64,), "float32") for _ in range(4))


def build_with_unnamed_tiles():
    import tilelang.language as T

    N = T.dynamic("N")

    @T.prim_func
    def rotate(x: T.Tensor((N, 64), "float32")):
        with T.Kernel(N, threads=64) as row:
            tiles = UnnamedTiles()
            buffer_2 = T.alloc_shared((64,), "float32")
            thread = T.get_thread_binding()
            tiles.a[thread] = x[row, thread]
            tiles.b[thread] = x[row, 63 - thread]
            tiles.c[thread] = tiles.a[63 - thread] + tiles.b[thread]
            tiles.d[thread] = tiles.c[63 - thread] * tiles.a[thread]
            buffer_2[thread] = tiles.d[63 - thread] - tiles.b[63 - thread]
            x[row, thread] = buffer_2[63 - thread]

    return rotate


def build_two_kernels():
    import tilelang.language as T

    @T.prim_func
    def twice(x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            x[T.get_thread_binding()] = 1.0
        with T.Kernel(1, threads=64) as _:
            x[T.get_thread_binding()] = 2.0

    return twice


def build_with_a_size_that_stands_nowhere_alone():
    import tilelang.language as T

    N = T.dynamic("N")

    @T.prim_func
    def doubled(x: T.Tensor((N * 2,), "float32")):
        with T.Kernel(N, threads=64) as row:
            x[row * 2] = 1.0

    return doubled


def build_with_an_unknown_dtype():
    import tilelang.language as T

    @T.prim_func
    def bytes_of(x: T.Tensor((64,), "int8")):
        with T.Kernel(1, threads=64) as _:
            x[T.get_thread_binding()] = T.int8(1)

    return bytes_of


def named(prim_func):
    from flashqla_hub.compile.canonical import name_buffers

    name_buffers(prim_func)
    return prim_func


def lowered(prim_func):
    from flashqla_hub.compile.lowering import lower

    return lower("test_kernel", named(prim_func), {})


def test_equal_buffers_get_names_of_their_own():
    declared = re.findall(
        r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem", lowered(build_with_unnamed_tiles()).source
    )
    assert sorted(declared) == ["buffer_1", "buffer_2", "buffer_3", "buffer_4", "buffer_5"]


def build_with_a_store_of_one_tile_before_tma_of_another():
    import tilelang.language as T

    @T.prim_func
    def store(x: T.Tensor((64, 64), "float32"), y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            read, other = T.alloc_shared((64, 64), "float32"), T.alloc_shared((64,), "float32")
            ready = T.alloc_barrier([1])
            other[T.get_thread_binding() % 64] = 1.0
            if T.get_thread_binding() < 32:
                T.tma_copy(x, read, barrier=ready[0])
                T.barrier_arrive(ready[0])
            T.barrier_wait(ready[0], 0)
            y[T.get_thread_binding() % 64, 0] = read[T.get_thread_binding() % 64, 0] + other[0]

    return store


def test_a_kernel_with_its_own_fences_gets_no_others():
    from flashqla_hub.compile.lowering import OWN_FENCES, lower
    from flashqla_hub.kernels.spec import PASS_CONFIGS

    build = build_with_a_store_of_one_tile_before_tma_of_another
    fences = [
        lower("store", build(), dict(PASS_CONFIGS) | {OWN_FENCES: own}).source.count("fence_proxy_async")
        for own in (False, True)
    ]
    assert fences[0] > 0 and fences[1] == 0


def test_the_same_kernel_gives_the_same_source_every_time():
    first = lowered(build_with_unnamed_tiles())
    for _ in range(5):
        assert lowered(build_with_unnamed_tiles()) == first


KERNEL_TEXT = """
import tilelang.language as T

@T.prim_func
def kernel(x: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64) as _:
        x[T.get_thread_binding()] = VALUE
"""


def test_the_digest_knows_the_kernel_and_not_its_place(tmp_path, monkeypatch):
    from flashqla_hub.compile.canonical import digest_of

    monkeypatch.syspath_prepend(tmp_path)
    texts = {
        "kernel_one": KERNEL_TEXT.replace("VALUE", "1.0"),
        "kernel_moved": "\n\n\n" + KERNEL_TEXT.replace("VALUE", "1.0"),
        "kernel_two": KERNEL_TEXT.replace("VALUE", "2.0"),
    }
    digests = {}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
        digests[name] = digest_of(importlib.import_module(name).kernel)
    assert digests["kernel_one"] == digests["kernel_moved"] != digests["kernel_two"]


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (build_two_kernels, "test_kernel lowers to 2 kernels; a spec builds exactly one, so split it."),
        (build_with_a_size_that_stands_nowhere_alone, "test_kernel: no tensor has N as a size or stride of its own."),
        (build_with_an_unknown_dtype, "of dtype int8; the launchers know bfloat16, float16, float32, int32, int64."),
    ],
)
def test_what_the_launchers_cannot_do_is_one_sentence(build, sentence):
    with pytest.raises(LoweringError) as error:
        lowered(build())
    assert sentence in str(error.value)


def build_with_a_scalar():
    import tilelang.language as T

    @T.prim_func
    def scaled(x: T.Tensor((64,), "float32"), blocks: T.int32):
        with T.Kernel(blocks * 2, threads=64) as block:
            x[block] = 1.0

    return scaled


def test_a_number_or_a_scalar_says_how_many_blocks_are_a_cluster():
    from flashqla_hub.compile.lowering import CLUSTER, lower

    plan = lower("test_kernel", named(build_with_a_scalar()), {CLUSTER: "blocks"}).plan
    assert plan.cluster == ("blocks", "1", "1") and plan.grid[0] != "1"
    assert lower("test_kernel", named(build_with_a_scalar()), {CLUSTER: 2}).plan.cluster == ("2", "1", "1")
    assert lowered(build_with_a_scalar()).plan.cluster == ("1", "1", "1")
    with pytest.raises(LoweringError, match=r"test_kernel has clusters of 0 blocks in flashqla\.cluster; it must be 1"):
        lower("test_kernel", named(build_with_a_scalar()), {CLUSTER: 0})
    with pytest.raises(LoweringError, match=r"test_kernel takes no scalar rows, which flashqla\.cluster names"):
        lower("test_kernel", named(build_with_a_scalar()), {CLUSTER: "rows"})
