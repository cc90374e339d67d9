"""The built-in LLM recipe: a Llama-type model on real text (`entrypoint: -m surefoot_worker.recipe`)."""

import os


def surefoot_preload() -> None:
    """Run once in the fork server, before any rank is forked from it (see `launcher.preload`)."""
    from surefoot_worker.recipe.model import prebuild
    from surefoot_worker.recipe.settings import load_settings

    spec = load_settings(os.environ)
    prebuild(spec.recipe_or_defaults.model, spec.seed)
