"""How ranks exchange what they computed (chapter 8): all-reduce, gather, broadcast.

Mirrors   vLLM: distributed/device_communicators/cpu_communicator.py:234 _CPUSHMDistributed
          vLLM: distributed/device_communicators/shm_broadcast.py:465 MessageQueue
          vLLM: distributed/parallel_state.py:380 GroupCoordinator
Promises  every rank holds the same bits after an all-reduce; a wait ends, by what it waits for or by an error.
Leaves out more than one host.
Order     1 SharedMemoryComm: what an all-reduce is.  2 ProcessGroupComm: the same by NCCL or gloo.

Collectives (集合通信) are calls that every rank makes, in the same order, each with its own part of the data. A step makes
2 a layer, 1 for the embedding and 1 for the logits; one more message, the batch itself, goes from rank 0 to the others.
"""
import ctypes
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


# -- 1. Collectives in shared memory ----------------------------------------------------------------------------------

YIELD = getattr(os, "sched_yield", lambda: time.sleep(0))
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


class SharedMemoryComm:
    """All-reduce, gather and broadcast among processes of one machine, through memory that all of them map.

    Each rank has a *slot* it alone writes and a *counter* it alone advances. To exchange: write your part into your
    slot, count up, wait until the others have counted as far, read their slots. Example, two ranks, third exchange:

        rank 0: slot[1][0] = its part; counter[0] = 3;  waits for counter[1] >= 3;  reads slot[1][0] + slot[1][1]
        rank 1: slot[1][1] = its part; counter[1] = 3;  waits for counter[0] >= 3;  reads slot[1][0] + slot[1][1]

    There are two sets of slots, taken in turn (generation g uses set g % 2), and that is all it takes to be right under
    any interleaving: counter[r] >= g-1 says that r has read what it wanted of generation g-2, whose set g overwrites.
    What is larger than a slot goes in pieces. Each rank sums in rank order, so that all hold the same bits.

    Memory order: the counter must not become visible before the slot, nor the slot be read before the counter. x86
    keeps stores in order and loads in order, and the interpreter makes each access a call of its own, so plain ones do.
    ARM promises neither; there each counter is read and written under its semaphore (`locks`), and POSIX promises that
    who takes one sees all that was written before it was released. vLLM takes a lock on every machine:
    vLLM: distributed/device_communicators/shm_broadcast.py:79 memory_fence

    Waiting: with a core for every rank and one to spare, look again and again, yielding in between; after SPINS looks,
    and at once where ranks share cores, nap, longer and longer, so that an idle engine costs next to nothing. (On such
    cores who yields queues behind all that want to run; a sleeper is let in when it wakes.) Now and then `watch()` is
    called, which raises when there is nothing left to wait for: that bounds every wait.
    vLLM: distributed/device_communicators/cpu_communicator.py:234 _CPUSHMDistributed (in C++); for the broadcast
    vLLM: distributed/device_communicators/shm_broadcast.py:465 MessageQueue, which pickles into a ring of many slots.
    """

    SLOT = 1 << 19                       # bytes
    PAGE = 4096                          # a page of counters and flag, one a rank for its error text, then the slots
    SPINS, NAP, LONGEST_NAP = 1000, 50e-6, 5e-3

    @classmethod
    def new_area(cls, size):
        """Zeroed memory for `size` ranks; a child inherits it (fork) or is sent a file descriptor (spawn)."""
        return torch.zeros(cls.PAGE * (1 + size) + 2 * size * cls.SLOT, dtype=torch.uint8).share_memory_()

    def __init__(self, area, rank, size, watch, locks=None):
        self.area, self.rank, self.size, self.watch, self.locks = area, rank, size, watch, locks
        # int64 [size + 1]: the counters, then the flag: 0 runs, -1 closing, r + 1 rank r has failed
        self.flags = memoryview((ctypes.c_int64 * (size + 1)).from_address(area.data_ptr())).cast("B").cast("q")
        self.errors = area[self.PAGE:self.PAGE * (1 + size)].view(size, self.PAGE)
        self.slots = area[self.PAGE * (1 + size):].view(2, size, self.SLOT)
        self.seen = [0] * size                                       # the counters as last read
        self.generation = self.num_collectives = 0
        self.spins = self.SPINS if size < len(CORES) else 0

    def all_reduce(self, x):
        """x, contiguous, of the same shape on every rank  →  x, now the sum over the ranks."""
        self.num_collectives += 1
        for piece, slots in self._pieces(x):
            self._post(slots[self.rank], piece)
            self._wait(range(self.size), self.generation)
            piece.copy_(slots[0])                                    # [n]
            for part in slots[1:]:                                   # in rank order, not in that of arrival
                piece += part
        return x

    def gather(self, x):
        """x [S', n] on every rank  →  on rank 0 [S', size * n], the ranks side by side; on the others x."""
        self.num_collectives += 1
        parts = x.new_empty(self.size, x.numel()) if self.rank == 0 else None
        done = 0
        for piece, slots in self._pieces(x):
            self._post(slots[self.rank], piece)
            if self.rank == 0:
                self._wait(range(self.size), self.generation)
                parts[:, done:done + len(piece)] = slots             # [size, n of this piece]
                done += len(piece)
        return x if parts is None else parts.view(self.size, *x.shape).transpose(0, 1).flatten(1)

    def broadcast(self, message=None):
        """Rank 0 passes int64 numbers [n], the first of them n, the others nothing  →  the numbers, on every rank."""
        if self.rank == 0:
            for piece, slots in self._pieces(message):
                self._post(slots[0], piece)
            return message
        done, n = 0, 1
        while done < n:
            self.generation += 1
            self._wait((0,), self.generation)
            slot = self.slots.view(torch.int64)[self.generation % 2, 0]
            if done == 0:
                message = torch.empty(n := int(slot[0]), dtype=torch.int64)
            message[done:done + len(slot)] = slot[:n - done]
            done += len(slot)
            self._count_up()                                         # now rank 0 may write the next but one
        return message

    def barrier(self):
        """Return when all ranks have come here."""
        self.all_reduce(torch.zeros(1))
        self.num_collectives -= 1                                    # not one that the model asked for

    def fail(self, text):
        """Tell everybody that this rank is done for, and why."""
        text = text.encode(errors="replace")[-self.PAGE:].ljust(self.PAGE)
        self.errors[self.rank] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.flags[self.size] = self.rank + 1

    def error_of(self, rank):
        return bytes(self.errors[rank].tolist()).decode(errors="replace").rstrip()

    def _pieces(self, x):
        """Cut x into pieces [n] that fit a slot, each with all ranks' slots [size, n] of a new generation."""
        flat, slots = x.view(-1), self.slots.view(x.dtype)           # [2, size, elements of a slot]
        for start in range(0, len(flat), slots.shape[2]):
            piece = flat[start:start + slots.shape[2]]
            self.generation += 1
            yield piece, slots[self.generation % 2, :, :len(piece)]

    def _post(self, slot, piece):
        self._wait(range(self.size), self.generation - 1)            # an all-reduce has seen to that; a gather has not
        slot.copy_(piece)
        self._count_up()

    def _count_up(self):
        if self.locks is None:
            self.flags[self.rank] = self.generation
        else:
            spins = 0
            while not self.locks[self.rank].acquire(block=False):    # a reader may die with it in hand: never block
                spins = self._pause(spins)
            self.flags[self.rank] = self.generation
            self.locks[self.rank].release()
        self.seen[self.rank] = self.generation

    def _wait(self, ranks, generation):
        """Return when each of `ranks` has posted `generation`."""
        for rank in ranks:
            spins = 0
            while self.seen[rank] < generation:
                if self.locks is None:
                    self.seen[rank] = self.flags[rank]
                elif self.locks[rank].acquire(block=False):
                    self.seen[rank] = self.flags[rank]
                    self.locks[rank].release()
                if self.seen[rank] < generation:
                    spins = self._pause(spins)

    def _pause(self, spins):
        if spins % 64 == 63 or self.flags[self.size]:
            self.watch()
        if spins < self.spins:
            YIELD()
        else:
            time.sleep(min((spins - self.spins + 1) * self.NAP, self.LONGEST_NAP))
        return spins + 1


# -- 2. Collectives by NCCL or gloo -----------------------------------------------------------------------------------

class ProcessGroupComm:
    """The same calls by torch's own collectives: NCCL between GPUs; gloo is the reference that tests compare with.

    The ranks meet through a file. The group is not torch's global one, so that a process may hold several engines.
    vLLM: distributed/device_communicators/cuda_communicator.py:29 CudaCommunicator, which for small messages prefers
    a kernel that reads the other GPUs' memory, just what SharedMemoryComm does among processes:
    vLLM: distributed/device_communicators/custom_all_reduce.py:56 CustomAllreduce
    """

    def __init__(self, backend, path, rank, size, device):
        store, self.num_collectives, self.size = dist.FileStore(path, size), 0, size
        if backend == "nccl":
            torch.cuda.set_device(device)
            self.group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=30)
            self.group = dist.ProcessGroupGloo(store, rank, size, options)

    def all_reduce(self, x):
        self.num_collectives += 1
        self.group.allreduce([x]).wait()
        return x

    def gather(self, x):
        """As SharedMemoryComm's, but every rank gets the result: NCCL has no gather, and an all-gather is as fast."""
        self.num_collectives += 1
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.group.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=-1)                              # [S', size * n]


if __name__ == "__main__":       # SharedMemoryComm's example: three exchanges of two ranks, two threads on one area
    import threading
    area, parts, log = SharedMemoryComm.new_area(2), ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]), {}

    def rank_main(rank):
        comm = SharedMemoryComm(area, rank, 2, watch=lambda: None)
        for part in parts[rank]:
            total = comm.all_reduce(torch.full((4,), part))                                     # [4]
            log[comm.generation, rank] = comm.slots.view(torch.float32)[comm.generation % 2, rank, 0].item(), total

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    for g in range(1, 4):
        posted, sums = zip(*(log[g, rank] for rank in range(2)))
        print(f"exchange {g}, set {g % 2}   posted {posted[0]:g} and {posted[1]:g}   each rank holds {sums[0].tolist()}"
              f"   same bits: {torch.equal(*sums)}")
