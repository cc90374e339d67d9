"""Train a Llama-type language model. Runs under `surefoot run` and under plain torchrun.

The settings are the `recipe` section of the spec; under torchrun `SUREFOOT_SPEC` holds the spec as JSON.
"""

from __future__ import annotations

import os

from surefoot import sdk
from surefoot_worker.recipe.data import prepare
from surefoot_worker.recipe.model import autocast, build_model, build_optimizer, build_scheduler, pick_device
from surefoot_worker.recipe.settings import load_settings, report_preparation


def main() -> None:
    """Run one rank."""
    spec = load_settings(os.environ)
    recipe = spec.recipe_or_defaults
    device = pick_device()
    data = prepare(recipe, report_preparation(spec), spec.init_from)
    model = build_model(recipe.model, spec.seed, device)
    optimizer = build_optimizer(model, recipe)
    session = sdk.attach(
        model,
        optimizer,
        lr_scheduler=build_scheduler(optimizer, recipe),
        dataset=sdk.TokenFile(data.train_path, recipe.sequence_length),
        global_batch_size=recipe.global_batch_size,
        micro_batch_size=recipe.micro_batch_size,
        max_grad_norm=recipe.max_grad_norm,
        total_steps=recipe.steps,
        num_workers=recipe.num_workers,
        tokenizer=data.tokenizer_path,
        extra_state={"data": sdk.Constant("recipe.data", data.digest, "its text has changed since")},
    )
    for batch in session:
        with autocast(device, recipe.precision):
            loss = session.model(**batch).loss
        session.step(loss)


if __name__ == "__main__":
    main()
