"""The readers of `kernels` for metadata.json, digests and build.toml, wherever its version keeps them.

`Build` is None on kernels 0.16, which has no reader for build.toml.
"""

try:
    from kernels._rust import Build, Digest, DigestAlgorithm, DigestValidationError, Metadata
except ImportError:
    from kernels_data import Digest, DigestAlgorithm, DigestValidationError, Metadata

    Build = None

__all__ = ["Build", "Digest", "DigestAlgorithm", "DigestValidationError", "Metadata"]
