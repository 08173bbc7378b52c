"""The cells of the study: one network on some devices of one cluster, searched once.

Source: FlexFlow (arXiv:1807.05358), evaluation: six networks, batch 64 (AlexNet 256), 1 to 16 P100 and 1 to 64 K80.
Whether that batch is of all devices or of each is not said in what we know of it. From data parallelism to the experts'
strategy the computing of NMT on 64 K80 falls by a fifth in the paper; on our models by a third with the batch of each
device, by far more with that of all. So the study's cells hold the batch of a device constant; the zoo's hold that of
all devices constant, which is the other reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graph.errors import UsageError
from graph.zoo import zoo_entry, zoo_names

P100, K80 = "p100-cluster", "k80-cluster"
CLUSTERS = {P100: (1, 2, 4, 8, 16), K80: (1, 2, 4, 8, 16, 32, 64)}
"""The paper's clusters, as packaged topologies, and the numbers of their devices that the study takes."""
PAPER_NETWORKS = ("alexnet", "inception", "resnet101", "rnntc", "rnnlm", "nmt")
RECURRENT = ("rnntc", "rnnlm", "nmt")
ZOO_PLACES = ((P100, 4), (P100, 16), (K80, 64))
"""Where the whole zoo is searched."""
SMALLER_BATCHES = {"bert-large": 64, "gpt2": 16}
"""Of networks of whose strategies at the published batch none was met that 4 P100 can hold."""

# OptCNN joins the walk on so many devices at most, and where the paper has it: on more, its tables take minutes on
# networks of many different layers. The others are searched with it anywhere.
OPTCNN_DEVICES = {"inception": 4, "resnet101": 4, "densenet121": 4, "bert-large": 16, "gpt2": 16}
OPTCNN_PLACE = (P100, 16)

# The walk's budget, by number of devices up to which it counts: proposals are dearer on more devices.
PROPOSALS = ((8, 3000), (16, 2000), (64, 1500))
# Chains share it. They start from data parallelism, the experts' strategy, a single device, and at random, in this
# order; OptCNN's strategy and the experts' for recurrent networks are starts of one more chain each, with as much.
STARTS = ("data-parallel", "expert", "single-device", "random")
STUDY_CHAINS, ZOO_CHAINS = 2, 4
QUICK_PROPOSALS = 80
QUICK_NETWORKS = ("alexnet", "rnnlm")
QUICK_DEVICES = (1, 2, 4)
TABLES = ("study", "zoo")


@dataclass(frozen=True, slots=True)
class StudyCell:
    """One search. batch_size: samples a step, over all devices. chains: of the walk, beside those from known starts."""

    network: str
    topology: str
    devices: int
    batch_size: int
    preset: str
    proposals: int
    chains: int
    seed: int

    @property
    def key(self) -> str:
        """The name of the cell's file."""
        return (
            f"{self.network}-{self.topology}-{self.devices}-batch{self.batch_size}-{self.preset}-"
            f"{self.proposals}x{self.chains}-seed{self.seed}"
        )

    @property
    def title(self) -> str:
        """The cell, for people."""
        return f"{self.network} on {self.devices} of {self.topology}, batch {self.batch_size}"

    @property
    def algorithms(self) -> str:
        """The algorithms of its search."""
        few = self.devices <= OPTCNN_DEVICES.get(self.network, self.devices)
        papers = self.chains == STUDY_CHAINS and (self.topology, self.devices) == OPTCNN_PLACE
        return "optcnn,mcmc" if few or papers else "mcmc"

    def to_json(self) -> dict[str, Any]:
        """Return the cell as a JSON document."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a study. None: the study's own networks, devices or budget."""

    tables: tuple[str, ...] = TABLES
    networks: tuple[str, ...] | None = None
    devices: tuple[int, ...] | None = None
    budget: int | None = None
    seed: int = 0
    quick: bool = False

    def __post_init__(self) -> None:
        """Check names and numbers.

        Raises:
            UsageError: a network is not of the zoo, or no cluster is asked for so many devices.
        """
        for name in self.networks or ():
            if name not in zoo_names():
                raise UsageError(
                    f"--networks: {name} is unknown, must be of {', '.join(zoo_names())}; choose of them"
                )
        counts_of_clusters = sorted({count for counts in CLUSTERS.values() for count in counts})
        for count in self.devices or ():
            if count not in counts_of_clusters:
                raise UsageError(
                    f"--devices: is {count}, must be of {', '.join(map(str, counts_of_clusters))}; choose of them"
                )
        if self.budget is not None and self.budget < 1:
            raise UsageError(f"--budget: is {self.budget}, must be at least 1; raise it")
        if self.seed < 0:
            raise UsageError(f"--seed: is {self.seed}, must be at least 0; choose another")

    def proposals(self, devices: int) -> int:
        """Return the walk's budget for a cell on so many devices."""
        if self.budget is not None:
            return self.budget
        if self.quick:
            return QUICK_PROPOSALS
        return next(proposals for most, proposals in PROPOSALS if devices <= most)

    def has(self, network: str, devices: int) -> bool:
        """Return whether a cell of that network on so many devices was asked for."""
        networks, counts = self.networks, self.devices
        if self.quick:
            networks = QUICK_NETWORKS if networks is None else networks
            counts = QUICK_DEVICES if counts is None else counts
        return (networks is None or network in networks) and (counts is None or devices in counts)


def batch_of(network: str, preset: str) -> int:
    """Return the published batch size of a network."""
    entry = zoo_entry(network)
    return int(entry.presets[preset].get("batch_size", entry.batch_size))


def study_cells(request: Request) -> list[StudyCell]:
    """Return the paper's cells, each device with the published batch."""
    return [
        _cell(
            request, network, topology, devices, devices * batch_of(network, _preset(request)), STUDY_CHAINS
        )
        for topology, counts in CLUSTERS.items()
        for network in PAPER_NETWORKS
        for devices in counts
        if request.has(network, devices)
    ]


def zoo_cells(request: Request) -> list[StudyCell]:
    """Return the zoo's cells, all devices together with the published batch."""
    return [
        _cell(request, network, topology, devices, _zoo_batch(request, network), ZOO_CHAINS)
        for network in zoo_names()
        for topology, devices in ZOO_PLACES
        if request.has(network, devices)
    ]


def cells(request: Request) -> list[StudyCell]:
    """Return the cells of the tables that were asked for, each once, the most telling ones first.

    Raises:
        UsageError: there are none.
    """
    wanted = [
        *(study_cells(request) if "study" in request.tables else []),
        *(zoo_cells(request) if "zoo" in request.tables else []),
    ]
    if not wanted:
        raise UsageError(
            "scripts/study: no network is on so many devices in these tables, must be one; choose others"
        )
    ends = {(topology, counts[-1]) for topology, counts in CLUSTERS.items()}
    zoo = frozenset(zoo_cells(request))

    def later(cell: StudyCell) -> int:
        if (cell.topology, cell.devices) in ends:
            return 0
        return 1 if cell in zoo else 2 + (cell.topology == K80)

    return sorted(dict.fromkeys(wanted), key=later)


def _zoo_batch(request: Request, network: str) -> int:
    published = batch_of(network, _preset(request))
    return published if request.quick else SMALLER_BATCHES.get(network, published)


def _preset(request: Request) -> str:
    return "small" if request.quick else "paper"


def _cell(
    request: Request, network: str, topology: str, devices: int, batch_size: int, chains: int
) -> StudyCell:
    proposals = request.proposals(devices)
    return StudyCell(
        network, topology, devices, batch_size, _preset(request), proposals, chains, request.seed
    )


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """Return names without repetitions, in order."""
    return tuple(dict.fromkeys(names))
