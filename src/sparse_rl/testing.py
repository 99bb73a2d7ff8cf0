"""Check a custom policy before training with it: `check_policy("my_package.my_module:MyPolicy")`."""

from typing import Any

import torch
from torch import Tensor

from .kv.policies import POLICIES, Policy, get
from .kv.rotary import Rotary

SHAPES = [(4, 4, 16), (8, 2, 32), (6, 1, 24)]  # (query heads, kv heads, head dimension) of MHA, GQA and MQA

LAYERS = torch.tensor([0, 1, 0])
"""Layers of the three rows, for policies that use statistics."""


def check_policy(policy: str | type[Policy] | Policy, budget: int = 24, **options) -> None:
    """Raise AssertionError if the policy would break the cache, replay or reproducibility."""
    if isinstance(policy, str):
        policy = get(policy, **options)
    elif isinstance(policy, type):
        policy = policy(**options)
    assert policy.evicts or type(policy) is POLICIES["full"], "The policy never evicts (evicts = False): set kv.policy = full."
    assert policy.window + policy.sinks < budget, (
        f"budget = {budget} is too small: it must exceed the policy's window + sinks."
    )
    for dtype in (torch.float32, torch.bfloat16):
        for q_heads, kv_heads, dim in SHAPES:
            generator = torch.Generator().manual_seed(0)
            total = budget + 13

            def random(*size: int, generator=generator, dtype=dtype) -> Tensor:
                return torch.randn(*size, generator=generator).to(dtype)

            queries = random(3, q_heads, max(policy.window, 1), dim) if policy.uses_queries else None
            keys, some_values = random(3, kv_heads, total, dim), random(3, kv_heads, total, dim)
            values = some_values if policy.uses_values else None
            seeds = torch.tensor([5, 6, 7])
            positions = (torch.arange(total) * 2).expand(3, kv_heads, total)
            statistics = random_statistics(policy, 2, q_heads, dim)

            def select(rows: slice, seeds: Tensor, q=queries, k=keys, v=values, p=positions, more=statistics) -> Tensor:
                window, of_rows = (None if each is None else each[rows] for each in (q, v))
                model: dict[str, Any] = {"layers": LAYERS[rows], "statistics": more} if policy.uses_statistics else {}
                return policy.select(window, k[rows], of_rows, budget, seeds=seeds[rows], positions=p[rows], **model)

            if type(policy).scores is not Policy.scores:
                more = {"layers": LAYERS, "statistics": statistics} if policy.uses_statistics else {}
                found = policy.scores(queries, keys, values, seeds=seeds, positions=positions, **more)
                assert not found.isnan().any(), (
                    "Scores contain NaN, which has no rank: avoid 0 / 0 and similar, or use nan_to_num."
                )
            kept = select(slice(None), seeds)
            _check_indices(policy, kept, (3, kv_heads, budget), total)
            assert torch.equal(kept, select(slice(None), seeds)), "Two calls with the same input select different keys."
            for row in range(3):
                alone = select(slice(row, row + 1), seeds)
                assert torch.equal(alone[0], kept[row]), "The selection of a row depends on the other rows of the batch."
            if not policy.uses_seeds:
                assert torch.equal(kept, select(slice(None), seeds + 1)), (
                    "The selection depends on seeds: set uses_seeds = True."
                )
            few_values = None if values is None else values[:, :, :budget]
            few = policy.select(queries, keys[:, :, :budget], few_values, budget, seeds=seeds)
            assert torch.equal(few, torch.arange(budget).expand_as(few)), (
                "If there are no more keys than the budget, the policy must keep all of them."
            )


def random_statistics(policy: Policy, layers: int, q_heads: int, dim: int) -> dict[str, Tensor]:
    """Return statistics that the policy's collector gathers from random queries, keys and values; empty if it uses none."""
    if not policy.uses_statistics:
        return {}
    collector = policy.collector(Rotary.half_split(layers, dim))
    generator = torch.Generator().manual_seed(1)
    for layer in range(layers):
        queries = torch.randn(1, q_heads, 50, dim, generator=generator) + 1
        collector.add(layer, queries, queries, queries, torch.arange(50)[None])
    found = collector.statistics()
    missing = set(policy.uses_statistics) - found.keys()
    assert not missing, f"The collector does not gather the statistics {', '.join(sorted(missing))}."
    return found


def _check_indices(policy: Policy, kept: Tensor, shape: tuple[int, ...], total: int) -> None:
    if not policy.evicts:
        assert kept.shape[-1] == total, "A policy that does not evict must keep every key."
        return
    assert kept.dtype == torch.int64 and kept.shape == shape, (
        f"select must return int64 {shape}, not {kept.dtype} {tuple(kept.shape)}."
    )
    assert int(kept.min()) >= 0 and int(kept.max()) < total, "An index is out of range of the keys."
    assert bool((kept.diff(dim=-1) > 0).all()), "Indices must be strictly ascending: the cache is in time order."
    forced = [*range(policy.sinks), *range(total - policy.window, total)]
    for index in forced:
        assert bool((kept == index).any(dim=-1).all()), f"Key {index} of {total} is a sink or in the window and must be kept."
