"""Runs a kernel's barrier protocol (flashqla_hub.kernels.protocol) under a schedule and stops at the first mistake.

Random schedules keep the roles close together. What a missing wait allows shows when one role lags far behind the others:
`simulate_starved` lets each role in turn make a step only when nobody else can.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


class ProtocolError(AssertionError):
    """A deadlock, an arrival too many, or a tile that is overwritten early or read late."""


@dataclass
class _Barrier:
    """An mbarrier: the count of completed phases, and the arrivals that the current one still waits for."""

    arrivals: int
    completed: int = 0
    pending: int = field(init=False)

    def __post_init__(self) -> None:
        self.pending = self.arrivals

    def lets_pass(self, parity: int) -> bool:
        """mbarrier.try_wait.parity: true unless the current phase has that parity."""
        return self.completed % 2 != parity

    def arrive(self, count: int) -> None:
        self.pending -= count
        if self.pending < 0:
            raise ProtocolError(f"{-self.pending} arrivals too many in phase {self.completed}")
        if self.pending == 0:
            self.completed, self.pending = self.completed + 1, self.arrivals


@dataclass
class _Tile:
    """One slot: the version it holds, who reads it now, and who has yet to release it."""

    readers: frozenset[str]
    version: int | None = None
    reading: set[str] = field(default_factory=set)
    unreleased: set[str] = field(default_factory=set)

    def write(self, version: int) -> None:
        if self.unreleased:
            raise ProtocolError(
                f"version {version} overwrites {self.version} before {sorted(self.unreleased)} released it"
            )
        self.version, self.unreleased = version, set(self.readers)

    def read(self, role: str, version: int) -> None:
        if self.version != version or role not in self.unreleased:
            raise ProtocolError(f"{role} reads version {version} and finds {self.version}")
        self.reading.add(role)

    def done(self, role: str, version: int) -> None:
        if self.version != version or role not in self.reading:
            raise ProtocolError(
                f"{role} releases version {version}, which it does not read; the tile holds {self.version}"
            )
        self.reading.remove(role)
        self.unreleased.remove(role)


def simulate(protocol: Any, trips: int, seed: int) -> None:
    """Runs all roles to their ends, switching between them at random after every event.

    Raises:
        ProtocolError: naming role, event and what was wrong.
    """
    _run(protocol, trips, random.Random(seed).choice)


def simulate_starved(protocol: Any, trips: int) -> None:
    """Runs all roles to their ends, once for each of them that is starved and each other one that comes first.

    Raises:
        ProtocolError: naming role, event and what was wrong.
    """
    roles = list(protocol.roles)
    for starved in roles:
        others = [role for role in roles if role != starved]
        for first in range(len(others)):
            order = [*others[first:], *others[:first], starved]
            _run(protocol, trips, lambda ready, order=order: min(ready, key=order.index))


def _run(protocol: Any, trips: int, choose: Callable[[Sequence[str]], str]) -> None:
    """Lets the role that `choose` takes of those that can go on make a step, until all have ended."""
    barriers = {name: [_Barrier(b.arrivals) for _ in range(b.slots)] for name, b in protocol.barriers.items()}
    tiles = {name: [_Tile(frozenset(t.readers)) for _ in range(t.slots)] for name, t in protocol.tiles.items()}
    programs = {role: program(trips) for role, program in protocol.roles.items()}
    blocked: dict[str, Any] = {}
    while programs:
        ready = [role for role in programs if role not in blocked or _passes(barriers, blocked[role])]
        if not ready:
            raise ProtocolError(f"deadlock with {trips} trips: {blocked}")
        role = choose(ready)
        blocked.pop(role, None)
        _step(role, programs, barriers, tiles, blocked)


def _step(role: str, programs: dict[str, Iterator[Any]], barriers: dict, tiles: dict, blocked: dict[str, Any]) -> None:
    event = next(programs[role], None)
    if event is None:
        del programs[role]
    elif event.kind == "wait":
        blocked[role] = event
    else:
        try:
            _apply(role, event, barriers, tiles)
        except ProtocolError as error:
            raise ProtocolError(f"{role}, {event}: {error}") from None


def _apply(role: str, event: Any, barriers: dict, tiles: dict) -> None:
    if event.kind == "arrive":
        barriers[event.name][event.slot].arrive(event.value)
    elif event.kind == "write":
        tiles[event.name][event.slot].write(event.value)
    elif event.kind == "read":
        tiles[event.name][event.slot].read(role, event.value)
    elif event.kind == "done":
        tiles[event.name][event.slot].done(role, event.value)
    else:
        raise ValueError(f"{event.kind!r} is no kind of event")


def _passes(barriers: dict, event: Any) -> bool:
    return barriers[event.name][event.slot].lets_pass(event.value)
