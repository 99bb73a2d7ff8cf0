"""A KV policy of your own: keep the keys whose values are largest. Run it: python examples/own_policy.py"""

from dataclasses import dataclass

from sparse_rl import KV, Engine, Sampling, load_model, load_tokenizer
from sparse_rl.kv.policies import Policy
from sparse_rl.testing import check_policy


@dataclass(frozen=True)
class LargeValues(Policy):
    """keys and values are [rows, kv heads, tokens, head dim]. The window and the sinks stay without being asked."""

    power: float = 2.0

    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        return values.float().norm(p=self.power, dim=-1)


if __name__ == "__main__":
    check_policy(LargeValues(power=1.0))
    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    kv = KV(policy="__main__:LargeValues", budget=64, interval=16, options={"power": 1.0})
    engine = Engine(model, kv, slots=4)
    prompt = tokenizer("15:47+85=").input_ids
    rollouts = engine.generate([prompt], samples=4, sampling=Sampling(max_tokens=256))
    print(tokenizer.decode(rollouts[0].response, skip_special_tokens=True))
    print(f"held at most {rollouts[0].kv_peak} of {len(prompt) + len(rollouts[0].response)} tokens")
