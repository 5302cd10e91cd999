"""What a request is (chapter 3): what it knows so far, how its tokens are chosen, when things happened to it.

Mirrors   vLLM: v1/request.py:59 Request, v1/metrics/stats.py:218 RequestStateStats; sampling_params.py
Promises  a value that makes no sense is refused when it is given, by its name and with its limits. Plain Python: no
          tensor, no clock.
Leaves out LoRA, multimodal input, structured output, pooling.
Order     1 Request: one sequence on its way.  2 SamplingParams: what its sender asks for.
          3 RequestMetrics: its times.  4 RequestOutput: what comes back.
"""
from __future__ import annotations

import copy
import enum
import math
import sys
from dataclasses import dataclass
from numbers import Integral, Real
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
    first. prompt_logprobs: what is known of the prompt's tokens so far, if it was asked for; the first entry is None,
    since nothing predicts that token. Times are seconds of the engine's clock. vLLM: v1/request.py:59 Request
    """

    def __init__(self, request_id: str, prompt_token_ids: Iterable[int], sampling_params: SamplingParams,
                 arrival_time: float = 0.0, priority: int = 0, eos_token_ids: Iterable[int] = frozenset(),
                 cache_salt: str | None = None, bad_words_token_ids: Iterable[list[int]] = ()):
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
        self.bad_words_token_ids = list(bad_words_token_ids)             # see the function of that name
        self.prompt_logprobs: list | None = None if sampling_params.prompt_logprobs is None else [None]
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

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether every token must be computed: one that is found in the cache has K and V, but no logits to report.
        vLLM: v1/request.py:291 Request.get_skip_reading_prefix_cache"""
        return self.prompt_logprobs is not None or bool(self.sampling_params.skip_reading_prefix_cache)

    def prompt_positions(self, num_scheduled_tokens: int) -> range:
        """Of the tokens that a step has just computed, those whose logits predict a prompt token that is to be reported
        and isn't yet: a preempted request computes its prompt again. Example, 5 prompt tokens in chunks of 3: the
        logits of 0 1 2 predict tokens 1 2 3, that of 3 token 4; 4 predicts the first of the output."""
        if self.prompt_logprobs is None:
            return range(0)
        end = self.num_computed_tokens
        start = max(end - num_scheduled_tokens, len(self.prompt_logprobs) - 1)
        return range(start, min(end, self.num_prompt_tokens - 1))

    def append_output_token_id(self, token_id: int) -> None:
        """vLLM: v1/request.py:249 Request.append_output_token_ids"""
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens} computed)"


class RequestRefused(ValueError):
    """This request can never run, or not now; nothing is kept of it, and no other request is touched."""


# -- 2. What its sender asks for --------------------------------------------------------------------------------------

# Every field's type and range, once: (kind, lowest, highest, may be None). A kind in brackets is a list of such;
# of strings, the characters that alone make none: a bad word of spaces only is none.
# vLLM: sampling_params.py:515 SamplingParams._verify_args
ABOVE = math.ulp(0.0)    # the smallest number above 0, so that "above 0" is a lowest like the others
NO_END = math.inf
FIELDS = {
    "n": (int, 1, 16384, False),
    "temperature": (float, 0, NO_END, False), "top_p": (float, ABOVE, 1, False), "min_p": (float, 0, 1, False),
    "top_k": (int, -1, NO_END, False), "seed": (int, -2 ** 63, 2 ** 63 - 1, True),
    "repetition_penalty": (float, ABOVE, NO_END, False),
    "presence_penalty": (float, -2, 2, False), "frequency_penalty": (float, -2, 2, False),
    "max_tokens": (int, 1, NO_END, True), "min_tokens": (int, 0, NO_END, False),
    "stop": ([str], "", None, False), "stop_token_ids": ([int], 0, NO_END, False), "ignore_eos": (bool, 0, 1, False),
    "logprobs": (int, 0, NO_END, True), "prompt_logprobs": (int, -1, NO_END, True),
    "logit_bias": (dict, -100, 100, True), "bad_words": ([str], " ", None, False),
    "allowed_token_ids": ([int], 0, NO_END, True),
    "detokenize": (bool, 0, 1, False), "include_stop_str_in_output": (bool, 0, 1, False),
    "skip_special_tokens": (bool, 0, 1, False), "skip_reading_prefix_cache": (bool, 0, 1, True),
}


@dataclass
class SamplingParams:
    """How to choose a request's tokens and when to stop; names and defaults are vLLM's.

    temperature 0 is greedy; top_k 0 (or -1) and top_p 1.0 keep every token. `stop` is one string or several;
    `stop_token_ids` end the request: the id is kept, its text is not shown; `ignore_eos` lets it run past the model's
    own end; max_tokens None means until --max-model-len. logprobs and prompt_logprobs: how many of the likeliest to
    report beside each token (of the prompt's -1: all). logit_bias {id: number} is added to the logits, each cut to
    -100 … 100; `bad_words` never come, nor what isn't in `allowed_token_ids`; detokenize False leaves the text empty.

    Raises ValueError naming the field, its value and its limits, TypeError for a field that isn't here; numbers of
    NumPy become Python's. Only the model isn't known here: see `check_model`.
    Example: SamplingParams(stop="\n", logit_bias={"7": 500})  →  stop ["\n"], logit_bias {7: 100.0}.
    vLLM: sampling_params.py:199 SamplingParams (there also structured output, logprob_token_ids, output kinds)
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
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_reading_prefix_cache: bool | None = None

    def __new__(cls, *values, **fields):
        if unknown := fields.keys() - FIELDS.keys():
            raise TypeError(f"SamplingParams has no field {min(unknown)!r}; it has {', '.join(FIELDS)}")
        return super().__new__(cls)

    def __post_init__(self):
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                setattr(self, name, [])
        if self.prompt_logprobs is True:         # as vLLM reads it
            self.prompt_logprobs = 1
        for name, (kind, low, high, optional) in FIELDS.items():
            value = getattr(self, name)
            if value is not None or not optional:
                setattr(self, name, _checked(name, kind, value, low, high))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {show(self.min_tokens)} is above max_tokens {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are looked for in the text, which detokenize=False leaves out; "
                             "stop_token_ids work without")
        if self.allowed_token_ids == []:
            raise ValueError("allowed_token_ids is empty: no token could ever come; None allows all")

    @classmethod
    def from_optional(cls, **fields):
        """As the class itself, but None stands for the default, except where None is a value (max_tokens).
        vLLM: sampling_params.py:361 SamplingParams.from_optional"""
        return cls(**{name: v for name, v in fields.items() if v is not None or name not in FIELDS or FIELDS[name][3]})

    def clone(self):
        """A copy that shares no list. vLLM: sampling_params.py:748 SamplingParams.clone"""
        return copy.deepcopy(self)

    def check_model(self, vocab_size, eos_token_ids=frozenset(), bad_words_token_ids=()):
        """What only the model's vocabulary can tell: ids that aren't in it, and settings that leave no token to choose.
        Raises RequestRefused. vLLM: sampling_params.py:755 SamplingParams.verify"""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for i in getattr(self, name) or ():
                if i >= vocab_size:
                    raise RequestRefused(f"{name}: id {show(i, 40)} is not in the vocabulary, 0 to {vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if (wanted := getattr(self, name) or 0) > vocab_size:
                raise RequestRefused(f"{name} = {show(wanted, 40)} is more than the vocabulary, {vocab_size}")
        possible = set(range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids)
        possible -= {ids[0] for ids in bad_words_token_ids if len(ids) == 1}
        if not possible:
            raise RequestRefused("allowed_token_ids and bad_words leave no token that could come")
        if self.min_tokens and not possible - set(self.stop_token_ids) - set(() if self.ignore_eos else eos_token_ids):
            raise RequestRefused(f"min_tokens = {show(self.min_tokens, 40)} holds back every stop token and end of "
                                 "sequence, and stop_token_ids, allowed_token_ids and bad_words leave no other token")


def _checked(name, kind, value, low, high):
    """One field's value as Python has it (a NumPy int as int), or ValueError with its limits."""
    refuse = lambda what: ValueError(f"{name} must be {what}, got {show(value)}")
    if kind is bool:
        if not isinstance(value, bool):          # "false" would count as true
            raise refuse("true or false")
        return value
    if kind is dict:
        if not isinstance(value, dict):
            raise refuse("a dict of token ids and numbers")
        key = lambda i: int(i) if isinstance(i, str) and i.isascii() and i.isdigit() else i      # JSON's keys are text
        cut = lambda v: min(100.0, max(-100.0, v)) if isinstance(v, Real) and v == v else v      # infinities, too
        return {_checked(f"{name}: a token id", int, key(i), 0, NO_END):
                _checked(f"{name}[{show(i)}]", float, cut(v), low, high) for i, v in value.items()}
    if isinstance(kind, list):
        if not isinstance(value, (list, tuple)):
            raise refuse("a list")
        return [_checked(f"{name}: each", kind[0], v, low, high) for v in value]
    if kind is str:
        if not isinstance(value, str) or not value.strip(low):
            raise refuse("a string, and not empty")
        return value
    good = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if not good or not low <= value <= high or abs(value) == math.inf:           # NaN fails the comparison
        limits = f"{'above 0' if low == ABOVE else f'from {low}'}{'' if high == math.inf else f' to {high}'}"
        raise refuse(f"a {'whole ' if kind is int else ''}number {limits}")
    try:
        return kind(value)
    except OverflowError:        # 10 ** 400 is a number, but no float
        return sys.float_info.max


def bad_words_token_ids(bad_words, encode):
    """The token sequences that must not be completed; encode: text → ids without special tokens.

    A word has other ids after a space than at the start of a text: both are meant, where the second is as long and
    begins otherwise. Example: "cat" → [[cat], [▁cat]]; where " cat" is [▁, cat], [[cat]] alone covers both.
    vLLM: sampling_params.py:676 SamplingParams.update_from_tokenizer"""
    sequences = []
    for word in bad_words:
        plain, spaced = list(encode(word.lstrip())), list(encode(" " + word.lstrip()))
        sequences.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
    return sequences


def whole(value):
    """Python's integer for another's (NumPy's, a tensor that is one number), else the value itself: an array, too, has
    __index__, whatever it holds."""
    if isinstance(value, (int, str, dict)) or getattr(value, "shape", ()):
        return value
    try:
        return value.__index__()
    except (AttributeError, TypeError):
        return value


def show(value, width=80):
    """What a message says of a value that is refused: its repr, cut. Of an integer of more than 4,300 digits Python
    writes none."""
    try:
        return repr(value)[:width]
    except Exception as error:
        return f"<{type(value).__name__}: {error}>"[:width]


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
                   doc="Arrival to end.")

    def __repr__(self):
        shown = ("queue_time", "ttft", "tpot", "e2e", "num_preemptions", "num_cached_tokens")
        return f"RequestMetrics({', '.join(f'{name}={getattr(self, name)}' for name in shown)})"


# -- 4. What comes back -----------------------------------------------------------------------------------------------

@dataclass
class Logprob:
    logprob: float                 # ln of the probability, by the logits before temperature, penalties and cuts
    rank: int                      # 1: the likeliest
    decoded_token: str | None


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


if __name__ == "__main__":       # the examples of Request, SamplingParams and RequestMetrics
    demo = Request("r", range(10), SamplingParams(stop="\n", logit_bias={"7": 500}, prompt_logprobs=0))
    for done, token_id in ((10, "a"), (11, "b")):
        demo.num_computed_tokens = done
        demo.append_output_token_id(token_id)
    print(demo, "known:", *demo.all_token_ids)
    print("stop", demo.sampling_params.stop, "  logit_bias", demo.sampling_params.logit_bias)
    demo.token_times, demo.finish_time = [0.20, 0.25, 0.35], 0.35
    times = RequestMetrics(demo)
    print(f"ttft {times.ttft}, itls {[round(t, 3) for t in times.itls]}, tpot {times.tpot:.3f}, e2e {times.e2e}")
    for wrong in ({"top_p": 1.5}, {"logprobs": True, "n": 0}, {"min_tokens": 17}):
        try:
            SamplingParams(**wrong)
        except ValueError as error:
            print("refused:", error)
