"""chapters/ladder.py: four engines, one text."""
import ladder
import pytest

from nano_serve import EMBEDDED_MODEL, LLM, SamplingParams


def test_four_rungs_give_the_ids_of_the_engine():
    prompts, lengths = [list(range(100, 100 + n)) for n in (5, 17, 33)], [4, 9, 2]
    rungs = ladder.climb(prompts, lengths, turns=1)
    with LLM(EMBEDDED_MODEL, num_kv_blocks=64) as llm:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        want = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    assert list(rungs) == list(ladder.RUNGS) and len(rungs) == 4
    for ids, speed in rungs.values():
        assert ids == want and speed > 0


def test_rows_computed(monkeypatch):
    """What each idea saves, in rows of the model: every prefix anew, every token once, the longest for all, none too many."""
    import torch
    rows, dense = {}, ladder.forward

    def count(name):
        def forward(model, ids, *rest):
            rows[name] = rows.get(name, 0) + ids.numel()
            return dense(model, ids, *rest)
        return forward
    prompts, lengths = [list(range(100, 110)), list(range(200, 204))], [3, 6]
    model = ladder.load_model(EMBEDDED_MODEL, torch.float32, attention_backend="torch")
    for name in list(ladder.RUNGS)[:3]:
        monkeypatch.setattr(ladder, "forward", count(name))
        with torch.inference_mode():
            ladder.RUNGS[name](model, prompts, lengths)
    assert rows == {"1 stateless": (10 + 11 + 12) + (4 + 5 + 6 + 7 + 8 + 9), "2 KV cache": (10 + 2) + (4 + 5), "3 static batch": 2 * (10 + 5)}


def test_wrong_numbers_are_named(capsys):
    with pytest.raises(SystemExit):
        ladder.main(["--requests", "0"])
    assert "whole numbers" in capsys.readouterr().err
