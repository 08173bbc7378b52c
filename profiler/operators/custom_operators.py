"""Custom operators by name, for parts of operators that no ATen operator computes.

Arguments have the names of the ATen operator that is split. A call read back from its key has no bindings: then a part
is taken to start at the whole tensor's first element, which costs the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from graph.calls import LocalCall
from graph.errors import CostError
from graph.intervals import IndexSet, Region
from graph.rules.reductions import LOSSES
from profiler.operators.attention import attention
from profiler.operators.batch_norm import (
    batch_norm,
    batch_norm_apply,
    fixed_moments,
    moments,
    running_statistics,
)
from profiler.operators.counter_rng import dropout, keep_mask, random_numbers, whole_region
from profiler.operators.dtypes import HALVES, sum_dtype, torch_dtype
from profiler.operators.gather_scatter import embedding_bag, gather, ragged_embedding_bag, scatter
from profiler.operators.likelihoods import exp_sums, nll_loss, nll_sums, softmax_nll_sums, weight_of_targets
from profiler.operators.merged import merged_convolution, merged_linear
from profiler.operators.transposed import conv_transpose
from profiler.operators.windows import avg_pool, convolution, max_pool

if TYPE_CHECKING:
    from profiler.operators.compiling import ExecutionContext

NEED_CONTEXT = frozenset(
    f"soapstone.{name}" for name in ("dropout", "attention", "random", "constant", "arange")
)


def _embedding(
    weight: torch.Tensor, indices: torch.Tensor, padding_idx: int, start: int = 0, **_settings: Any
) -> torch.Tensor:
    """Look up the rows [start, start + rows) of a vocabulary; other indices give zeros."""
    local = indices - start
    inside = (local >= 0) & (local < weight.shape[0])
    rows = functional.embedding(
        torch.where(inside, local, 0),
        weight,
        padding_idx - start if start <= padding_idx < start + weight.shape[0] else None,
    )
    return rows * inside.unsqueeze(-1)


def _lstm_cell(
    input: torch.Tensor,  # noqa: A002 - ATen's name
    hx: Sequence[torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """LSTM cell for some of the hidden units: `hx` is the whole hidden and the local cell state."""
    if input.is_cuda:
        gates = functional.linear(input, w_ih), functional.linear(hx[0], w_hh)
        hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell.default(*gates, hx[1], b_ih, b_hh)
        return hidden, cell
    gates_sum = functional.linear(hx[0], w_hh, b_hh) + functional.linear(input, w_ih, b_ih)
    enter, forget, new, leave = gates_sum.chunk(4, 1)
    cell = forget.sigmoid() * hx[1] + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru_cell(
    input: torch.Tensor,  # noqa: A002 - ATen's name
    hx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
    *,
    hidden: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """GRU cell for the hidden units in the intervals `hidden`; `hx` is the whole state."""
    reset_x, update_x, new_x = functional.linear(input, w_ih, b_ih).chunk(3, 1)
    reset_h, update_h, new_h = functional.linear(hx, w_hh, b_hh).chunk(3, 1)
    intervals = ((0, w_ih.shape[0] // 3),) if hidden is None else hidden
    own = torch.cat([hx[:, start:stop] for start, stop in intervals], 1)
    update = (update_x + update_h).sigmoid()
    new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
    return (own - new) * update + new


def _rnn_cell(
    activation: Callable[[torch.Tensor], torch.Tensor],
    input: torch.Tensor,  # noqa: A002 - ATen's name
    hx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain recurrent cell for some of the hidden units; `hx` is the whole state."""
    return activation(functional.linear(hx, w_hh, b_hh) + functional.linear(input, w_ih, b_ih))


def _mean(
    self: torch.Tensor, *, dim: Sequence[int], keepdim: bool, dtype: str | None, count: int
) -> torch.Tensor:
    kind = self.dtype if dtype is None else torch_dtype(dtype)
    if kind in HALVES:
        return (torch.sum(self, list(dim), keepdim, dtype=torch.float32) / count).to(kind)
    return torch.sum(self, list(dim), keepdim, dtype=kind) / count


def _mean_loss(function: Callable[..., torch.Tensor], count: int, **arguments: Any) -> torch.Tensor:
    if arguments["self"].dtype in HALVES:
        losses = function(**{**arguments, "reduction": 0})
        return (losses.sum(dtype=torch.float32) / count).to(losses.dtype)
    return function(**arguments) / count


def _cross_entropy_sums(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """Return the sum of weighted losses and the sum of the weights of the targets that are not ignored."""
    kind = sum_dtype(self.dtype)
    # The sum of many losses in a format of 16 bits is rounded, or infinite.
    reduction = "none" if self.dtype in HALVES else "sum"
    losses = functional.cross_entropy(
        self, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    total = losses.sum(dtype=kind) if self.dtype in HALVES else losses.to(kind)
    with torch.no_grad():
        if target.is_floating_point():  # probabilities: torch divides by the batch size
            count = total.new_tensor(self.numel() // max(self.shape[min(1, self.dim() - 1)], 1), dtype=kind)
        else:
            count = weight_of_targets(target, weight, ignore_index, kind)
    return torch.stack((total, count))


def _ratio(self: torch.Tensor, dtype: str) -> torch.Tensor:
    return (self[0] / self[1]).to(torch_dtype(dtype))


def _dropout(
    self: torch.Tensor,
    p: float,
    context: ExecutionContext,
    region: Region | None = None,
    shape: tuple[int, ...] = (),
    operator: int = 0,
) -> torch.Tensor:
    if region is None:
        region, shape = whole_region(self.shape)
    mask = keep_mask(region, shape, p, (context.seed, context.step, operator), self.device)
    return dropout(self, mask, p)


def _random(
    distribution: str,
    size: Sequence[int],
    dtype: str,
    context: ExecutionContext,
    region: Region | None = None,
    shape: tuple[int, ...] = (),
    operator: int = 0,
) -> torch.Tensor:
    if region is None:
        region, shape = whole_region(size)
    key = (context.seed, int(context.step), operator)
    return random_numbers(distribution, region, shape, key, (torch_dtype(dtype), context.device))


def _constant(
    data: Sequence[Any], size: Sequence[int], dtype: str, context: ExecutionContext
) -> torch.Tensor:
    make = _constant_of if context.device.type == "cpu" else _kept_constant_of
    return make(tuple(data), torch_dtype(dtype), context.device).reshape(tuple(size))


def _constant_of(data: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype, device=device)


# A copy from the host's memory makes the host wait for a GPU: it is made once.
_kept_constant_of = lru_cache(maxsize=256)(_constant_of)


def _arange(
    count: int,
    start: float,
    step: float,
    dtype: str,
    context: ExecutionContext,
    indexes: IndexSet | None = None,
) -> torch.Tensor:
    """Make the numbers that stand at `indexes` of a range."""
    kind = torch_dtype(dtype)
    exact = torch.float64 if kind.is_floating_point else torch.int64
    positions = [torch.arange(low, high, device=context.device) for low, high in indexes or ((0, count),)]
    return (torch.cat(positions).to(exact) * step + start).to(kind)


def _index_put(
    self: None,  # noqa: ARG001 - another part adds it
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool,  # noqa: FBT001 - ATen's name; only sums have such parts
    size: Sequence[int],
    dtype: str,
) -> torch.Tensor:
    zeros = values.new_zeros(tuple(size), dtype=torch_dtype(dtype))
    result: torch.Tensor = torch.ops.aten.index_put.default(zeros, list(indices), values, accumulate)
    return result


def _index_add(
    self: None,  # noqa: ARG001 - another part adds it
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    alpha: float,
    size: Sequence[int],
) -> torch.Tensor:
    return source.new_zeros(tuple(size)).index_add(dim, index, source, alpha=alpha)


def _grouped_product(
    self: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor, row: int = 0, expert: int = 0
) -> torch.Tensor:
    """Multiply runs of rows by one weight each: local rows start at `row`, local weights at `expert`."""
    if _has_grouped_kernel(self, mat2):
        return _grouped_product_at_once(self, mat2, offs, row, expert)
    rows, columns = self.shape[0], mat2.shape[2]
    # On a GPU the host waits for the ends here.
    ends = (offs.long() - row).clamp(0, rows).tolist()
    first = ends[expert - 1] if expert else 0
    ends = ends[expert : expert + mat2.shape[0]]
    sizes = [end - start for start, end in itertools.pairwise([first, *ends])]
    before, *runs, behind = self.split([first, *sizes, rows - ends[-1]])
    products = [run @ weight for run, weight in zip(runs, mat2.unbind(0), strict=True)]
    return torch.cat(
        [
            before.new_zeros((before.shape[0], columns)),
            *products,
            behind.new_zeros((behind.shape[0], columns)),
        ]
    )


def _has_grouped_kernel(self: torch.Tensor, mat2: torch.Tensor) -> bool:
    """Return whether torch has one kernel for all groups of these operands: on GPUs, in bfloat16, in rows of 16 bytes.

    Source: torch 2.13, aten/src/ATen/native/GroupedMMUtils.h and cuda/GroupedBlas.cpp.
    """
    return (
        self.is_cuda
        and self.dtype == mat2.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(self.device) >= (8, 0)
        and all(size % 8 == 0 for size in mat2.shape[1:])
        and mat2.contiguous().data_ptr() % 16 == 0
    )


def _grouped_product_at_once(
    self: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor, row: int, expert: int
) -> torch.Tensor:
    """As `_grouped_product`, without reading the ends on the host.

    The rows of other experts, before and behind, count to the first and the last of these, as zeros; the kernel leaves
    rows that are of no group unwritten.
    """
    rows = self.shape[0]
    ends = (offs - row).clamp(0, rows).to(torch.int32)
    own = ends[expert : expert + mat2.shape[0]]
    places = torch.arange(rows, dtype=torch.int32, device=self.device)
    inside = places < own[-1]
    if expert:
        inside = inside & (places >= ends[expert - 1])
    closed = torch.cat([own[:-1], torch.full_like(own[-1:], rows)])
    chosen = torch.where(inside.unsqueeze(1), self, 0)
    product = functional.grouped_mm(chosen, mat2.contiguous(), offs=closed)
    return torch.where(inside.unsqueeze(1), product, 0)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "conv1d": partial(convolution, torch.conv1d),
    "conv2d": partial(convolution, torch.conv2d),
    "conv3d": partial(convolution, torch.conv3d),
    "max_pool1d": partial(max_pool, torch.max_pool1d),
    "max_pool2d": partial(max_pool, torch.max_pool2d),
    "max_pool3d": partial(max_pool, torch.max_pool3d),
    "avg_pool1d": partial(avg_pool, functional.avg_pool1d),
    "avg_pool2d": partial(avg_pool, functional.avg_pool2d),
    "avg_pool3d": partial(avg_pool, functional.avg_pool3d),
    "conv_transpose1d": partial(conv_transpose, torch.conv_transpose1d),
    "conv_transpose2d": partial(conv_transpose, torch.conv_transpose2d),
    "conv_transpose3d": partial(conv_transpose, torch.conv_transpose3d),
    "embedding": _embedding,
    "embedding_bag": embedding_bag,
    "ragged_embedding_bag": ragged_embedding_bag,
    "gather": gather,
    "scatter": scatter,
    "nll_loss": nll_loss,
    "nll_sums": nll_sums,
    "exp_sums": exp_sums,
    "softmax_nll_sums": softmax_nll_sums,
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
    "rnn_tanh_cell": partial(_rnn_cell, torch.tanh),
    "rnn_relu_cell": partial(_rnn_cell, torch.relu),
    "attention": attention,
    "merged_linear": merged_linear,
    **dict.fromkeys(("merged_conv1d", "merged_conv2d", "merged_conv3d"), merged_convolution),
    "mean": _mean,
    "cross_entropy_sums": _cross_entropy_sums,
    "ratio": _ratio,
    "dropout": _dropout,
    "random": _random,
    "constant": _constant,
    "arange": _arange,
    "index_put": _index_put,
    "index_add": _index_add,
    "grouped_mm": _grouped_product,
    "moments": moments,
    "fixed_moments": fixed_moments,
    "batch_norm_apply": batch_norm_apply,
    "batch_norm": batch_norm,
    "running_statistics": running_statistics,
}


def resolve(call: LocalCall) -> Callable[..., Any]:
    """Return the function of a custom operator, its bindings filled in.

    Raises:
        CostError: there is no such operator.
    """
    name = call.target.removeprefix("soapstone.")
    if name in LOSSES:
        return partial(_mean_loss, getattr(torch.ops.aten, name).default)
    if name not in _FUNCTIONS:
        raise CostError(
            f"{call.target}: unknown, known are {', '.join(sorted(_FUNCTIONS))}; import the model anew"
        )
    function = _FUNCTIONS[name]
    return partial(function, **dict(call.bindings)) if call.bindings else function
