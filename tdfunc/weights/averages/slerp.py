"""`slerp`: spherical interpolation from the base to one model."""

from torch import Tensor

from tdfunc.weights.averages.sphere import arc, units
from tdfunc.weights.method import method


@method(
    "sin((1 - w) a) / sin(a) b + sin(w a) / sin(a) x, with a the angle between b and x",
    source="Shoemake, Animating rotation with quaternion curves (1985)",
    most=1,
    weight="t",
)
def slerp(base: Tensor, stacked: Tensor, weights: Tensor) -> Tensor:
    """Merge by a point on the arc from the base (weight 0) to the model (weight 1).

    Each leaf is one vector. Two that are nearly parallel, with a cosine above 0.9995, are merged along the line.

    Args:
        base: The start.
        stacked: One model, the end.
        weights: The place between them.

    Source:
        Shoemake, "Animating rotation with quaternion curves" (1985).

    Examples:
        >>> base, end = TensorDict({"w": torch.tensor([1.0, 0.0])}), TensorDict({"w": torch.tensor([[0.0, 1.0]])}, [1])
        >>> tdf.weights.slerp(base, end, [0.5])["w"]
        tensor([0.7071, 0.7071])
    """
    a = base.reshape(-1)
    b = stacked.reshape(-1)
    cos = (units(a, 1e-8)[0] * units(b, 1e-8)[0]).sum()
    return arc(weights[0], a, b, cos, cos.abs() > 0.9995).reshape(base.shape)
