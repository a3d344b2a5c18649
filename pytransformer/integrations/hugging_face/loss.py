# SPDX-License-Identifier: Apache-2.0
"""The training loss of transformers' language models without logits in memory.

A call with labels runs the model's forward without them while the output layer returns its input.
``linear_cross_entropy`` then computes the loss from that input and the layer's weight. Labels are
shifted, and ``num_items_in_batch`` divides the sum, if the model's code does so: a run on a few
tokens at setup decides.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional as F

from ...ops.cross_entropy import linear_cross_entropy
from ..convert.modules import unfusable

LENGTH, ITEMS = 6, 7  # of the run at setup
# Arguments that change the loss or its logits beyond what this file computes.
OTHERS = ("shift_labels", "logits_to_keep", "output_router_logits", "ignore_index")
LIMIT = 32  # in eps, of the loss at setup
BIAS = "final_logits_bias"  # which BART and Marian add to the logits
CAPS = ("final_logit_softcapping", "logits_soft_cap")  # of Gemma and RecurrentGemma, in the config


class FusedLoss:
    """The ``forward`` of a model with a fused loss."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.__signature__ = inspect.signature(model.forward)
        self.shift = self.by_items = False
        why = _why_not(model)
        if why is None and not self._settle():
            why = "its loss differs from the cross entropy of its output layer"
        if why is not None:
            raise ValueError(f"fused_loss: {type(model).__name__} is not supported: {why}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output; in training with labels it has the loss and no logits."""
        model = self.model
        given: dict[str, Any] = dict(self.__signature__.bind_partial(*args, **kwargs).arguments)
        for parameter in self.__signature__.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given.update(given.pop(parameter.name, {}))
        changed = any(given.get(name) is not None for name in OTHERS) or not given.get(
            "return_dict", True
        )
        usual = model.training and given.get("labels") is not None and not changed
        if usual and not torch.compiler.is_compiling() and _why_not(model) is None:
            out = self._run(given)
            if out is not None:
                return out
        return type(model).forward(model, *args, **kwargs)

    def _run(self, given: dict[str, Any]) -> Any:
        """Return the output with its loss, or None if the model changes its logits."""
        labels, items = given["labels"], given.get("num_items_in_batch")
        hidden, cap, out = self._hidden(given)
        if hidden is None:
            return None
        loss = self._loss(hidden, cap, labels, items if self.by_items else None)
        return type(out)(loss=loss, **{n: v for n, v in out.items() if n not in ("loss", "logits")})

    def _hidden(self, given: dict[str, Any]) -> tuple[torch.Tensor | None, float | None, Any]:
        """Return the output layer's input, the softcap and the model's output.

        The input is None if the model changes its logits otherwise.
        """
        model = self.model
        seen: list[torch.Tensor] = []
        head, bias = model.get_output_embeddings(), getattr(model, BIAS, None)
        labels = given["labels"]
        given = {n: v for n, v in given.items() if n not in ("labels", "num_items_in_batch")}
        given["return_dict"] = True
        if model.config.is_encoder_decoder and given.get("decoder_input_ids") is None:
            make = model.prepare_decoder_input_ids_from_labels
            given["decoder_input_ids"] = make(labels=labels)

        def identity(x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return x

        head.forward = identity
        try:
            if bias is not None:
                model._buffers[BIAS] = bias.new_zeros(())
            out = type(model).forward(model, **given)
        finally:
            del head.forward
            if bias is not None:
                model._buffers[BIAS] = bias
        if len(seen) != 1:
            return None, None, out
        x, config = seen[0], model.config.get_text_config()
        cap = next(filter(None, (getattr(config, name, None) for name in CAPS)), None)
        if cap is not None and torch.equal(out.logits, torch.tanh(x.detach() / cap) * cap):
            return x, cap, out
        return (x if out.logits is x or torch.equal(out.logits, x) else None), None, out

    def _loss(
        self, hidden: torch.Tensor, cap: float | None, labels: torch.Tensor, items: Any
    ) -> torch.Tensor:
        head, bias = self.model.get_output_embeddings(), getattr(self.model, BIAS, None)
        if self.shift:
            labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
        loss = linear_cross_entropy(
            hidden,
            head.weight,
            labels.to(hidden.device),
            bias=head.bias if bias is None else bias.view(-1),
            softcap=cap,
            reduction="mean" if items is None else "sum",
        )
        return loss if items is None else loss / items

    @torch.no_grad()
    def _settle(self) -> bool:
        """Find out if labels are shifted and if items divide; return whether the losses agree."""
        model = self.model
        training = [m for m in model.modules() if m.training]
        generator = torch.Generator().manual_seed(0)
        size = min(
            model.config.get_text_config().vocab_size, model.get_output_embeddings().weight.shape[0]
        )
        ids, labels = torch.randint(size, (2, 1, LENGTH), generator=generator).to(model.device)
        labels[0, 2] = -100
        given = {"input_ids": ids, "labels": labels, "num_items_in_batch": ITEMS}
        model.eval()
        try:
            hidden, cap, _ = self._hidden(given)
            if hidden is None:
                return False
            limit = LIMIT * torch.finfo(hidden.dtype).eps
            plain = float(type(model).forward(model, input_ids=ids, labels=labels).loss)
            for self.shift in (False, True):
                if abs(float(self._loss(hidden, cap, labels, None)) - plain) <= limit * abs(plain):
                    break
            else:
                return False
            if self._accepts_items():
                divided = float(type(model).forward(model, **given).loss)
                by_items = float(self._loss(hidden, cap, labels, ITEMS))
                self.by_items = abs(by_items - divided) <= limit * abs(divided)
                return self.by_items or divided == plain
            return True
        finally:
            for m in training:
                m.training = True

    def _accepts_items(self) -> bool:
        parameters = self.__signature__.parameters.values()
        return any(p.kind is p.VAR_KEYWORD or p.name == "num_items_in_batch" for p in parameters)


def _why_not(model: Any) -> str | None:
    """Return why a loss cannot read the output layer's weight now, or None."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        return f"its output layer is {type(head).__name__}, not torch.nn.Linear"
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        return "its loss has a term of the router"
    if type(head.weight) not in (torch.nn.Parameter, torch.Tensor):
        return f"its output layer's weight is a {type(head.weight).__name__}"
    return unfusable(head)
