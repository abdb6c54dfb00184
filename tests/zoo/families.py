"""Tiny models of many families of the transformers library, from configurations, without downloads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Built, Case, case

CASES: list[Case] = []

Inputs = dict[str, Tensor]

VOCABULARY = 11
SAMPLES = (3, 2)

# names of sizes that most language models share
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 1, "head_dim": 4}


def built(architecture: str, settings: dict[str, Any], attention: str | None) -> nn.Module:
    import transformers

    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**settings)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    options = {} if attention is None else {"attn_implementation": attention}
    model = model_class._from_config(config, **options)
    # away from equal scales, zero biases and the tiny weights of the initialization
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.double()


def settle_batch_norms(model: nn.Module, batch: Inputs) -> None:
    """Set running statistics to those of a batch; with means of zero and variances of one, deep signals vanish."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            model(**batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def text(samples: int, positions: int = 5) -> Inputs:
    """Token ids, padded on the right: samples have unequal lengths."""
    ids = torch.randint(3, VOCABULARY, (samples, positions))
    mask = torch.ones(samples, positions, dtype=torch.long)
    mask[1, positions - 2 :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def unpadded_text(samples: int, positions: int = 5) -> Inputs:
    return {"input_ids": torch.randint(3, VOCABULARY, (samples, positions))}


def images(samples: int, size: int = 8) -> Inputs:
    return {"pixel_values": torch.randn(samples, 3, size, size, dtype=torch.float64)}


def large_images(samples: int) -> Inputs:
    return images(samples, 16)


def waveform(samples: int) -> Inputs:
    return {"input_values": torch.randn(samples, 40, dtype=torch.float64)}


def spectrogram(samples: int) -> Inputs:
    return {"input_features": torch.randn(samples, 5, 12, dtype=torch.float64)}


def last_token(output: Any, x: Inputs) -> Tensor:
    """Three logits, or hidden units, of the last token that is not padding."""
    values = output.logits if hasattr(output, "logits") else output.last_hidden_state
    mask = x.get("attention_mask", torch.ones_like(x["input_ids"]))
    return values[torch.arange(len(mask)), mask.sum(1) - 1, :3]


def first_token(output: Any) -> Tensor:
    return output.last_hidden_state[:, 0, :3]


def pooled(output: Any) -> Tensor:
    return output.pooler_output[:, :3]


def mean_state(output: Any) -> Tensor:
    return output.last_hidden_state.flatten(2).mean(1)[:, :3]


def family(
    name: str,
    architecture: str,
    settings: dict[str, Any],
    inputs: Callable[[int], Inputs] = text,
    readout: Callable[..., Tensor] | None = last_token,
    attention: str | None = None,
    tolerance: float = 1e-10,
    why: str = "",
    run_before: bool = False,
) -> None:
    """`run_before`: its first pass in eval mode rewrites weights, and is refused."""

    def make() -> Built:
        model = built(architecture, settings, attention)
        settle_batch_norms(model, inputs(8))
        if run_before:
            with torch.no_grad():
                model.eval()(**inputs(8))
        return model, inputs(SAMPLES[0]), inputs(SAMPLES[1]), readout

    make.__name__ = name
    make.__doc__ = why or architecture
    case(CASES, tolerance=tolerance, flags=("transformers",), dtype=torch.float32)(make)


GPT2 = {**SMALL, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
family("gpt2", "GPT2LMHeadModel", GPT2, attention="sdpa")
family("gpt2_eager", "GPT2LMHeadModel", GPT2, attention="eager")
family("llama", "LlamaForCausalLM", GROUPED, attention="sdpa", tolerance=1e-6)
family("llama_eager", "LlamaForCausalLM", GROUPED, attention="eager", tolerance=1e-6)
family("qwen2", "Qwen2ForCausalLM", {**GROUPED, "tie_word_embeddings": True}, tolerance=1e-6)
family("qwen3", "Qwen3ForCausalLM", GROUPED, tolerance=1e-6)
family("gemma2", "Gemma2ForCausalLM", {**GROUPED, "sliding_window": 3}, attention="eager", tolerance=1e-6)
family("gemma3", "Gemma3ForCausalLM", {**GROUPED, "sliding_window": 3}, attention="sdpa", tolerance=1e-6)
family("mistral", "MistralForCausalLM", {**GROUPED, "sliding_window": 3}, tolerance=1e-6)
family("phi", "PhiForCausalLM", SMALL)
family("phi3", "Phi3ForCausalLM", GROUPED, tolerance=1e-6)
family("opt", "OPTForCausalLM", {**SMALL, "ffn_dim": 12, "word_embed_proj_dim": 6})
family(
    "bloom", "BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 8, "n_layer": 2, "n_head": 2}, tolerance=1e-6
)
family("gpt_neox", "GPTNeoXForCausalLM", SMALL)
family("gptj", "GPTJForCausalLM", {**GPT2, "rotary_dim": 2}, tolerance=1e-6)
family("gpt_bigcode", "GPTBigCodeForCausalLM", GPT2)
family("falcon", "FalconForCausalLM", SMALL)
family("olmo2", "Olmo2ForCausalLM", GROUPED, tolerance=1e-6)
family("cohere", "CohereForCausalLM", GROUPED, tolerance=1e-6)
family(
    "mixtral",
    "MixtralForCausalLM",
    {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    tolerance=1e-6,
)
family("mamba", "MambaForCausalLM", {**SMALL, "state_size": 3, "time_step_rank": 2}, tolerance=1e-6)
RWKV = {**SMALL, "attention_hidden_size": 8, "context_length": 16}
family("rwkv", "RwkvForCausalLM", RWKV, unpadded_text, run_before=True)
family("bert", "BertModel", SMALL, readout=first_token, attention="sdpa")
family("bert_eager", "BertModel", SMALL, readout=first_token, attention="eager")
family("roberta", "RobertaModel", SMALL, readout=first_token)
family(
    "distilbert",
    "DistilBertModel",
    {**SMALL, "dim": 8, "hidden_dim": 12, "n_layers": 2, "n_heads": 2},
    readout=first_token,
)
family("albert", "AlbertModel", {**SMALL, "embedding_size": 6}, readout=first_token)
family("electra", "ElectraModel", {**SMALL, "embedding_size": 6}, readout=first_token)
family(
    "deberta_v2",
    "DebertaV2Model",
    {**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    readout=first_token,
)
family(
    "modernbert",
    "ModernBertModel",
    {**SMALL, "global_attn_every_n_layers": 2, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    readout=first_token,
)
family(
    "xlnet",
    "XLNetModel",
    {"vocab_size": VOCABULARY, "d_model": 8, "n_layer": 2, "n_head": 2, "d_inner": 12},
    readout=first_token,
)
family("fnet", "FNetModel", SMALL, unpadded_text, readout=first_token)
family(
    "t5_encoder",
    "T5EncoderModel",
    {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2},
    readout=first_token,
    tolerance=1e-6,
)

VISION = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
family("vit", "ViTModel", VISION, images, first_token, attention="sdpa")
family("vit_eager", "ViTModel", VISION, images, first_token, attention="eager", tolerance=1e-6)
family("deit", "DeiTForImageClassification", {**VISION, "num_labels": 2}, images, None)
family(
    "beit", "BeitForImageClassification", {**VISION, "num_labels": 2, "use_relative_position_bias": True}, images, None
)
family("dinov2", "Dinov2Model", {**VISION, "mlp_ratio": 2}, images, first_token)
family("clip_vision", "CLIPVisionModel", VISION, images, pooled)
family("clip_text", "CLIPTextModel", SMALL, text, pooled)
family("siglip_vision", "SiglipVisionModel", VISION, images, pooled)
family(
    "swin",
    "SwinForImageClassification",
    {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 4,
        "depths": [2, 1],
        "num_heads": [1, 2],
        "window_size": 4,
        "num_labels": 2,
    },
    large_images,
    None,
)
family(
    "convnext",
    "ConvNextForImageClassification",
    {"hidden_sizes": [4, 6], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "num_labels": 2},
    images,
    None,
)
family(
    "resnet",
    "ResNetForImageClassification",
    {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "layer_type": "basic", "num_labels": 2},
    large_images,
    None,
)
family(
    "mobilenet_v2",
    "MobileNetV2ForImageClassification",
    {"depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4, "image_size": 16, "num_labels": 2},
    large_images,
    None,
)
family(
    "efficientnet",
    "EfficientNetForImageClassification",
    {
        "width_coefficient": 0.05,
        "depth_coefficient": 0.5,
        "image_size": 16,
        "in_channels": [32, 16],
        "out_channels": [16, 24],
        "kernel_sizes": [3, 5],
        "strides": [1, 2],
        "num_block_repeats": [1, 2],
        "expand_ratios": [1, 3],
        "depthwise_padding": [],
        "hidden_dim": 64,
        "depth_divisor": 4,
        "num_labels": 2,
    },
    large_images,
    None,
)
family(
    "segformer",
    "SegformerForImageClassification",
    {
        "hidden_sizes": [4, 6],
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "num_labels": 2,
    },
    images,
    None,
)
family(
    "wav2vec2",
    "Wav2Vec2Model",
    {
        **SMALL,
        "conv_dim": [4, 6],
        "conv_kernel": [4, 3],
        "conv_stride": [3, 2],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    },
    waveform,
    mean_state,
)
family(
    "whisper_encoder",
    "WhisperForAudioClassification",
    {
        "d_model": 8,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 12,
        "num_mel_bins": 5,
        "max_source_positions": 6,
        "classifier_proj_size": 6,
        "num_labels": 2,
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    spectrogram,
    None,
)
family(
    "audio_spectrogram_transformer",
    "ASTModel",
    {**SMALL, "patch_size": 4, "frequency_stride": 2, "time_stride": 3, "max_length": 10, "num_mel_bins": 6},
    lambda samples: {"input_values": torch.randn(samples, 10, 6, dtype=torch.float64)},
    pooled,
)
family(
    "mamba2",
    "Mamba2ForCausalLM",
    {**SMALL, "state_size": 3, "num_heads": 4, "head_dim": 4, "n_groups": 2, "expand": 2, "chunk_size": 2},
    tolerance=1e-6,
)
family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {
        **GROUPED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 5,
        "experts_implementation": "batched_mm",
    },
    tolerance=1e-6,
)
family(
    "bart_decoder",
    "BartForCausalLM",
    {
        "vocab_size": VOCABULARY,
        "d_model": 8,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 12,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
    },
)
