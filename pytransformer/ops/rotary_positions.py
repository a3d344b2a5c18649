# SPDX-License-Identifier: Apache-2.0
"""Angles of rotary positions: frequencies, their scaling, tables of cos and sin."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ._core.tensors import as_integer, check_number, check_unused

ScalingKind = Literal["linear", "dynamic", "llama3", "yarn"]
# Fields of RotaryScaling that each kind reads, besides kind and factor.
_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": ("original_length",),
    "llama3": ("original_length", "low_frequency_factor", "high_frequency_factor"),
    "yarn": ("original_length", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
# Keys of a configuration's rope parameters that each kind reads, and the keys of all kinds.
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "alpha"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    ),
}  # fmt: skip
_KEYS_OF_ALL = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings",
    "max_position_embeddings",
    "llama_4_scaling_beta",  # scales queries, not angles
)  # fmt: skip
# A configuration's fields about rotary positions: those read here, and those without influence on
# the angles (layout, and which layers rotate).
_CONFIG_FIELDS = (
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rotary_dim",
    "qk_rope_head_dim", "rope_interleave", "no_rope_layers", "no_rope_layer_interval",
    "ignore_keys_at_rope_validation",
)  # fmt: skip
_OTHER_POSITIONS = {"ernie4_5_vl_moe_text": "orders frequencies by time, height and width"}
MAX_DIMS = 1 << 16


@dataclass(frozen=True)
class RotaryScaling:
    """A change of the frequencies for sequences longer than the trained length.

    Attributes:
        kind: ``"linear"`` divides all frequencies by factor. ``"dynamic"`` increases the base with
            the sequence length beyond original_length (NTK). ``"llama3"`` divides low frequencies,
            keeps high frequencies and interpolates linearly between them. ``"yarn"`` interpolates
            over the dimensions and multiplies cos and sin by attention_factor.
        factor: the length factor. The fields below belong to the named kinds and raise with
            another.
        original_length: the trained length; for all kinds but linear.
        low_frequency_factor, high_frequency_factor: llama3: rotations within original_length at
            which the interpolation begins and ends.
        beta_fast, beta_slow: yarn: the same.
        attention_factor: yarn; None means 0.1 ln(factor) + 1.
        truncate: yarn: the interpolation begins and ends at integer dimensions.

    Sources: Chen et al., "Extending context window of large language models via positional
    interpolation" (2023); Peng et al., "YaRN" (2023); the report of Llama 3.1 (2024).
    """

    kind: ScalingKind
    factor: float = 1.0
    original_length: int | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScalingKind):
            raise ValueError(
                f"RotaryScaling: kind must be one of {', '.join(map(repr, get_args(ScalingKind)))},"
                f" got {self.kind!r}"
            )
        check_number("RotaryScaling", "factor", self.factor, positive=True)
        if "original_length" in _FIELDS[self.kind] and not self.original_length:
            raise ValueError(
                f"RotaryScaling: {self.kind} needs original_length, the length that the model was"
                " trained on"
            )
        unread = [f for f in fields(self) if f.name not in ("kind", "factor", *_FIELDS[self.kind])]
        given = {f.name: (getattr(self, f.name), f.default) for f in unread}
        check_unused("RotaryScaling", f"with kind {self.kind!r}", **given)

    @property
    def of_tables(self) -> float:
        """Factor of cos and sin."""
        if self.kind != "yarn":
            return 1.0
        return _grown(self.factor) if self.attention_factor is None else self.attention_factor


@dataclass(frozen=True)
class RotaryPositions:
    """The angles of rotary positions, ``position * frequency[i]`` for pair i.

    ``frequency[i] = base^(-2 i / dims)``, before scaling.

    Attributes:
        dims: even number of leading columns of a head that rotate.
        base: the slowest pair rotates once in about 2 pi base positions.
        scaling: for sequences longer than the trained length, or None.
        interleaved: pairs are (2i, 2i + 1), as in GPT-J; otherwise (i, i + dims / 2), as in Llama.
    """

    dims: int
    base: float = 10000.0
    scaling: RotaryScaling | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        dims = as_integer(self.dims)
        if dims is None or not 0 < dims <= MAX_DIMS or dims % 2:
            raise ValueError(
                f"RotaryPositions: dims must be an even int from 2 to {MAX_DIMS:,}, got"
                f" {self.dims!r}"
            )
        if self.scaling is not None and self.scaling.kind == "dynamic" and dims == 2:
            raise ValueError("RotaryPositions: dims must be at least 4 with dynamic scaling, got 2")
        object.__setattr__(self, "dims", dims)
        object.__setattr__(
            self, "base", check_number("RotaryPositions", "base", self.base, positive=True)
        )

    def frequencies(
        self,
        length: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """Return (dims / 2,) radians per position; dynamic scaling needs the sequence's ``length``.

        In float32 the values equal transformers' ROPE_INIT_FUNCTIONS on a CPU, which checkpoints
        were trained with. The CPU computes them for every device, because a GPU's pow may differ in
        the last bit, which is up to 0.01 radians of a pair at position 100,000.
        """
        where = torch.device("cpu" if device is None else device)
        base, scaling = self.base, self.scaling
        if scaling is not None and scaling.kind == "dynamic":
            assert scaling.original_length is not None
            ratio = max(length or 0, scaling.original_length) / scaling.original_length
            base = base * (scaling.factor * ratio - (scaling.factor - 1)) ** (
                self.dims / (self.dims - 2)
            )
        if where.type == "cpu" or torch.compiler.is_compiling() or _transformed():
            return _computed(self, base, dtype).to(where)
        return _kept(self, base, dtype, where)

    def tables(
        self,
        positions: torch.Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        length: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, (*positions.shape, dims) each, which all layers can share.

        :func:`pytransformer.rotary` and ``append_kv`` take them. ``length`` is the sequence's
        length for dynamic scaling; None means the highest position plus one, which synchronizes
        with a GPU.
        """
        if (
            self.scaling is not None
            and self.scaling.kind == "dynamic"
            and length is None
            and positions.numel()
        ):
            length = int(positions.max()) + 1
        work = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = self.frequencies(length, dtype=work, device=positions.device)
        factor = 1.0 if self.scaling is None else self.scaling.of_tables
        return tables(positions, frequencies, self.interleaved, factor, dtype)

    @classmethod
    def from_hugging_face(
        cls, config: Any, *, interleaved: bool = False, layer_type: str | None = None
    ) -> RotaryPositions:
        """Read a configuration of transformers.

        The fields are ``rope_parameters``, or the older ``rope_theta``, ``rope_scaling`` and
        ``rotary_dim``. ``layer_type`` is a key of ``rope_parameters`` if layers differ, for example
        ``"sliding_attention"``.

        Raises:
            ValueError: the configuration has no rotary positions, several without a ``layer_type``,
                an unsupported key, or an unsupported kind such as longrope;
                ``pytransformer.rotary(frequencies=…)`` accepts any frequencies.
        """
        found = _rope_parameters(config, layer_type)
        base = float(found.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
        dims = _turned_dims(found, config, layer_type)
        kind = found.get("rope_type", found.get("type", "default"))
        if kind == "dynamic" and found.get("alpha"):  # HunYuan: the base for any length
            return cls(dims, base * found["alpha"] ** (dims / (dims - 2)), None, interleaved)
        return cls(dims, base, _scaling(kind, found, config), interleaved)


def _computed(positions: RotaryPositions, base: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the frequencies with this base, on the CPU."""
    scaling = positions.scaling
    powers = base ** (torch.arange(0, positions.dims, 2, device="cpu").to(dtype) / positions.dims)
    if scaling is None or scaling.kind == "dynamic":
        return 1.0 / powers
    if scaling.kind == "linear":
        return 1.0 / powers / scaling.factor
    return (_llama3 if scaling.kind == "llama3" else _yarn)(powers, positions, scaling)


@functools.lru_cache(maxsize=64)
def _kept(
    positions: RotaryPositions, base: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the frequencies on a GPU, copied once.

    A copy synchronizes, and a CUDA graph cannot capture it.
    """
    with _disable_current_modes(), torch.inference_mode(False):
        return _computed(positions, base, dtype).to(device)


def _transformed() -> bool:
    """Return true if new tensors are fake or belong to a torch.func transform.

    Such tensors are not cached.
    """
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return fake is not None or torch._C._are_functorch_transforms_active()


@functools.lru_cache(maxsize=64)
def known_frequencies(
    dims: int, base: float, scaling: RotaryScaling | None, wide: bool
) -> tuple[torch.Tensor, float] | None:
    """Return (float64 frequencies, factor of the tables) for the C++ fast path.

    Dynamic scaling depends on the sequence's length and gives None.
    """
    if scaling is not None and scaling.kind == "dynamic":
        return None
    found = RotaryPositions(dims, base, scaling).frequencies(
        dtype=torch.float64 if wide else torch.float32, device="cpu"
    )
    return found.double(), 1.0 if scaling is None else float(scaling.of_tables)


def tables(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    interleaved: bool,
    factor: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of position times frequency, one entry per column.

    The angle is a float64 product, exact for a float32 frequency and positions below 2^29, and cos
    and sin are rounded once. A float32 product, as in transformers, errs by up to 2^-24 of the
    angle, 0.004 radians at position 131,072.
    """
    angle = positions[..., None].double() * frequencies.double()
    both = []
    for t in (angle.cos(), angle.sin()):
        t = (t if factor == 1.0 else t * factor).to(dtype)
        both.append(t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1))
    return both[0], both[1]


def _llama3(
    powers: torch.Tensor, positions: RotaryPositions, scaling: RotaryScaling
) -> torch.Tensor:
    """Divide the frequencies of pairs that rotate slowly within the trained length.

    A pair with fewer than low_frequency_factor rotations is divided by factor. A pair with more
    than high_frequency_factor rotations is unchanged. Between them the factor is interpolated
    linearly.
    """
    assert scaling.original_length is not None
    length, low, high = (
        scaling.original_length,
        scaling.low_frequency_factor,
        scaling.high_frequency_factor,
    )
    fast = 1.0 / powers
    wavelength = 2 * math.pi / fast
    share = (length / wavelength - low) / (high - low)
    between = (1 - share) * fast / scaling.factor + share * fast
    slowed = torch.where(wavelength > length / low, fast / scaling.factor, between)
    return torch.where(wavelength < length / high, fast, slowed)


def _yarn(powers: torch.Tensor, positions: RotaryPositions, scaling: RotaryScaling) -> torch.Tensor:
    """Divide frequencies by factor from the dimension with beta_slow rotations on.

    Dimensions before the one with beta_fast rotations within the trained length are unchanged.
    """
    assert scaling.original_length is not None
    dims = positions.dims

    def dimension(turns: float) -> float:
        assert scaling.original_length is not None
        return (
            dims
            * math.log(scaling.original_length / (turns * 2 * math.pi))
            / (2 * math.log(positions.base))
        )

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high = high + 0.001 if low == high else high
    ramp = torch.arange(dims // 2, dtype=powers.dtype, device=powers.device)
    kept = 1 - ((ramp - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _grown(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _rope_parameters(config: Any, layer_type: str | None) -> Mapping[str, Any]:
    """Return the rope parameters of a configuration, of one layer type if it has several.

    Raises ValueError if the configuration has none, or has a field that is not read here.
    """
    op, name = "RotaryPositions.from_hugging_face", type(config).__name__
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sources = (found, getattr(config, "rope_theta", None), getattr(config, "rotary_dim", None))
    how = getattr(config, "position_embedding_type", None) or "rotary"
    if not any(sources) or how not in ("rotary", "rope"):
        raise ValueError(
            f"{op}: config must have rotary positions (rope_parameters, rope_theta or rotary_dim), "
            f"got a {name}" + ("" if how == "rotary" else f" with position_embedding_type {how!r}")
        )
    if getattr(config, "patch_size", None) and not getattr(config, "vocab_size", None):
        raise ValueError(
            f"{op}: config must be of sequences, got a {name} of images, whose positions are pairs"
        )
    if reason := _OTHER_POSITIONS.get(getattr(config, "model_type", "")):
        raise ValueError(f"{op}: config must be of a supported model, got a {name}, which {reason}")
    types = [key for key, value in found.items() if isinstance(value, Mapping)]
    if types and layer_type not in types:
        raise ValueError(
            f"{op}: layer_type must be one of {', '.join(map(repr, types))}, whose rope_parameters "
            f"differ in a {name}, got {layer_type!r}"
        )
    if layer_type is not None and not types:
        raise ValueError(
            f"{op}: layer_type must be None, for all layers of this {name} turn alike, got"
            f" {layer_type!r}"
        )
    found = found[layer_type] if types else found
    kind = found.get("rope_type", found.get("type", "default"))
    read = (*_KEYS_OF_ALL, *_KEYS.get(kind, found))  # an unknown kind raises below
    unread = [key for key, value in found.items() if value is not None and key not in read]
    own = {key: value for key, value in vars(config).items() if "rope" in key or "rotary" in key}
    unread += [key for key, value in own.items() if value and key not in _CONFIG_FIELDS]
    if unread:
        raise ValueError(
            f"{op}: config must say nothing that is not read here, got"
            f" {', '.join(map(repr, unread))} in a {name}; give the model's own frequencies to"
            " pytransformer.rotary(frequencies=…)"
        )
    return found


def _turned_dims(found: Mapping[str, Any], config: Any, layer_type: str | None) -> int:
    """Return how many columns of a head rotate. Models with rope_parameters ignore rotary_dim."""
    if not found and getattr(config, "rotary_dim", None):
        return int(config.rotary_dim)
    if layer_type is not None and hasattr(type(config), "per_layer_config"):
        config = config.per_layer_config[layer_type]  # Gemma 4: heads differ by layer
    head, hidden = (getattr(config, name, None) for name in ("head_dim", "hidden_size"))
    if not head and not hidden:
        raise ValueError(
            "RotaryPositions.from_hugging_face: config must have head_dim or hidden_size, got a "
            f"{type(config).__name__} without; give one of its parts"
        )
    share = found.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    return int((head or hidden // config.num_attention_heads) * (share or 1.0))


def _scaling(kind: str | None, found: Mapping[str, Any], config: Any) -> RotaryScaling | None:
    """Return the scaling of a configuration's rope parameters."""
    if kind in ("default", None):
        return None
    if kind in _KEYS and kind != "yarn":
        for key in _KEYS[kind]:
            if key != "alpha" and found.get(key) is None:
                raise ValueError(
                    f"RotaryPositions.from_hugging_face: rope_type {kind!r} needs {key!r}"
                )
    original = found.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    longest = getattr(config, "max_position_embeddings", None)
    match kind:
        case "linear":
            return RotaryScaling("linear", found["factor"])
        case "dynamic":
            return RotaryScaling("dynamic", found["factor"], longest)
        case "llama3":
            return RotaryScaling(
                "llama3",
                found["factor"],
                original,
                found["low_freq_factor"],
                found["high_freq_factor"],
            )
        case "yarn":
            factor = found.get("factor")
            if factor is None and original and longest:
                factor = longest / original
            grown, all_dims = found.get("mscale"), found.get("mscale_all_dim")
            attention = found.get("attention_factor")
            if attention is None and grown and all_dims:
                attention = _grown(factor or 1.0, grown) / _grown(factor or 1.0, all_dims)
            return RotaryScaling(
                "yarn", factor or 1.0, original, beta_fast=found.get("beta_fast") or 32,
                beta_slow=found.get("beta_slow") or 1,
                attention_factor=attention, truncate=found.get("truncate", True),
            )  # fmt: skip
    raise ValueError(
        f"RotaryPositions: rope_type {kind!r} is not known;"
        f" {', '.join(map(repr, ('default', *get_args(ScalingKind))))} are. Give its frequencies to"
        " pytransformer.rotary(frequencies=…)"
    )
