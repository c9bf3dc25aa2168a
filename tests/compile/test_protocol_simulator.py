"""The simulator finds each kind of mistake in a two-stage ring of a loader and a consumer."""

from dataclasses import dataclass

import pytest
from protocol_simulator import ProtocolError, simulate, simulate_starved

STAGES, THREADS = 2, 128


@dataclass(frozen=True)
class Event:
    kind: str
    name: str
    slot: int
    value: int


@dataclass(frozen=True)
class Barriers:
    slots: int
    arrivals: int


@dataclass(frozen=True)
class Tiles:
    slots: int
    readers: tuple[str, ...]


def loader(trips):
    for i in range(trips):
        slot, lap = i % STAGES, i // STAGES
        yield Event("wait", "free", slot, lap % 2 ^ 1)
        yield Event("write", "tile", slot, i)
        yield Event("arrive", "ready", slot, THREADS)


def consumer(trips):
    for i in range(trips):
        slot, lap = i % STAGES, i // STAGES
        yield Event("wait", "ready", slot, lap % 2)
        yield Event("read", "tile", slot, i)
        yield Event("done", "tile", slot, i)
        yield Event("arrive", "free", slot, THREADS)


@dataclass(frozen=True)
class Ring:
    roles: dict
    barriers: dict
    tiles: dict


def ring(change=lambda event: event, ready_arrivals=THREADS):
    """The correct ring with `change` applied to each event; an event changed to None is left out."""

    def changed(program):
        return lambda trips: (event for original in program(trips) if (event := change(original)) is not None)

    return Ring(
        roles={"loader": changed(loader), "consumer": changed(consumer)},
        barriers={"ready": Barriers(STAGES, ready_arrivals), "free": Barriers(STAGES, THREADS)},
        tiles={"tile": Tiles(STAGES, ("consumer",))},
    )


def run_all(protocol):
    for trips in range(8):
        for seed in range(30):
            simulate(protocol, trips, seed)


def test_the_correct_ring_passes():
    run_all(ring())
    simulate_starved(ring(), 8)


def without(kind, name):
    return lambda event: None if (event.kind, event.name) == (kind, name) else event


def with_wrong_parity(event):
    return Event("wait", "free", event.slot, event.value ^ 1) if (event.kind, event.name) == ("wait", "free") else event


def with_double_arrivals(event):
    return Event("arrive", event.name, event.slot, 2 * event.value) if event.kind == "arrive" else event


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        (without("wait", "ready"), "finds"),
        (without("wait", "free"), "overwrites"),
        (without("arrive", "ready"), "deadlock"),
        (without("arrive", "free"), "deadlock"),
        (without("done", "tile"), "overwrites"),
        (with_wrong_parity, "deadlock"),
        (with_double_arrivals, "too many"),
    ],
)
def test_a_mistake_is_found(change, mistake):
    with pytest.raises(ProtocolError, match=mistake):
        run_all(ring(change))


def test_a_wrong_arrival_count_is_found():
    with pytest.raises(ProtocolError, match="deadlock"):
        run_all(ring(ready_arrivals=THREADS + 32))
