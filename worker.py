"""Who computes (chapter 8): a worker is weights + its KV shard + "receive a ForwardBatch, run it".

Mirrors   vLLM: v1/executor/multiproc_executor.py:103 MultiprocExecutor, v1/worker/gpu_worker.py:128 Worker
Promises  one `execute(batch) -> logits` whatever the tensor-parallel size. A rank that dies or raises ends the run
          in seconds with a WorkerError that names it; no process outlives its driver.
Leaves out more than one host; pipeline and expert parallelism; a time limit for a rank that neither dies nor answers.
Order     1 Worker: one rank.  2 worker_main: the life of ranks 1 … N-1.  3 TensorParallelExecutor: rank 0, in the
          driver's process.  How ranks add up their shares stands in collectives.py.
"""
import gc
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from contextlib import contextmanager

import torch
import torch.multiprocessing as multiprocessing

from checkpoint import LlamaConfig, load_model
from collectives import ProcessGroupComm, SharedMemoryComm
from cuda_graphs import CAPTURE_SIZES, DecodeGraphs, cuda_graph_recorder
from kv_cache import KVCache
from model import ForwardBatch, select_ops


class WorkerError(RuntimeError):
    """A rank died or failed; the message says which and why. The executor is closed: build a new one.
    outputs: what LLM.generate had until then, a list of RequestOutput a prompt."""
    outputs = ()


# -- 1. One rank ------------------------------------------------------------------------------------------------------

class Worker:
    """Rank `rank` of `size`: its slice of the weights and of the KV cache. With size 1 it is the whole executor.

    vLLM: v1/worker/gpu_worker.py:128 Worker; left out: memory profiling, sleep mode, LoRA, weight updates.
    """

    def __init__(self, folder, dtype, device="cpu", attention_backend="auto", rank=0, size=1, comm=None,
                 cuda_graphs=False):
        self.device, self.cuda_graphs, self.kv_cache, self.graphs = device, cuda_graphs, None, None
        self.model = load_model(folder, dtype, device, rank, size, comm, attention_backend)
        self.model.pack_weights()

    def init_kv_cache(self, num_blocks, block_size):
        """num_blocks counts the null block; the dtype is the weights'."""
        m = self.model
        self.kv_cache = KVCache(m.config.num_hidden_layers, num_blocks, block_size, m.num_kv_heads, m.config.head_dim,
                                m.norm.weight.dtype, self.device)
        if torch.device(self.device).type == "cuda":
            self.warm_up(block_size)
        if self.cuda_graphs and m.ops.name == "triton":      # the twins read lengths back: not to be recorded
            logits = torch.empty(CAPTURE_SIZES[-1], m.config.vocab_size, dtype=m.norm.weight.dtype, device=self.device)
            self.graphs = DecodeGraphs(lambda batch: m(batch, self.kv_cache), logits, cuda_graph_recorder())

    @torch.inference_mode()
    def warm_up(self, block_size):
        """Have the kernels compiled before a request waits for them: one step of padding alone, which reads and writes
        no slot. A chunk, a decode, and a block table wide enough for two splits: of each kernel every variant.
        vLLM: v1/worker/gpu_worker.py:679 Worker.compile_or_warm_up_model, which also records the graphs."""
        numbers = lambda *values, dtype=torch.int64: torch.tensor(values, dtype=dtype, device=self.device)
        self.model(ForwardBatch(
            token_ids=numbers(0, 0, 0), positions=numbers(0, 0, 0), slot_mapping=numbers(-1, -1, -1),
            query_start_loc=numbers(0, 2, 3, dtype=torch.int32), seq_lens=numbers(0, 0, dtype=torch.int32),
            block_tables=numbers(0, 0, dtype=torch.int32)[:, None].repeat(1, 128 // block_size + 2),
            logits_indices=numbers(1, 2)), self.kv_cache)

    @torch.inference_mode()
    def execute(self, batch):
        """batch: a ForwardBatch on this worker's device  →  logits [S', V], to be used before the next step; on ranks
        other than 0 unspecified."""
        if self.graphs is not None and self.graphs.fit(batch):
            return self.graphs.run(batch)
        return self.model(batch, self.kv_cache)

    def close(self):
        self.model = self.kv_cache = self.graphs = None


@contextmanager
def interrupts_wait():
    """Hold Ctrl-C back until the step is through; a second one goes through at once. Half a step would leave the ranks
    out of line, and KV blocks that are cached already, for others to hit, but never written."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield                                        # not ours to handle, or held already
        return
    held = []

    def hold(number, frame):
        if held:
            raise KeyboardInterrupt
        held.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if held:
        raise KeyboardInterrupt


# -- 2. Ranks 1 … N-1 -------------------------------------------------------------------------------------------------

INIT_KV_CACHE, RUN = 0, 1
FIELDS = ("token_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "block_tables", "logits_indices")


def pack(batch):
    """A ForwardBatch as int64 numbers: how many numbers, RUN, T, S, B, S', then its seven tensors end to end."""
    (S, B), T = batch.block_tables.shape, len(batch.token_ids)
    body = torch.cat([getattr(batch, name).flatten().long() for name in FIELDS]).cpu()
    return torch.cat([torch.tensor([6 + len(body), RUN, T, S, B, len(batch.logits_indices)]), body])


def unpack(message, device):
    """pack's inverse, on `device`."""
    T, S, B, n = message[2:6].tolist()
    *tokens, starts, lens, tables, ends = message[6:].to(device).split([T, T, T, S + 1, S, S * B, n])
    return ForwardBatch(*tokens, starts.int(), lens.int(), tables.int().view(S, B), ends)


def end_with(driver):
    """Give this process a thread that ends it when the process `driver` is gone, whatever else it is at: loading, a
    collective of NCCL's, a long step. (Linux would send a signal, but as soon as the driver's *thread* ends that forked
    this process.) On POSIX an orphan gets another parent; on Windows the pipe from the driver tells."""
    parent = multiprocessing.parent_process()

    def wait():
        while os.getppid() == driver and parent.is_alive():
            parent.join(0.2)
        os._exit(0)
    threading.Thread(target=wait, daemon=True).start()


class _Stop(BaseException):
    """The driver is gone, closing, or another rank has failed; that rank reports."""


def worker_main(rank, size, area, locks, collectives, path, driver, folder, dtype, device, attention_backend):
    """What a worker process does, all its life.  vLLM: v1/executor/multiproc_executor.py:821 WorkerProc.worker_main"""
    end_with(driver)
    signal.signal(signal.SIGINT, signal.SIG_IGN)      # Ctrl-C reaches the whole process group; the driver alone decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)     # a fork inherits the driver's handlers
    # Of the driver's threads a fork brings along only one. OpenMP doesn't notice that its others are gone and would
    # wait for them; a single thread waits for nobody. Tokenizers' and a server's threads a worker has no use for.
    torch.set_num_threads(1)

    def watch():
        if channel.flags[size] or os.getppid() != driver:
            raise _Stop

    channel = SharedMemoryComm(area, rank, size, watch, locks)
    try:
        comm = channel if collectives == "shm" else ProcessGroupComm(collectives, path, rank, size, device)
        worker = Worker(folder, dtype, device, attention_backend, rank, size, comm)
        channel.barrier()
        while True:
            message = channel.broadcast()
            if message[1] == INIT_KV_CACHE:
                worker.init_kv_cache(*message[2:].tolist())
                channel.barrier()
            else:
                worker.execute(unpack(message, device))
                if torch.device(device).type == "cuda":
                    torch.cuda.synchronize(device)    # so that a kernel's error shows here, and now
    except _Stop:
        pass
    except BaseException:                             # whatever it is, the driver has to learn of it
        channel.fail(traceback.format_exc())
    finally:
        os._exit(0)             # at once: a rank with a broken collective may not get through a tidy exit


# -- 3. The driver's side ---------------------------------------------------------------------------------------------

class TensorParallelExecutor:
    """Rank 0, and the processes of the others: `execute` sends them the batch, then computes its own share of it.

    vLLM: v1/executor/multiproc_executor.py:103 MultiprocExecutor. There the driver computes nothing, all ranks are
    processes, and their answers come back through a queue each; here rank 0's answer is a return value.

    Processes are forked for the CPU on Linux (eight in a fraction of a second), spawned otherwise: a forked child can't
    use a CUDA that its parent initialised, and on macOS the system's libraries don't survive a fork. A spawned child
    imports the main script anew, hence the usual `if __name__ == "__main__":`. On the CPU a rank has one thread.
    """

    def __init__(self, folder, dtype, device, attention_backend, size, collectives=None, start_method=None):
        kind = torch.device(device).type
        collectives = collectives or ("nccl" if kind == "cuda" else "shm")
        self.start_method = start_method or ("fork" if kind == "cpu" and sys.platform == "linux" else "spawn")
        context = multiprocessing.get_context(self.start_method)
        ordered = platform.machine().lower() in ("x86_64", "amd64", "i686")      # see SharedMemoryComm, memory order
        locks = None if ordered else [context.Lock() for _ in range(size)]
        self.size, self.kind, self.ready, self.reason = size, kind, False, "it was closed"
        self.worker = self.comm = None
        self.channel = SharedMemoryComm(SharedMemoryComm.new_area(size), 0, size, self._watch, locks)
        scratch = None if collectives == "shm" else tempfile.mkdtemp(prefix="nano-serve-")
        path = scratch and f"{scratch}/rendezvous"
        devices = [f"cuda:{r}" if kind == "cuda" else "cpu" for r in range(size)]
        area, load = self.channel.area, lambda rank: (folder, dtype, devices[rank], attention_backend)
        self.processes = [context.Process(target=worker_main, name=f"nano-serve rank {rank}", daemon=True, args=(
            rank, size, area, locks, collectives, path, os.getpid(), *load(rank))) for rank in range(1, size)]
        # Runs once: by close(), when the executor is garbage, or when the interpreter ends, whichever is first.
        self._shut_down = weakref.finalize(self, _shut_down, self.channel.flags, area, self.processes, scratch,
                                           os.getpid())
        with self._together():
            # A forked child must not collect the driver's garbage: the destructor of a process group, say, would wait
            # there for threads that only the driver has.
            gc.freeze()
            try:
                for process in self.processes:
                    process.start()
            finally:
                gc.unfreeze()
            self.comm = (self.channel if collectives == "shm" else
                         ProcessGroupComm(collectives, path, 0, size, devices[0]))
            self.worker = Worker(*load(0), 0, size, self.comm)
            self.channel.barrier()
            self.ready = True

    model = property(lambda self: self.worker.model)             # rank 0's
    kv_cache = property(lambda self: self.worker.kv_cache)

    def init_kv_cache(self, num_blocks, block_size):
        """Every rank allocates its heads of each block; returns when all have. num_blocks counts the null block."""
        with self._together():
            self.channel.broadcast(torch.tensor([4, INIT_KV_CACHE, num_blocks, block_size]))
            self.worker.init_kv_cache(num_blocks, block_size)
            self.channel.barrier()

    def execute(self, batch):
        """batch: a ForwardBatch, on rank 0's device or the CPU  →  logits [S', V] on rank 0's device.

        Raises WorkerError when a rank died or failed. Whatever is raised within the step closes the executor: the ranks
        are in the middle of it somewhere, and can't be brought back in line.
        """
        with interrupts_wait(), self._together():
            self.channel.broadcast(pack(batch))
            device = self.worker.device
            logits = self.worker.execute(ForwardBatch(*(getattr(batch, name).to(device) for name in FIELDS)))
            if self.kind == "cuda":              # a dead peer leaves NCCL's kernels waiting for ever: look, don't block
                done = torch.cuda.Event()
                done.record()
                while not done.query():
                    self._watch()
                    time.sleep(50e-6)
            return logits

    def close(self):
        """End the workers and free everything; may be called again."""
        if self.kind == "cuda" and self.comm is not None:
            self.comm.group.abort()
        self._shut_down()
        self.worker = self.comm = None

    def _watch(self):
        """Raise if a rank has failed or died. Called while waiting."""
        dead = [(r, p.exitcode) for r, p in enumerate(self.processes, 1) if p.exitcode is not None]
        if (failed := self.channel.flags[self.size]) > 0:    # read last: who fails says so before it exits
            raise WorkerError(f"rank {failed - 1} of {self.size} failed:\n{self.channel.error_of(failed - 1)}")
        for rank, code in dead:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            if not self.ready and self.start_method == "spawn":
                how += ' (a spawned worker imports the main script: does that run under `if __name__ == "__main__":`?)'
            raise WorkerError(f"rank {rank} of {self.size} (process {self.processes[rank - 1].pid}) {how}")

    @contextmanager
    def _together(self):
        """Around all that involves other ranks: one thread, and no survivors if it fails."""
        if not self._shut_down.alive:
            raise WorkerError(f"this executor has no workers any more: {self.reason}")
        threads = torch.get_num_threads()
        if self.kind == "cpu":
            torch.set_num_threads(1)                 # the other cores have ranks to run
        try:
            yield
        except BaseException as error:
            self.reason = str(error) or type(error).__name__
            self.close()
            # A checkpoint that rank 0 refuses, it refuses as it would alone; what breaks later is a rank that failed.
            if self.ready and isinstance(error, Exception) and not isinstance(error, WorkerError):
                raise WorkerError(f"rank 0 of {self.size} failed: {type(error).__name__}: {error}") from error
            raise
        finally:
            torch.set_num_threads(threads)


def _shut_down(flags, area, processes, scratch, owner):
    """Flag the end, then insist. `area` is only here to outlive `flags`, which point into it."""
    if os.getpid() != owner:                     # a forked child has copies of its parent's executors: not its to close
        return
    flags[len(flags) - 1] = flags[len(flags) - 1] or -1
    started = [p for p in processes if p.pid is not None]
    for insist, patience in ((None, 0.3), ("terminate", 1.0), ("kill", 5.0)):
        deadline = time.monotonic() + patience
        for process in started:
            if insist and process.exitcode is None:
                getattr(process, insist)()
        for process in started:
            process.join(max(deadline - time.monotonic(), 0))
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


def make_executor(folder, dtype, device, attention_backend, tensor_parallel_size, enforce_eager=False):
    """What runs the batches: a Worker, or rank 0 of several.

    Both have init_kv_cache(num_blocks, block_size), execute(batch) → logits [S', V], close(), model, kv_cache. Raises
    ValueError for a size that the model or the machine doesn't allow, before any process is started; CheckpointError as
    load_model does; WorkerError if a rank fails to start.
    """
    config = LlamaConfig.from_folder(folder)
    config.check_tensor_parallel(tensor_parallel_size)
    if tensor_parallel_size == 1:
        on_gpu = torch.device(device).type == "cuda"
        return Worker(folder, dtype, device, attention_backend, cuda_graphs=on_gpu and not enforce_eager)
    if torch.device(device).type == "cuda" and tensor_parallel_size > torch.cuda.device_count():
        raise ValueError(f"--tensor-parallel-size {tensor_parallel_size} needs as many GPUs, one a rank; "
                         f"this machine has {torch.cuda.device_count()}")
    select_ops(config, attention_backend, dtype, device, tensor_parallel_size)   # refused or compiled before they start
    return TensorParallelExecutor(folder, dtype, device, attention_backend, tensor_parallel_size)


if __name__ == "__main__":       # three tokens on one rank and on two: half of the matrices, the same logits
    from engine_args import EMBEDDED_MODEL
    ids, lens = torch.tensor([300, 301, 302]), torch.tensor([3]).int()
    batch = ForwardBatch(ids, torch.arange(3), torch.arange(8, 11), torch.tensor([0, 3]).int(), lens,
                         torch.tensor([[2]]).int(), torch.tensor([2]))              # block 2 of size 4: slots 8 9 10
    for size in (1, 2):
        executor = make_executor(EMBEDDED_MODEL, torch.float32, "cpu", "torch", size)
        executor.init_kv_cache(8, 4)
        logits = executor.execute(batch)                                            # [1, V]
        held = sum(weight.numel() for weight in executor.model.parameters())
        print(f"tp {size}: rank 0 holds {held:,} weights and {executor.model.num_kv_heads} KV heads; likeliest "
              + "  ".join(f"{i} ({v:.4f})" for v, i in zip(*(x[0].tolist() for x in logits.topk(3)))))
        executor.close()
