"""Train the embedded model `tiny`: `python -m sparse_rl.models.make_tiny --out DIR`.

The model is a Qwen2 with under a million parameters, grouped-query attention and one token per character. It is warm-started
with supervised training on worked solutions of the embedded arithmetic task. One sum in twenty-five is wrong on purpose: the
model learns to add and to make mistakes, which reinforcement learning then removes. Training uses a GPU if there is one. The
only sparse-rl module that it imports is the task.

The seed determines the initial weights and every problem, and sums are computed in a fixed order. The same machine and
versions therefore reproduce the weights. Another machine rounds differently, so its weights and score differ. The file
score.json next to the shipped weights records their score and versions.
"""

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from sparse_rl.data.arithmetic import SUMS, Problem, grade, make_problems, write_problem

STEPS = 1500
SLIPS = 0.04
"""Share of sums in the training solutions that are wrong on purpose."""
BATCH = 128
LEARNING_RATE = 1e-3
WARMUP_STEPS = 100
DECAY_STEPS = 400
HELD_OUT_PROBLEMS = 500
HELD_OUT_SEED = 0
MAX_NEW_TOKENS = 192
"""Maximum response tokens. No worked solution is longer."""
IGNORED = -100
"""Label that transformers excludes from the loss."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte, which is one per character here. A prompt starts with <bos>, which is also
    the attention sink.

    The tokenizer is byte-level BPE without merges, because transformers gives every Qwen2 folder the pre-tokenizer and decoder
    of Qwen2. Only a byte vocabulary works with them. It also encodes any other text without loss.
    """
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokens = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", tokens.index("<bos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **special,
        padding_side="left",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            **ids,
        )
    )
    model.generation_config = GenerationConfig(**ids)
    return model


def training_problems(seed: int) -> Iterator[Problem]:
    """Yield problems, most of them with the task's length. The other lengths vary, so that the model does not learn to
    count."""
    rng = random.Random(seed)
    while True:
        sums = SUMS if rng.random() < 0.6 else rng.randint(1, SUMS + 3)
        (problem,) = make_problems(1, seed=rng.getrandbits(64), sums=sums, split="train")
        yield write_problem(
            problem.first, problem.second, sums, slip=lambda: rng.randrange(1, 100) if rng.random() < SLIPS else 0
        )


def collate(problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels. They are padded on the right, so that causal attention needs no mask. Prompts are excluded
    from the loss."""
    texts = [p.prompt + p.solution + tokenizer.eos_token for p in problems]
    rows = [torch.tensor(encoding.ids) for encoding in tokenizer.backend_tokenizer.encode_batch(texts)]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    prompt_tokens = torch.tensor([[1 + len(p.prompt)] for p in problems])  # the 1 counts <bos>
    in_prompt = torch.arange(input_ids.shape[1]) < prompt_tokens
    return input_ids, input_ids.masked_fill(in_prompt | (input_ids == tokenizer.pad_token_id), IGNORED)


def warm_start(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> Iterator[int]:
    """Train with supervision; the learning rate warms up and decays to zero. Yields the number of finished steps."""
    problems = training_problems(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / DECAY_STEPS)
    )
    started_s = time.perf_counter()
    for step in range(1, steps + 1):
        model.train()
        input_ids, labels = collate([next(problems) for _ in range(BATCH)], tokenizer)
        loss = model(input_ids=input_ids.to(model.device), labels=labels.to(model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {time.perf_counter() - started_s:.0f} s", flush=True)
        yield step


@torch.no_grad()
def sample(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], **options) -> list[str]:
    """Return the model's responses without special tokens. All prompts must have the same length."""
    model.eval()
    inputs = tokenizer(prompts, return_tensors="pt").to(model.device)
    output = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=MAX_NEW_TOKENS, **options
    )
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def score(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> dict[str, object]:
    """Return the held-out score together with all information needed to reproduce it."""
    problems = make_problems(HELD_OUT_PROBLEMS, seed=HELD_OUT_SEED, split="test")
    prompts = [p.prompt for p in problems]
    torch.manual_seed(seed)
    sampled = sample(model, tokenizer, prompts, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    greedy = sample(model, tokenizer, prompts, do_sample=False)

    def accuracy(texts: list[str]) -> float:
        return sum(grade(text, p.answer) for text, p in zip(texts, problems, strict=True)) / len(problems)

    return {
        "accuracy_temperature_1": accuracy(sampled),
        "accuracy_greedy": accuracy(greedy),
        "problems": len(problems),
        "problems_seed": HELD_OUT_SEED,
        "sums": SUMS,
        "mean_response_tokens": sum(len(text) + 1 for text in sampled) / len(sampled),  # the 1 counts <eos>
        "seed": seed,
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
    }


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, scores: dict[str, object], out: Path) -> None:
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "score.json").write_text(json.dumps(scores, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded model `tiny` and score it on held-out problems.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model and score.json to")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights, training problems and sampling")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps, {BATCH} problems each")
    args = parser.parse_args()

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS needs this for deterministic sums
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer).to("cuda" if torch.cuda.is_available() else "cpu")
    for step in warm_start(model, tokenizer, args.steps, args.seed):
        if step == args.steps:
            scores = score(model, tokenizer, step, args.seed)
            save(model, tokenizer, scores, args.out)
            print(json.dumps(scores, indent=2), flush=True)


if __name__ == "__main__":
    main()
