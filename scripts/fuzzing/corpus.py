"""The files that a case starts from: a real database with its traces and exports, made by the real commands."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from scripts.fuzzing.running import CommandLimits, Runner

SMALL = ("--preset", "small")
# Importing this leaves a mark; nothing but --model on the command line may lead to it.
TRIPWIRE = """
import os
open(os.environ["SOAPSTONE_FUZZ_MARK"], "a").write(__name__ + "\\n")
def factory(batch_size=4):
    import torch
    return torch.nn.Linear(2, 2), (torch.randn(batch_size, 2),), {}
run = factory
"""
TOPOLOGY = """\
kinds:
  P100-SXM2:
    processor: cuda
    peak_flops: {float32: 10.6 TFLOP/s}
    memory: 16 GiB
    memory_bandwidth: 732 GB/s
    launch_latency: 5 us
nodes:
  count: 1
  devices: {P100-SXM2: 2}
  interconnect: {type: switch, bandwidth: 20 GB/s, latency: 10 us}
"""
COMMANDS = (
    ("topology", "show", "topology.yaml"),
    ("search", "--model", "mlp", *SMALL, "--topology", "p100-cluster", "--devices", "4", "--proposals", "50"),
    ("search", "--model", "mlp", *SMALL, "--device", "cpu", "--devices", "2", "--proposals", "20"),
    ("run", "--model", "mlp", *SMALL, "--device", "cpu", "--devices", "2", "--iterations", "2", "--profile"),
    ("db", "export", "costs.parquet"),
    ("strategy", "export", "1", "strategy.json"),
    ("db", "upgrade", "--database", "other.sqlite"),
)


@dataclass(frozen=True)
class Entry:
    """A thing in a folder: a file with its content, a folder, a link with its target, or something else."""

    kind: str
    content: bytes = b""

    @property
    def digest(self) -> str:
        """A short digest of kind and content."""
        return hashlib.sha256(self.kind.encode() + self.content).hexdigest()


Corpus = dict[str, Entry]


def read_folder(folder: Path) -> Corpus:
    """Return the entries of a folder by path, recursively."""
    entries: Corpus = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            mode = path.lstat().st_mode
            key = str(path.relative_to(folder))
            if stat.S_ISLNK(mode):
                entries[key] = Entry("link", os.fsencode(path.readlink()))
            elif stat.S_ISDIR(mode):
                entries[key] = Entry("folder")
            elif stat.S_ISREG(mode):
                entries[key] = Entry("file", path.read_bytes())
            else:
                entries[key] = Entry("other")
    return entries


def write_folder(corpus: Corpus, folder: Path) -> None:
    """Write the entries of a corpus into a new folder."""
    folder.mkdir(parents=True)
    for name, entry in corpus.items():
        path = folder / name
        match entry.kind:
            case "folder":
                path.mkdir(exist_ok=True)
            case "link":
                path.symlink_to(os.fsdecode(entry.content))
            case _:
                path.write_bytes(entry.content)


def make_corpus(folder: Path) -> Corpus:
    """Run the commands that make the files of all cases, in this folder.

    Raises:
        RuntimeError: one of them failed.
    """
    # Measuring on a busy machine takes its time.
    runner = Runner(limits=CommandLimits(wall_s=1800, processor_s=900))
    write_folder({}, folder)
    for name in ("tmp", "home", "cache", "folder", "runtime"):
        (folder / name).mkdir()
    (folder / "topology.yaml").write_text(TOPOLOGY)
    for command in COMMANDS:
        outcome = runner.run(command, folder)
        if outcome.code != 0:
            raise RuntimeError(f"corpus: app {' '.join(command)} ended with {outcome.code}: {outcome.errors}")
    plan = runner.run(("strategy", "export", "1", "plan.py", "--format", "dtensor"), folder)
    if plan.code != 0:
        (folder / "plan.py").write_text("# no plan\n")
    (folder / "notes.txt").write_text("notes of the user's own\n")
    (folder / "tripwire.py").write_text(TRIPWIRE)
    # Found instead of ours, were the current folder on a worker's path.
    (folder / "runtime" / "__init__.py").write_text(TRIPWIRE)
    (folder / "link.sqlite").symlink_to("db.sqlite")
    (folder / "loop").symlink_to("loop")
    shutil.rmtree(folder / "tmp")
    (folder / "tmp").mkdir()
    return read_folder(folder)
