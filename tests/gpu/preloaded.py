"""Read once, before processes are forked from a server: which operators have a kernel for CUDA."""

from __future__ import annotations

from tests.gpu.native_functions import has_cuda_kernel

has_cuda_kernel("add.Tensor")
