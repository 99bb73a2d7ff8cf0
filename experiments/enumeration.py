"""How far each correction's expected gradient is from the dense policy gradient, by enumerating every sequence.

Policies are softmax tables with a row of logits for every prefix. The sparse one is the dense one with noise on its
logits, or with rows forgotten. No sampling: all expectations are sums over every sequence.

python experiments/enumeration.py --out benchmarks/results/enumeration.json
"""

# S sequences, all V^T of them, T tokens, V vocabulary, N prefixes

import argparse
import datetime
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, quantiles

import torch

from sparse_rl.config import PRESETS
from sparse_rl.learner.correction import correct
from sparse_rl.learner.losses import LOSSES, LossInputs

VOCABULARY, LENGTH, SAMPLES = 3, 4, 256
NOISE = {"slight": 0.1, "moderate": 0.5, "strong": 1.0}  # standard deviation, added to every logit of the sampler
FORGOTTEN, SURE = 0.2, 8.0  # "lost": share of prefixes where the sampler is uniform, and scale of the dense logits there
CASES = [*NOISE, "lost"]
LENGTHS = (1, 2, 4, 8)  # of the sequence product's effective share
PRODUCT = "sequence product"


class Tree:
    """All sequences of a length, and where the row of logits of each of their prefixes is."""

    def __init__(self, vocabulary: int, length: int):
        self.tokens_ST = torch.cartesian_prod(*[torch.arange(vocabulary)] * length).view(-1, length)
        place_T = vocabulary ** torch.arange(length)
        number_ST = torch.stack([(self.tokens_ST[:, :t] * place_T[:t]).sum(1) for t in range(length)], dim=1)
        first_T = (vocabulary ** torch.arange(length) - 1) // (vocabulary - 1)
        self.prefix_ST = number_ST + first_T
        self.prefixes = int((vocabulary**length - 1) // (vocabulary - 1))

    def logprobs(self, logits_NV):
        return logits_NV.log_softmax(-1)[self.prefix_ST, self.tokens_ST]


def instance(tree, case, generator):
    """(dense logits, sparse logits): noise everywhere, or a key lost where the dense policy is sure."""
    dense_NV, noise_NV = torch.randn(2, tree.prefixes, VOCABULARY, dtype=torch.float64, generator=generator)
    if case in NOISE:
        return dense_NV, dense_NV + NOISE[case] * noise_NV
    lost_N1 = torch.rand(tree.prefixes, 1, generator=generator) < FORGOTTEN
    dense_NV = dense_NV * torch.where(lost_N1, SURE, 1.0)
    return dense_NV, dense_NV.masked_fill(lost_N1, 0)


def expectation(tree, logits_NV, weights_ST, chances_S, divisors_S, advantages_S):
    """(E grad, total variance of grad for one sample) of GRPO at theta = theta_old, o drawn with `chances`."""
    logits_NV = logits_NV.clone().requires_grad_()
    logprobs_ST = tree.logprobs(logits_NV)
    shares_ST = (chances_S / divisors_S)[:, None].expand_as(logprobs_ST)
    every_ST = torch.ones_like(logprobs_ST, dtype=torch.bool)
    inputs = LossInputs(logprobs_ST, logprobs_ST.detach(), advantages_S, weights_ST, every_ST, shares_ST, 0.2, 0.2)
    loss, _ = LOSSES["grpo"].loss(inputs)
    (gradient,) = torch.autograd.grad(-loss, logits_NV)
    # the tokens of a sequence have different prefixes, so their gradients (one-hot - p) are orthogonal
    p_NV = logits_NV.detach().softmax(-1)
    square_ST = 1 - 2 * logprobs_ST.detach().exp() + (p_NV**2).sum(-1)[tree.prefix_ST]
    scale_ST = weights_ST * (advantages_S / divisors_S)[:, None]
    second_moment = (chances_S * (scale_ST**2 * square_ST).sum(1)).sum()
    return gradient, (second_moment - (gradient**2).sum()).item()


def measure(tree, dense_NV, sparse_NV, rewards_S):
    """Per correction: distance, cosine, share of tokens kept, variance, error of an update; rewards are per sequence."""
    dense_ST, sparse_ST = tree.logprobs(dense_NV), tree.logprobs(sparse_NV)
    log_ratio_ST, length = dense_ST - sparse_ST, dense_ST.shape[1]
    every_ST = torch.ones_like(dense_ST, dtype=torch.bool)
    dense_S, sparse_S = dense_ST.sum(1).exp(), sparse_ST.sum(1).exp()
    centred_S = rewards_S - (sparse_S * rewards_S).sum()  # against the mean of a large group, which the sampler draws
    advantages_S = centred_S / (sparse_S * centred_S**2).sum().sqrt()
    full_S, ones_ST = torch.full_like(sparse_S, length), torch.ones_like(dense_ST)
    truth, dense_variance = expectation(tree, dense_NV, ones_ST, dense_S, full_S, advantages_S)
    rows = {}
    for name, point in {**PRESETS, PRODUCT: None}.items():
        if point is None:
            weights_ST, divisors_S, kept_S = log_ratio_ST.sum(1).exp()[:, None].expand_as(dense_ST), full_S, full_S
        else:
            out = correct(log_ratio_ST, every_ST, replace(point, normalize=False))
            weights_ST, divisors_S, kept_S = out.weights, out.divisors, out.keep.sum(1)
            if point.normalize:  # m of an endless update: by the chance of each sequence, not one each
                capped_ST = correct(log_ratio_ST, every_ST, "none", weight=point.weight, cap=point.cap).weights
                weights_ST = weights_ST / (sparse_S * capped_ST.mean(1)).sum()
        gradient, variance = expectation(tree, dense_NV, weights_ST, sparse_S, divisors_S, advantages_S)
        bias, norm = (gradient - truth).norm().item(), truth.norm().item()
        rows[name] = {
            "distance": bias / norm,
            "cosine": ((gradient * truth).sum() / (gradient.norm() * norm).clamp(min=1e-300)).item(),
            "kept": ((sparse_S * kept_S).sum() / length).item(),
            "variance": variance / dense_variance,
            "error": (bias**2 + variance / SAMPLES) ** 0.5 / norm,
        }
    rows["dense"] = {"error": (dense_variance / SAMPLES) ** 0.5 / truth.norm().item()}
    return rows


def mismatch(tree, dense_NV, sparse_NV):
    """(KL(sparse || dense) per token, the sequence product's effective share of samples 1/E[w^2])."""
    dense_ST, sparse_ST = tree.logprobs(dense_NV), tree.logprobs(sparse_NV)
    dense_S, sparse_S = dense_ST.sum(1).exp(), sparse_ST.sum(1).exp()
    return (sparse_S * (sparse_ST - dense_ST).mean(1)).sum().item(), 1 / (dense_S**2 / sparse_S).sum().item()


def spread(values):
    low, median, high = quantiles(values, n=4)
    return {"median": median, "q25": low, "q75": high, "mean": mean(values)}


def experiment(instances, seed):
    trees, generator = {length: Tree(VOCABULARY, length) for length in LENGTHS}, torch.Generator().manual_seed(seed)
    tree, rows, far = trees[LENGTH], [], []
    for case in CASES:
        runs = []
        for _ in range(instances):
            rewards_S = torch.randint(2, (len(tree.tokens_ST),), generator=generator).double()
            runs.append(measure(tree, *instance(tree, case, generator), rewards_S))
        for name in runs[0]:
            rows.append(
                {"case": case, "correction": name} | {k: spread([run[name][k] for run in runs]) for k in runs[0][name]}
            )
        for length, other in trees.items():
            kl, share = zip(*[mismatch(other, *instance(other, case, generator)) for _ in range(instances)], strict=True)
            far.append({"case": case, "length": length, "kl": spread(kl), "product_ess": spread(share)})
    return {"rows": rows, "mismatch": far}


def _small(value):
    return f"{value:.3f}" if value > 1e-3 else "< 1e-9" if value < 1e-9 else f"{value:.0e}"


def tables(record):
    """Build the Markdown tables of experiments/RESULTS.md."""
    by = {(row["case"], row["correction"]): row for row in record["rows"]}
    far = {(row["case"], row["length"]): row for row in record["mismatch"]}
    head = ["| correction | " + " | ".join(CASES) + " |", "|---" * (len(CASES) + 1) + "|"]
    number = "{median:.3f} [{q25:.3f}, {q75:.3f}]".format_map
    lines = ["Distance between the expected and the true gradient, divided by the norm of the true gradient:", "", *head]
    for name in [*PRESETS, PRODUCT]:
        lines.append(f"| `{name}` | " + " | ".join(number(by[case, name]["distance"]) for case in CASES) + " |")
    lines += ["", "Cosine similarity with the true gradient; the share of kept tokens is in parentheses:", "", *head]
    for name in [*PRESETS, PRODUCT]:
        cells = [f"{by[c, name]['cosine']['median']:.3f} ({100 * by[c, name]['kept']['median']:.0f} %)" for c in CASES]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += ["", f"Root mean square error of one update of {SAMPLES} samples, including bias and variance:", "", *head]
    for name in ["dense", *PRESETS, PRODUCT]:
        label = "dense sampling" if name == "dense" else f"`{name}`"
        lines.append(f"| {label} | " + " | ".join(f"{by[case, name]['error']['median']:.3f}" for case in CASES) + " |")
    lines += ["", "KL per token, and the relative effective sample size of the sequence product, by length:", ""]
    lines += ["| | KL per token | 1 token | 2 | 4 | 8 | 1,000, extrapolated |", "|---" * 7 + "|"]
    for case in CASES:
        shares = [far[case, length]["product_ess"]["median"] for length in LENGTHS]
        cells = [f"{far[case, LENGTH]['kl']['median']:.4f}", *(f"{x:.3f}" for x in shares), _small(shares[-1] ** (1000 / 8))]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    record = {
        "experiment": "enumeration",
        "date": datetime.date.today().isoformat(),
        "device": "cpu",
        "dtype": "float64",
        "versions": {"torch": torch.__version__},
        "seed": args.seed,
        "instances": args.instances,
        "vocabulary": VOCABULARY,
        "length": LENGTH,
        "samples": SAMPLES,
        "cases": {"noise": NOISE, "lost": {"share": FORGOTTEN, "scale": SURE}},
        **experiment(args.instances, args.seed),
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(tables(record))


if __name__ == "__main__":
    main()
