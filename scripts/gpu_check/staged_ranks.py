"""Several ranks on one GPU, which NCCL refuses: their messages go through the host, over gloo."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.gpu_check.report import PieceResult, Row, add_row, judged

if TYPE_CHECKING:
    import torch

    from runtime.jobs.job import Job

# Of one strategy.
LIMIT_S = 120.0
NETWORKS = ("mlp", "alexnet", "gpt2")
RANKS = (2, 4)
# Each writes to its first argument.
COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all_single",
)  # fmt: skip


class _Staged:
    """A work of gloo on the host, whose results are copied to the GPU when it is waited for."""

    def __init__(self, works: Sequence[Any], results: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._works, self._results = list(works), list(results)

    def wait(self) -> None:
        """Wait, and copy once."""
        for work in self._works:
            work.wait()
        for tensor, staged in self._results:
            tensor.copy_(staged)
        self._works, self._results = [], []


def stage_through_host() -> None:
    """Let this process's `torch.distributed` carry tensors of a GPU over gloo, for the rest of its life."""
    import torch.distributed as dist

    from runtime import communication

    initialize = dist.init_process_group

    def over_gloo(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        del backend, device_id
        initialize("gloo", *args, **kwargs)

    dist.init_process_group = over_gloo
    for name in COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, _staged(getattr(dist, name)))
    for own, name in (("_all_gather", "all_gather"), ("_reduce_scatter", "reduce_scatter")):
        single = getattr(dist, f"{name}_single", None)
        other = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[name]
        setattr(communication, own, single or getattr(dist, other))
    vars(dist).update(batch_isend_irecv=_staged_messages(dist.batch_isend_irecv))


def _staged(operation: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        staged = [item.cpu() if isinstance(item, torch.Tensor) else item for item in args]
        work = operation(*staged, async_op=True, **kwargs)
        done = _Staged([work], [(args[0], staged[0])])
        if async_op:
            return done
        done.wait()
        return None

    return call


def _staged_messages(start: Callable[..., Any]) -> Callable[[Sequence[Any]], list[Any]]:
    import torch.distributed as dist

    def call(operations: Sequence[Any]) -> list[Any]:
        staged, results = [], []
        for operation in operations:
            tensor = operation.tensor.cpu()
            if operation.op.__name__ == "irecv":
                results.append((operation.tensor, tensor))
            staged.append(dist.P2POp(operation.op, tensor, operation.peer, operation.group))
        return [_Staged(start(staged), results)]

    return call


def check(gpu: int, *, quick: bool) -> PieceResult:
    """Verify strategies of two and four ranks that share the GPU: loss and every gradient."""
    rows: list[Row] = []
    for name in NETWORKS[:1] if quick else NETWORKS:
        for count in RANKS[:1] if quick else RANKS:
            for strategy in ("data parallel", "expert"):
                error = _verified(name, count, strategy, gpu)
                add_row(rows, {"network": name, "ranks": count, "strategy": strategy, "error": error})
    return judged(rows, "verified")


def _job(name: str, count: int, strategy: str) -> Job:
    from app.services.models.models import import_graph, requested_model
    from graph.training import Training
    from runtime.jobs.job import Job
    from runtime.jobs.models import ModelReference
    from search.space import baselines

    model = requested_model(name, "small", None, "float32")
    imported = import_graph(model, batch_norm="synchronized")
    chosen = baselines.data_parallel if strategy == "data parallel" else baselines.expert
    return Job(
        graph=imported.graph,
        strategy=chosen(imported.graph, count),
        node_of=(0,) * count,
        training=Training(batch_size=imported.batch_size),
        model=ModelReference("app.services.models.models:build_model", model.factory_keywords),
        iterations=1,
        warmup=0,
        verify=True,
    ).without_caches()


def _verified(name: str, count: int, strategy: str, gpu: int) -> str:
    """Return why a strategy is not verified, or nothing."""
    job = _job(name, count, strategy)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(count)]
        meeting = str(Path(folder) / "meeting")
        processes = [
            context.Process(target=_rank, args=(far, job, rank, count, meeting, gpu), daemon=True)
            for rank, (_, far) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, far in pipes:
            far.close()  # so that the end of a rank is the end of its pipe
        deadline = time.monotonic() + LIMIT_S
        try:
            errors = [
                near.recv()
                if near.poll(max(0.0, deadline - time.monotonic()))
                else f"no answer in {LIMIT_S:.0f} s"
                for near, _ in pipes
            ]
        except EOFError:
            errors = ["a rank ended without a word"]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return next((error for error in errors if error), "")


def _rank(answer: Connection, job: Job, rank: int, count: int, meeting: str, gpu: int) -> None:
    try:
        import torch
        import torch.distributed as dist

        from runtime.jobs.job import run_job
        from runtime.launch.processes import join_group

        torch.cuda.set_device(gpu)
        stage_through_host()
        store = dist.FileStore(meeting, count)  # type: ignore[attr-defined]
        join_group(f"cuda:{gpu}", LIMIT_S, store=store, rank=rank, size=count)
        result = run_job(job, f"cuda:{gpu}", LIMIT_S)
        verified = result is None or (result.verification is not None and result.verification.ok)
        answer.send("" if verified else "loss or gradients differ")
    except BaseException:
        answer.send(traceback.format_exc().strip().splitlines()[-1][:300])
