"""What a request is (chapter 3): what it knows so far, how its tokens are chosen, when things happened to it.

Mirrors   vLLM: v1/request.py:59 Request, v1/metrics/stats.py:218 RequestStateStats; sampling_params.py
Promises  a value that makes no sense is refused when it is given, by its name and with its limits. Plain Python: no
          tensor, no clock.
Leaves out LoRA, multimodal input, structured output, pooling.
Order     1 Request: one sequence on its way.  2 SamplingParams: what its sender asks for.
          3 RequestMetrics: its times.  4 RequestOutput: what comes back.
"""
from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Iterable


# -- 1. The request ---------------------------------------------------------------------------------------------------

class RequestStatus(enum.Enum):
    """Where a request is. vLLM: v1/request.py:348 RequestStatus (there the reason of the end is part of the status)"""
    WAITING = "waiting"      # not admitted yet
    RUNNING = "running"      # admitted: holds blocks, served every step the budget allows
    PREEMPTED = "preempted"  # waiting again, without blocks, with everything it has generated
    FINISHED = "finished"    # `finish_reason` says why


class Request:
    """One sequence on its way through the engine: what it knows, how much of that is computed, how it ended.

    Example, a prompt of ten tokens t0..t9 after its prefill and one decode: output_token_ids [a, b], all_token_ids
    t0..t9 a b, num_tokens 12, num_computed_tokens 11. b is sampled and appended, but its K/V are not written yet: the
    next step feeds b in and writes them. So between two steps num_computed_tokens < num_tokens, and a decode's gap is
    exactly 1.

    finish_reason: "stop", "length", "abort", "error", or None while alive; stop_reason: the token id or string of the
    stop. num_cached_tokens: prompt tokens the prefix cache saved at the first admission. The lowest `priority` goes
    first. Times are seconds of the engine's clock. vLLM: v1/request.py:59 Request
    """

    def __init__(self, request_id: str, prompt_token_ids: Iterable[int], sampling_params: SamplingParams,
                 arrival_time: float = 0.0, priority: int = 0, eos_token_ids: Iterable[int] = frozenset(),
                 cache_salt: str | None = None):
        self.request_id, self.sampling_params = request_id, sampling_params
        self.arrival_time, self.priority = arrival_time, priority
        self.cache_salt = cache_salt         # only requests with the same salt share blocks
        self.prompt_token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.all_token_ids = self.prompt_token_ids.copy()
        self.block_hashes: list[bytes] = []  # names of the full blocks, see kv_cache.hash_block_tokens
        self.num_computed_tokens = 0         # tokens whose K/V are in the cache, or will be after the running step
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.eos_token_ids = frozenset() if sampling_params.ignore_eos else frozenset(eos_token_ids)
        self.first_scheduled_time: float | None = None  # the scheduler has no clock: the engine sets these three
        self.token_times: list[float] = []
        self.finish_time: float | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.all_token_ids)

    def append_output_token_id(self, token_id: int) -> None:
        """vLLM: v1/request.py:249 Request.append_output_token_ids"""
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens} computed)"


class RequestRefused(ValueError):
    """This request can never run, or not now; nothing is kept of it, and no other request is touched."""


# -- 2. What its sender asks for --------------------------------------------------------------------------------------

@dataclass
class SamplingParams:
    """How to choose a request's tokens and when to stop; names and defaults are vLLM's.

    temperature 0 is greedy; top_k 0 (or -1) and top_p 1.0 keep every token. `stop` is one string or several;
    `stop_token_ids` end the request: the id is kept, its text is not shown; `ignore_eos` lets it run past the model's
    own end; max_tokens None means until --max-model-len. Raises ValueError naming the value and its limit; only the
    vocabulary isn't known here.
    vLLM: sampling_params.py SamplingParams (there also bad words, logit bias, structured output, prompt logprobs)
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self):
        self.stop = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        self.stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):  # "false" would count as true
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name, kind, low, high in (
                ("n", int, 1, 16384), ("top_k", int, -1, math.inf), ("min_tokens", int, 0, math.inf),
                ("max_tokens", int, 1, math.inf), ("logprobs", int, 0, math.inf), ("seed", int, -2**63, 2**63 - 1),
                ("temperature", float, 0, math.inf), ("top_p", float, 0, 1), ("min_p", float, 0, 1),
                ("repetition_penalty", float, 0, math.inf), ("presence_penalty", float, -2, 2),
                ("frequency_penalty", float, -2, 2)):
            value, above = getattr(self, name), name in ("top_p", "repetition_penalty")
            if value is None and name in ("max_tokens", "logprobs", "seed"):
                continue
            good = isinstance(value, (int, kind)) and not isinstance(value, bool) and low <= value <= high
            if not good or value == math.inf or (above and value == low):  # NaN has failed the comparison
                limits = f"{'above' if above else 'from'} {low}{'' if high == math.inf else f' to {high}'}"
                raise ValueError(f"{name} must be a {'whole ' if kind is int else ''}number {limits}, got {value!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if not isinstance(self.stop, (list, tuple)) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop must be a string or a list of strings, none empty, got {self.stop!r}")
        ids = self.stop_token_ids
        if not isinstance(ids, (list, tuple)) or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"stop_token_ids must be a list of whole numbers from 0, got {ids!r}")


# -- 3. Its times -----------------------------------------------------------------------------------------------------

class RequestMetrics:
    """One request's times, in seconds on the engine's clock; None where the moment hasn't come. Durations as
    `vllm bench serve` has them.

    Example: arrival 0, tokens at 0.20, 0.25, 0.35  →  ttft 0.20, itls [0.05, 0.10], tpot 0.075, e2e 0.35.
    vLLM: v1/metrics/stats.py:218 RequestStateStats
    """

    def __init__(self, request):
        self.arrival_time, self.first_scheduled_time = request.arrival_time, request.first_scheduled_time
        # What a step costs may not grow with what was generated before it. So not the list is copied, but the number of
        # its entries: the request only ever appends to it.
        self._times, self._count, self.finish_time = request.token_times, len(request.token_times), request.finish_time
        self.num_preemptions, self.num_cached_tokens = request.num_preemptions, request.num_cached_tokens

    token_times = property(lambda m: m._times[:m._count], doc="When each output token came.")
    first_token_time = property(lambda m: m._times[0] if m._count else None)
    queue_time = property(lambda m: None if m.first_scheduled_time is None else m.first_scheduled_time - m.arrival_time,
                          doc="From arrival to the first step that computes some of it.")
    ttft = property(lambda m: m._times[0] - m.arrival_time if m._count else None,
                    doc="Time to first token: arrival to first token, queueing and prefill included.")
    itls = property(lambda m: [b - a for a, b in zip(m.token_times, m.token_times[1:])],
                    doc="Inter-token latencies: every gap between one token and the next; n tokens have n - 1.")
    tpot = property(lambda m: (m._times[m._count - 1] - m._times[0]) / (m._count - 1) if m._count > 1 else None,
                    doc="Time per output token: the mean gap after the first token; None for a single token.")
    e2e = property(lambda m: None if m.finish_time is None else m.finish_time - m.arrival_time,
                   doc="Arrival to last token.")

    def __repr__(self):
        shown = ("queue_time", "ttft", "tpot", "e2e", "num_preemptions", "num_cached_tokens")
        return f"RequestMetrics({', '.join(f'{name}={getattr(self, name)}' for name in shown)})"


# -- 4. What comes back -----------------------------------------------------------------------------------------------

@dataclass
class Logprob:
    logprob: float                 # ln of the probability, by the logits before temperature, penalties and cuts
    rank: int                      # 1: the likeliest
    decoded_token: str


class CompletionOutput:
    """One answer. `text` and `token_ids` are all so far, `delta` what this step added to the text; token_ids includes
    the token that ended it; logprobs: for each token {id: Logprob}, or None. finish_reason: None while it runs, then
    stop, length, abort or error. vLLM: vllm/outputs.py:22 CompletionOutput"""

    def __init__(self, index, text, token_ids, delta="", logprobs=None, finish_reason=None, stop_reason=None):
        """token_ids and logprobs may grow after this: an output keeps to what they hold now, without a copy."""
        self.index, self.text, self.delta = index, text, delta
        self._token_ids, self._logprobs, self._count = token_ids, logprobs, len(token_ids)
        self.finish_reason, self.stop_reason = finish_reason, stop_reason

    token_ids = property(lambda self: self._token_ids[:self._count])
    logprobs = property(lambda self: None if self._logprobs is None else self._logprobs[:self._count])

    @property
    def cumulative_logprob(self):
        return None if self._logprobs is None else sum(lp[t].logprob for t, lp in zip(self.token_ids, self.logprobs))

    def __repr__(self):
        shown = ("index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason")
        return f"CompletionOutput({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


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
    prompt_logprobs: list | None = None

    num_cached_tokens = property(lambda self: self.metrics.num_cached_tokens if self.metrics else 0)

    @classmethod
    def ended(cls, request_id, finish_reason, index=0, prompt=None, error=None):
        """The result of a request that ended without a step: refused, or aborted from elsewhere."""
        answer = CompletionOutput(index, "", [], finish_reason=finish_reason)
        return cls(request_id, prompt if isinstance(prompt, str) else None, [], [answer], True, error=error)
