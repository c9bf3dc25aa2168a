"""The barrier protocol that each kernel declares: it neither hangs nor races, and it is the one in the compiled source."""

import importlib
import pkgutil
import re
from dataclasses import replace

import pytest
from protocol_simulator import ProtocolError, simulate, simulate_starved

from flashqla_hub.compile.cache import Cache, default_folder
from flashqla_hub.compile.kernel_build import lower_kernel
from flashqla_hub.kernels._sm90 import BACKWARD_SCAN

# Chunks of the backward's scan that are announced before a batch waits for the place of another one.
ANNOUNCED = BACKWARD_SCAN.announced_at_once * BACKWARD_SCAN.announcements
# A place has its second batch from ANNOUNCED + 1 chunks on, and its third from twice as many.
TRIPS = tuple(sorted({0, 1, 2, 3, 4, 5, 9, ANNOUNCED + 1, 2 * ANNOUNCED + 1}))
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


LONE_ARRIVAL = re.compile(r"if \([^\n]*== 0\) \{\s*\w+\[[^\n]*\]\.arrive\(\);")


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


@pytest.mark.parametrize(
    ("kernel", "kind", "name", "mistake"),
    [
        ("backward_gradients", "wait", "work_ready", "finds"),
        ("backward_gradients", "wait", "tokens_free", "overwrites"),
        ("backward_gradients", "arrive", "work_ready", "deadlock"),
        ("backward_gradients", "arrive", "tokens_free", "deadlock"),
        ("backward_gradients", "done", "work", "overwrites"),
        ("backward_scan", "wait", "stored_ready", "finds"),
        ("backward_scan", "wait", "stored_free", "overwrites"),
        ("backward_scan", "arrive", "stored_ready", "deadlock"),
        ("backward_scan", "arrive", "stored_free", "deadlock"),
    ],
)
def test_what_tells_of_chunks_in_the_backward_must_not_be_left_out(protocols, kernel, kind, name, mistake):
    broken = without(protocols[kernel], kind, name)
    with pytest.raises(ProtocolError, match=mistake):
        for trips in TRIPS:
            simulate_starved(broken, trips)


@pytest.mark.parametrize("role", ["load_states", "sum"])
def test_who_only_reads_the_record_lets_it_go_too(protocols, role):
    protocol = protocols["backward_gradients"]
    others = without(protocol, "arrive", "tokens_free").roles
    with pytest.raises(ProtocolError, match="deadlock"):
        simulate_starved(replace(protocol, roles=protocol.roles | {role: others[role]}), 3)


def test_protocols_and_compiled_sources_agree(protocols, product):
    for name, protocol in protocols.items():
        sources = [kernel.source for kernel in product if kernel.plan.name.startswith(name)]
        assert sources, f"no spec is named after {name}"
        declared = {barrier: [part.arrivals] * part.slots for barrier, part in protocol.barriers.items()}
        for source in sources:
            assert initialised_barriers(source) == declared


def test_every_lane_arrives_in_the_form_for_tools_and_one_in_the_shipped(tools, product):
    from flashqla_hub.kernels._sm90 import WARP, every_lane_arrives
    from flashqla_hub.kernels.spec import SPECS

    shipped = {kernel.plan.name: kernel.source for kernel in product if initialised_barriers(kernel.source)}
    specs = [spec for spec in SPECS if spec.name in shipped]
    cache = Cache(default_folder())
    with every_lane_arrives():
        for_tools = {spec.name: lower_kernel(spec, tools, cache).source for spec in specs}
    assert {spec.name: lower_kernel(spec, tools, cache).source for spec in specs} == shipped
    for name, source in shipped.items():
        counts = {barrier: [warps * WARP for warps in slots] for barrier, slots in initialised_barriers(source).items()}
        assert initialised_barriers(for_tools[name]) == counts
        assert for_tools[name].count(".arrive()") == source.count(".arrive()") >= len(counts)
        assert LONE_ARRIVAL.search(source) and not LONE_ARRIVAL.search(for_tools[name])
