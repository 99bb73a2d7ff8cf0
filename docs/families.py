"""Small configurations of the model families in docs/models.md: those that run, and those that are refused."""

from typing import Any

import torch
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    DogeConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    LongcatFlashConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OlmoHybridConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    SmolLM3Config,
    Starcoder2Config,
)

BUDGET, WINDOW = 24, 13
SIZE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
MIXED_TWICE = MIXED | {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8}
GEMMA_4: dict[str, Any] = {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 4}
OF_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
THREE: dict[str, Any] = SIZE | {"num_hidden_layers": 3}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_expand": 1,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}

RUNS: dict[str, PreTrainedConfig] = {
    "Llama": LlamaConfig(**SIZE),
    "Qwen2": Qwen2Config(**SIZE),
    "Qwen2 with windows": Qwen2Config(**SIZE, use_sliding_window=True, max_window_layers=1, sliding_window=WINDOW),
    "Qwen2-MoE": Qwen2MoeConfig(**SIZE, **OF_EXPERTS, shared_expert_intermediate_size=16, decoder_sparse_step=1),
    "Qwen3": Qwen3Config(**SIZE, head_dim=8),
    "Qwen3-MoE": Qwen3MoeConfig(**SIZE, **OF_EXPERTS, head_dim=8, decoder_sparse_step=1),
    "Mistral": MistralConfig(**SIZE, sliding_window=None),
    "Mistral with windows": MistralConfig(**SIZE, sliding_window=WINDOW),
    "Mixtral": MixtralConfig(**SIZE, **LOCAL),
    "Gemma": GemmaConfig(**SIZE, head_dim=8),
    "Gemma 2": Gemma2Config(**SIZE, **MIXED, **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "Gemma 3": Gemma3TextConfig(**SIZE, **MIXED, **GEMMA),
    "Gemma 3n": Gemma3nTextConfig(
        **SIZE | {"num_hidden_layers": 4}, **MIXED_TWICE, **GEMMA_4, head_dim=8, num_kv_shared_layers=2, laurel_rank=4,
        altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4,
    ),
    "Gemma 4": Gemma4TextConfig(
        **SIZE, **MIXED, **GEMMA_4, head_dim=8, global_head_dim=16, attention_k_eq_v=True, num_global_key_value_heads=1,
    ),
    "Gemma 4 with shared keys": Gemma4TextConfig(
        **SIZE | {"num_hidden_layers": 4}, **MIXED_TWICE, **GEMMA_4, head_dim=8, global_head_dim=16, num_kv_shared_layers=2,
    ),
    "OLMo 2": Olmo2Config(**SIZE),
    "OLMo 3": Olmo3Config(**SIZE, **MIXED),
    "OLMoE": OlmoeConfig(**SIZE, num_experts=4, num_experts_per_tok=2),
    "Cohere": CohereConfig(**SIZE, logit_scale=0.25),
    "Cohere 2": Cohere2Config(**SIZE, **MIXED, logit_scale=0.25),
    "gpt-oss": GptOssConfig(**SIZE, **MIXED, **LOCAL, head_dim=8),
    "Phi": PhiConfig(**SIZE),
    "Phi-3": Phi3Config(**SIZE, sliding_window=None),
    "Phi-MoE": PhimoeConfig(**SIZE, **LOCAL, sliding_window=128),
    "SmolLM3": SmolLM3Config(**SIZE),
    "Granite": GraniteConfig(**SIZE, logits_scaling=2.0, residual_multiplier=0.5),
    "GLM-4": Glm4Config(**SIZE, head_dim=8),
    "Arcee": ArceeConfig(**SIZE),
    "StarCoder2": Starcoder2Config(**SIZE, sliding_window=None),
    "Qwen3.5": Qwen3_5TextConfig(**THREE, **DELTA, head_dim=16),
    "Qwen3.5-MoE": Qwen3_5MoeTextConfig(**THREE, **DELTA, **OF_EXPERTS, head_dim=16, shared_expert_intermediate_size=16),
    "Qwen3-Next": Qwen3NextConfig(**THREE, **DELTA, **OF_EXPERTS, head_dim=16, shared_expert_intermediate_size=16),
    "OLMo-Hybrid": OlmoHybridConfig(**THREE, **DELTA),
    "LFM2": Lfm2Config(**THREE, **CONVOLUTIONS),
    "LFM2-MoE": Lfm2MoeConfig(**THREE, **CONVOLUTIONS, **OF_EXPERTS, num_dense_layers=1),
    "Falcon-H1": FalconH1Config(**SIZE, **MAMBA, head_dim=16, mamba_d_ssm=32),
    "Nemotron-H": NemotronHConfig(
        **{name: value for name, value in SIZE.items() if name != "num_hidden_layers"}, head_dim=16,
        layers_block_type=["linear_attention", "mlp", "full_attention"], mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=8,
        n_groups=1, chunk_size=8,
    ),
    "Granite 4": GraniteMoeHybridConfig(
        **THREE, **MAMBA, **LOCAL, layer_types=["mamba", "attention", "mamba"], shared_intermediate_size=16
    ),
    "Bamba": BambaConfig(**THREE, **MAMBA, attn_layer_indices=[1]),
    "GPT-2": GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2),
    "OPT": OPTConfig(
        vocab_size=61, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256,
        word_embed_proj_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip
MLA: dict[str, Any] = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
ROUTED: dict[str, Any] = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
                          "topk_group": 1}  # fmt: skip
HYBRID: dict[str, Any] = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
REFUSED: dict[str, PreTrainedConfig] = {
    "DeepSeek-V3": DeepseekV3Config(
        **SIZE | {"num_key_value_heads": 4}, **MLA, **ROUTED, q_lora_rank=8, first_k_dense_replace=2
    ),
    "Kimi-Linear": KimiLinearConfig(
        **SIZE | {"num_hidden_layers": 4, "num_key_value_heads": 4}, **MLA, **ROUTED, q_lora_rank=None, first_k_dense_replace=4
    ),
    "Longcat-Flash": LongcatFlashConfig(
        **SIZE | {"num_key_value_heads": 4}, **MLA, q_lora_rank=8, n_routed_experts=4, zero_expert_num=1, moe_topk=2,
        ffn_hidden_size=32, expert_ffn_hidden_size=16, num_layers=1, head_dim=8,
    ),
    "Jamba": JambaConfig(
        **SIZE | {"num_hidden_layers": 4}, **HYBRID, attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1
    ),
    "RecurrentGemma": RecurrentGemmaConfig(
        **SIZE | {"num_hidden_layers": 4}, lru_width=32, block_types=["recurrent", "recurrent", "attention"]
    ),
    "Doge": DogeConfig(**SIZE, keep_window_size=8),
    "BLOOM": BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4),
}  # fmt: skip


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a random model whose tokens attend unevenly, so that a wrong mask shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith("sinks"):
                weight.normal_()
            elif weight.dim() > 1:
                weight.mul_(4)
    return model
