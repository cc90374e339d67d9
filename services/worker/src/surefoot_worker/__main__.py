"""`python -m surefoot_worker`: run the worker service."""

from __future__ import annotations

import sys

from surefoot_worker.main import main

if __name__ == "__main__":
    sys.exit(main())
