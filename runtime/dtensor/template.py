"""The parts of a generated file that are the same for every plan, or for every plan with a data or a tensor dim.

Files of `runtime.pipelining` have the same mesh, module, comparison and end.
"""

HEAD = '''

def make_mesh() -> DeviceMesh:
    """Join torchrun's process group and return the mesh: of GPUs where every rank has one, else of CPUs."""
    devices = 1
    for size in MESH.values():
        devices *= size
    if os.environ.get("WORLD_SIZE") != str(devices):
        sys.exit(f"must run as {devices} processes; start it with torchrun --nproc-per-node {devices}")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    device_type = "cuda" if torch.cuda.device_count() >= local_ranks else "cpu"
    device = None
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", device_id=device)
    return init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
'''

PARALLELIZE = '''

def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Parallelize `module` in place; it must hold the same weights on every rank, on the mesh's device."""
'''

PARALLELIZE_TENSOR = """    parallelize_module(module, mesh["tensor"], PLAN)
    distribute_module(module, mesh["tensor"])  # what PLAN does not name: replicated
"""

SUM_VOCABULARY_GRADIENTS = """\
    for name in VOCABULARIES:
        module.get_submodule(name).register_forward_hook(sum_gradient)
"""

SUM_GRADIENT = '''

def sum_gradient(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
    """Add up the parts of an embedding's gradient before they meet the mask of its part of the vocabulary."""

    def whole_gradient(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.redistribute(placements=[Replicate()]) if isinstance(gradient, DTensor) else gradient

    if output.requires_grad:
        output.register_hook(whole_gradient)
'''

TIE = """    for alias, name in TIED.items():
        owner, _, attribute = alias.rpartition(".")
        setattr(module.get_submodule(owner), attribute, module.get_parameter(name))
"""

PARALLELIZE_DATA = """\
    # The strategy holds whole weights on every data rank. fully_shard holds a part of each and gathers it before
    # use: the same results, one all-gather more, and less memory.
    for name in BLOCKS:
        fully_shard(module.get_submodule(name), mesh=mesh["data"], reshard_after_forward=False)
    fully_shard(module, mesh=mesh["data"], reshard_after_forward=False)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # gradients are added up; step() weighs the ranks' losses
"""

OWN_PART = '''

def own_part(mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return (args, kwargs) of this data rank's part of a batch that every rank holds whole."""
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for position, dim in BATCH_DIMS.items():
        place = places[position]
        leaves[place] = leaves[place].chunk(MESH["data"], dim)[mesh["data"].get_local_rank()]
    return pytree.tree_unflatten(leaves, structure)
'''

PLACED = '''

class WithoutEmptyVectors(TorchFunctionMode):
    """Leaves out of torch.cat what adds nothing: a cache of keys and values begins so, and DTensor cannot split it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.cat and args:
            args = ([tensor for tensor in args[0] if tensor.shape != (0,)] or args[0], *args[1:])
        return function(*args, **(kwargs or {}))


@contextmanager
def placed(mesh: DeviceMesh) -> Iterator[None]:
    """Let a forward use plain tensors that it makes itself, which are the same on every rank."""
    with ExitStack() as stack:
        stack.enter_context(implicit_replication())
        stack.enter_context(WithoutEmptyVectors())
        if mesh.device_type == "cpu":
            # DTensor splits plain attention by heads, but not the CPU's fused one.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield
'''

LOSS = '''

def loss_of(result: Any) -> torch.Tensor:
    """Return the scalar loss in what a module returns."""
    if isinstance(result, dict):
        result = result["loss"]
    elif isinstance(result, (tuple, list)) and not hasattr(result, "loss"):
        result = result[0]
    loss = result if isinstance(result, torch.Tensor) else result.loss
    return loss.reshape(())
'''

WHOLE = '''

def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor gathered from all ranks of its mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
'''

BUILD = '''

def build(device_type: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the model and a batch, equal on every rank, in float64."""
    sys.path.append(os.getcwd())
    package, _, name = FACTORY.partition(":")
    torch.manual_seed(SEED)
    module, args, kwargs = getattr(importlib.import_module(package), name)(**KEYWORDS)
'''

EVALUATION = """    module.eval()  # dropout would draw other numbers on every rank
"""

CONVERT = """
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device_type, torch.float64 if tensor.is_floating_point() else tensor.dtype)

    args, kwargs = pytree.tree_map_only(torch.Tensor, convert, (tuple(args), dict(kwargs)))
    return module.to(device_type).double(), args, kwargs
"""

CHECK = '''

def check(mesh: DeviceMesh) -> bool:
    """Return whether one step equals the plain module's; rank 0 prints the largest deviation of each parameter."""
    module, args, kwargs = build(mesh.device_type)
    loss = step(parallelize(module, mesh), mesh, args, kwargs)
    gradients = {
        name: None if parameter.grad is None else whole(parameter.grad)
        for name, parameter in module.named_parameters()
    }
    verdict = torch.ones((), device=mesh.device_type)
    if dist.get_rank() == 0:
        plain, args, kwargs = build(mesh.device_type)
        verdict *= compare(loss, gradients, plain, loss_of(plain(*args, **kwargs)))
    dist.broadcast(verdict, 0)
    return bool(verdict)
'''

COMPARE = '''

def compare(
    loss: torch.Tensor,
    gradients: dict[str, torch.Tensor | None],
    plain: nn.Module,
    expected_loss: torch.Tensor,
) -> bool:
    """Print the deviations of loss and gradients from those of the plain module; return whether all are allowed."""
    expected_loss.backward()
    expected = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in plain.named_parameters()
        if parameter.requires_grad
    }
    floor = NOISE_FLOOR * max((float(one.abs().max()) for one in expected.values()), default=1.0) or 1.0
    size = float(expected_loss.detach().abs()) or 1.0
    deviations = {"loss": float((loss - expected_loss.detach()).abs()) / size}
    for name, gradient in expected.items():
        found = gradients[name]
        distance = float((gradient if found is None else gradient - found).abs().max())
        deviations[name] = distance / max(float(gradient.abs().max()), floor)
    for name, deviation in sorted(deviations.items(), key=lambda item: -item[1]):
        print(f"{deviation:10.2e}  {'ok ' if deviation <= ALLOWED else 'BAD'}  {name}")
    equal = sum(deviation <= ALLOWED for deviation in deviations.values())
    print(f"{equal} of {len(deviations)} (loss and gradients) equal the plain module's within {ALLOWED:g}")
    return equal == len(deviations)
'''

SHARE = '''

def share(mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return how much of the whole batch's loss the loss of this data rank's part is."""
'''

MAIN = '''

def main() -> int:
    """Check the plan; return the exit code."""
    mesh = make_mesh()
    equal = check(mesh)
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread of gloo that still holds a tensor would abort the interpreter's own end
'''
