# SPDX-License-Identifier: Apache-2.0
"""Count a mesh rank's communication, computation and memory in one training step.

    python bench/tools/weak_scaling.py                 # print
    python bench/tools/weak_scaling.py --out FILE.json # and write

The numbers are counts, because timings of four processes on two cores would be meaningless. A T5 (2
+ 2 layers, d_model 64) trains by `Trainer` over gloo on 1, 2 and 4 ranks. "weak": the batch, the
length, or heads, hidden size and vocabulary grow with the ranks. "strong": one model and one batch.

sent     bytes of this rank's ring collectives: 2 (n - 1) / n of an all-reduce, (n - 1) of a
         gathered part, (n - 1) / n of a reduce-scatter, all of a point-to-point send
flops    matmuls and attention by torch's and our formulas, forward and backward
held     bytes of parameters and optimizer state
peak     peak tensor memory in a step, by torch.distributed._tools.mem_tracker
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pytransformer.cli import machine
from pytransformer.models import T5, T5Config
from pytransformer.training import Batches, Recipe, Trainer, World, of_model, translation_collate
from pytransformer.training.mesh import Mesh, make_mesh
from pytransformer.training.parallel import local

BATCH, LENGTH, HEADS, HIDDEN, VOCABULARY = 4, 64, 4, 256, 512
RANKS = (1, 2, 4)
AXES = {
    "data": ("data", False),
    "data, shard": ("data", True),
    "context": ("context", False),
    "tensor": ("tensor", False),
}
GROWS = {
    "data": "the batch",
    "data, shard": "the batch",
    "context": "the length",
    "tensor": "heads, hidden layer, vocabulary",
}
# Collective -> position of its tensor argument, and the share that a ring of n sends.
COLLECTIVES = {
    "c10d::allreduce_": (0, lambda n: 2 * (n - 1) / n),
    "c10d::allgather_": (1, lambda n: n - 1),
    "c10d::_allgather_base_": (1, lambda n: n - 1),
    "c10d::_reduce_scatter_base_": (1, lambda n: (n - 1) / n),
    "c10d::broadcast_": (0, lambda n: (n - 1) / n),
    "c10d::send": (0, lambda n: 1),
    "_c10d_functional::all_reduce": (0, lambda n: 2 * (n - 1) / n),
    "_c10d_functional::all_reduce_": (0, lambda n: 2 * (n - 1) / n),
    "_c10d_functional::all_gather_into_tensor": (0, lambda n: n - 1),
    "_c10d_functional::reduce_scatter_tensor": (0, lambda n: (n - 1) / n),
}
SILENT = (
    "c10d::recv_",
    "c10d::barrier",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
)


class Counted(TorchDispatchMode):
    """Counters of bytes sent by collective, and of FLOPs of local parts.

    FlopCounterMode would count a DTensor product in full.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            # The DTensor op calls the collectives on its parts, which come here.
            return NotImplemented
        name = func.name().partition(".")[0]
        if "c10d" in name and name not in SILENT:
            place, share = COLLECTIVES[name]
            given = args[place]
            sizes = [t.nbytes for t in given] if isinstance(given, list) else [given.nbytes]
            self.bytes[name.split("::")[1].strip("_")] += round(sum(sizes) * share(_ranks(args)))
        out = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def _ranks(args: Any) -> int:
    """Return the size of the collective's group."""
    for arg in reversed(args):
        if isinstance(arg, str):
            return dist.distributed_c10d._resolve_process_group(arg).size()
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg).size()
    raise ValueError(f"no group among {args}")


def trainer(world: World, axis: str, grow: int) -> Trainer:
    """Return a trainer with `grow` times the work along the axis."""
    times = {name: grow if axis == name else 1 for name in ("context", "tensor")}
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY * times["tensor"], d_model=64, head_dim=16,
        num_heads=HEADS * times["tensor"], num_layers=2,
        hidden=HIDDEN * times["tensor"], dropout=0.0,
    )  # fmt: skip
    length = LENGTH * times["context"] - 1  # and </s>
    examples = torch.randint(
        3, VOCABULARY, (64, length), generator=torch.Generator().manual_seed(0)
    ).tolist()
    # "strong": the ranks share one batch along the data axis.
    batch = BATCH if grow > 1 or axis != "data" else BATCH // world.parts
    batches = Batches([(e, e) for e in examples], batch, translation_collate(0, 1, 2))
    make = partial(torch.optim.AdamW, lr=0.0, foreach=True)
    return Trainer(
        T5(config),
        of_model,
        batches,
        Recipe(steps=4, clip=1.0),
        lambda step: 1e-3,
        optimizer=make,
        world=world,
    )


def measure(world: World, axis: str, grow: int) -> dict[str, Any]:
    made = trainer(world, axis, grow)
    made.fit(until=1)
    with Counted() as counted:
        made.fit(until=2)
    tracker = MemTracker()
    tracker.track_external(made.model, made.optimizer)
    with tracker:
        made.fit(until=3)
    states = [
        t
        for entries in made.optimizer.state.values()
        for t in entries.values()
        if isinstance(t, torch.Tensor)
    ]
    return {
        "sent": sum(counted.bytes.values()),
        "sent_by": dict(counted.bytes),
        "flops": counted.flops,
        "parameters": sum(local(p.detach()).nbytes for p in made.model.parameters()),
        "optimizer": sum(local(t).nbytes for t in states),
        "peak": int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]),
    }


def rank_main(rank: int, ranks: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = []
    for name, (axis, shard) in AXES.items():
        mesh = Mesh(make_mesh({axis: ranks}, ranks, "cpu"), shard=shard) if ranks > 1 else None
        world = World(rank, ranks, torch.device("cpu"), mesh)
        for kind, grow in (("weak", ranks), ("strong", 1)):
            found.append({"axis": name, "kind": kind, "ranks": ranks, **measure(world, axis, grow)})
    Path(folder, f"{ranks}-{rank}.json").write_text(json.dumps(found))
    if ranks > 1:
        dist.destroy_process_group()


def rows() -> list[dict[str, Any]]:
    """Return the max over ranks of each count."""
    found = []
    for ranks in RANKS:
        folder = tempfile.mkdtemp()
        mp.spawn(rank_main, (ranks, os.path.join(folder, "store"), folder), nprocs=ranks)
        parts = [
            json.loads(Path(folder, f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)
        ]
        for of_ranks in zip(*parts):
            most = {
                name: max(part[name] for part in of_ranks)
                for name in of_ranks[0]
                if name != "sent_by"
            }
            found.append(most | {"sent_by": of_ranks[0]["sent_by"]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = rows()
    for kind in ("weak", "strong"):
        for name in AXES:
            print(f"\n{kind}: {name}" + (f", {GROWS[name]} grows" if kind == "weak" else ""))
            for row in (r for r in found if (r["kind"], r["axis"]) == (kind, name)):
                numbers = "  ".join(
                    f"{n} {row[n]:,}" for n in ("sent", "flops", "parameters", "optimizer", "peak")
                )
                print(f"  {row['ranks']} ranks  {numbers}")
    if arguments.out:
        about = {
            "torch": torch.__version__,
            "cpu": machine.cpu_name(),
            "tool": "bench/tools/weak_scaling.py",
        }
        arguments.out.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
