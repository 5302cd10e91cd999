"""Between a caller and the engine (chapter 3): prompts become requests, tokens become outputs.

Mirrors   vLLM: v1/engine/input_processor.py:38 InputProcessor, v1/engine/output_processor.py:429 OutputProcessor,
          vLLM: v1/engine/parallel_sampling.py:13 ParentRequest
Promises  what can't run is refused before anything of it is kept. A request gets its token in one place: its time, its
          text, its stop strings, its logprobs and its output; what that costs doesn't grow with the output's length.
Order     1 InputProcessor.  2 OutputProcessor.
"""
import dataclasses
import random
from dataclasses import dataclass
from numbers import Real

from request import (CompletionOutput, Logprob, Request, RequestMetrics, RequestOutput, RequestRefused, SamplingParams,
                     bad_words_token_ids, show, whole)
from sampling import prompt_logprobs
from text import DecodeStream, Detokenizer

CHAT_OPTIONS = "chat_template", "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"


# -- 1. Prompts become requests ---------------------------------------------------------------------------------------

@dataclass
class LiveRequest:
    """What the front end keeps of a request beside the scheduler's part."""
    request: Request
    prompt: str | None
    detokenizer: Detokenizer
    logprobs: list | None            # what is reported so far, if the request asked for it
    parent: str                      # the id that the caller gave: its own, but for one of n answers
    index: int                       # which of n answers
    prompt_stream: DecodeStream | None = None        # for the texts of prompt_logprobs


class InputProcessor:
    """Checks a prompt and its parameters against the model and the engine's limits, and makes requests of them."""

    def __init__(self, args, config, codec):
        self.args, self.config, self.codec, self.seeds = args, config, codec, random.Random(args.seed)
        # What ends a sequence: by config.json and generation_config.json, and the tokenizer's own EOS, as in vLLM.
        own = codec.eos_token_id
        self.eos_token_ids = config.eos_token_ids | ({own} if own is not None and own < config.vocab_size else set())

    def process(self, request_id, prompt, params, arrival_time, priority):
        """  →  the LiveRequests of one prompt, params.n of them. Raises RequestRefused (a ValueError)."""
        if not isinstance(params, (SamplingParams, type(None))):
            raise RequestRefused(f"sampling parameters must be a SamplingParams, got {show(params)}")
        # Checked once more: a field may have been set since. And the caller may set it later, so this is a copy.
        try:
            params = dataclasses.replace(params or SamplingParams())
        except (TypeError, ValueError) as error:
            raise RequestRefused(f"sampling parameters: {error}") from None
        text, token_ids, cache_salt = self.tokenize(prompt)
        self._check_ids("prompt token id", token_ids)
        banned = bad_words_token_ids(params.bad_words, lambda word: self.codec.encode(word, add_special_tokens=False))
        self._check_params(params, banned)
        for name, value in (("priority", priority), ("arrival_time", arrival_time)):
            if not isinstance(value, Real) or value != value:
                raise RequestRefused(f"{name} must be a number, got {show(value, 40)}")
        ids = [request_id] if params.n == 1 else [f"{j}_{request_id}" for j in range(params.n)]
        return [LiveRequest(Request(child, token_ids, self._params_of(params, j), arrival_time, priority,
                                    self.eos_token_ids, cache_salt, banned),
                            text, Detokenizer(self.codec, params, token_ids), None if params.logprobs is None else [],
                            request_id, j)
                for j, child in enumerate(ids)]

    def _params_of(self, params, j):
        """Answer j of n draws with seed + j (in 64 bits), so the first is what the prompt alone would get. Who brings no
        seed gets one, once: a preempted request must draw the same numbers again."""
        seed = self.seeds.getrandbits(62) if params.seed is None else (params.seed + j + 2 ** 63) % 2 ** 64 - 2 ** 63
        return dataclasses.replace(params, n=1, seed=seed)

    def tokenize(self, prompt):
        """A prompt in any of its forms  →  (text, or None if it came as ids; token ids; cache salt or None).

        A string, a list of token ids, or a dict: {"prompt": text}, {"prompt_token_ids": ids} or {"messages":
        conversation}, which the chat template makes a text of. Beside it may stand "cache_salt", a text: only requests
        with the same salt share KV blocks; beside messages also what `TextCodec.apply_chat_template` takes."""
        forms = {"prompt": (str,), "prompt_token_ids": (list, tuple), "messages": (list, tuple)}
        if not isinstance(prompt, dict):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        if "prompt_token_ids" in prompt:
            prompt = {**prompt, "prompt_token_ids": as_list_of_ids(prompt["prompt_token_ids"])}
        given = prompt.keys() & forms
        if len(given) != 1 or not isinstance(prompt[min(given)], forms[min(given)]):
            raise RequestRefused("a prompt is a text, a list of token ids, or a dict with just one of prompt (text), "
                                 f"prompt_token_ids, messages (lists), not {show(prompt)}")
        template = {k: v for k, v in prompt.items() if k in CHAT_OPTIONS} if "messages" in given else {}
        if unknown := prompt.keys() - given - template.keys() - {"cache_salt"}:
            raise RequestRefused(f"a prompt with {min(given)} has no {min(map(show, unknown))}")
        salt = prompt.get("cache_salt")
        if salt is not None and not (isinstance(salt, str) and salt):
            raise RequestRefused(f"cache_salt must be a text that is not empty, got {show(salt, 40)}")
        if "prompt_token_ids" in given:
            return None, prompt["prompt_token_ids"], salt
        if "prompt" in given:
            return prompt["prompt"], self.codec.encode(prompt["prompt"]), salt
        text = self.codec.apply_chat_template(prompt["messages"], **template)    # it writes BOS and all other special
        return text, self.codec.encode(text, add_special_tokens=False), salt     # tokens itself, so none is added

    def _check_ids(self, what, ids):
        for i in ids:
            if type(i) is not int or not 0 <= i < self.config.vocab_size:
                raise RequestRefused(f"{what} {show(i, 40)} is not in the vocabulary, 0 to "
                                     f"{self.config.vocab_size - 1}")

    def _check_params(self, params, banned):
        """What SamplingParams can't know: the vocabulary, and this engine's limits."""
        params.check_model(self.config.vocab_size, self.eos_token_ids, banned)
        for name, value, limit, why in (
                ("n", params.n, self.args.max_n, "--max-n"),
                ("the number of stop strings", len(params.stop), self.args.max_stop_strings, "--max-stop-strings"),
                ("the number of bad words", len(params.bad_words), self.args.max_stop_strings, "--max-stop-strings")):
            if value > limit:
                raise RequestRefused(f"{name} = {value} is more than {limit} ({why})")


def as_list_of_ids(ids):
    """Token ids as Python's integers, where they are others' (NumPy's, a tensor's); what is no list stays as it is."""
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(ids, (list, tuple)):
        return ids
    return [whole(i) for i in ids]


# -- 2. Tokens become outputs -----------------------------------------------------------------------------------------

class OutputProcessor:
    """The live requests, and the one place where each gets its token."""

    def __init__(self, codec, finish_request):
        """finish_request: Scheduler.finish_request, for a stop string: the scheduler sees ids, not text."""
        self.codec, self.finish_request = codec, finish_request
        self.live = {}                           # request id → LiveRequest
        self.children = {}                       # of a parent with n > 1: its id → ids of those that have not ended

    def add(self, live):
        self.live[live.request.request_id] = live
        self.children.setdefault(live.parent, []).append(live.request.request_id)

    def process(self, request_id, token_id, logprobs, error, now):
        """A request's token, which the scheduler has taken in already  →  its RequestOutput. token_id None: it has none
        and has failed, `error` says why. logprobs: [(id, logprob, rank)] or None; now: seconds on the engine's clock."""
        live = self.live[request_id]
        request, shown = live.request, live.detokenizer.shown
        if token_id is not None:
            request.token_times.append(now)
            by_token = request.finish_reason == "stop"       # ended by EOS or a stop id: that token's text is not shown
            show = not by_token or request.sampling_params.include_stop_str_in_output
            if logprobs is not None:                         # before append: the texts are what each would have added
                texts = live.detokenizer.token_texts([i for i, _, _ in logprobs], request.finish_reason is not None)
                live.logprobs.append({i: Logprob(v, rank, text) for (i, v, rank), text in zip(logprobs, texts)})
            stop = live.detokenizer.append(token_id, request.finish_reason is not None, show_token=show)
            if stop is not None:                             # on the last allowed token, too: then "stop", not "length"
                self.finish_request(request_id, "stop", stop)                            # no effect if it has ended
                request.finish_reason, request.stop_reason = "stop", stop
        return self.output_of(live, now, error, shown)

    def take_prompt_logprobs(self, output, logits):
        """logits [rows of prompts and ends, V]  →  those of the ends [S', V]. The others are reported and done with.
        vLLM: v1/worker/gpu_model_runner.py:5620 GPUModelRunner._get_prompt_logprobs_dict"""
        if all(r.prompt_logprobs is None for r in output.scheduled_requests):
            return logits
        ends, row = [], 0
        for r in output.scheduled_requests:
            if at := r.prompt_positions(output.num_scheduled_tokens[r.request_id]):
                token_ids = r.prompt_token_ids[at.start + 1:at.stop + 1]
                self.report_prompt(r, prompt_logprobs(logits[row:row + len(at)], token_ids,
                                                      r.sampling_params.prompt_logprobs))
                row += len(at)
            if r.num_computed_tokens == r.num_tokens:
                ends.append(row)
                row += 1
        return logits[ends]

    def report_prompt(self, request, logprobs):
        """The log-probabilities of some more of a prompt's tokens: for each [(id, logprob, rank)], itself first. Their
        texts are what each adds to the prompt before it."""
        live, wanted = self.live[request.request_id], request.sampling_params.detokenize
        if live.prompt_stream is None:
            live.prompt_stream = DecodeStream(self.codec, skip_special_tokens=False)
            live.prompt_stream.step(request.prompt_token_ids[0])
        for entry in logprobs:
            request.prompt_logprobs.append({
                i: Logprob(v, rank, live.prompt_stream.peek(i) if wanted else None) for i, v, rank in entry})
            live.prompt_stream.step(entry[0][0])

    def output_of(self, live, now, error=None, shown=None):
        """A request's state as a RequestOutput; if it has ended, it is forgotten here. shown: how much of its text the
        output before this one had."""
        request, text = live.request, live.detokenizer.text[:live.detokenizer.shown]
        delta = "" if shown is None else text[shown:]
        answer = CompletionOutput(live.index, text, request.output_token_ids, delta, live.logprobs,
                                  request.finish_reason, request.stop_reason)
        finished = False
        if request.finish_reason is not None:
            request.finish_time = now
            del self.live[request.request_id]
            self.children[live.parent].remove(request.request_id)
            if finished := not self.children[live.parent]:   # of n answers the last to end ends the request
                del self.children[live.parent]
        return RequestOutput(live.parent, live.prompt, request.prompt_token_ids, [answer], finished,
                             RequestMetrics(request), error, request.prompt_logprobs)

    def end_all(self, finish_reason, error, now):
        """End everybody who lives  →  their outputs, with what they have and why they get no more."""
        outputs, self.children = [], {}
        for live in self.live.values():          # anew: a step that broke off may have left them half done
            self.children.setdefault(live.parent, []).append(live.request.request_id)
        for live in list(self.live.values()):
            self.finish_request(live.request.request_id, finish_reason)
            live.request.finish_reason = live.request.finish_reason or finish_reason
            outputs.append(self.output_of(live, now, error))
        return outputs
