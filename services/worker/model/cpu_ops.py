"""The layer operations as compiled kernels: each reads and writes its tensors once."""

import torch
from torch import Tensor

from services.worker.kernels.launch import Kernel
from services.worker.kernels.layer import add_and_norm_kernel, rotate_kernel, silu_and_mul_kernel

# Rows from which waking a second thread pays: below, one thread is through in the time that takes.
_MIN_PARALLEL_ROWS = 4


class CpuOps:
    """float32 and bfloat16 on the CPU; see LayerOps."""

    def __init__(self, rotary_table: Tensor, rms_norm_eps: float) -> None:
        assert rotary_table.device.type == "cpu"
        self._rotary_table = rotary_table
        self._eps = torch.tensor([rms_norm_eps], dtype=torch.float32)
        self._num_threads = torch.get_num_threads()

    def add_and_norm(self, residual: Tensor, update: Tensor | None, weight: Tensor) -> Tensor:
        num_rows, width = residual.shape
        kernel = add_and_norm_kernel(width, weight.dtype == torch.bfloat16, update is not None)
        out = torch.empty(num_rows, width, dtype=weight.dtype)
        self._run(
            kernel,
            num_rows,
            residual.data_ptr(),
            0 if update is None else update.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            num_rows,
            self._eps.data_ptr(),
        )
        return out

    def rotate_(self, heads: Tensor, num_q_heads: int, positions: Tensor, norms: tuple[Tensor, Tensor] | None) -> None:
        num_tokens, num_heads, head_dim = heads.shape
        q_norm, k_norm = (0, 0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
        self._run(
            rotate_kernel(head_dim, heads.dtype == torch.bfloat16, norms is not None),
            num_tokens,
            heads.data_ptr(),
            heads.stride(0),
            num_tokens,
            num_heads,
            num_q_heads,
            self._rotary_table.data_ptr(),
            positions.data_ptr(),
            q_norm,
            k_norm,
            self._eps.data_ptr(),
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, width)
        kernel = silu_and_mul_kernel(gate_up.dtype == torch.bfloat16)
        self._run(kernel, num_rows, gate_up.data_ptr(), out.data_ptr(), num_rows, width)
        return out

    def _run(self, kernel: Kernel, num_rows: int, *arguments: int) -> None:
        if num_rows < _MIN_PARALLEL_ROWS:
            kernel.run_here(*arguments)
        else:
            kernel.run(self._num_threads, *arguments)
