"""`nearswap`: the numbers of a second model that are near the numbers of the base."""

from torch import Tensor

from tdfunc.weights.method import method


@method("b + s d, with s = min(1, w / |d|)", source="alchemonaut, QuartetAnemoi-70B (2024)", most=1, weight="t")
def nearswap(base: Tensor, stacked: Tensor, weights: Tensor) -> Tensor:
    """Merge by moving each number of the base towards the model by at most the weight.

    Args:
        base: The first model.
        stacked: One model.
        weights: The largest distance.

    Source:
        The model card of alchemonaut/QuartetAnemoi-70B-t0.0001.

    Examples:
        >>> base, other = TensorDict({"w": torch.zeros(2)}), TensorDict({"w": torch.tensor([[0.1, 4.0]])}, [1])
        >>> tdf.weights.nearswap(base, other, [0.5])["w"]
        tensor([0.1000, 0.5000])
    """
    delta = stacked[0] - base
    return base + (weights[0] / delta.abs().clamp(min=1e-6)).clamp(0, 1) * delta
