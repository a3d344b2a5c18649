# SPDX-License-Identifier: Apache-2.0
"""Base of all models: presets, saving, loading and weights from Hugging Face."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from typing_extensions import Self

from .._version import __version__
from ..nn.cache import DecoderCache, Step
from ..nn.experts import MixtureOptions, balance_loss
from ..nn.masks import causal, is_tree, padding
from ..ops._core.tensors import is_sharded
from . import _convert, _files
from ._output import Output
from ._parameters import PARTS, ParameterTable, parameter_table
from ._settings import Undrawn, check_settings

if TYPE_CHECKING:
    from ..nn.context import Context
    from ..nn.heads import Classifier


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a model, the fields of each model's config."""


class Model(nn.Module):
    """A module built from a frozen config.

    Class attributes: ``Config``, the dataclass; ``PRESETS``, name to config; ``CONVERSIONS``, the
    conversion of Hugging Face configs and weights per ``model_type``.
    """

    Config: ClassVar[type[Any]]
    PRESETS: ClassVar[dict[str, Any]]
    CONVERSIONS: ClassVar[dict[str, _convert.Conversion]] = {}
    config: ModelConfig  # narrowed by each model
    takes_context: ClassVar[bool] = False  # whether several ranks may share a sequence
    context: Context | None = None  # set by nn.context_parallel: those ranks
    __call__: Callable[..., Output]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, self.Config):
            raise TypeError(
                f"{type(self).__name__} is made from a {self.Config.__name__}, got"
                f" {type(config).__name__}"
            )
        self.config = config

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> Self:
        """Return an untrained model of a preset size.

        Args:
            changes: values that replace fields of its config.

        Raises:
            ValueError: unknown preset.
            TypeError: unknown field.
        """
        if name not in cls.PRESETS:
            raise ValueError(
                f"{cls.__name__} has no preset {name!r}; it has {', '.join(map(repr, cls.PRESETS))}"
            )
        fields = {f.name for f in dataclasses.fields(cls.Config)}
        if unknown := changes.keys() - fields:
            raise TypeError(
                f"{cls.Config.__name__} has no field {', '.join(sorted(unknown))}; it has"
                f" {', '.join(sorted(fields))}"
            )
        return cls(dataclasses.replace(cls.PRESETS[name], **changes))

    def _with_balance(self, loss: torch.Tensor | None) -> torch.Tensor | None:
        """Return the loss, plus the weighted balance loss of experts in training."""
        experts: dict[str, Any] | None = getattr(self.config, "experts", None)
        if loss is None or experts is None or not self.training:
            return loss
        balance = balance_loss(self)
        return (
            loss if balance is None else loss + MixtureOptions(**experts).balance_weight * balance
        )

    def _keys(
        self, attention_mask: torch.Tensor | None, batch: int, length: int
    ) -> tuple[torch.Tensor | None, int, int]:
        """Return (mask, sequences, keys) of the full sequence, arguments of ``padding``."""
        if self.context is None:
            return attention_mask, batch, length
        device = next(self.parameters()).device
        return (
            self.context.mask(attention_mask, batch, length, device),
            batch,
            self.context.length(length),
        )

    def _rows(self, x: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Return this process's part of (B, L): all, or its rows under a context."""
        return x if self.context is None else self.context.rows(x, fill)

    def _step(
        self, cache: DecoderCache | None, ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> Step:
        """Return the call's positions and masks, of the full sequence under a context."""
        if is_tree(attention_mask) and (reason := self._why_no_tree()) is not None:
            raise ValueError(
                f"{type(self).__name__}: a tree of drafts, attention_mask"
                f" {tuple(attention_mask.shape)}, is not read: {reason}"
            )
        if self.context is None:
            return Step.of(cache, ids, attention_mask)
        if cache is not None:
            raise ValueError(
                f"{type(self).__name__}: a cache is of one process: generate outside of"
                " context_parallel"
            )
        mask, batch, keys = self._keys(attention_mask, *ids.shape)
        return Step(0, keys, causal(padding(mask, batch, keys), 0, keys))

    def _why_no_tree(self) -> str | None:
        """Return why a tree of drafts is unsupported, or None.

        The position of a tree node differs from its index in the cache.
        """
        return "its attention goes by the places of tokens in the cache"

    def _places(
        self, at: torch.Tensor | None, length: int, device: torch.device
    ) -> torch.Tensor | None:
        """Return the position ids of this process's rows; None: consecutive from the start."""
        if self.context is None:
            return at
        return self._rows(torch.arange(length, device=device)[None] if at is None else at)

    def _mean_loss(
        self, head: Classifier, hidden: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean loss over all labels, including other ranks' rows."""
        return (
            head.loss(hidden, labels)
            if self.context is None
            else self.context.mean_loss(head, hidden, labels)
        )

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def parameter_table(self) -> ParameterTable:
        """Return parameter counts by part and, within a stack, by sub-layer; ``print`` it.

        Parts are embeddings, encoder, decoder and output.
        """
        return parameter_table(self, self._parts())

    def _parts(self) -> dict[str, str]:
        """Return the part of each module, by name."""
        return PARTS

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Return the plan for ``torch.distributed.tensor.parallel.parallelize_module``.

        Attention is split by heads, feed-forward networks by their hidden layer, and embeddings and
        the output layer by vocabulary. All other parameters are replicated. See
        docs/distributed.md.

        Raises:
            ValueError: the model has mixtures of experts, which use expert parallelism.
        """
        from ..nn.parallel import plan_of  # the import takes longer than this package

        return plan_of(self)

    def state(self) -> dict[str, torch.Tensor]:
        """Return parameters and saved buffers, each once; a tied weight has its first name."""
        names = dict(self.named_parameters()) | dict(self.named_buffers())
        full = self.state_dict()
        return {name: full[name] for name in names if name in full}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write weights and config to ``folder``; an interruption leaves the old files intact."""
        state = self.state()
        if is_sharded(list(state.values())):
            raise ValueError(
                f"{type(self).__name__}.save: its parameters are split over ranks:"
                " load_state(nn.parallel.gathered_state(model), …) into a whole model and save"
                " that, or use torch.distributed.checkpoint"
            )
        about = {
            "model": type(self).__name__,
            "version": __version__,
            "config": dataclasses.asdict(self.config),
        }
        _files.write(folder, state, about)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], **changes: Any) -> Self:
        """Return a model that :meth:`save` wrote.

        Args:
            changes: values that replace fields of its config (dropout, not sizes).

        Raises:
            ValueError: another class's file, a pickle, or missing, extra or misshapen tensors, by
                name.
        """
        state, about = _files.read(folder)
        if about.get("model") != cls.__name__:
            raise ValueError(f"{folder} holds a {about.get('model')}, not a {cls.__name__}")
        fields = {f.name: f for f in dataclasses.fields(cls.Config)}
        if unknown := (about["config"] | changes).keys() - fields.keys():
            raise ValueError(
                f"{folder}: {cls.Config.__name__} has no field {', '.join(sorted(unknown))}"
            )
        settings = {
            k: tuple(v) if isinstance(v, list) else v
            for k, v in (about["config"] | changes).items()
        }
        config = cls._checked_config(settings, state, f"{folder}")
        cls._without_memory(config, f"{folder}")._check_state(state, f"{folder}")
        model = cls(config)._in_dtype_of(state)
        model.load_state(state, f"{folder}")
        return model

    @classmethod
    def _without_memory(cls, config: Any, source: str) -> Self:
        """Return a model on the meta device, to compare shapes before allocating memory."""
        try:
            with torch.device("meta"), Undrawn():
                return cls(config)
        except (RuntimeError, TypeError, ArithmeticError) as error:
            raise ValueError(
                f"{source}: {cls.__name__} cannot be built from its config: {error}"
            ) from error

    @classmethod
    def _checked_config(
        cls, settings: dict[str, Any], state: dict[str, torch.Tensor], source: str
    ) -> Any:
        """Return the config of these settings.

        Raises:
            ValueError: a setting has a wrong type or does not fit the weights.
        """
        check_settings(cls.Config, settings, state, source)
        try:
            return cls.Config(**settings)
        except TypeError as error:
            raise ValueError(f"{source}: {error}") from error

    def _in_dtype_of(self, state: dict[str, torch.Tensor]) -> Self:
        """Return this model in the floating dtype of the tensors, if they share one."""
        dtypes = {t.dtype for t in state.values() if t.is_floating_point()}
        return self.to(dtypes.pop()) if len(dtypes) == 1 else self

    def load_state(self, state: dict[str, torch.Tensor], source: str) -> None:
        """Copy tensors in by name, all or none.

        Raises:
            ValueError: lists the missing, unknown and misshapen tensors.
        """
        self._check_state(state, source)
        with torch.no_grad():
            for name, t in self.state().items():
                t.copy_(state[name])

    def _check_state(self, state: dict[str, torch.Tensor], source: str) -> None:
        mine = self.state()
        wrong = [f"{name} is missing" for name in mine.keys() - state.keys()]
        wrong += [f"{name} is unknown" for name in state.keys() - mine.keys()]
        wrong += [
            f"{name} is {tuple(t.shape)}, {type(self).__name__} wants {tuple(mine[name].shape)}"
            for name, t in state.items()
            if name in mine and t.shape != mine[name].shape
        ]
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise ValueError(
                f"{source} does not fit {type(self).__name__}: {'; '.join(sorted(wrong)[:8])}{more}"
            )

    @classmethod
    def from_hf(cls, model: Any) -> Self:
        """Return the model converted from a Hugging Face model in memory; weights are copied.

        Dropout is the config's.

        Raises:
            ValueError: the model type or a setting is unsupported; the message names it.
        """
        return cls._converted(
            model.config.to_dict(), dict(model.state_dict()), type(model).__name__
        ).train(model.training)

    @classmethod
    def load_hf(cls, folder: str | os.PathLike[str]) -> Self:
        """Return a converted model in eval mode from a folder of ``config.json`` and safetensors.

        It is :meth:`from_hf` for local files and does not need transformers.
        """
        state, config = _files.read_hugging_face(folder)
        architectures = config.get("architectures")
        if architectures and not (
            isinstance(architectures, list) and isinstance(architectures[0], str)
        ):
            raise ValueError(
                f"{folder}: architectures must be a list of names, got {architectures!r:.60}"
            )
        return cls._converted(config, state, (architectures or [""])[0]).eval()

    @classmethod
    def _converted(
        cls, config: dict[str, Any], state: dict[str, torch.Tensor], architecture: str
    ) -> Self:
        kind = config.get("model_type")
        if not isinstance(kind, str) or kind not in cls.CONVERSIONS:
            known = ", ".join(cls.CONVERSIONS) or "none"
            raise ValueError(
                f"{cls.__name__}: cannot take the Hugging Face model type {kind!r}; it takes"
                f" {known}"
            )
        conversion = cls.CONVERSIONS[kind]
        source = f"the Hugging Face model {architecture}"
        try:
            settings = conversion.settings(config, state, architecture)
        except KeyError as error:
            raise ValueError(
                f"{source}: its config or its weights lack {error.args[0]!r}"
            ) from error
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"{source}: its config has a value of a wrong type: {error}"
            ) from error
        ours = cls._checked_config(settings, state, source)
        shell = cls._without_memory(ours, source)
        translated = conversion.translate(shell.state(), state)
        shell._check_state(translated, source)
        model = cls(ours)._in_dtype_of(state)
        model.load_state(translated, source)
        return model
