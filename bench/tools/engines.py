# SPDX-License-Identifier: Apache-2.0
"""Contenders of `bench/tools/inference.py`: one function per inference engine.

A function gets a :class:`Work` and the model, and returns a call that computes all outputs once, as
tensors. It raises :class:`~pytransformer.cli.providers.Unsupported` with the reason if the engine
is absent or cannot run the model. Every engine uses torch's number of threads.
"""

from __future__ import annotations

import copy
import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import pytransformer as pt
from pytransformer.cli.providers import Unsupported
from pytransformer.integrations.convert.rules import KINDS, ON_REQUEST

Call = Callable[[], list[torch.Tensor]]


@dataclass(frozen=True)
class Work:
    """Inputs of one row: batches of keyword arguments, and the tokens to decode after a prompt."""

    kind: str  # "encoder", "image" or "decoder"
    batches: tuple[dict[str, torch.Tensor], ...]
    new_tokens: int = 0

    @property
    def is_padded(self) -> bool:
        return any("attention_mask" in b and not b["attention_mask"].all() for b in self.batches)

    def cast(self, dtype: torch.dtype) -> Work:
        """Return the work with floating-point inputs of this dtype."""
        return replace(self, batches=tuple(
            {k: t.to(dtype) if t.is_floating_point() else t for k, t in b.items()}
            for b in self.batches
        ))  # fmt: skip

    def real(self, outputs: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the outputs at real tokens, as one matrix.

        16-bit engines may decode different tokens, so only the prompt's logits are comparable.
        """
        if self.new_tokens and dtype != torch.float32:
            outputs = [o.chunk(2)[0] for o in outputs]
        masks = [b.get("attention_mask") for b in self.batches]
        rows = [o.flatten(0, -2) if m is None else o[m.bool()] for o, m in zip(outputs, masks)]
        return torch.cat(rows)


def _torch(work: Work, run: Callable[..., Any], cache: Callable[[], Any] | None = None) -> Call:
    """Return the call of a model of transformers; ``cache`` makes the cache of a decoder."""
    if work.kind == "decoder":
        return lambda: [_decoded(work, run, b["input_ids"], cache) for b in work.batches]
    return lambda: [run(**batch)[0] for batch in work.batches]


def _decoded(
    work: Work, run: Callable[..., Any], ids: torch.Tensor, cache: Callable[[], Any] | None
) -> torch.Tensor:
    """Return the logits of the prompt's last token, and decode ``new_tokens`` greedily."""
    keywords = {"past_key_values": cache()} if cache and work.new_tokens else {}
    out = run(input_ids=ids, use_cache=work.new_tokens > 0, logits_to_keep=1, **keywords)
    logits = out.logits[:, -1]
    last = logits
    for _ in range(work.new_tokens - 1):
        token = last.argmax(-1, keepdim=True)
        out = run(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        last = out.logits[:, -1]
    return torch.cat([logits, last]) if work.new_tokens else logits


def eager(work: Work, model: Any, dtype: torch.dtype) -> Call:
    model.set_attn_implementation("eager")
    return _torch(work, model)


def sdpa(work: Work, model: Any, dtype: torch.dtype) -> Call:
    model.set_attn_implementation("sdpa")
    return _torch(work, model)


def compiled(work: Work, model: Any, dtype: torch.dtype) -> Call:
    """torch.compile with frozen weights, which Inductor packs for oneDNN."""
    model.set_attn_implementation("sdpa")
    torch._dynamo.reset()
    call = _torch(work, torch.compile(model, options={"freezing": True}))
    for _ in range(3):  # the second shape compiles again, with symbolic sizes
        call()
    return call


def converted(work: Work, model: Any, dtype: torch.dtype) -> Call:
    """`integrations.transformers.switch` and `integrations.convert`."""
    pt.integrations.transformers.switch(model)
    pt.integrations.convert(model)
    return _torch(work, model, lambda: pt.integrations.transformers.growing_cache(model))


def packed(work: Work, model: Any, dtype: torch.dtype) -> Call:
    """The same with `nn.pack_weights`."""
    pt.nn.pack_weights(model)
    return converted(work, model, dtype)


def unpadded(work: Work, model: Any, dtype: torch.dtype) -> Call:
    """The same as `converted`, with the kind "padding"."""
    if not work.is_padded:
        raise Unsupported("the batches have no padding")
    pt.integrations.transformers.switch(model)
    pt.integrations.convert(model, kinds=(*KINDS, *ON_REQUEST))
    return _torch(work, model)


class _Positional(torch.nn.Module):
    """The model with positional inputs and one output, for exporters."""

    def __init__(self, work: Work, model: Any) -> None:
        super().__init__()
        self.model, self.names, self.kind = model, tuple(work.batches[0]), work.kind

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        given = dict(zip(self.names, inputs))
        if self.kind == "decoder":
            return self.model(**given, use_cache=False, logits_to_keep=1).logits[:, -1]
        return self.model(**given)[0]


def _needs(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Unsupported(f'{error}: pip install "pytransformer-kernels[peers]"') from error


def _refuse_decoding(work: Work, engine: str) -> None:
    if work.new_tokens:
        raise Unsupported(f"this benchmark does not export the KV cache to {engine}")


def onnxruntime(work: Work, model: Any, dtype: torch.dtype) -> Call:
    ort, _ = _needs("onnxruntime"), _needs("onnxscript")
    if dtype != torch.float32:
        raise Unsupported("ONNX Runtime has no bfloat16 products on CPUs")
    _refuse_decoding(work, "ONNX")
    model.set_attn_implementation("sdpa")
    inputs = tuple(work.batches[0].values())
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    # Export specializes sizes of 1, so a single sequence is exported with its shape.
    dynamic = None if len(work.batches) == 1 else ((sizes,) * len(inputs),)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            _Positional(work, model),
            inputs,
            path,
            dynamo=True,
            dynamic_shapes=dynamic,
            verbose=False,
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    given = [dict(zip(names, (t.numpy() for t in b.values()))) for b in work.batches]
    return lambda: [torch.from_numpy(session.run(None, g)[0]) for g in given]


def openvino(work: Work, model: Any, dtype: torch.dtype) -> Call:
    ov = _needs("openvino")
    _refuse_decoding(work, "OpenVINO")
    if dtype != torch.float32 and "BF16" not in ov.Core().get_property(
        "CPU", "OPTIMIZATION_CAPABILITIES"
    ):
        raise Unsupported("OpenVINO has no bfloat16 products on this CPU")
    model.set_attn_implementation("sdpa")
    batches = [
        tuple(t.float() if t.is_floating_point() else t for t in batch.values())
        for batch in work.batches
    ]
    config = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32" if dtype == torch.float32 else "bf16",
        "PERFORMANCE_HINT": "LATENCY",
    }
    exported = ov.convert_model(_Positional(work, model.float()), example_input=batches[0])
    network = ov.compile_model(exported, "CPU", config)
    given = [tuple(t.numpy() for t in batch) for batch in batches]
    return lambda: [torch.from_numpy(network(g)[0]) for g in given]


def ctranslate2(work: Work, model: Any, dtype: torch.dtype) -> Call:
    """CTranslate2, by its own converter's functions, because the model is not in a folder."""
    ct2 = _needs("ctranslate2")
    if work.kind == "image":
        raise Unsupported("CTranslate2 has no vision models")
    name = str(dtype).removeprefix("torch.")
    if name not in ct2.get_supported_compute_types("cpu"):
        raise Unsupported(f"CTranslate2 has no {name} on this CPU")
    loaders = importlib.import_module("ctranslate2.converters.transformers")._MODEL_LOADERS
    config = model.config
    config.position_embedding_type = "absolute"  # its loader reads it; transformers 5 dropped it
    spec = loaders[type(config).__name__].get_model_spec(model.float())
    tokens = [f"t{i}" for i in range(config.vocab_size)]
    spec.register_vocabulary(tokens)
    spec.config.bos_token = spec.config.unk_token = spec.config.eos_token = tokens[0]
    spec.config.layer_norm_epsilon = getattr(config, "layer_norm_eps", 1e-5)
    threads = dict(intra_threads=torch.get_num_threads(), inter_threads=1)
    with tempfile.TemporaryDirectory() as folder:
        spec.validate()
        spec.optimize(quantization=name)
        spec.save(folder)
        load = ct2.Encoder if work.kind == "encoder" else ct2.Generator
        engine = load(folder, device="cpu", compute_type=name, **threads)
    if work.kind == "encoder":
        rows = [_rows(batch) for batch in work.batches]
        return lambda: [_tensor(engine.forward_batch(ids).last_hidden_state) for ids in rows]
    return _ct2_decoder(work, engine, tokens)


def _ct2_decoder(work: Work, engine: Any, tokens: list[str]) -> Call:
    prompts = [[[tokens[i] for i in ids] for ids in _rows(batch)] for batch in work.batches]
    length = max(work.new_tokens, 1)
    # no min_length: it would overwrite the end token's logit
    options = dict(max_length=length, include_prompt_in_result=False,
                   sampling_topk=1, beam_size=1, return_logits_vocab=True)  # fmt: skip

    def logits(result: Any) -> list[torch.Tensor]:
        steps = [_tensor(step).flatten() for step in result.logits[0]]
        if len(steps) != length:
            raise RuntimeError(f"expected {length} steps; got {len(steps)}: it met the end token")
        return [steps[0], steps[-1]] if work.new_tokens else steps[:1]

    def call() -> list[torch.Tensor]:
        found = []
        for prompt in prompts:
            rows = zip(*(logits(r) for r in engine.generate_batch(prompt, **options)))
            found.append(torch.cat([torch.stack(row) for row in rows]))
        return found

    return call


def _rows(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    return [row[real].tolist() for row, real in zip(ids, mask)]


def _tensor(view: Any) -> torch.Tensor:
    import numpy as np

    return torch.from_numpy(np.asarray(view))


ENGINES: dict[str, Callable[[Work, Any, torch.dtype], Call]] = {
    "eager": eager,
    "sdpa": sdpa,
    "compile": compiled,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "ctranslate2": ctranslate2,
    "convert": converted,
    "packed": packed,
    "unpadded": unpadded,
}


def prepare(name: str, work: Work, model: Any, dtype: torch.dtype) -> Call:
    """Return the engine's call on a copy of the model.

    Raises:
        Unsupported: the engine is absent or cannot run the work.
    """
    return ENGINES[name](work, copy.deepcopy(model).to(dtype), dtype)
