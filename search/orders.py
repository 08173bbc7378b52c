"""The orders in which a simulation serves its tasks (`search.simulate.simulator` says what each means)."""

from __future__ import annotations

from typing import Literal, get_args

Order = Literal["program", "fifo", "priority", "priority-tic", "priority-tac"]
ORDERS: tuple[Order, ...] = get_args(Order)
