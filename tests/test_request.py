"""A request (request.py): what SamplingParams takes, refuses and makes of it; what of a prompt is reported, and when."""
import dataclasses
import math

import numpy as np
import pytest
import toys

from nano_serve import LLM
from request import FIELDS, Request, RequestRefused, SamplingParams, bad_words_token_ids

INF = math.inf
GOOD = {int: (1, np.int64(1), np.uint8(1)), float: (0.5, 1, np.float32(0.5), np.float64(0.5), np.int32(1)), bool: (True, False)}
BAD = {int: (True, np.bool_(True), 1.0, "1", [1], INF, math.nan), float: (True, "0.5", math.nan, INF, -INF, [0.5], 1j), bool: (0, 1, "true", [])}


def test_every_field_is_in_the_table_and_the_defaults_are_vllms():
    assert list(FIELDS) and set(FIELDS) == {f.name for f in dataclasses.fields(SamplingParams)}
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.seed, p.max_tokens, p.min_tokens) == (1, 1.0, 1.0, 0, 0.0, None, 16, 0)
    assert (p.stop, p.stop_token_ids, p.bad_words) == ([], [], []) and p.allowed_token_ids is p.logit_bias is p.prompt_logprobs is None
    assert p.detokenize is p.skip_special_tokens is True and p.include_stop_str_in_output is p.ignore_eos is False


@pytest.mark.parametrize("name", [name for name, (kind, *_) in FIELDS.items() if kind in (int, float, bool)])
def test_a_field_takes_its_type_and_its_range_and_nothing_else(name):
    kind, low, high, optional = FIELDS[name]
    for value in GOOD[kind]:
        got = getattr(SamplingParams(**{name: value}), name)
        assert type(got) is kind and got == value, "NumPy's numbers become Python's"
    bad = list(BAD[kind]) + ([] if optional else [None])
    if name == "prompt_logprobs":
        bad.remove(True)                         # vLLM reads it as 1
    if kind is not bool:
        bad += [low - 1] if low > -INF and low - 1 < low else []
        bad += [high + 1] if high < INF else []
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name} must be .*got"):
            SamplingParams(**{name: value})
    if optional:
        assert getattr(SamplingParams(**{name: None}), name) is None


@pytest.mark.parametrize("fields, says", [
    (dict(top_p=0), "top_p must be a number above 0 to 1, got 0"), (dict(repetition_penalty=0.0), "above 0, got 0.0"),
    (dict(stop=""), "stop.*not empty"), (dict(stop=["a", ""]), "stop.*not empty"), (dict(stop=[b"a"]), "stop.*string"), (dict(stop=5), "stop must be a list"),
    (dict(stop_token_ids=[1.0]), "stop_token_ids.*whole number"), (dict(stop_token_ids=[-1]), "from 0"), (dict(stop_token_ids=[True]), "whole"),
    (dict(stop_token_ids=7), "stop_token_ids must be a list"), (dict(bad_words="cat"), "bad_words must be a list"), (dict(bad_words=[" "]), "bad_words.*not empty"),
    (dict(allowed_token_ids=[]), "allowed_token_ids is empty"), (dict(allowed_token_ids=["1"]), "allowed_token_ids.*whole"),
    (dict(logit_bias=[1]), "logit_bias must be a dict"), (dict(logit_bias={-1: 1.0}), "logit_bias.*from 0"), (dict(logit_bias={"x": 1.0}), "'x'"),
    (dict(logit_bias={1: math.nan}), r"logit_bias\[1\].*nan"), (dict(logit_bias={1: "2"}), "number"), (dict(logit_bias={1: True}), "number"),
    (dict(min_tokens=5, max_tokens=4), "min_tokens 5 is above max_tokens 4"), (dict(stop="a", detokenize=False), "detokenize=False")])
def test_what_makes_no_sense_is_refused_by_its_name(fields, says):
    with pytest.raises(ValueError, match=says):
        SamplingParams(**fields)


def test_a_field_that_is_not_there_is_named_among_those_that_are():
    with pytest.raises(TypeError, match="no field 'top_q'; it has .*top_p"):
        SamplingParams(top_q=1)


def test_lists_and_biases_are_made_pythons_and_the_callers_stay_the_callers():
    stops, bias = [np.int64(3)], {"7": 500, np.int64(3): -INF, 4: np.float32(0.5), 5: -100.5}
    p = SamplingParams(stop="x", stop_token_ids=stops, logit_bias=bias, allowed_token_ids=(3, 4), prompt_logprobs=True)
    assert p.stop == ["x"] and p.logit_bias == {7: 100.0, 3: -100.0, 4: 0.5, 5: -100.0} and p.allowed_token_ids == [3, 4] and p.prompt_logprobs == 1
    assert all(type(i) is int and type(v) is float for i, v in p.logit_bias.items()) and type(p.stop_token_ids[0]) is int
    copy = p.clone()
    copy.stop_token_ids.append(9)
    assert p.stop_token_ids == [3] and copy == dataclasses.replace(p, stop_token_ids=[3, 9]) and stops == [3]


def test_from_optional_takes_none_for_the_default_where_none_means_nothing():
    assert SamplingParams.from_optional(n=None, temperature=None, top_p=None, stop=None, max_tokens=None) == SamplingParams(max_tokens=None)
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams.from_optional(top_q=None)


def test_bad_words_are_banned_with_and_without_a_space_before_them():
    """vLLM's rule: the spaced form counts if it begins with another token and is as long."""
    ids = {"cat": [1], " cat": [2], "dog": [3], " dog": [9, 3], "ab": [4, 5], " ab": [4, 6], "xy": [7, 8], " xy": [6, 8]}
    assert bad_words_token_ids(["cat", " cat", "dog", "ab", "xy"], ids.__getitem__) == [[1], [2], [1], [2], [3], [4, 5], [7, 8], [6, 8]]
    assert bad_words_token_ids([], None) == []


@pytest.mark.parametrize("fields, eos, banned, says", [
    (dict(stop_token_ids=[4]), [], [], "stop_token_ids: id 4 is not in the vocabulary, 0 to 3"), (dict(allowed_token_ids=[0, 4]), [], [], "allowed_token_ids: id 4"),
    (dict(logit_bias={4: 1.0}), [], [], "logit_bias: id 4"), (dict(logprobs=5), [], [], "logprobs = 5.*vocabulary, 4"),
    (dict(prompt_logprobs=5), [], [], "prompt_logprobs = 5"), (dict(allowed_token_ids=[1, 2]), [], [[1], [2]], "bad_words leave no token"),
    (dict(), [], [[0], [1], [2], [3]], "no token"), (dict(allowed_token_ids=[1], min_tokens=1), [1], [], "min_tokens = 1 holds back every"),
    (dict(stop_token_ids=[0, 1, 2, 3], min_tokens=2), [], [], "min_tokens = 2 holds back every"),
    (dict(stop_token_ids=[0, 1], min_tokens=1, allowed_token_ids=[0, 1, 2, 3]), [2], [[3]], "holds back every")])
def test_what_the_settings_make_impossible_is_refused(fields, eos, banned, says):
    with pytest.raises(RequestRefused, match=says):
        SamplingParams(**fields).check_model(4, eos, banned)


def test_what_leaves_one_token_is_possible():
    SamplingParams(stop_token_ids=[0, 1, 2], min_tokens=1, logprobs=4, logit_bias={3: 1.0}).check_model(4)
    SamplingParams(allowed_token_ids=[1], min_tokens=1, ignore_eos=True).check_model(4, [1])
    SamplingParams(allowed_token_ids=[1]).check_model(4, [], [[0, 1], [2]])
    SamplingParams(logprobs=4, prompt_logprobs=-1).check_model(4)


def test_which_positions_of_a_prompt_are_reported():
    r = Request("r", [7, 8, 9, 7, 8], SamplingParams(prompt_logprobs=0))
    assert r.skip_reading_prefix_cache and not Request("r", [7], SamplingParams()).skip_reading_prefix_cache
    seen = []
    for n in (3, 1, 1):
        r.num_computed_tokens += n
        seen += r.prompt_positions(n)
        r.prompt_logprobs += [{}] * len(r.prompt_positions(n))
    assert seen == [0, 1, 2, 3] and len(r.prompt_logprobs) == 5
    r.num_computed_tokens = 5                    # recomputed after a preemption
    assert not r.prompt_positions(5)
    r.append_output_token_id(1)
    r.num_computed_tokens = 6
    assert not r.prompt_positions(1)


# -- Through the engine ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 14}, {"max_num_batched_tokens": 3, "max_num_seqs": 3}], ids=["plain", "preempted", "chunked"])
def test_prompt_logprobs_are_those_of_transformers(options):
    """Beside neighbours that ask for none, in chunks, recomputed after a preemption, and although the prefix is cached."""
    folder, prompts = toys.toy("gqa"), toys.prompts_of(4, seed=13, low=8, high=11)
    prompts[3] = prompts[0] + [5]
    wanted = (2, None, 0, -1)
    engine = toys.make_engine(folder, **options)
    for _ in range(2):                           # the second time everything is cached
        outputs = toys.run(engine, [(p, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=14, prompt_logprobs=n)) for p, n in zip(prompts, wanted)])
        for prompt, n, output in zip(prompts, wanted, outputs):
            assert toys.ids_of([output]) == toys.hf_greedy(folder, [prompt], 14)
            if n is None:
                assert output.prompt_logprobs is None
                continue
            assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
            assert output.num_cached_tokens == 0
            rows = toys.hf_logits(folder, prompt).log_softmax(-1)            # [n, V]
            for row, token_id, entry in zip(rows, prompt[1:], output.prompt_logprobs[1:]):
                best = row.topk(len(row) if n == -1 else n).indices.tolist()
                assert list(entry) == [token_id, *(i for i in best if i != token_id)]
                for i, lp in entry.items():
                    assert lp.logprob == pytest.approx(row[i].item(), abs=1e-4) and lp.rank == (row > row[i]).sum() + 1
    if "num_kv_blocks" in options:
        assert any(o.metrics.num_preemptions for o in outputs)


def test_bans_biases_and_no_text_through_the_engine():
    """65 leads to 66, then 67, 68: a letter each, A to D."""
    folder = toys.table_checkpoint({65: {66: 9.0, 70: 5.0, 71: 1.0}, 66: {67: 9.0, 72: 5.0}, 70: 71, 67: 68, 72: 73})
    with LLM(str(folder), num_kv_blocks=50) as llm:
        ask = lambda prompt=(65,), **fields: llm.generate([list(prompt)], SamplingParams(temperature=0.0, max_tokens=2, **fields))[0]
        ids = lambda **fields: ask(**fields).outputs[0].token_ids
        assert ids() == [66, 67] and ids(bad_words=["B"]) == [70, 71] and ids(bad_words=["BC"]) == [66, 72]
        assert ids(allowed_token_ids=[70, 71]) == [70, 71] and ids(logit_bias={70: 4.5}) == [70, 71] and ids(logit_bias={70: 3.5}) == [66, 67]
        quiet = ask(detokenize=False, logprobs=1).outputs[0]
        assert quiet.text == "" and quiet.token_ids == [66, 67] and quiet.logprobs[0][66].decoded_token is None
        assert ask(logprobs=259).outputs[0].logprobs[0].keys() == set(range(259))
        with pytest.warns(UserWarning):
            assert "bad_words leave no token" in ask(allowed_token_ids=[66], bad_words=["B"]).error
        with pytest.warns(UserWarning):
            assert "repetition_penalty=1e-40" in ask((66, 65), repetition_penalty=1e-40).error
        assert ids() == [66, 67]
