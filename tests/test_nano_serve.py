"""The engine's front door: LLM, streaming, chat, bad input."""
import json
import os
import re
import sys
import time
import types
import warnings

import pytest
import torch
import toys
from conftest import ROOT

from nano_serve import EMBEDDED_MODEL, LLM, RequestRefused, SamplingParams

ALPHABET = toys.chain(list(b"abcdefghijklmnopqrstuvwxyz"))
GREEDY = dict(temperature=0.0)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{% if m.role == 'judge' %}{{ raise_exception('no judges') }}{% endif %}" \
           "{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ '' }}{% endif %}"
HARMLESS = dict(num_kv_blocks=200, block_size=4, check_invariants=True)


def ask(llm, prompts, **params):
    return llm.generate(prompts, SamplingParams(**{**GREEDY, **params}))


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def llm():
    """Says the rest of the alphabet after a letter, ends after z, has a chat template, and takes 64 tokens."""
    folder = toys.table_checkpoint({**ALPHABET, ord("z"): toys.EOS}, eos=toys.EOS, chat_template=TEMPLATE, max_position_embeddings=64)
    with LLM(str(folder), **HARMLESS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    yield
    if "llm" in request.fixturenames:
        toys.check_drained(request.getfixturevalue("llm").engine)


# -- LLM.generate --------------------------------------------------------------------------------------------------------

def test_a_script_written_for_vllm_runs():
    """The offline example of vLLM's documentation but for the import and the model."""
    prompts = ["Hello, my name is", "The capital of France is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=EMBEDDED_MODEL, max_model_len=256, enable_prefix_caching=True, tensor_parallel_size=1, seed=1)
    outputs = llm.generate(prompts, sampling_params, use_tqdm=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt and output.finished
        answer = output.outputs[0]
        assert answer.text and answer.finish_reason in ("length", "stop") and 0 < len(answer.token_ids) <= 16
        assert answer.text == llm.engine.codec.decode(answer.token_ids) and output.prompt_token_ids == llm.engine.codec.encode(prompt)
    answer = llm.chat([{"role": "user", "content": "What is TTFT?"}], SamplingParams(temperature=0.0, max_tokens=30))
    assert "first token" in answer[0].outputs[0].text
    llm.close()


@pytest.mark.parametrize("prompt", ["a", [97], (97,), {"prompt": "a"}, {"prompt_token_ids": [97]}, {"prompt_token_ids": (97,)},
                                    {"messages": [{"role": "user", "content": "a"}]}], ids=str)
def test_a_prompt_in_each_of_its_forms(llm, prompt):
    for prompts in (prompt, [prompt], (prompt,), [prompt] * 3):
        outputs = ask(llm, prompts, max_tokens=4)
        assert texts(outputs) == ["bcde"] * (3 if len(prompts) == 3 and isinstance(prompts, list) else 1)
        ids = outputs[0].prompt_token_ids
        assert ids in ([97], [toys.BOS, 97]) and outputs[0].prompt == ("a" if len(ids) == 2 and "messages" not in prompt else
                                                                       "<|bos|>a" if len(ids) == 2 else None)


def test_parameters_one_for_all_or_one_each(llm):
    assert [len(t) for t in texts(llm.generate(["a"] * 3, [SamplingParams(max_tokens=n, **GREEDY) for n in (1, 2, 3)]))] == [1, 2, 3]
    assert texts(llm.generate("a", [SamplingParams(max_tokens=2, **GREEDY)])) == ["bc"]
    assert len(llm.generate([[97]])[0].outputs[0].token_ids) == 16, "without any: vLLM's defaults"
    assert llm.generate([]) == [] and llm.generate([], []) == []
    for n in (0, 1, 3):
        with pytest.raises(ValueError, match=f"2 prompts, but {n}"):
            llm.generate(["a", "b"], [SamplingParams()] * n)


def test_several_answers_to_one_prompt(llm):
    (one,) = llm.generate("\0", SamplingParams(n=3, seed=5, max_tokens=6))
    assert [answer.index for answer in one.outputs] == [0, 1, 2] and one.finished
    alone = [llm.generate("\0", SamplingParams(seed=5 + j, max_tokens=6))[0].outputs[0].token_ids for j in range(3)]
    assert [answer.token_ids for answer in one.outputs] == alone and alone[0] != alone[1] != alone[2]
    (unseeded,) = llm.generate("\0", SamplingParams(n=2, max_tokens=6))
    assert unseeded.outputs[0].token_ids != unseeded.outputs[1].token_ids
    several = llm.generate(["a", "f"], SamplingParams(n=2, max_tokens=3, **GREEDY))
    assert [[a.text for a in output.outputs] for output in several] == [["bcd"] * 2, ["ghi"] * 2]
    (edge,) = llm.generate("\0", SamplingParams(n=2, seed=2 ** 63 - 1, max_tokens=3))
    assert len(edge.outputs) == 2 and all(a.finish_reason == "length" for a in edge.outputs)


def test_more_prompts_than_the_waiting_queue_takes():
    """generate() hands them over as there is room; the engine itself refuses."""
    folder = toys.table_checkpoint(ALPHABET)
    with LLM(str(folder), max_num_seqs=2, max_num_waiting=2, **HARMLESS) as llm:
        with pytest.warns(UserWarning, match="empty"):
            outputs = llm.generate([[97 + i] for i in range(10)] + [[]], SamplingParams(max_tokens=3, n=2, **GREEDY))
        assert texts(outputs[:10]) == ["".join(chr(98 + i + j) for j in range(3)) for i in range(10)] and outputs[10].error
        assert max(record.waiting for record in llm.engine.records) <= 2
        for i in range(2):
            llm.engine.add_request(f"x{i}", [97])
        with pytest.raises(RequestRefused, match="--max-num-waiting"):
            llm.engine.add_request("x2", [97])
        assert texts(ask(llm, ["a"], max_tokens=2)) == ["bc"], "generate waits for room that others take"
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        toys.check_drained(llm.engine)


def test_two_engines_in_one_process_do_not_meet(llm):
    with LLM(str(toys.table_checkpoint({97: 120, 120: 121, 121: 122})), **HARMLESS) as other:
        first, second = llm.stream(["a"], SamplingParams(max_tokens=5, **GREEDY)), other.stream(["a"], SamplingParams(max_tokens=3, **GREEDY))
        taken = [next(first), next(second), next(first), next(second), *first, *second]
    assert [o.outputs[0].text for _, o in taken if o.finished] == ["bcdef", "xyz"]


# -- LLM.stream ----------------------------------------------------------------------------------------------------------

def collect(llm, prompts, params):
    """What a stream shows: per (prompt, answer) the joined deltas and the last output."""
    joined, last = {}, {}
    for index, output in llm.stream(prompts, params):
        (answer,), key = output.outputs, (index, output.outputs[0].index)
        assert key not in last or not last[key].finished, "something came after the end"
        joined[key] = joined.get(key, "") + answer.delta
        assert joined[key] == answer.text and (answer.finish_reason is not None) == output.finished
        last[key] = output
    return joined, last


def test_a_stream_tells_what_generate_tells():
    """On the embedded model, chunks, preemptions and all: deltas joined are the text, and the text is the decode of the ids."""
    prompts = ["Tell me a story about an owl.", "What is a KV cache?", "ďábel 世界 👩‍👩‍👧", "Once upon a time"]
    params = [SamplingParams(temperature=1.5, seed=i, max_tokens=60, ignore_eos=True, stop=["the e"], n=1 + i % 2) for i in range(4)]
    with LLM(max_num_batched_tokens=24, max_num_seqs=8, block_size=4, num_kv_blocks=60, check_invariants=True) as llm:
        joined, last = collect(llm, prompts, params)
        assert any(record.preempted for record in llm.engine.records)
        toys.check_drained(llm.engine)
    with LLM() as llm:
        for i, output in enumerate(llm.generate(prompts, params)):
            for answer in output.outputs:
                streamed = last[i, answer.index].outputs[0]
                assert (answer.text, answer.token_ids, answer.finish_reason) == (streamed.text, streamed.token_ids, streamed.finish_reason)
                assert joined[i, answer.index] == llm.engine.codec.decode(answer.token_ids).split("the e")[0]


def test_a_stream_of_one_prompt_is_one_stream(llm):
    assert collect(llm, "wx", SamplingParams(**GREEDY))[0] == {(0, 0): "yz"}
    assert collect(llm, [119, 120], SamplingParams(**GREEDY))[0] == {(0, 0): "yz"}


def test_leaving_a_stream_early_aborts_what_is_unfinished(llm):
    for count, _ in enumerate(llm.stream(["a", "b", "c"], SamplingParams(max_tokens=20, **GREEDY))):
        if count == 4:
            break
    toys.check_drained(llm.engine)
    assert not llm.engine.has_unfinished_requests() and not llm.engine.outputs.live
    stream = llm.stream(["a"], SamplingParams(max_tokens=20, **GREEDY))
    next(stream)
    stream.close()
    llm.stream(["never started"]).close()
    assert texts(ask(llm, "a", max_tokens=3)) == ["bcd"]


def test_abort_in_mid_stream_and_ids_again(llm):
    engine = llm.engine
    engine.add_request("x", [97], SamplingParams(max_tokens=20, **GREEDY))
    engine.add_request("y", [98], SamplingParams(max_tokens=2, **GREEDY))
    with pytest.raises(RequestRefused, match="already in use"):
        engine.add_request("x", [97])
    engine.step()
    engine.abort_request("x")
    engine.abort_request("x")
    engine.abort_request("unknown")
    (output,) = engine.step()
    assert output.request_id == "y" and output.outputs[0].text == "cd"
    engine.add_request("x", [97], SamplingParams(max_tokens=1, **GREEDY))
    assert engine.step()[0].outputs[0].text == "b"


# -- How an answer ends --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("params, text, ids, finish_reason, stop_reason", [
    (dict(max_tokens=3), "wxy", "wxy", "length", None), (dict(max_tokens=5), "wxyz", "wxyz\0", "stop", None),
    (dict(max_tokens=None), "wxyz", "wxyz\0", "stop", None), (dict(ignore_eos=True, max_tokens=5), "wxyz", "wxyz\0", "length", None),
    (dict(ignore_eos=True, max_tokens=5, skip_special_tokens=False), "wxyz<|eos|>", "wxyz\0", "length", None),
    (dict(stop="y"), "wx", "wxy", "stop", "y"), (dict(stop=["yz", "xy"]), "w", "wxy", "stop", "xy"),
    (dict(stop="xy", include_stop_str_in_output=True), "wxy", "wxy", "stop", "xy"),
    (dict(stop=["zz", "z!"]), "wxyz", "wxyz\0", "stop", None), (dict(stop="z!", max_tokens=4), "wxyz", "wxyz", "length", None),
    (dict(stop="xy", max_tokens=3), "w", "wxy", "stop", "xy"), (dict(stop="w", min_tokens=2), "wxyz", "wxyz\0", "stop", None),
    (dict(stop_token_ids=[121]), "wx", "wxy", "stop", 121), (dict(stop_token_ids=[121], max_tokens=3), "wx", "wxy", "stop", 121),
    (dict(stop_token_ids=[121], stop="x"), "w", "wx", "stop", "x"), (dict(stop="vw"), "wxyz", "wxyz\0", "stop", None),
    (dict(stop="<|eos|>", ignore_eos=True, skip_special_tokens=False, max_tokens=9), "wxyz", "wxyz\0", "stop", "<|eos|>"),
], ids=str)
def test_how_an_answer_ends(llm, params, text, ids, finish_reason, stop_reason):
    """The answer to "v" is w x y z and the EOS token, in a stream as in one piece, for each of two answers."""
    params = SamplingParams(**GREEDY, n=2, **params)
    ids = [toys.EOS if c == "\0" else ord(c) for c in ids]
    (output,) = llm.generate("v", params)
    for answer in output.outputs:
        assert (answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason) == (text, ids, finish_reason, stop_reason)
    before = len(llm.engine.records)
    joined, last = collect(llm, ["v"], params)
    assert set(joined.values()) == {text} and len(joined) == 2
    parts = [part for record in llm.engine.records[before:] for part in record.requests]
    recorded = {part.request_id: "".join(p.text for p in parts if p.request_id == part.request_id) for part in parts}
    assert list(recorded.values()) == [text] * 2
    assert {o.outputs[0].finish_reason for o in last.values()} == {finish_reason}
    assert sorted(llm.engine.records[-1].finished) == sorted(f"{j}_{o.request_id}" for (_, j), o in last.items())


@pytest.mark.parametrize("length, n, finish_reason", [(13, 3, "length"), (14, 2, "length"), (15, 1, "length"), (16, 0, "error"), (17, 0, "error")])
def test_the_length_limit(length, n, finish_reason):
    with LLM(str(toys.table_checkpoint(ALPHABET)), max_model_len=16, **HARMLESS) as llm, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        long, short = llm.generate([[98] * (length - 1) + [97], [97]], SamplingParams(max_tokens=10, **GREEDY))
        assert (len(long.outputs[0].token_ids), long.outputs[0].finish_reason) == (n, finish_reason)
        assert short.outputs[0].text == "bcdefghijk"
        assert long.error is None or ("--max-model-len" in long.error and "16" in long.error and str(length) in long.error)
        (endless,) = llm.generate([[97]], SamplingParams(max_tokens=None, **GREEDY))
        assert len(endless.outputs[0].token_ids) == 15 and endless.outputs[0].finish_reason == "length"


def test_the_pool_is_a_limit_too():
    """Seven blocks of four slots: a prompt of 28 can't grow by one token; one of 27 grows by one and ends."""
    with LLM(str(toys.table_checkpoint(ALPHABET)), max_model_len=64, num_kv_blocks=8, block_size=4, check_invariants=True) as llm:
        with pytest.warns(UserWarning, match="--num-kv-blocks"):
            outputs = llm.generate([[97] * 28, [97] * 40, [97] * 27, [97]], SamplingParams(max_tokens=40, **GREEDY))
        assert [o.outputs[0].finish_reason for o in outputs] == ["error", "error", "length", "length"]
        assert [len(o.outputs[0].token_ids) for o in outputs] == [0, 0, 1, 27]
        toys.check_drained(llm.engine)


@pytest.mark.parametrize("max_tokens, text", [(1, "\ufffd"), (2, "\ufffd"), (3, "\ufffd"), (4, "👩"), (5, "👩\ufffd"), (None, "👩世!")])
def test_a_limit_in_the_middle_of_a_character(max_tokens, text):
    """The tokens of a character are chained by way of one-byte tokens: whatever the limit leaves of it is one U+FFFD at the end."""
    data = "👩世!".encode()
    folder = toys.table_checkpoint({**toys.chain([97, *data]), ord("!"): toys.EOS}, eos=toys.EOS)
    with LLM(str(folder), **HARMLESS) as llm:
        params = SamplingParams(max_tokens=max_tokens, **GREEDY)
        (output,) = llm.generate("a", params)
        joined, last = collect(llm, ["a"], params)
        assert output.outputs[0].text == joined[0, 0] == text and json.loads(json.dumps(joined[0, 0])) == text
        assert output.outputs[0].finish_reason == last[0, 0].outputs[0].finish_reason == ("length" if max_tokens else "stop")


def test_times_on_the_engines_clock():
    ticks = iter(range(1000))
    engine = toys.make_engine(toys.table_checkpoint(ALPHABET), clock=lambda: float(next(ticks)), max_num_batched_tokens=4, max_num_seqs=2)
    outputs = toys.run(engine, [([97] * 6, SamplingParams(max_tokens=3, **GREEDY)), ([98], SamplingParams(max_tokens=1, **GREEDY))])
    m = outputs[0].metrics
    starts = [record.time for record in engine.records]
    assert m.arrival_time == 0.0 and m.first_scheduled_time == starts[0] and len(m.token_times) == 3
    assert starts[1] < m.first_token_time < starts[2], "six tokens at four a step: the first token comes from the second"
    assert m.ttft == m.token_times[0] and m.queue_time == starts[0] and m.e2e == m.finish_time == m.token_times[-1]
    assert m.itls == [b - a for a, b in zip(m.token_times, m.token_times[1:])] and len(m.itls) == 2
    assert m.tpot == sum(m.itls) / 2
    single = outputs[1].metrics
    assert single.tpot is None and single.itls == [] and single.ttft is not None


# -- Chat ------------------------------------------------------------------------------------------------------------------

def test_chat_takes_one_conversation_or_several(llm):
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}, {"role": "user", "content": "e"}]
    params = SamplingParams(max_tokens=3, **GREEDY)
    (output,) = llm.chat(talk, params)
    assert output.prompt_token_ids == [toys.BOS, *b"abcde"] and output.outputs[0].text == "fgh" and output.prompt == "<|bos|>abcde"
    assert output.prompt_token_ids == llm.engine.inputs.tokenize({"messages": talk})[1]
    assert texts(llm.chat([talk, talk[:1]], params)) == ["fgh", "cde"]
    with pytest.warns(UserWarning, match="no judges"):
        outputs = llm.chat([talk, [{"role": "judge", "content": "x"}], talk[:1]], params)
    assert texts(outputs) == ["fgh", "", "cde"] and outputs[1].outputs[0].finish_reason == "error" and "no judges" in outputs[1].error


def test_a_model_without_a_template_refuses_chats_and_nothing_else():
    with LLM(str(toys.table_checkpoint(ALPHABET)), **HARMLESS) as llm:
        with pytest.warns(UserWarning, match="no chat template"):
            (output,) = llm.chat([{"role": "user", "content": "a"}])
        assert output.outputs[0].finish_reason == "error" and texts(ask(llm, "a", max_tokens=2)) == ["bc"]


def test_the_embedded_models_chat_has_one_bos():
    with LLM() as llm:
        (output,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=8, **GREEDY))
        bos = llm.engine.codec.tokenizer.token_to_id("<|begin_of_text|>")
        assert output.prompt_token_ids.count(bos) == 1 and output.prompt_token_ids[0] == bos
        assert ask(llm, "hi", max_tokens=1)[0].prompt_token_ids.count(bos) == 1


# -- Bad input -------------------------------------------------------------------------------------------------------------

BAD_PROMPTS = {
    "empty list": ([[]], "empty"), "-1": ([[-1]], "-1"), "V": ([[97, 259]], "259.*0 to 258"), "2**63": ([[2 ** 63]], "9223372036854775808"),
    "True": ([[97, True]], "True"), "text for id": ([["a"]], "'a'"), "1.0": ([[97, 1.0]], "1.0"), "None for id": ([[None]], "None"),
    "None": ([None], "a prompt is"), "number": ([5], "a prompt is"), "bytes": ([b"a"], "a prompt is"), "no form": ([{}], "a prompt is"),
    "other key": ([{"text": "a"}], "a prompt is"), "two forms": ([{"prompt": "a", "prompt_token_ids": [97]}], "a prompt is"),
    "text for ids": ([{"prompt_token_ids": "a"}], "a prompt is"), "number for ids": ([{"prompt_token_ids": 97}], "a prompt is"),
    "ids for text": ([{"prompt": [97]}], "a prompt is"), "surrogate": (["\ud83d"], "tokenized"), "no messages": ([{"messages": []}], "messages"),
    "at the limit": ([[97] * 64], "64.*--max-model-len"), "beyond": ([[97] * 100_000], "100000.*--max-model-len"),
    "bool first": ([[True, 97]], "True"), "nested": ([[[97]]], "97"),
}


@pytest.mark.parametrize("bad, message", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_prompt_that_cannot_run_costs_only_itself(llm, bad, message):
    with pytest.warns(UserWarning, match=message):
        outputs = llm.generate(["a", *bad, [121]], SamplingParams(max_tokens=3, **GREEDY))
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "stop"]
    assert texts(outputs) == ["bcd", "", "z"] and outputs[1].finished and outputs[1].outputs[0].token_ids == []
    assert re.search(message, outputs[1].error) and outputs[1].metrics is None and outputs[1].num_cached_tokens == 0
    with pytest.raises(RequestRefused, match=message):
        llm.engine.add_request("bad", bad[0], SamplingParams())
    assert not llm.engine.outputs.live


@pytest.mark.parametrize("params, message", [(dict(stop_token_ids=[259]), "stop_token_ids.*259"), (dict(stop_token_ids=[2 ** 63]), "stop_token_ids"),
                                             (dict(logprobs=260), "logprobs.*260.*259")], ids=str)
def test_parameters_that_do_not_fit_the_model_cost_only_their_request(llm, params, message):
    with pytest.warns(UserWarning, match=message):
        outputs = llm.generate(["a", "a"], [SamplingParams(max_tokens=2, **GREEDY), SamplingParams(**params)])
    assert texts(outputs) == ["bc", ""] and outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].prompt == "a" and outputs[1].error
    assert ask(llm, "a", stop_token_ids=[258], logprobs=259, max_tokens=1)[0].error is None


@pytest.mark.parametrize("name, values", [
    ("temperature", (-0.1, float("nan"), float("inf"), "1", None, True)), ("top_p", (0.0, -0.5, 1.1, float("nan"))),
    ("top_k", (-2, 1.5, float("nan"), "3", True)), ("min_p", (-0.1, 1.1, float("nan"))), ("max_tokens", (0, -1, 1.5, "5", float("nan"), True)),
    ("min_tokens", (-1, 1.5, None)), ("repetition_penalty", (0.0, -1.0, float("nan"), float("inf"))), ("presence_penalty", (-2.1, 2.1, float("nan"))),
    ("frequency_penalty", (-2.1, 2.1, float("nan"))), ("n", (0, -1, 1.5, None)), ("logprobs", (-1, 1.5, True)), ("seed", (1.5, "x", 2 ** 63)),
    ("stop", ("", ["x", ""], 5, [5])), ("stop_token_ids", ([-1], [1.5], ["a"], 5, [True]))])
def test_sampling_values_are_refused_by_name(name, values):
    for value in values:
        if (name, value) == ("stop", ""):
            continue
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


def test_an_empty_stop_string_is_refused():
    """It would be found everywhere, and end each answer before its first character."""
    for stop in ("", [""], ["x", ""]):
        with pytest.raises(ValueError, match="stop"):
            SamplingParams(stop=stop)


@pytest.mark.parametrize("options, message", [
    (dict(dtype="int8"), "--dtype"), (dict(device="xyz"), "--device"), (dict(block_size=0), "--block-size"), (dict(num_kv_blocks=0), "--num-kv-blocks"),
    (dict(num_kv_blocks=1), "--num-kv-blocks"), (dict(kv_cache_memory=10), "--kv-cache-memory"), (dict(kv_cache_memory=-1), "--kv-cache-memory"),
    (dict(max_model_len=0), "--max-model-len"), (dict(max_model_len=5000), "5000.*4096"), (dict(max_num_seqs=0), "--max-num-seqs"),
    (dict(max_num_batched_tokens=0), "--max-num-batched-tokens"), (dict(max_num_seqs=8, max_num_batched_tokens=4), "--max-num-seqs"),
    (dict(max_num_waiting=0), "--max-num-waiting"), (dict(scheduling_policy="lifo"), "--scheduling-policy"), (dict(attention_backend="x"), "--attention-backend"),
    (dict(tensor_parallel_size=3), "possible: 1, 2, 4, 8"), (dict(tensor_parallel_size=0), "--tensor-parallel-size"),
    (dict(gpu_memory_utilization=7.0), "--gpu-memory-utilization"), (dict(enable_chunked_prefill=False), "--no-enable-chunked-prefill"),
    (dict(model=str(ROOT / "README.md")), "README.md is no folder"), (dict(model=str(ROOT / "tests")), "no config.json"), (dict(model="./nothing"), "nothing"),
], ids=str)
def test_options_that_cannot_work_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        LLM(**options)


# What a deliberate attempt to break it found.

def test_a_step_that_breaks_off_leaves_nothing_to_be_found():
    """Its blocks were published before it ran; here they hold NaN. The prompt again must not hit them."""
    prompt, greedy = "Once upon a time, there was a little fox who lived in the forest", SamplingParams(temperature=0, max_tokens=12)
    with LLM(check_invariants=True, num_kv_blocks=200, block_size=4) as llm:          # the prompt fills some blocks
        manager, executor = llm.engine.scheduler.kv_cache_manager, llm.engine.executor
        want = llm.generate(prompt, greedy)[0].outputs[0].token_ids
        manager.reset_prefix_cache()
        execute = executor.execute

        def interrupted(batch):
            executor.kv_cache.fill_(float("nan"))
            raise KeyboardInterrupt
        executor.execute = interrupted
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt, greedy)
        executor.execute = execute
        assert not llm.engine.has_unfinished_requests() and manager.num_free_blocks == manager.num_usable_blocks
        assert llm.generate(prompt, greedy)[0].outputs[0].token_ids == want


def test_one_call_at_a_time():
    """A second call, in this thread or another, is refused and says what serves many; the first loses nothing by it."""
    import threading
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(num_kv_blocks=200) as llm:
        (want,) = llm.generate("Once upon a time", greedy)
        got, refused = None, []

        def second():
            try:
                llm.generate("The little dog", greedy)
            except RuntimeError as error:
                refused.append(str(error))
        for _, output in llm.stream("Once upon a time", greedy):
            got = output
            second()
            thread = threading.Thread(target=second)
            thread.start()
            thread.join(timeout=60)
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert len(refused) == 24 and all("one call at a time" in r and "async_engine" in r for r in refused)
        assert llm.generate("Once upon a time", greedy)[0].outputs[0].text == want.outputs[0].text


@pytest.mark.parametrize("cycle", [False, True])
def test_a_dropped_stream_aborts_its_requests(cycle):
    """Also one that only the garbage collector finds, in the middle of a step that somebody else runs on the engine."""
    import gc
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(num_kv_blocks=200, check_invariants=True) as llm:
        stream = llm.stream(["Once upon a time", "The little dog"], greedy)
        next(stream)
        llm.engine.add_request("other", "There was", greedy)
        if cycle:
            ring = [stream]
            ring.append(ring)
            schedule, del_ring = llm.engine.scheduler.schedule, [ring]
            gc.disable()

            def plan_and_collect():
                output = schedule()
                del_ring.clear()
                gc.collect()
                return output
            llm.engine.scheduler.schedule = plan_and_collect
            del ring, stream
        else:
            del stream
        steps = []
        while llm.engine.has_unfinished_requests():
            steps += llm.engine.step()
            gc.enable()
            assert not llm.engine.is_alive("0") and not llm.engine.is_alive("1")
        assert [len(o.outputs[0].token_ids) for o in steps if o.request_id == "other"] == [1, 2, 3, 4, 5, 6]
        toys.check_drained(llm.engine)
        assert llm.generate("Once", greedy)[0].outputs[0].finish_reason == "length"


def test_what_a_failing_step_leaves_comes_back():
    """Text already generated is not thrown away: each request comes back with what it has and the reason, those that are
    behind in the queue too, and the engine serves on."""
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with LLM(num_kv_blocks=200, check_invariants=True) as llm:
        want = llm.generate("Once upon a time", greedy)[0].outputs[0].token_ids
        execute, calls = llm.engine.executor.execute, []

        def fail_at_the_fifth(batch):
            calls.append(batch)
            if len(calls) == 5:
                raise RuntimeError("the fifth went wrong")
            return execute(batch)
        llm.engine.executor.execute = fail_at_the_fifth
        with pytest.warns(UserWarning, match="fifth went wrong"):
            outputs = llm.generate(["Once upon a time", "The little dog"], greedy)
        for output in outputs:
            assert output.finished and output.outputs[0].finish_reason == "error" and "fifth went wrong" in output.error
            assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].text and output.metrics.finish_time
        assert outputs[0].outputs[0].token_ids == want[:4]
        assert llm.generate("Once upon a time", greedy)[0].outputs[0].token_ids == want
        toys.check_drained(llm.engine)


def test_closing_between_the_steps_of_a_call():
    """The call ends with what it has, "abort" and the reason."""
    llm, seen = LLM(num_kv_blocks=200), None
    for index, output in llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)):
        seen = output
        if len(output.outputs[0].token_ids) == 3 and not output.finished:
            llm.close()
    assert seen.outputs[0].finish_reason == "abort" and len(seen.outputs[0].token_ids) == 3 and "closed" in seen.error


def test_n_answers_of_the_engine():
    """add_request with n: the outputs come back under one id, told apart by their index; one abort ends all."""
    from nano_serve import EngineArgs, LLMEngine
    params = SamplingParams(n=3, temperature=20.0, seed=5, max_tokens=4, ignore_eos=True)
    engine = LLMEngine.from_engine_args(EngineArgs(num_kv_blocks=200, check_invariants=True, max_num_waiting=4))
    engine.add_request("a", "Once upon a time", params)
    with pytest.raises(RequestRefused, match="already in use"):
        engine.add_request("a", "Once", params)
    with pytest.raises(RequestRefused, match="max-num-waiting"):
        engine.add_request("b", "Once", params)                  # room for one of three: none is kept
    assert not engine.is_alive("b")
    last, ends = {}, []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id == "a"
            last[output.outputs[0].index] = output.outputs[0].token_ids
            ends.append(output.finished)
    assert ends == [False] * 11 + [True] and not engine.is_alive("a")
    with LLM(num_kv_blocks=200) as llm:
        (one,) = llm.generate("Once upon a time", params)
    assert [o.token_ids for o in one.outputs] == [last[0], last[1], last[2]] and len(set(map(tuple, last.values()))) == 3
    engine.add_request("c", "Once", params)
    engine.step()
    engine.abort_request("c")
    assert not engine.has_unfinished_requests()
    toys.check_drained(engine)
    engine.close()


def test_records_are_bounded_and_numbers_go_on():
    with LLM(num_kv_blocks=200, max_records=5) as llm:
        llm.generate("Once", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        assert [r.step for r in llm.engine.records] == [7, 8, 9, 10, 11]
        assert [r.step for r in llm.engine.records_since(9)] == [9, 10, 11] and len(llm.engine.records_since(0)) == 5


def test_unknown_keys_of_a_prompt_are_named_and_a_salt_keeps_tenants_apart():
    greedy = SamplingParams(temperature=0, max_tokens=2)
    with LLM(num_kv_blocks=200, block_size=4) as llm:
        ids = list(range(100, 120))
        cached = lambda **salt: llm.generate({"prompt_token_ids": ids, **salt}, greedy)[0].num_cached_tokens
        assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 16, 0, 16, 0]
        for bad in ({"prompt": "x", "cache_slat": "a"}, {"prompt": "x", "cache_salt": ""}, {"prompt": "x", "chat_template": "y"}):
            with pytest.warns(UserWarning, match="cache_slat|cache_salt|chat_template"):
                assert llm.generate(bad, greedy)[0].outputs[0].finish_reason == "error"


def test_numbers_of_others_and_one_message():
    numpy = pytest.importorskip("numpy")
    greedy = SamplingParams(temperature=0, max_tokens=3)
    with LLM(num_kv_blocks=200, block_size=numpy.int64(4)) as llm:
        ids = list(range(100, 110))
        want = llm.generate(ids, greedy)[0].outputs[0].token_ids
        for same in (numpy.array(ids), torch.tensor(ids), [numpy.int32(i) for i in ids], {"prompt_token_ids": numpy.array(ids)}):
            assert llm.generate(same, greedy)[0].outputs[0].token_ids == want
        message = {"role": "user", "content": "What is a KV cache?"}
        assert llm.chat(message, greedy)[0].outputs[0].token_ids == llm.chat([message], greedy)[0].outputs[0].token_ids


@pytest.mark.parametrize("name, value", [("long_prefill_token_threshold", 2.5), ("max_num_seqs", True), ("enable_prefix_caching", 1),
                                         ("scheduling_policy", "lifo"), ("seed", "0"), ("gpu_memory_utilization", float("nan")),
                                         ("max_records", 0), ("device", None)])
def test_every_option_has_one_type_and_range(name, value):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be"):
        LLM(**{name: value})


def test_a_request_aborted_by_somebody_else_ends_its_stream():
    with LLM(num_kv_blocks=200) as llm:
        ends = {}
        for index, output in llm.stream(["Once", "The little"], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)):
            if index == 1 and not output.finished:
                llm.engine.abort_request(output.request_id)
            if output.finished:
                ends[index] = output.outputs[0].finish_reason
        assert ends == {0: "length", 1: "abort"}


def test_a_closed_engine_says_so():
    llm = LLM(num_kv_blocks=50)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")


@pytest.mark.parametrize("options, message", [
    (dict(threads=100000), "--threads must be a whole number from 1 to"), (dict(kv_cache_memory=1 << 60), "GiB of this machine"),
    (dict(num_kv_blocks=10 ** 9), "GiB of this machine"), (dict(block_size=16.0), "whole number"), (dict(tensor_parallel_size="2"), "whole number")], ids=str)
def test_sizes_beyond_the_machine_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LLM(**options)


def test_tiny_top_p_keeps_the_likeliest():
    with LLM(num_kv_blocks=50) as llm:
        tiny, greedy = (llm.generate("hi", SamplingParams(max_tokens=4, **how))[0].outputs[0].token_ids
                        for how in (dict(temperature=1.0, top_p=1e-300), dict(temperature=0.0)))
    assert tiny == greedy


def test_lower_priority_numbers_go_first():
    with LLM(num_kv_blocks=100, max_num_seqs=1, scheduling_policy="priority") as llm:
        order = [i for i, o in llm.stream(["a", "b", "c"], SamplingParams(max_tokens=2, ignore_eos=True), [5, 9, 1]) if o.finished]
    assert order == [2, 0, 1]


def test_an_engine_has_its_own_number_of_threads():
    """And the process has its own again between the steps, for other engines."""
    seen, threads = [], torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with LLM(threads=1) as one, LLM(threads=2) as two, LLM() as small:
            assert torch.get_num_threads() == 2
            for llm in (one, two, small):
                execute = llm.engine.executor.execute
                llm.engine.executor.execute = lambda batch, execute=execute: seen.append(torch.get_num_threads()) or execute(batch)
                llm.generate(["a"], SamplingParams(max_tokens=1))
                assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert seen == [1, 2, 1]                                 # the embedded model is small


def test_a_close_leaves_no_live_request_and_a_small_pool_bounds_the_length():
    with LLM(num_kv_blocks=4, block_size=16) as llm:
        assert llm.engine.scheduler.max_model_len == 48
        llm.engine.add_request("a", "Once", SamplingParams(max_tokens=40, ignore_eos=True))
        llm.engine.step()
        llm.close()
        assert not llm.engine.outputs.live and not llm.engine.scheduler.requests and not llm.engine.outputs.children


def test_blocks_of_a_request_that_failed_are_found_by_nobody():
    """A NaN in the weights for a while: once it is gone the same prompt is computed anew, and its neighbour's blocks still hit."""
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    bad, good = {"prompt_token_ids": [*range(100, 110), 77]}, {"prompt_token_ids": list(range(200, 211))}
    with LLM(num_kv_blocks=200, block_size=4, attention_backend="cpu", check_invariants=True) as llm:     # whose head is packed
        want = [o.outputs[0].token_ids for o in llm.generate([bad, good], greedy)]
        llm.reset_prefix_cache()
        row = llm.engine.executor.model.embed_tokens.weight[100]
        kept = row.clone()
        row.fill_(float("nan"))
        with pytest.warns(UserWarning, match="not finite"):
            outputs = llm.generate([bad, good], greedy)
        assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length"]
        row.copy_(kept)
        outputs = llm.generate([bad, good], greedy)
        assert [o.outputs[0].token_ids for o in outputs] == want and [o.num_cached_tokens for o in outputs] == [0, 8]


def test_a_printed_result_shows_its_figures(llm):
    (output,) = llm.generate("v", SamplingParams(**GREEDY, max_tokens=3))
    shown = repr(output)
    assert " at 0x" not in shown and "text='wxy'" in shown and "ttft=0." in shown and "num_cached_tokens=" in shown


def test_defaults_come_from_generation_config(tmp_path):
    import shutil
    shutil.copytree(EMBEDDED_MODEL, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({**config, "temperature": 0, "max_new_tokens": 5, "top_k": 7}))
    with LLM(tmp_path / "m", num_kv_blocks=100) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.max_tokens, params.top_k, params.top_p) == (0, 5, 7, 1.0)
        params.max_tokens = 4                                    # the caller's copy
        first, second = llm.generate("Once upon a time"), llm.generate("Once upon a time", params)
        assert len(first[0].outputs[0].token_ids) == 5 and first[0].outputs[0].token_ids[:4] == second[0].outputs[0].token_ids
        params.max_tokens = "many"
        with pytest.warns(UserWarning, match="max_tokens"):
            assert llm.generate("Once", params)[0].error


def test_texts_of_logprobs_add_up():
    """The chosen tokens' texts joined are the text, and those of a prompt's tokens the prompt, spaces and all."""
    with LLM(num_kv_blocks=200, max_num_batched_tokens=8) as llm:
        (output,) = llm.generate("Once upon a time, 世界 there", SamplingParams(temperature=0, max_tokens=20, logprobs=3, prompt_logprobs=2))
        answer = output.outputs[0]
        chosen = [entry[i] for i, entry in zip(answer.token_ids, answer.logprobs)]
        assert "".join(lp.decoded_token for lp in chosen).startswith(answer.text) and all(lp.rank == 1 for lp in chosen)
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
        texts = [entry[i].decoded_token for i, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])]
        assert "".join(texts) == "Once upon a time, 世界 there"


def test_text_of_an_aborted_request_is_not_thrown_away():
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(num_kv_blocks=200) as llm:
        seen = []
        for index, output in llm.stream(["Once upon a time", "The little dog"], greedy):
            seen.append((index, output))
            if index == 0 and len(output.outputs[0].token_ids) == 4 and not output.finished:
                outputs = llm.engine.abort_request(output.request_id)
                assert [len(o.outputs[0].token_ids) for o in outputs] == [4]
        last = {index: output for index, output in seen}
        assert last[0].finished and last[0].outputs[0].finish_reason == "abort" and len(last[0].outputs[0].token_ids) == 4
        assert last[0].outputs[0].text and len(last[1].outputs[0].token_ids) == 30
        assert "".join(o.outputs[0].delta for i, o in seen if i == 0) == last[0].outputs[0].text


def test_answers_and_stop_strings_of_a_request_are_bounded_by_options():
    """Each costs everybody's steps, so a server has a limit, and who needs more can raise it."""
    few = dict(max_tokens=1, ignore_eos=True)
    with LLM(num_kv_blocks=50, max_n=2, max_stop_strings=3) as llm:
        for params, option in ((SamplingParams(n=3, **few), "--max-n"), (SamplingParams(stop=list("abcd"), **few), "--max-stop-strings")):
            with pytest.warns(UserWarning, match=option):
                assert option in llm.generate("x", params)[0].error
        assert len(llm.generate("x", SamplingParams(n=2, stop=list("abc"), **few))[0].outputs) == 2
    with LLM(num_kv_blocks=50) as llm, pytest.warns(UserWarning, match="--max-n"):
        assert llm.generate("x", SamplingParams(n=16384, **few))[0].error
