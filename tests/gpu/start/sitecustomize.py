"""Shows virtual GPUs to every process that is started with this folder on its path, once it has imported torch."""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Lets torch be imported as ever, and installs virtual GPUs behind it."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            # Not before: whoever asks whether there is a torch does not import it.
            sys.meta_path.remove(self)
            execute(module)
            from tests.gpu import virtual_nccl, virtual_torch

            virtual_torch.install()
            virtual_nccl.install()

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


if "VIRTUAL_GPUS" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
