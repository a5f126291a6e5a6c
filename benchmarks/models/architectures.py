"""Architectures of transformers, each with a tiny configuration and its inputs: plain data, and the builders of both.

`NAMED` are well-known architectures, and `FURTHER` are others, drawn by name. Modules are made in float64 and in eval
mode, with fresh random weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 40
LENGTH = 6
# Any: tensors and numbers, by the names of arguments.
Inputs = dict[str, Any]


# -- inputs: functions without arguments, which draw from torch's default generator -------------------------------


def ids() -> Inputs:
    """Tokens without padding: 0 to 3 are special in most vocabularies."""
    return {"input_ids": torch.randint(4, VOCABULARY, (2, LENGTH))}


def ids_and_labels() -> Inputs:
    tokens = ids()["input_ids"]
    return {"input_ids": tokens, "labels": tokens}


def ids_of_both() -> Inputs:
    """Tokens of an encoder and of its decoder."""
    return {**ids(), "decoder_input_ids": torch.randint(4, VOCABULARY, (2, LENGTH - 1))}


def images(size: int = 16, channels: int = 3) -> Callable[[], Inputs]:
    return lambda: {"pixel_values": torch.randn(2, channels, size, size, dtype=torch.float64)}


def video(frames: int = 2, size: int = 16) -> Callable[[], Inputs]:
    return lambda: {"pixel_values": torch.randn(2, frames, 3, size, size, dtype=torch.float64)}


def images_and_ids(size: int = 16) -> Callable[[], Inputs]:
    return lambda: {**ids(), **images(size)()}


def sound(samples: int = 64) -> Callable[[], Inputs]:
    return lambda: {"input_values": torch.randn(2, samples, dtype=torch.float64)}


def spectrum(bins: int, frames: int) -> Inputs:
    return {"input_features": torch.randn(2, bins, frames, dtype=torch.float64)}


def whisper() -> Inputs:
    return {**spectrum(4, 20), "decoder_input_ids": torch.randint(4, VOCABULARY, (2, LENGTH))}


def speech_to_text() -> Inputs:
    frames = torch.randn(2, 20, 4, dtype=torch.float64)
    return {"input_features": frames, "decoder_input_ids": torch.randint(4, VOCABULARY, (2, LENGTH))}


def audio_spectrogram() -> Inputs:
    return {"input_values": torch.randn(2, 16, 16, dtype=torch.float64)}


def patches() -> Inputs:
    return {"past_values": torch.randn(2, 16, 2, dtype=torch.float64)}


def series() -> Inputs:
    """The past and the future of a series, with one feature of time."""
    past = torch.randn(2, 14, dtype=torch.float64)
    future = torch.randn(2, 4, dtype=torch.float64)
    return {
        "past_values": past,
        "past_time_features": torch.randn(2, 14, 1, dtype=torch.float64),
        "past_observed_mask": torch.ones(2, 14, dtype=torch.float64),
        "future_values": future,
        "future_time_features": torch.randn(2, 4, 1, dtype=torch.float64),
    }


def perceiver() -> Inputs:
    return {"inputs": torch.randn(2, LENGTH, 8, dtype=torch.float64)}


def decisions() -> Inputs:
    return {
        "states": torch.randn(2, 4, 5, dtype=torch.float64),
        "actions": torch.randn(2, 4, 3, dtype=torch.float64),
        "rewards": torch.randn(2, 4, 1, dtype=torch.float64),
        "returns_to_go": torch.randn(2, 4, 1, dtype=torch.float64),
        "timesteps": torch.arange(4).expand(2, 4),
        "attention_mask": torch.ones(2, 4, dtype=torch.float64),
    }


def layout() -> Inputs:
    boxes = torch.randint(0, 20, (2, LENGTH, 2))
    return {**ids(), "bbox": torch.cat([boxes, boxes + 5], -1)}


# -- configurations ---------------------------------------------------------------------------------------------

ENCODER: Inputs = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
DECODER: Inputs = {**ENCODER, "num_key_value_heads": 2}
SEQ2SEQ: Inputs = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
T5: Inputs = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
VISION: Inputs = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}
AUDIO: Inputs = {
    **{name: value for name, value in ENCODER.items() if name != "max_position_embeddings"},
    "conv_dim": (8, 8),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}
SERIES: Inputs = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    # A dropped layer is missing in the caches of a member.
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
SWIN: Inputs = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "window_size": 2,
}


@dataclass(frozen=True)
class Architecture:
    """An architecture, by the names of its classes in transformers.

    `config` holds keyword arguments of the configuration.
    """

    name: str
    model: str
    config_class: str
    config: dict[str, Any] = field(hash=False)
    inputs: Callable[[], Inputs] = ids
    # Forward also draws random numbers in eval mode.
    draws: bool = False

    def make(self) -> nn.Module:
        """Return a fresh module of float64 numbers in eval mode."""
        import transformers

        config = getattr(transformers, self.config_class)(**self.config)
        module: nn.Module = getattr(transformers, self.model)(config).double().eval()
        for part in module.modules():
            # Layers that start as zeros (layer scales, position biases) would hide what is behind them.
            for parameter in part.parameters(recurse=False):
                if not bool(parameter.detach().any()):
                    nn.init.normal_(parameter, std=0.02)
        return module


def _of(
    name: str,
    model: str,
    config_class: str,
    inputs: Callable[[], Inputs] = ids,
    *,
    draws: bool = False,
    **config: Any,
) -> Architecture:
    return Architecture(name, model, config_class, config, inputs, draws)


NAMED: list[Architecture] = [
    _of("BERT", "BertModel", "BertConfig", **ENCODER),
    _of("RoBERTa", "RobertaModel", "RobertaConfig", **ENCODER),
    _of("DistilBERT", "DistilBertModel", "DistilBertConfig", vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2,
        hidden_dim=24, max_position_embeddings=32),
    _of("ALBERT", "AlbertModel", "AlbertConfig", **ENCODER, embedding_size=8),
    _of("ELECTRA", "ElectraModel", "ElectraConfig", **ENCODER, embedding_size=8),
    _of("DeBERTa v2", "DebertaV2Model", "DebertaV2Config", **ENCODER, relative_attention=True,
        pos_att_type=["p2c", "c2p"]),
    _of("MPNet", "MPNetModel", "MPNetConfig", **ENCODER),
    _of("ModernBERT", "ModernBertModel", "ModernBertConfig", **ENCODER, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, cls_token_id=1, sep_token_id=2, local_attention=4),
    _of("T5", "T5ForConditionalGeneration", "T5Config", ids_and_labels, **T5),
    _of("BART", "BartModel", "BartConfig", **SEQ2SEQ),
    _of("ViT", "ViTModel", "ViTConfig", images(), **VISION),
    _of("DeiT", "DeiTModel", "DeiTConfig", images(), **VISION),
    _of("Swin", "SwinModel", "SwinConfig", images(), **SWIN),
    _of("ConvNeXt", "ConvNextModel", "ConvNextConfig", images(32), hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
        layer_scale_init_value=0.5),
    _of("ResNet", "ResNetModel", "ResNetConfig", images(32), embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    _of("MobileNetV2", "MobileNetV2Model", "MobileNetV2Config", images(64), depth_multiplier=0.25),
    _of("RegNet", "RegNetModel", "RegNetConfig", images(32), embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
        groups_width=4),
    _of("PoolFormer", "PoolFormerModel", "PoolFormerConfig", images(32), hidden_sizes=[8, 16], depths=[1, 1],
        num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1]),
    _of("DINOv2", "Dinov2Model", "Dinov2Config", images(), **VISION),
    _of("BEiT", "BeitModel", "BeitConfig", images(), **VISION, use_relative_position_bias=True),
    _of("EfficientNet", "EfficientNetModel", "EfficientNetConfig", images(32), width_coefficient=0.25,
        depth_coefficient=0.25, hidden_dim=320),
    _of("CLIP", "CLIPModel", "CLIPConfig", images_and_ids(), text_config={**ENCODER, "eos_token_id": 2},
        vision_config=VISION, projection_dim=8),
    _of("SegFormer", "SegformerForSemanticSegmentation", "SegformerConfig", images(32), num_encoder_blocks=2,
        depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8),
    _of("Wav2Vec2", "Wav2Vec2Model", "Wav2Vec2Config", sound(), **AUDIO),
    _of("HuBERT", "HubertModel", "HubertConfig", sound(), **AUDIO),
    _of("Whisper", "WhisperModel", "WhisperConfig", whisper,
        **{**SEQ2SEQ, "num_mel_bins": 4, "max_source_positions": 10, "max_target_positions": 10}),
    _of("PatchTST", "PatchTSTForPrediction", "PatchTSTConfig", patches, num_input_channels=2, context_length=16,
        patch_length=4, patch_stride=4, prediction_length=4, d_model=16, num_attention_heads=2, num_hidden_layers=1,
        ffn_dim=24),
    _of("Time series transformer", "TimeSeriesTransformerModel", "TimeSeriesTransformerConfig", series,
        **{**SERIES, "context_length": 12, "lags_sequence": [1, 2]}),
    _of("Perceiver", "PerceiverModel", "PerceiverConfig", perceiver, d_model=8, d_latents=8, num_latents=4,
        num_blocks=1, num_self_attends_per_block=1, num_self_attention_heads=2, num_cross_attention_heads=2),
    _of("FNet", "FNetModel", "FNetConfig", **{name: value for name, value in ENCODER.items()
        if name != "num_attention_heads"}),
    _of("XLNet", "XLNetModel", "XLNetConfig", vocab_size=VOCABULARY, d_model=16, n_layer=1, n_head=2, d_inner=24),
    _of("Longformer", "LongformerModel", "LongformerConfig", **ENCODER, attention_window=4),
    _of("VideoMAE", "VideoMAEModel", "VideoMAEConfig", video(), **VISION, num_frames=2, tubelet_size=2),
    _of("DPT", "DPTForDepthEstimation", "DPTConfig", images(32), **{**VISION, "image_size": 32, "patch_size": 8,
        "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8, is_hybrid=False),
    _of("YOLOS", "YolosModel", "YolosConfig", images(), **{**VISION, "image_size": [16, 16]}, num_detection_tokens=3),
]  # fmt: skip

FURTHER: list[Architecture] = [
    _of("GPT-2", "GPT2Model", "GPT2Config", vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=32),
    _of("GPT-Neo", "GPTNeoModel", "GPTNeoConfig", vocab_size=VOCABULARY, hidden_size=16, num_layers=2, num_heads=2,
        attention_types=[[["global", "local"], 1]], intermediate_size=24, window_size=4,
        max_position_embeddings=32),
    _of("GPT-NeoX", "GPTNeoXModel", "GPTNeoXConfig", **ENCODER),
    _of("GPT-J", "GPTJModel", "GPTJConfig", vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, rotary_dim=4,
        n_positions=32),
    _of("OPT", "OPTModel", "OPTConfig", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, ffn_dim=24,
        num_attention_heads=2, max_position_embeddings=32, word_embed_proj_dim=16),
    _of("BLOOM", "BloomModel", "BloomConfig", vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2),
    _of("Falcon", "FalconModel", "FalconConfig", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2),
    _of("Llama", "LlamaModel", "LlamaConfig", **DECODER),
    _of("Mistral", "MistralModel", "MistralConfig", **DECODER, sliding_window=4),
    _of("Qwen2", "Qwen2Model", "Qwen2Config", **DECODER),
    _of("Gemma 2", "Gemma2Model", "Gemma2Config", **DECODER, head_dim=8, sliding_window=4),
    _of("Phi", "PhiModel", "PhiConfig", **DECODER),
    _of("OLMo", "OlmoModel", "OlmoConfig", **DECODER),
    _of("Mamba", "MambaModel", "MambaConfig", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1,
        state_size=4),
    # The default kernel does not take float64, with which rows are checked.
    _of("Mixtral (`batched_mm`)", "MixtralModel", "MixtralConfig", **DECODER, num_local_experts=3,
        experts_implementation="batched_mm"),
    _of("CodeGen", "CodeGenModel", "CodeGenConfig", vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=4,
        rotary_dim=4, n_positions=32, n_ctx=32),
    _of("Nystromformer", "NystromformerModel", "NystromformerConfig", **ENCODER, num_landmarks=2,
        segment_means_seq_len=LENGTH),
    _of("BioGPT", "BioGptModel", "BioGptConfig", **ENCODER),
    _of("Pegasus", "PegasusModel", "PegasusConfig", ids_of_both, **SEQ2SEQ),
    _of("mBART", "MBartModel", "MBartConfig", **SEQ2SEQ),
    _of("Marian", "MarianModel", "MarianConfig", ids_of_both, **SEQ2SEQ),
    _of("M2M-100", "M2M100Model", "M2M100Config", ids_of_both, **SEQ2SEQ, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0),
    _of("Funnel", "FunnelModel", "FunnelConfig", vocab_size=VOCABULARY, d_model=16, d_head=8, n_head=2, d_inner=24,
        block_sizes=[1, 1], num_decoder_layers=1),
    _of("SqueezeBERT", "SqueezeBertModel", "SqueezeBertConfig", **ENCODER, embedding_size=16),
    _of("MobileBERT", "MobileBertModel", "MobileBertConfig", **{**ENCODER, "num_hidden_layers": 1},
        embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=1),
    _of("ConvBERT", "ConvBertModel", "ConvBertConfig", **{**ENCODER, "num_attention_heads": 4}, embedding_size=16),
    _of("RemBERT", "RemBertModel", "RemBertConfig", **ENCODER, input_embedding_size=8),
    _of("RoFormer", "RoFormerModel", "RoFormerConfig", **ENCODER, embedding_size=16),
    _of("ESM", "EsmModel", "EsmConfig", **ENCODER, pad_token_id=1, mask_token_id=3),
    _of("Splinter", "SplinterModel", "SplinterConfig", **ENCODER, question_token_id=3),
    _of("LayoutLM", "LayoutLMModel", "LayoutLMConfig", layout, **ENCODER, max_2d_position_embeddings=32),
    _of("Swin v2", "Swinv2Model", "Swinv2Config", images(), **SWIN),
    _of("ConvNeXt v2", "ConvNextV2Model", "ConvNextV2Config", images(32), hidden_sizes=[8, 16], depths=[1, 1],
        num_stages=2),
    _of("LeViT", "LevitModel", "LevitConfig", images(32), image_size=32, hidden_sizes=[8, 16],
        num_attention_heads=[2, 2], depths=[1, 1], key_dim=[4, 4], patch_size=16, drop_path_rate=0,
        mlp_ratio=[2, 2], attention_ratio=[2, 2], down_ops=[["Subsample", 4, 2, 4, 2, 2]]),
    _of("PVT", "PvtModel", "PvtConfig", images(32), image_size=32, num_encoder_blocks=2, depths=[1, 1],
        sequence_reduction_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[4, 2], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2]),
    _of("MobileViT", "MobileViTModel", "MobileViTConfig", images(32), image_size=32, hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16], num_attention_heads=2),
    _of("SigLIP", "SiglipModel", "SiglipConfig", images_and_ids(), text_config={**ENCODER, "projection_size": 16},
        vision_config=VISION),
    _of("Hiera", "HieraModel", "HieraConfig", images(32), image_size=[32, 32], embed_dim=8, depths=[1, 1, 1],
        num_heads=[1, 1, 2], embed_dim_multiplier=2.0, num_query_pool=2, query_stride=[2, 2],
        masked_unit_size=[4, 4], masked_unit_attention=[True, False, False], patch_size=[3, 3],
        patch_stride=[2, 2], patch_padding=[1, 1]),
    _of("WavLM", "WavLMModel", "WavLMConfig", sound(), **AUDIO),
    _of("Audio spectrogram transformer", "ASTModel", "ASTConfig", audio_spectrogram, hidden_size=16,
        num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, patch_size=8, frequency_stride=8,
        time_stride=8, max_length=16, num_mel_bins=16),
    _of("Speech2Text", "Speech2TextModel", "Speech2TextConfig", speech_to_text, **{**SEQ2SEQ,
        "input_feat_per_channel": 4, "num_conv_layers": 1, "conv_kernel_sizes": [3], "conv_channels": 8,
        "max_source_positions": 32, "max_target_positions": 32}),
    _of("Informer", "InformerModel", "InformerConfig", series, draws=True, **{**SERIES, "context_length": 12}),
    _of("Decision transformer", "DecisionTransformerModel", "DecisionTransformerConfig", decisions, state_dim=5,
        act_dim=3, hidden_size=16, max_ep_len=8, n_layer=1, n_head=2, n_positions=32),
    _of("TimeSformer", "TimesformerModel", "TimesformerConfig", video(), **VISION, num_frames=2),
]  # fmt: skip


# Any: the output of a model, or a part of it.
def floats(output: Any) -> list[Tensor]:
    """Return the tensors of an output that have derivatives, without the tensors of its caches."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        found: list[Tensor] = []
        for part in output:
            found += floats(part)
        return found
    return []
