"""Says which backend one call would use, why not the others, and the memory each needs, without running it.

The tensors are only described, never filled, so any shape that fits the address space will do.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from pytransformer.cli import OK, UsageError
from pytransformer.cli.benchmark.plan import DTYPES, OPS
from pytransformer.console import Console

_SHAPES = {
    "attention": "B,H,L,D or B,H,Lq,Lk,D",
    "attention_varlen": "B,H,L,D or B,H,Lq,Lk,D (B sequences of that length)",
    "layer_norm": "ROWS,D",
    "rms_norm": "ROWS,D",
    "add_norm": "ROWS,D",
    "feed_forward": "ROWS,D,HIDDEN",
    "linear_cross_entropy": "ROWS,D,CLASSES",
}
_EPILOG = (
    """\
shapes:
"""
    + "\n".join(f"  {op:<21} {shape}" for op, shape in _SHAPES.items())
    + """

examples:
  pytransformer explain attention --shape 2,8,1024,64 --dtype bfloat16 --bias t5 --dropout 0.1 --grad
  pytransformer explain attention --shape 1,32,1,8192,128 --kv-heads 8 --causal bottom_right
  pytransformer explain feed_forward --shape 4096,1024,4096 --activation silu --gated
"""
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("op", metavar="OP", choices=OPS, help=", ".join(OPS))
    add("--shape", type=_integers, required=True, metavar="N,N,...", help="see below")
    add(
        "--dtype",
        choices=sorted(DTYPES),
        default="float32",
        metavar="NAME",
        help="float32 (default), bfloat16, float16, float64",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are (default cpu)")
    add("--backend", default=None, metavar="NAME", help="explain a call that forces this backend")

    group = parser.add_argument_group("attention and attention_varlen")
    group.add_argument("--kv-heads", type=int, default=None, metavar="N", help="heads of key and value (grouped queries)")
    group.add_argument("--value-dim", type=int, default=None, metavar="N", help="last dimension of value, if not D")
    group.add_argument("--causal", choices=("top_left", "bottom_right"), default=None)
    group.add_argument(
        "--window",
        type=_window,
        default=None,
        metavar="LEFT,RIGHT",
        help="a side left empty is unbounded: 128,",
    )
    group.add_argument(
        "--mask",
        choices=("bool", "float", "padding"),
        default=None,
        help="attn_mask: dense, or (B, 1, 1, Lk)",
    )
    group.add_argument("--bias", choices=("dense", "alibi", "t5"), default=None)
    group.add_argument("--lengths", action="store_true", help="with query_lengths and key_lengths")
    group.add_argument("--segments", action="store_true", help="with query_segments and key_segments")
    group.add_argument("--prefix", action="store_true", help="with prefix_lengths")
    group.add_argument("--softcap", type=float, default=None)

    group = parser.add_argument_group("feed_forward and the norms")
    group.add_argument("--activation", choices=("relu", "gelu", "gelu_tanh", "silu"), default="relu")
    group.add_argument("--gated", action="store_true", help="with gate_weight")
    group.add_argument("--kind", choices=("layer", "rms"), default="layer", help="of add_norm")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P")
    parser.add_argument("--grad", action="store_true", help="the inputs require gradients")


def run(arguments: argparse.Namespace) -> int:
    import pytransformer as pt

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA GPU here; `pytransformer doctor` says why")
    try:
        args, kwargs = call(arguments)
        with pt.use_backend(**({arguments.op: arguments.backend} if arguments.backend else {})):
            found = pt.explain(arguments.op, *args, **kwargs)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    rows = []
    for backend, reason in found.reasons.items():
        verdict = "chosen" if backend == found.backend else "possible" if reason is None else "no"
        extra = found.extra_bytes.get(backend)
        rows.append((backend, verdict, reason or "", "" if extra is None else amount(extra)))
    console = Console()
    shape = "x".join(map(str, arguments.shape))
    console.print(f"{arguments.op} {shape} {arguments.dtype}: {found.backend or 'no backend can do this'}")
    console.table(
        ("backend", "", "why not", "memory beyond inputs and outputs"),
        rows,
        right=("memory beyond inputs and outputs",),
    )
    for note in found.notes:
        console.print(f"note: {note}")
    return OK


def amount(size: int) -> str:
    """A number of bytes for a person."""
    for unit, step in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= step:
            return f"{size / step:.3g} {unit}"
    return f"{size} B"


def call(arguments: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the public op that the command line describes, with undefined contents."""
    dtype = DTYPES[arguments.dtype]

    def tensor(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=arguments.device, requires_grad=arguments.grad and of.is_floating_point)

    shape = arguments.shape
    if arguments.op.startswith("attention"):
        return _attention(arguments, tensor)
    wanted = 3 if arguments.op in ("feed_forward", "linear_cross_entropy") else 2
    if len(shape) != wanted:
        raise UsageError(f"--shape of {arguments.op} is {_SHAPES[arguments.op]}, got {','.join(map(str, shape))}")
    rows, d = shape[:2]
    x = tensor(rows, d)
    dropout = {"dropout_p": arguments.dropout, "dropout_seed": 0} if arguments.dropout else {}
    match arguments.op:
        case "layer_norm":
            return (x, (d,), tensor(d), tensor(d)), {}
        case "rms_norm":
            return (x, (d,), tensor(d)), {}
        case "add_norm":
            bias = tensor(d) if arguments.kind == "layer" else None
            return (x, tensor(rows, d), tensor(d), bias), {"kind": arguments.kind, **dropout}
        case "feed_forward":
            hidden = shape[2]
            gate = {"gate_weight": tensor(hidden, d), "gate_bias": tensor(hidden)} if arguments.gated else {}
            weights = (tensor(hidden, d), tensor(hidden), tensor(d, hidden), tensor(d))
            return (x, *weights), {"activation": arguments.activation, **gate, **dropout}
        case _:
            target = torch.zeros(rows, dtype=torch.int64, device=arguments.device)
            return (x, tensor(shape[2], d), target), {}


def _attention(arguments: argparse.Namespace, tensor: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import pytransformer as pt

    if len(arguments.shape) not in (4, 5):
        raise UsageError(f"--shape of {arguments.op} is {_SHAPES[arguments.op]}, got {','.join(map(str, arguments.shape))}")
    batch, heads, lq, *_, d = arguments.shape
    lk = arguments.shape[-2]
    kv_heads, dv = arguments.kv_heads or heads, arguments.value_dim or d
    device = arguments.device

    def full(length: int) -> torch.Tensor:
        return torch.full((batch,), length, dtype=torch.int64, device=device)

    kwargs: dict[str, Any] = {
        "causal": arguments.causal,
        "window": arguments.window,
        "softcap": arguments.softcap,
    }
    if arguments.dropout:
        kwargs |= {"dropout_p": arguments.dropout, "dropout_seed": 0}
    match arguments.bias:
        case "alibi":
            kwargs["bias"] = pt.AlibiBias(tensor(heads, of=torch.float32))
        case "t5":
            kwargs["bias"] = pt.RelativePositionBias(tensor(32, heads, of=torch.float32))
        case "dense":
            kwargs["bias"] = tensor(1, heads, lq, lk)
    packed = arguments.op == "attention_varlen"
    if packed:
        refused = [f"--{name}" for name in ("mask", "lengths", "segments", "prefix") if getattr(arguments, name)]
        if refused or arguments.bias == "dense":
            raise UsageError(
                f"attention_varlen takes no {', '.join(refused) or 'dense bias'}: use --causal, --window, --bias alibi or t5"
            )
        starts = [torch.arange(batch + 1, device=device) * length for length in (lq, lk)]
        return (
            tensor(batch * lq, heads, d), tensor(batch * lk, kv_heads, d), tensor(batch * lk, kv_heads, dv),
            *starts, lq, lk,
        ), kwargs  # fmt: skip
    match arguments.mask:
        case "bool":
            kwargs["attn_mask"] = tensor(batch, 1, lq, lk, of=torch.bool)
        case "float":
            kwargs["attn_mask"] = tensor(batch, 1, lq, lk)
        case "padding":
            kwargs["attn_mask"] = tensor(batch, 1, 1, lk, of=torch.bool)
    if arguments.lengths:
        kwargs |= {"query_lengths": full(lq), "key_lengths": full(lk)}
    if arguments.prefix:
        kwargs["prefix_lengths"] = full(min(1, lk))
    if arguments.segments:
        kwargs |= {
            f"{side}_segments": torch.zeros(batch, n, dtype=torch.int64, device=device)
            for side, n in (("query", lq), ("key", lk))
        }
    return (
        tensor(batch, heads, lq, d),
        tensor(batch, kv_heads, lk, d),
        tensor(batch, kv_heads, lk, dv),
    ), kwargs


def _integers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between, as 2,8,1024,64")
    return tuple(int(word) for word in words)


def _window(text: str) -> tuple[int | None, int | None]:
    sides = text.split(",")
    if len(sides) != 2 or not all(side.strip() == "" or side.strip().isdecimal() for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is not LEFT,RIGHT with each a number or empty, as 128,0 or 128,")
    left, right = (int(side) if side.strip() else None for side in sides)
    return left, right
