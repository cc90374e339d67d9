import sys

from surefoot_api.main import main

sys.exit(main())
