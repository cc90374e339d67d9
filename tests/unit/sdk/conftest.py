"""Folders of jobs that train in this process."""

from __future__ import annotations

import pytest
import torch

from helpers.in_process import Place


@pytest.fixture
def make_place(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for matrices this small the others only wait
    made = []

    def make(name="job"):
        made.append(Place(tmp_path / name))
        return made[-1]

    yield make
    for place in made:
        place.remove()
    torch.set_num_threads(threads)


@pytest.fixture
def place(make_place):
    return make_place()
