import sys

from surefoot_detector.main import main

sys.exit(main())
