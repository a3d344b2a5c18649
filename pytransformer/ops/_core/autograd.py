# SPDX-License-Identifier: Apache-2.0
"""The two autograd Functions of an op.

They replace ``torch.library.register_autograd``, which drops forward-mode tangents silently, fails
under torch.func and costs 115 µs per call with 24 arguments (measured). Two Functions with
``setup_context`` cost 27 µs, pass gradcheck, gradgradcheck, torch.func, fullgraph compilation and
export, and raise under jvp.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from .registry import OPS, carried, open_blocks

if TYPE_CHECKING:
    from .op import Op


def transforming() -> bool:
    """Return true if a torch.func transform or a forward-mode level is active."""
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    # A Function runs forward with forward-mode gradients off, while the level is still open.
    return torch.autograd.forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Return true if a backward may follow a call with these tensors.

    This is an estimate: forward may save too little or too much for backward.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    return not torch.compiler.is_compiling() and transforming()


def compiling_a_derivative() -> bool:
    """Return true if torch.compile traces a torch.func derivative, or vmap in a grad context.

    There torch.compile detects no need for a gradient, omits the Function and would return zeros or
    no gradient at all.
    """
    if not torch._C._are_functorch_transforms_active():
        return False
    innermost = retrieve_current_functorch_interpreter()
    if torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
        return True
    return bool(innermost.key() != TransformType.Vmap or innermost.level() > 1)


def each_once(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs with repeated tensors replaced by views.

    torch.compile does not support a Function that receives one tensor twice.
    """
    distinct: list[Any] = []
    for value in inputs:
        if isinstance(value, torch.Tensor) and any(value is earlier for earlier in distinct):
            value = value.view_as(value)
        distinct.append(value)
    return distinct


# Dispatch keys of an unobserved thread, without and with inference mode. torch.func, dispatch modes
# (fake tensors, make_fx, FLOP counters), functionalization and torch.jit.trace each add a key.
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_UNWATCHED = (
    (_KEYS | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)).raw_repr(),
    _KEYS.raw_repr(),
)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list))


def unwatched(operand: torch.Tensor, inputs: Sequence[Any]) -> bool:
    """Return true if nothing between caller and kernel must observe the raw op.

    The call is :func:`untransformed` and no profiler is active. The caller may then run the op's
    body directly, which saves about 7 µs of dispatch per call. False is always correct, because the
    dispatcher resolves such tensors.
    """
    return not torch._C._autograd._profiler_enabled() and untransformed(operand, inputs)


def untransformed(operand: torch.Tensor, inputs: Sequence[Any]) -> bool:
    """Return true if a kernel may read the inputs' memory.

    No transform, mode or tracer is active, no input is of a tensor subclass, a negated view or an
    efficient zero tensor, and the operand is not a meta tensor.
    """
    if (
        torch._C._dispatch_tls_local_include_set().raw_repr() not in _UNWATCHED
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._len_torch_function_stack()
        or not _PLAIN.issuperset(map(type, inputs))
        or operand.is_meta
    ):
        return False
    # A generator would cost a call several microseconds.
    for value in inputs:
        if isinstance(value, torch.Tensor) and (value.is_neg() or value._is_zerotensor()):
            return False
    return True


def vmap_by_loop(raw: torch._ops.OpOverload) -> Callable[..., tuple[Any, Any]]:
    """Return a vmap rule that runs the op once per element.

    It is exact for every argument; the op's batch dimension is faster.
    """

    def rule(info: Any, in_dims: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        def element(i: int) -> Sequence[Any]:
            return [
                x.select(d, i) if isinstance(x, torch.Tensor) and d is not None else x
                for x, d in zip(args, in_dims)
            ]

        results = [raw(*element(i), **kwargs) for i in range(info.batch_size)]
        if not results:
            raise ValueError("vmap over a dimension of size 0")
        return tuple(torch.stack(parts) for parts in zip(*results)), (0,) * len(results[0])

    return rule


_Gradients = Callable[..., Sequence[torch.Tensor | None]]


def _backward_function(bwd: torch._ops.OpOverload, name: str) -> type[torch.autograd.Function]:
    """Return the backward raw op as a Function whose backward differentiates the reference."""

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
            return bwd(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            tensors = [value if isinstance(value, torch.Tensor) else None for value in inputs]
            ctx.save_for_backward(*tensors)
            ctx.others = [None if isinstance(value, torch.Tensor) else value for value in inputs]
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            inputs = tuple(
                other if tensor is None else tensor
                for tensor, other in zip(ctx.saved_tensors, ctx.others)
            )
            return _second_order(name, inputs, cotangents)

    Backward.__name__ = f"{name}_backward_function"
    return Backward


def make_functions(
    op: Op,
) -> tuple[type[torch.autograd.Function], type[torch.autograd.Function], _Gradients]:
    """Return the op's Function for transforms, its Function for eager calls, and its gradients.

    Transforms and torch.compile support the first Function. Eager calls that are :func:`unwatched`
    use the second. The backward of both is a Function whose backward differentiates the reference.
    The third result computes the differentiable arguments' gradients for the C++ fast path.

    The methods of the first close over raw ops and constants only, because torch.compile cannot
    trace a closure over an Op. The second has no ``setup_context``, with which PyTorch binds the
    arguments to a signature in every call, about 25 µs. It takes the tensors and one tuple of all
    other arguments, because PyTorch inspects each input and expects a gradient for each.
    """
    fwd, bwd, name, positions = op.fwd, op.bwd, op.name, op.positions
    num_args, num_tensors, num_grads = op.num_args, op.num_tensors, len(op.grad_names)
    saved_places = tuple(op.outputs.index(n) for n in op.saved)

    Backward = _backward_function(bwd, name)

    def remember(
        ctx: Any, tensors: Sequence[Any], others: tuple[Any, ...], output: tuple[torch.Tensor, ...]
    ) -> None:
        ctx.save_for_backward(*tensors, *[output[i] for i in saved_places])
        ctx.others = others
        ctx.blocks = None if torch.compiler.is_compiling() else open_blocks()
        ctx.mark_non_differentiable(*output[num_grads:])
        ctx.set_materialize_grads(False)

    def gradients(
        grads: Any, remembered: Any, others: Any, wanted: list[bool], run: Any
    ) -> Sequence[torch.Tensor | None]:
        inputs = (
            *grads[:num_grads],
            *remembered[:num_tensors],
            *others[:-2],
            *remembered[num_tensors:],
            wanted,
            *others[-2:],
        )
        # Second derivatives need eager mode: torch.compile cannot trace a Function inside a
        # Function.
        once = torch.compiler.is_compiling() or not (torch.is_grad_enabled() or transforming())
        return run(*inputs) if once else Backward.apply(*inputs)

    def first_order(
        ctx: Any, grads: tuple[torch.Tensor | None, ...], run: Any, num_inputs: int
    ) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad  # builds a new tuple per access
        wanted = [needed[i] for i in positions]
        by_position: list[torch.Tensor | None] = [None] * num_inputs
        if any(wanted) and any(g is not None for g in grads[:num_grads]):
            with nullcontext() if ctx.blocks is None else carried(ctx.blocks):
                results = gradients(grads, ctx.saved_tensors, ctx.others, wanted, run)
            for position, result, want in zip(positions, results, wanted):
                if want:
                    by_position[position] = result
        return tuple(by_position)

    class Forward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
            return fwd(*inputs)

        @staticmethod
        def setup_context(
            ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]
        ) -> None:
            remember(ctx, inputs[:num_tensors], inputs[num_tensors:], output)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            return first_order(ctx, grads, bwd, num_args + 2)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
            tensors, others = inputs[:-1], inputs[-1]
            output = op.run_forward(*tensors, *others)
            remember(ctx, tensors, others, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            return first_order(ctx, grads, op.direct_backward, num_tensors + 1)

    # Without a gradient, torch.compile infers from the number of parameters that forward takes no
    # ctx.
    Forward.forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY)
            for n in (*op.Arguments._fields, "backend", "strict")
        ]
    )
    Forward.__name__ = Direct.__name__ = f"{name}_function"
    return Forward, Direct, gradients


def autograd_kernel(op: Op) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the kernel of the forward raw op at the dispatch key Autograd.

    The public function applies the op's Function itself. A torch.export graph contains only the raw
    op; without this kernel a training step of the exported program would lose the gradient through
    it.
    """
    fwd, function, num_args = op.fwd, op.function, op.num_args

    def kernel(*args: Any) -> tuple[torch.Tensor, ...]:
        if needs_gradient(*args[: op.num_tensors]):
            # The dispatcher drops trailing arguments that equal the schema's defaults.
            outputs: tuple[torch.Tensor, ...] = function.apply(
                *args, *(None, False)[len(args) - num_args :]
            )
            return outputs
        with torch._C._AutoDispatchBelowAutograd():
            return fwd(*args)

    return kernel


def _second_order(
    name: str, inputs: Sequence[Any], cotangents: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of the backward op.

    It differentiates (d arguments) = vjp of the reference at (arguments, d outputs).
    """
    op = OPS[name]
    num_grads, num_args = len(op.grad_names), len(op.Arguments._fields)
    grads, args, wanted = inputs[:num_grads], inputs[num_grads : num_grads + num_args], inputs[-3]
    result: list[torch.Tensor | None] = [None] * len(inputs)
    asked = {i: c for i, c, want in zip(op.positions, cotangents, wanted) if want and c is not None}
    if not asked:
        return tuple(result)
    # a mask may be bool
    live = [
        i for i in op.positions if isinstance(args[i], torch.Tensor) and args[i].is_floating_point()
    ]
    given = [i for i, g in enumerate(grads) if g is not None]

    def first_order(*primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        d_outputs, tensors = primals[: len(given)], primals[len(given) :]
        vjp = torch.func.vjp(lambda *t: reference_outputs(op, args, live, t, given), *tensors)[1]
        by_arg = dict(zip(live, vjp(d_outputs)))
        return tuple(by_arg[i] for i in asked)

    vjp = torch.func.vjp(first_order, *(grads[i] for i in given), *(args[i] for i in live))[1]
    seconds = vjp(tuple(asked.values()))
    for place, second in zip([*given, *(num_grads + i for i in live)], seconds):
        result[place] = second
    return tuple(result)


def reference_outputs(
    op: Op,
    args: Sequence[Any],
    places: Sequence[int],
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    """Return the chosen outputs of the reference, with ``tensors`` as arguments ``places``."""
    full = list(args)
    for i, t in zip(places, tensors):
        full[i] = t
    with torch.autocast(full[0].device.type, enabled=False):
        results = op.reference(op.Arguments(*full))
    return tuple(results[i] for i in outputs)
