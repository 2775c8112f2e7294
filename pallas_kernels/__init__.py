"""Paged-attention kernels: one folder per operation, one file per lowering."""
