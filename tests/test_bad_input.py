"""Values that callers really pass: NumPy's and PyTorch's, of the wrong type, too long to print. Each costs its request alone."""
import json
import pathlib
import shutil
import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import toys
import torch

from nano_serve import EMBEDDED_MODEL, LLM, EngineArgs, LLMEngine, SamplingParams

HUGE = 10 ** 5000            # Python writes no integer of more than 4,300 digits
NO_NAME = lambda value: value if isinstance(value, str) else type(value).__name__       # pytest would print it
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM(num_kv_blocks=100, check_invariants=True) as llm:
        yield llm
        toys.check_drained(llm.engine)


def ends(llm, prompts, params=GREEDY, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [(o.outputs[0].finish_reason, o.error or "") for o in llm.generate(prompts, params, **more)]


@pytest.mark.parametrize("ids", [
    [np.array([5, 6]), np.array([7])], [torch.tensor([5, 6]), torch.tensor([7])], torch.tensor([[5, 6], [7, 8]]),
    [[np.int64(5)], [torch.tensor(6), 7]], [{"prompt_token_ids": np.array([5, 6])}, "text"]])
def test_lists_of_arrays_are_several_prompts(llm, ids):
    assert ends(llm, ids) == [("length", "")] * 2


@pytest.mark.parametrize("prompt", [
    [HUGE], [-HUGE], [[1]], [1.0], [True], [torch.tensor(1.5)], [np.array([1, 2]), 3], {"prompt_token_ids": np.array([[1, 2]])},
    {"prompt": "a", HUGE: 1}, {"prompt": "a", "cache_salt": HUGE}, {"prompt": HUGE}, {"messages": HUGE}, None, b"abc"], ids=NO_NAME)
def test_a_prompt_of_the_wrong_type_costs_only_itself(llm, prompt):
    (bad, why), good = ends(llm, [prompt, "Once upon a time"])
    assert bad == "error" and why and not why.startswith("Exceeds") and good == ("length", "")


@pytest.mark.parametrize("params, name", [
    ({"n": 1}, "SamplingParams"), ({}, "SamplingParams"), (0, "SamplingParams"), (EngineArgs(), "SamplingParams"),
    (("n", "3"), "n must be"), (("n", None), "n must be"), (("stop", 5), "stop must be"),
    (("min_tokens", HUGE), "min_tokens")], ids=NO_NAME)
def test_parameters_of_the_wrong_type_cost_only_their_request(params, name):
    if isinstance(params, tuple):                # a field that was set later
        (field, value), params = params, SamplingParams(max_tokens=2)
        setattr(params, field, value)
    with LLM(num_kv_blocks=100, max_num_waiting=2) as llm:       # the queue's length is compared with n
        (bad, why), good = ends(llm, ["a", "b"], [params, GREEDY])
    assert bad == "error" and name in why and good == ("length", "")


@pytest.mark.parametrize("name, value", [
    ("n", HUGE), ("stop_token_ids", [-HUGE]), ("min_tokens", HUGE), ("logit_bias", {-HUGE: 1}), ("stop", [HUGE]),
    ("temperature", Decimal("0.5")), ("temperature", torch.tensor(0.5)), ("top_p", float("nan")), ("detokenize", np.False_),
    ("n", "1")], ids=NO_NAME)
def test_a_value_that_cannot_be_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_numbers_of_all_kinds():
    p = SamplingParams(temperature=Fraction(1, 2), top_p=np.float32(0.5), top_k=np.uint8(3), logit_bias={np.int64(1): np.float32(3)})
    assert (p.temperature, p.top_p, p.top_k, p.logit_bias) == (0.5, 0.5, 3, {1: 3.0})
    assert type(p.top_k) is int and type(p.temperature) is type(p.top_p) is float


def test_priorities_are_numbers_of_any_kind(llm):
    got = ends(llm, list("abcdef"), priority=[np.int64(3), np.float32(3), Fraction(1, 3), HUGE, None, float("nan")])
    assert [reason for reason, _ in got] == ["length"] * 4 + ["error"] * 2


@pytest.mark.parametrize("messages", [None, "hi", HUGE, [[]], [None]], ids=NO_NAME)
def test_what_is_no_conversation_is_refused_once(llm, messages):
    with pytest.warns(UserWarning, match="messages"):
        (output,) = llm.chat(messages)
    assert output.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("value", [np.array([1, 2]), torch.tensor([1, 2]), HUGE, -HUGE, torch.tensor(1.5), "16", [16], float("nan")],
                         ids=NO_NAME)
def test_an_option_of_the_wrong_type_is_refused_by_name(value):
    with pytest.raises(ValueError, match="--gpu-memory-utilization"):
        EngineArgs(gpu_memory_utilization=value)
    if value is not HUGE:
        with pytest.raises(ValueError, match="--block-size"):
            EngineArgs(block_size=value)


def test_the_id_of_a_request_is_a_text():
    """By priority, ids of two types would stop the whole queue: they are compared."""
    engine = LLMEngine(EngineArgs(num_kv_blocks=50, scheduling_policy="priority"))
    engine.add_request("a", "Once", GREEDY, arrival_time=0)
    with pytest.raises(TypeError, match="request_id"):
        engine.add_request(1, "Once", GREEDY, arrival_time=0)
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("value", [5, None, b"x", ["a"]])
def test_a_model_is_a_text_or_a_path(value):
    with pytest.raises(ValueError, match="--model"):
        EngineArgs(value)


def test_defaults_that_nobody_takes_may_be_wrong(tmp_path):
    folder = pathlib.Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": "warm"}))
    with LLM(str(folder), num_kv_blocks=50) as llm:
        assert ends(llm, "Once upon") == [("length", "")]
        with pytest.raises(ValueError, match="temperature"):
            llm.generate("Once upon")


@pytest.mark.parametrize("options, name", [({"chat_template": t}, "chat_template is") for t in (["a"], {}, 5, b"x", HUGE)] + [
    ({"chat_template_kwargs": k}, "chat_template_kwargs is") for k in ([HUGE], {"messages": HUGE}, "x")], ids=NO_NAME)
def test_a_chat_option_of_the_wrong_type_costs_only_its_conversation(llm, options, name):
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    (bad, why), good = ends(llm, [chat | options, chat])
    assert bad == "error" and why.startswith(name) and good == ("length", "")
