# SPDX-License-Identifier: Apache-2.0
"""Inputs of a model by its ``forward`` parameters: the first candidate that eager code accepts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from .configs import IMAGE, PAD, PATCH, TEXT_IDS, WIDTH
from .given import INPUTS

BATCH, LENGTH, TARGETS = 3, 11, 7
Inputs = dict[str, Any]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def parameters(model: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def search(config: Any, *names: str) -> Any:
    """Return the first value of these names in the config or in a nested one."""
    parts = [
        config,
        *(
            getattr(config, name)
            for name in config.sub_configs
            if getattr(config, name, None) is not None
        ),
    ]
    for name in names:
        for part in parts:
            if isinstance(value := vars(part).get(name), (int, list, tuple)) and not isinstance(
                value, bool
            ):
                return value
    return None


def width(config: Any) -> int:
    found = search(config, "hidden_size", "d_model", "embed_dim")
    return found if isinstance(found, int) else WIDTH


def text(
    padding: str, length: int = LENGTH, padded: tuple[int, ...] = (0, 4, 7)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and their mask; ``padding`` is "left", "right" or "none"."""
    ids = torch.randint(*TEXT_IDS, (BATCH, length), generator=generator())
    mask = torch.ones_like(ids)
    if padding != "none":
        for row, count in enumerate(padded):
            mask[row, length - count :] = 0
        if padding == "left":
            mask = mask.flip(1)
        ids = ids.masked_fill(mask == 0, PAD)
    return ids, mask


def images(config: Any) -> torch.Tensor:
    side = search(config, "image_size", "img_size", "input_size") or IMAGE
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    channels = search(config, "num_channels", "in_channels", "in_chans") or 3
    return torch.randn(BATCH, channels, height, width, generator=generator())


GRID, MERGE = 4, 2  # patches on a side of an image, which models merge two by two


def patches(names: Any, config: Any) -> Iterator[Inputs]:
    """Yield images as consecutive rows of patches, with each grid (frames, rows, columns).

    The layouts are those that occur in models.
    """
    patch, channels = (
        search(config, "patch_size") or PATCH,
        search(config, "in_channels", "in_chans", "num_channels") or 3,
    )
    count, whole = BATCH * GRID**2, "image_grid_thw" in names
    features = channels * (search(config, "temporal_patch_size") or 1) * patch**2
    name = next((n for n in ("pixel_values", "hidden_states") if n in names), "hidden_states")
    beside: Inputs = {
        "image_grid_thw" if whole else "grid_thw": torch.tensor([[1, GRID, GRID]] * BATCH)
    }
    if "merge_sizes" in names:
        beside["merge_sizes"] = torch.full((BATCH,), MERGE)
    pictures = (channels, patch, patch)
    for shape in (
        (count, features),
        (count, *pictures),
        (1, count, *pictures),
        (count, 2 * features),
    ):
        yield {name: torch.randn(shape, generator=generator()), **beside}


def videos(config: Any) -> torch.Tensor:
    frames = search(config, "num_frames", "frames_per_clip", "tubelet_size") or 4
    return (
        images(config)[:, None].repeat(1, frames, 1, 1, 1)
        + torch.arange(frames)[None, :, None, None, None]
    )


def spectrograms(config: Any) -> Iterator[torch.Tensor]:
    mel = (
        search(
            config,
            "num_mel_bins",
            "feature_size",
            "input_feat_per_channel",
            "input_dim",
            "n_mels",
            "feat_dim",
        )
        or 80
    )
    frames = 2 * (search(config, "max_source_positions") or 32)
    yield torch.randn(BATCH, mel, frames, generator=generator())
    yield torch.randn(BATCH, frames, mel, generator=generator())
    yield torch.randn(BATCH, 64, 2 * mel, generator=generator())


def boxes(ids: torch.Tensor) -> torch.Tensor:
    corners = torch.randint(0, 30, (*ids.shape, 4), generator=generator())
    return torch.cat([corners[..., :2], corners[..., :2] + corners[..., 2:]], -1)


def text_part(model: Any, padding: str) -> Inputs:
    """Return the inputs of `forward` for a source and a target text."""
    names = parameters(model)
    given: Inputs = {}
    ids, mask = text(padding)
    if "input_ids" in names:
        given["input_ids"] = ids
        if "attention_mask" in names and padding != "none":
            given["attention_mask"] = mask
    if "bbox" in names:
        given["bbox"] = boxes(ids)
    if "decoder_input_ids" in names and (
        model.config.is_encoder_decoder or not isinstance(model.config.is_encoder_decoder, bool)
    ):
        target, target_mask = text(padding, TARGETS, (0, 2, 0))
        given["decoder_input_ids"] = target
        if "decoder_attention_mask" in names and padding != "none":
            given["decoder_attention_mask"] = target_mask
    return given


def other_parts(model: Any) -> Iterator[Inputs]:
    """Return the inputs of `forward` for images, videos and sound, in the models' shapes."""
    names, config = parameters(model), model.config
    if "grid_thw" in names or "image_grid_thw" in names:
        yield from patches(names, config)
    if "pixel_values" in names:
        yield {"pixel_values": images(config)}
        yield {"pixel_values": videos(config)}
    for name in ("pixel_values_videos", "video", "frames"):
        if name in names:
            yield {name: videos(config)}
    for name in ("input_features", "input_values", "audio_values", "spectrogram", "audio_features"):
        if name in names:
            for features in spectrograms(config):
                for frames in features.shape[1:] if f"{name}_mask" in names else ():
                    yield {
                        name: features,
                        f"{name}_mask": torch.ones(BATCH, frames, dtype=torch.long),
                    }
                yield {name: features}
            yield {name: torch.randn(BATCH, 1600, generator=generator())}
            yield {name: torch.randn(BATCH, 1, 1600, generator=generator())}
    if "past_values" in names:
        yield {
            "past_values": torch.randn(
                BATCH,
                search(config, "context_length", "prediction_length") or 64,
                generator=generator(),
            )
        }
        yield {"past_values": torch.randn(BATCH, search(config, "context_length") or 64,
            search(config, "num_input_channels") or 1,
                                          generator=generator())}  # fmt: skip
    for name in ("hidden_states", "inputs_embeds"):
        if name in names and "input_ids" not in names:
            yield {name: torch.randn(BATCH, LENGTH, width(config), generator=generator())}


def candidates(model: Any, padding: str) -> Iterator[Inputs]:
    """Yield candidates from most to fewest parameters of `forward`; only text can be padded."""
    words = text_part(model, padding)
    made = INPUTS.get(model.config.model_type)
    if made is not None:
        placed = with_placeholders(model, words, made(model))
        if placed is not None:
            yield placed
        yield {**words, **made(model)}
    for part in other_parts(model):
        placed = with_placeholders(model, words, part)
        if placed is not None:
            yield placed
        yield {**words, **part}
        if "input_ids" not in words and "attention_mask" in parameters(model) and padding != "none":
            yield {**words, **part}
    if words:
        yield words
    for part in other_parts(model):
        yield part


def with_placeholders(model: Any, words: Inputs, part: Inputs) -> Inputs | None:
    """Return `words` with one image token per feature of `part`, or None if unsupported."""
    token = search(model.config, "image_token_id", "image_token_index")
    features_of = getattr(model, "get_image_features", None)
    if (
        token is None
        or features_of is None
        or "input_ids" not in words
        or "pixel_values" not in part
    ):
        return None
    with torch.no_grad():
        try:
            found = features_of(**part)
        except Exception:  # whatever is missing, the next candidate does without it
            return None
    found = getattr(found, "pooler_output", found)
    found = (
        torch.cat([f.flatten(0, -2) for f in found]) if isinstance(found, (list, tuple)) else found
    )
    if not isinstance(found, torch.Tensor) or found.numel() // found.shape[-1] % BATCH:
        return None
    count = found.numel() // found.shape[-1] // BATCH
    ids = torch.cat([torch.full((BATCH, count), token), words["input_ids"]], 1)
    put = {**words, **part, "input_ids": ids}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in parameters(model):
            put[name] = (ids == token).long()
    if "attention_mask" in words:
        put["attention_mask"] = torch.cat(
            [torch.ones(BATCH, count, dtype=torch.long), words["attention_mask"]], 1
        )
    return put
