"""`python -m surefoot_recovery`."""

import sys

from surefoot_recovery.main import main

sys.exit(main())
