"""The barrier protocol that each kernel declares: it neither hangs nor races, and it is the one in the compiled source."""

import importlib
import pkgutil
import re

import pytest
from protocol_simulator import simulate

TRIPS = (0, 1, 2, 3, 4, 5, 9, 16)
SEEDS = 150


def declared_protocols(tools):
    """Module name -> PROTOCOL, of every kernel module that declares one."""
    import flashqla_hub.kernels as package

    modules = [
        importlib.import_module(f"{package.__name__}.{info.name}") for info in pkgutil.iter_modules(package.__path__)
    ]
    return {module.__name__.rsplit(".", 1)[1]: module.PROTOCOL for module in modules if hasattr(module, "PROTOCOL")}


@pytest.fixture(scope="module")
def protocols(tools):
    return declared_protocols(tools)


def initialised_barriers(cuda_source):
    """Barrier name -> arrivals of each slot, from statements such as `tile_ready[1].init(128);`."""
    found = {}
    for name, slot, arrivals in re.findall(r"(\w+)\[(\d+)\]\.init\((\d+)\);", cuda_source):
        found.setdefault(name, {})[int(slot)] = int(arrivals)
    return {name: [slots[index] for index in sorted(slots)] for name, slots in found.items()}


def test_the_kernel_with_roles_declares_its_protocol(protocols):
    assert "recurrence" in protocols


def test_no_schedule_hangs_or_races(protocols):
    for protocol in protocols.values():
        for trips in TRIPS:
            for seed in range(SEEDS):
                simulate(protocol, trips, seed)


def test_protocols_and_compiled_sources_agree(protocols, product):
    for name, protocol in protocols.items():
        sources = [kernel.source for kernel in product if kernel.plan.name.startswith(name)]
        assert sources, f"no spec is named after {name}"
        declared = {barrier: [part.arrivals] * part.slots for barrier, part in protocol.barriers.items()}
        for source in sources:
            assert initialised_barriers(source) == declared
