"""Bounded: memory is what was set, counted in storage and not taken from a counter."""

import gc
import weakref

import pytest
import torch

from sparse_rl import KV, NEVER, Engine, Sampling, replay
from sparse_rl.kv import cache as cache_module
from sparse_rl.kv.cache import SlotCache
from sparse_rl.kv.policies import get
from sparse_rl.kv.shape import CacheShape

BUDGET, INTERVAL = 64, 16


def live_bytes():
    """Of every distinct tensor storage that Python can reach."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def test_memory_is_bounded_however_long_the_rollout(tiny):
    """Two rollouts of 300 tokens: K and V are exactly the capacity's bytes, and nothing else grows beside them."""
    engine = Engine(tiny, KV(policy="rkv", budget=BUDGET, interval=INTERVAL, protect_prompt=False), slots=2)
    cache, shape = engine.cache, engine.limits.shape
    expected = shape.layers * 2 * shape.kv_heads * (BUDGET + INTERVAL) * shape.head_dim * 4
    assert cache.keys_LSHCD.untyped_storage().nbytes() == expected
    assert cache.values_LSHCD.untyped_storage().nbytes() == expected
    storage = (cache.keys_LSHCD.data_ptr(), cache.values_LSHCD.data_ptr())
    held, live = [], []

    def look(progress):
        if len(held) % 25 == 0:
            live.append(live_bytes())
        held.append(int(cache.lengths_S.max()))

    rollouts = engine.generate(
        [[4, 20, 21, 22], list(range(10, 110))], sampling=Sampling(max_tokens=300, stop=()), progress=look
    )
    assert [len(rollout.response) for rollout in rollouts] == [300, 300]
    assert (engine.cache.keys_LSHCD.data_ptr(), engine.cache.values_LSHCD.data_ptr()) == storage
    assert max(held) <= BUDGET + INTERVAL and max(rollout.kv_peak for rollout in rollouts) == BUDGET + INTERVAL
    # What grows is the record of evictions on the host: positions of 4 bytes for each evicted key, at most.
    record = 2 * shape.layers * shape.kv_heads * 400 * 4
    assert max(live) - live[0] <= record + 2**14
    assert engine.stats.peak_kv_bytes == 2 * expected


def test_no_layer_or_head_ever_sees_more_than_the_capacity(tiny):
    """From the trace alone: at every position, count the keys each layer and head could attend to."""
    engine = Engine(tiny, KV(policy="snapkv", budget=BUDGET, interval=INTERVAL, protect_prompt=False), slots=1)
    (rollout,) = engine.generate([list(range(10, 110))], sampling=Sampling(max_tokens=300, stop=()))
    evicted_at = rollout.evicted_at.long()
    times = torch.arange(rollout.evicted_at.shape[-1])
    for query in range(len(rollout.prompt), len(times) - 1):
        seen = ((times <= query) & (query < evicted_at)).sum(dim=-1)
        assert int(seen.max()) == int(seen.min()) <= BUDGET + INTERVAL
    assert bool((rollout.evicted_at != NEVER).any())


def test_record_takes_one_byte_a_key_and_two_when_long(model):
    engine = Engine(model, KV(policy="streaming", budget=16, interval=1, window=4, sinks=2, protect_prompt=False), slots=1)
    for tokens, dtype in ((200, torch.uint8), (300, torch.int16)):
        rollouts = engine.generate([[5, 6, 7]], sampling=Sampling(max_tokens=tokens, stop=()))
        assert rollouts[0].trace.codes_LHT.dtype == dtype
        assert float((replay(model, rollouts, "sparse")[0].detach() - rollouts[0].logprobs).abs().max()) < 1e-4


@pytest.mark.parametrize(("dtype", "dim", "budget", "interval"), [(torch.float32, 32, 64, 16), (torch.bfloat16, 64, 256, 64)])
def test_compaction_scratch_is_a_small_share_of_the_cache(dtype, dim, budget, interval, monkeypatch):
    """Every storage that is alive beside the cache while R-KV compacts all slots, summed at its peak."""
    monkeypatch.setattr(cache_module, "SCRATCH_FLOOR_BYTES", 0)  # as if this small cache were a large one
    shape = CacheShape(layers=12, q_heads=4, kv_heads=2, head_dim=dim, dtype=dtype, device=torch.device("cpu"))
    cache = SlotCache(shape, slots=16, capacity=budget + interval, ring=8)
    cache.keys_LSHCD.normal_()
    cache.positions_LSHC[:] = torch.arange(budget + interval, dtype=torch.int32)
    alive, peak = {}, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal peak
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    alive[id(tensor)] = (storage.data_ptr(), storage.nbytes())
                    weakref.finalize(tensor, alive.pop, id(tensor), None)
            peak = max(peak, sum(dict(alive.values()).values()))
            return out

    tensors = (cache.keys_LSHCD, cache.values_LSHCD, cache.positions_LSHC, cache.queries_LSQWD, cache.lengths_S)
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    slots = list(range(16))
    with Watch():
        dropped = cache.compact(
            slots, budget + interval, budget, get("rkv", window=8, sinks=4), ends=[budget + interval] * 16, seeds=slots
        )
    assert peak - dropped.nbytes < 0.06 * cache.kv_bytes
