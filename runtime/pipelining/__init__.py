"""Strategies with pipeline stages as files of torch.distributed.pipelining."""
