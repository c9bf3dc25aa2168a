"""Reads what a 64-bit little-endian ELF file imports: enough to judge where a shared library can be loaded."""

import struct
from dataclasses import dataclass

MACHINES = {62: "x86_64", 183: "aarch64", 190: "cuda"}

DT_NEEDED, DT_STRTAB, DT_SYMTAB, DT_SONAME = 1, 5, 6, 14
DT_VERNEED, DT_VERNEEDNUM, DT_VERSYM = 0x6FFFFFFE, 0x6FFFFFFF, 0x6FFFFFF0
SECTION_DYNAMIC, SECTION_DYNSYM = 6, 11
SEGMENT_LOAD = 1
WEAK = 2


@dataclass(frozen=True)
class Import:
    """An undefined dynamic symbol and the symbol version that it asks for, if any."""

    name: str
    version: str | None
    is_weak: bool


@dataclass(frozen=True)
class SharedLibrary:
    """What a shared library says of itself; `alignment` is that of the loaded segments, in bytes."""

    machine: str
    needed: tuple[str, ...]
    imports: tuple[Import, ...]
    exports: tuple[str, ...]
    alignment: int


def read_shared_library(data: bytes) -> SharedLibrary:
    """Parses the file.

    Raises:
        ValueError: no 64-bit little-endian ELF file, or one without a dynamic section.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("this is no 64-bit little-endian ELF file")
    sections = _sections(data)
    dynamic = next((s for s in sections if s.kind == SECTION_DYNAMIC), None)
    symbols = next((s for s in sections if s.kind == SECTION_DYNSYM), None)
    if dynamic is None or symbols is None:
        raise ValueError("this ELF file has no dynamic section")
    entries = list(struct.iter_unpack("<qQ", data[dynamic.offset : dynamic.offset + dynamic.size]))
    strings = sections[dynamic.link]
    versions = _needed_versions(data, sections, entries, strings)
    versym = _section_at(sections, entries, DT_VERSYM)
    imports, exports = [], []
    for index in range(1, symbols.size // 24):
        name_offset, info, _, section, *_ = struct.unpack_from("<IBBHQQ", data, symbols.offset + 24 * index)
        name = _string(data, strings.offset + name_offset)
        if section != 0:
            exports.append(name)
            continue
        version = struct.unpack_from("<H", data, versym.offset + 2 * index)[0] & 0x7FFF if versym else 0
        imports.append(Import(name, versions.get(version), info >> 4 == WEAK))
    return SharedLibrary(
        machine=MACHINES.get(struct.unpack_from("<H", data, 18)[0], "unknown"),
        needed=tuple(_string(data, strings.offset + value) for tag, value in entries if tag == DT_NEEDED),
        imports=tuple(imports),
        exports=tuple(exports),
        alignment=min(_load_alignments(data), default=0),
    )


@dataclass(frozen=True)
class _Section:
    kind: int
    address: int
    offset: int
    size: int
    link: int


def _sections(data: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = []
    for index in range(count):
        _, kind, _, address, offset, length, link = struct.unpack_from("<IIQQQQI", data, table + index * size)
        sections.append(_Section(kind, address, offset, length, link))
    return sections


def _load_alignments(data: bytes) -> list[int]:
    """Alignment of each segment that the loader maps."""
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", data, table + index * size) for index in range(count)]
    return [header[7] for header in headers if header[0] == SEGMENT_LOAD]


def _section_at(sections: list[_Section], entries: list[tuple[int, int]], tag: int) -> _Section | None:
    address = dict(entries).get(tag)
    return next((section for section in sections if address and section.address == address), None)


def _needed_versions(
    data: bytes, sections: list[_Section], entries: list[tuple[int, int]], strings: _Section
) -> dict[int, str]:
    """Version index -> name such as GLIBC_2.17, from the linked list of DT_VERNEED."""
    section = _section_at(sections, entries, DT_VERNEED)
    found: dict[int, str] = {}
    if section is None:
        return found
    file_at = section.offset
    for _ in range(dict(entries)[DT_VERNEEDNUM]):
        _, count, _, first, following = struct.unpack_from("<HHIII", data, file_at)
        version_at = file_at + first
        for _ in range(count):
            _, _, index, name, step = struct.unpack_from("<IHHII", data, version_at)
            found[index] = _string(data, strings.offset + name)
            version_at += step
        file_at += following
    return found


def _string(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()
