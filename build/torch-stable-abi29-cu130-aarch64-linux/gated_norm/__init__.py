from .api import rms_norm_gated

__all__ = ["rms_norm_gated"]
