"""The policies as users rely on them, their own included."""

import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sparse_rl import KV, UserError
from sparse_rl.config.kv import BUILT_IN_POLICIES, is_import_path
from sparse_rl.kernels.redundancy import redundancy
from sparse_rl.kv.policies import POLICIES, Policy, from_settings, get
from sparse_rl.kv.policies.full import Full
from sparse_rl.kv.policies.rkv import RKV
from sparse_rl.kv.policies.streaming import Streaming
from sparse_rl.testing import check_policy, random_statistics

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_policy.py"


def test_the_options_name_the_built_in_policies():
    assert tuple(POLICIES) == BUILT_IN_POLICIES
    assert " ".join(POLICIES) in KV.model_fields["policy"].description
    assert not any(KV(policy=name).has_custom_policy or is_import_path(name) for name in POLICIES)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("sinks", [0, 4])
def test_every_policy_passes_its_own_check(name, sinks):
    check_policy(name, window=1 if name == "tova" else 4, sinks=sinks)


def test_snapkv_prefill_form_passes_the_check():
    check_policy("snapkv", form="prefill", pool="avg", kernel=5)


@pytest.mark.parametrize("name", [*(name for name in POLICIES if name != "full"), f"{__name__}:KeepsLast"])
def test_the_window_is_half_of_the_budget_for_policies_that_predict_queries(name):
    """And 8 tokens for all others. A number overrides both."""
    for budget in (100, 65):
        expected = budget // 2 if name in ("triattention", "expected") else 8
        assert from_settings(KV(policy=name, budget=budget)).window == expected
        assert from_settings(KV(policy=name, budget=budget, window=5)).window == 5


class KeepsLast(Policy):
    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        return torch.arange(keys.shape[2]).expand(keys.shape[:3]).float()


def test_ties_go_to_the_lower_position():
    keys = torch.ones(1, 1, 20, 4)
    kept = get("knorm", window=2, sinks=1).select(None, keys, keys, 8)
    assert kept[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 18, 19]


def test_protected_keys_stay_row_by_row():
    keys = torch.randn(2, 2, 30, 8)
    kept = get("streaming", window=4, sinks=1).select(None, keys, keys, 16, protected=torch.tensor([10, 3]))
    assert kept[0, 1].tolist() == [*range(10), *range(24, 30)]
    assert kept[1, 0].tolist() == [0, 1, 2, *range(17, 30)]


def test_redundancy_is_the_formula_in_float64():
    """A plain loop over the similarity matrix, past one tile of rows."""
    torch.manual_seed(0)
    keys = torch.randn(1, 1, 300, 4)
    unit = (keys[0, 0] / (keys[0, 0].norm(dim=-1, keepdim=True) + 1e-8)).double()
    similarity = unit @ unit.T
    for row in range(300):
        similarity[row, row] = 0
        above = [column for column in range(300) if similarity[row, column] > 0.5]
        similarity[row, above[-1] if above else 0] = 0
    expected = similarity.mean(dim=0).softmax(-1)
    torch.testing.assert_close(redundancy(keys, 0.5)[0, 0].double(), expected, atol=1e-6, rtol=0)


def test_random_keeps_a_uniform_sample_by_seed_head_and_position():
    keys = torch.zeros(400, 2, 50, 4)
    kept = get("random", window=0).select(None, keys, keys, 10, seeds=torch.arange(400))
    counts = torch.bincount(kept.flatten(), minlength=50).float()
    assert float((counts - 160).abs().max()) < 5 * (800 * 0.2 * 0.8) ** 0.5
    assert not torch.equal(kept[:, 0], kept[:, 1]) and not torch.equal(kept[0], kept[1])


def test_bfloat16_keys_are_scored_in_float32():
    torch.manual_seed(0)
    keys, queries = torch.randn(1, 2, 60, 32).bfloat16(), torch.randn(1, 4, 8, 32).bfloat16()
    for name in POLICIES:
        policy, layers = get(name), torch.tensor([0])
        of_model = {"layers": layers, "statistics": random_statistics(policy, 1, 4, 32)} if policy.uses_statistics else {}
        half = policy.scores(queries, keys, keys, **of_model)
        assert half.dtype == torch.float32
        torch.testing.assert_close(half, policy.scores(queries.float(), keys.float(), keys.float(), **of_model))


# A user's own policy


@dataclass(frozen=True)
class Oldest(Policy):
    """Module level, so that its dotted path can be imported."""

    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        return -torch.arange(keys.shape[2]).float().expand(keys.shape[:3])


@dataclass(frozen=True)
class LooksAtItsNeighbours(Policy):
    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        return (keys - keys.mean(dim=0, keepdim=True)).norm(dim=-1)


@dataclass(frozen=True)
class HidesThatItDraws(Policy):
    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        return torch.sin(seeds[:, None, None] * torch.arange(1, keys.shape[2] + 1)).expand(keys.shape[:3])


@dataclass(frozen=True)
class DividesByZero(Policy):
    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        return keys.norm(dim=-1) * 0 / 0


def test_own_policy_by_dotted_path():
    check_policy(f"{__name__}:Oldest", window=4)
    check_policy(Oldest, window=4)
    keys = torch.randn(1, 1, 20, 4)
    assert get(f"{__name__}.Oldest", window=2).select(None, keys, keys, 6)[0, 0].tolist() == [0, 1, 2, 3, 18, 19]


def test_own_policy_by_entry_point(tmp_path, monkeypatch):
    """A real installed distribution, as importlib sees one."""
    (tmp_path / "newest_policy.py").write_text(
        Path(__file__).read_text().split("# A user's own policy")[0].split("EXAMPLE")[0] + OWN
    )
    info = tmp_path / "newest_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: newest_policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sparse_rl.policies]\nnewest = newest_policy:Newest\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_policy("newest", window=4)


OWN = """
@dataclass(frozen=True)
class Newest(Policy):
    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        return torch.arange(keys.shape[2]).float().expand(keys.shape[:3])
"""


@dataclass(frozen=True)
class HidesThatItReadsQueries(Policy):
    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        return queries.mean() + keys.norm(dim=-1)


def test_the_check_gives_queries_only_where_they_were_asked_for():
    with pytest.raises(AttributeError):
        check_policy(HidesThatItReadsQueries(window=4))


@pytest.mark.parametrize("name", ["collections:OrderedDict", "fractions:Fraction", "time:time"])
def test_what_is_no_policy_is_refused(name):
    with pytest.raises(UserError, match="derive it from sparse_rl.kv.policies.Policy"):
        get(name, **({} if name == "time:time" else {"window": 4}))


@dataclass(frozen=True)
class KeepsAll(Full):
    """A dense cache under another name."""


def test_an_own_policy_that_never_evicts_is_refused():
    """Tables would name a budget that it does not have, and plans would size its memory by that budget."""
    told = f"Policy {__name__}:KeepsAll never evicts (evicts = False), so kv.budget has no effect: set kv.policy = full."
    with pytest.raises(UserError, match=f"^{re.escape(told)}$"):
        from_settings(KV(policy=f"{__name__}:KeepsAll"))
    with pytest.raises(AssertionError, match="never evicts"):
        check_policy(KeepsAll)
    assert not from_settings(KV(policy="full")).evicts


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (LooksAtItsNeighbours(window=4), "The selection of a row depends on the other rows of the batch."),
        (HidesThatItDraws(window=4), "set uses_seeds = True"),
        (DividesByZero(window=4), "Scores contain NaN"),
    ],
)
def test_the_check_finds_what_would_break_a_run(policy, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_policy(policy)


def test_scores_of_another_shape_name_the_policy_and_both_shapes():
    @dataclass(frozen=True)
    class SumOfHeads(Policy):
        def scores(self, queries, keys, values, *, seeds=None, positions=None):
            return values.norm(dim=-1).sum(1)

    keys = torch.randn(2, 3, 40, 8)
    with pytest.raises(UserError, match=re.escape("SumOfHeads.scores returned shape [2, 40] for keys of shape [2, 3, 40, 8]")):
        SumOfHeads(window=4).select(None, keys, keys, 16)


def test_the_example_of_an_own_policy_runs(capsys):
    assert len(EXAMPLE.read_text().splitlines()) <= 40
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert re.search(r"^held at most \d+ of \d+ tokens$", capsys.readouterr().out, re.MULTILINE)


def test_unknown_names_and_options_are_refused():
    with pytest.raises(UserError, match="did you mean 'streaming'"):
        get("steaming")
    with pytest.raises(UserError, match="has no option 'windw'"):
        get("rkv", windw=4)


@pytest.mark.parametrize("options", [{"window": -1}, {"sinks": -1}])
def test_what_stays_is_not_a_negative_number(options):
    with pytest.raises(ValueError, match="must not be negative"):
        Policy(**options)
    assert Policy(window=0, sinks=0).sinks == 0


def test_scores_of_ones_own_see_tensors_and_values():
    class Louder(RKV):
        def scores(self, queries, keys, values, *, seeds=None, positions=None):
            return values.norm(dim=-1)

    assert not RKV.uses_values and RKV.reads_rows
    assert Louder.uses_values and not Louder.reads_rows


def test_a_subclass_that_selects_by_itself_sees_the_prompt():
    class Far(Streaming):
        def select(self, *args, **options):
            return super().select(*args, **options)

    assert not Streaming.compares_keys and Streaming.reads_rows
    assert Far.compares_keys and not Far.reads_rows


def test_a_policy_after_its_prompt_keeps_its_own_attributes():
    """A policy need not have an `__init__` of its fields alone."""

    class Signed(Streaming):
        def __init__(self, *, sign):
            super().__init__(window=2, sinks=4)
            object.__setattr__(self, "sign", sign)

    policy = Signed(sign=-1.0)
    assert (policy.after(3).sinks, policy.after(9).sinks, policy.after(3).sign, policy.sinks) == (1, 0, -1.0, 4)
