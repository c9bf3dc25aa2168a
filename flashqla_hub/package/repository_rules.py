"""What a kernel repository must look like on disk. Each rule takes a Subject and returns one sentence per breach."""

import json
import re
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from kernels.variants import NoarchVariant, parse_variant

from ..compile.elf import read_shared_library
from ..compile.gates import reaching_out, unknown_libraries
from .assemble import CARD, METADATA, OPS, assemble, library_name, read_tree
from .errors import PackageError
from .kernel_data import Digest, DigestAlgorithm, DigestValidationError, Metadata
from .source_rules import layer_names, public_names
from .subject import Subject
from .variants import VARIANTS, Variant, is_variant_name

REBUILD = "run `python -m flashqla_hub build`"
FIRST_FUNCTION = "chunk_gated_delta_rule"
SHOWN = 5


def layout_problems(subject: Subject) -> list[str]:
    """`build/<variant>` directories that `kernels` recognises, each importable, with its library where it needs one."""
    problems = [
        f"build/{entry.name} is neither a build variant nor {CARD}; remove it."
        for entry in sorted(subject.build.iterdir())
        if not (entry.name == CARD or (entry.is_dir() and is_variant_name(entry.name)))
    ]
    if subject.project is not None:
        missing = sorted({variant.name for variant in VARIANTS} - subject.variants.keys())
        problems += [f"build/{name} is missing; {REBUILD}." for name in missing]
    for name, files in subject.variants.items():
        absent = [path for path in ("__init__.py", METADATA, OPS) if path not in files]
        problems += [f"build/{name} has no {path}; {REBUILD}." for path in absent]
        python_name = _raw_metadata(files).get("name", "").replace("-", "_")
        if any(path.startswith(f"{python_name}/") for path in files):
            problems.append(f"build/{name}/{python_name} repeats the kernel inside itself; keep the upper copy.")
        problems += _library_problems(name, files)
    return problems or ([] if subject.variants else [f"{subject.build} holds no build variant; {REBUILD}."])


def bytecode_problems(subject: Subject) -> list[str]:
    """No compiled Python, which could differ from the source beside it.

    What Python itself wrote is no breach: in a source tree, what git ignores; in the Hub's cache, plain files beside
    sources that are links to what was downloaded.
    """
    folders = [subject.root / "build", subject.root / "torch-ext"]
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".pyc", ".pyo")]
    local = _ignored_by_git(subject.root, paths) if subject.project else set(filter(_was_written_in_the_cache, paths))
    return [
        f"{path.relative_to(subject.root)} is compiled Python; delete it, the source beside it is what counts."
        for path in paths
        if path not in local
    ]


def metadata_problems(subject: Subject) -> list[str]:
    """metadata.json is readable by `kernels` and says what the directory, the ops and the project say."""
    problems, versions = [], set()
    for name, files in subject.variants.items():
        try:
            metadata = Metadata.read_from_file(subject.build / name / METADATA)
        except (OSError, ValueError) as error:
            problems.append(f"kernels cannot read build/{name}/{METADATA}: {' '.join(str(error).split())}")
            continue
        raw = _raw_metadata(files)
        versions.add(metadata.version)
        breaches = [*_identity_breaches(metadata.name.python_name, metadata.id, files), *_backend_breaches(name, raw)]
        breaches += [f"{key} is not empty" for key in ("python-depends", "kernel-depends") if raw.get(key) != []]
        breaches += _project_breaches(subject, raw)
        problems += [f"build/{name}/{METADATA} is wrong: {breach}; {REBUILD}." for breach in breaches]
    if len(versions) > 1:
        problems.append(f"the variants disagree on their version ({', '.join(map(str, sorted(versions)))}); {REBUILD}.")
    return problems


def digest_problems(subject: Subject) -> list[str]:
    """Every file has the hash that metadata.json gives it. `kernels` does not compare them when it loads a kernel."""
    problems = []
    for name in subject.variants:
        problems += digest_breaches(subject.build / name)
    return problems


def digest_breaches(variant: Path) -> list[str]:
    """What differs between one variant's directory and the digest in its metadata.json."""
    try:
        expected = Metadata.read_from_file(variant / METADATA).digest
    except (OSError, ValueError):
        return [f"the files of {variant.name} cannot be verified without a readable {METADATA}; {REBUILD}."]
    if expected is None:
        return [f"{variant.name}/{METADATA} has no digest, so nothing proves what was published; {REBUILD}."]
    try:
        expected.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    except DigestValidationError as error:
        found = [str(violation) for violation in error.violations]
        return [f"{variant.name} differs from its digest ({_some(found)}); {REBUILD}, or download it again."]
    return []


def contract_problems(subject: Subject) -> list[str]:
    """`__all__` is one literal list: the versioned contract, from which the Hub draws the kernel's page."""
    problems = []
    for name, (sources, _) in subject.parsed.items():
        names = public_names(sources["__init__.py"]) if "__init__.py" in sources else None
        if names is None:
            problems.append(f"{name}/__init__.py must assign __all__ once, as a literal list of strings.")
        elif names[:1] != [FIRST_FUNCTION]:
            problems.append(f"{name}/__init__.py must list {FIRST_FUNCTION} first in __all__, for the Hub's example.")
        elif "layers" in names and not layer_names(sources):
            problems.append(f'{name}/__init__.py lists "layers" in __all__, but layers.py defines no class.')
    return problems


def card_problems(subject: Subject) -> list[str]:
    """The card's front matter, and that it names all that a user can call."""
    path = card_path(subject)
    if path is None:
        return [f"{subject.build / CARD} is missing; {REBUILD}."]
    text = path.read_text()
    front, body = _split_front_matter(text)
    problems = []
    expected = {"library_name": "kernels", "license": _license(subject)}
    for key, value in expected.items():
        if front.get(key) != value:
            problems.append(f"{path.name} must say `{key}: {value}` in its front matter, not {front.get(key)!r}.")
    if "{{" in body or "{%" in body:
        problems.append(f"{path.name} holds an unfilled template; write the text itself.")
    unnamed = [name for name in _public_things(subject) if f"`{name}`" not in body]
    if unnamed:
        problems.append(f"{path.name} does not name {_some(unnamed)} (in backticks); list every function and layer.")
    return problems


def freshness_problems(subject: Subject, variants: Sequence[Variant] = VARIANTS) -> list[str]:
    """`build/` is what the sources give for `variants`, byte for byte, except that a library is believed by its name.

    That name carries the digest of everything the library is made from; `recompilation_problems` compiles and compares.
    """
    present = read_tree(subject.build)

    def committed(variant: Variant, unique: str) -> bytes:
        return present.get(f"{variant.name}/{library_name(unique)}", b"")

    try:
        fresh = assemble(subject.project, variants, library=committed)
    except PackageError as error:
        return [str(error)]
    different = [path for path in sorted(fresh.keys() | present.keys()) if fresh.get(path) != present.get(path)]
    if different:
        return [f"build/ is not what the sources give ({_some(different)}); {REBUILD} and commit it."]
    return []


def recompilation_problems(subject: Subject) -> list[str]:
    """Every library of `build/` is what the compilers of requirements/build.txt make of the sources, byte for byte."""
    present = read_tree(subject.build)
    try:
        fresh = assemble(subject.project)
    except PackageError as error:
        return str(error).splitlines()
    different = [path for path in sorted(fresh) if path.endswith(".so") and fresh[path] != present.get(path)]
    return [
        f"build/{path} is not what the compilers make of the sources; {REBUILD} and commit it." for path in different
    ]


def card_path(subject: Subject) -> Path | None:
    """The card of a source tree, or the README of a download that includes branch main."""
    candidates = [subject.build / CARD] if subject.project else [subject.build / CARD, subject.root / "README.md"]
    return next((path for path in candidates if path.is_file()), None)


def _library_problems(name: str, files: Mapping[str, bytes]) -> list[str]:
    """A variant for one processor has the one library that its namespace names; a variant for all has none."""
    if not is_variant_name(name):
        return []
    unique = _raw_metadata(files).get("id", "")
    expected = [] if isinstance(parse_variant(name), NoarchVariant) else [f"{unique}.so"]
    found = sorted(path for path in files if path.endswith(".so"))
    return [] if found == expected else [f"build/{name} has the libraries {found}, not {expected}; {REBUILD}."]


def library_problems(subject: Subject) -> list[str]:
    """No library can open a connection or a file, start a process, or load a library other than CUDA's and torch's."""
    problems = []
    for name, files in subject.variants.items():
        for path, data in files.items():
            if path.endswith(".so"):
                problems += [f"{name}/{path}: {breach}" for breach in _library_breaches(data)]
    return problems


def _library_breaches(data: bytes) -> list[str]:
    try:
        breaches = reaching_out(read_shared_library(data))
    except (ValueError, IndexError, struct.error) as error:
        return [f"{error or 'it cannot be read as an ELF file'}; {REBUILD}, or download it again."]
    return breaches + [
        f"it names the library {name}, which nobody knows; remove it." for name in unknown_libraries(data)
    ]


def _identity_breaches(python_name: str, unique: str, files: Mapping[str, bytes]) -> list[str]:
    breaches = []
    if not re.fullmatch(rf"_{re.escape(python_name)}_[0-9a-f]{{12}}", unique):
        breaches.append(f"id {unique!r} is not _{python_name}_ and 12 hexadecimal digits")
    if f'NAMESPACE = "{unique}"'.encode() not in files.get(OPS, b""):
        breaches.append(f"id {unique!r} is not the op namespace of {OPS}")
    return breaches


def _backend_breaches(name: str, raw: Mapping) -> list[str]:
    backend = raw.get("backend", {})
    variant = parse_variant(name) if is_variant_name(name) else None
    if variant is None:
        return []
    if isinstance(variant, NoarchVariant):
        expected = "cpu" if variant.arch.backend_name == "universal" else variant.arch.backend_name
    else:
        expected = variant.arch.backend.name
    breaches = [] if backend.get("type") == expected else [f"backend {backend.get('type')!r} is not {expected!r}"]
    if expected == "cuda" and not isinstance(variant, NoarchVariant) and not backend.get("archs"):
        breaches.append("a compiled CUDA variant must list its archs")
    return breaches


def _project_breaches(subject: Subject, raw: Mapping) -> list[str]:
    if subject.project is None:
        return []
    expected = {key: getattr(subject.project, key) for key in ("name", "version", "license", "upstream", "source")}
    wrong = {key: value for key, value in expected.items() if raw.get(key) != value}
    return [f"{key} {raw.get(key)!r} is not build.toml's {value!r}" for key, value in wrong.items()]


def _raw_metadata(files: Mapping[str, bytes]) -> dict:
    try:
        raw = json.loads(files.get(METADATA, b"{}"))
    except ValueError:
        return {}
    return raw if isinstance(raw, dict) else {}


def _license(subject: Subject) -> str | None:
    raw = next(map(_raw_metadata, subject.variants.values()), {})
    return subject.project.license if subject.project else raw.get("license")


def _public_things(subject: Subject) -> list[str]:
    sources = next((trees for trees, _ in subject.parsed.values()), {})
    functions = public_names(sources["__init__.py"]) or [] if "__init__.py" in sources else []
    return [name for name in functions if name != "layers"] + (layer_names(sources) if "layers" in functions else [])


def _split_front_matter(text: str) -> tuple[dict, str]:
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if match is None:
        return {}, text
    try:
        front = yaml.safe_load(match[1])
    except yaml.YAMLError:
        return {}, text
    return (front if isinstance(front, dict) else {}), text[match.end() :]


def _was_written_in_the_cache(bytecode: Path) -> bool:
    source = bytecode.parent.parent / f"{bytecode.name.partition('.')[0]}.py"
    return source.is_symlink() and not bytecode.is_symlink()


def _ignored_by_git(root: Path, paths: list[Path]) -> set[Path]:
    if not paths:
        return set()
    names = "\n".join(str(path.relative_to(root)) for path in paths)
    try:
        command = ["git", "-C", str(root), "check-ignore", "--stdin"]
        answer = subprocess.run(command, input=names, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return set()
    return {root / line for line in answer.stdout.splitlines()}


def _some(items: list[str]) -> str:
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")
