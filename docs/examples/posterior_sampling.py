"""Samples of a posterior by the posteriors library: 256 chains in one stacked tree.

posteriors' algorithms take any pytree of tensors as parameters, so they take our trees.
A stack of chains is one tree, too: the log posterior is mapped over its rows, and each
step of the sampler moves all chains. The model is linear, for which the posterior is
known exactly.

Run it with: python posterior_sampling.py
"""

import posteriors
import torch
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorDict, random

CHAINS, NOISE = 256, 1.0
Batch = tuple[Tensor, Tensor]

apply, params, _ = tdf.functional(nn.Linear(2, 1))
x = random.normal(random.key(0), (100, 2))
y = x @ torch.tensor([[1.0], [-2.0]]) + 0.5
y = y + NOISE * random.normal(random.key(1), y.shape)


def log_posterior(params: TensorDict, batch: Batch) -> Tensor:
    """Return the log posterior of one model, up to a constant."""
    x, y = batch
    log_likelihood = -(apply(params, x) - y).square().sum() / (2 * NOISE**2)
    log_prior = -sum(leaf.square().sum() for leaf in params.leaves()) / 2
    return log_likelihood + log_prior


def of_chains(stacked: TensorDict, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the sum over the chains, whose gradients are those of each, and the parts."""
    each = torch.vmap(log_posterior, in_dims=(0, None))(stacked, batch)
    return each.sum(), each


def main() -> None:
    """Sample, and compare mean and covariance with the exact ones."""
    torch.manual_seed(0)  # posteriors draws from torch's default generator
    sampler = posteriors.sgmcmc.sgld.build(of_chains, lr=5e-4)
    state = sampler.init(params.expand(CHAINS).clone())
    samples = []
    for step in range(400):
        state, values = sampler.update(state, (x, y))
        if step >= 100 and step % 30 == 0:
            samples.append(state.params)
    assert isinstance(state.params, TensorDict)
    assert values.shape == (CHAINS,)

    drawn = tdf.cat(samples)  # a tree again: samples and chains are its rows
    flat = torch.cat([drawn["weight"].flatten(1), drawn["bias"]], 1)
    print(f"{len(drawn)} samples of {CHAINS} chains")

    # The oracle: the exact posterior of Bayesian linear regression.
    inputs = torch.cat([x, torch.ones(len(x), 1)], 1)
    precision = inputs.T @ inputs / NOISE**2 + torch.eye(3)
    covariance = precision.inverse()
    mean = covariance @ inputs.T @ y[:, 0] / NOISE**2
    print(f"mean {flat.mean(0).tolist()}, exact {mean.tolist()}")
    torch.testing.assert_close(flat.mean(0), mean, atol=0.02, rtol=0)
    error = (flat.T.cov() - covariance).norm() / covariance.norm()
    print(f"relative error of the covariance: {error:.2f}")
    assert error < 0.15

    # Predictions of all samples are one call.
    outputs = tdf.Ensemble(apply)(drawn, x)
    spread = tdf.metrics.uncertainty(outputs, kind="regression")["variance"]
    exact = (inputs @ covariance * inputs).sum(1, keepdim=True)
    torch.testing.assert_close(spread, exact, rtol=0.25, atol=0)


if __name__ == "__main__":
    main()
