"""The request of a search: its options, checked, and its row in the database, from which it can be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from app.db.failures import as_written
from app.db.records import TASK_ORDERS, SearchRecord, TaskOrder
from app.services.costs.operator_costs import OnMiss
from app.services.models.models import ModelRequest, stored_request
from app.services.predict.predict import Setting
from app.services.search.start_strategies import StartStrategy
from graph.errors import UsageError
from graph.schedule import GradientSums, Schedule
from graph.substitutions.substitution import substitutions_to_json
from graph.texts import one_of
from graph.topology import Processor
from search.algorithms import registry
from search.algorithms.chain import SearchOptions

# The range of a column, numbers that no search comes near, and what a float can still multiply.
LARGEST_INTEGER = 2**63 - 1
LARGEST_BUDGET = 10**12
LARGEST_CHAIN_COUNT = 1024
LARGEST_BETA = 1e12

# The part of a search's proposals and time that one has which goes on from it.
SHARE_SEARCHED_ON = 4


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The options of `app search`. `time_limit_s` makes a result that cannot be reproduced.

    Chains start from known strategies beside those of the budget, unless `fresh`; `starts` names strategies to take
    instead of known ones. `algorithm` names algorithms joined by commas, each of which starts from the results of those
    before it. `compare_baselines` simulates all baselines that the network has, not only those that chains start from.
    `share_weights`: chains start also from data parallelism that shares its weights, and the best strategy is searched
    for weights to share. `recompute`: where a strategy does not fit, it is searched for activations to recompute, for a
    start of a chain and at the end. `confirm`: what decides between the best strategies is measured again at the end.
    `policy`: how the best strategy sums gradients: POLICY_AUTO, or as `graph.synchronization` names it.
    `compile_stretches`: of the best strategy, what is faster so is compiled between one communication and the next.
    `substitute`, `fuse`: every substitution that the network allows, without and with a compiler, is applied before
    the search.
    `schedule`: the order in which stages work on the model's micro-batches (`graph.schedule`); None: any.
    `gradients`: when gradients of micro-batches are summed over replicas; None: any.
    """

    model: ModelRequest
    topology: str
    devices: int | None
    nodes: int | None
    processor: Processor | None
    optimizer: str
    batch_norm: str
    proposals: int
    chains: int
    seed: int
    beta: float
    order: TaskOrder
    time_limit_s: float | None
    on_miss: OnMiss | None
    fresh: bool = False
    starts: tuple[str, ...] = ()
    algorithm: str = "mcmc"
    compare_baselines: bool = False
    workers: int | None = None
    share_weights: bool = False
    recompute: bool = False
    confirm: bool = True
    gpus: str | None = None
    compile_stretches: bool = False
    policy: str = "fifo"
    schedule: Schedule | None = None
    substitute: bool = False
    gradients: GradientSums | None = None
    fuse: bool = False


def search_options(request: SearchRequest) -> SearchOptions:
    """Return the options of the algorithms, checked before anything is imported or written.

    Raises:
        UsageError: an option is out of range.
    """
    one_of(TASK_ORDERS, request.order, "--order")
    for name, value, least, most in (
        ("--proposals", request.proposals, 0, LARGEST_BUDGET),
        ("--chains", request.chains, 1, LARGEST_CHAIN_COUNT),
        ("--seed", request.seed, 0, LARGEST_INTEGER),
        ("--beta", request.beta, 0, LARGEST_BETA),
        ("--time", request.time_limit_s or 0, 0, LARGEST_BUDGET),
    ):
        if not least <= value <= most:
            raise UsageError(f"{name}: is {value}, must be from {least} to {most}; choose another")
    return SearchOptions(
        proposals=request.proposals,
        chains=request.chains,
        seed=request.seed,
        beta=request.beta,
        order=request.order,
        time_limit_s=request.time_limit_s,
    )


def searched_on(options: SearchOptions) -> SearchOptions:
    """Return the options of a search that goes on from another one: a share of its proposals and time."""
    time_limit_s = None if options.time_limit_s is None else options.time_limit_s / SHARE_SEARCHED_ON
    # At least one where there was any.
    proposals = max(options.proposals // SHARE_SEARCHED_ON, min(options.proposals, 1))
    return replace(options, proposals=proposals, time_limit_s=time_limit_s)


def algorithm_names(request: SearchRequest) -> tuple[str, ...]:
    """Return the names of a search's algorithms; those for sharding and recomputation come last.

    Raises:
        UsageError: there is no such algorithm, they are in an order that cannot be, or may simulate nothing.
    """
    names = registry.parsed(request.algorithm)
    for name, option, asked in (
        ("sharding", "--share-weights", request.share_weights),
        ("recomputation", "--recompute", request.recompute),
    ):
        if name in names and "mcmc" in names[names.index(name) :]:
            # The trace of the walk holds sharding and recomputation of a known strategy alone.
            raise UsageError(
                f"--algorithm: {name} comes before mcmc, must come after it; give {option}, from whose strategies "
                "mcmc starts too"
            )
        if asked and name not in names:
            names = (*names, name)
    for name in names if not request.proposals else ():
        if name in registry.TRIALS:
            raise UsageError(f"--proposals: is 0, must be at least 1 for algorithm {name}; raise it")
    return names


def search_record(
    request: SearchRequest, options: SearchOptions, setting: Setting, starts: Sequence[StartStrategy]
) -> SearchRecord:
    """Return the row of a search that begins, with all that it takes to resume or to repeat it."""
    document = asdict(request)
    del document["model"]["folder"], document["workers"]
    # Only where they say something, as in searches of older Soapstones.
    if request.model.micro_batches == 1:
        del document["model"]["micro_batches"]
    for name in ("schedule", "gradients"):
        if document[name] is None:
            del document[name]
    if not request.fuse:
        del document["fuse"]
    document["model"]["substitutions"] = substitutions_to_json(request.model.substitutions)
    if not request.model.substitutions:
        del document["model"]["substitutions"]
    return SearchRecord(
        graph_id=setting.graph_id,
        topology_id=setting.topology_id,
        training_id=setting.training_id,
        algorithm=",".join(algorithm_names(request)),
        seed=options.seed,
        options={
            "proposals": options.proposals,
            "chains": options.chains,
            "beta": options.beta,
            "order": options.order,
            "time_limit_s": options.time_limit_s,
            "moves": asdict(options.shares),
            "known": [start.to_json() for start in starts],
            "request": {**document, "starts": list(request.starts)},
        },
    )


def request_of(record: SearchRecord) -> SearchRequest:
    """Return the request of a stored search.

    Raises:
        UsageError: the row is from a Soapstone that did not store the request.
    """
    document = record.options.get("request")
    if document is None:
        raise UsageError(
            f"search {record.id}: was started by an older Soapstone, must have been started by one that keeps what it "
            "was asked for; start a new search"
        )
    with as_written(f"table searches, row {record.id}, column options"):
        model = stored_request(document["model"], f"search {record.id}")
        options = {**document, "model": model, "starts": tuple(document["starts"])}
        for name, kind in (("schedule", Schedule), ("gradients", GradientSums)):
            if options.get(name) is not None:
                options[name] = kind(options[name])
        options.pop("precision", None)  # beside the model, in searches of older Soapstones: all of float32
        return SearchRequest(**options)


def check_same(record: SearchRecord, setting: Setting) -> None:
    """Check that a stored search's model, topology and training are those of a setting.

    Raises:
        UsageError: one of them is another now.
    """
    for name, before, now in (
        ("model", record.graph_id, setting.graph_id),
        ("topology", record.topology_id, setting.topology_id),
        ("training", record.training_id, setting.training_id),
    ):
        if before != now:
            raise UsageError(
                f"search {record.id}: its {name} is another now than when it was started, must be the same to go on; "
                "start a new search"
            )
