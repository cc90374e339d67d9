import os
import pickle
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from surefoot.errors import UsageError
from surefoot.sdk.data.tokens import HEADER_BYTES, TokenFile, write_tokens


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "a.tokens", [np.arange(7), np.arange(7, 7), np.arange(7, 25)])
    return tmp_path / "a.tokens"


def test_windows_do_not_overlap_and_the_rest_is_left_out(path: Path) -> None:
    dataset = TokenFile(path, sequence_length=8)
    assert (len(dataset), dataset.num_tokens, dataset.tokens_per_sample) == (3, 25, 8)
    for index in range(3):
        sample = dataset[index]
        assert sample["input_ids"].dtype == torch.int64
        assert sample["input_ids"].tolist() == list(range(8 * index, 8 * index + 8))
        assert torch.equal(sample["labels"], sample["input_ids"])
    with pytest.raises(IndexError):
        dataset[3]


@pytest.mark.parametrize(("bytes_per_token", "largest"), [(2, 2**16 - 1), (4, 2**32 - 1)])
def test_tokens_up_to_the_largest_survive(tmp_path: Path, bytes_per_token: int, largest: int) -> None:
    path = tmp_path / "a.tokens"
    assert write_tokens(path, [np.array([0, largest])], bytes_per_token=bytes_per_token) == 2
    assert path.stat().st_size == HEADER_BYTES + 2 * bytes_per_token
    assert TokenFile(path, 2)[0]["input_ids"].tolist() == [0, largest]
    for bad in (largest + 1, -1):
        with pytest.raises(ValueError, match="does not fit"):
            write_tokens(path, [np.array([bad])], bytes_per_token=bytes_per_token)
    assert TokenFile(path, 2)[0]["input_ids"].tolist() == [0, largest]
    assert list(tmp_path.iterdir()) == [path]


def test_a_used_dataset_pickles_small(path: Path) -> None:
    dataset = TokenFile(path, 8)
    before = dataset[1]["input_ids"]
    data = pickle.dumps(dataset)
    assert len(data) < 1000
    assert torch.equal(pickle.loads(data)[1]["input_ids"], before)


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_worker_processes_read_it(path: Path, context: str) -> None:
    dataset = TokenFile(path, 8)
    loader = DataLoader(dataset, batch_size=3, num_workers=1, multiprocessing_context=context)
    assert [b["input_ids"].flatten().tolist() for b in loader] == [list(range(24))]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.tokens: cannot be read as a token file: No such file"):
        TokenFile(tmp_path / "no.tokens", 8)


def test_every_truncation_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match=r"truncated|not a token file"):
            TokenFile(path, 8)
    path.write_bytes(whole + b"\0")
    with pytest.raises(UsageError, match="truncated or damaged"):
        TokenFile(path, 8)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"PICKLE!!", "wrong magic"),
        (8, struct.pack("<I", 9), "version 9"),
        (12, struct.pack("<I", 3), "3-byte"),
    ],
)
def test_a_foreign_header_is_refused(path: Path, offset: int, value: bytes, message: str) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(UsageError, match=message):
        TokenFile(path, 8)


KILLED_WRITER = """
import os, signal, sys, pathlib, numpy
from surefoot.sdk.data.tokens import write_tokens
def arrays():
    yield numpy.arange(100_000) % 1000
    os.kill(os.getpid(), signal.SIGKILL)
write_tokens(pathlib.Path(sys.argv[1]), arrays())
"""


def test_a_writer_killed_in_the_middle_leaves_the_old_file(path: Path) -> None:
    before = path.read_bytes()
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, os.fspath(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
