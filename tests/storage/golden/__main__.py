"""Write the golden files below a new folder."""

import sys
from pathlib import Path

from tests.storage.golden.trees import write

write(Path(sys.argv[1]))
