"""Random requests in company, with little memory and a small budget, against each of them alone: ids, text, log-probabilities."""
import random

import pytest
import toys

from nano_serve import EngineArgs, LLMEngine, SamplingParams

WORDS = "Once upon a time there was little girl who liked the red ball and big dog. She said hello , Lily Tom happy \n é 中文".split(" ")


def words(r, most):
    return " ".join(r.choice(WORDS) for _ in range(r.randint(1, most)))


def random_params(r):
    """Any field with any other."""
    most = r.randint(1, 20)
    p = {"max_tokens": most, "temperature": r.choice([0, 0, 0.7, 1.5]), "seed": r.randint(0, 10 ** 6)}
    if p["temperature"]:
        p |= {"top_p": r.choice([1, 0.9, 0.3]), "top_k": r.choice([0, -1, 5]), "min_p": r.choice([0, 0.05])}
    for name, values in {"logprobs": [0, 1, 5], "prompt_logprobs": [0, 1, 3], "min_tokens": range(most + 1), "ignore_eos": [True],
                         "n": [2, 3], "repetition_penalty": [1.2, 0.8], "presence_penalty": [1.0], "frequency_penalty": [0.5],
                         "bad_words": [["the", "she"]], "logit_bias": [{"263": 5}], "skip_special_tokens": [False],
                         "stop_token_ids": [[10, 200, 261]], "skip_reading_prefix_cache": [True]}.items():
        if r.random() < 0.25:
            p[name] = r.choice(values)
    if r.random() < 0.2:
        p["detokenize"] = False
    elif r.random() < 0.5:
        p |= {"stop": r.sample(["the", " and", ". ", "a", "ll"], 2), "include_stop_str_in_output": r.random() < 0.5}
    return SamplingParams(**p)


def play(engine, requests, r):
    """They come when they come  →  {(id, index): last RequestOutput}. What each step adds to a text makes the text."""
    engine.executor.kv_cache.fill_(float("nan"))
    last, joined, todo = {}, {}, list(requests.items())
    while todo or engine.has_unfinished_requests():
        while todo and (r.random() < 0.5 or not engine.has_unfinished_requests()):
            request_id, (prompt, params, priority) = todo.pop(0)
            engine.add_request(request_id, prompt, params, priority=priority)
        for output in engine.step():
            key = output.request_id, output.outputs[0].index
            last[key], joined[key] = output, joined.get(key, "") + output.outputs[0].delta
    assert joined == {key: output.outputs[0].text for key, output in last.items()}
    toys.check_drained(engine)
    return last


def same_logprobs(a, b):
    """Of ids that both report: of equals the other may have come first."""
    assert (a is None) == (b is None) and len(a or ()) == len(b or ())
    for x, y in zip(a or (), b or ()):
        assert (x is None) == (y is None)
        if x is not None:
            assert len(x) == len(y) and next(iter(x)) == next(iter(y))
            for i in x.keys() & y.keys():
                assert abs(x[i].logprob - y[i].logprob) < 2e-3 and x[i].decoded_token == y[i].decoded_token


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(i, marks=pytest.mark.slow) for i in range(6, 60))])
def test_in_company_as_alone(seed):
    r = random.Random(seed)
    heads, size, budget = [words(r, 30) for _ in range(3)], r.choice([1, 2, 3, 5, 7, 16]), r.choice([4, 8, 17, 64])
    requests = {f"r{i}": ({"prompt": f"{r.choice(heads)} {words(r, 12)}"} | ({"cache_salt": r.choice("ab")} if r.random() < 0.3 else {}),
                          random_params(r), r.randint(0, 2)) for i in range(r.randint(3, 9))}
    engine = LLMEngine(EngineArgs(
        block_size=size, num_kv_blocks=130 // size + r.randint(1, 60 // size + 1), max_num_batched_tokens=budget,
        max_num_seqs=r.randint(1, budget), enable_prefix_caching=r.random() < 0.8, scheduling_policy=r.choice(["fcfs", "priority"]),
        long_prefill_token_threshold=r.choice([0, 0, 3]), check_invariants=True))
    got = play(engine, requests, r)
    roomy = LLMEngine(EngineArgs(num_kv_blocks=300, enable_prefix_caching=False, attention_backend="torch",
                                 max_model_len=engine.scheduler.max_model_len))
    want = {}
    for request_id, request in requests.items():
        want |= play(roomy, {request_id: request}, r)
    assert got.keys() == want.keys()
    for key, b in want.items():
        a, x, y = got[key], got[key].outputs[0], b.outputs[0]
        assert (x.token_ids, x.text, x.finish_reason, x.stop_reason) == (y.token_ids, y.text, y.finish_reason, y.stop_reason)
        same_logprobs(x.logprobs, y.logprobs)
        same_logprobs(a.prompt_logprobs, b.prompt_logprobs)
