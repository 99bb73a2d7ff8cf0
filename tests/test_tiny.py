"""The embedded model: small, a plain Hugging Face folder, and as good as its score.json says."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

import sparse_rl.models
from sparse_rl.data.arithmetic import grade, make_problems

TINY = Path(sparse_rl.models.__file__).parent / "tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, local_files_only=True, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def score():
    return json.loads((TINY / "score.json").read_text())


def test_folder_is_small():
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 4_000_000


def test_model_is_a_small_qwen2_with_grouped_query_attention(model, tokenizer, score):
    assert isinstance(model, Qwen2ForCausalLM)
    assert model.num_parameters() == score["parameters"] <= 1_000_000
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.max_position_embeddings == 8192
    assert model.config.vocab_size == len(tokenizer)


def test_generation_stops_at_eos_and_brings_no_sampling_of_its_own(model, tokenizer):
    generation = json.loads((TINY / "generation_config.json").read_text())
    generation.pop("transformers_version")
    assert generation == {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    assert len(set(generation.values())) == 3


def test_text_survives_the_tokenizer_one_token_per_character(tokenizer):
    problem = make_problems(1, seed=0)[0]
    for text in (problem.prompt, problem.solution, "\n\n#;=+", "other text, ünïcode too"):
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_token_id and tokenizer.bos_token_id not in ids[1:]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        plain = tokenizer.encode(text, add_special_tokens=False)
        assert plain == ids[1:] and len(plain) == len(text.encode())
        assert tokenizer.decode(plain) == text
    assert tokenizer.encode("1<eos>", add_special_tokens=False)[-1] == tokenizer.eos_token_id
    assert tokenizer.decode([tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == ""


def test_worked_solutions_are_likely(model, tokenizer):
    """A fast sign that weights and tokenizer belong together: chance would be 5.6 nats a token."""
    problems = make_problems(4, seed=0, split="test")
    for problem in problems:
        ids = torch.tensor([tokenizer.encode(problem.prompt + problem.solution + "<eos>")])
        labels = ids.clone()
        labels[:, : 1 + len(problem.prompt)] = -100
        with torch.no_grad():
            assert model(ids, labels=labels).loss.item() < 0.2


@pytest.mark.slow
def test_score_is_what_score_json_says(model, tokenizer, score):
    """Greedy on 200 of the same held-out problems; only rounding may differ, binomial error is room enough."""
    problems = make_problems(score["problems"], seed=score["problems_seed"], sums=score["sums"], split="test")[:200]
    right = 0.0
    for start in range(0, len(problems), 100):
        batch = problems[start : start + 100]
        inputs = tokenizer([p.prompt for p in batch], return_tensors="pt")
        with torch.no_grad():
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=192,
                do_sample=False,
            )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(grade(text, p.answer) for text, p in zip(texts, batch, strict=True))
    p, n = score["accuracy_greedy"], len(problems)
    assert abs(right / n - p) <= 3 * math.sqrt(p * (1 - p) / n) + 1 / score["problems"]
    assert score["accuracy_temperature_1"] < p, "sampling must leave reinforcement learning room to improve"
