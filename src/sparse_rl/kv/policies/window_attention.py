"""What the window's queries look at: the importance that R-KV and SnapKV share."""

# B rows, Hq query heads, H kv heads, G query heads of a kv head, W queries of the window, T cached tokens

import torch
import torch.nn.functional as F
from torch import Tensor


def window_logits(queries_BQWD: Tensor, keys_BHTD: Tensor) -> Tensor:
    """QK^T / sqrt(D) as [B, H, G, W, T] in float32; query head h belongs to kv head h // G."""
    rows, q_heads, window, dim = queries_BQWD.shape
    heads = keys_BHTD.shape[1]
    queries_BHGWD = queries_BQWD.float().view(rows, heads, q_heads // heads, window, dim)
    return queries_BHGWD @ keys_BHTD.float()[:, :, None].transpose(-1, -2) / dim**0.5


def decode_importance(queries_BQWD: Tensor, keys_BHTD: Tensor) -> Tensor:
    """R-KV's attention score before pooling, [B, H, T - W].

    Maximum of the logits over the group, softmax over the keys before the window, mean over the window's queries.
    """
    window = queries_BQWD.shape[2]
    logits_BHWn = window_logits(queries_BQWD, keys_BHTD[:, :, : keys_BHTD.shape[2] - window]).amax(dim=2)
    return logits_BHWn.softmax(dim=-1).mean(dim=-2)


def check_kernel(kernel: int) -> None:
    if not isinstance(kernel, int) or kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel = {kernel!r} must be an odd number of tokens, such as 7.")


def pool(scores_BHn: Tensor, kernel: int, kind: str) -> Tensor:
    """Max or average pooling along time, stride 1, same length."""
    pooling = F.max_pool1d if kind == "max" else F.avg_pool1d
    rows, heads, total = scores_BHn.shape
    flat = scores_BHn.reshape(rows * heads, 1, total)
    return pooling(flat, kernel_size=kernel, stride=1, padding=kernel // 2).view(rows, heads, total)


def causal_window_logits(queries_BQWD: Tensor, keys_BHTD: Tensor) -> Tensor:
    """`window_logits` over all T keys, where a query of the window does not see the keys after it."""
    logits_BHGWT = window_logits(queries_BQWD, keys_BHTD)
    window, total = logits_BHGWT.shape[-2:]
    key_T = torch.arange(total, device=keys_BHTD.device)
    query_W = torch.arange(total - window, total, device=keys_BHTD.device)
    return logits_BHGWT.masked_fill(key_T > query_W[:, None], -torch.inf)
