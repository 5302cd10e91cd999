"""The engine and its front door (chapter 3): requests in, steps until they are done, text out.

Mirrors   vLLM: v1/engine/llm_engine.py:48 LLMEngine, v1/engine/core.py:584 EngineCore.step, entrypoints/llm.py:67 LLM
Promises  in fp32, greedy or with a seed of its own, and up to a tie of two logits, a request's text is what it would be
          alone, whoever shares its steps; a request that can't run is refused alone; what a request has generated when
          something fails comes back, with the reason.
Leaves out async scheduling, LoRA, multimodal input, speculative decoding.
Order     1 LLMEngine: the step loop, the heart of it all.  2 build_batch: a plan as tensors.  3 LLM: the offline API.
Beside it engine_args.py (the options), processor.py (prompts to requests, tokens to outputs), worker.py (who computes),
          command_line.py (what `python nano_serve.py` runs).

    from nano_serve import LLM, SamplingParams
    with LLM("models/tiny-llama3") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=40))[0].outputs[0].text)
"""
import sys

if __name__ == "__main__":     # up here: `--help` needs no torch
    import command_line
    sys.exit(command_line.main())

import contextlib
import copy
import dataclasses
import math
import os
import threading
import time
import warnings
from array import array
from collections import deque

import torch

from checkpoint import LlamaConfig, auto_dtype, find_checkpoint, param_shapes, parse_dtype, read_json
from engine_args import EMBEDDED_MODEL, EngineArgs
from kv_cache import KVCache, KVCacheManager
from model import ForwardBatch
from processor import CHAT_OPTIONS, InputProcessor, OutputProcessor, as_list
from request import RequestOutput, RequestRefused, SamplingParams, show
from sampling import sample, top_logprobs, why_no_token
from scheduler import Scheduler, SchedulerConfig, check_invariants
from terminal import progress
from text import TextCodec
from worker import WorkerError, interrupts_wait, make_executor


# -- 1. The engine ----------------------------------------------------------------------------------------------------

class LLMEngine:
    """The step loop: schedule, build the batch, run it, sample, hand the tokens back.

    add_request() queues, each step() moves every scheduled request on and returns what changed, until
    has_unfinished_requests() is False. One thread at a time, but for abort_request(). clock: a callable giving seconds.
    `records` keeps a StepRecord a step, the newest args.max_records of them.
    vLLM: v1/engine/llm_engine.py:48 LLMEngine
    """

    def __init__(self, args, clock=time.perf_counter):
        self.args, self.clock, self.num_steps, self.records = args, clock, 0, []
        folder = find_checkpoint(args.model)
        self.config, self.codec = LlamaConfig.from_folder(folder), TextCodec(folder)
        self.generation_config = {}
        if (folder / "generation_config.json").is_file():
            self.generation_config = read_json(folder / "generation_config.json")
        self.config.check_tensor_parallel(args.tensor_parallel_size)
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: PyTorch sees no GPU here; --device cpu (or auto) needs none")
        device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        dtype = parse_dtype(args.dtype) or auto_dtype(self.config, device)
        self.device, self.dtype = torch.device(device), dtype
        # All that can be refused is refused before the weights are read.
        block_bytes = KVCache.bytes_per_block(self.config.num_hidden_layers, args.block_size, max(
            self.config.num_key_value_heads // args.tensor_parallel_size, 1), self.config.head_dim, dtype)
        num_blocks = args.num_kv_blocks or (args.kv_cache_memory // block_bytes if device == "cpu" else None)
        if device == "cpu" and num_blocks * block_bytes > (memory := physical_memory()):
            raise ValueError(f"the KV pool would take {num_blocks * block_bytes / 2**30:.1f} GiB of this machine's "
                             f"{memory / 2**30:.1f} (--num-kv-blocks, --block-size, --kv-cache-memory)")
        if num_blocks is not None:
            self.scheduler = self._make_scheduler(num_blocks)
        # A small matrix is done before a second thread has woken up, and on shared cores the two wait for each other.
        small = sum(math.prod(shape) for shape in param_shapes(self.config).values()) < 20e6
        self._threads = args.threads or (1 if small and device == "cpu" else torch.get_num_threads())
        with cpu_threads(self._threads):
            self.executor = make_executor(folder, dtype, device, args.attention_backend, args.tensor_parallel_size,
                                          args.enforce_eager)
            if num_blocks is None:   # a GPU: the share asked for, less the weights; the rest is for activations
                free, total = torch.cuda.mem_get_info()
                num_blocks = int(args.gpu_memory_utilization * total - (total - free)) // block_bytes
                self.scheduler = self._make_scheduler(num_blocks)
            self.executor.init_kv_cache(num_blocks, args.block_size)
        self.inputs = InputProcessor(args, self.config, self.codec)
        self.outputs = OutputProcessor(self.codec, self.scheduler.finish_request)
        self._results = []                       # of a step that didn't get to return them: the next one does
        self._in_step, self._aborts, self.closed = False, [], False

    @classmethod
    def from_engine_args(cls, engine_args):
        return cls(engine_args)

    def _make_scheduler(self, num_blocks):
        a = self.args
        manager = KVCacheManager(num_blocks, a.block_size, a.enable_prefix_caching)
        model_len = self.config.max_position_embeddings
        if a.max_model_len is not None and a.max_model_len > model_len:
            raise ValueError(f"--max-model-len {a.max_model_len} is more than the {model_len} positions that the model "
                             "was made for")
        return Scheduler(SchedulerConfig(
            a.max_num_seqs or min(256, a.max_num_batched_tokens), a.max_num_batched_tokens,
            a.max_model_len or min(model_len, manager.num_usable_blocks * a.block_size), a.enable_chunked_prefill,
            a.scheduling_policy, a.long_prefill_token_threshold, max_num_waiting=a.max_num_waiting), manager)

    def add_request(self, request_id, prompt, params=None, arrival_time=None, priority=0):
        """prompt: as for InputProcessor.tokenize; params: a SamplingParams; arrival_time in
        seconds on `clock`. With params.n > 1 the outputs of n requests come back under this id, told apart by index.
        Raises RequestRefused (a ValueError) for this request alone, before anything of it is kept.
        vLLM: v1/engine/llm_engine.py:218 LLMEngine.add_request"""
        if self.closed:
            raise RuntimeError("this engine is closed; make a new one")
        if not isinstance(request_id, str):      # the queue by priority compares them
            raise TypeError(f"request_id must be a text, got {show(request_id, 40)}")
        if request_id in self.outputs.children:
            raise RequestRefused(f"request id {request_id!r} is already in use by a request that has not ended")
        arrival_time = self.clock() if arrival_time is None else arrival_time
        lives = self.inputs.process(request_id, prompt, params, arrival_time, priority)
        try:
            with interrupts_wait():              # the scheduler and the front end know it, or neither does
                for live in lives:
                    self.scheduler.add_request(live.request)
                    self.outputs.add(live)
        except BaseException:                    # the queue is full behind the third of four: none of them is kept
            self.abort_request(request_id)
            raise

    @interrupts_wait()
    def abort_request(self, request_id):
        """End a request, all n of it, wherever it is  →  outputs with what it has; [] for unknown and finished ids.
        From another thread, or from a destructor in the middle of a step, too: after it, with [] and no outputs."""
        if self._in_step:
            self._aborts.append(request_id)
            return []
        return self.outputs.end(list(self.outputs.children.get(request_id, ())), "abort", None, self.clock())

    def is_alive(self, request_id):
        return request_id in self.outputs.children

    def has_unfinished_requests(self):
        return bool(self._results) or self.scheduler.has_unfinished_requests()

    def step(self):
        """One step for everybody who is scheduled; returns a RequestOutput for each that got a token or ended.

        Ctrl-C is held back until the step is through. If the step can't be run to its end (a rank died), all requests
        end, and their outputs say why. In both cases the exception is raised, and the outputs are there for
        `take_results`, or else come with the next step."""
        with interrupts_wait(), cpu_threads(self._threads):
            try:
                self._in_step = True
                if self.scheduler.has_unfinished_requests():
                    self._run_step()
            except BaseException as error:
                self._break_off(f"the step failed: {error or type(error).__name__}")
                raise
            finally:
                self._in_step = False
                while self._aborts:
                    self.abort_request(self._aborts.pop())
        return self.take_results()

    def take_results(self):
        results, self._results = self._results, []
        return results

    def _run_step(self):
        start = self.clock()
        # 1) Who computes how many tokens?  → scheduler.py
        output = self.scheduler.schedule()
        for request in output.scheduled_requests:
            if request.first_scheduled_time is None:
                request.first_scheduled_time = start
        # schedule() has counted this step's tokens as computed already. Whoever has now computed all that is known gets
        # a new token; a chunk that stops short of the end predicts a known one, so nobody looks at its logits.
        ends = [r for r in output.scheduled_requests if r.num_computed_tokens == r.num_tokens]
        sampled, logprobs, errors = {}, {}, {}
        if output.scheduled_requests:       # none, if by priority the first to be served had to give way itself
            # 2) The plan as tensors  → build_batch, below.   3) The forward pass  → worker.py, model.py
            batch = build_batch(output, self.scheduler.kv_cache_manager, self.device)
            logits = self.outputs.take_prompt_logprobs(output, self.executor.execute(batch))     # [S', V]
            # 4) One token for each row that has one to come  → sampling.py
            tokens = zip(ends, sample(logits, ends))
            sampled = {request.request_id: token_id for request, token_id in tokens if token_id is not None}
            logprobs = self._logprobs(logits, ends, sampled)
            errors = {r.request_id: why_no_token(row, r) for r, row in zip(ends, logits) if r.request_id not in sampled}
        # 5) Append, stop?, free  → scheduler.py.   6) The token as text, and what the caller sees  → processor.py
        now = self.clock()
        for request_id in errors:
            self.scheduler.finish_request(request_id, "error")
        self.scheduler.update_from_output(output, sampled)
        texts = {}
        for request in ends:
            i = request.request_id
            self._results.append(self.outputs.process(i, sampled.get(i), logprobs.get(i), errors.get(i), now))
            texts[i] = self._results[-1].outputs[0].delta
        finished = [r.request_id for r in ends if r.finish_reason is not None]      # by a token, or by a stop string
        self.records.append(self.scheduler.make_record(self.num_steps, output, sampled, start, self.clock() - start,
                                                       finished, texts))
        self.num_steps += 1
        if len(self.records) > self.args.max_records:
            del self.records[0]
        if self.args.check_invariants:
            check_invariants(self.scheduler)

    def _break_off(self, reason):
        """The scheduler counts a step's tokens, and caches the blocks they fill, before the step runs. If
        it then doesn't run to its end, those blocks hold nothing: no request may go on, and no lookup may find them.
        What a request has so far comes back."""
        self.scheduler.start_over()
        self._results += self.outputs.end_all("error", reason, self.clock())

    def _logprobs(self, logits, ends, sampled):
        """{request id: [(token id, logprob, rank)]} for those who asked; the others cost nothing."""
        rows = [i for i, r in enumerate(ends) if r.sampling_params.logprobs is not None and r.request_id in sampled]
        if not rows:
            return {}
        ids = [ends[i].request_id for i in rows]
        wanted = [ends[i].sampling_params.logprobs for i in rows]
        tops = top_logprobs(logits[rows], [sampled[i] for i in ids], max(wanted))
        return {i: top[:n + 1] for i, n, top in zip(ids, wanted, tops)}

    def records_since(self, step):
        """The records kept of step number `step` and later, oldest first."""
        return self.records[max(len(self.records) - (self.num_steps - step), 0):]

    def close(self):
        """End the workers. Whoever is still alive is aborted, and comes back with what it has; the engine takes nothing
        more. Raises RuntimeError while another thread is within a step."""
        if self._in_step:
            raise RuntimeError("another thread is in the middle of a step; an engine is closed between steps")
        if not self.closed:
            self.closed = True
            self._results += self.outputs.end_all("abort", "the engine was closed", self.clock())
            self.executor.close()


@contextlib.contextmanager
def cpu_threads(n):
    """With n threads for PyTorch's operators, and afterwards with as many as before: the number is the process's, which
    may have other engines."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def physical_memory():
    """Bytes of memory that this machine has, or infinity where the system doesn't say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf


# -- 2. A plan as tensors ---------------------------------------------------------------------------------------------

def build_batch(output, kv_cache_manager, device):
    """A SchedulerOutput as tensors; see ForwardBatch for a worked example.
    vLLM: v1/worker/gpu_model_runner.py:1960 GPUModelRunner._prepare_inputs"""
    token_ids, positions, lens, seq_lens, tables, logits_indices = [], [], [], [], [], []
    for request in output.scheduled_requests:
        n = output.num_scheduled_tokens[request.request_id]
        end = request.num_computed_tokens            # the scheduler has counted this step's tokens already
        token_ids += request.all_token_ids[end - n:end]
        positions += range(end - n, end)
        lens.append(n)
        seq_lens.append(end)
        tables.append(kv_cache_manager.get_block_ids(request.request_id))
        logits_indices += [len(token_ids) - end + p for p in request.prompt_positions(n)]
        if end == request.num_tokens:
            logits_indices.append(len(token_ids) - 1)
    width = max(map(len, tables))
    # An array of C ints becomes a tensor as it is; lists of 256 long tables would be walked element by element.
    flat = array("i")
    for table in tables:
        flat.extend(table + [0] * (width - len(table)))
    tables = torch.frombuffer(flat, dtype=torch.int32).view(len(tables), width)                     # [S, B]
    lens, positions = torch.tensor(lens), torch.tensor(positions)                                   # [S], [T]
    rows = torch.arange(len(lens)).repeat_interleave(lens)                                          # [T]  whose token
    block_size = kv_cache_manager.block_size
    slots = tables[rows, positions // block_size].long() * block_size + positions % block_size      # [T]
    query_start_loc = torch.zeros(len(lens) + 1, dtype=torch.int32)                                 # [S+1]
    torch.cumsum(lens, 0, out=query_start_loc[1:])
    batch = (torch.tensor(token_ids), positions, slots, query_start_loc, torch.tensor(seq_lens, dtype=torch.int32),
             tables, torch.tensor(logits_indices, dtype=torch.int64))
    return ForwardBatch(*(t.to(device, non_blocking=True) for t in batch))


# -- 3. The offline API -----------------------------------------------------------------------------------------------

DEFAULTS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",  # generation_config's
            "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}             # name → ours


class LLM:
    """vLLM's offline class: `LLM(model, tensor_parallel_size=…, …any EngineArgs field).generate(prompts, params)`.

    Also a context manager; close() ends the worker processes. A prompt that is refused, or fails, costs only itself:
    its RequestOutput comes back with finish_reason "error" and says why in `.error`, with a warning. One call at a
    time: who wants several has extras/async_engine.py.  vLLM: entrypoints/llm.py:67 LLM (where generate raises)
    """

    def __init__(self, model=EMBEDDED_MODEL, **options):
        known = [f.name for f in dataclasses.fields(EngineArgs)]
        if unknown := options.keys() - set(known):
            raise TypeError(f"LLM has no option {min(unknown)!r}; it has {', '.join(known[1:])}")
        self.engine = LLMEngine(EngineArgs(model, **options))
        self._call, self._next_id = threading.Lock(), 0

    llm_engine = property(lambda self: self.engine)

    def get_default_sampling_params(self):
        """What `generate` takes when it is given none: SamplingParams() with what generation_config.json says."""
        given = {ours: self.engine.generation_config.get(theirs) for theirs, ours in DEFAULTS.items()}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def get_tokenizer(self):
        """The text.TextCodec of this model: encode, decode, apply_chat_template."""
        return self.engine.codec

    def reset_prefix_cache(self):
        """Forget all cached prefixes; False, and nothing is forgotten, while a request runs."""
        return self.engine.scheduler.kv_cache_manager.reset_prefix_cache()

    def generate(self, prompts, sampling_params=None, use_tqdm=False, priority=None):
        """prompts: one or a list, each in a form of InputProcessor.tokenize; sampling_params: one SamplingParams for
        all, or a list of as many; priority: a list of as many numbers, the lower the earlier (with scheduling_policy
        "priority"). use_tqdm: a progress line on stderr. Returns a list of RequestOutput in the order of the prompts;
        with n > 1, `outputs` holds n answers. A request that fails comes back with what it has, and says why in
        `.error`; raises WorkerError if the engine has lost a rank, with what there is in its `outputs`."""
        prompts = as_list(prompts)
        final = [[] for _ in prompts]
        try:
            with progress(len(prompts), use_tqdm) as advance:
                for index, output in self.stream(prompts, sampling_params, priority):
                    if output.finished:
                        final[index].append(output)
                        advance()
        except WorkerError as error:
            error.outputs = final
            raise
        for outputs in final:        # n answers to one prompt become one result
            outputs.sort(key=lambda o: o.outputs[0].index)
            outputs[0].outputs = [o.outputs[0] for o in outputs]
            outputs[0].error, outputs[0].finished = next((o.error for o in outputs if o.error), None), True
            if outputs[0].error:
                warnings.warn(f"request {outputs[0].request_id}: {outputs[0].error}", stacklevel=2)
        return [outputs[0] for outputs in final]

    def stream(self, prompts, sampling_params=None, priority=None):
        """The same work as it happens: yields (index of the prompt, RequestOutput) whenever a request got a token,
        ended or was refused. `outputs[0].delta` is the new text, `outputs[0].index` tells the n answers apart. Leaving
        the loop early aborts what is unfinished. RuntimeError if another call on this LLM has not come to its end."""
        prompts = as_list(prompts)
        many = isinstance(sampling_params, (list, tuple))
        params = list(sampling_params) if many else [sampling_params] * len(prompts)
        priorities = [0] * len(prompts) if priority is None else list(priority)
        if not len(params) == len(priorities) == len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params)} sampling parameters and "
                             f"{len(priorities)} priorities")
        params = [self.get_default_sampling_params() if p is None else p for p in params]
        return self._stream(list(zip(prompts, params, priorities)))

    def _stream(self, todo):
        if self.engine.closed:
            raise RuntimeError("this LLM is closed; make a new one")
        if not self._call.acquire(blocking=False):
            raise RuntimeError("an LLM takes one call at a time, and one is running (a stream runs until it is read to "
                               "its end or closed); extras/async_engine.py serves many callers")
        engine, ours, newest = self.engine, {}, {}       # request id → index of its prompt; (id, answer) → its output
        todo, error = deque(enumerate(todo)), None
        try:
            while todo or ours:
                yield from self._hand_over(todo, ours)
                try:
                    outputs = engine.step()
                except BaseException as failure:         # whoever lived then has an output that says so
                    error, outputs = failure, engine.take_results()
                outputs = [output for output in outputs if output.request_id in ours]
                ended = {output.request_id for output in outputs if output.finished}
                gone = [i for i in ours if i not in ended and not engine.is_alive(i)]   # aborted by somebody else
                for output in outputs:
                    output.finished = output.outputs[0].finish_reason is not None      # here: of this answer, not of n
                    newest[output.request_id, output.outputs[0].index] = output
                    yield ours[output.request_id], output
                for key in [key for key in newest if key[0] in gone and not newest[key].finished]:
                    answer = copy.copy(newest[key].outputs[0])
                    answer.finish_reason, answer.delta = "abort", ""
                    yield ours[key[0]], dataclasses.replace(newest[key], outputs=[answer], finished=True)
                for request_id in gone:
                    if not any(key[0] == request_id for key in newest):                 # before its first token
                        yield ours[request_id], RequestOutput.ended(request_id, "abort")
                for request_id in (*ended, *gone):
                    del ours[request_id]
                newest = {key: output for key, output in newest.items() if key[0] in ours}
                # Ctrl-C, an engine without workers, broken accounts: nothing can be done about that here.
                fatal = isinstance(error, (WorkerError, AssertionError)) or not isinstance(error, Exception)
                if error is not None and fatal:
                    raise error
                error = None
        finally:
            for request_id in ours:
                engine.abort_request(request_id)
            self._call.release()

    def _hand_over(self, todo, ours):
        """Add as many of `todo` as the queue has room for, where a server would refuse; yields what was refused."""
        scheduler = self.engine.scheduler
        limit = scheduler.config.max_num_waiting or math.inf
        while todo and (seats := limit - len(scheduler.waiting)) > 0:
            index, (prompt, params, priority) = todo[0]
            if isinstance(n := getattr(params, "n", None), int) and seats < n <= limit:
                return
            todo.popleft()
            request_id, self._next_id = str(self._next_id), self._next_id + 1
            ours[request_id] = index             # before: Ctrl-C may come as soon as it is added
            try:
                self.engine.add_request(request_id, prompt, params, priority=priority)
            except (RequestRefused, RuntimeError) as refusal:
                del ours[request_id]
                yield index, RequestOutput.ended(request_id, "error", 0, prompt, str(refusal))

    def chat(self, messages, sampling_params=None, use_tqdm=False, **template):
        """messages: a conversation [{"role": …, "content": …}, …] or a list of them; answers as generate() does.
        template: chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs, as in
        TextCodec.apply_chat_template."""
        if unknown := template.keys() - set(CHAT_OPTIONS):
            raise TypeError(f"chat has no option {min(unknown)!r}; it has {', '.join(CHAT_OPTIONS)}")
        many = isinstance(messages, (list, tuple)) and not (messages and isinstance(messages[0], dict))
        conversations = messages if many else [[messages] if isinstance(messages, dict) else messages]
        return self.generate([{"messages": m, **template} for m in conversations], sampling_params, use_tqdm)

    def close(self):
        self.engine.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
