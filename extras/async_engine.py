"""An engine for many callers at once (chapter 3): the step loop in a thread of its own, callers in asyncio.

Mirrors   vLLM: v1/engine/async_llm.py:72 AsyncLLM, v1/engine/output_processor.py:45 RequestOutputCollector
Promises  a caller that leaves, or is cancelled, frees its blocks within a step. A caller that reads slowly costs one
          slot and delays nobody. A step that fails reaches everybody who waits, with what was generated so far.
Leaves out a process of its own for the engine (vLLM's EngineCore behind ZMQ): here the callers' Python and the engine's
          take turns in one interpreter, and only PyTorch's operators and the C kernels run beside it.
Order     1 Slot: where the outputs of one request wait.  2 AsyncLLMEngine.

What crosses between the threads: an *inbox* of commands to the engine's thread, which alone touches the engine, a
*slot* a request, which holds one output for each of its answers, and the futures of add() and call(). An output tells
all so far, so a newer one replaces an older one that nobody has read; only what each added to the text is joined.

    async with AsyncLLMEngine.from_engine_args(EngineArgs()) as engine:
        async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=40), "request 1"):
            print(output.outputs[0].delta, end="")
"""
import asyncio
import itertools
import queue
import threading

from nano_serve import LLMEngine


# -- 1. The slot ------------------------------------------------------------------------------------------------------

class Slot:
    """Where the outputs of one request wait for their reader: one for each of its n answers, however long it waits.

    Example: the engine puts "a", "b", then the reader takes, then "c": it takes one output with delta "ab" and text
    "ab", later one with delta "c" and text "abc"."""

    def __init__(self, request_id, loop):
        self.request_id, self.loop = request_id, loop
        self.ready, self.lock, self.outputs = asyncio.Event(), threading.Lock(), {}      # index of the answer → output

    def put(self, output):
        """From the engine's thread: an output, or an exception, which is the last that comes."""
        with self.lock:
            key = None if isinstance(output, BaseException) else output.outputs[0].index
            unread = self.outputs.pop(key, None)             # out and in again: the one that came last stands last
            if unread is not None and key is not None:
                output.outputs[0].delta = unread.outputs[0].delta + output.outputs[0].delta
            self.outputs[key] = output
        call_soon(self.loop, self.ready.set)


    async def take(self):
        """The outputs that wait, at least one, in the order in which their answers came."""
        await self.ready.wait()
        with self.lock:
            outputs, self.outputs = list(self.outputs.values()), {}
            self.ready.clear()
        return outputs


def call_soon(loop, function):
    """Have `loop` call it, from any thread. A loop that is closed has no readers left, and nothing is to be done."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        pass


def answer_to(loop, future, result, error):
    """From any thread: a future's result or exception, unless who waited for it was cancelled."""
    call_soon(loop, lambda: future.done() or (future.set_exception(error) if error else future.set_result(result)))


# -- 2. The engine ----------------------------------------------------------------------------------------------------

class AsyncLLMEngine:
    """LLMEngine for callers in asyncio, from any number of tasks and event loops.
    vLLM: v1/engine/async_llm.py:72 AsyncLLM"""

    def __init__(self, engine):
        """engine: an LLMEngine, which from now on only this object may touch."""
        self.engine, self.inbox, self.slots, self.dead = engine, queue.SimpleQueue(), {}, None
        self.numbers = itertools.count()         # of ids for those who bring none
        self.thread = threading.Thread(target=self._run, name="nano-serve engine", daemon=True)
        self.thread.start()

    @classmethod
    def from_engine_args(cls, engine_args):
        return cls(LLMEngine(engine_args))

    async def generate(self, prompt, sampling_params=None, request_id=None, priority=0):
        """The outputs of one prompt as they come: RequestOutputs, with sampling_params.n > 1 of each answer its own. To
        leave the loop, or to be cancelled, aborts the request. Raises RequestRefused (a ValueError) if the request
        can't run, RuntimeError if the engine has ended; a step that failed shows as an output with finish_reason
        "error". vLLM: v1/engine/async_llm.py:544 AsyncLLM.generate"""
        slot = await self.add(prompt, sampling_params, request_id, priority)
        finished = False
        try:
            while not finished:
                for output in await slot.take():
                    if isinstance(output, BaseException):
                        raise output
                    finished = finished or output.finished
                    yield output
        finally:
            if not finished:
                self._abort(slot)

    async def add(self, prompt, sampling_params=None, request_id=None, priority=0):
        """Hand a prompt over  →  its Slot, once the engine has taken it. request_id: None takes one that is free."""
        loop = asyncio.get_running_loop()
        request_id = f"async-{next(self.numbers)}" if request_id is None else request_id
        slot, taken = Slot(request_id, loop), loop.create_future()

        def add():
            try:
                self.engine.add_request(slot.request_id, prompt, sampling_params, priority=priority)
                self.slots[slot.request_id] = slot
                answer_to(loop, taken, slot, None)
            except Exception as refusal:
                answer_to(loop, taken, None, refusal)
        self._send(add)
        try:
            return await taken
        except asyncio.CancelledError:           # left before it was let in
            self._abort(slot)
            raise

    def abort(self, request_id):
        """End a request; unknown and finished ids are ignored. From any thread; takes effect before the next step.
        vLLM: v1/engine/async_llm.py:729 AsyncLLM.abort"""
        def abort():
            outputs = self.engine.abort_request(request_id)          # with what there is until then
            if slot := self.slots.pop(request_id, None):
                for output in outputs:
                    slot.put(output)
        if self.dead is None:
            self.inbox.put(abort)

    def _abort(self, slot):
        """End the request of this slot, if it runs: by now its id may be that of somebody else's request."""
        def abort():
            if self.slots.get(slot.request_id) is slot:
                del self.slots[slot.request_id]
                self.engine.abort_request(slot.request_id)
        if self.dead is None:
            self.inbox.put(abort)

    async def call(self, function):
        """Run function(engine) between two steps, in the engine's thread  →  what it returns."""
        answer, loop = asyncio.get_running_loop().create_future(), asyncio.get_running_loop()

        def run():
            try:
                answer_to(loop, answer, function(self.engine), None)
            except Exception as error:
                answer_to(loop, answer, None, error)
        self._send(run)
        return await answer

    def _send(self, command):
        if self.dead is not None:
            raise RuntimeError(f"the engine has ended: {self.dead}")
        self.inbox.put(command)
        # It may have ended since: then nobody reads the inbox, and all that is left in it is told so.
        if self.dead is not None:
            self._drain()

    def _drain(self):
        while True:
            try:
                command = self.inbox.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command()

    def _run(self):
        """The engine's thread: commands, a step, its outputs to their slots, and again; without requests it sleeps."""
        while True:
            try:
                while command := self.inbox.get_nowait() if self.engine.has_unfinished_requests() else self.inbox.get():
                    command()
                break                            # None: the end
            except queue.Empty:
                pass
            try:
                outputs = self.engine.step()
            except Exception:                    # everybody's output says why; who comes next meets it in its own step
                outputs = self.engine.take_results()
            self._hand_out(outputs)
        self.engine.close()                      # first: who sees `dead` runs left-over commands in a thread of its own
        self.dead = "it was shut down"
        self._hand_out(self.engine.take_results())
        self._drain()

    def _hand_out(self, outputs):
        for output in outputs:
            slot = self.slots.pop(output.request_id, None) if output.finished else self.slots.get(output.request_id)
            if slot is not None:
                slot.put(output)

    def shutdown(self, timeout=60):
        """End the engine after the step that runs; whoever still waits gets what it has, with "abort". Twice does no
        harm. RuntimeError if the thread doesn't end in `timeout` seconds.
        vLLM: v1/engine/async_llm.py:262 AsyncLLM.shutdown"""
        self.inbox.put(None)
        self.thread.join(timeout)
        if self.thread.is_alive():
            raise RuntimeError(f"the engine's step has not ended within {timeout} s")

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await asyncio.get_running_loop().run_in_executor(None, self.shutdown)
