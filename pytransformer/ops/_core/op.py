# SPDX-License-Identifier: Apache-2.0
"""Declaration of an op with several backends, one of which runs each call.

An :class:`Op` is declared once, in the file of its family::

    layer_norm = Op(
        "layer_norm",
        arguments="Tensor x, Tensor? weight, Tensor? bias, float eps",
        outputs=("y", "mean", "rstd"),       # of the forward raw op, all tensors
        differentiable_outputs=1,            # the first n outputs have gradients
        differentiable=("x", "weight", "bias"),
        saved=("mean", "rstd"),              # outputs that backward receives
        problem=...,                         # properties of the arguments' class, for backends
        empty_outputs=...,                   # uninitialized outputs; also the fake kernel
        flops=...,                           # forward, or a pair if backward's are not 5/2 of it
        family="layer_norm",                 # name of its files, if not the op's name
        returned=1)                          # number of outputs of the public function

Only this place names the op: tools and tests iterate over ``OPS`` and locate an op's files by its
family.

It defines two raw ops of the library ``pytransformer``:

- ``layer_norm_fwd(arguments, backend, strict)``
- ``layer_norm_bwd(grad_outputs, arguments, saved, wanted, backend, strict)``, which returns one
  tensor for each name in ``differentiable``, empty if ``wanted`` is false.

All backends save the same tensors, so backward may run on another backend.

A backend's ``why_not(arguments)`` returns None if it supports the problem, else a readable reason.
The body of the raw op selects the backend, so torch.compile sees one op, without a graph break and
without recompilation when the selection changes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.library import Library, register_fake, register_vmap

from .autograd import (
    autograd_kernel,
    compiling_a_derivative,
    each_once,
    make_functions,
    reference_outputs,
    transforming,
    unwatched,
    vmap_by_loop,
)
from .dispatch import (
    BackendError,
    NotLaunched,
    is_broken,
    ordered,
    record_fallback,
    step_down,
    unasked_reason,
)
from .registry import (
    BACKENDS,
    OPS,
    Backend,
    arguments_class,
    at_home,
    forced_backend,
    observing_ops,
    record,
    replaced,
)
from .tensors import check_storage, empty_in_order, is_sharded, looks_at_values

LIBRARY = Library("pytransformer", "DEF")
# returns true if the running backward keeps what forward saved (retain_graph), and outside of one
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
_thread = threading.local()  # a forward op runs in its caller's thread
Flops = Callable[[Any], int]
ShardedRun = Callable[["Op", Any, str | None, bool], tuple[torch.Tensor, ...]]
# Returns the function that computes calls with DTensor arguments, in pytransformer.distributed, a
# higher layer. The first such call imports it, because torch.distributed.tensor takes longer to
# import than this package.
sharded_loaders: list[Callable[[], ShardedRun]] = []


class Op:
    """A public op: its two raw ops, its backends and its gradient; see the module's docstring."""

    # public call -> (arguments, backend, strict); set by the op's file
    prepare: Callable[..., tuple[Any, str | None, bool]]
    reference: Callable[[Any], tuple[torch.Tensor, ...]]  # set by add_reference
    # Set by the op's file if its backward calls ``may_overwrite_saved``.
    overwrites_saved = False

    def __init__(
        self,
        name: str,
        *,
        arguments: str,
        outputs: Sequence[str],
        differentiable_outputs: int,
        differentiable: Sequence[str],
        saved: Sequence[str],
        empty_outputs: Callable[[Any], tuple[torch.Tensor, ...]],
        flops: Flops | tuple[Flops, Flops] | None = None,
        problem: type | None = None,
        family: str | None = None,
        returned: int = 1,
    ) -> None:
        self.family = family or name
        self.name, self.outputs, self.differentiable, self.saved = (
            name,
            tuple(outputs),
            tuple(differentiable),
            tuple(saved),
        )
        self.returned = self.outputs[:returned]
        # For an op that writes into arguments, "Tensor(a!) name": returns the contents of these
        # arguments after a call of the public function, by name.
        self.written: Callable[[Mapping[str, Any]], Mapping[str, torch.Tensor]] = lambda named: {}
        self.grad_names = tuple(f"grad_{n}" for n in outputs[:differentiable_outputs])
        self._declared: dict[str, Backend] = {}
        self.backends = {}
        names = [a.split()[-1].split("=")[0] for a in arguments.split(",")]
        self.Arguments = arguments_class(f"{name}_arguments", names, problem)
        self.positions = tuple(names.index(n) for n in differentiable)
        is_tensor = [a.split()[0].startswith("Tensor") for a in arguments.split(",")]
        self.num_args, self.num_tensors = len(names), sum(is_tensor)
        assert all(is_tensor[: self.num_tensors]), (
            f"{name}: the tensors come first among the arguments"
        )
        self.empty_outputs = empty_outputs
        self._tensor_names = tuple(names[: self.num_tensors])
        self._fwd_name, self._bwd_name = f"{name}_fwd", f"{name}_bwd"

        def returns(items: Sequence[str]) -> str:
            return "(" + ", ".join(f"Tensor {n}" for n in items) + ")"

        grads = "".join(f"Tensor? {n}, " for n in self.grad_names)
        saved_args = "".join(f", Tensor {n}" for n in saved)
        tail = "str? backend=None, bool strict=False"
        self.fwd = self._define(
            self._fwd_name,
            f"({arguments}, {tail}) -> {returns(outputs)}",
            self.run_forward,
            self._forward_fake,
        )
        read = re.sub(r"\([a-z]!\)", "", arguments)
        self.bwd = self._define(
            self._bwd_name,
            f"({grads}{read}{saved_args}, bool[] wanted, {tail}) ->"
            f" {returns([f'd_{n}' for n in differentiable])}",
            self._backward_body,
            self._backward_fake,
        )
        if flops is not None:
            # Attention's backward recomputes the first product and has two for each of forward's:
            # 5/2.
            self._count_flops(
                *(flops if isinstance(flops, tuple) else (flops, lambda a: flops(a) * 5 // 2))
            )
        self.function, self.direct_function, self.gradients = make_functions(self)
        if self.positions:
            LIBRARY.impl(self._fwd_name, autograd_kernel(self), "Autograd")
        OPS[name] = self

    @functools.cached_property
    def positional(self) -> tuple[str, ...]:
        """Return the arguments that the public function and ``prepare`` take by position."""
        parameters = inspect.signature(self.prepare).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    # ---- registration

    def _define(
        self, name: str, schema: str, body: Callable[..., Any], fake: Callable[..., Any]
    ) -> torch._ops.OpOverload:
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, body, "CompositeExplicitAutograd")
        register_fake(f"pytransformer::{name}", fake, lib=LIBRARY)
        raw = getattr(torch.ops.pytransformer, name).default
        register_vmap(f"pytransformer::{name}", vmap_by_loop(raw), lib=LIBRARY)
        return raw

    def _count_flops(self, flops: Flops, backward: Flops) -> None:
        from torch.utils.flop_counter import register_flop_formula

        n, skip = self.num_args, len(self.grad_names)
        register_flop_formula(self.fwd._overloadpacket, get_raw=True)(
            lambda *a, **_: flops(self.Arguments(*a[:n]))
        )
        register_flop_formula(self.bwd._overloadpacket, get_raw=True)(
            lambda *a, **_: backward(self.Arguments(*a[skip : skip + n]))
        )

    def add_reference(
        self,
        forward: Callable[[Any], tuple[torch.Tensor, ...]],
        *,
        extra_bytes: Callable[[Any], int] = lambda a: 0,
        check_values: Callable[[Any], None] = lambda a: None,
    ) -> None:
        """Add the reference backend, which is also the source of higher derivatives.

        ``forward`` is plain differentiable PyTorch that returns all outputs. ``check_values``
        checks tensor values if ``looks_at_values`` returns true.
        """
        self.reference = forward

        def checked_forward(a: Any) -> tuple[torch.Tensor, ...]:
            if looks_at_values(a[0].device):
                check_values(a)
            with torch.no_grad(), torch.autocast(a[0].device.type, enabled=False):
                # Use the memory order and dtype that the fake kernel promised, in backward too.
                return tuple(e.copy_(r) for e, r in zip(self.empty_outputs(a), forward(a)))

        def backward(
            a: Any, grads: Any, saved: Any, wanted: Sequence[bool]
        ) -> Sequence[torch.Tensor | None]:
            places = [i for i, want in zip(self.positions, wanted) if want]
            given = [i for i, g in enumerate(grads) if g is not None]
            results: Sequence[torch.Tensor]
            with autograd_inside():
                leaves = [a[i].detach().requires_grad_() for i in places]
                outputs = reference_outputs(self, a, places, leaves, given)
                # An output may depend on no leaf, as lse does on value.
                pairs = [(o, grads[i]) for o, i in zip(outputs, given) if o.requires_grad]
                results = [torch.zeros_like(t) for t in leaves]
                if pairs:
                    results = torch.autograd.grad(
                        [o for o, _ in pairs], leaves, [g for _, g in pairs], materialize_grads=True
                    )
            by_place = dict(zip(places, results))
            empty = zip(self.positions, self.empty_gradients(a, wanted))
            return [None if e is None else e.copy_(by_place[i]) for i, e in empty]

        self.backend(Backend("reference", checked_forward, backward, lambda a: None, extra_bytes))

    def backend(self, backend: Backend) -> Backend:
        """Add a backend."""
        if backend.name not in BACKENDS:
            raise ValueError(f"backend {backend.name!r} is not one of {', '.join(BACKENDS)}")
        known = {**self.backends, backend.name: backend}
        self._declared = {n: known[n] for n in BACKENDS if n in known}
        self.backends = self._declared
        return backend

    @property
    def backends(self) -> Mapping[str, Backend]:
        """Backends by name, in the order of BACKENDS; assign another mapping to replace them.

        The C++ fast path supports only the declared backends. ``replaced`` disables it while they
        differ.
        """
        return self._backends

    @backends.setter
    def backends(self, backends: Mapping[str, Backend]) -> None:
        self._backends = MappingProxyType(dict(backends))
        others = [name for name in replaced if name != self.name]
        same = [*self._backends.items()] == [*self._declared.items()]
        replaced[:] = others if same else [*others, self.name]

    # ---- bodies of the raw ops

    def run(
        self, a: Any, backend: str | None = None, strict: bool = False, save: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Run the forward raw op; ``save=False`` may omit outputs that only backward needs."""
        check_storage(self.name, self._tensor_names, a)
        chosen = self.select(a, backend, strict)
        record(self._fwd_name, chosen.name)
        if observing_ops.open:
            for observer in observing_ops.values():
                observer(self, a, chosen.name)
        try:
            if not save and chosen.infer is not None:
                return chosen.infer(a)
            return tuple(chosen.forward(a))
        except Exception as error:
            step_down(
                self.name, chosen.name, a, error, forced=bool(backend or forced_backend(self.name))
            )
        return self.run(a, backend, strict, save)

    def run_forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Run the body of the forward raw op."""
        n = self.num_args
        return self.run(self.Arguments._make(args[:n]), *args[n:])

    def run_backward(self, *args: Any) -> Sequence[torch.Tensor | None]:
        """Run the body of the backward raw op; gradients that are not needed are None."""
        grads, a, saved, wanted, rest = self._split_backward(args)
        for names, tensors in (
            (self.grad_names, grads),
            (self._tensor_names, a),
            (self.saved, saved),
        ):
            check_storage(self.name, names, tensors)
        chosen = self.select(a, *rest, direction="bwd")
        record(self._bwd_name, chosen.name)
        try:
            return chosen.backward(a, grads, saved, wanted)
        except Exception as error:
            step_down(
                self.name,
                chosen.name,
                a,
                error,
                forced=bool(any(rest[:1]) or forced_backend(self.name)),
            )
        return self.run_backward(*args)

    def backward(self, *args: Any) -> Sequence[torch.Tensor | None]:
        """Run the backward raw op, directly if nothing observes the call."""
        watched = torch.compiler.is_compiling() or not unwatched(args[len(self.grad_names)], args)
        return self.bwd(*args) if watched else self.run_backward(*args)

    def direct_backward(self, *args: Any) -> Sequence[torch.Tensor | None]:
        """Run ``backward`` in an eager node, which may overwrite saved tensors if they are freed.

        It may not if something observes the call: the raw op's results share no memory with its
        arguments.
        """
        last = self.overwrites_saved and not _keeps_graph()
        if not (last and unwatched(args[len(self.grad_names)], args)):
            return self.backward(*args)
        _thread.last_backward = True
        try:
            return self.run_backward(*args)
        finally:
            _thread.last_backward = False

    def _backward_body(self, *args: Any) -> tuple[torch.Tensor, ...]:
        return self._filled(args[len(self.grad_names)], self.run_backward(*args))

    def _forward_fake(self, *args: Any) -> tuple[torch.Tensor, ...]:
        return tuple(self.empty_outputs(self.Arguments._make(args[: self.num_args])))

    def _backward_fake(self, *args: Any) -> tuple[torch.Tensor, ...]:
        _, a, _, wanted, _ = self._split_backward(args)
        return self._filled(a[0], self.empty_gradients(a, wanted))

    def _split_backward(self, args: Sequence[Any]) -> tuple[Any, ...]:
        g, n, s = len(self.grad_names), self.num_args, len(self.saved)
        return (
            args[:g],
            self.Arguments._make(args[g : g + n]),
            args[g + n : g + n + s],
            args[g + n + s],
            args[g + n + s + 1 :],
        )

    def empty_gradients(self, a: Any, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """Return uninitialized gradients, each in its argument's dtype and memory order."""
        return [empty_in_order(a[i]) if want else None for i, want in zip(self.positions, wanted)]

    def _filled(
        self, like: torch.Tensor, grads: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        return tuple(like.new_empty(0) if g is None else g for g in grads)

    # ---- choice

    def select(
        self, a: Any, backend: str | None = None, strict: bool = False, *, direction: str = "fwd"
    ) -> Backend:
        """Return the backend that computes this problem.

        Raises BackendError if a forced backend does not support it.
        """
        forced = backend or forced_backend(self.name)
        if forced is not None:
            reason = self.reason(forced, a)
            if reason is not None:
                raise BackendError(
                    f"{self.name}: backend {forced!r} was forced but cannot do this: {reason}"
                )
            return self.backends[forced]
        candidate, reasons = self._first(a, direction)
        if candidate is not None:
            if reasons and is_broken(why := joined(reasons)):
                record_fallback(
                    self.name,
                    why,
                    instead=f"the backend {candidate.name}",
                    strict=strict,
                    once=True,
                )
            return candidate
        if "reference" not in self.backends:
            raise BackendError(f"{self.name}: no backend can do this: {reasons}")
        if reasons:
            why = joined(reasons)
            if getattr(_thread, "fused", False):
                raise NotLaunched(why)
            record_fallback(
                self.name, why, instead="the reference", strict=strict, once=is_broken(why)
            )
        return self.backends["reference"]

    def _first(self, a: Any, direction: str) -> tuple[Backend | None, dict[str, str]]:
        """Return the first fused backend that computes the problem, and why others do not."""
        device, reasons = a[0].device.type, dict[str, str]()
        for name, kernel in ordered(self, a, direction):
            candidate = self.backends[name]
            if at_home(name, device) and (kernel is None or kernel == candidate.kernel(a)):
                reason = unasked_reason(self, candidate, a)
                if reason is None:
                    return candidate, reasons
                reasons[name] = reason
        return None, reasons

    def selects(self, name: str, a: Any, backend: str | None) -> bool:
        """Return true if :meth:`select` returns this backend; records no fallback."""
        if (forced := backend or forced_backend(self.name)) is not None:
            return forced == name and self.reason(name, a) is None
        first, _ = self._first(a, "fwd")
        return first is not None and first.name == name

    def fused(self, a: Any) -> tuple[torch.Tensor, ...]:
        """Run the op, but raise :class:`NotLaunched` if every fused backend failed.

        The caller has a better fallback than the reference.
        """
        _thread.fused = True
        try:
            return self(a)
        finally:
            _thread.fused = False

    def reason(self, backend: str, a: Any) -> str | None:
        """Return why the backend does not support the problem, or None."""
        if backend not in self.backends:
            return f"{self.name} has no backend {backend!r}, only {', '.join(self.backends)}"
        return self.backends[backend].why_not(a)

    def why_not_fused(self, a: Any) -> str | None:
        """Return why no fused backend supports the problem, or None.

        A forced backend also gives None.
        """
        if forced_backend(self.name) is not None:
            return None
        device, reasons = a[0].device.type, dict[str, str]()
        for name, candidate in self.backends.items():
            if at_home(name, device):
                if (reason := unasked_reason(self, candidate, a)) is None:
                    return None
                reasons[name] = reason
        return joined(reasons) or f"no fused backend is for {device}"

    # ---- calls

    def __call__(
        self, a: Any, backend: str | None = None, strict: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Run the op, with gradients if needed.

        The call uses an autograd Function only if something needs a gradient or a transform is
        active, and skips the dispatcher if nothing observes it.
        """
        if torch.compiler.is_compiling():
            if compiling_a_derivative():
                raise NotImplementedError(
                    f"{self.name}: torch.func.grad, vjp, jvp, and vmap but under no_grad, cannot be"
                    " traced into one graph with this op: without fullgraph=True they run eagerly;"
                    " or compile inside them, torch.func.grad(torch.compile(f))"
                )
            # An exported graph contains raw ops, whose Autograd kernels make it trainable.
            raw = torch.compiler.is_exporting() or not self.positions
            return (self.fwd if raw else self.function.apply)(*each_once(a), backend, strict)
        if not unwatched(a[0], a):
            if is_sharded(a):
                return sharded_loaders[0]()(self, a, backend, strict)
            through = self.positions and (self._needs_gradient(a) or transforming())
            return (self.function.apply if through else self.fwd)(*a, backend, strict)
        if self._needs_gradient(a):
            n = self.num_tensors
            return self.direct_function.apply(*a[:n], (*a[n:], backend, strict))
        return self.run(a, backend, strict, save=False)

    def _needs_gradient(self, a: Any) -> bool:
        if torch.is_grad_enabled():
            for i in self.positions:
                if a[i] is not None and a[i].requires_grad:
                    return True
        return False


def may_overwrite_saved() -> bool:
    """Return true if the running backward may overwrite and return the tensors that it received."""
    return getattr(_thread, "last_backward", False)


def joined(reasons: Mapping[str, str | None]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


@contextlib.contextmanager
def autograd_inside() -> Iterator[None]:
    """Enable autograd in the body of a raw op.

    A dispatch mode (opcheck, fake tensors) may have disabled it.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    include, exclude = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )
    with torch._C._ForceDispatchKeyGuard(include, exclude - keys), torch.enable_grad():
        yield
