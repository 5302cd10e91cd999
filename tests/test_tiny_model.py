"""The embedded model: its folder, its tokenizer, its training text, its training loop, and what it says.

The full examination (every held-out question, 50 stories) is models/evaluate_tiny.py; a sample is here.
"""
import json
import os
import random
import re
import sys

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from conftest import ROOT

sys.path.insert(0, str(ROOT / "models"))
import evaluate_tiny  # noqa: E402
import running_example  # noqa: E402
import serving_qa  # noqa: E402
import tinytext  # noqa: E402
import train_tiny  # noqa: E402
from checkpoint import LlamaConfig, load_model  # noqa: E402
from model import Llama  # noqa: E402

FOLDER = ROOT / "models" / "tiny-llama3"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def model():
    return load_model(FOLDER, torch.float32)


# -- the folder -------------------------------------------------------------------------------------------------------

def test_folder_is_an_ordinary_checkpoint_of_at_most_6_mb(tokenizer):
    assert os.path.getsize(FOLDER / "model.safetensors") <= 6_000_000
    with safe_open(FOLDER / "model.safetensors", framework="pt") as f:
        assert {f.get_slice(name).get_dtype() for name in f.keys()} == {"BF16"}
        assert "lm_head.weight" not in f.keys()                     # tied: the embedding is stored once
    raw = json.loads((FOLDER / "config.json").read_text())
    assert raw == train_tiny.config_json(tokenizer)
    config = LlamaConfig.from_folder(FOLDER)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 8, 16)
    assert config.max_position_embeddings == 4096 and config.tie_word_embeddings and config.vocab_size == 2048
    config.check_tensor_parallel(8)                                 # one KV head a rank, as on the 70B
    assert config.eos_token_ids == {tokenizer.token_to_id("<|eot_id|>"), tokenizer.token_to_id("<|end_of_text|>")}


def test_loss_log_is_that_of_a_whole_run():
    log = json.loads((FOLDER / "loss_log.json").read_text())
    *_, before, trained, polished = log
    assert trained["tokens"] >= train_tiny.TOKENS > before["tokens"]
    assert polished["step"] == trained["step"] + train_tiny.POLISH_STEPS
    assert max(trained["val_loss"], polished["val_loss"]) < min(entry["val_loss"] for entry in log[:-10])


# -- the tokenizer ----------------------------------------------------------------------------------------------------

def test_tokenizer_is_byte_level_with_llama3_pattern_and_special_tokens(tokenizer):
    assert tokenizer.get_vocab_size() == 2048
    data = json.loads(tokenizer.to_str())
    pattern = data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    assert pattern == train_tiny.LLAMA3_SPLIT
    special = {token["content"] for token in data["added_tokens"] if token["special"]}
    assert set(train_tiny.SPECIAL_TOKENS) <= special
    assert tokenizer.encode("Hello").ids[0] == tokenizer.token_to_id("<|begin_of_text|>")


@pytest.mark.parametrize("text", ["", " ", "Once upon a time", "naïve 键值缓存 🦙\n\n\ttab", "1234567",
                                  "a\r\nb   c", "don't!?", "\x00\x7f"])
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= i < 2048 for i in ids)


def test_tokenizer_and_template_agree_with_transformers(tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(FOLDER)
    messages = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "What is TTFT?"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == evaluate_tiny.ask("What is TTFT?", "Be brief.")
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids
    assert (theirs.bos_token, theirs.eos_token, theirs.model_max_length) == ("<|begin_of_text|>", "<|eot_id|>", 4096)


# -- the running example ----------------------------------------------------------------------------------------------

def test_running_example_has_2000_and_50_tokens(tokenizer):
    example = json.loads((ROOT / "models" / "running_example.json").read_text())
    assert example == {"system": running_example.make_system(tokenizer), "question": running_example.QUESTION}
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(FOLDER)
    system = {"role": "system", "content": example["system"]}
    both = [system, {"role": "user", "content": example["question"]}]
    first = theirs.apply_chat_template([system], return_dict=True)["input_ids"]
    whole = theirs.apply_chat_template(both, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert len(first) == 2000 and len(whole) == 2050 and whole[:2000] == first


@pytest.mark.parametrize("option, code", [("--help", "0"), ("--hlep", "2")])
def test_running_example_writes_nothing_when_asked_for_help(option, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(running_example, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["running_example.py", option])
    with pytest.raises(SystemExit, match=code):
        running_example.main()
    assert "usage: running_example.py" in "".join(capsys.readouterr()) and not list(tmp_path.iterdir())


# -- the training text ------------------------------------------------------------------------------------------------

def test_generator_is_deterministic():
    def text(seed):
        rng = random.Random(seed)
        return [tinytext.document(rng) for _ in range(50)] + [tinytext.long_document(rng, 5000)]
    assert text(3) == text(3) and text(3) != text(4)


def test_every_document_is_well_formed():
    rng = random.Random(7)
    for _ in range(400):
        document = tinytext.document(rng)
        assert document.startswith(tinytext.BOS) and document.endswith((tinytext.EOT, tinytext.END_OF_TEXT))
        assert not re.search(r"[{}\[\]]|  | [,.!?]|\b[Aa] [aeio]", document), document
        counts = {document.count(token) for token in ("<|start_header_id|>", "<|end_header_id|>", tinytext.EOT)}
        assert len(counts) == 1


@pytest.mark.parametrize("plot", tinytext.PLOTS)
def test_no_story_says_a_sentence_twice(plot):
    rng = random.Random(plot)
    for _ in range(100):
        story, cast = tinytext.make_story(rng, plot=plot)
        assert evaluate_tiny.repeated_sentences(story) == []
        assert cast["A"] in story and cast["moral"] in story


def test_held_out_questions_are_not_in_the_training_text():
    rng = random.Random(11)
    asked = {fact.id: set() for fact in serving_qa.FACTS}
    for _ in range(60_000):
        fact = rng.choice(serving_qa.FACTS)
        asked[fact.id].add(serving_qa.training_question(rng, fact).lower())
    training = "\n".join(question for questions in asked.values() for question in questions)
    held = serving_qa.held_out_questions()
    assert len({question for _, question in held}) == len(held) > 250
    assert {fact.id for fact, _ in held} == set(asked)                        # every fact is examined
    assert [question for _, question in held if question.lower() in training] == []
    # one question, one fact: the same words never ask for two different answers
    everything = [question for questions in asked.values() for question in questions]
    assert len(everything) == len(set(everything))


def test_every_fact_meets_its_own_key_words_and_terms_of_the_house_are_there():
    assert len(serving_qa.BY_ID) == len(serving_qa.FACTS)
    for fact in serving_qa.FACTS:
        assert fact.is_stated_in(fact.answer), fact.id
        assert not fact.is_stated_in("I am sorry, but I am only a tiny model and I know nothing about that."), fact.id
    names = " ".join(fact.names for fact in serving_qa.FACTS)
    for term in ("KV cache", "block table", "prefix cache", "token budget", "chunked prefill", "continuous batching",
                 "preemption", "tensor parallel", "goodput"):
        assert term in names


def test_facts_with_numbers_are_right():
    """What can be recomputed is: the KV cache of Llama-3-70B, the blocks of 16, the share of a rank."""
    kv = 2 * 80 * 8 * 128 * 2
    assert f"{kv:,} bytes, or {kv // 1024} KiB" in serving_qa.BY_ID["kv_size"].answer
    assert f"64 query heads and 8 KV heads, the KV cache is {64 // 8} times smaller" in serving_qa.BY_ID["gqa"].answer
    assert f"16 tokens, a request wastes at most {16 - 1} slots" in serving_qa.BY_ID["fragmentation"].answer


# -- the training loop ------------------------------------------------------------------------------------------------

def test_training_forward_is_the_model_that_transformers_computes(model):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    ids = torch.randint(0, 2000, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.logits(train_tiny.hidden_states(model, ids)).view(2, 40, -1)
        torch.testing.assert_close(ours, theirs(ids).logits, atol=2e-4, rtol=1e-4)
        losses, _ = train_tiny.token_losses(model, ids)
        expected = theirs(ids, labels=ids).loss
    torch.testing.assert_close(losses.mean(), expected, atol=1e-4, rtol=1e-4)


def test_muon_makes_every_direction_move_equally_far():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(80, 32))
    weight.grad = torch.randn(80, 32) @ torch.diag(torch.logspace(0, -1.5, 32))     # singular values far apart
    before = torch.linalg.svdvals(weight.grad)
    train_tiny.Muon([(weight, 0, 16), (weight, 16, 80)]).step(lr=1.0)                  # two matrices in one parameter
    for part in (weight.data[:16], weight.data[16:]):
        moved = torch.linalg.svdvals(part) / (0.2 * max(part.shape) ** 0.5)
        assert moved.min() > 0.3 and moved.max() < 1.5
    assert before.max() / before.min() > 20


def run_training(monkeypatch, tokenizer, out, *options):
    monkeypatch.setattr(train_tiny, "train_tokenizer", lambda: tokenizer)
    small = {"LENGTH": 64, "LONG_LENGTH": 1100, "VALIDATION": ((2, 64), 1), "POLISH_STEPS": 2, "POLISH_LENGTH": 64,
             "CURRICULUM": ((0, 2, None, 0.0, 1.0), (256, 2, 3, 0.5, 1.0))}
    for name, value in small.items():
        monkeypatch.setattr(train_tiny, name, value)
    argv = ["train_tiny.py", "--threads", "1", "--out", str(out), "--log-every", "2", *options]
    monkeypatch.setattr(sys, "argv", argv)
    train_tiny.main()


def test_training_learns_writes_a_checkpoint_and_resumes_to_the_same_weights(monkeypatch, tokenizer, tmp_path):
    run_training(monkeypatch, tokenizer, tmp_path / "whole", "--tokens", "1700")    # one of its steps is long
    log = json.loads((tmp_path / "whole" / "loss_log.json").read_text())
    assert log[-1]["val_loss"] < log[0]["val_loss"] < 7.7              # ln 2048 = 7.62 before the first step
    assert not (tmp_path / "whole" / "training_state.pt").exists()

    # The same run, broken off after its fourth step and taken up again.
    real_save, saves = torch.save, []

    def save_then_stop(state, file):
        real_save(state, file)
        saves.append(state["log"][-1]["step"])
        if saves[-1] == 4:
            raise KeyboardInterrupt
    monkeypatch.setattr(torch, "save", save_then_stop)
    with pytest.raises(KeyboardInterrupt):
        run_training(monkeypatch, tokenizer, tmp_path / "broken", "--tokens", "1700")
    monkeypatch.setattr(torch, "save", real_save)
    run_training(monkeypatch, tokenizer, tmp_path / "broken", "--tokens", "1700", "--resume")
    whole, broken = (load_model(tmp_path / name, torch.float32).state_dict() for name in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


# -- what it says -----------------------------------------------------------------------------------------------------

def test_engine_and_transformers_give_the_same_greedy_ids(tokenizer):
    transformers = pytest.importorskip("transformers")
    from nano_serve import LLM, SamplingParams
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    prompts = [evaluate_tiny.ask("What is TTFT?"), evaluate_tiny.ask("Tell me a story about a fox named Ruby."),
               tinytext.BOS + "Once upon a time"]
    ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    with LLM(str(FOLDER), dtype="float32") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=60)
        outputs = llm.generate([{"prompt_token_ids": one} for one in ids], params)
    for one, output in zip(ids, outputs):
        expected = theirs.generate(torch.tensor([one]), max_new_tokens=60, do_sample=False)[0, len(one):].tolist()
        assert list(output.outputs[0].token_ids) == expected


@pytest.mark.parametrize("question, fact", [
    ("What is TTFT?", "ttft"), ("Why is decode memory-bound?", "why_decode"), ("What is a KV cache?", "kv_cache"),
    ("Explain continuous batching.", "continuous_batching"), ("What is a block table?", "block_table"),
    ("What is goodput?", "goodput"), ("What is a token budget?", "token_budget"),
    ("What is preemption?", "preemption")])
def test_it_knows_the_first_questions_of_a_class(model, tokenizer, question, fact):
    answer, ended, _ = evaluate_tiny.generate(model, tokenizer, evaluate_tiny.ask(question), 200)
    assert ended and answer == serving_qa.BY_ID[fact].answer


def test_nine_in_ten_of_a_sample_of_held_out_questions_and_stories(model, tokenizer):
    facts = evaluate_tiny.examine_facts(model, tokenizer, every=12)
    assert facts["held-out questions"] >= 20 and facts["right (key words)"] >= 0.85, facts
    stories = evaluate_tiny.examine_stories(model, tokenizer, count=8)
    assert stories["good in all three"] >= 0.75, stories


def test_it_stays_readable_after_the_running_example(model, tokenizer):
    figures = evaluate_tiny.examine_long(model, tokenizer)
    assert (figures["prompt tokens"], figures["output tokens"]) == (2050, 300)
    assert figures["broken words"] == [] and figures["sentences twice"] == []
