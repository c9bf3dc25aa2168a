"""How the warp roles of a kernel use its barriers and shared tiles, as data that a simulator can run.

A role is a generator function of the number of loop trips; it yields events in program order, and a simulator may switch
roles after every one of them.

    wait(barrier, slot, parity)   blocks until the phase of that parity has completed (an mbarrier starts in phase 0)
    arrive(barrier, slot, count)  `count` arrivals at once; more than the barrier's arrivals in one phase is an error
    read(tile, slot, version)     the slot must hold exactly that version, completely written
    done(tile, slot, version)     this role reads the version no more
    write(tile, slot, version)    the slot must not be in use by a reader of the version before
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["wait", "arrive", "read", "done", "write"]


@dataclass(frozen=True)
class Event:
    """One step of a role on `name`[`slot`]; `value` is a parity, a count of arrivals or a version."""

    kind: Kind
    name: str
    slot: int
    value: int


@dataclass(frozen=True)
class Barriers:
    """`slots` mbarriers of one name, each completing a phase after `arrivals` arrivals."""

    slots: int
    arrivals: int


@dataclass(frozen=True)
class Tiles:
    """`slots` copies of a shared tile; every version is read and released by each of `readers`."""

    slots: int
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Protocol:
    """Barriers, tiles and roles of one kernel; `roles[name](trips)` yields that role's events."""

    barriers: dict[str, Barriers]
    tiles: dict[str, Tiles]
    roles: dict[str, Callable[[int], Iterator[Event]]]


def wait(name: str, slot: int, parity: int) -> Event:
    return Event("wait", name, slot, parity)


def arrive(name: str, slot: int, count: int) -> Event:
    return Event("arrive", name, slot, count)


def read(name: str, slot: int, version: int) -> Event:
    return Event("read", name, slot, version)


def done(name: str, slot: int, version: int) -> Event:
    return Event("done", name, slot, version)


def write(name: str, slot: int, version: int) -> Event:
    return Event("write", name, slot, version)
