import sys

from surefoot_writer.main import main

sys.exit(main())
