"""Which network is meant, and its operator graph."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from app.services.models import graph_cache, trust
from graph.errors import DamagedDataError, ImportFailure, NeedsDataError, StrategyError, UsageError
from graph.operators import OperatorGraph
from graph.packages import PACKAGES
from graph.schedule import MOST_MICRO_BATCHES
from graph.substitutions.substitution import Substitution, substitutions_from_json, substitutions_to_json
from graph.texts import one_of, shown
from graph.training import PRECISIONS, TENSOR_DTYPES
from graph.zoo import Built, build, zoo_entry, zoo_names
from search.parallel.gc_pause import rare_collection

if TYPE_CHECKING:
    from collections.abc import Callable

# No device holds as many samples, and libraries count them in 64 bits or fewer.
LARGEST_BATCH = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A network: a zoo name, or "package.module:factory" of the user's own.

    `batch_size` None means the preset's (or what the user's factory takes by default); `folder` is where a user's
    module is looked for, last, after everything installed. `precision` is one of `graph.training.PRECISIONS`.
    micro_batches: in how many parts a step goes through its batch; the graph is of one of them (`graph.schedule`).
    substitutions: which the imported graph is rewritten by (`graph.substitutions`).
    """

    name: str
    preset: str = "paper"
    batch_size: int | None = None
    folder: str = ""
    precision: str = "float32"
    micro_batches: int = 1
    substitutions: tuple[Substitution, ...] = ()

    @property
    def is_zoo(self) -> bool:
        """True for a network that comes with Soapstone."""
        return ":" not in self.name

    def to_json(self) -> dict[str, Any]:
        """Return the request as a document, from which the model can be imported again.

        Of the precision, the dtype that the graph has of it: with tf32 the graph is that of float32.
        """
        document: dict[str, Any] = {"name": self.name, "preset": self.preset, "batch_size": self.batch_size}
        dtype = TENSOR_DTYPES[self.precision]
        if dtype != "float32":
            document["precision"] = dtype
        if self.micro_batches != 1:
            document["micro_batches"] = self.micro_batches
        if self.substitutions:
            document["substitutions"] = substitutions_to_json(self.substitutions)
        return document

    @property
    def known_batch_size(self) -> int | None:
        """The samples of a step, of all micro-batches; None where the user's factory alone knows."""
        if self.batch_size is not None or not self.is_zoo:
            return self.batch_size
        entry = zoo_entry(self.name)
        sizes = entry.presets.get(self.preset)
        return None if sizes is None else int(sizes.get("batch_size", entry.batch_size))

    @property
    def micro_batch_size(self) -> int | None:
        """The samples of one micro-batch; None where the user's factory alone knows."""
        whole = self.known_batch_size
        return None if whole is None else whole // self.micro_batches

    @property
    def factory_keywords(self) -> dict[str, Any]:
        """Return the arguments with which `build_model` builds this model for a whole batch, as a job needs it."""
        return {
            "name": self.name,
            "preset": self.preset,
            "batch_size": self.batch_size,
            "folder": self.folder,
            "precision": self.precision,
        }


def requested_model(
    name: str, preset: str, batch_size: int | None, precision: str = "float32", micro_batches: int = 1
) -> ModelRequest:
    """Return the model that a command's options mean, looked for in the current folder as well: the user trusts it.

    Raises:
        UsageError: there is no such precision, the batch is empty or beyond all memory, or micro-batches do not divide
            it.
    """
    one_of(PRECISIONS, precision, "--precision")
    if batch_size is not None and not 1 <= batch_size <= LARGEST_BATCH:
        raise UsageError(
            f"--batch-size: is {shown(batch_size)}, must be from 1 to {LARGEST_BATCH}; choose another"
        )
    request = ModelRequest(name, preset, batch_size, str(Path.cwd()), precision)
    if not request.is_zoo:
        trust.remember(name, request.folder)
    return in_micro_batches(request, micro_batches)


def in_micro_batches(request: ModelRequest, count: int) -> ModelRequest:
    """Return a request of the same model and batch with so many micro-batches.

    Raises:
        UsageError: they do not divide the batch, where its size is known.
    """
    if not 1 <= count <= MOST_MICRO_BATCHES:
        raise UsageError(
            f"--micro-batches: is {shown(count)}, must be from 1 to {MOST_MICRO_BATCHES}; choose another number"
        )
    if count == request.micro_batches:
        return request
    request = replace(request, micro_batches=count)
    whole = request.known_batch_size
    if whole is not None:
        _check_parts(request, whole)
    return request


def _check_parts(request: ModelRequest, whole: int) -> None:
    if whole % request.micro_batches or whole < request.micro_batches:
        raise UsageError(
            f"model {request.name}: batch size is {whole}, must be a multiple of its {request.micro_batches} "
            "micro-batches; choose another --batch-size or --micro-batches"
        )


def graph_keywords(request: ModelRequest) -> dict[str, Any]:
    """Return the arguments with which `build_model` builds a model for one micro-batch, which the graph is of.

    Raises:
        UsageError: there is no such preset, micro-batches do not divide the batch, or nothing says how large it is.
    """
    keywords = request.factory_keywords
    if request.micro_batches == 1:
        return keywords
    whole = batch_size_of(request)
    _check_parts(request, whole)
    return {**keywords, "batch_size": whole // request.micro_batches}


def batch_size_of(request: ModelRequest) -> int:
    """Return the samples of a step, of all micro-batches: those asked for, else the preset's or the factory's default.

    Raises:
        UsageError: there is no such preset or factory, or nothing says how large the batch is.
    """
    whole = request.known_batch_size
    if whole is not None:
        return whole
    if request.is_zoo:
        presets = ", ".join(zoo_entry(request.name).presets)
        raise UsageError(
            f"model {request.name}: preset {shown(request.preset)} is unknown, must be {presets}; choose one"
        )
    factory = _load_factory(request.name, request.folder)
    if not _takes_batch_size(factory):
        raise UsageError(
            f"model {request.name}: its factory takes no batch_size, must for --micro-batches; add the parameter"
        )
    parameter = inspect.signature(factory).parameters.get("batch_size")
    default = None if parameter is None else parameter.default
    if type(default) is not int:
        raise UsageError(
            f"model {request.name}: --batch-size is missing, must be given with --micro-batches, since its factory has "
            "no number for a default; add it"
        )
    return default


def name_own_model(name: str | None) -> None:
    """Take --model of a command that follows what is stored, which may name a function of the user's own there.

    Raises:
        UsageError: it is no name of a function.
    """
    if name is None:
        return
    if not trust.is_function_name(name):
        raise UsageError(
            f"--model: is {name}, must be package.module:factory here; leave it out for a network of the zoo"
        )
    trust.remember(name, str(Path.cwd()))


def stored_request(document: object, where: str) -> ModelRequest:
    """Return the model that a stored document names: one of the zoo, or a function that the user has named too.

    All that is stored becomes a request here and nowhere else. `where` is what an error calls the document.

    Raises:
        DamagedDataError: the document is none of a model.
        UsageError: it names a function that the user has not named.
    """
    if not _is_model(document):
        raise DamagedDataError(
            f"{where}: its model is no JSON object of name, preset, batch_size, precision, micro_batches and "
            "substitutions, must be; restore the database from a copy"
        )
    try:
        substitutions = substitutions_from_json(document.get("substitutions", []))
    except StrategyError as error:
        raise DamagedDataError(f"{where}: {error}") from None
    request = ModelRequest(**{**document, "substitutions": substitutions})
    if request.is_zoo:
        zoo_entry(request.name)
        return request
    return replace(request, folder=trust.trusted_folder(request.name, str(Path.cwd())))


def _is_model(document: object) -> TypeGuard[Mapping[str, Any]]:
    keys = {"name", "preset", "batch_size", "precision", "micro_batches", "substitutions"}
    if not (isinstance(document, Mapping) and "name" in document and document.keys() <= keys):
        return False
    texts = [document[key] for key in ("name", "preset") if key in document]
    size, count = document.get("batch_size"), document.get("micro_batches", 1)
    return (
        all(isinstance(text, str) for text in texts)
        and (size is None or type(size) is int)
        and type(count) is int
        and 1 <= count <= MOST_MICRO_BATCHES
        and document.get("precision", "float32") in PRECISIONS
    )


def build_model(
    name: str, preset: str, batch_size: int | None, folder: str, precision: str = "float32"
) -> Built:
    """Return (module, args, kwargs) on the current default device; the runtime's workers call it by its name.

    Bfloat16 and float16 convert the module and its inputs. Float32 and tf32 take both as the factory makes them, whose
    weights must be float32 then: a module in another format is not silently another one.

    Raises:
        UsageError: there is no such network, preset or factory.
        ImportFailure: the user's factory failed, or its weights are not float32 where they must be.
    """
    from graph.importing.formats import converted, require_dtype

    if ":" not in name:
        built = build(name, preset, batch_size)
    else:
        built = _call_factory(name, _load_factory(name, folder), batch_size)
    dtype = TENSOR_DTYPES[precision]
    if dtype == "float32":
        require_dtype(built[0], dtype, name)
        return built
    return converted(*built, dtype)


def _load_factory(name: str, folder: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not trust.is_function_name(name):
        raise UsageError(
            f"model {name}: is no name of a function, must be package.module:factory; correct it"
        )
    top = module_name.partition(".")[0]
    # A user's module must not stand in for one of ours: the import system would find ours first.
    if top in ("__main__", *PACKAGES):
        raise UsageError(
            f"model {name}: package {top} is one of Soapstone's own, must have another name; rename the folder"
        )
    if folder and all(getattr(finder, "folder", None) != folder for finder in sys.meta_path):
        sys.meta_path.append(trust.FolderFinder(folder))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"model {name}: module {module_name} cannot be imported ({error}), must be importable from here; "
            "check the name or change the folder"
        ) from error
    except (Exception, SystemExit) as error:
        # A script may parse our arguments and leave when it is imported.
        raise ImportFailure(
            f"model {name}: module {module_name} failed while it was imported ({_reason(error)}); correct it"
        ) from error
    module_file = Path(getattr(module, "__file__", None) or "").resolve()
    local = Path(folder or ".") / top
    if (local.is_dir() or local.with_suffix(".py").is_file()) and Path(
        folder or "."
    ).resolve() not in module_file.parents:
        raise UsageError(
            f"model {name}: {top} here is hidden by an installed package of that name, must have a name of its own; "
            "rename it"
        )
    factory = getattr(module, function_name, None)
    if not callable(factory):
        raise UsageError(
            f"model {name}: {function_name} is not a function of {module_name}, must return "
            "(module, args, kwargs); check the name"
        )
    return factory  # type: ignore[no-any-return]


def _call_factory(name: str, factory: Callable[..., Any], batch_size: int | None) -> Built:
    from torch import nn

    keywords = {} if batch_size is None else {"batch_size": batch_size}
    if keywords and not _takes_batch_size(factory):
        raise UsageError(
            f"model {name}: its factory takes no batch_size, must for --batch-size and --micro-batches; add the "
            "parameter"
        )
    if batch_size is not None and batch_size < 1:
        raise UsageError(
            f"model {name}: batch size is {shown(batch_size)}, must be at least 1; choose another"
        )
    try:
        built = factory(**keywords)
    except (Exception, SystemExit) as error:
        from graph.importing import locations

        location = locations.of_error(error)
        at = f" at {location}" if location else ""
        # On meta a tensor has no numbers to read; where that is not the reason, it fails again.
        raise NeedsDataError(
            f"model {name}: its factory failed{at} ({_reason(error)}), must return (module, args, kwargs); correct it"
        ) from None
    if not (
        isinstance(built, tuple)
        and len(built) == 3
        and isinstance(built[0], nn.Module)
        and isinstance(built[1], tuple)
        and isinstance(built[2], dict)
    ):
        raise ImportFailure(
            f"model {name}: its factory returned {_kinds(built)}, must return (module, args, kwargs), of which args is "
            "a tuple and kwargs a dict; correct it"
        )
    return built


def _kinds(value: object) -> str:
    """Return the name of a value's class, of a tuple those of its items."""
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__


def _takes_batch_size(factory: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # some of C
        return False
    return "batch_size" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _reason(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


@dataclass(frozen=True)
class ImportedModel:
    """A request, its graph, which is of one micro-batch, and the samples of one step, of all micro-batches."""

    request: ModelRequest
    graph: OperatorGraph
    batch_size: int

    @property
    def micro_batch_size(self) -> int:
        """The samples that the graph is of."""
        return self.batch_size // self.request.micro_batches


def import_graph(request: ModelRequest, *, batch_norm: str) -> ImportedModel:
    """Return the operator graph of a network: from the graph cache, else exported on meta.

    Raises:
        UsageError: there is no such network.
        ImportFailure: it cannot be exported, or returns no scalar loss.
    """
    if request.substitutions:
        plain = import_graph(replace(request, substitutions=()), batch_norm=batch_norm)
        return rewritten_model(plain, request.substitutions)
    key = graph_cache.key_of(request, batch_norm)
    if key is None:
        return _exported(request, batch_norm)
    if (cached := graph_cache.load(key)) is not None:
        return ImportedModel(request, *cached)
    model = _exported(request, batch_norm)
    graph_cache.save(key, model.graph, model.batch_size)
    return model


def rewritten_model(model: ImportedModel, substitutions: Sequence[Substitution]) -> ImportedModel:
    """Return a model with substitutions applied to its graph, which none have been applied to.

    Raises:
        StrategyError: one cannot be applied.
    """
    from graph.substitutions.rewriting import rewritten

    graph = rewritten(model.graph, substitutions)
    return replace(model, request=replace(model.request, substitutions=graph.substitutions), graph=graph)


def with_all_substitutions(model: ImportedModel, *, substitute: bool, fuse: bool) -> ImportedModel:
    """Return a model with as many substitutions applied as its graph, as imported, allows together.

    substitute: those that take no compiler. fuse: those that do.
    """
    from graph.substitutions.rewriting import WITH_COMPILER, WITHOUT_COMPILER, every_substitution

    rules = (*(WITHOUT_COMPILER if substitute else ()), *(WITH_COMPILER if fuse else ()))
    return rewritten_model(model, every_substitution(model.graph, rules)) if rules else model


@rare_collection()
def _exported(request: ModelRequest, batch_norm: str) -> ImportedModel:
    (_, args, kwargs), graph = build_and_import(request, batch_norm)
    return ImportedModel(request, graph, _batch_size(request, args, kwargs))


def build_and_import(request: ModelRequest, batch_norm: str) -> tuple[Built, OperatorGraph]:
    """Return a network and its graph, both of one micro-batch: built on meta, or with data where that is not enough.

    Raises:
        UsageError: there is no such network.
        ImportFailure: it cannot be exported, or returns no scalar loss.
    """
    import torch

    # What a user's module prints must not end up in our results.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            return _built_on("meta", request, batch_norm)
        except NeedsDataError:
            # Numbers read in a constructor, tensors that are neither parameters nor buffers.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return _built_on("cpu", request, batch_norm)


def _built_on(device: str, request: ModelRequest, batch_norm: str) -> tuple[Built, OperatorGraph]:
    import torch

    from graph.importer import import_module
    from graph.substitutions.rewriting import rewritten

    with torch.device(device):
        built = build_model(**graph_keywords(request))
    graph = import_module(*built, name=graph_name(request), batch_norm=batch_norm)
    return built, rewritten(graph, request.substitutions)


def graph_name(request: ModelRequest) -> str:
    """Return the name of the graph: the zoo name, with its preset where that is not the paper's."""
    return (
        request.name
        if request.preset == "paper" or not request.is_zoo
        else f"{request.name}-{request.preset}"
    )


def _batch_size(request: ModelRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    whole = request.known_batch_size
    if whole is not None:
        return whole
    if request.micro_batches != 1:
        return batch_size_of(request)
    for item in (*args, *kwargs.values()):
        shape = tuple(getattr(item, "shape", ()))
        if shape:
            return int(shape[0])
    raise UsageError(
        f"model {request.name}: no input has a batch dim, must have one; let its factory take batch_size, and "
        "pass --batch-size"
    )


def known_models() -> tuple[str, ...]:
    """Return the names of the networks that come with Soapstone."""
    return zoo_names()
