"""A reward model as a function: any sequence classifier of transformers. No import from sparse_rl.

REWARD_MODEL=path/or/hub-id sparse-rl train … --reward.function examples/reward_model.py:score --reward.workers 0

With `reward.workers = 0` it is called in the trainer with all samples of a step at once, on the GPU if there is one; in a
worker it would be called with one sample at a time. A classifier with one output is a reward model, and its output the
reward; with two or more the reward is the probability of the last class. Try it: python examples/reward_model.py
"""

import functools
import os

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

BATCH = 16
MAX_TOKENS = 2048


@functools.cache
def loaded():
    """The model, once a process: at the first call, so that importing this file stays quick."""
    path = os.environ["REWARD_MODEL"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype="auto").to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")  # the end of a response is what is judged
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def conversation(tokenizer, prompt, completion):
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    reply = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template([*messages, *reply], tokenize=False)
    return "\n".join(message["content"] for message in [*messages, *reply])


@torch.no_grad()
def score(prompts, completions, **columns):
    model, tokenizer = loaded()
    texts = [conversation(tokenizer, prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
    rewards = []
    for start in range(0, len(texts), BATCH):
        batch = tokenizer(
            texts[start : start + BATCH], return_tensors="pt", padding=True, truncation=True, max_length=MAX_TOKENS
        )
        logits = model(**batch.to(model.device)).logits.float()
        rewards += (logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, -1]).tolist()
    return rewards


def save_random_classifier(folder, outputs=1):
    """A tiny classifier with random weights and a tokenizer of letters, to try this without a download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {chr(code): code - 30 for code in range(32, 127)}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(
        vocab_size=len(vocabulary), num_labels=outputs, max_position_embeddings=MAX_TOKENS, initializer_range=0.5, **shape
    )
    BertForSequenceClassification(config).save_pretrained(folder)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        if "REWARD_MODEL" not in os.environ:
            save_random_classifier(folder)
            os.environ["REWARD_MODEL"] = folder
        print(score(["What is 1 + 1?"] * 3, ["It is 2.", "It is 3.", ""]))
