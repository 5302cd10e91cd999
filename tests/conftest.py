"""What every test file shares: one thread a process (so that runs repeat), and the repository on the import path."""
import os
import pathlib
import signal
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "chapters"), str(ROOT / "chapters/tools"), str(ROOT / "tests")]
torch.set_num_threads(1)
os.environ.setdefault("NANO_SERVE_CACHE", str(ROOT / "build" / "cpu_kernels"))       # not in the home folder

# A shell that starts this in the background has SIGINT ignored, every child inherits that, and Python then makes no
# KeyboardInterrupt of it. A handler here is the default again in what the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
