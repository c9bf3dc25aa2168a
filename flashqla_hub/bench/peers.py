"""How each implementation is called, at its best; conversions of layout and dtype stay outside the timed call."""

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..package.download import VERSION


@dataclass(frozen=True)
class Implementation:
    """One library: the distribution that it comes from, environment it wants, and factories of the timed calls.

    `forward(inputs)` returns a function of no arguments that returns (o, final state [N, HV, K, V]), and so does
    `training_forward(inputs)`, which keeps what a backward needs; `backward(inputs)` and `forward_backward(inputs)` return
    one that returns (dq, dk, dv, dg, dbeta, dh0). All but the first are None where there is none; of a variant, which is a
    library not at its best in one operation, all but that one.
    """

    name: str
    distribution: str
    module: str
    forward: Callable[[dict], Callable] | None
    backward: Callable[[dict], Callable] | None = None
    forward_backward: Callable[[dict], Callable] | None = None
    training_forward: Callable[[dict], Callable] | None = None
    compiler: str | None = None  # distribution that compiles it at the first call; its version is named too
    environment: tuple[tuple[str, str], ...] = ()
    contract: int | None = None  # version of a Hub kernel, which has no distribution of its own
    # Not None if it compiles into a cache on disk that several processes can fill at once: what those processes want besides.
    compiling: tuple[tuple[str, str], ...] | None = None
    prepares: bool = True  # may be called on every row before anything is timed, beside other processes
    folders: tuple[str, ...] = ()  # searched before the others for it and what it needs
    variant_of: str | None = None  # the implementation that it is a variant of

    def timed(self, ops: Sequence[str]) -> list[str]:
        """Those of `ops` that it has rows of: every one, though it may lack it, but of a variant the one that it is for."""
        return [op for op in ops if self.variant_of is None or getattr(self, op) is not None]

    def version(self) -> str:
        """As in "0.1.3 (tilelang 0.1.15)"."""
        if self.contract is not None:
            return str(self.contract)
        beside = f" ({self.compiler} {self._version_of(self.compiler)})" if self.compiler else ""
        return self._version_of(self.distribution) + beside

    def missing(self) -> str | None:
        """Why this machine cannot run it, or None."""
        found = importlib.machinery.PathFinder.find_spec(self.module, list(self.folders))
        if found is None and importlib.util.find_spec(self.module) is None:
            return f"{self.distribution} is not installed"
        return None

    def _version_of(self, distribution: str) -> str:
        found = importlib.metadata.distributions(name=distribution, path=[*self.folders, *sys.path])
        return next((each.version for each in found), "?")


def _flash_qla(d):
    from flash_qla import chunk_gated_delta_rule_fwd

    def call():
        out = chunk_gated_delta_rule_fwd(*_tensors(d), **_options(d), output_h=False)
        return out[2], out[4]

    return call


def _flash_qla_backward(d, keeps_cache=True):
    """With the cache of context parallelism that its forward keeps by request, as its autograd function requests it, or without.

    Without it the backward computes the states at the cuts again.
    """
    from flash_qla import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    g, A, _, _, _, cache = chunk_gated_delta_rule_fwd(*_tensors(d), **_options(d), enable_fwd_cp_cache=keeps_cache)
    q, k, v, _, beta = _tensors(d)
    options = {name: x for name, x in _options(d).items() if name != "output_final_state"}

    def call():
        dq, dk, dv, dbeta, dg, dh0 = chunk_gated_delta_rule_bwd(
            q, k, v, g, beta, A, d["do"], dht=d["dht"], cp_cache=cache, **options
        )
        return dq, dk, dv, dg, dbeta, dh0

    return call


def _flash_qla_forward_backward(d):
    from flash_qla import chunk_gated_delta_rule

    return _through_autograd(chunk_gated_delta_rule, d, _options(d))


def _flash_qla_training_forward(d):
    from flash_qla import chunk_gated_delta_rule

    return _with_leaves(chunk_gated_delta_rule, d, _options(d))


def _flashinfer(d):
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    alpha, state = d["g"].exp()[0], d["h0"].transpose(-1, -2).contiguous()

    def call():
        o, final = chunk_gated_delta_rule(
            q=d["q"][0],
            k=d["k"][0],
            v=d["v"][0],
            g=alpha,
            beta=d["beta"][0],
            scale=d["scale"],
            initial_state=state,
            cu_seqlens=d["cu_seqlens"],
            output_final_state=True,
            max_seqlen=d["max_length"],  # its default is the total, and plans for that
        )
        return o[None], final.transpose(-1, -2)

    return call


def _fla(d):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return partial(chunk_gated_delta_rule, *_tensors(d), **_options(d, "cu_seqlens_int64"))


def _fla_forward_backward(d):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return _through_autograd(chunk_gated_delta_rule, d, _options(d, "cu_seqlens_int64"))


def _fla_training_forward(d):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return _with_leaves(chunk_gated_delta_rule, d, _options(d, "cu_seqlens_int64"))


def _flashqla(d):
    return partial(_our_kernel().chunk_gated_delta_rule, *_tensors(d), **_options(d))


def _flashqla_backward(d):
    kernel = _our_kernel()
    residuals = kernel.chunk_gated_delta_rule_fwd(*_tensors(d), **_options(d)).residuals
    options = {name: x for name, x in _options(d).items() if name != "output_final_state"}
    return partial(kernel.chunk_gated_delta_rule_bwd, *_tensors(d), residuals, d["do"], d["dht"], **options)


def _flashqla_forward_backward(d):
    return _through_autograd(_our_kernel().chunk_gated_delta_rule, d, _options(d))


def _flashqla_training_forward(d):
    return _with_leaves(_our_kernel().chunk_gated_delta_rule, d, _options(d))


def _our_kernel():
    from kernels import get_local_kernel

    return get_local_kernel(Path(os.environ["FLASHQLA_BENCH_SOURCE"]))


def _tensors(d: dict) -> tuple:
    return tuple(d[name] for name in ("q", "k", "v", "g", "beta"))


def _options(d: dict, bounds: str = "cu_seqlens") -> dict:
    return {"scale": d["scale"], "initial_state": d["h0"], "output_final_state": True, "cu_seqlens": d[bounds]}


def _with_leaves(function: Callable, d: dict, options: dict) -> Callable:
    """Forward of a public function whose every input wants a gradient."""
    *tensors, h0 = _leaves(d)
    return partial(function, *tensors, **{**options, "initial_state": h0})


def _through_autograd(function: Callable, d: dict, options: dict) -> Callable:
    """Forward and backward of a public function, from leaves to gradients."""
    import torch

    leaves = _leaves(d)

    def call():
        o, state = function(*leaves[:5], **{**options, "initial_state": leaves[5]})
        return torch.autograd.grad((o, state), leaves, (d["do"], d["dht"]))

    return call


def _leaves(d: dict) -> list:
    return [x.detach().requires_grad_() for x in (*_tensors(d), d["h0"])]


IMPLEMENTATIONS = (
    Implementation(
        "flashqla",
        "kernels",
        "kernels",
        _flashqla,
        _flashqla_backward,
        _flashqla_forward_backward,
        _flashqla_training_forward,
        contract=VERSION,
    ),
    Implementation(
        "flash-qla",
        "flash-qla",
        "flash_qla",
        _flash_qla,
        _flash_qla_backward,
        _flash_qla_forward_backward,
        _flash_qla_training_forward,
        compiler="tilelang",
        compiling=(),
    ),
    Implementation(
        "flash-qla-uncached",
        "flash-qla",
        "flash_qla",
        None,
        partial(_flash_qla_backward, keeps_cache=False),
        compiler="tilelang",
        compiling=(),
        variant_of="flash-qla",
    ),
    Implementation("flashinfer", "flashinfer-python", "flashinfer", _flashinfer, compiler="nvidia-cutlass-dsl"),
    # FLA calls FlashQLA by itself where it is installed; switched off, it is a peer of its own.
    Implementation(
        "fla",
        "flash-linear-attention",
        "fla",
        _fla,
        forward_backward=_fla_forward_backward,
        training_forward=_fla_training_forward,
        compiler="triton",
        environment=(("FLA_FLASH_QLA", "0"),),
        compiling=(("FLA_CACHE_RESULTS", "0"),),  # what it tunes beside other processes is not to be remembered
        prepares=False,
    ),
)
BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}
