"""The engine and its front door (chapter 3): requests in, steps until they are done, text out.

Mirrors   vLLM: v1/engine/llm_engine.py:48 LLMEngine, v1/engine/core.py:584 EngineCore.step, entrypoints/llm.py:67 LLM
Promises  in fp32, and up to a tie of two logits, every request's text is what it would be alone, whoever shares its
          steps; a request that can't run is refused alone.
Leaves out async scheduling, LoRA, multimodal input, speculative decoding; an HTTP server.
Order     1 EngineArgs: every option once.  2 What comes back.  3 LLMEngine: the step loop, the heart of this file.
          4 LLM: the offline API.
Beside it text.py (text in and out), worker.py (the processes that compute), command_line.py (`python nano_serve.py`).

    from nano_serve import LLM, SamplingParams
    with LLM("models/tiny-llama3") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=40))[0].outputs[0].text)
"""
import contextlib
import dataclasses
import math
import os
import random
import sys
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from checkpoint import DTYPES, LlamaConfig, auto_dtype, find_checkpoint, param_shapes
from kv_cache import KVCache, KVCacheManager
from model import ForwardBatch
from request import Request, RequestMetrics, RequestRefused, SamplingParams
from sampling import sample, top_logprobs
from scheduler import Scheduler, SchedulerConfig, check_invariants
from text import Detokenizer, TextCodec
from worker import make_executor

EMBEDDED_MODEL = str(Path(__file__).resolve().parent / "models" / "tiny-llama3")


# -- 1. The options ---------------------------------------------------------------------------------------------------

def option(default, help, **extra):
    return field(default=default, metadata={"help": help, **extra})


@dataclass
class EngineArgs:
    """Each option, under vLLM's name where vLLM has it: a keyword of `LLM`, and `--with-dashes` on the command line.
    vLLM: engine/arg_utils.py EngineArgs"""
    model: str = option(EMBEDDED_MODEL, "checkpoint folder, or a hub id")
    tensor_parallel_size: int = option(1, "ranks that share the model (TP)", short="-tp")
    dtype: str = option("auto", "auto, float32, bfloat16 or float16; auto on a CPU is float32 for small models")
    device: str = option("auto", "auto, cpu or cuda")
    max_model_len: int | None = option(None, "limit for prompt + output; default: the model's, or what the pool holds")
    max_num_seqs: int | None = option(None, "requests that may run at once; default: 256, or the budget if it is less")
    max_num_batched_tokens: int = option(2048, "token budget (Token 预算) of a step")
    block_size: int = option(16, "tokens a KV block")
    num_kv_blocks: int | None = option(None, "size of the KV pool in blocks, the null block counted")
    threads: int | None = option(None, "CPU threads (with -tp, each rank has one); default: torch's choice, but 1 for "
                                       "models under 20M parameters")
    kv_cache_memory: int = option(1 << 30, "bytes of the KV pool of a rank on a CPU, if --num-kv-blocks is not given")
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory for weights and KV pool")
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prefixes")
    enable_chunked_prefill: bool = option(True, "let a prompt be cut where the budget ends")
    scheduling_policy: str = option("fcfs", "fcfs or priority")
    long_prefill_token_threshold: int = option(0, "most prompt tokens of one request in a step (0: no limit)")
    max_num_waiting: int | None = option(None, "length of the waiting queue, beyond which requests are refused")
    seed: int = option(0, "where requests without a seed of their own get theirs from")
    attention_backend: str = option("auto", "auto, torch or triton")
    enforce_eager: bool = option(False, "on a GPU: launch each kernel of each step, record no CUDA graphs of decodes")
    compile: bool = option(False, "on a CPU: compile the step of a lone decode (a chat): faster, for a slower "
                                  "start and twice the memory of the weights")
    check_invariants: bool = option(False, "check the scheduler's and the pool's accounts after every step (slow)")


# -- 2. What comes back -----------------------------------------------------------------------------------------------

@dataclass
class Logprob:
    logprob: float                 # ln of the probability, by the logits before temperature, penalties and cuts
    rank: int                      # 1: the likeliest
    decoded_token: str


@dataclass
class CompletionOutput:
    """One answer. `text` and `token_ids` are all so far, `delta` what this step added to the text; token_ids includes
    the token that ended it. finish_reason: None while it runs, then stop, length, abort or error.
    vLLM: vllm/outputs.py:22 CompletionOutput"""
    index: int
    text: str
    token_ids: list[int]
    delta: str = ""
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self):
        return None if self.logprobs is None else sum(lp[t].logprob for t, lp in zip(self.token_ids, self.logprobs))


@dataclass
class RequestOutput:
    """vLLM: vllm/outputs.py:85 RequestOutput. `error`: why a request was refused or failed (finish_reason "error")."""
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics | None = None
    error: str | None = None

    num_cached_tokens = property(lambda self: self.metrics.num_cached_tokens if self.metrics else 0)


# -- 3. The engine ----------------------------------------------------------------------------------------------------

class LLMEngine:
    """The step loop: schedule, build the batch, run it, sample, hand the tokens back.

    add_request() queues, each step() moves every scheduled request on and returns what changed, until
    has_unfinished_requests() is False. clock: a callable giving seconds. `records` keeps a StepRecord a step and grows
    with every one: who serves for days empties it.
    vLLM: v1/engine/llm_engine.py:48 LLMEngine
    """

    def __init__(self, args, clock=time.perf_counter):
        self.args, self.clock, self.records = args, clock, []
        folder = find_checkpoint(args.model)
        self.config, self.codec = LlamaConfig.from_folder(folder), TextCodec(folder)
        _check_options(args)
        self.config.check_tensor_parallel(args.tensor_parallel_size)
        device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        if args.compile and (device != "cpu" or args.tensor_parallel_size > 1 or args.attention_backend == "triton"):
            raise ValueError("--compile is for one process on a CPU and the PyTorch twins, not for --device "
                             f"{device}, -tp {args.tensor_parallel_size}, --attention-backend {args.attention_backend}")
        dtype = auto_dtype(self.config, device) if args.dtype == "auto" else DTYPES[args.dtype]
        self.device, self.dtype, self._seeds = torch.device(device), dtype, random.Random(args.seed)
        # All that can be refused is refused before the weights are read.
        block_bytes = KVCache.bytes_per_block(self.config.num_hidden_layers, args.block_size, max(
            self.config.num_key_value_heads // args.tensor_parallel_size, 1), self.config.head_dim, dtype)
        num_blocks = args.num_kv_blocks or (args.kv_cache_memory // block_bytes if device == "cpu" else None)
        if device == "cpu" and num_blocks * block_bytes > (memory := _physical_memory()):
            raise ValueError(f"the KV pool would take {num_blocks * block_bytes / 2**30:.1f} GiB of this machine's "
                             f"{memory / 2**30:.1f} (--num-kv-blocks, --block-size, --kv-cache-memory)")
        if num_blocks is not None:
            self.scheduler = self._make_scheduler(num_blocks)
        # A small matrix is done before a second thread has woken up, and on shared cores the two wait for each other.
        small = sum(math.prod(shape) for shape in param_shapes(self.config).values()) < 20e6
        self._threads = args.threads or (1 if small and device == "cpu" else torch.get_num_threads())
        with cpu_threads(self._threads):
            self.executor = make_executor(folder, dtype, device, args.attention_backend, args.tensor_parallel_size,
                                          args.enforce_eager, args.compile)
            if num_blocks is None:   # on a GPU: what the weights leave of the share that was asked for
                free, total = torch.cuda.mem_get_info()
                num_blocks = int(args.gpu_memory_utilization * total - (total - free)) // block_bytes
                self.scheduler = self._make_scheduler(num_blocks)
            self.executor.init_kv_cache(num_blocks, args.block_size)
        self._live, self._closed = {}, False         # request id → _LiveRequest

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

    def add_request(self, request_id, prompt, sampling_params=None, arrival_time=None, priority=0):
        """prompt: a string, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids} or {"messages":
        conversation}, which the chat template makes a text of; arrival_time in seconds on `clock`.
        Raises RequestRefused (a ValueError) for this request alone, before anything of it is kept."""
        if self._closed:
            raise RuntimeError("this engine is closed; make a new one")
        params = sampling_params or SamplingParams()
        text, token_ids = self.tokenize(prompt)
        self._check_ids("prompt token id", token_ids)
        self._check_ids("stop_token_ids: id", params.stop_token_ids)
        for name, value in (("priority", priority), ("arrival_time", arrival_time or 0)):
            if not isinstance(value, (int, float)) or value != value:
                raise RequestRefused(f"{name} must be a number, got {value!r:.40}")
        if params.n != 1:
            raise RequestRefused(f"n = {params.n}: the engine runs single requests; LLM.generate makes n of one")
        if params.logprobs is not None and params.logprobs > self.config.vocab_size:
            raise RequestRefused(f"logprobs = {params.logprobs} is more than the vocabulary, {self.config.vocab_size}")
        if params.seed is None:      # fixed here, once: a preempted request must draw the same numbers again
            params = dataclasses.replace(params, seed=self._seeds.getrandbits(62))
        arrival_time = self.clock() if arrival_time is None else arrival_time
        request = Request(request_id, token_ids, params, arrival_time, priority, self.config.eos_token_ids)
        detokenizer = Detokenizer(self.codec, params, token_ids)         # refuses stop strings that can never match
        self.scheduler.add_request(request)
        self._live[request_id] = _LiveRequest(request, text, detokenizer,
                                              None if params.logprobs is None else [])

    def tokenize(self, prompt):
        """A prompt in any of its forms  →  (text, or None if it came as ids; token ids)."""
        forms = {"prompt": str, "prompt_token_ids": (list, tuple), "messages": (list, tuple)}
        if not isinstance(prompt, dict):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        given = prompt.keys() & forms
        if len(given) != 1 or not isinstance(prompt[min(given)], forms[min(given)]):
            raise RequestRefused("a prompt is a text, a list of token ids, or a dict with just one of prompt (text), "
                                 f"prompt_token_ids, messages (lists), not {prompt!r:.80}")
        if "prompt_token_ids" in given:
            return None, list(prompt["prompt_token_ids"])
        if "prompt" in given:
            return prompt["prompt"], self.codec.encode(prompt["prompt"])
        text = self.codec.apply_chat_template(prompt["messages"])        # it writes BOS and all other special tokens
        return text, self.codec.encode(text, add_special_tokens=False)   # itself, so none is added

    def _check_ids(self, what, ids):
        for i in ids:
            if type(i) is not int or not 0 <= i < self.config.vocab_size:
                raise RequestRefused(f"{what} {i!r:.40} is not in the vocabulary, 0 to {self.config.vocab_size - 1}")

    def abort_request(self, request_id):
        """End a request wherever it is; unknown and finished ids are ignored."""
        self.scheduler.abort_request(request_id)
        self._live.pop(request_id, None)

    def has_unfinished_requests(self):
        return self.scheduler.has_unfinished_requests()

    def step(self):
        """One step for everybody who is scheduled; returns a RequestOutput for each that got a token or failed."""
        start = self.clock()
        if not self.has_unfinished_requests():
            return []
        with self._whole_or_not_at_all(), cpu_threads(self._threads):
            # 1) Who computes how many tokens?  → scheduler.py
            output = self.scheduler.schedule()
            for request in output.scheduled_requests:
                if request.first_scheduled_time is None:
                    request.first_scheduled_time = start
            # schedule() has counted this step's tokens as computed already. Whoever has now computed all that is known
            # gets a new token; a chunk that stops short of the end predicts a known one, so nobody looks at its logits.
            ends = [r for r in output.scheduled_requests if r.num_computed_tokens == r.num_tokens]
            sampled, logprobs = {}, {}
            if output.scheduled_requests:   # an empty plan is possible: by priority, the only runner may preempt itself
                # 2) The plan as tensors  → build_batch, below.   3) The forward pass  → worker.py, model.py
                batch = build_batch(output, self.scheduler.kv_cache_manager, self.device)
                logits = self.executor.execute(batch)                                        # [S', V]
                # 4) One token for each row that has one to come  → model.py, section 5
                for request, token_id in zip(ends, sample(logits, ends)):
                    if token_id is None:
                        self.scheduler.finish_request(request.request_id, "error")
                    else:
                        sampled[request.request_id] = token_id
                logprobs = self._logprobs(logits, ends, sampled)
            # 5) Append, stop?, free  → scheduler.py.   6) The token as text, and what the caller sees  → text.py
            now = self.clock()
            self.scheduler.update_from_output(output, sampled)
            results = [self._advance(self._live[r.request_id], sampled.get(r.request_id), logprobs, now) for r in ends]
            finished = [r.request_id for r in results if r.finished]     # by a token, or by a stop string in its text
            self.records.append(self.scheduler.make_record(len(self.records), output, sampled, start,
                                                           self.clock() - start, finished))
            if self.args.check_invariants:
                check_invariants(self.scheduler)
        return results

    @contextlib.contextmanager
    def _whole_or_not_at_all(self):
        """The scheduler counts a step's tokens, and publishes their blocks to the prefix cache, before the step runs.
        If it then doesn't run to its end (Ctrl-C, a dead rank), those blocks hold nothing: no request may go on, and no
        lookup may find them."""
        try:
            yield
        except BaseException:
            for request_id in list(self.scheduler.requests):
                self.abort_request(request_id)
            self.scheduler.kv_cache_manager.reset_prefix_cache()
            raise

    def _advance(self, live, token_id, logprobs, now):
        """Give one request its token: the text, the stop strings, the result. The token is in request.output_token_ids
        already. token_id None: there is none, the request failed."""
        request, detokenizer = live.request, live.detokenizer
        shown = detokenizer.shown
        if token_id is not None:
            request.token_times.append(now)
            by_token = request.finish_reason == "stop"       # ended by EOS or a stop id: that token's text is not shown
            show = not by_token or request.sampling_params.include_stop_str_in_output
            stop = detokenizer.append(token_id, request.finish_reason is not None, show_token=show)
            if stop is not None:                             # on the last allowed token, too: then "stop", not "length"
                self.scheduler.finish_request(request.request_id, "stop", stop)          # no effect if it has ended
                request.finish_reason, request.stop_reason = "stop", stop
            if live.logprobs is not None:
                live.logprobs.append({i: Logprob(v, rank, self.codec.decode([i], False))
                                      for i, v, rank in logprobs[request.request_id]})
        if request.finish_reason is not None:
            request.finish_time = now
            del self._live[request.request_id]
        text = detokenizer.text[:detokenizer.shown]
        error = None
        if token_id is None:
            error = "the model's logits are not finite (NaN or inf); try --dtype float32 or bfloat16"
        answer = CompletionOutput(0, text, list(request.output_token_ids), text[shown:],
                                  live.logprobs and list(live.logprobs), request.finish_reason, request.stop_reason)
        return RequestOutput(request.request_id, live.prompt, request.prompt_token_ids, [answer],
                             request.finish_reason is not None, RequestMetrics(request), error)

    def _logprobs(self, logits, ends, sampled):
        """{request id: [(token id, logprob, rank)]} for those who asked; the others cost nothing."""
        rows = [i for i, r in enumerate(ends) if r.sampling_params.logprobs is not None and r.request_id in sampled]
        if not rows:
            return {}
        ids = [ends[i].request_id for i in rows]
        wanted = [ends[i].sampling_params.logprobs for i in rows]
        tops = top_logprobs(logits[rows], [sampled[i] for i in ids], max(wanted))
        return {i: top[:n + 1] for i, n, top in zip(ids, wanted, tops)}

    def close(self):
        """End the workers. Whoever is still alive is aborted; the engine takes nothing more."""
        for request_id in list(self._live):
            self.abort_request(request_id)
        self.executor.close()
        self._closed = True


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


def _check_options(args):
    """What is wrong whatever the model; the scheduler and the pool check the rest."""
    for name, choices in (("dtype", ("auto", *DTYPES)), ("device", ("auto", "cpu", "cuda"))):
        if getattr(args, name) not in choices:
            raise ValueError(f"--{name} {getattr(args, name)!r} is unknown; it is one of {', '.join(choices)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no GPU here; --device cpu (or auto) needs none")
    if type(args.tensor_parallel_size) is not int:          # its value is checked against the model's sizes
        raise ValueError(f"--tensor-parallel-size must be a whole number, got {args.tensor_parallel_size!r}")
    for name in ("block_size", "num_kv_blocks", "kv_cache_memory", "threads", "max_model_len", "max_num_seqs",
                 "max_num_batched_tokens"):
        value = getattr(args, name)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"--{name.replace('_', '-')} must be a whole number of at least 1, got {value!r}")
    if args.threads and args.threads > (os.cpu_count() or 1):
        raise ValueError(f"--threads {args.threads} is more than this machine's {os.cpu_count()} cores")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise ValueError(f"--gpu-memory-utilization is a share, above 0 and up to 1, got {args.gpu_memory_utilization}")


def _physical_memory():
    """Bytes of memory that this machine has, or infinity where the system doesn't say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf


@dataclass
class _LiveRequest:
    """What the front end keeps of a request beside the scheduler's part."""
    request: Request
    prompt: str | None
    detokenizer: Detokenizer
    logprobs: list | None            # what is reported so far, if the request asked for it


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
        if end == request.num_tokens:
            logits_indices.append(len(token_ids) - 1)
    width = max(map(len, tables))
    tables = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32)          # [S, B]
    lens, positions = torch.tensor(lens), torch.tensor(positions)                                   # [S], [T]
    rows = torch.arange(len(lens)).repeat_interleave(lens)                                          # [T]  whose token
    block_size = kv_cache_manager.block_size
    slots = tables[rows, positions // block_size].long() * block_size + positions % block_size      # [T]
    query_start_loc = torch.zeros(len(lens) + 1, dtype=torch.int32)                                 # [S+1]
    torch.cumsum(lens, 0, out=query_start_loc[1:])
    batch = (torch.tensor(token_ids), positions, slots, query_start_loc, torch.tensor(seq_lens, dtype=torch.int32),
             tables, torch.tensor(logits_indices, dtype=torch.int64))
    return ForwardBatch(*(t.to(device, non_blocking=True) for t in batch))


# -- 4. The offline API -----------------------------------------------------------------------------------------------

class LLM:
    """vLLM's offline class: `LLM(model, tensor_parallel_size=…, …any EngineArgs field).generate(prompts, params)`.

    Also a context manager; close() ends the worker processes. A prompt that is refused costs only itself: its
    RequestOutput comes back with finish_reason "error" and says why in `.error`, with a warning.
    vLLM: entrypoints/llm.py:67 LLM (where generate raises)
    """

    def __init__(self, model=EMBEDDED_MODEL, **options):
        known = [f.name for f in dataclasses.fields(EngineArgs)]
        if unknown := options.keys() - set(known):
            raise TypeError(f"LLM has no option {min(unknown)!r}; it has {', '.join(known[1:])}")
        self.engine = LLMEngine(EngineArgs(model, **options))
        self._lock = threading.Lock()            # held while a stream adds, steps, and takes its outputs
        self._next_id, self._mail = 0, {}        # _mail: request id → outputs that its stream has not taken yet

    def generate(self, prompts, sampling_params=None, use_tqdm=False, priority=None):
        """prompts: one or a list, each a string, token ids, or a dict as for LLMEngine.add_request; sampling_params:
        one SamplingParams for all, or a list of as many; priority: a list of as many numbers, the lower the earlier
        (with scheduling_policy "priority"). use_tqdm: a progress line on stderr. Returns a list of RequestOutput in the
        order of the prompts; with n > 1, `outputs` holds n answers."""
        prompts = _as_list(prompts)
        final = [[] for _ in prompts]
        with _progress(len(prompts), use_tqdm) as advance:
            for index, output in self.stream(prompts, sampling_params, priority):
                if output.finished:
                    final[index].append(output)
                    advance()
        for outputs in final:        # n answers to one prompt become one result
            outputs.sort(key=lambda o: o.outputs[0].index)
            outputs[0].outputs = [o.outputs[0] for o in outputs]
            outputs[0].error = next((o.error for o in outputs if o.error), None)
            if outputs[0].error:
                warnings.warn(f"request {outputs[0].request_id}: {outputs[0].error}", stacklevel=2)
        return [outputs[0] for outputs in final]

    def stream(self, prompts, sampling_params=None, priority=None):
        """The same work as it happens: yields (index of the prompt, RequestOutput) whenever a request got a token,
        ended or was refused. `outputs[0].delta` is the new text, `outputs[0].index` tells the n answers apart. Leaving
        the loop early aborts what is unfinished."""
        prompts = _as_list(prompts)
        many = isinstance(sampling_params, (list, tuple))
        params = list(sampling_params) if many else [sampling_params] * len(prompts)
        priorities = [0] * len(prompts) if priority is None else list(priority)
        if not len(params) == len(priorities) == len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params)} sampling parameters and "
                             f"{len(priorities)} priorities")
        engine, ours = self.engine, {}                              # request id → (index, which of n)
        # Answer j of n is seeded with seed + j (in 64 bits), so the first is what the prompt alone would get.
        nth_seed = lambda seed, j: None if seed is None else (seed + j + 2 ** 63) % 2 ** 64 - 2 ** 63
        todo = [(i, j, p if p.n == 1 else dataclasses.replace(p, n=1, seed=nth_seed(p.seed, j)))
                for i, p in enumerate(p or SamplingParams() for p in params) for j in range(p.n)][::-1]
        limit = engine.scheduler.config.max_num_waiting
        try:
            while todo or ours:
                ready = []
                with self._lock:
                    # A server refuses what its queue can't take; a caller with a list hands it over as there is room.
                    while todo and (limit is None or len(engine.scheduler.waiting) < limit):
                        index, j, p = todo.pop()
                        request_id, self._next_id = str(self._next_id), self._next_id + 1
                        try:
                            engine.add_request(request_id, prompts[index], p, priority=priorities[index])
                            ours[request_id], self._mail[request_id] = (index, j), []
                        except RequestRefused as refusal:
                            ready.append((index, ended_output(request_id, "error", j, prompts[index], str(refusal))))
                    # Other streams may run on this engine, in this thread or another: a step of one brings tokens to
                    # the requests of all, so everybody's go to their mail, and whoever finds mail needs no step.
                    if not ready and not any(self._mail[i] for i in ours):
                        for output in engine.step():
                            if output.request_id in self._mail:
                                self._mail[output.request_id].append(output)
                    for request_id, (index, j) in list(ours.items()):
                        mail, self._mail[request_id] = self._mail[request_id], []
                        if not mail and request_id not in engine.scheduler.requests:
                            mail = [ended_output(request_id, "abort")]           # by somebody else
                        for output in mail:
                            output.outputs[0].index = j
                            ready.append((index, output))
                        if mail and mail[-1].finished:
                            del ours[request_id], self._mail[request_id]
                yield from ready
        finally:
            with self._lock:
                for request_id in ours:
                    engine.abort_request(request_id)
                    del self._mail[request_id]

    def chat(self, messages, sampling_params=None, use_tqdm=False):
        """messages: a conversation [{"role": …, "content": …}, …] or a list of them; answers as generate() does."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        return self.generate([{"messages": m} for m in conversations], sampling_params, use_tqdm)

    def close(self):
        self.engine.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def _as_list(prompts):
    """One prompt, of which a list of token ids is one, as a list of one."""
    many = isinstance(prompts, (list, tuple)) and not (prompts and type(prompts[0]) is int)
    return list(prompts) if many else [prompts]


def ended_output(request_id, finish_reason, j=0, prompt=None, error=None):
    """The result of a request that ended without a step: refused, or aborted from elsewhere."""
    answer = CompletionOutput(j, "", [], finish_reason=finish_reason)
    return RequestOutput(request_id, prompt if isinstance(prompt, str) else None, [], [answer], True, error=error)


@contextlib.contextmanager
def _progress(total, wanted):
    """A line on stderr that counts finished requests, if it is wanted and somebody is looking."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)


def main(argv=None):
    """`python nano_serve.py …`; the options are EngineArgs', the rest is in command_line.py. Returns the exit code."""
    import command_line
    return command_line.main(argv)


if __name__ == "__main__":
    sys.exit(main())
