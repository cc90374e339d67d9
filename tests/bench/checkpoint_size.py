"""How large the model of `bench.checkpoint` is. Light: the tests of the numbers need no torch."""

from __future__ import annotations

from surefoot.spec import ModelSpec

ADAM_TENSORS = 3
"""The weights and AdamW's two moments: bytes of state are so many times those of the weights."""


def model_spec(num_parameters: int) -> ModelSpec:
    """Return a Llama-type model with tied embeddings of about that size; 124M has the shape of GPT-2."""
    large = num_parameters >= 60_000_000
    layers, vocabulary = (12, 50257) if large else (4, 4096)
    return min(
        (
            ModelSpec(
                vocab_size=vocabulary,
                hidden_size=64 * heads,
                # 8/3 as Llama has it: three matrices then hold what two of 4 x hidden_size would.
                intermediate_size=round(64 * heads * 8 / 3),
                num_hidden_layers=layers,
                num_attention_heads=heads,
            )
            for heads in range(1, 65)
        ),
        key=lambda spec: abs(spec.num_parameters() - num_parameters),
    )
