"""Paged-attention kernels: one folder per operation, one file per lowering.

The operations are `pallas_kernels.kv_write.kv_write`, `pallas_kernels.paged_decode.paged_decode` and
`pallas_kernels.paged_prefill.paged_prefill`.
"""

from pallas_kernels.dispatch import Choice, KernelUnavailable
from pallas_kernels.pages import KVPages, empty_pages
from pallas_kernels.spec import AttentionSpec

__all__ = ["AttentionSpec", "Choice", "KVPages", "KernelUnavailable", "empty_pages"]
