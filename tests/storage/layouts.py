"""Files of quantized weights as other programs write them: names, dtypes and shapes, and the numbers that they mean."""

import torch

F32, E4M3, E5M2 = torch.float32, torch.float8_e4m3fn, torch.float8_e5m2


def numbers(codes, scale, blocks):
    """Return codes times scale in float64, element by element."""
    places = torch.cartesian_prod(*map(torch.arange, codes.shape)).reshape(-1, codes.dim())
    at = [places[:, i] // block for i, block in enumerate(blocks)]
    return codes.double() * scale.double()[tuple(at)].reshape(codes.shape)


def bits(state):
    """Return dtype, shape and bytes of each leaf."""
    return {
        name: (leaf.dtype, leaf.shape, leaf.contiguous().flatten().view(torch.uint8).tolist())
        for name, leaf in state.items()
    }


def random_codes(generator, shape, dtype=E4M3):
    """Return codes of all sizes that the dtype has."""
    return (torch.randn(shape, generator=generator) * 100).clamp(-448, 448).to(dtype)


def random_scale(generator, shape):
    """Return positive scales."""
    return torch.rand(shape, generator=generator) * 1e-3 + 1e-5


def fp8(name, scale_name, shape, scale_shape, blocks, *, codes_dtype=E4M3, scale_dtype=F32, exponents=False, more=()):
    """Return a function from a seed to (the leaves of a file, the numbers of the codes by name)."""

    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        codes = random_codes(generator, shape, codes_dtype)
        scale = random_scale(generator, scale_shape).to(scale_dtype)
        if exponents:
            scale = scale.view(torch.uint8)
        others = {other: random_scale(generator, ()) for other in more}
        state = {name: codes, scale_name: scale, **others, "norm.weight": torch.randn(4, generator=generator)}
        factors = (scale.double() - 127).exp2() if exponents else scale.to(F32)
        whole = factors.reshape([*scale.shape, *[1] * (len(shape) - scale.dim())])
        return state, {name: numbers(codes, whole, blocks)}

    return make


WEIGHT, INV, SCALE = "q.weight", "q.weight_scale_inv", "q.weight_scale"
FP8 = {
    "blocks": fp8(WEIGHT, INV, (256, 128), (2, 1), (128, 128)),
    "blocks at the edge": fp8(WEIGHT, INV, (130, 257), (2, 3), (128, 128)),
    "blocks that divide too": fp8(WEIGHT, INV, (192, 8), (2, 1), (128, 128)),
    "blocks of 32": fp8(WEIGHT, INV, (2, 96), (2, 3), (1, 32)),
    "one block": fp8(WEIGHT, INV, (8, 6), (1, 1), (8, 6)),
    "bfloat16 scales": fp8(WEIGHT, INV, (130, 4), (2, 1), (128, 4), scale_dtype=torch.bfloat16),
    "scales of powers of two": fp8(WEIGHT, INV, (130, 4), (2, 1), (128, 4), scale_dtype=torch.float8_e8m0fnu),
    "exponents": fp8(WEIGHT, INV, (130, 4), (2, 1), (128, 4), scale_dtype=torch.float8_e8m0fnu, exponents=True),
    "experts in blocks": fp8("e.down", "e.down_scale_inv", (3, 130, 8), (3, 2, 1), (1, 128, 8)),
    "a scale for each expert": fp8("e.up", "e.up_scale", (3, 5, 8), (3,), (1, 5, 8)),
    "a scale for each output of experts": fp8("e.up", "e.up_scale", (3, 5, 8), (3, 1, 8), (1, 5, 1)),
    "tensor": fp8(WEIGHT, SCALE, (5, 6), (), (5, 6), more=["q.input_scale"]),
    "tensor, one element": fp8(WEIGHT, SCALE, (5, 6), (1,), (5, 6), codes_dtype=E5M2),
    "rows": fp8(WEIGHT, SCALE, (5, 6), (5, 1), (1, 6)),
    "rows, one dimension": fp8(WEIGHT, SCALE, (5, 6), (5,), (1, 6)),
    "rows of a square": fp8(WEIGHT, SCALE, (6, 6), (6,), (1, 6)),
    "convolution": fp8(WEIGHT, SCALE, (5, 2, 3, 3), (5, 1, 1, 1), (1, 2, 3, 3)),
    "ComfyUI": fp8(WEIGHT, "q.scale_weight", (5, 6), (), (5, 6), more=["q.scale_input"]),
    "Mistral": fp8("wq.weight", "wq.qscale_weight", (5, 6), (), (5, 6), more=["wq.qscale_act"]),
    "DeepSeek's own": fp8(WEIGHT, "q.scale", (130, 4), (2, 1), (128, 4)),
}


HALF, BYTE, INT = torch.float16, torch.uint8, torch.int32


def integers(codes_name, codes_dtype, shape, **beside):
    """Return a function from a seed to the leaves of a file with codes that no float dtype holds."""

    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 100, shape, generator=generator)
        is_pair = codes_dtype is torch.float4_e2m1fn_x2
        state = {codes_name: codes.to(BYTE).view(codes_dtype) if is_pair else codes.to(codes_dtype)}
        for name, (size, dtype) in beside.items():
            leaf = torch.rand(size, generator=generator) * 3 + 0.1
            state[name] = leaf.to(dtype)
        return {**state, "norm.weight": torch.randn(4, generator=generator)}

    return make


# Codes that are not dequantized: the name of the codes, and a file.
OTHERS = {
    "bitsandbytes int8": (WEIGHT, integers(WEIGHT, torch.int8, (4, 6), **{"q.SCB": ((4,), F32)})),
    "bitsandbytes nf4": (
        WEIGHT,
        integers(
            WEIGHT,
            BYTE,
            (12, 1),
            **{
                "q.weight.absmax": ((2,), F32),
                "q.weight.quant_map": ((16,), F32),
                "q.weight.quant_state.bitsandbytes__nf4": ((9,), BYTE),
            },
        ),
    ),
    "bitsandbytes nf4 in bfloat16": (
        WEIGHT,
        integers(
            WEIGHT, torch.bfloat16, (6, 1), **{"q.weight.absmax": ((2,), F32), "q.weight.quant_map": ((16,), F32)}
        ),
    ),
    "compressed-tensors int8": (
        WEIGHT,
        integers(WEIGHT, torch.int8, (4, 6), **{SCALE: ((4, 1), F32), "q.weight_zero_point": ((4, 1), torch.int8)}),
    ),
    "compressed-tensors int4": (
        "q.weight_packed",
        integers("q.weight_packed", INT, (4, 2), **{SCALE: ((4, 1), HALF), "q.weight_shape": ((2,), torch.int64)}),
    ),
    "GPTQ": (
        "q.qweight",
        integers("q.qweight", INT, (2, 4), **{"q.scales": ((1, 4), HALF), "q.qzeros": ((1, 1), INT)}),
    ),
    "MXFP4": ("e.up_blocks", integers("e.up_blocks", BYTE, (2, 3, 4), **{"e.up_scales": ((2, 3), BYTE)})),
    "NVFP4": (
        WEIGHT,
        integers(WEIGHT, BYTE, (4, 8), **{SCALE: ((4, 1), E4M3), "q.weight_scale_2": ((), F32)}),
    ),
    "NVFP4 in float4": (
        WEIGHT,
        integers(WEIGHT, torch.float4_e2m1fn_x2, (4, 8), **{SCALE: ((4, 1), E4M3), "q.weight_scale_2": ((), F32)}),
    ),
    "MLX": (WEIGHT, integers(WEIGHT, torch.uint32, (4, 2), **{"q.scales": ((4, 1), HALF), "q.biases": ((4, 1), HALF)})),
    "FP8 with zero points": (
        WEIGHT,
        integers(WEIGHT, E4M3, (4, 6), **{SCALE: ((4, 1), F32), "q.weight_zero_point": ((4, 1), torch.int8)}),
    ),
    "FP8 in unknown blocks": (WEIGHT, integers(WEIGHT, E4M3, (100, 4), **{INV: ((3, 1), F32)})),
    "FP8 of TensorRT-LLM": (WEIGHT, integers(WEIGHT, E4M3, (4, 6), **{"q.weights_scaling_factor": ((1,), F32)})),
    "FP8 with a divisor": (WEIGHT, integers(WEIGHT, E4M3, (4, 6), **{"q.weight_descale": ((1,), F32)})),
    "FP8 with a scale below the weight": (WEIGHT, integers(WEIGHT, E4M3, (4, 6), **{"q.weight.scale": ((), F32)})),
    "FP8 with the largest value": (WEIGHT, integers(WEIGHT, E4M3, (4, 6), **{"q.weight_amax": ((), F32)})),
    "FP8 with scales of MLX": (WEIGHT, integers(WEIGHT, E4M3, (4, 6), **{"q.scales": ((4, 1), F32)})),
    "FP8 with a scale of another name": (
        "q.qweight",
        integers("q.qweight", E4M3, (4, 6), **{"q.quant_scale_value": ((4, 1), F32)}),
    ),
    "EETQ": ("q.qweight", integers("q.qweight", torch.int8, (4, 6), **{"q.weight_scales": ((6,), HALF)})),
    "EETQ of transformers": (WEIGHT, integers(WEIGHT, torch.int8, (4, 6), **{"q.weight_scales": ((6,), HALF)})),
    "Metal": (
        WEIGHT,
        integers(WEIGHT, torch.uint32, (4, 2), **{"q.scales": ((4, 1), F32), "q.qbiases": ((4, 1), F32)}),
    ),
    "Gemma": (
        WEIGHT,
        integers(
            WEIGHT,
            BYTE,
            (4, 3),
            **{SCALE: ((4, 1), F32), "q.input_activation_scale": ((), F32), "q.output_activation_scale": ((), F32)},
        ),
    ),
    "torchao int4": (
        "q._weight_qdata",
        integers("q._weight_qdata", INT, (4, 6), **{"q._weight_scale_and_zero": ((1, 4, 2), F32)}),
    ),
    "torchao NVFP4": (
        "q._weight_qdata",
        integers(
            "q._weight_qdata",
            BYTE,
            (4, 8),
            **{"q._weight_scale": ((4, 1), E4M3), "q._weight_per_tensor_scale": ((), F32)},
        ),
    ),
    "TensorRT Model Optimizer int4": (
        WEIGHT,
        integers(
            WEIGHT,
            BYTE,
            (4, 8),
            **{"q.weight_quantizer._scale": ((4, 1), F32), "q.weight_quantizer._double_scale": ((), F32)},
        ),
    ),
    "FP8 of TensorRT Model Optimizer": (
        WEIGHT,
        integers(WEIGHT, E4M3, (4, 8), **{"q.weight_quantizer._scale": ((), F32)}),
    ),
    "Nunchaku": (
        "q.qweight",
        integers(
            "q.qweight",
            torch.int8,
            (4, 6),
            **{
                "q.wscales": ((1, 4), HALF),
                "q.smooth_factor": ((6,), HALF),
                "q.proj_down": ((6, 2), HALF),
                "q.proj_up": ((4, 2), HALF),
            },
        ),
    ),
    "VPTQ": ("q.indices", integers("q.indices", INT, (4, 6), **{"q.centroids.weight": ((4, 2), HALF)})),
    "HIGGS": (
        WEIGHT,
        integers(WEIGHT, torch.int16, (4, 6), **{"q.scales": ((4,), HALF), "q.tables": ((4, 2), HALF)}),
    ),
    "int8 by its name": ("q.weight_int8", integers("q.weight_int8", torch.int8, (4, 6), **{SCALE: ((4, 1), F32)})),
}
