"""The text of the running example: a system prompt of exactly 2,000 tokens and a question of exactly 50.

    python models/running_example.py        writes running_example.json, for the tokenizer in tiny-llama3

What is counted is what the model reads, the chat template's share included:

    2,000 = <|begin_of_text|>  +  the system turn: its header, its text, <|eot_id|>
       50 = the user turn  +  the header of the answer, after which the model begins to write

So with blocks of 16 tokens the system prompt fills exactly 125 blocks, and any other question can share all of them.
The text is a handbook that the little model has never seen as a whole, made of pieces it knows: rules, facts, a story.
"""

import argparse
import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import tinytext  # noqa: E402
from serving_qa import BY_ID  # noqa: E402

SYSTEM_TOKENS, QUESTION_TOKENS = 2000, 50
CHAPTERS = (  # the handbook: a title and the facts under it, in the order of the chapters
    ("How serving is measured.", "ttft itl tpot e2e throughput goodput slo p99"),
    ("Two workloads.", "prefill decode why_prefill why_decode gqa intensity roofline"),
    ("The KV cache.", "kv_cache kv_size kv_block block_table slot_mapping paged_attention prefix_cache ref_count "
                      "eviction"),
    ("The scheduler.", "step scheduler token_budget continuous_batching static_batching chunked_prefill preemption "
                       "recompute fcfs admission"),
    ("Kernels.", "attention flash online_softmax cuda_graph"),
    ("Many GPUs.", "tp tp_kv all_reduce disaggregation"),
)
QUESTION = ("Hi! I am reading a book about serving. Please explain step by step how a request is served. "
            "Walk me through one request, from its arrival to its last token. Thank you!")


def system_ids(tokenizer: Tokenizer, system: str) -> list[int]:
    return tokenizer.encode(tinytext.BOS + tinytext.turn("system", system), add_special_tokens=False).ids


def question_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    ask = tinytext.turn("user", question) + tinytext.turn("assistant", "").removesuffix(tinytext.EOT)
    return tokenizer.encode(ask, add_special_tokens=False).ids


def make_system(tokenizer: Tokenizer) -> str:
    """The handbook up to the budget, then a story, then as many short rules as fit exactly."""
    rng = random.Random(2000)
    paragraphs = ["You are Tiny. You tell short stories and answer questions about LLM serving. Here is your handbook."]
    for title, facts in CHAPTERS:
        paragraphs += [title] + [BY_ID[fact].answer for fact in facts.split()]
    text = ""
    for paragraph in paragraphs + [tinytext.make_story(rng)[0] for _ in range(12)]:
        longer = f"{text}\n\n{paragraph}".strip()
        if len(system_ids(tokenizer, longer)) > SYSTEM_TOKENS - 20:     # leave room for two rules at least
            break
        text = longer
    # Rules differ in length, so some selection of them fills the rest exactly; draw until one does.
    while True:
        filled = text + "\n\n" + rng.choice(tinytext.RULES)
        while (count := len(system_ids(tokenizer, filled))) < SYSTEM_TOKENS:
            filled += " " + rng.choice([rule for rule in tinytext.RULES if not filled.endswith(rule)])
        if count == SYSTEM_TOKENS:
            return filled


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()      # it has no options
    tokenizer = Tokenizer.from_file(str(HERE / "tiny-llama3" / "tokenizer.json"))
    system = make_system(tokenizer)
    counts = len(system_ids(tokenizer, system)), len(question_ids(tokenizer, QUESTION))
    wanted = SYSTEM_TOKENS, QUESTION_TOKENS
    if counts != wanted:                       # another tokenizer: then QUESTION needs a word more or less
        raise SystemExit(f"system prompt and question have {counts} tokens, not {wanted}")
    text = json.dumps({"system": system, "question": QUESTION}, indent=2)
    (HERE / "running_example.json").write_text(text + "\n", encoding="utf-8")
    print("running_example.json: {} + {} tokens".format(*counts))


if __name__ == "__main__":
    main()
