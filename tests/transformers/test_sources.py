"""Where the kernel comes from, what happens without a network or a fitting build, and which GPUs may have it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from kernels import (
    CUDAProperties,
    Device,
    LayerRepository,
    Mode,
    register_kernel_mapping,
    use_kernel_mapping,
)

import flashqla_hub
from flashqla_hub import installation, mapping, registry
from flashqla_hub.models import HUB_NAMES, PART_NAMES, gated_delta_nets
from flashqla_hub.package.errors import PackageError
from tests.transformers.comparison import assert_close
from tests.transformers.families import tiny_model, token_ids

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model():
    return tiny_model("qwen3_5")


@pytest.fixture
def sockets_blocked(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a test that needs no network opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def repository(kernel_folder, tmp_path) -> Path:
    """A repository of its own, with the build that this machine takes."""
    variant = next(path for path in (kernel_folder, *kernel_folder.glob("build/torch-universal")) if is_variant(path))
    shutil.copytree(variant, tmp_path / "build" / variant.name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture
def sm90_name() -> str:
    """A name that has a CUDA kernel."""
    return mapping.SM90_KERNELS[0]


def is_variant(path: Path) -> bool:
    return (path / "metadata.json").is_file()


def set_capability(monkeypatch, capability: tuple[int, int] | None) -> None:
    """As if the machine had one GPU of this capability, or none; `kernels` remembers what it saw."""
    import kernels.layer.repos

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args, **kwargs: capability)
    number = None if capability is None else 10 * capability[0] + capability[1]
    monkeypatch.setattr(kernels.layer.repos, "_find_capability", lambda: number)


def registered_for_cuda(name: str) -> dict | None:
    """What `kernels` would use for a hub name on the current GPU."""
    repositories = registry._mapping().get(name, {}).get("cuda")
    return None if repositories is None else repositories.repos


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, flashqla_hub; print([name for name in ('torch', 'transformers', 'kernels') if name in sys.modules])"
    assert run_python(code).stdout.strip() == "[]"


def test_importing_is_quick_beyond_torch_and_kernels():
    code = "import time, torch, kernels; t = time.perf_counter(); import flashqla_hub; print(time.perf_counter() - t)"
    assert float(run_python(code).stdout) < 0.3


def test_unknown_attribute_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'kernelise'"):
        _ = flashqla_hub.kernelise
    assert set(flashqla_hub.__all__) <= set(dir(flashqla_hub))


@pytest.mark.parametrize("which", ["root", "build", "text"])
def test_folder_needs_no_network(model, repository, sockets_blocked, which):
    """L2: the root of a repository or its build folder, as a Path or as text."""
    source = {"root": repository, "build": repository / "build", "text": str(repository)}[which]
    ids = token_ids(1, 30)
    expected = model(ids, use_cache=False).logits
    flashqla_hub.kernelize(model, source=source)
    assert flashqla_hub.is_active(model)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)


def test_hub_name_needs_no_network_if_local_kernels_names_a_folder(repository):
    """L2: repository names go through `get_kernel`, which knows LOCAL_KERNELS; LayerRepository would ask the Hub first."""
    code = """
import socket
socket.getaddrinfo = socket.socket.connect = lambda *a, **k: 1 / 0
import flashqla_hub
from tests.transformers.families import tiny_model
model = tiny_model("qwen3_5")
flashqla_hub.kernelize(model)
model.set_use_kernels(True)
print(flashqla_hub.is_active(model))
"""
    finished = run_python(code, LOCAL_KERNELS=f"qwen/flashqla={repository}")
    assert finished.stdout.strip() == "True", finished.stderr


@pytest.mark.parametrize("way", ["kernelize", "register", "kernel_config"])
def test_missing_build_warns_and_changes_nothing(model, tmp_path, way):
    """I1, L4: a repository whose build/ is empty gives one visible warning, not a traceback and not silence."""
    (tmp_path / "build").mkdir()
    ids = token_ids(1, 30)
    expected = model(ids, use_cache=False).logits
    with pytest.warns(UserWarning, match=f"{way} replaces nothing"):
        if way == "kernelize":
            assert flashqla_hub.kernelize(model, source=tmp_path) is model
        elif way == "register":
            flashqla_hub.register(tmp_path)
        else:
            model.set_use_kernels(True, flashqla_hub.kernel_config(tmp_path))
    assert not flashqla_hub.is_active(model)
    model.set_use_kernels(True)
    assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_folder_that_does_not_exist_is_an_error(model, tmp_path):
    """A wrong path is the caller's to repair, so it is not passed over with a warning."""
    with pytest.raises((PackageError, OSError), match="nowhere"):
        flashqla_hub.kernelize(model, source=tmp_path / "nowhere")


def test_kernel_older_than_the_package_is_named(model, repository):
    """L1: a copy made before the kernel had whole layers."""
    variant = next((repository / "build").iterdir())
    metadata = json.loads((variant / "metadata.json").read_text())
    for name in ("metadata.json", "_ops.py"):
        text = (variant / name).read_text()
        (variant / name).write_text(text.replace(metadata["id"], "_flashqla_of_old"))
    layers = variant / "layers.py"
    layers.write_text(layers.read_text().replace("class Qwen3_5GatedDeltaNet", "class SomethingElse"))
    with pytest.raises(PackageError, match="has no layer Qwen3_5GatedDeltaNet, so it is older than this flashqla_hub"):
        flashqla_hub.kernelize(model, source=repository)


def test_failure_that_the_user_can_repair_is_an_error(model, monkeypatch):
    """L3: an untrusted publisher raises with the way out, and the flag is never set for the user."""
    given = []

    def untrusted(source, *, version, trust_remote_code, check_arch):
        given.append((source, version, trust_remote_code))
        raise PackageError("not trusted; pass trust_remote_code=True.") from ValueError()

    monkeypatch.setattr(mapping, "load", untrusted)
    for call in (lambda: flashqla_hub.kernelize(model), flashqla_hub.register):
        with pytest.raises(PackageError, match="trust_remote_code=True"):
            call()
    assert given == [("qwen/flashqla", 1, False)] * 2
    assert not flashqla_hub.is_active(model)


def test_trust_and_version_reach_the_loader(model, monkeypatch):
    given = []
    monkeypatch.setattr(mapping, "load", lambda source, **options: given.append(options))
    source = mapping.Source.of("qwen/flashqla", 2, ["qwen/flashqla"])
    source.module()
    source.module()
    assert given == [{"version": 2, "trust_remote_code": ["qwen/flashqla"], "check_arch": False}]


def test_model_on_the_cpu_ignores_the_gpu_beside_it(model, repository, monkeypatch):
    """L4: a build for capability 9.0 serves the CPU of a machine whose GPU is another one. The architecture check of
    `kernels` would raise, and transformers, which forgives missing files only, would not load the model."""
    variant = next((repository / "build").iterdir())
    metadata = json.loads((variant / "metadata.json").read_text())
    metadata["backend"] = {"type": "cuda", "archs": ["9.0a"]}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    set_capability(monkeypatch, (8, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("LOCAL_KERNELS", f"qwen/flashqla={repository}")
    flashqla_hub.register()
    model.set_use_kernels(True)
    assert flashqla_hub.is_active(model)


class TestCuda:
    def test_nothing_is_registered_without_a_cuda_kernel(self, kernel_folder):
        """D9: under a name without a kernel of ours, GPUs keep the default of transformers."""
        with use_kernel_mapping({}, inherit_mapping=False):
            flashqla_hub.register(kernel_folder)
            on_cuda = {name: set(devices) > {"cpu"} for name, devices in registry._mapping().items()}
            assert on_cuda == {name: name in mapping.sm90_names() for name in HUB_NAMES}

    @pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 1)])
    def test_only_capability_9_0_gets_the_kernel(self, kernel_folder, sm90_name, monkeypatch, capability):
        """L4: and it keeps it when transformers registers its defaults again for plain cuda."""
        default = LayerRepository("kernels-community/fla", layer_name=sm90_name, version=1)
        with use_kernel_mapping({}, inherit_mapping=False):
            flashqla_hub.register(kernel_folder)
            register_kernel_mapping({sm90_name: {"cuda": {Mode.INFERENCE: default, Mode.TRAINING: default}}})
            set_capability(monkeypatch, capability)
            assert registry.is_ours(registered_for_cuda(sm90_name)) == (capability == (9, 0))
            for name in set(HUB_NAMES) - {sm90_name}:
                assert "cuda" not in registry._mapping()[name] or name in mapping.sm90_names()

    def test_mapping_never_names_plain_cuda(self, sm90_name):
        for devices in mapping.layer_mapping(mapping.Source("anywhere")).values():
            assert "cuda" not in devices
            for device in devices:
                assert device == "cpu" or device.properties == CUDAProperties(90, 90)

    def test_unregister_leaves_the_intervals_of_others(self, kernel_folder, sm90_name, monkeypatch):
        others = {
            Device(type="cuda", properties=CUDAProperties(low, high)): LayerRepository(
                "kernels-community/fla", layer_name=f"from_{low}", version=1
            )
            for low, high in ((70, 75), (80, 100), (90, 120))
        }
        with use_kernel_mapping({sm90_name: others}, inherit_mapping=False):
            flashqla_hub.register(kernel_folder)
            set_capability(monkeypatch, (9, 0))
            assert registry.is_ours(registered_for_cuda(sm90_name))
            flashqla_hub.unregister()
            for capability, name in (((7, 5), "from_70"), ((9, 0), "from_80"), ((12, 0), "from_90")):
                set_capability(monkeypatch, capability)
                assert registered_for_cuda(sm90_name)[Mode.FALLBACK].layer_name == name

    def test_unregister_removes_names_that_nobody_else_registered(self, kernel_folder, sm90_name):
        with use_kernel_mapping({}, inherit_mapping=False):
            flashqla_hub.register(kernel_folder)
            flashqla_hub.unregister()
            assert registry._mapping() == {}

    @pytest.mark.parametrize(
        ("device", "capability", "words"),
        [
            ("mps", None, "serves cpu and cuda, not mps"),
        ],
    )
    def test_device_that_gets_nothing_is_named_in_one_warning(self, model, kernel_folder, device, capability, words):
        """D7: the model works on as before, and the user knows why."""
        with pytest.warns(UserWarning, match=words) as records:
            flashqla_hub.kernelize(model, source=kernel_folder, device=device)
        assert len(records) == 1
        assert not flashqla_hub.is_active(model)

    @pytest.mark.parametrize(
        ("capability", "words"), [(None, "sees no GPU"), ((8, 0), "this one has 8.0"), ((12, 1), "this one has 12.1")]
    )
    def test_other_gpu_is_named_with_what_is_needed(
        self, model, kernel_folder, sm90_name, monkeypatch, capability, words
    ):
        set_capability(monkeypatch, capability)
        with pytest.warns(UserWarning, match=f"compute capability 9.0.*{words}"):
            flashqla_hub.kernelize(model, source=kernel_folder, device="cuda")

    def test_sm90_gets_only_the_names_that_have_a_kernel(self, model, kernel_folder, sm90_name, monkeypatch):
        set_capability(monkeypatch, (9, 0))
        flashqla_hub.kernelize(model, source=kernel_folder, device="cuda")
        served = flashqla_hub.report(model).served_by("model.layers.0.linear_attn")
        ours = {name for name, by in served.items() if by == "qwen/flashqla"}
        assert sm90_name in ours and ours == set(mapping.sm90_names()) & set(served)

    @pytest.mark.parametrize("missing", [None, *PART_NAMES])
    def test_sm90_gets_the_whole_layer_once_every_part_has_a_kernel(self, model, kernel_folder, monkeypatch, missing):
        """A layer that ran one part in PyTorch would be slower than the model's own, with the kernels of others in it."""
        monkeypatch.setattr(mapping, "SM90_KERNELS", tuple(name for name in PART_NAMES if name != missing))
        set_capability(monkeypatch, (9, 0))
        flashqla_hub.kernelize(model, source=kernel_folder, device="cuda")
        found = flashqla_hub.report(model)
        assert [found.served_whole(layer) for layer in found.layers] == [missing is None] * 3

    def test_rocm_is_not_taken_for_cuda(self, model, kernel_folder, monkeypatch):
        monkeypatch.setattr(torch.version, "hip", "6.4")
        with pytest.warns(UserWarning, match="not rocm"):
            flashqla_hub.kernelize(model, source=kernel_folder, device="cuda")


class TestSwitches:
    """I1: the switches of `kernels` and transformers keep the original forwards, and are named in the warning."""

    CODE = """
import warnings
import torch, flashqla_hub
from tests.transformers.families import tiny_model, token_ids
model = tiny_model("qwen3_5")
ids = token_ids(1, 20)
expected = model(ids, use_cache=False).logits
with warnings.catch_warnings(record=True) as records:
    warnings.simplefilter("always")
    flashqla_hub.kernelize(model, source=SOURCE)
ours = [str(record.message) for record in records if "flashqla_hub" in str(record.message)]
assert torch.equal(model(ids, use_cache=False).logits, expected) and not flashqla_hub.is_active(model)
print(len(ours), ours[0], "|", flashqla_hub.report(model).parts[0].reason)
"""

    @pytest.mark.parametrize(("switch", "value"), [("DISABLE_KERNEL_MAPPING", "1"), ("USE_HUB_KERNELS", "NO")])
    def test_switch_keeps_the_original_and_is_named(self, kernel_folder, switch, value):
        finished = run_python(self.CODE.replace("SOURCE", repr(str(kernel_folder))), **{switch: value})
        assert finished.returncode == 0, finished.stderr
        count, _, text = finished.stdout.partition(" ")
        warned, _, reason = text.partition("|")
        assert count == "1" and switch in warned and switch in reason

    def test_versions_that_do_not_fit_are_named(self, model, kernel_folder, monkeypatch):
        """L1: transformers leaves its functions plain beside a `kernels` that it does not know."""
        import transformers.utils

        plain = [net._replace(replaceable={}) for net in gated_delta_nets(model)]
        monkeypatch.setattr(installation, "gated_delta_nets", lambda model: plain)
        monkeypatch.setattr(transformers.utils, "is_kernels_available", lambda: False)
        window = rf"transformers {transformers.__version__} works with kernels>=.*,<.* and not with the installed [\d.]+: pip"
        with pytest.warns(UserWarning, match=window):
            flashqla_hub.kernelize(model, source=kernel_folder)


class TestOffload:
    """D4: weights that accelerate keeps elsewhere reach the layers that use them."""

    @pytest.fixture
    def offloaded(self, model, tmp_path):
        accelerate = pytest.importorskip("accelerate")

        def offload(kind: str):
            if kind == "cpu":
                return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
            return accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))

        return offload

    @pytest.mark.parametrize("kind", ["cpu", "disk"])
    def test_kernelize_keeps_the_hooks_of_an_offloaded_model(self, model, kernel_folder, offloaded, kind):
        ids = token_ids(1, 70)
        expected = model(ids, use_cache=False).logits
        offloaded(kind)
        flashqla_hub.kernelize(model, source=kernel_folder, device="cpu")
        with torch.no_grad():
            output = model(ids, use_cache=False).logits
        assert_close(output, expected)
        norm = gated_delta_nets(model)[0].replaceable["RMSNormGated"]
        assert norm.weight.device.type == "meta" and hasattr(norm, "_hf_hook")

    def test_kernelized_offloaded_model_may_change_mode(self, model, kernel_folder, offloaded):
        ids = token_ids(1, 70)
        expected = model(ids, use_cache=False).logits
        flashqla_hub.kernelize(offloaded("cpu"), source=kernel_folder, device="cpu")
        model.train()
        model.eval()
        with torch.no_grad():
            assert_close(model(ids, use_cache=False).logits, expected)
        flashqla_hub.unregister()
        with torch.no_grad():
            assert_close(model(ids, use_cache=False).logits, expected)

    def test_transformers_itself_loses_the_hooks_when_it_kernelizes_again(self, model, offloaded):
        """A limit of transformers without any kernel of ours: with use_kernels, a change of mode drops the wrappers of all
        norms. If this test fails, transformers has repaired it."""
        model.set_use_kernels(True)
        offloaded("cpu")
        model.train()
        with pytest.raises(RuntimeError, match="meta"), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(token_ids(1, 30), use_cache=False)
