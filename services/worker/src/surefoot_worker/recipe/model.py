"""The recipe's model, optimizer and schedule. Standard parts, put together from the spec."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

from surefoot.spec import ModelSpec, RecipeSpec


def pick_device() -> torch.device:
    """Return this rank's GPU where every rank of the node has one of its own, else the CPU.

    NCCL refuses two ranks on one GPU.
    """
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


_prebuilt: dict[tuple[ModelSpec, int], LlamaForCausalLM] = {}


def prebuild(spec: ModelSpec, seed: int) -> None:
    """Build the model in the fork server: every forked rank then finds it built, on pages it shares until it trains.

    Initialising 4 million weights takes 0.1 s, which is as long as the rest of a restart.
    """
    _prebuilt[spec, seed] = _build(spec, seed)


def build_model(spec: ModelSpec, seed: int, device: torch.device) -> LlamaForCausalLM:
    """Return a freshly initialised model; the same on every rank. Once per process: a prebuilt one is handed out."""
    model = _prebuilt.pop((spec, seed), None)
    return (model or _build(spec, seed)).to(device)


def _build(spec: ModelSpec, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_hidden_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_attention_heads,
        tie_word_embeddings=spec.tie_word_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def build_optimizer(model: torch.nn.Module, spec: RecipeSpec) -> torch.optim.AdamW:
    """Return AdamW; norms and biases (tensors with fewer than 2 dimensions) are not decayed."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.betas, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, spec: RecipeSpec) -> LambdaLR:
    """Return linear warm-up, then a cosine down to `min_lr_ratio` at the last step."""

    def factor(update: int) -> float:
        if update < spec.warmup_steps:
            return (update + 1) / (spec.warmup_steps + 1)
        progress = (update - spec.warmup_steps) / max(1, spec.steps - spec.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        return spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * cosine

    return LambdaLR(optimizer, factor)


def autocast(device: torch.device, precision: Literal["auto", "bf16", "fp32"]) -> AbstractContextManager[object]:
    """Return bf16 autocast where it is asked for, or where the machine computes in bf16 and it is left open."""
    wanted = precision == "bf16" or (precision == "auto" and computes_in_bf16(device))
    return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()


def computes_in_bf16(device: torch.device) -> bool:
    """Return whether bf16 is done by the hardware; emulated bf16 is slower than fp32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return _cpu_has_bf16


def _read_cpu_has_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags or " bf16 " in flags


_cpu_has_bf16 = _read_cpu_has_bf16()
