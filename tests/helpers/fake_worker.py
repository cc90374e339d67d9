"""The worker service with fake launchers, as a process."""

import sys
from pathlib import Path

from surefoot_worker.main import main

FAKE_LAUNCHER = (sys.executable, str(Path(__file__).with_name("fake_launcher.py")))

if __name__ == "__main__":
    sys.exit(main(FAKE_LAUNCHER))
