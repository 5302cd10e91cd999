"""What every test file shares: one thread a process (so that runs repeat), and the repository on the import path."""
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "chapters"), str(ROOT / "tests")]
torch.set_num_threads(1)
