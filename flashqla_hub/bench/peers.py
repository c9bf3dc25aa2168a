"""How each implementation is called, at its best; conversions of layout and dtype stay outside the timed call."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..package.download import VERSION


@dataclass(frozen=True)
class Implementation:
    """One library: the distribution that it comes from, environment it wants, and a factory of the timed call.

    `forward(inputs)` returns a function of no arguments that returns (o, final state [N, HV, K, V]).
    """

    name: str
    distribution: str
    module: str
    forward: Callable[[dict], Callable]
    environment: tuple[tuple[str, str], ...] = ()
    contract: int | None = None  # version of a Hub kernel, which has no distribution of its own
    compiles: bool = False  # at the first call, into a cache on disk that several processes can fill at once

    def version(self) -> str:
        return importlib.metadata.version(self.distribution) if self.contract is None else str(self.contract)

    def missing(self) -> str | None:
        """Why this machine cannot run it, or None."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.distribution} is not installed"
        return None


def _flash_qla(d):
    from flash_qla import chunk_gated_delta_rule_fwd

    def call():
        out = chunk_gated_delta_rule_fwd(
            d["q"],
            d["k"],
            d["v"],
            d["g"],
            d["beta"],
            scale=d["scale"],
            initial_state=d["h0"],
            output_final_state=True,
            output_h=False,
            cu_seqlens=d["cu_seqlens"],
        )
        return out[2], out[4]

    return call


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
        )
        return o[None], final.transpose(-1, -2)

    return call


def _fla(d):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def call():
        return chunk_gated_delta_rule(
            d["q"],
            d["k"],
            d["v"],
            g=d["g"],
            beta=d["beta"],
            scale=d["scale"],
            initial_state=d["h0"],
            output_final_state=True,
            cu_seqlens=d["cu_seqlens_int64"],
        )

    return call


def _flashqla(d):
    from kernels import get_local_kernel

    kernel = get_local_kernel(Path(os.environ["FLASHQLA_BENCH_SOURCE"]))

    def call():
        return kernel.chunk_gated_delta_rule(
            d["q"],
            d["k"],
            d["v"],
            d["g"],
            d["beta"],
            scale=d["scale"],
            initial_state=d["h0"],
            output_final_state=True,
            cu_seqlens=d["cu_seqlens"],
        )

    return call


IMPLEMENTATIONS = (
    Implementation("flashqla", "kernels", "kernels", _flashqla, contract=VERSION),
    Implementation("flash-qla", "flash-qla", "flash_qla", _flash_qla, compiles=True),
    Implementation("flashinfer", "flashinfer-python", "flashinfer", _flashinfer),
    # FLA calls FlashQLA by itself where it is installed; switched off, it is a peer of its own.
    Implementation("fla", "flash-linear-attention", "fla", _fla, (("FLA_FLASH_QLA", "0"),), compiles=True),
)
BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}
