"""The numbers that FlexFlow's paper reports.

Source: FlexFlow (arXiv:1807.05358), evaluation; of its plots only these ranges are known.
"""

from __future__ import annotations

from dataclasses import dataclass

from scripts.studies.cells import K80, P100

# The range of speedups that count as "about equal".
ABOUT_EQUAL = (0.9, 1.1)


@dataclass(frozen=True, slots=True)
class Reported:
    """A range of speedups of the found strategy over another one, of one network on one cluster."""

    network: str
    topology: str
    devices: int
    over: str
    low: float
    high: float

    def verdict(self, speedup: float) -> str:
        """Return where a speedup, rounded to two decimals, lies."""
        rounded = round(speedup, 2)
        if rounded < self.low:
            return "below"
        return "above" if rounded > self.high else "within"


def _over_usual(network: str) -> tuple[float, float]:
    return ABOUT_EQUAL if network == "resnet101" else (1.3, 3.3)


def _over_optcnn(network: str) -> tuple[float, float]:
    return ABOUT_EQUAL if network in ("alexnet", "resnet101") else (1.2, 1.6)


_NETWORKS = ("alexnet", "inception", "resnet101", "rnntc", "rnnlm", "nmt")

# 1.3 to 3.3 is over data parallelism and experts, on any size of both clusters; held against the largest sizes here.
# OptCNN: 16 P100. NMT on 64 K80: the iteration is 1.7 to 2.4 times shorter.
REPORTED: tuple[Reported, ...] = (
    *(
        Reported(network, topology, devices, over, *_over_usual(network))
        for topology, devices in ((P100, 16), (K80, 64))
        for network in _NETWORKS
        for over in ("data-parallel", "expert")
        if (network, topology) != ("nmt", K80)
    ),
    *(Reported("nmt", K80, 64, over, 1.7, 2.4) for over in ("data-parallel", "expert")),
    *(Reported(network, P100, 16, "optcnn", *_over_optcnn(network)) for network in _NETWORKS),
)

# NMT on 64 K80, one iteration: (bytes transferred, seconds that all devices together compute).
NMT_TRANSFERS = {
    "data-parallel": (65.8e9, 35.7),
    "expert": (24.2e9, 28.2),
    "found": (12.1e9, 28.7),
}
