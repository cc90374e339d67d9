"""Initial weights from a Hugging Face folder, for a job that starts from the seed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from surefoot.checkpoint.hugging_face import FolderTensor, HuggingFaceFolder, hugging_face_name
from surefoot.checkpoint.regions import Box
from surefoot.errors import UsageError
from surefoot.sdk.collectives import ControlGroup
from surefoot.sdk.loading import loads_its_own_way
from surefoot.sdk.sharding import DTYPES, local_box, local_part

KEY = "init_from"
_NUM_NAMED = 3
"""So many names of a long list are said."""


def init_weights(model: nn.Module, folder: Path, group: ControlGroup) -> None:
    """Load the weights of a folder into a model that a job starts with. Collective.

    Every rank reads what it holds (the local chunks of DTensors). Values are cast to the model's dtypes.

    Args:
        model: The plain module; all that its state_dict has is loaded.
        folder: As `save_pretrained` writes it; only safetensors are read.
        group: The ranks.

    Raises:
        UsageError: on every rank, when on any the folder cannot be used or does not fit the model; names what differs.
    """
    problem = None
    try:
        load_weights(model, HuggingFaceFolder(folder, KEY))
    except UsageError as error:
        problem = error.problem
    except OSError as error:
        problem = f"{folder} cannot be read: {error}"
    problems = [found for found in group.gather_json(problem) if found is not None]
    if problems:
        raise UsageError(KEY, problems[0])


@torch.no_grad()
def load_weights(model: nn.Module, folder: HuggingFaceFolder) -> None:
    """Fill the parameters and persistent buffers of a model; one rank. It takes the memory of one tensor beside them.

    Raises:
        UsageError: tensors are missing, unexpected or of another shape; names the first ones. Nothing was changed.
        OSError: the disk fails.
    """
    state = model.state_dict(keep_vars=True)
    named = {hugging_face_name(name): value for name, value in state.items() if isinstance(value, Tensor)}
    sources = _match(named, folder)
    for name, tensor in named.items():
        source = sources.pop(id(tensor), None)  # of tied ones the first, which stands for all
        if source is not None:
            local, box = local_part(tensor), local_box(name, tensor)
            if box.num_items:
                local.copy_(_read(source, box))
    if loads_its_own_way(model):
        model.load_state_dict(state)


def _match(named: dict[str, Tensor], folder: HuggingFaceFolder) -> dict[int, FolderTensor]:
    """Return where each tensor's values come from, by its id.

    Raises:
        UsageError: model and folder do not fit.
    """
    sources: dict[int, FolderTensor] = {}
    names: dict[int, str] = {}
    for name, tensor in named.items():
        stored = folder.tensors.get(name)
        if stored is None:
            continue
        _check_fits(name, tensor, stored)
        if _is_other(sources.setdefault(id(tensor), stored), stored):
            first = names[id(tensor)]
            problem = f"{first} and {name} are one tensor in the model and two different ones in {folder.path}"
            raise UsageError(KEY, f"{problem}; the model must not tie them (tie_word_embeddings: false)")
        names.setdefault(id(tensor), name)
    missing = [name for name, tensor in named.items() if id(tensor) not in sources]
    unexpected = sorted(folder.tensors.keys() - named.keys())
    if missing or unexpected:
        raise UsageError(KEY, _difference(folder, missing, unexpected))
    return sources


def _is_other(ours: FolderTensor, theirs: FolderTensor) -> bool:
    if ours is theirs:
        return False
    if ours.place[:2] != theirs.place[:2]:
        return True
    num_rows = ours.place.shape[0] if ours.place.shape else 1
    return ours.read_rows(0, num_rows) != theirs.read_rows(0, num_rows)


def _difference(folder: HuggingFaceFolder, missing: list[str], unexpected: list[str]) -> str:
    parts = [f"{folder.path} is not of this model"]
    if missing:
        parts.append(f"it lacks {_listed(missing)}")
    if unexpected:
        parts.append(f"it has {_listed(unexpected)}, which the model has not")
    if missing and folder.config.get("tie_word_embeddings"):
        parts.append("its config says tie_word_embeddings: true")
    return "; ".join(parts)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more


def _check_fits(name: str, tensor: Tensor, stored: FolderTensor) -> None:
    dtype, shape = stored.place.dtype, stored.place.shape
    if shape != tuple(tensor.shape):
        raise UsageError(KEY, f"{name} has shape {list(shape)} in {stored.path} and {list(tensor.shape)} in the model")
    same = DTYPES.get(dtype) == tensor.dtype
    both_floats = dtype in DTYPES and DTYPES[dtype].is_floating_point and tensor.dtype.is_floating_point
    if not (same or both_floats):
        ours = str(tensor.dtype).removeprefix("torch.")
        problem = f"{name} has dtype {dtype} in {stored.path} and {ours} in the model"
        raise UsageError(KEY, f"{problem}; allowed: the same, or floating point on both sides")


def _read(stored: FolderTensor, box: Box) -> Tensor:
    """Return a region of a stored tensor. Of the first dimension only what is wanted is read."""
    dtype, shape = DTYPES[stored.place.dtype], stored.place.shape
    if not shape:
        return torch.frombuffer(stored.read_rows(0, 1), dtype=dtype).view(())
    rows = torch.frombuffer(stored.read_rows(box.offset[0], box.shape[0]), dtype=dtype).view(box.shape[0], *shape[1:])
    return rows[(slice(None), *box.within(Box.whole(shape))[1:])]
