"""How the ranks of one node find each other: a new store in the launcher for each set of ranks."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but re-exported without saying so
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=300)


class SingleNodeRendezvous(RendezvousHandler):
    """Gives each set of ranks a store of its own on the loopback address.

    A store that outlives its ranks keeps their half-done keys, and the next ranks hang on them (pytorch #135712).
    More than one node needs another handler; the agent takes any.

    Args:
        run_id: Name of the job.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False

    def get_backend(self) -> str:
        """Return the name of this handler."""
        return "surefoot-single-node"

    @property
    def use_agent_store(self) -> bool:
        """Ranks join the launcher's store; rank 0 hosts none, so its death takes none away."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Make a new store and return it; there is nobody to wait for."""
        with socket.socket() as listener:
            listener.bind((LOOPBACK, 0))
            port = int(listener.getsockname()[1])
            # The store takes the descriptor over, so no other process can get the port in between.
            store = TCPStore(
                LOOPBACK,
                port,
                is_master=True,
                timeout=_STORE_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                use_libuv=True,
            )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        """Return whether the job is over."""
        return self._closed

    def set_closed(self) -> None:
        """Note that the job is over."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: there is one node."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the rendezvous; the last store goes with the agent."""
        self._closed = True
        return True
