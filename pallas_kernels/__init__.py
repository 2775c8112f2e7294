"""Paged-attention kernels: one folder per operation, one file per lowering.

    from pallas_kernels.kv_write import kv_write
    from pallas_kernels.paged_decode import paged_decode
    from pallas_kernels.paged_prefill import paged_prefill
"""

from pallas_kernels.dispatch import Choice, KernelUnavailable
from pallas_kernels.pages import KVPages, empty_pages
from pallas_kernels.spec import AttentionSpec

__all__ = ["AttentionSpec", "Choice", "KVPages", "KernelUnavailable", "empty_pages"]
