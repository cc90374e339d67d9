from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.ids import CheckpointId, folder_name, parse_folder_name

ids = st.builds(CheckpointId, attempt=st.integers(0, 10**6), step=st.integers(0, 10**12))


def test_folder_name_holds_step_and_attempt():
    assert folder_name(CheckpointId(attempt=3, step=120)) == "step-000000120-a0003"


@given(ids)
def test_a_folder_name_is_read_back(checkpoint_id):
    assert parse_folder_name(folder_name(checkpoint_id)) == checkpoint_id


@given(ids, ids)
def test_two_checkpoints_never_share_a_folder(one, other):
    assert (folder_name(one) == folder_name(other)) == (one == other)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "attempts",
        "quarantine",
        "step-120-a3",
        "step-000000120",
        "step-000000120-a0003.old",
        "step-000000120-a0003\n",
        ".tmp-12-ab-step-000000120-a0003",
        "step-0000000120-a0003",
        "step-000000120-a00003",
        "step-00000012\u0660-a0003",
    ],
)
def test_other_names_are_not_checkpoints(name):
    assert parse_folder_name(name) is None


def test_a_later_attempt_is_newer_at_any_step():
    assert CheckpointId(attempt=4, step=1) > CheckpointId(attempt=3, step=900)
