"""worker.py's processes at their edges: a driver that dies while they load, an error longer than its page."""
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from conftest import ROOT
from collectives import SharedMemoryComm

# The ranks say who they are and then load for ever, holding neither a collective nor a wait.
LOADING = """
    import os, sys, time
    sys.path.insert(0, {root!r})
    import worker
    def load(*args):
        os.write(1, b"%d\\n" % os.getpid())
        while True:
            time.sleep(0.01)
    worker.load_model = load
    if __name__ == "__main__":
        worker.TensorParallelExecutor({folder!r}, "float32", "cpu", "torch", 3, start_method={how!r})
    """


def alive(pid):
    try:
        with open(f"/proc/{pid}/status") as f:
            return "(zombie)" not in f.read()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_ranks_that_load_end_with_their_driver(tmp_path, how):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(LOADING.format(root=str(ROOT), folder="nowhere", how=how)))
    p = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        pids = {int(p.stdout.readline()) for _ in range(3)}
        assert p.pid in pids and len(pids) == 3
        p.send_signal(signal.SIGKILL)
        p.wait(10)
        end = time.monotonic() + 3
        while any(map(alive, pids)) and time.monotonic() < end:
            time.sleep(0.02)
        assert not [pid for pid in pids if alive(pid)]
    finally:
        try:
            os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def test_a_long_traceback_keeps_its_end():
    """What went wrong stands at the end; the page of 4,096 bytes keeps that, cut within a character or not."""
    comm = SharedMemoryComm(SharedMemoryComm.new_area(2), 1, 2, None)
    for first in ("x", "xy", "xyz"):
        comm.fail(first + "é" * 4500 + "\nValueError: the reason")                    # 9,000 bytes and more
        assert comm.error_of(1).endswith("éé\nValueError: the reason") and len(comm.error_of(1)) > 2000
    assert comm.flags[2] == 2 and comm.error_of(0).strip("\0") == ""
