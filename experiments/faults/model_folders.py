"""Load hostile and damaged model folders: the dry run, `generate` and the library.

python experiments/faults/model_folders.py --json benchmarks/results/faults-model_folders.json

Each case changes a copy of the embedded model. Every way that can see the damage refuses it in one printable sentence and
exit code 2. A way that cannot see it (the dry run loads no weights) may accept. Nowhere is there a traceback or a hang, and
no code of the folder runs: each piece of it would leave a file behind. A flipped bit inside a weight that stays finite is no
damage that a reader can know: safetensors has no checksums.
"""

import argparse
import datetime as dt
import json
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparse_rl.text import LONGEST_MESSAGE

TINY = Path(__file__).parents[2] / "src" / "sparse_rl" / "models" / "tiny"
DRY, GENERATE = "train --dry-run", "generate"
LIMIT_S = 120
"""Of one command on a busy machine; one that takes longer hangs."""


@dataclass(frozen=True)
class Case:
    name: str
    damage: Callable[[Path, Path], None]
    """Changes the folder; what it plants there would write the second path if it ran."""
    refused_by: tuple[str, ...] = (DRY, GENERATE)
    """Who must see it; empty where only harmlessness is asked for."""
    flags: tuple[str, ...] = field(default=())


# Weights


def weights(change: Callable[[bytearray], bytes | bytearray]) -> Callable[[Path, Path], None]:
    def damage(folder: Path, ran: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(bytearray(file.read_bytes())))

    return damage


def header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path, Path], None]:
    """Rewrite the header; the data stay where they are."""

    def damage(content: bytearray) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        table = json.loads(content[8 : 8 + length])
        change(table)
        text = json.dumps(table).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return weights(damage)


def flipped(seed: int) -> Callable[[Path, Path], None]:
    """One bit of the header."""

    def damage(content: bytearray) -> bytearray:
        (length,) = struct.unpack("<Q", content[:8])
        draw = random.Random(seed)
        content[draw.randrange(8 + length)] ^= 1 << draw.randrange(8)
        return content

    return weights(damage)


NORM = "model.norm.weight"


def renamed(table: dict[str, Any]) -> None:
    table["model.norm.weihgt"] = table.pop(NORM)


def overlapping(table: dict[str, Any]) -> None:
    table[NORM]["data_offsets"] = table["model.layers.0.input_layernorm.weight"]["data_offsets"]


def transposed(table: dict[str, Any]) -> None:
    entry = table["model.layers.0.mlp.up_proj.weight"]
    entry["shape"] = entry["shape"][::-1]


def not_finite(content: bytearray) -> bytearray:
    content[-4:] = struct.pack("<f", float("nan"))
    return content


def without_a_tensor(folder: Path, ran: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path, Path], None]:
    """Something else where a file was."""

    def damage(folder: Path, ran: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


# Shards


def index(table: Any, *, keep: bool = False) -> Callable[[Path, Path], None]:
    def damage(folder: Path, ran: Path) -> None:
        if not keep:
            (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        text = table if isinstance(table, str) else json.dumps(table)
        (folder / "model.safetensors.index.json").write_text(text)

    return damage


def shard(name: str) -> dict[str, Any]:
    return {"metadata": {"total_size": 1}, "weight_map": {NORM: name}}


# Code


class Runs:
    """A pickle that writes a file when it is read."""

    def __init__(self, ran: Path):
        self.ran = ran

    def __reduce__(self):
        return Path.touch, (self.ran,)


def pickled(*names: str, keep: bool = False) -> Callable[[Path, Path], None]:
    def damage(folder: Path, ran: Path) -> None:
        if not keep:
            (folder / "model.safetensors").unlink()
        for name in names:
            (folder / name).write_bytes(pickle.dumps(Runs(ran)))

    return damage


def adapter(folder: Path, ran: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)}))
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Runs(ran)))


def own_code(folder: Path, ran: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    change_json(folder / "config.json", {"model_type": "evil", "auto_map": dict.fromkeys(names, "evil.Evil")})
    change_json(folder / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}})


def own_tokenizer_code(folder: Path, ran: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    values = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    change_json(folder / "tokenizer_config.json", values)


# JSON files


def change_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def config(**values: Any) -> Callable[[Path, Path], None]:
    return lambda folder, ran: change_json(folder / "config.json", values)


def without(*keys: str) -> Callable[[Path, Path], None]:
    def damage(folder: Path, ran: Path) -> None:
        table = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({key: value for key, value in table.items() if key not in keys}))

    return damage


def written(name: str, content: bytes | str) -> Callable[[Path, Path], None]:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder, ran: (folder / name).write_bytes(data) and None


def cut(name: str, share: float) -> Callable[[Path, Path], None]:
    def damage(folder: Path, ran: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(share * len(content))])

    return damage


def removed(*names: str) -> Callable[[Path, Path], None]:
    def damage(folder: Path, ran: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def template(text: Any) -> Callable[[Path, Path], None]:
    def damage(folder: Path, ran: Path) -> None:
        shown = text.replace("RAN", str(ran)) if isinstance(text, str) else text
        change_json(folder / "tokenizer_config.json", {"chat_template": shown})

    return damage


ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__['__builtins__']['open']('RAN', 'w') }}"
LOOPS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
LATER = (GENERATE,)
"""Seen when the weights or the model are looked at."""
CASES = [
    Case("nothing is wrong", lambda folder, ran: None, ()),
    Case("weights cut in half", weights(lambda content: content[: len(content) // 2])),
    Case("weights cut after the header", weights(lambda content: content[:4000])),
    Case("weights without their last byte", weights(lambda content: content[:-1])),
    Case("weights of no bytes", weights(lambda content: b"")),
    Case("weights with a byte too many", weights(lambda content: content + b"\0")),
    Case("weights of zeros", weights(lambda content: bytes(len(content)))),
    Case("header of 2^63 bytes", weights(lambda content: struct.pack("<Q", 2**63) + content[8:])),
    Case("header of no bytes", weights(lambda content: struct.pack("<Q", 0) + content[8:])),
    Case("header that is not JSON", weights(lambda content: content[:8] + b"{" * 100 + content[108:])),
    *(Case(f"header with bit {seed} flipped", flipped(seed), LATER) for seed in range(8)),
    Case("header with overlapping weights", header(overlapping)),
    Case("header with a dtype of half the size", header(lambda table: table[NORM].update(dtype="F16"))),
    Case("header with whole numbers", header(lambda table: table[NORM].update(dtype="I32"))),
    Case("header with an unknown dtype", header(lambda table: table[NORM].update(dtype="F31"))),
    Case("header with another shape", header(lambda table: table[NORM].update(shape=[64]))),
    Case("header with a transposed weight", header(transposed), LATER),
    Case("header with a misspelt weight", header(renamed), LATER),
    Case("weights with one missing", without_a_tensor, LATER),
    Case("weights with a NaN", weights(not_finite), LATER),
    Case("weights are a folder", instead("model.safetensors", Path.mkdir)),
    Case("weights are a pipe", instead("model.safetensors", os.mkfifo)),
    Case("weights are a device", instead("model.safetensors", lambda path: path.symlink_to("/dev/zero"))),
    Case("weights are a link to nothing", instead("model.safetensors", lambda path: path.symlink_to("gone"))),
    Case("weights are a link to themselves", instead("model.safetensors", lambda path: path.symlink_to(path.name))),
    Case("no weights", removed("model.safetensors")),
    Case("index that names a pickle", index(shard("pytorch_model.bin"))),
    Case("index that names an absent shard", index(shard("model-00002-of-00002.safetensors"))),
    Case("index that leaves the folder", index(shard("../../secret.safetensors"))),
    Case("index with an absolute path", index(shard("/etc/secret.safetensors"))),
    Case("index whose shard lacks a weight", index({"weight_map": {"no.such.weight": "model-00001-of-00001.safetensors"}})),
    Case("index without a map", index({"metadata": {}})),
    Case("index with a map of numbers", index({"weight_map": {NORM: 5}})),
    Case("index that is not JSON", index("{")),
    Case("index of a part of the weights", index(shard("model-00001-of-00001.safetensors")), ()),
    Case("pickled weights alone", pickled("pytorch_model.bin")),
    Case("a pickle named safetensors", pickled("model.safetensors")),
    Case("pickles beside the weights", pickled("pytorch_model.bin", "training_args.bin", keep=True), ()),
    Case("a pickled adapter", adapter),
    Case("code of its own", own_code),
    Case("a tokenizer with code of its own", own_tokenizer_code, ()),
    Case("attention code from a hub", config(_attn_implementation="someone/kernel")),
    Case("attention code from a hub, second name", config(attn_implementation="someone/kernel:forward")),
    Case("no config", removed("config.json")),
    Case("config of no bytes", written("config.json", "")),
    Case("config cut in half", cut("config.json", 0.5)),
    Case("config that is a list", written("config.json", "[1, 2]")),
    Case("config in UTF-16", written("config.json", '{"model_type": "qwen2"}'.encode("utf-16"))),
    Case("config of deep brackets", written("config.json", "[" * 100_000)),
    Case("config with 5,000 digits", written("config.json", '{"model_type": "qwen2", "vocab_size": ' + "9" * 5000 + "}")),
    Case("config is a folder", instead("config.json", Path.mkdir)),
    Case("config is a pipe", instead("config.json", os.mkfifo)),
    Case("config without a kind", without("model_type", "architectures"), LATER),
    Case("config of an unknown kind", config(model_type="qwen99")),
    Case("config of an encoder", config(model_type="bert", architectures=["BertModel"]), LATER),
    Case("config with a kind that is a number", config(model_type=5)),
    Case("config with a kind that is a table", config(model_type={})),
    Case("hidden size of 0", config(hidden_size=0)),
    Case("hidden size in words", config(hidden_size="many")),
    Case("hidden size of a half", config(hidden_size=128.5)),
    Case("negative layers", config(num_hidden_layers=-4)),
    Case("a thousand million layers", config(num_hidden_layers=10**9)),
    Case("more layers than weights", config(num_hidden_layers=5, layer_types=None), LATER),
    Case("fewer layers than types", config(num_hidden_layers=3), LATER),
    Case("another vocabulary", config(vocab_size=100), LATER),
    Case("three heads", config(num_attention_heads=3), LATER),
    Case("three heads of keys", config(num_key_value_heads=3), LATER),
    Case("unknown activation", config(hidden_act="slu"), LATER),
    Case("a norm of NaN", config(rms_norm_eps=float("nan")), LATER),
    Case("a rope of nothing", config(rope_parameters={"rope_type": "default", "rope_theta": 0}), LATER),
    Case("a rope in words", config(rope_parameters={"rope_type": "default", "rope_theta": "x"}), LATER),
    Case("an unknown rope", config(rope_parameters={"rope_type": "helix", "rope_theta": 1e4}), LATER),
    Case("an unknown dtype", config(dtype="float7"), LATER),
    Case("an unknown quantisation", config(quantization_config={"quant_method": "magic"}), ()),
    Case("an untied head without weights", config(tie_word_embeddings=False), LATER),
    Case("unknown layer types", config(layer_types=["magic"] * 4), LATER),
    Case("a context of one token", config(max_position_embeddings=1), LATER),
    Case("an end in words", config(eos_token_id="stop"), LATER),
    Case("generation settings that are not JSON", written("generation_config.json", "{")),
    Case("an end in words beside the config", written("generation_config.json", '{"eos_token_id": "stop"}'), LATER),
    Case("KV settings that are not JSON", written("sparse_rl.json", "{"), LATER),
    Case("KV settings of a list", written("sparse_rl.json", "[]"), LATER),
    Case("no tokenizer", removed("tokenizer.json", "tokenizer_config.json")),
    Case("tokenizer cut in half", cut("tokenizer.json", 0.5)),
    Case("tokenizer of no bytes", written("tokenizer.json", "")),
    Case("tokenizer that is a list", written("tokenizer.json", "[]")),
    Case("tokenizer of nothing", written("tokenizer.json", "{}")),
    Case("tokenizer of an unknown model", written("tokenizer.json", '{"model": {"type": "Magic"}, "added_tokens": []}')),
    Case("tokenizer settings that are not JSON", written("tokenizer_config.json", "\x00")),
    Case("template that never ends", template(LOOPS)),
    Case("template that raises", template("{{ raise_exception('no') }}")),
    Case("template with a huge range", template("{% for i in range(10 ** 12) %}x{% endfor %}")),
    Case("template with a huge text", template("{{ 'x' * 10 ** 13 }}")),
    Case("template with a mistake", template("{% for %}")),
    Case("template that divides by zero", template("{{ 1 / 0 }}")),
    Case("template that calls itself", template("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}")),
    Case("template that includes a file", template("{% include '/etc/passwd' %}{{ messages }}")),
    Case("template that leaves its sandbox", template(ESCAPE)),
    Case("template that says nothing", template(" ")),
    Case("template without the message", template("Hello!"), (DRY,)),
    Case("template of numbers", template([1, 2])),
    Case("template that is a number", template(5)),
]


# Running them


def commands(folder: Path, case: Case, run_dir: Path) -> dict[str, list[str]]:
    sizes = ["--model.dtype", "float32", "--model.device", "cpu", "--run-dir", str(run_dir)]
    return {
        DRY: ["train", "--dry-run", "--model.path", str(folder), *sizes, "--reward.workers", "0", *case.flags],
        GENERATE: ["generate", str(folder), "12+34=", "--max-tokens", "4", "--kv.budget", "64", "--device", "cpu"],
    }


def run_apart(arguments: list[str], err: Path) -> tuple[int, float]:
    """(exit code, seconds) of a command in a process of its own; -9 if it did not end."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        with err.open("w") as file, open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(file.fileno(), 2)
            code = 99
            try:
                from sparse_rl.cli import main

                main(arguments)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 98
            finally:
                sys.stderr.flush()
                os._exit(code)
    while time.monotonic() - started < LIMIT_S:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), time.monotonic() - started
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -9, time.monotonic() - started


def judge(code: int, text: str, must_refuse: bool) -> tuple[str, str | None]:
    """(how it ended, what is wrong about that)."""
    lines = [line for line in text.splitlines() if line.startswith("sparse-rl: ")]
    if "Traceback" in text or "Unexpected error" in text or code not in (0, 2):
        return "failed", f"exit code {code}: {text.strip()[-300:]}"
    if code == 0:
        return "accepted", "damage was accepted" if must_refuse else None
    if len(lines) != 1 or not lines[0].isprintable() or len(lines[0]) > LONGEST_MESSAGE + 20 or lines[0][-1] not in ".?)":
        return "refused", f"not one printable sentence: {text.strip()[-300:]}"
    return "refused", None


def campaign(folder: Path, names: set[str] | None = None, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """All cases, or those of these names."""
    import sparse_rl.rollout.console
    import sparse_rl.train.run  # noqa: F401  before the forks: torch takes seconds to import

    failures, ended, slowest = [], {}, 0.0
    for number, case in enumerate(CASES):
        if names is not None and case.name not in names:
            continue
        place = folder / str(number)
        model, ran = place / "model", place / "ran"
        shutil.copytree(TINY, model)
        case.damage(model, ran)
        for way, arguments in commands(model, case, place / "run").items():
            code, seconds = run_apart(arguments, place / "err")
            text = (place / "err").read_text(errors="replace")
            how, wrong = judge(code, text, way in case.refused_by)
            if ran.exists():
                wrong = "code of the folder ran"
            if case.name == CASES[0].name and how != "accepted":
                wrong = f"a good folder was refused: {text[-300:]}"
            ended.setdefault(case.name, {})[way] = how
            slowest = max(slowest, seconds)
            if wrong:
                failures.append({"case": case.name, "way": way, "wrong": wrong.replace(str(place), "FOLDER")})
            last = [line for line in text.splitlines() if line.startswith("sparse-rl: ")]
            tell(f"{case.name}: {way}: {how} in {seconds:.1f} s {wrong or ''}\n    {last[-1] if last else ''}")
        shutil.rmtree(place)
    return {"cases": len(ended), "failures": failures, "slowest_s": round(slowest, 1), "ended": ended}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases by name [all]")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(Path(folder), set(args.only) if args.only else None, print)
    import safetensors
    import tokenizers
    import transformers

    versions = {module.__name__: module.__version__ for module in (safetensors, tokenizers, transformers)}
    record = {"date": dt.date.today().isoformat(), "versions": versions, **found}
    counts: dict[str, int] = {}
    for ways in found["ended"].values():
        for how in ways.values():
            counts[how] = counts.get(how, 0) + 1
    record["commands"] = counts
    print(json.dumps({key: value for key, value in record.items() if key != "ended"}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
