"""Addresses of the convolution: whatever 32 bits hold as the distance of two tokens may be multiplied in 64 bits alone."""

import re

import pytest

pytestmark = pytest.mark.usefixtures("tools")

KERNELS = [
    f"convolution_{kernel}_bf16"
    for kernel in ("exact_4", "long_4", "general_8", "normed_exact_4", "backward_exact_4", "backward_exact_8")
]


@pytest.mark.parametrize("name", KERNELS)
def test_no_product_with_the_distance_of_tokens_has_32_bits(name):
    from flashqla_hub.compile.lowering import lower
    from flashqla_hub.kernels.spec import SPECS

    [spec] = [spec for spec in SPECS if spec.name == name]
    source = lower(name, spec.build(), spec.pass_configs).source
    body = source[source.rindex(f"{name}_kernel(") :]
    body = body[body.index("{") :]
    distances = re.findall(r".{12}\b(?:x|dy)_token\b.?", body)
    assert distances
    for distance in distances:  # widened before it is multiplied, or handed to a function as it is
        assert re.search(r"\(\(int64_t\)\w+\)$|, \w+\)$", distance), distance


def test_rounds_that_are_ordered_ahead_begin_at_addresses_of_64_bits():
    from flashqla_hub.kernels._convolution import DEVICE_CODE

    assert "static_cast<long long>(first) * step * BYTES" in DEVICE_CODE
