from __future__ import annotations

import sys

from surefoot_gateway.main import main

sys.exit(main())
