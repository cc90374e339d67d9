"""A Hugging Face model folder as `save_pretrained` writes it: config.json and weights as safetensors. Torch-free.

Only safetensors are read. A `pytorch_model.bin` is a pickle, and unpickling runs whatever code is in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from surefoot.checkpoint.safetensors_file import TensorPlace, parse_header, read_header
from surefoot.errors import UsageError
from surefoot.parsing import parse_json

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "vocab.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
"""What `save_pretrained` of a tokenizer may write."""

MODEL_PREFIX = "model."
"""What the sdk puts before the names of the model's tensors in a checkpoint."""

ALLOWED = f"allowed: a folder with {CONFIG_FILE} and {WEIGHTS_FILE} (or {INDEX_FILE} and the files it names)"


class FolderTensor(NamedTuple):
    """One tensor of a folder: in which of its files, and where."""

    path: Path
    place: TensorPlace

    def read_rows(self, first: int, num_rows: int) -> bytearray:
        """Return so many rows of the first dimension; a scalar is one row.

        Raises:
            OSError: the disk fails, or the file has become shorter.
        """
        row_bytes = self.place.num_bytes // max(1, self.place.shape[0] if self.place.shape else 1)
        memory, filled = bytearray(num_rows * row_bytes), 0
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.place.start + first * row_bytes)
            while filled < len(memory) and (num_bytes := file.readinto(memoryview(memory)[filled:])):
                filled += num_bytes
        if filled < len(memory):
            raise OSError(f"{self.path} became shorter while it was read")
        return memory


def hugging_face_name(name: str) -> str:
    """Return a tensor's name in a folder, of its name in the state_dict: without what `torch.compile` puts into it."""
    return name.replace("_orig_mod.", "")


class HuggingFaceFolder:
    """What a folder holds; headers are read, weights are not. Any thread.

    Args:
        path: The folder.
        key: The setting that named it, for errors.

    Raises:
        UsageError: it is not such a folder, or not a whole one; says what is wrong.
        OSError: the disk fails.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self._key = key
        if not path.is_dir():
            raise self._wrong(path, "is not a folder")
        self.config = self._read_json(CONFIG_FILE)
        self.tensors: dict[str, FolderTensor] = {}
        for name in self._weight_files():
            self._add_tensors(name)

    @property
    def tokenizer_path(self) -> Path | None:
        """Its tokenizer in the format of the `tokenizers` library, None when it has none."""
        path = self.path / TOKENIZER_FILE
        return path if path.is_file() else None

    def _weight_files(self) -> list[str]:
        # The order in which transformers looks.
        if (self.path / WEIGHTS_FILE).exists():
            return [WEIGHTS_FILE]
        if (self.path / INDEX_FILE).exists():
            weight_map = self._read_json(INDEX_FILE).get("weight_map")
            names = weight_map.values() if isinstance(weight_map, dict) else [None]
            if not all(isinstance(name, str) and Path(name).name == name for name in names):
                raise self._wrong(self.path / INDEX_FILE, "has no weight_map of tensor names to files beside it")
            return sorted(set(names))
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.path.glob(pattern))
        if pickles:
            problem = f"holds {pickles[0]} and no safetensors: a pickle can run code when it is read, so it is not; "
            raise self._wrong(self.path, f"{problem}write it again with save_pretrained(safe_serialization=True)")
        if any((self.path / name).exists() for name in ("attempts", "manifest.json")):
            raise self._wrong(self.path, "is Surefoot's own: use `surefoot checkpoints import`, or export it first")
        raise self._wrong(self.path, f"holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")

    def _add_tensors(self, name: str) -> None:
        path = self.path / name
        try:
            with path.open("rb", buffering=0) as file:
                header = read_header(file)
                places = parse_header(header, file.seek(0, 2))
        except FileNotFoundError:
            raise self._wrong(path, "is missing") from None
        except ValueError as error:
            raise self._wrong(path, str(error)) from None
        twice = sorted(places.keys() & self.tensors.keys())
        if twice:
            raise self._wrong(path, f"holds {twice[0]} once more")
        self.tensors |= {tensor: FolderTensor(path, place) for tensor, place in places.items()}

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = parse_json(path.read_bytes())
        except FileNotFoundError:
            raise self._wrong(self.path, f"has no {name}") from None
        except ValueError as error:
            raise self._wrong(path, f"is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise self._wrong(path, "is not a JSON object")
        return content

    def _wrong(self, path: Path, problem: str) -> UsageError:
        return UsageError(self._key, f"{path} {problem}; {ALLOWED}")
