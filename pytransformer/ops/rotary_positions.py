# SPDX-License-Identifier: Apache-2.0
"""What angles rotary positions have: base, frequencies, their scaling beyond the trained length, tables of cos and sin."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.utils._python_dispatch import _disable_current_modes

ScalingKind = Literal["linear", "dynamic", "llama3", "yarn"]
NEEDS_LENGTH = ("dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RotaryScaling:
    """How frequencies change for sequences longer than a model was trained on.

    Attributes:
        kind: ``"linear"``: all divided by factor. ``"dynamic"``: the base grows with the sequence beyond original_length (NTK).
            ``"llama3"``: low frequencies divided, high ones kept, a line between. ``"yarn"``: a ramp over the dimensions, and cos and
            sin times attention_factor.
        factor: how much longer sequences may be.
        original_length: the trained length; of all kinds but linear.
        low_frequency_factor, high_frequency_factor: of llama3: turns within original_length where the line begins and ends.
        beta_fast, beta_slow: of yarn, likewise.
        attention_factor: of yarn; None: 0.1 ln(factor) + 1.
        truncate: of yarn: the ramp begins and ends at whole dimensions.

    Sources: Chen et al., "Extending context window of large language models via positional interpolation" (2023); Peng et al., "YaRN"
    (2023); the report of Llama 3.1 (2024).
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
                f"RotaryScaling: kind must be one of {', '.join(map(repr, get_args(ScalingKind)))}, got {self.kind!r}"
            )
        if not self.factor > 0:
            raise ValueError(f"RotaryScaling: factor must be greater than 0, got {self.factor}")
        if self.kind in NEEDS_LENGTH and not self.original_length:
            raise ValueError(f"RotaryScaling: {self.kind} needs original_length, the length that the model was trained on")

    @property
    def of_tables(self) -> float:
        """What cos and sin are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        return _grown(self.factor) if self.attention_factor is None else self.attention_factor


@dataclass(frozen=True)
class RotaryPositions:
    """The angles of rotary positions: ``position * frequency[i]`` for pair i, ``frequency[i] = base^(-2 i / dims)`` but for scaling.

    Attributes:
        dims: how many dimensions of a head turn, even: the head's, or its first part.
        base: the slowest pair turns once in about 2 pi base positions.
        scaling: for sequences longer than trained on, or None.
        interleaved: pairs are (2i, 2i + 1), as in GPT-J; otherwise (i, i + dims / 2), as in Llama.
    """

    dims: int
    base: float = 10000.0
    scaling: RotaryScaling | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.dims, bool) or not isinstance(self.dims, int) or self.dims <= 0 or self.dims % 2:
            raise ValueError(f"RotaryPositions: dims must be an even int greater than 0, got {self.dims!r}")
        if not self.base > 0:
            raise ValueError(f"RotaryPositions: base must be greater than 0, got {self.base}")

    def frequencies(
        self, length: int | None = None, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """(dims / 2,) radians per position. ``length``: of the sequence, which dynamic scaling goes by.

        In float32 the numbers are those of transformers' ROPE_INIT_FUNCTIONS on a CPU: what a checkpoint was trained with. They are made
        there for every device, for a GPU's pow may differ in the last bit: up to 0.01 radians of a pair at position 100,000.
        """
        where = torch.device("cpu" if device is None else device)
        base, scaling = self.base, self.scaling
        if scaling is not None and scaling.kind == "dynamic":
            assert scaling.original_length is not None
            ratio = max(length or 0, scaling.original_length) / scaling.original_length
            base = base * (scaling.factor * ratio - (scaling.factor - 1)) ** (self.dims / (self.dims - 2))
        if where.type == "cpu" or torch.compiler.is_compiling() or _transformed():
            return _computed(self, base, dtype).to(where)
        return _kept(self, base, dtype, where)

    def tables(
        self, positions: torch.Tensor, *, dtype: torch.dtype = torch.float32, length: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, (*positions.shape, dims) each, for :func:`pytransformer.rotary` and ``append_kv``: once for all layers.

        ``length``: of the sequence, for dynamic scaling; None: the highest position and one, which a GPU is waited for.
        """
        if self.scaling is not None and self.scaling.kind == "dynamic" and length is None and positions.numel():
            length = int(positions.max()) + 1
        work = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = self.frequencies(length, dtype=work, device=positions.device)
        factor = 1.0 if self.scaling is None else self.scaling.of_tables
        return tables(positions, frequencies, self.interleaved, factor, dtype)

    @classmethod
    def from_hugging_face(cls, config: Any, *, interleaved: bool = False, layer_type: str | None = None) -> RotaryPositions:
        """What a configuration of transformers says: ``rope_parameters``, or the ``rope_theta`` and ``rope_scaling`` of older ones.

        Raises:
            ValueError: a kind that is not known here, as longrope; ``pytransformer.rotary(frequencies=…)`` takes any.
        """
        found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        found = found[layer_type] if layer_type is not None else found
        base = found.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        share = found.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
        return cls(int(head * share), float(base), _scaling(found, config), interleaved)


def _computed(positions: RotaryPositions, base: float, dtype: torch.dtype) -> torch.Tensor:
    """The frequencies with this base, on the CPU."""
    scaling = positions.scaling
    powers = base ** (torch.arange(0, positions.dims, 2, device="cpu").to(dtype) / positions.dims)
    if scaling is None or scaling.kind == "dynamic":
        return 1.0 / powers
    if scaling.kind == "linear":
        return 1.0 / powers / scaling.factor
    return (_llama3 if scaling.kind == "llama3" else _yarn)(powers, positions, scaling)


@functools.lru_cache(maxsize=64)
def _kept(positions: RotaryPositions, base: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same on a GPU: copied once, since a copy waits and may not be captured in a graph."""
    with _disable_current_modes(), torch.inference_mode(False):
        return _computed(positions, base, dtype).to(device)


def _transformed() -> bool:
    """Whether tensors made now are no tensors to keep: fake ones, or those of torch.func's transforms."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return fake is not None or torch._C._are_functorch_transforms_active()


@functools.lru_cache(maxsize=64)
def known_frequencies(dims: int, base: float, scaling: RotaryScaling | None, wide: bool) -> tuple[torch.Tensor, float] | None:
    """(frequencies, as float64; the factor of tables) for the C++ lane; None where they go by the sequence's length."""
    if scaling is not None and scaling.kind == "dynamic":
        return None
    found = RotaryPositions(dims, base, scaling).frequencies(dtype=torch.float64 if wide else torch.float32, device="cpu")
    return found.double(), 1.0 if scaling is None else float(scaling.of_tables)


def tables(
    positions: torch.Tensor, frequencies: torch.Tensor, interleaved: bool, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position times frequency, each number where its column is.

    The angle is a float64 product: exact for a float32 frequency and positions below 2^29, and cos and sin are rounded once. A product
    rounded to float32, as transformers' is, errs by up to 2^-24 of the angle: 0.004 radians at position 131,072.
    """
    angle = positions[..., None].double() * frequencies.double()
    both = []
    for t in (angle.cos(), angle.sin()):
        t = (t if factor == 1.0 else t * factor).to(dtype)
        both.append(t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1))
    return both[0], both[1]


def _llama3(powers: torch.Tensor, positions: RotaryPositions, scaling: RotaryScaling) -> torch.Tensor:
    """A pair that turns less than low_frequency_factor times within the trained length is slowed down, one that turns more than
    high_frequency_factor times is kept, and between them a line goes from one to the other."""
    assert scaling.original_length is not None
    length, low, high = scaling.original_length, scaling.low_frequency_factor, scaling.high_frequency_factor
    fast = 1.0 / powers
    wavelength = 2 * math.pi / fast
    share = (length / wavelength - low) / (high - low)
    between = (1 - share) * fast / scaling.factor + share * fast
    slowed = torch.where(wavelength > length / low, fast / scaling.factor, between)
    return torch.where(wavelength < length / high, fast, slowed)


def _yarn(powers: torch.Tensor, positions: RotaryPositions, scaling: RotaryScaling) -> torch.Tensor:
    """Dimensions before those that turn beta_fast times within the trained length are kept, from beta_slow times on slowed down."""
    assert scaling.original_length is not None
    dims = positions.dims

    def dimension(turns: float) -> float:
        assert scaling.original_length is not None
        return dims * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(positions.base))

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


def _scaling(found: Mapping[str, Any], config: Any) -> RotaryScaling | None:
    """The scaling of a configuration's rope parameters."""
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return None
    original = found.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    longest = getattr(config, "max_position_embeddings", None)
    match kind:
        case "linear":
            return RotaryScaling("linear", found["factor"])
        case "dynamic":
            return RotaryScaling("dynamic", found["factor"], longest)
        case "llama3":
            return RotaryScaling("llama3", found["factor"], original, found["low_freq_factor"], found["high_freq_factor"])
        case "yarn":
            factor = found.get("factor")
            if factor is None and original and longest:
                factor = longest / original
            grown, all_dims = found.get("mscale"), found.get("mscale_all_dim")
            attention = found.get("attention_factor")
            if attention is None and grown and all_dims:
                attention = _grown(factor or 1.0, grown) / _grown(factor or 1.0, all_dims)
            return RotaryScaling(
                "yarn", factor or 1.0, original, beta_fast=found.get("beta_fast") or 32, beta_slow=found.get("beta_slow") or 1,
                attention_factor=attention, truncate=found.get("truncate", True),
            )  # fmt: skip
    raise ValueError(
        f"RotaryPositions: rope_type {kind!r} is not known; {', '.join(map(repr, ('default', *get_args(ScalingKind))))} are. Give its "
        "frequencies to pytransformer.rotary(frequencies=…)"
    )
