"""One schema for recipes and flags: what a run was told is what its config.toml says, and a slip is named."""

import os
import re
import subprocess
import sys
import tomllib

import pytest

from small_runs import arguments, refused, train
from sparse_rl.cli import build_parser, main
from sparse_rl.config import KV, Config, from_flags, migrated, migrated_tables, recipe, recipe_names, to_toml
from sparse_rl.errors import UserError
from sparse_rl.format import agreeing, counted
from sparse_rl.train.resume import changes_since, kept_options


def parsed(*flags, base=None):
    return from_flags(build_parser().parse_args(["train", *flags]), Config, base)


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--loss.smd.lambda", "0.2"], lambda config: config.loss.smd.lambda_ == 0.2),
        (["--optimizer.betas", "[0.9, 0.95]"], lambda config: config.optimizer.betas == (0.9, 0.95)),
        (["--rollout.repetition", "[4, 32]"], lambda config: config.rollout.repetition == (4, 32)),
        (["--rollout.repetition", "none"], lambda config: config.rollout.repetition is None),
        (["--rollout.slots", "auto"], lambda config: config.rollout.slots == "auto"),
        (["--rollout.slots", "12"], lambda config: config.rollout.slots == 12),
        (["--correction.cap", "inf"], lambda config: config.correction.cap == float("inf")),
        (["--correction.preset", "none"], lambda config: config.correction.preset == "none"),
        (["--correction.preset", "null"], lambda config: config.correction.preset is None),
        (["--correction.drop", "none"], lambda config: config.correction.drop == "none"),
        (["--model.dtype", "None"], lambda config: config.model.dtype is None),
        (["--kv.window", "auto", "--kv.policy", "expected"], lambda config: config.kv.window == "auto"),
        (["--kv.window", "16"], lambda config: config.kv.window == config.kv.recent == 16),
        (["--kv.options", '{"mix": 0.2}'], lambda config: config.kv.options == {"mix": 0.2}),
        (["--compare", '["dense", "smd"]'], lambda config: config.compare == ("dense", "smd")),
        (["--optimizer.gradient-checkpointing"], lambda config: config.optimizer.gradient_checkpointing is True),
        (["--model.lora.merge", "false"], lambda config: config.model.lora.merge is False),
        (["--compare", "dense, smd"], lambda config: config.compare == ("dense", "smd")),
        (["--compare", "dense"], lambda config: config.compare == ("dense",)),
        (["--compare", ""], lambda config: config.compare == ()),
        (["--log.to", "none"], lambda config: config.log.to == ()),
        (["--log.to", "wandb"], lambda config: config.log.to == ("wandb",)),
        (["--log.to", '"wandb",trackio'], lambda config: config.log.to == ("wandb", "trackio")),
        (["--optimizer.betas", "0.9,0.95"], lambda config: config.optimizer.betas == (0.9, 0.95)),
        (["--rollout.repetition", "4,32"], lambda config: config.rollout.repetition == (4, 32)),
        (["--correction.high", "inf"], lambda config: config.correction.high == float("inf")),
        (["--log.to", '["tensorboard"]'], lambda config: config.log.to == ("tensorboard",)),
        (["--model.lora.alpha", "3"], lambda config: config.model.lora.alpha == 3),
    ],
    ids=lambda flags: " ".join(flags) if isinstance(flags, list) else "",
)
def test_flags_and_toml_say_the_same(flags, value):
    config = parsed(*flags)
    assert value(config)
    assert Config(**tomllib.loads(to_toml(config))) == config


def test_every_field_has_a_flag_and_comes_back_from_toml():
    """Defaults, and each section with every value it can have been given."""
    assert parsed() == Config() == Config(**tomllib.loads(to_toml(Config())))
    for name in recipe_names():
        config = Config(**recipe(name))
        assert Config(**tomllib.loads(to_toml(config))) == config


def test_options_of_earlier_versions_are_read(tmp_path):
    """A stored config.toml holds every option. Removed ones may stay if they changed nothing."""
    path = tmp_path / "config.toml"
    path.write_text(
        "[rollout]\ntop_p = 1.0\ntop_k = 0\napproximate = false\n[log]\nproject = 'sparse-rl'\n[loss.smd]\nestimator = 'top-64'\n"
    )
    config = Config(**recipe(str(path)))
    assert config == Config(loss={"smd": {"top_k": 64}})
    stored = {"kv.options.mix": 0.2, "rollout.top_p": 1.0, "loss.smd.estimator": "full", "seed": 3}
    assert migrated(stored) == {"kv.options": {"mix": 0.2}, "seed": 3}


@pytest.mark.parametrize(
    ("most", "sentence"),
    [
        (
            None,
            r"kv.budget = 1920 .* counts the prompt.* set it to 1920 less the tokens of the longest prompt, but at least 64, and add",
        ),
        (2048, "set it to 1000, which is half of rollout.max_tokens, and add"),
        (1915, "set it to 1000, which is half of rollout.max_tokens, and add"),
        (1112, r"set it to 808, which is 1920 less data.max_prompt_tokens, and add the line format = 2"),
    ],
)
def test_a_stored_budget_that_counts_the_prompt_is_refused(tmp_path, most, sentence):
    """Files of runs hold every option, and `format` since the budget of a protected prompt counts response tokens."""
    path, config = (
        tmp_path / "config.toml",
        Config(
            kv=KV(policy="rkv", budget=1920, protect_prompt=True),
            data={"max_prompt_tokens": most},
            rollout={"max_tokens": 2000},
        ),
    )
    path.write_text(to_toml(config))
    with pytest.raises(UserError, match=sentence):
        recipe(str(path))
    path.write_text(f"format = 2\n{to_toml(config)}")
    assert Config(**recipe(str(path))) == config
    path.write_text("[kv]\nbudget = 808\nprotect_prompt = true\n")  # written by hand
    assert Config(**recipe(str(path))).kv == KV(budget=808, protect_prompt=True)
    path.write_text(to_toml(Config(kv=KV(policy="full", protect_prompt=True))))  # a cache without a budget
    assert Config(**recipe(str(path))).kv.policy == "full"


@pytest.mark.parametrize("most", [None, 100, 1100, 1800, 1900, 2500])
@pytest.mark.parametrize("window", [4, 128])
@pytest.mark.parametrize("max_tokens", [64, 200, 4000])
def test_a_number_that_replaces_a_stored_budget_is_usable(most, window, max_tokens):
    """It exceeds the window and the sinks, and is below rollout.max_tokens where both are possible."""
    cache = {"policy": "rkv", "budget": 1920, "interval": 128, "window": window, "sinks": 4, "protect_prompt": True}
    data = {} if most is None else {"max_prompt_tokens": most}
    with pytest.raises(UserError) as error:
        migrated_tables({"kv": cache, "data": data, "rollout": {"max_tokens": max_tokens}})
    budget = int(re.search(r"(?:set it to|at least) (\d+),", str(error.value))[1])
    assert KV(**cache | {"budget": budget}).budget >= 64
    assert budget < max_tokens or max_tokens < 2 * max(64, window + 4 + 1)


def test_a_checkpoint_whose_budget_counts_the_prompt_is_refused():
    config = Config(kv=KV(policy="rkv", budget=1920, protect_prompt=True), data={"max_prompt_tokens": 1112})
    now = kept_options(config)
    assert changes_since("run", now, now) == []
    old = {key: value for key, value in now.items() if key != "format"}
    with pytest.raises(UserError, match="start a new run with another --run-dir and --kv.budget 808, which is 1920 less"):
        changes_since("run", old, now)
    free = kept_options(Config(kv={"protect_prompt": False}))
    assert changes_since("run", {key: value for key, value in free.items() if key != "format"}, free) == []


FOLLOWING = {"policy": "expected", "window": "auto"}


def test_a_run_of_an_earlier_version_keeps_its_cache(tmp_path):
    """Its config.toml and its checkpoints have always held the options of the cache, so new defaults do not change it."""
    cache = {"policy": "rkv", "budget": 512, "interval": 128, "window": 8, "sinks": 4, "protect_prompt": False}
    written = to_toml(Config(kv=cache))
    assert all(f"{key} = " in written for key in cache)
    (tmp_path / "config.toml").write_text(written)  # without `format`, which earlier versions did not write
    config = Config(**recipe(str(tmp_path / "config.toml")))
    assert config.kv == KV(**cache) != KV()
    stored = {key: value for key, value in kept_options(config).items() if key != "format"}
    assert changes_since("run", stored, kept_options(config)) == []
    assert changes_since("run", stored, kept_options(Config(kv=cache | {"window": "auto"}))) == []  # 8 for R-KV
    with pytest.raises(UserError, match="kv.window is auto now but was 8 in run"):
        changes_since("run", stored | {"kv.policy": "expected"}, kept_options(Config(kv=cache | FOLLOWING)))
    with pytest.raises(UserError, match="kv.protect_prompt is True now but was False in run: resume with the same value"):
        changes_since("run", stored, kept_options(Config(kv=cache | {"protect_prompt": True})))


def test_the_config_of_a_run_is_the_config_it_ran(world, tmp_path):
    flags = ["--steps", "1", "--model.dtype", "float32", "--rollout.max-tokens", "4", "--loss.smd.lambda", "0.2"]
    train(world, tmp_path / "run", *flags)
    stored = Config(**recipe(str(tmp_path / "run/config.toml")))
    assert stored == parsed(*arguments(world, tmp_path / "run", *flags)[1:])


def test_flags_win_over_the_recipe_and_the_recipe_over_the_one_it_extends(tmp_path):
    (tmp_path / "base.toml").write_text(
        'extends = "quickstart"\nsteps = 7\n[kv]\nbudget = 33\noptions = {mix = 0.2, kernel = 5}\n'
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/mine.toml").write_text('extends = "../base.toml"\n[kv]\ninterval = 11\noptions = {mix = 0.3}\n')
    config = parsed("--kv.window", "5", base=recipe(str(tmp_path / "sub/mine.toml")))
    kv = config.kv
    assert (kv.window, kv.interval, kv.budget, kv.options) == (5, 11, 33, {"mix": 0.3})  # options are one value
    assert config.steps == 7 and config.optimizer == Config(**recipe("quickstart")).optimizer != Config().optimizer


RECIPES = {
    "typo": ("[kv]\nbugdet = 3\n", "Unknown option kv.bugdet: did you mean budget?"),
    "top-typo": ("stepz = 3\n", "Unknown option stepz: did you mean steps?"),
    "section-typo": ("[optimiser]\nlr = 1e-3\n", "Unknown option optimiser: did you mean optimizer?"),
    "nested-typo": ("[loss.smd]\nlamda = 1\n", "Unknown option loss.smd.lamda: did you mean lambda?"),
    "text for a number": ('steps = "many"\n', "steps = 'many' is invalid: input should be a valid integer"),
    "list for a number": ("[kv]\nbudget = [1]\n", "kv.budget = [1] is invalid: input should be a valid integer"),
    "number for a section": ("kv = 3\n", "kv = 3 is invalid: kv is a table. Set an option in it, such as kv.policy."),
    "not toml": ("steps = \n", " is not valid TOML: Invalid value (at line 1, column 9)."),
    "not text": (b"\xff\xfe", "cannot be read ('utf-8' codec"),
    "self": ("self = 1\n", "Unknown option self: valid options are method"),
    "nested self": ("[kv]\nself = 1\n", "Unknown option kv.self: valid options are policy"),
    "5,000 digits": (f"steps = {'9' * 5000}\n", "cannot be read (Exceeds the limit"),
    "5,000 hex digits": (f"steps = 0x{'f' * 5000}\n", "steps = a number with thousands of digits is invalid"),
    "deep lists": (f"steps = {'[' * 5000}{']' * 5000}\n", "cannot be read (maximum recursion depth exceeded"),
    "deep tables": (f"[kv.options{'.a' * 5000}]\n", "lists and tables must not be nested deeper than 8"),
    "long text": (f"steps = '{'x' * 70_000}'\n", "xxx' is invalid: input should be a valid integer"),
    "long key": (f"{'x' * 70_000} = 1\n", "x: valid options are method"),
    "escapes": ('"\\u001b[2J" = 1\n', "Unknown option \\x1b[2J: valid options are"),
    "removed": (
        "[rollout]\ntop_p = 0.9\n",
        "rollout.top_p = 0.9 is no longer supported: remove it; the correction is exact only without truncated sampling",
    ),
    "removed estimator": (
        "[loss]\nkl_estimator = 'k1'\n",
        "loss.kl_estimator = 'k1' is no longer supported: its gradient is zero on average. Use k2 or k3.",
    ),
    "deep unknown tables": (f"[{'a.' * 5000}a]\n", "Unknown option a: valid options are method"),
    "NUL": ('run_dir = "a\\u0000b"\n', "text must not contain a NUL character"),
    "not finite": ("[loss]\nentropy_coef = nan\n", "loss.entropy_coef = nan is invalid: input should be a finite number."),
    "extends a device": (
        'extends = "/dev/zero"\n',
        "The recipe /dev/zero cannot be read (it is a device or a pipe): pass a TOML file.",
    ),
    "extends a pipe": ('extends = "pipe"\n', "pipe cannot be read (it is a device or a pipe): pass a TOML file."),
    "extends a NUL": ('extends = "a\\u0000b"\n', "cannot be read (embedded null byte): pass a TOML file."),
    "too large": ("#" * (2**20 + 1), "cannot be read (it has 1,048,577 bytes, more than 1,048,576): pass a TOML file."),
    "loop": ('extends = "./x/../recipe.toml"\n', "extends itself"),
    "extends 5,000 hex digits": (f"extends = 0x{'f' * 5000}\n", "extends = a number with thousands of digits in"),
    "extends a number": ("extends = 3\n", "extends = 3 in"),
    "extends nothing": ('extends = "quickstrat"\n', "did you mean quickstart?"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_slip_in_a_recipe_is_named(tmp_path, name, capsys):
    content, sentence = RECIPES[name]
    path = tmp_path / "recipe.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.mkfifo(tmp_path / "pipe")
    said = refused(capsys, "train", str(path), "--dry-run")
    assert sentence in said and len(said) <= 1000 and said.isprintable()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--kv.bugdet", "3"], "unknown argument --kv.bugdet: did you mean --kv.budget?"),
        (["--steps", "many"], "steps = 'many' is invalid: input should be a valid integer"),
        (["--steps", "0"], "steps = '0' is invalid: input should be greater than or equal to 1."),
        (["--kv.budget"], "argument --kv.budget: expected one argument; see sparse-rl train --help."),
        (["--optimizer.betas", "0.9 0.95"], "optimizer.betas.0 = '0.9 0.95' is invalid: input should be a valid number"),
        (["--optimizer.betas", "[0.9"], "optimizer.betas = [0.9 is not valid JSON"),
        (["--log.to", "wandbb"], "log.to.0 = 'wandbb' is invalid: input should be 'tensorboard', 'wandb' or 'trackio'."),
        (["--kv.options", '{"mix": NaN}'], "kv.options = {'mix': nan} is invalid"),
        (["--kv.options", "[" * 9999], "cannot be parsed"),
        (["--optimizer.betas", f"[{'9' * 5000}, 0]"], "cannot be parsed"),
        (["--loss.entropy-coef", "nan"], "loss.entropy_coef = 'nan' is invalid: input should be a finite number."),
        (["--rollout.temperature", "inf"], "rollout.temperature = 'inf' is invalid: input should be a finite number."),
        (["--optimizer.weight-decay", "inf"], "optimizer.weight_decay = 'inf' is invalid: input should be a finite number."),
        (
            ["--optimizer.weight-decay", "1e39"],
            "optimizer.weight_decay = 1e+39 is invalid: a float must be between",
        ),
        (["--steps", str(2**63)], "an integer must fit into 64 bits."),
        (["--run-dir", "a\0b"], "run_dir = 'a\\x00b' is invalid: text must not contain a NUL character."),
        (["--run-dir", "a\udcff"], "run_dir = 'a\\udcff' is invalid: text must be valid UTF-8."),
        (["--data.template", "\udcff {prompt}"], "data.template = '\\udcff {prompt}' is invalid: text must be valid UTF-8."),
        (["--optimizer.betas", "[0.9, 2]"], "optimizer.betas.1 = 2 is invalid: input should be less than 1."),
        (["--optimizer.lr", "inf"], "optimizer.lr = 'inf' is invalid: input should be a finite number."),
        (["--method", "dens"], "method = 'dens' is invalid: input should be 'dense', 'naive', 'sparse_rl'"),
        (["--compare", '["dense", "dense"]'], " lists a method twice: list each method once."),
        (["--rollout.slots", "some"], "rollout.slots = 'some' is invalid"),
        (["--rollout.slots", "0"], "rollout.slots = 0 is invalid: it must be at least 1, or auto."),
        (["--rollout.repetition", "[5, 2]"], "rollout.repetition = (5, 2) is invalid: period"),
        (["--advantage.overlong", "9999"], "exceeds rollout.max_tokens = 4096"),
        (["--kv.policy", "rvk"], "Unknown KV policy 'rvk' (did you mean 'rkv'?)"),
        (["--resume", "--overwrite", "--run-dir", "/nowhere"], "choose one"),
        (["quickstar"], "Recipe 'quickstar' does not exist: did you mean quickstart?"),
        (["nowhere.toml"], "Recipe 'nowhere.toml' does not exist: pass a path or one of"),
        (["/"], "Recipe '/' does not exist"),
    ],
)
def test_a_slip_in_a_flag_is_named(flags, sentence, capsys):
    assert sentence in refused(capsys, "train", *flags, "--dry-run")


def test_a_dry_run_shows_everything_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["train", "quickstart", "--dry-run", "--steps", "20", "--kv.budget", "60", "--rollout.prompts-per-step", "8",
          "--rollout.samples-per-prompt", "8", "--rollout.max-tokens", "192", "--optimizer.updates-per-step", "2"])  # fmt: skip
    out = capsys.readouterr().out
    toml, _, rest = out.partition("\n\n20 steps")
    config = Config(**tomllib.loads(toml))
    assert config.kv.budget == 60 and config.compare == Config(**recipe("quickstart")).compare
    assert rest.startswith(
        " of 8 prompts x 8 samples = 64 rollouts of at most 192 tokens; 2 updates of 32 rollouts per step, 16,384 tokens per micro-batch.\n"
    )
    assert 'first prompt, 10 tokens: "<bos>15:' in rest and rest.count('"') == 4 and ", graded 1.0" in rest
    assert not list(tmp_path.iterdir())


def test_a_dry_run_shows_a_gold_that_is_not_graded_right(world, capsys):
    with pytest.raises(SystemExit) as end:
        main([*arguments(world, world / "nowhere", "--dry-run", reward="raises")])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and "The reward fails on the first reference answer (RuntimeError: out of ideas)" in err
    assert 'first answer: "1", graded RuntimeError: out of ideas' in out
    assert not (world / "nowhere").exists()


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_count_of_one_has_a_singular_noun():
    assert [counted(count, "step") for count in (0, 1, 2, 1200)] == ["0 steps", "1 step", "2 steps", "1,200 steps"]
    assert [agreeing(count, "is", "are") for count in (0, 1, 2)] == ["are", "is", "are"]
    summary = Config(steps=1, rollout={"prompts_per_step": 1, "samples_per_prompt": 8}).batch_summary
    assert summary.startswith("1 step of 1 prompt x 8 samples = 8 rollouts of at most ")
    assert "; 1 update of 8 rollouts per step, " in summary


def test_options_load_no_torch():
    run_python("import sys, sparse_rl.config; assert 'torch' not in sys.modules")


def test_help_is_there_without_torch():
    done = run_python(
        "import sys; from sparse_rl.cli import main\n"
        "try: main(['train', '--help'])\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    assert "--loss.smd.lambda" in done.stdout and "--rollout.prompts-per-step" in done.stdout and "quickstart" in done.stdout


def test_a_dry_run_needs_torch_only_for_the_prompt(capsys):
    """Where torch cannot even be imported, the configuration, the arithmetic and the gold's grade are there."""
    done = run_python("import sys; sys.modules['torch'] = None; from sparse_rl.cli import main; main(['train', '--dry-run'])")
    assert "100 steps of 128 prompts" in done.stdout and "first answer: " in done.stdout and ", graded 1.0" in done.stdout


def test_what_was_left_to_the_method_is_said(world, capsys):
    """An option that is not set still has a value: the dry run and the stored recipe name it."""
    main([*arguments(world, world / "nowhere", "--dry-run", "--method", "sparse_rl")])
    assert "correction.preset = paper (of method = sparse_rl)" in capsys.readouterr().out
    main([*arguments(world, world / "nowhere", "--dry-run", "--method", "smd")])
    assert "no correction" in capsys.readouterr().out
