"""One rank of DistributedDataParallel on a network of the benchmark `wire`, under torchrun; rank 0 prints its step."""

from __future__ import annotations

import json
import statistics
import sys
import time


def main(network: str, steps: int) -> None:
    """Train on this rank's part of the samples; print the median step in seconds as JSON."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from scripts.benchmarks import wire
    from scripts.benchmarks.runtime import LEARNING_RATE, sgd_step

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module, args, _ = getattr(wire, network)()
    part = tuple(tensor.tensor_split(world_size)[rank].contiguous() for tensor in args)
    replica = DistributedDataParallel(module)
    step = sgd_step(replica, part, LEARNING_RATE)
    times_s = []
    for _ in range(1 + steps):
        dist.barrier()
        began = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps({"median_s": statistics.median(times_s[1:])}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
