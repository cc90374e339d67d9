"""Staging memory for all ranks of a host, or for none."""

from __future__ import annotations

from pathlib import Path

from surefoot.checkpoint.staging import StagingBuffer, free_bytes
from surefoot.errors import StagingTooSmall
from surefoot.sdk.host import Host


def make_buffers(host: Host, shard_bytes: int) -> list[StagingBuffer]:
    """Make or reuse this rank's buffers; their memory is allocated and touched on return. Collective.

    All ranks count what they are going to allocate before any of them does, so they all come to the same answer.

    Args:
        host: Of this rank.
        shard_bytes: Length of this rank's shard.

    Raises:
        StagingTooSmall: on every rank, when those of some host do not fit together.
    """
    rank, num_buffers = host.group.rank, host.settings.checkpoint.num_buffers
    missing = host.folder.missing_bytes(rank, num_buffers, shard_bytes)
    mine = {"memory": _memory_id(host.folder.path), "missing": missing, "free": free_bytes(host.folder.path)}
    reports = host.group.gather_json(mine)
    for memory in dict.fromkeys(report["memory"] for report in reports):
        sharing = [report for report in reports if report["memory"] == memory]
        needed, free = sum(r["missing"] for r in sharing), min(r["free"] for r in sharing)
        if needed > free:
            raise StagingTooSmall(str(host.settings.checkpoint.staging_dir), needed, free)
    return host.folder.create_buffers(rank, num_buffers, shard_bytes)


def _memory_id(folder: Path) -> str:
    """Name the file system that a folder is in, unlike that of any other host or container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{folder.stat().st_dev}"
