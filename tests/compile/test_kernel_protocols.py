"""The barrier protocol that each kernel declares: it neither hangs nor races, and it is the one in the compiled source."""

import importlib
import pkgutil
import re
from dataclasses import replace

import pytest
from protocol_simulator import ProtocolError, simulate, simulate_starved

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
            simulate_starved(protocol, trips)
            for seed in range(SEEDS):
                simulate(protocol, trips, seed)


def without(protocol, kind, name):
    """The protocol with every such event left out, which must be there."""

    def keeps(event):
        return (event.kind, event.name) != (kind, name)

    roles = {
        role: lambda trips, program=program: filter(keeps, program(trips)) for role, program in protocol.roles.items()
    }
    assert any(not keeps(event) for program in protocol.roles.values() for event in program(2)), f"no {kind} {name}"
    return replace(protocol, roles=roles)


@pytest.mark.parametrize(
    ("kind", "name", "mistake"),
    [
        ("wait", "tokens_ready", "finds"),
        ("wait", "tokens_free", "overwrites"),
        ("wait", "values_ready", "finds"),
        ("wait", "values_free", "overwrites"),
        ("wait", "scores_ready", "finds"),
        ("wait", "scores_free", "overwrites"),
        ("wait", "output_ready", "finds"),
        ("wait", "output_free", "overwrites"),
        ("arrive", "tokens_free", "deadlock"),
        ("arrive", "output_free", "deadlock"),
        ("done", "scores", "overwrites"),
    ],
)
def test_what_the_recurrence_must_not_leave_out_is_found(protocols, kind, name, mistake):
    broken = without(protocols["recurrence"], kind, name)
    with pytest.raises(ProtocolError, match=mistake):
        for trips in TRIPS:
            simulate_starved(broken, trips)


def test_protocols_and_compiled_sources_agree(protocols, product):
    for name, protocol in protocols.items():
        sources = [kernel.source for kernel in product if kernel.plan.name.startswith(name)]
        assert sources, f"no spec is named after {name}"
        declared = {barrier: [part.arrivals] * part.slots for barrier, part in protocol.barriers.items()}
        for source in sources:
            assert initialised_barriers(source) == declared


def test_outputs_are_ordered_before_they_are_stored(product):
    """The state warpgroups have no fence, and TileLang adds none: each storer's comes between its wait and its TMA store."""
    sources = [kernel.source for kernel in product if kernel.plan.name.startswith("recurrence")]
    for source in sources:
        handovers = re.findall(r"output_ready\[[^;]*\.wait\(.*?tl::tma_store\(", source, flags=re.DOTALL)
        assert len(handovers) == 2, "a storer for each half"
        assert all("tl::fence_proxy_async();" in handover for handover in handovers)
